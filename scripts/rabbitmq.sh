#!/usr/bin/env bash
# Prints the path of rabbitmq-server, which it installs with apt-get if there is
# none: ONEJOB_RABBITMQ_BIN, else PATH's, else the one in Debian's folder,
# /usr/lib/rabbitmq/bin. rabbitmqctl must lie beside it. No broker is started, and
# the one that Debian's package would start is not.
# The path is the last line of stdout; what is happening goes to stderr.
set -euo pipefail

. "$(dirname "$0")/debian.sh"

# usable PATH: can this be run, and is rabbitmqctl there as well?
usable() { [[ -x $1 && -x $(dirname "$1")/rabbitmqctl ]]; }

# find_rabbitmq prints the path. What Debian has in PATH leads to a wrapper that
# insists on the system's own account; the scripts proper are in /usr/lib.
find_rabbitmq() {
  local path
  if path=$(command -v rabbitmq-server); then
    path=$(readlink -f "$path")
    if [[ ${path##*/} == rabbitmq-server ]] && usable "$path"; then
      echo "$path"
      return
    fi
  fi
  path=/usr/lib/rabbitmq/bin/rabbitmq-server
  usable "$path" && echo "$path"
}

if [[ -n ${ONEJOB_RABBITMQ_BIN:-} ]]; then
  if ! usable "$ONEJOB_RABBITMQ_BIN"; then
    say "ONEJOB_RABBITMQ_BIN is $ONEJOB_RABBITMQ_BIN, which cannot be run or has no rabbitmqctl beside it"
    exit 1
  fi
  echo "$ONEJOB_RABBITMQ_BIN"
  exit
fi
if find_rabbitmq; then
  exit
fi

if ! can_install; then
  say "there is no RabbitMQ here and this script cannot install it: install your distribution's" \
    "rabbitmq-server, or set ONEJOB_RABBITMQ_BIN to the path of one that has rabbitmqctl beside it"
  exit 1
fi

# Debian's packages start a broker, and epmd, unless told not to.
trap allow_servers EXIT
forbid_servers
install_packages rabbitmq-server || true

if ! find_rabbitmq; then
  say "still there is no rabbitmq-server: set ONEJOB_RABBITMQ_BIN to the path of one"
  exit 1
fi
