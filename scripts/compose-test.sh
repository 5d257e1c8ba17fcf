#!/usr/bin/env bash
# Tries docker-compose.yml for real: builds the image, starts three replicas,
# enqueues with plain INSERTs, kills the replica that works on a task, stops
# another, and checks that nothing was lost and nothing overlapped. Everything
# it started is gone at the end. It needs docker, and docker compose or
# docker-compose 1.29; images that cannot be pulled are made by images.sh.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export COMPOSE_PROJECT_NAME=onejob-test-$$

say() { echo "compose-test: $*"; }
die() { say "FAILED: $*" >&2; exit 1; }

if docker compose version >/dev/null 2>&1; then
  compose() { docker compose "$@"; }
elif command -v docker-compose >/dev/null; then
  compose() { docker-compose "$@"; }
else
  die "there is neither docker compose nor docker-compose here: install either"
fi

finish() {
  local code=$?
  trap - EXIT INT TERM
  if ((code != 0)); then
    {
      compose ps
      compose logs --no-color --tail=200
      say "failed; the reason stands above the logs"
    } >&2 || true
  fi
  compose down --volumes --remove-orphans --timeout 5 >/dev/null 2>&1 ||
    say "docker compose down failed; look for what is left of $COMPOSE_PROJECT_NAME with docker ps -a" >&2
  exit "$code"
}

# sql STATEMENT: prints what it returns.
sql() { docker exec "$postgres" psql -XqAt -v ON_ERROR_STOP=1 -U onejob -d onejob -c "$1"; }

# within SECONDS WHAT COMMAND...: waits until the command succeeds.
within() {
  local limit=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@"; do
    ((SECONDS < end)) || die "not within $limit s: $what"
    sleep 0.2
  done
}

# is VALUE STATEMENT: does it return that?
is() { [[ $(sql "$2") == "$1" ]]; }

# expect VALUE STATEMENT: it must.
expect() {
  local got
  got=$(sql "$2")
  [[ $got == "$1" ]] || die "got $got instead of $1 from: $2"
}

healthy() {
  local id
  for id in "${replicas[@]}"; do
    [[ $(docker inspect --format '{{.State.Health.Status}}' "$id") == healthy ]] || return 1
  done
}

# exit_code CONTAINER: prints with which code it ended.
exit_code() { docker inspect --format '{{.State.ExitCode}}' "$1"; }

# sleeping SECONDS: enqueues an exec task that takes so long, waits until it
# runs, and sets task, its replica's name as holder, and that one's container.
sleeping() {
  task=$(sql "INSERT INTO onejob.tasks (kind, payload)
              VALUES ('exec', '{\"command\": \"sleep\", \"args\": [\"$1\"]}') RETURNING id")
  within 15 "task $task runs" is running "SELECT status FROM onejob.tasks WHERE id = $task"
  holder=$(sql "SELECT replica FROM onejob.tasks WHERE id = $task")
  # A replica's name begins with its host's, which is the container's short id.
  for container in "${replicas[@]}"; do
    [[ $holder != "${container:0:12}"* ]] || return 0
  done
  die "no container belongs to replica $holder"
}

# seconds_until_taken_over MOMENT: waits until another replica runs the task,
# and prints how long after the moment that was, by Postgres' clock.
seconds_until_taken_over() {
  within 45 "task $task is taken over from $holder" \
    is t "SELECT status = 'running' AND replica <> '$holder' FROM onejob.tasks WHERE id = $task"
  sql "SELECT round(extract(epoch FROM started_at - '$1')::numeric, 1) FROM onejob.tasks WHERE id = $task"
}

succeeded() { within "$1" "task $task succeeds" is succeeded "SELECT status FROM onejob.tasks WHERE id = $task"; }

scripts/images.sh
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

commit=
[[ ! -d .git ]] || commit=$(git rev-parse HEAD 2>/dev/null) || true
say "building and starting ($COMPOSE_PROJECT_NAME)"
timeout 900 bash -c "$(declare -f compose); compose build --build-arg GOFLAGS=-pgo=off onejob && compose up -d --scale onejob=3" >&2
postgres=$(compose ps -q postgres)
mapfile -t replicas < <(compose ps -q onejob)
((${#replicas[@]} == 3)) || die "there are ${#replicas[@]} replicas instead of 3"
within 60 "three replicas are healthy" healthy
up=$SECONDS
say "three replicas are healthy"

if [[ -n $commit ]]; then
  docker exec "${replicas[0]}" onejob version | grep -q "$commit" || die "the image does not know its commit, $commit"
fi

sql "INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 300)"
within 60 "300 no-op tasks succeed" is 300 "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'"
say "300 no-op tasks succeeded"

sleeping 15
say "killing $holder, which runs task $task"
killed=$(sql "SELECT clock_timestamp()")
docker kill --signal KILL "$container" >/dev/null
sql "INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 100)"
takeover=$(seconds_until_taken_over "$killed")
succeeded 60
expect "crashed,succeeded" "SELECT string_agg(outcome, ',' ORDER BY fence) FROM onejob.attempts WHERE task_id = $task"
say "taken over $takeover s after the kill, and succeeded"

# Longer than worker.shutdown_grace, so that it has to be given back.
sleeping 30
say "stopping $holder, which runs task $task"
stopped=$(sql "SELECT clock_timestamp()")
docker stop "$container" >/dev/null
[[ $(exit_code "$container") == 0 ]] || die "after SIGTERM $holder ended with $(exit_code "$container")"
giveback=$(seconds_until_taken_over "$stopped")
succeeded 60
expect "shutdown,succeeded" "SELECT string_agg(outcome, ',' ORDER BY fence) FROM onejob.attempts WHERE task_id = $task"
expect 1 "SELECT attempt FROM onejob.tasks WHERE id = $task"
say "it ended with 0; the task went on elsewhere after $giveback s, grace included, and succeeded"

expect "succeeded 402" "SELECT status || ' ' || count(*) FROM onejob.tasks GROUP BY status"
expect 0 "SELECT count(*) FROM onejob.overlaps"

# What is left stops together, idle, and at once.
mapfile -t left < <(docker ps --quiet --no-trunc --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
  --filter label=com.docker.compose.service=onejob)
compose stop onejob >/dev/null 2>&1
for container in "${left[@]}"; do
  [[ $(exit_code "$container") == 0 ]] || die "after compose stop ${container:0:12} ended with $(exit_code "$container")"
done

say "passed: 402 of 402 tasks succeeded, none lost, 0 overlaps"
say "  ready after ${up} s (images and build included); took over ${takeover} s after SIGKILL;"
say "  after SIGTERM the work went on elsewhere in ${giveback} s (shutdown_grace is 20 s); exit codes 0; ${SECONDS} s in all"
