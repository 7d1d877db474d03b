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

.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

fuzz: ## Fuzz the parser of endpoints for a minute; needs a nightly compiler and cargo-fuzz
	mkdir -p fuzz/corpus/endpoint
	$(CARGO) +nightly fuzz run -s none endpoint fuzz/corpus/endpoint fuzz/seeds/endpoint -- -max_total_time=60

fmt: ## Format the code
	$(CARGO) fmt --all

testbed: build ## Build the real Kubernetes the tests run on (once; cached)
	$(TESTBED) build
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then $(TESTBED) host-packages --install; fi

chart: build ## Write the chart's generated files: rights, values reference, golden renders
	GROUNDCREW_UPDATE=1 $(CARGO) test -p groundcrew-testbed --test chart -- generated render::the_render

deploy: ## Install or upgrade by helm; IMG=repository:tag
	img='$(IMG)'; helm upgrade --install groundcrew deploy/chart --namespace $(NAMESPACE) --create-namespace --wait \
	  --set image.repository="$${img%:*}" --set-string image.tag="$${img##*:}" $(HELM_ARGS)

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

.PHONY: help build test demo image sbom lint fmt testbed chart deploy undeploy deploy-samples undeploy-samples \
	generate-certs clean
