# docker buildx bake: both platforms, with an SBOM and provenance attached.
variable "IMAGE" { default = "groundcrew" }
variable "VERSION" { default = "dev" }
variable "GROUNDCREW_COMMIT" { default = "unknown" }

group "default" { targets = ["groundcrew"] }

target "groundcrew" {
  dockerfile = "Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${IMAGE}:${VERSION}"]
  args = {
    GROUNDCREW_COMMIT = GROUNDCREW_COMMIT
    # Timestamps inside the image are all the same, so that two builds give the same digest.
    SOURCE_DATE_EPOCH = "0"
  }
  attest = ["type=sbom", "type=provenance,mode=max"]
  output = ["type=image,rewrite-timestamp=true"]
}
