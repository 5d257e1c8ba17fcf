#!/usr/bin/env bash
# Makes sure that the images which Dockerfile and docker-compose.yml name are
# here: pulls what is missing, and where no registry can be reached builds a
# stand-in of the same name and tag, from Debian's packages, this machine's Go
# and the Consul server that consul.sh prints.
#
# Stand-ins are for trying and testing. They carry the label onejob.stand-in;
# this removes them, and the next run looks for the real ones again:
#
#   docker images --filter label=onejob.stand-in --format '{{.Repository}}:{{.Tag}}' | xargs docker rmi
#
# The Debian system that they all rest on is made once, by debootstrap as root,
# and kept in ${XDG_CACHE_HOME:-$HOME/.cache}/onejob/images.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/onejob/images
suite=bookworm
base=onejob-stand-in-base
archive=$cache/$suite-$(uname -m).tar
work= # a folder of the stand-in at work, gone at the end

. "$(dirname "$0")/debian.sh"
die() { say "$@"; exit 1; }

# named prints the images that the tree names, but for those that it builds:
# the Dockerfile's stages, and onejob.
named() {
  {
    sed -nE 's/^FROM[[:space:]]+([^[:space:]]+).*/\1/p' "$root/Dockerfile"
    sed -nE 's/^[[:space:]]+image:[[:space:]]*([^[:space:]]+).*/\1/p' "$root/docker-compose.yml"
  } | grep -vxE "onejob|$(sed -nE 's/^FROM.*[[:space:]]AS[[:space:]]+(.*)/\1/Ip' "$root/Dockerfile" | paste -sd'|')" | sort -u
}

here() { docker image inspect "$1" >/dev/null 2>&1; }

# label IMAGE NAME: prints the value of a label, or nothing.
label() { docker image inspect --format "{{index .Config.Labels \"$2\"}}" "$1" 2>/dev/null || true; }

# pull IMAGE: a registry that does not answer is one that is not there.
pull() { timeout --kill-after=5 "${PULL_TIMEOUT:-300}" docker pull --quiet "$1" >/dev/null 2>"$cache/pull.log"; }

# fresh_work: an empty folder to put a build together in.
fresh_work() {
  rm -rf "$work"
  work=$(mktemp -d "$cache/work.XXXXXX")
}

# build IMAGE [OPTION...]: builds what is in the work folder, with the machine's
# own network, since the one of containers may lead nowhere.
build() {
  local image=$1
  shift
  docker build --quiet --network host --label onejob.stand-in=true "$@" -t "$image" "$work" >/dev/null
  docker image prune --force --filter label=onejob.stand-in >/dev/null # the one it replaces
}

# debian_tar: makes the base system's archive, if it is not in the cache. The
# mirror is the one that apt uses here, if it uses one.
debian_tar() {
  [[ ! -s $archive ]] || return 0
  [[ $(id -u) == 0 ]] || die "making the base system takes root: run scripts/images.sh as root, once"
  command -v debootstrap >/dev/null || install_packages debootstrap
  local mirror
  mirror=$(apt-get indextargets --format '$(LABEL) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
    awk '$1 == "Debian" && $2 == "main" { print $3; exit }')
  say "making a Debian $suite with debootstrap"
  fresh_work
  # No mirror means debootstrap's own choice.
  if ! debootstrap --variant=minbase --include=ca-certificates,tzdata "$suite" "$work/root" ${mirror:+"$mirror"} >"$cache/debootstrap.log" 2>&1; then
    tail -n 20 "$cache/debootstrap.log" >&2
    die "debootstrap failed; the whole of what it said is in $cache/debootstrap.log"
  fi
  rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/* "$work"/root/usr/share/{doc,man,info,locale}
  tar -C "$work/root" -c --one-file-system -f "$archive.new" .
  mv "$archive.new" "$archive"
}

# make_base: makes $base, the image that the stand-ins begin with.
make_base() {
  if ! here "$base"; then
    debian_tar
    docker import --change 'LABEL onejob.stand-in=true' --change 'CMD ["bash"]' "$archive" "$base" >/dev/null
  fi
}

debian() { docker tag "$base" "$1"; }

# golang IMAGE: this machine's Go, with the modules of go.mod to download from a
# folder: a build may have no network, or one whose certificates only this
# machine trusts.
golang() {
  command -v go >/dev/null || die "there is no Go here to put into $1"
  fresh_work
  mkdir "$work/go" "$work/module"
  tar -C "$(go env GOROOT)" -c --exclude=./test --exclude=./doc --exclude=./api . | tar -C "$work/go" -x

  cp "$root/go.mod" "$root/go.sum" "$work/module"
  (
    cd "$work/module"
    GOPROXY="file://$(go env GOMODCACHE)/cache/download,$(go env GOPROXY)"
    GOMODCACHE=$work/modcache
    GOFLAGS=-modcacherw
    export GOPROXY GOMODCACHE GOFLAGS
    go mod download
  )
  mv "$work/modcache/cache/download" "$work/modules"
  rm -rf "$work/modcache" "$work/module" "$work/modules/sumdb"

  cat >"$work/Dockerfile" <<END
FROM $base
ENV PATH=/go/bin:/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV GOPATH=/go GOTOOLCHAIN=local GOPROXY=file:///usr/local/share/modules,$(go env GOPROXY)
COPY go /usr/local/go
COPY modules /usr/local/share/modules
WORKDIR /go
END
  build "$1" --label "onejob.modules=$(modules)"
}

# modules prints what tells one set of modules from another.
modules() { cat "$root/go.mod" "$root/go.sum" | sha256sum | cut -c 1-16; }

# postgres IMAGE: Debian's PostgreSQL, whatever version that is, started the way
# the official image starts it.
postgres() {
  fresh_work
  cat >"$work/Dockerfile" <<END
FROM $base
RUN apt-get update \\
 && mkdir -p /etc/postgresql-common/createcluster.d \\
 && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/none.conf \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends postgresql \\
 && rm -rf /var/lib/apt/lists/* \\
 && ln -s /usr/lib/postgresql/*/bin /usr/local/pgsql \\
 && install -d -o postgres -g postgres -m 3777 /var/run/postgresql \\
 && install -d -o postgres -g postgres -m 0700 /var/lib/postgresql/data
ENV PATH=/usr/local/pgsql:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
ENV PGDATA=/var/lib/postgresql/data
COPY entrypoint.sh /usr/local/bin/docker-entrypoint.sh
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["/usr/local/bin/docker-entrypoint.sh"]
CMD ["postgres"]
END
  cat >"$work/entrypoint.sh" <<'END'
#!/bin/bash
# POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB and PGDATA mean here what they
# mean to the official image.
set -euo pipefail

if [[ ${1:0:1} == - ]]; then
  set -- postgres "$@"
fi
if [[ $1 != postgres ]]; then
  exec "$@"
fi
if [[ $(id -u) == 0 ]]; then
  mkdir -p "$PGDATA"
  chown -R postgres:postgres "$PGDATA"
  chmod 0700 "$PGDATA"
  exec setpriv --reuid=postgres --regid=postgres --init-groups "$0" "$@"
fi

if [[ ! -s $PGDATA/PG_VERSION ]]; then
  : "${POSTGRES_PASSWORD:?must be set to a password for the superuser}"
  : "${POSTGRES_USER:=postgres}" "${POSTGRES_DB:=$POSTGRES_USER}"
  initdb --username="$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") --auth-local=trust --auth-host=scram-sha-256
  echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
  echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
  if [[ $POSTGRES_DB != postgres ]]; then
    # Not over TCP: nobody may take this for the server that will be.
    pg_ctl --wait --options="-c listen_addresses=''" start
    createdb --username="$POSTGRES_USER" --maintenance-db=postgres "$POSTGRES_DB"
    pg_ctl --wait --mode=fast stop
  fi
