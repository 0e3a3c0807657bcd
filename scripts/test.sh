#!/usr/bin/env bash
# The whole suite. As root its second half, as a user who owns nothing, runs beside the first: both spend much of their time waiting.
# Usage: test.sh PYTHON DIRECTORY...   with the directories of the second half
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1; shift

if [ "$(id -u)" -ne 0 ]; then
    "$python" -m pytest || exit
    exec scripts/unprivileged.sh "$@"
fi

said=$(mktemp)
setsid scripts/unprivileged.sh "$@" >"$said" 2>&1 &
second=$!
trap 'kill -- "-$second" 2>/dev/null; rm -f "$said"' EXIT
trap 'exit 130' INT TERM
status=0
"$python" -m pytest --durations=15 || status=$?
wait "$second" || status=$?
cat "$said"
exit "$status"
