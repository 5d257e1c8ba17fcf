#!/usr/bin/env bash
# Prints the folder with PostgreSQL's server binaries, which it installs with
# apt-get if there are none: ONEJOB_POSTGRES_BIN, else PATH's, else the newest of
# /usr/lib/postgresql/*/bin. No server is started, and no cluster is made.
# pgbouncer and a C compiler, which some tests need, are installed as well if they can be.
# The folder is all of stdout; what is happening goes to stderr.
set -euo pipefail

. "$(dirname "$0")/debian.sh"

# holds_postgres FOLDER: are the server binaries there?
holds_postgres() { [[ -x $1/postgres && -x $1/initdb ]]; }

# find_postgres prints the folder.
find_postgres() {
  local path folder
  if path=$(command -v postgres); then
    # PATH may hold a link to the binary and none to its siblings.
    folder=$(dirname "$(readlink -f "$path")")
    if holds_postgres "$folder"; then
      echo "$folder"
      return
    fi
  fi
  while read -r folder; do
    if holds_postgres "$folder"; then
      echo "$folder"
      return
    fi
  done < <(printf '%s\n' /usr/lib/postgresql/*/bin | sort --version-sort --reverse)
  return 1
}

if [[ -n ${ONEJOB_POSTGRES_BIN:-} ]] && ! holds_postgres "$ONEJOB_POSTGRES_BIN"; then
  say "ONEJOB_POSTGRES_BIN is $ONEJOB_POSTGRES_BIN, which does not hold postgres and initdb"
  exit 1
fi

# found prints the folder, if there is one.
found() {
  if [[ -n ${ONEJOB_POSTGRES_BIN:-} ]]; then
    echo "$ONEJOB_POSTGRES_BIN"
  else
    find_postgres
  fi
}

packages=()
found >/dev/null || packages+=(postgresql)
PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null || packages+=(pgbouncer)
command -v cc >/dev/null || packages+=(gcc libc6-dev)
if ((${#packages[@]} == 0)); then
  found
  exit
fi

if ! can_install; then
  found && exit # the tests that want pgbouncer or a C compiler will say so
  say "this script cannot install what is missing here, ${packages[*]}: install your distribution's" \
    "packages (postgresql on Debian, Ubuntu, Alpine and Arch, postgresql-server on Fedora; pgbouncer and gcc" \
    "everywhere), or set ONEJOB_POSTGRES_BIN to the folder that holds postgres and initdb"
  exit 1
fi

# Debian's packages make a cluster and start it, unless told not to, and start
# pgbouncer. Nobody wants those: only the binaries are needed.
settings=/etc/postgresql-common/createcluster.d/onejob.conf
trap 'root rm -f "$settings"; allow_servers' EXIT
root mkdir -p "$(dirname "$settings")"
echo 'create_main_cluster = false' | root tee "$settings" >/dev/null
forbid_servers
install_packages "${packages[@]}" || true

if ! found; then
  say "still there is no postgres with initdb: set ONEJOB_POSTGRES_BIN to the folder that holds them"
  exit 1
fi
