# syntax=docker/dockerfile:1
# The static binary on an empty root. `make image` builds the same image without a container engine.

# The SBOM that a build attaches is read from Cargo.lock; `make sbom` lists what is in the binary.
ARG BUILDKIT_SBOM_SCAN_CONTEXT=true

# Compiles on the machine that builds, whichever the image is for.
FROM --platform=$BUILDPLATFORM rust:1.95-slim-trixie AS build
ARG BUILDARCH
ARG TARGETARCH
RUN case $BUILDARCH-$TARGETARCH in \
      amd64-arm64) cross="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;; \
      arm64-amd64) cross="gcc-x86-64-linux-gnu libc6-dev-amd64-cross" ;; \
    esac \
    && apt-get update && apt-get install --yes --no-install-recommends make $cross \
    && rustup target add x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
WORKDIR /src
COPY . .
ARG GROUNDCREW_COMMIT=unknown
# The caches only save time.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/target,id=groundcrew-${TARGETARCH} \
    make ship ARCH=$TARGETARCH COMMIT=$GROUNDCREW_COMMIT CARGO_TARGET_DIR=/target \
    && cp /target/*/ship/groundcrew /groundcrew

FROM scratch
COPY --from=build /groundcrew /groundcrew
USER 65532:65532
ENTRYPOINT ["/groundcrew"]
