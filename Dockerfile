# The daemon and nothing else: docker build -t onejob .
# No syntax line and no cache mounts, so that the classic builder builds it too.

FROM golang:1.26-bookworm AS build
WORKDIR /src

# Modules change seldom: they are a layer of their own.
COPY go.mod go.sum ./
RUN go mod download

COPY . .

# What "onejob version" prints. The checkout's commit, unless both are given: make image.
ARG VERSION
ARG COMMIT
# Such as -pgo=off, where the time to build matters more than that of a task.
ARG GOFLAGS
RUN ref=$(sed -n 's/^ref: //p' .git/HEAD 2>/dev/null || true) \
 && commit=${COMMIT:-$(cat ".git/${ref:-HEAD}" 2>/dev/null || sed -n "s|^\([0-9a-f]*\) $ref\$|\1|p" .git/packed-refs 2>/dev/null || true)} \
 && CGO_ENABLED=0 go build -trimpath -buildvcs=false -gcflags=all=-dwarf=false -o /onejob \
      -ldflags="-s -w -X onejob/internal/cli.release=${VERSION} -X onejob/internal/cli.commit=${commit}" ./cmd/onejob


FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates tzdata \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --home-dir /var/lib/onejob --shell /usr/sbin/nologin onejob
COPY --from=build /onejob /usr/local/bin/onejob

# A number, so that it can be seen from outside that this is not root.
USER 10001:10001
WORKDIR /var/lib/onejob

# In the environment, so that the health check asks where the daemon listens.
ENV ONEJOB_HTTP_LISTEN=:8080
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 CMD ["/usr/local/bin/onejob", "health"]

ENTRYPOINT ["/usr/local/bin/onejob"]
CMD ["serve"]
