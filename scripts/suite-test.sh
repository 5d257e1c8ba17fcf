#!/usr/bin/env bash
# Runs the tests of packages inside another release of Debian, with its Postgres, RabbitMQ and
# pgbouncer: suite-test.sh SUITE PACKAGE... The release is put into a folder of the cache by
# debootstrap, once, and entered with chroot, so this is for root. Consul is the host's.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian.sh

suite=$1
shift
cache=${XDG_CACHE_HOME:-$HOME/.cache}/onejob
there=$cache/debian-$suite
[[ $(id -u) == 0 ]] || { say "this needs root, for chroot"; exit 1; }
consul=$(scripts/consul.sh)

if [[ ! -e $there/complete ]]; then
  command -v debootstrap >/dev/null || install_packages debootstrap
  # A release that is newer than debootstrap is made as the newest one is.
  scripts=/usr/share/debootstrap/scripts
  [[ -e $scripts/$suite ]] || ln -s sid "$scripts/$suite"
  mkdir -p "$cache"
  rm -rf --one-file-system "$there"
  debootstrap --variant=minbase "$suite" "$there" http://deb.debian.org/debian >&2
  printf '#!/bin/sh\nexit 101\n' >"$there/usr/sbin/policy-rc.d" # its packages start no servers
  chmod 755 "$there/usr/sbin/policy-rc.d"
  packages=(postgresql rabbitmq-server pgbouncer gcc libc6-dev perl)
  chroot "$there" env DEBIAN_FRONTEND=noninteractive LC_ALL=C \
    apt-get -q -y install --no-install-recommends "${packages[@]}" >&2
  touch "$there/complete"
fi

# Without cgo they need nothing of the release that they run in.
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
CGO_ENABLED=0 go test -pgo=off -vet=off -c -o "$built/" "$@"

# The release may lack what Consul is linked with, so that it brings the host's.
libc=$(ldd "$consul" 2>/dev/null | awk '$1 == "libc.so.6" { print $3 }' || true)
loader=$(ldd "$consul" 2>/dev/null | awk '$1 ~ /^\/.*\/ld-/ { print $1 }' || true)
linked=
[[ -z $libc ]] || linked="/host$(readlink -f "$loader") --library-path /host$(dirname "$(readlink -f "$libc")")"
printf '#!/bin/sh\nexec %s /host%s "$@"\n' "$linked" "$consul" >"$built/consul"
chmod 755 "$built" "$built/consul"

GO=$(go env GOROOT GOMODCACHE GOCACHE) # some tests build programs
export GO CGO_ENABLED=0 PATH=$PATH:$(go env GOROOT)/bin

# enter COMMAND...: in the release, in a mount namespace of its own, with what tests need of here.
enter() {
  unshare --mount bash -c '
    set -euo pipefail
    there=$1 && shift
    mkdir -p "$there/host"
    mount --bind / "$there/host"
    for shared in /proc /dev /tmp "$PWD" $GO; do
      mkdir -p "$there$shared"
      mount --rbind "$shared" "$there$shared"
    done
    exec chroot "$there" "$@"' enter "$there" env ONEJOB_CONSUL_BIN="$built/consul" "$@"
}

enter sh -c '. /etc/os-release && echo "$PRETTY_NAME"; /usr/lib/postgresql/*/bin/postgres --version
  dpkg-query -Wf "\${Package} \${Version}\n" rabbitmq-server pgbouncer'
status=0
while read -r package folder; do
  began=$SECONDS
  enter env -C "$folder" "$built/$(basename "$package").test" -test.timeout 40m ${RUN:+-test.run "$RUN"} || status=1
  echo "$package: $((SECONDS - began)) s"
done < <(go list -f '{{.ImportPath}} {{.Dir}}' "$@")
exit "$status"
