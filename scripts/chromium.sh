#!/usr/bin/env bash
# Prints the path of a Chromium that runs without a display, which it installs with
# apt-get if there is none: ONEJOB_CHROMIUM_BIN, else the first of chromium-headless-shell,
# chromium, chromium-browser and google-chrome in PATH. No browser is started.
# The path is the last line of stdout; what is happening goes to stderr.
set -euo pipefail

. "$(dirname "$0")/debian.sh"

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

if ! can_install; then
  say "there is no Chromium here and this script cannot install it: install your distribution's" \
    "chromium, or set ONEJOB_CHROMIUM_BIN to the path of one"
  exit 1
fi

install_packages chromium-headless-shell fonts-dejavu-core || install_packages chromium fonts-dejavu-core || true

if ! find_chromium; then
  say "still there is no Chromium: set ONEJOB_CHROMIUM_BIN to the path of one"
  exit 1
fi
