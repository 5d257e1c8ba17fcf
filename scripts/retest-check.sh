#!/usr/bin/env bash
# Fails if a package failed otherwise than by its tests, and prints what it said. For gotestsum,
# which runs failed tests once more and passes if they do. If TestMain fails, because goroutines
# or processes were left behind, there is no such test. After os.Exit or a signal it does not know
# the tests that had not begun.
#
# A package that has gone through all of its tests ends with the line FAIL or PASS.
set -euo pipefail
awk '
	!match($0, /"Package":"[^"]*"/) { next }
	{ package = substr($0, RSTART + 11, RLENGTH - 12); test = /"Test":"/ }
	/"Action":"start"/ { complete[package] = failed[package] = 0; said[package] = "" }
	/"Action":"output"/ && !test && match($0, /"Output":".*"/) {
		line = substr($0, RSTART + 10, RLENGTH - 11)
		if (line == "FAIL\\n") complete[package] = 1
		gsub(/\\n/, "\n", line); gsub(/\\t/, "\t", line); gsub(/\\"/, "\"", line)
		said[package] = said[package] line
	}
	/"Action":"fail"/ && test { failed[package] = 1 }
	/"Action":"fail"/ && !test && !(complete[package] && failed[package]) {
		print package " failed, and not by a test that can be run once more:\n" said[package] > "/dev/stderr"
		status = 1
	}
	END { exit status }
' "${GOTESTSUM_JSONFILE:?gotestsum sets it if it has --jsonfile}"
