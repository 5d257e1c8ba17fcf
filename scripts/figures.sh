#!/usr/bin/env bash
# make figures: runs tests and benchmarks whose figures are for the documents, one after the other, and writes
# what they measured to docs/why/reports/figures.txt, which a page must then cite. Leave the machine alone
# meanwhile. Figures of make bench, make chaos and make simulate have reports of their own.
#
#   ONLY=regexp   only commands that match; printed, and written nowhere
set -euo pipefail
cd "$(dirname "$0")/.."

readonly report=docs/why/reports/figures.txt

# Each line is a command, as it can be typed in the project's root.
commands() {
  cat <<'EOF'
go test ./boottime -run xxx -bench Now
go test ./internal/guard -run xxx -bench Start
go test ./lock/consul -run xxx -bench AcquireRelease
go test -count 1 ./lock/rabbitmq -run 'TestSilence$|TestNeverBesideADyingCommand|TestManyWaiters' -v
TEST_CRASHES=30 go test -count 1 ./worker -run 'TestCrashedWorkerIsTakenOver|TestKilledReplicaIsTakenOver|TestHostAndAgentAreLost' -v
go test -count 1 ./store -run TestManyRowsThatWaitStopNoClaim -v
go test ./store -run xxx -bench 'Claim$' -benchtime 300x
go test ./store -run xxx -bench Overview -benchtime 20x
go test ./store -run xxx -bench TableSettings -benchtime 1x
cd bench && go test ./scale -run xxx -bench 'ManyLanes|FutureLanes|DeepLockKey|ClaimSizes' -benchtime 1x
cd bench && go test ./scale -run xxx -bench 'Schedules|Running|EmptyClaim|Inserts' -benchtime 1x
cd bench && go test ./scale -run xxx -bench 'Rows|Requests|Tombstones|FullLimits' -benchtime 1x
cd bench && go test ./scale -run xxx -bench 'Idle$' -benchtime 1x -count 3
cd bench && go test ./scale -run xxx -bench Herd -benchtime 1x -count 3
EOF
}

# What was measured: benchmarks, what tests log, and how they ended.
measured() { grep -E '^Benchmark|_test\.go:[0-9]+: |^ *--- |^(ok|FAIL|panic)' || true; }

measure() {
  echo "commit $(git rev-parse --short=12 HEAD)$(git diff --quiet HEAD -- . ":!$report" || echo ' changed'), $(go env GOVERSION), $(nproc) processors, $(date -u +%F)"
  local command status=0
  while read -r command; do
    [[ $command =~ ${ONLY:-.} ]] || continue
    printf '\n$ %s\n' "$command"
    bash -c "set -euo pipefail; $command" </dev/null 2>&1 | measured || status=1
  done < <(commands)
  return $status
}

if [[ -n ${ONLY:-} ]]; then
  measure
else
  measure | tee "$report.new"
  mv "$report.new" "$report"
fi