fi
exec "$@"
END
  chmod 0755 "$work/entrypoint.sh"
  build "$1"
}

# consul IMAGE: the server that consul.sh finds or builds, started the way the
# official image starts it.
consul() {
  local binary
  binary=$("$root/scripts/consul.sh" | tail -n 1)
  fresh_work
  cp "$binary" "$work/consul"
  cat >"$work/Dockerfile" <<END
FROM $base
RUN useradd --system --home-dir /consul consul \\
 && install -d -o consul -g consul /consul /consul/data /consul/config
COPY consul /bin/consul
COPY entrypoint.sh /usr/local/bin/docker-entrypoint.sh
VOLUME /consul/data
EXPOSE 8500
ENTRYPOINT ["/usr/local/bin/docker-entrypoint.sh"]
CMD ["agent", "-dev", "-client", "0.0.0.0"]
END
  cat >"$work/entrypoint.sh" <<'END'
#!/bin/bash
# CONSUL_LOCAL_CONFIG and the commands mean here what they mean to the official
# image.
set -euo pipefail

if [[ ${1:0:1} == - ]]; then
  set -- agent "$@"
fi
if [[ -n ${CONSUL_LOCAL_CONFIG:-} ]]; then
  echo "$CONSUL_LOCAL_CONFIG" >/consul/config/local.json
fi
case $1 in
  agent)
    shift
    set -- consul agent -data-dir=/consul/data -config-dir=/consul/config "$@"
    chown -R consul:consul /consul
    exec setpriv --reuid=consul --regid=consul --init-groups "$@"
    ;;
  consul) exec "$@" ;;
esac
if consul "$1" --help 2>&1 | grep -q "consul $1"; then
  set -- consul "$@"
fi
exec "$@"
END
  chmod 0755 "$work/consul" "$work/entrypoint.sh"
  build "$1"
}

command -v docker >/dev/null || die "there is no docker here: install Docker Engine"
docker info >/dev/null 2>&1 || die "docker does not answer: is the daemon running, and may $(id -un) use it?"
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
trap 'rm -rf "$work"' EXIT

for image in $(named); do
  if here "$image"; then
    # A stand-in for Go has the modules of one go.mod in it.
    have=$(label "$image" onejob.modules)
    [[ -z $have || $have == "$(modules)" ]] && continue
    say "$image: go.mod has changed"
  elif pull "$image"; then
    say "$image: pulled"
    continue
  fi
  say "$image: building a stand-in, since it cannot be pulled ($(tail -n 1 "$cache/pull.log" 2>/dev/null))"
  make_base
  case $image in
    debian:$suite*) debian "$image" ;;
    golang:*-$suite) golang "$image" ;;
    postgres:*) postgres "$image" ;;
    hashicorp/consul:*) consul "$image" ;;
    *) die "$image: cannot be pulled, and there is no stand-in for it" ;;
  esac
done
