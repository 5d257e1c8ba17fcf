#!/usr/bin/env bash
# Prints the path of a Chromium that runs without a display, which it installs with
# apt-get if there is none: ONEJOB_CHROMIUM_BIN, else the first of chromium-headless-shell,
# chromium, chromium-browser and google-chrome in PATH. No browser is started.
# The path is the last line of stdout; what is happening goes to stderr.
set -euo pipefail

say() { echo "chromium.sh: $*" >&2; }

# find_chromium prints the path.
find_chromium() {
  local name
  for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v "$name" && return
  done
  return 1
}

if [[ -n ${ONEJOB_CHROMIUM_BIN:-} ]]; then
  if [[ ! -x $ONEJOB_CHROMIUM_BIN ]]; then
    say "ONEJOB_CHROMIUM_BIN is $ONEJOB_CHROMIUM_BIN, which cannot be run"
    exit 1
  fi
  echo "$ONEJOB_CHROMIUM_BIN"
  exit
fi
if find_chromium; then
  exit
fi

can_install=false
as_root=()
if [[ $(id -u) == 0 ]]; then
  can_install=true
elif sudo -n true 2>/dev/null; then
  can_install=true
  as_root=(sudo -n)
fi
if ! $can_install || ! command -v apt-get >/dev/null; then
  say "there is no Chromium here and this script cannot install it: install your distribution's" \
    "chromium, or set ONEJOB_CHROMIUM_BIN to the path of one"
  exit 1
fi

# apt ARGUMENTS...: apt-get without questions, and with its chatter on stderr.
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" >&2; }

say "installing chromium-headless-shell, or chromium, and fonts"
apt update || say "apt-get update failed; trying with the package lists that are there"
apt install --no-install-recommends chromium-headless-shell fonts-dejavu-core ||
  apt install --no-install-recommends chromium fonts-dejavu-core || say "apt-get install failed"

if ! find_chromium; then
  say "still there is no Chromium: set ONEJOB_CHROMIUM_BIN to the path of one"
  exit 1
fi
