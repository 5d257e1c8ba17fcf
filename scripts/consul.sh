#!/usr/bin/env bash
# Prints the path of a Consul server, which it builds if there is none:
# ONEJOB_CONSUL_BIN, else PATH's if it is 1.14 or newer, else the one in the cache,
# ${XDG_CACHE_HOME:-$HOME/.cache}/onejob/consul-VERSION/consul. To build it takes
# Go and some minutes, once per version; the version is that of tools/consul/go.mod.
# The path is all of stdout; what is happening goes to stderr.
set -euo pipefail

say() { echo "consul.sh: $*" >&2; }

# new_enough PATH: is this Consul 1.14 or newer?
new_enough() {
  local major minor
  IFS=. read -r major minor _ < <("$1" version 2>/dev/null | sed -n 's/^Consul v//p') || return 1
  ((major > 1 || (major == 1 && minor >= 14)))
}

if [[ -n ${ONEJOB_CONSUL_BIN:-} ]]; then
  if ! path=$(command -v "$ONEJOB_CONSUL_BIN"); then
    say "ONEJOB_CONSUL_BIN is $ONEJOB_CONSUL_BIN, which cannot be run"
    exit 1
  fi
  echo "$path"
  exit
fi

if path=$(command -v consul); then
  if new_enough "$path"; then
    echo "$path"
    exit
  fi
  say "$path is older than 1.14 and of no use here; looking further"
fi

module=$(cd "$(dirname "${BASH_SOURCE[0]}")/../tools/consul" && pwd)
version=$(sed -nE 's/^(require)?[[:space:]]*github\.com\/hashicorp\/consul v([^[:space:]]+).*/\2/p' "$module/go.mod")
if [[ -z $version ]]; then
  say "found no version of github.com/hashicorp/consul in $module/go.mod"
  exit 1
fi
folder=${XDG_CACHE_HOME:-$HOME/.cache}/onejob/consul-$version
binary=$folder/consul

if [[ -x $binary ]]; then
  echo "$binary"
  exit
fi
if ! command -v go >/dev/null; then
  say "there is no Consul here, and no Go to build one: install either and run this again"
  exit 1
fi

# One builds, the others wait for it.
mkdir -p "$folder"
exec 9>"$folder/lock"
if ! flock --nonblock 9; then
  say "another build of Consul $version is running; waiting for it"
  flock 9
fi
if [[ -x $binary ]]; then
  echo "$binary"
  exit
fi

# Whoever is given the lock's descriptor would keep the lock, hence the 9>&-.
say "building Consul $version into $folder; this takes minutes, and is done once"
SECONDS=0
tick() {
  trap 'kill "$!"; exit' TERM
  while true; do
    sleep 15 &
    wait "$!"
    say "still building Consul $version, $SECONDS s so far"
  done
}
tick 9>&- &
ticker=$!
fresh=$binary.new.$$
trap 'kill "$ticker" 2>/dev/null || true; rm -f "$fresh"' EXIT

# No debugger looks at it; and the clients of Envoy, Kubernetes and AWS, a third of the packages, are
# linked and never run: they are compiled without being optimized.
unused='-dwarf=false -N -l'
if ! (cd "$module" && go build -trimpath -ldflags='-s -w' -gcflags='all=-dwarf=false' \
  -gcflags="github.com/envoyproxy/...=$unused" -gcflags="k8s.io/...=$unused" -gcflags="github.com/aws/...=$unused" \
  -o "$fresh" github.com/hashicorp/consul) >&2 9>&-; then
  say "Consul could not be built, for the reason above; once that is mended, run this again," \
    "or install Consul 1.14 or newer"
  exit 1
fi
mv "$fresh" "$binary"
say "built Consul $version in $SECONDS s"
echo "$binary"
