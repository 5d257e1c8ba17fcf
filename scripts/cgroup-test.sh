#!/usr/bin/env bash
# Runs the tests of internal/guard on a kernel whose cgroups can be written: User Mode
# Linux, a kernel that is an ordinary program. The tests of limits (memory, processes,
# processor time) need controllers that many containers and virtual machines do not have,
# and skip there. Nothing of this machine changes.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/debian.sh

if ! kernel=$(command -v linux.uml); then
    if ! can_install; then
        say "there is no linux.uml; install the package user-mode-linux"
        exit 1
    fi
    install_packages user-mode-linux
    kernel=$(command -v linux.uml)
fi

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
chmod 755 "$dir"
go test -c -o "$dir/guard.test" ./internal/guard
mkdir "$dir/tmp"
cat >"$dir/init" <<EOF
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=$dir/tmp TEST_CGROUPS=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs -o mode=1777 tmp $dir/tmp
mount -t cgroup2 cgroup /sys/fs/cgroup
cd $PWD/internal/guard
echo "controllers: \$(cat /sys/fs/cgroup/cgroup.controllers)"
timeout 400 $dir/guard.test -test.v -test.timeout 380s -test.run '${1:-Limit|Cgroup|Swarm|OutOfMemory}' && echo "guard: all tests passed"
sync
echo o >/proc/sysrq-trigger
sleep 60
EOF
chmod 755 "$dir/init"
timeout 480 "$kernel" mem=2G root=/dev/root rootfstype=hostfs rootflags=/ rw "init=$dir/init" con=null con0=null,fd:1 quiet >"$dir/console" 2>&1 || true
grep -E '^(controllers|guard): |--- (PASS|FAIL|SKIP)|_test\.go:' "$dir/console"
grep -q '^guard: all tests passed' "$dir/console" && grep -q -- '--- PASS: TestLimitsHold' "$dir/console"
