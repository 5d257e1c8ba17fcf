# For scripts that install Debian's packages, which read this file with ".".

# say WORDS...: to stderr, with the script's name.
say() { echo "${0##*/}: $*" >&2; }

# can_install: is this a system with apt-get, and may this user install packages?
can_install() { command -v apt-get >/dev/null && root true 2>/dev/null; }

# root COMMAND...: runs it as root, without a question.
root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  else
    sudo -n "$@"
  fi
}

# install_packages PACKAGES...: without questions, and with the chatter on stderr. It fails if that does.
install_packages() {
  say "installing $*"
  root env DEBIAN_FRONTEND=noninteractive apt-get -q -y update >&2 || say "apt-get update failed; trying with the package lists that are there"
  root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@" >&2 || {
    say "apt-get install failed"
    return 1
  }
}

# forbid_servers: packages that are installed from now on do not start what they bring. A
# script that calls it calls allow_servers when it ends.
forbid_servers() {
  if [[ ! -e /usr/sbin/policy-rc.d ]]; then
    policy=/usr/sbin/policy-rc.d
    printf '#!/bin/sh\nexit 101\n' | root tee "$policy" >/dev/null
    root chmod 0755 "$policy"
  fi
}

allow_servers() { [[ -z ${policy:-} ]] || root rm -f "$policy"; }
