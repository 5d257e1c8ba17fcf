#!/usr/bin/env bash
# Fails if a retired word is used anywhere but in history (CHANGELOG, decisions, migrations),
# in the table of old event names, in recorded results, or where tools/terms/allowed.txt
# says that it is right.
set -euo pipefail
cd "$(dirname "$0")/../.."

# search COMMAND...: runs a grep. To find nothing is no error of it, everything else is.
search() {
	local status=0
	"$@" || status=$?
	((status <= 1)) || return "$status"
}

if grep -n '^[[:space:]]*$' tools/terms/allowed.txt >&2; then
	echo "tools/terms/allowed.txt: a blank line would allow everything" >&2
	exit 1
fi
found=0
while read -r word better; do
	case $word in '' | '#'*) continue ;; esac
	hits=$(search git grep -InwiE "$word" -- . ':!CHANGELOG.md' ':!docs/decisions' ':!migrations' ':!bench/results' ':!tools/terms' ':!model' ':!docs/reference/logs-renamed.md' |
		search grep -vFf tools/terms/allowed.txt)
	if [ -n "$hits" ]; then
		echo "retired word $word, use \"$better\":" >&2
		echo "$hits" >&2
		found=1
	fi
done <tools/terms/retired.txt
exit $found
