# The static binary on an empty root. `make image` builds the same image without a container engine.
# syntax=docker/dockerfile:1
FROM rust:1.95-slim-trixie AS build
ARG GROUNDCREW_COMMIT=unknown
ENV GROUNDCREW_COMMIT=${GROUNDCREW_COMMIT}
WORKDIR /src
COPY . .
# The same sources at the same place with the same compiler give the same bytes; the caches only save time.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,id=groundcrew-${TARGETARCH} \
    cargo build --locked --profile ship -p groundcrew \
    && cp target/*/ship/groundcrew /groundcrew

FROM scratch
COPY --from=build /groundcrew /groundcrew
USER 65532:65532
ENTRYPOINT ["/groundcrew"]
