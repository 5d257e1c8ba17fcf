#!/usr/bin/env bash
# make ha-test: three hosts, each with a Consul server, a Postgres under Patroni and
# a replica of onejob, as network namespaces of this machine. chaos/ha makes them fail
# over. Everything that this makes is gone when it ends, however it ends.
#
#   STANDBY=async   how standbys follow: async or sync (Patroni's synchronous_mode)
#   FAULTS=         which faults, separated by commas; all if it is empty
#   REPORT=         where the report goes, as JSON; nowhere if it is empty
#   KEEP=1          keep the folder with logs and evidence
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
  echo "ha-test: $*" >&2
  exit 2
}

((EUID == 0)) || die "it makes network namespaces, so it must run as root"
for program in go ip setpriv patroni; do
  command -v "$program" >/dev/null || die "there is no $program; on Debian: apt-get install iproute2 util-linux patroni python3-consul"
done
/usr/bin/python3 -c 'import consul' 2>/dev/null || die "Patroni cannot use Consul; on Debian: apt-get install python3-consul"
getent passwd postgres >/dev/null || die "there is no user postgres, whom Patroni and Postgres run as"
consul=$(./scripts/consul.sh | tail -n 1)
postgres=$(./scripts/postgres.sh | tail -n 1)

space=onejob-ha-$$
spaces=("$space" "$space-1" "$space-2" "$space-3") # the first one is the switch, and the client's
dir=$(mktemp -d /tmp/onejob-ha.XXXXXX)

# clean ends what runs in the namespaces and removes them, with all their links.
clean() {
  local s pids
  for s in "${spaces[@]}"; do
    [[ -e /run/netns/$s ]] || continue
    for _ in {1..50}; do
      pids=$(ip netns pids "$s") || true
      [[ -n $pids ]] || break
      # shellcheck disable=SC2086
      kill -9 $pids 2>/dev/null || true
      sleep 0.1
    done
    ip netns del "$s" || true
  done
}

# The cleaner waits until this script is gone, be it by kill -9.
exec 9> >(
  trap '' INT TERM HUP
  cat >/dev/null
  clean
  if [[ ${KEEP:-} == 1 ]]; then echo "logs and evidence are kept in $dir"; else rm -rf "$dir"; fi
)
cleaner=$!
trap 'exec 9>&-; wait "$cleaner" || true' EXIT
trap 'exit 130' INT TERM HUP

umask 022 # Patroni and Postgres run as another user, and read what is written here
chmod 755 "$dir"
go build -o "$dir/onejob" ./cmd/onejob
go build -o "$dir/ha" ./chaos/ha

# Two bridges: "net" is what faults cut, "wire" leads to the observer and is never cut.
ip netns add "$space" || die "this machine allows no network namespaces"
ip -n "$space" link set lo up
for link in net:10.77.0 wire:10.78.0; do
  name=${link%:*} addr=${link#*:}
  ip -n "$space" link add "$name" type bridge
  ip -n "$space" addr add "$addr.1/24" dev "$name"
  ip -n "$space" link set "$name" up
done
for n in 1 2 3; do
  ip netns add "${spaces[n]}"
  ip -n "${spaces[n]}" link set lo up
  for link in net:10.77.0 wire:10.78.0; do
    name=${link%:*} addr=${link#*:}
    ip -n "$space" link add "$name$n" type veth peer name "$name" netns "${spaces[n]}"
    ip -n "$space" link set "$name$n" master "$name" up
    ip -n "${spaces[n]}" addr add "$addr.1$n/24" dev "$name"
    ip -n "${spaces[n]}" link set "$name" up
  done
done

# In the background and waited for, so that a signal is not kept waiting by it.
ip netns exec "$space" "$dir/ha" "$space" "$dir" "$consul" "$postgres" 9>&- &
status=0
wait $! || status=$?
if ((status != 0)) && [[ ${KEEP:-} != 1 ]]; then echo "ha-test: KEEP=1 keeps the logs and the evidence" >&2; fi
exit "$status"
