# Thin recipes: each target is one or two commands you could type yourself.
SHELL := /bin/bash
CARGO ?= cargo
TESTBED = $(CARGO) run -q -p groundcrew-testbed --bin testbed --

# What the operator did in the tests, to be compared with what it may do.
RIGHTS = $(CURDIR)/target/rights

.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## Build groundcrew and the testbed
	$(CARGO) build --workspace

# One cluster at a time: a webhook that answers too late is skipped by design, and a starved machine makes it late.
test: build testbed ## Run every test, on a real Kubernetes
	rm -rf $(RIGHTS)
	RUST_TEST_THREADS=1 GROUNDCREW_RIGHTS_DIR=$(RIGHTS) $(CARGO) test --workspace
	$(TESTBED) rights $(RIGHTS)

demo: build ## Stamp a pod on a real control plane and watch it happen
	$(TESTBED) build --layer 2
	$(CARGO) run -q -p groundcrew-testbed --example demo

image: ## Write the image as an OCI archive, without a container engine
	$(CARGO) build --locked --profile ship -p groundcrew
	$(TESTBED) image target/groundcrew.oci.tar

sbom: ## List every dependency of the binary, as CycloneDX
	$(CARGO) cyclonedx --manifest-path crates/operator/Cargo.toml --format json --override-filename groundcrew.cdx

lint: ## Formatting, clippy, dependency rules
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny check bans licenses sources; \
	else echo "cargo-deny is not installed: dependency rules not checked"; fi

fmt: ## Format the code
	$(CARGO) fmt --all

testbed: build ## Build the real Kubernetes the tests run on (once; cached)
	$(TESTBED) build
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then $(TESTBED) host-packages --install; fi

clean: ## Remove what cargo built; the testbed's cache stays
	$(CARGO) clean

.PHONY: help build test demo image sbom lint fmt testbed clean
