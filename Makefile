# Thin recipes: each target is one or two commands you could type yourself.
SHELL := /bin/bash
CARGO ?= cargo
TESTBED = $(CARGO) run -q -p groundcrew-testbed --bin testbed --

# What the operator did in the tests, to be compared with what it may do.
RIGHTS = $(CURDIR)/target/rights

# Where `deploy` installs, what it installs, and more flags for helm, such as -f values.yaml.
NAMESPACE ?= groundcrew-system
IMG ?= groundcrew:0.1.0
HELM_ARGS ?=
# The host name by which the API server calls the webhook.
WEBHOOK_HOST ?= groundcrew-webhook.$(NAMESPACE).svc
CERTS ?= _certs
SAMPLES ?= warmup/http.yaml sizing/template.yaml sizing/daemonset.yaml

# Which machines the image is for, this one unless told: amd64, arm64 or both. For another machine than this one,
# `rustup target add` brings the standard library, and Debian's gcc-aarch64-linux-gnu or gcc-x86-64-linux-gnu a linker.
HOST_ARCH := $(if $(filter aarch64 arm64,$(shell uname -m)),arm64,amd64)
ARCH ?= $(HOST_ARCH)
ifeq ($(HOST_ARCH),amd64)
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER ?= aarch64-linux-gnu-gcc
else
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER ?= x86_64-linux-gnu-gcc
endif
TRIPLES = $(patsubst arm64,aarch64-unknown-linux-gnu,$(patsubst amd64,x86_64-unknown-linux-gnu,$(ARCH)))
SHIPPED = $(addsuffix /ship/groundcrew,$(TRIPLES))
# Of the sources in the image; says so when they were changed since.
COMMIT ?= $(shell git describe --always --dirty --abbrev=12 --exclude='*')
# Panic messages tell paths. Those of this machine are replaced, so that the same sources give the same bytes wherever
# they lie; the last that fits counts.
CARGO_HOME ?= $(HOME)/.cargo
CARGO_TARGET_DIR ?= $(CURDIR)/target
HIDDEN_PATHS = $(CARGO_HOME)=/cargo $(CURDIR)=/src $(abspath $(CARGO_TARGET_DIR))=/target

.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## Build groundcrew and the testbed
	$(CARGO) build --workspace

# One cluster at a time: a webhook that answers too late is skipped by design, and a starved machine makes it late.
SUITE = RUST_TEST_THREADS=1 GROUNDCREW_RIGHTS_DIR=$(RIGHTS) $(CARGO) test --workspace --no-fail-fast

test: build testbed ## Run every test, on a real Kubernetes
	rm -rf $(RIGHTS)
	$(SUITE)
	$(TESTBED) rights $(RIGHTS)

retest: build testbed ## Run some tests again after `make test`; TESTS="name name"
	$(SUITE) -- --exact $(TESTS)
	$(TESTBED) rights $(RIGHTS)

demo: build ## Stamp a pod on a real control plane and watch it happen
	$(TESTBED) build --layer 2
	$(CARGO) run -q -p groundcrew-testbed --example demo

ship: ## Build the image's static binary; ARCH="amd64 arm64" for both machines
	GROUNDCREW_COMMIT=$(COMMIT) $(CARGO) build --locked --profile ship -p groundcrew $(addprefix --target ,$(TRIPLES)) \
	  --config "target.'cfg(all())'.rustflags = [$(foreach path,$(HIDDEN_PATHS),'--remap-path-prefix=$(path)',)]"

image: ship ## Write the image as an OCI archive, without a container engine
	$(TESTBED) image $(CARGO_TARGET_DIR)/groundcrew.oci.tar $(addprefix $(CARGO_TARGET_DIR)/,$(SHIPPED))

# From what the Dockerfile gets to see, with another home of cargo but the same downloads.
reproducible: ship ## Build the binary again at another place and compare; takes as long again
	there=$$(mktemp -d) && trap 'rm -rf $$there' EXIT && mkdir $$there/src $$there/home && \
	git ls-files -z Makefile Cargo.toml Cargo.lock .cargo crates | xargs -0 cp --parents -t $$there/src && \
	ln -s $(CARGO_HOME)/registry $$there/home/registry && (cd $(CARGO_TARGET_DIR) && sha256sum $(SHIPPED)) >$$there/sums && \
	$(MAKE) -C $$there/src ship COMMIT=$(COMMIT) CARGO_HOME=$$there/home CARGO_TARGET_DIR=$$there/target && \
	cat $$there/sums && cd $$there/target && sha256sum --check $$there/sums

sbom: ## List what the binary is made of, as CycloneDX
	$(TESTBED) sbom $(addprefix --target ,$(TRIPLES)) $(CARGO_TARGET_DIR)/groundcrew.cdx.json

lint: ## Formatting, clippy, dependency rules
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny check bans licenses sources; \
	else echo "cargo-deny is not installed: dependency rules not checked"; fi

fuzz: ## Fuzz the parser of endpoints for a minute; needs a nightly compiler and cargo-fuzz
	mkdir -p fuzz/corpus/endpoint
	$(CARGO) +nightly fuzz run -s none endpoint fuzz/corpus/endpoint fuzz/seeds/endpoint -- -max_total_time=60

fmt: ## Format the code
	$(CARGO) fmt --all

testbed: build ## Build the real Kubernetes the tests run on (once; cached)
	$(TESTBED) build
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then $(TESTBED) host-packages --install; fi

# In order: renders are made from the rights.
chart: build ## Write the chart's generated files: rights, values reference, golden renders
	GROUNDCREW_UPDATE=1 $(CARGO) test -p groundcrew-testbed --test chart -- --test-threads=1 generated render::the_render

deploy: ## Install or upgrade by helm; IMG=repository[:tag]
	img='$(IMG)'; case "$${img##*/}" in *:*) tag="$${img##*:}" ;; *) tag= ;; esac; \
	helm upgrade --install groundcrew deploy/chart --namespace $(NAMESPACE) --create-namespace --wait \
	  --set image.repository="$${img%:$$tag}" --set-string image.tag="$$tag" $(HELM_ARGS)

undeploy: ## Remove it, after it has taken back what it did; custom resources stay
	helm uninstall groundcrew --namespace $(NAMESPACE) --wait

deploy-samples: ## Apply some samples; SAMPLES names them
	kubectl apply $(addprefix -f deploy/samples/,$(SAMPLES))

undeploy-samples: ## Delete them again
	kubectl delete --ignore-not-found $(addprefix -f deploy/samples/,$(SAMPLES))

generate-certs: ## Make a CA and a webhook certificate by hand, in _certs; the CA's key is thrown away
	mkdir -p $(CERTS) && key=$$(mktemp) && trap 'rm -f $$key' EXIT && \
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj '/CN=groundcrew by hand' \
	  -keyout $$key -out $(CERTS)/ca.crt && \
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj '/CN=$(WEBHOOK_HOST)' \
	  -addext 'subjectAltName=DNS:$(WEBHOOK_HOST)' -addext 'basicConstraints=critical,CA:FALSE' \
	  -CA $(CERTS)/ca.crt -CAkey $$key -keyout $(CERTS)/tls.key -out $(CERTS)/tls.crt

clean: ## Remove what cargo built; the testbed's cache stays
	$(CARGO) clean

.PHONY: help build test retest demo ship image reproducible sbom lint fuzz fmt testbed chart deploy undeploy \
	deploy-samples undeploy-samples generate-certs clean
