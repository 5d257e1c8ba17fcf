#!/usr/bin/env bash
# Fails if a retired word is used anywhere but in history (CHANGELOG, decisions, migrations),
# in the table of old event names, in recorded results, or where tools/terms/allowed.txt
# says that it is right.
set -euo pipefail
cd "$(dirname "$0")/../.."
found=0
while read -r word better; do
	case $word in '' | '#'*) continue ;; esac
	hits=$(git grep -InwiE "$word" -- . ':!CHANGELOG.md' ':!docs/decisions' ':!migrations' ':!bench/results' ':!tools/terms' ':!model' ':!docs/reference/logs-renamed.md' |
		grep -vFf tools/terms/allowed.txt || true)
	if [ -n "$hits" ]; then
		echo "retired word $word, use \"$better\":" >&2
		echo "$hits" >&2
		found=1
	fi
done <tools/terms/retired.txt
exit $found
