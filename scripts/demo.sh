#!/usr/bin/env bash
# The demo: a private Postgres and Consul, three replicas, tasks enqueued with
# plain INSERTs, one replica killed with -9 in the middle of its work. It needs
# bin/onejob, ends by itself and leaves nothing behind. With DEMO=hold it waits
# at the end until Ctrl-C, so that there is time to look around.
set -euo pipefail
cd "$(dirname "$0")/.."

bold=; plain=
if [[ -t 1 ]]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
die() {
  echo "demo: $*" >&2
  echo "demo: the log of the replicas:" >&2
  tail -n 40 "$dir/log" >&2
  exit 1
}

dir=$(mktemp -d)
dev=
cleanup() {
  if [[ -n $dev ]] && kill -INT "$dev" 2>/dev/null; then wait "$dev" || true; fi
  rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

psql_bin=$(./scripts/postgres.sh | tail -n 1)/psql
ONEJOB_CONSUL_BIN=$(./scripts/consul.sh | tail -n 1)
export ONEJOB_CONSUL_BIN

cat >"$dir/demo.yaml" <<YAML
worker: {concurrency: 4}
kinds:
  exec:
    commands:
      work:
        path: /bin/sh
        args: ["-c", "echo begin >> $dir/record.\$ONEJOB_TASK_ID; sleep 0.3; echo end >> $dir/record.\$ONEJOB_TASK_ID"]
      report:
        path: /bin/sh
        args: ["-c", "echo begin >> $dir/record.\$ONEJOB_TASK_ID; sleep 6; echo end >> $dir/record.\$ONEJOB_TASK_ID"]
YAML

say "Starting a private Postgres, a private Consul and three replicas"
bin/onejob dev --replicas 3 --config "$dir/demo.yaml" --env "$dir/env" >"$dir/log" 2>&1 &
dev=$!
for ((i = 0; i < 600; i++)); do
  [[ -f $dir/env ]] && break
  kill -0 "$dev" 2>/dev/null || { dev=; die "onejob dev did not start"; }
  sleep 0.1
done
[[ -f $dir/env ]] || die "onejob dev was not ready within a minute"
# shellcheck disable=SC1091
. "$dir/env"
sql() { "$psql_bin" "$ONEJOB_POSTGRES_DSN" -v ON_ERROR_STOP=1 -X -q -A -t -c "$1"; }
until_sql() { # until_sql SECONDS QUERY: wait until the query says t
  for ((n = 0; n < $1 * 10; n++)); do
    [[ $(sql "$2") == t ]] && return
    sleep 0.1
  done
  die "after $1 s this is still false: $2"
}

read -r -a pages <<<"$ONEJOB_DEV_PAGES"
echo "The web page of each: ${pages[*]}"

say "Enqueueing with plain INSERTs"
work="INSERT INTO onejob.tasks (kind, payload) SELECT 'exec', '{\"command\": \"work\"}' FROM generate_series(1, 60)"
report="INSERT INTO onejob.tasks (kind, payload, priority) VALUES ('exec', '{\"command\": \"report\"}', 10)"
echo "  $report;"
echo "  $work;"
sql "$report"
sql "$work"
report_id=$(sql "SELECT min(id) FROM onejob.tasks")
until_sql 20 "SELECT status = 'running' AND (SELECT count(*) > 5 FROM onejob.tasks WHERE status = 'succeeded') FROM onejob.tasks WHERE id = $report_id"

victim=$(sql "SELECT replica FROM onejob.tasks WHERE id = $report_id")
read -r -a pids <<<"$ONEJOB_DEV_PIDS"
pid=${pids[$((${victim##*-} - 1))]}
inside=$(sql "SELECT count(*) FROM onejob.tasks WHERE replica = '$victim'")
say "kill -9 $pid: $victim, which runs the report (task $report_id) and $inside tasks in all"
killed=$(sql "SELECT clock_timestamp()")
kill -9 "$pid"
echo "  Nobody is left on its host to report that. The others wait until its leases have ended, about 7 s."

until_sql 60 "SELECT count(*) = 0 FROM onejob.tasks WHERE status IN ('pending', 'running')"

say "The log of the takeover"
grep -E 'task_taken_over|session_lost' "$dir/log" | sed 's/^/  /' || true
say "The history of the report"
bin/onejob tasks show "$report_id" | sed -n '/^attempt /p' | sed 's/^/  /'

# The files that the commands wrote are evidence from outside of the tables. Every task
# must have ended. One of the killed replica may have ended twice: its command was done,
# and the replica died before it could record that.
done=0 twice=0
for f in "$dir"/record.*; do
  ends=$(grep -c end "$f" || true)
  if ((ends > 0)); then done=$((done + 1)); fi
  if ((ends > 1)); then twice=$((twice + 1)); fi
done
takeover=$(sql "SELECT round(extract(epoch FROM max(started_at) - '$killed'::timestamptz), 1) FROM onejob.attempts WHERE task_id = $report_id")
overlaps=$(sql "SELECT count(*) FROM onejob.overlaps")
succeeded=$(sql "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'")
total=$(sql "SELECT count(*) FROM onejob.tasks")

say "Summary"
printf '  %-22s %s\n' \
  tasks "$succeeded of $total succeeded" \
  replicas "3" \
  killed "$victim, while it ran $inside tasks" \
  takeover "$takeover s after the kill, which left nobody on its host to report it" \
  "done at least once" "$done of $total, by the files that the commands wrote" \
  "done twice" "$twice (done, but not yet recorded, when $victim was killed)" \
  overlaps "$overlaps"
[[ $succeeded == "$total" && $overlaps == 0 && $done == "$total" && $twice -le $inside ]] || die "a guarantee was violated"
if [[ ${DEMO:-} == hold ]]; then
  say "Everything goes on until Ctrl-C"
  unset "pages[$((${victim##*-} - 1))]"
  echo "  the web page    ${pages[*]}"
  echo "  in another terminal"
  sed 's/^/    /' "$dir/env"
  echo "    $PWD/bin/onejob status"
  trap 'held=' INT
  held=1
  while [[ -n $held ]]; do sleep 1 || true; done
fi
say "All data was removed. Next: README.md"
