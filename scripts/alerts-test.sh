#!/usr/bin/env bash
# Checks the alerts of deploy/prometheus with promtool, which it installs with apt-get if
# there is none.
set -euo pipefail
cd "$(dirname "$0")/../deploy/prometheus"
. ../../scripts/debian.sh

if ! command -v promtool >/dev/null; then
  if ! can_install; then
    say "there is no promtool here and this script cannot install it: it comes with Prometheus"
    exit 1
  fi
  # Without its service: nobody asked for a Prometheus that runs.
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  root apt-get -q update >&2
  (cd "$folder" && root apt-get -q download prometheus >&2 && dpkg-deb -x prometheus_*.deb .)
  PATH=$folder/usr/bin:$PATH
fi
promtool check rules alerts.yaml
promtool test rules alerts_test.yaml
