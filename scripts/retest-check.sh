#!/usr/bin/env bash
# Fails if a package failed otherwise than by its tests, and prints what it said. For gotestsum,
# which runs failed tests again and passes if they do. If TestMain fails, because goroutines
# or processes were left behind, there is no such test. After os.Exit, a panic or a signal it does
# not know the tests that had not begun.
#
# A package that has gone through all of its tests ends with the line FAIL or PASS. Of one that
# ended earlier the last lines are printed, whichever test they were said by: from the first one of
# a panic on, if there was one.
set -euo pipefail
awk '
	!match($0, /"Package":"[^"]*"/) { next }
	{ package = substr($0, RSTART + 11, RLENGTH - 12); test = /"Test":"/ }
	/"Action":"start"/ { complete[package] = failed[package] = 0; said[package] = ""; forget() }
	/"Action":"output"/ && match($0, /"Output":".*"/) {
		line = substr($0, RSTART + 10, RLENGTH - 11)
		if (line == "FAIL\\n" && !test) complete[package] = 1
		gsub(/\\n/, "\n", line); gsub(/\\t/, "\t", line); gsub(/\\"/, "\"", line)
		if (!test) said[package] = said[package] line
		if (line ~ /^(panic: |fatal error: |runtime: |signal: |SIG[A-Z]+: |==ERROR|ThreadSanitizer)/ && !panics[package]) { forget(); panics[package] = 1 }
		if (!panics[package] || lines[package] < most) last[package, lines[package]++ % most] = line
	}
	/"Action":"fail"/ && test { failed[package] = 1 }
	/"Action":"fail"/ && !test && !(complete[package] && failed[package]) {
		print package " failed, and not by a test that can be run again:\n" said[package] > "/dev/stderr"
		status = 1
		if (complete[package] || said[package] ~ /(^|\n)PASS\n/) next
		print "before that:" > "/dev/stderr"
		for (i = (lines[package] > most ? lines[package] - most : 0); i < lines[package]; i++)
			printf "%s", last[package, i % most] > "/dev/stderr"
	}
	function forget() { lines[package] = panics[package] = 0 }
	BEGIN { most = 60 }
	END { exit status }
' "${GOTESTSUM_JSONFILE:?gotestsum sets it if it has --jsonfile}"
