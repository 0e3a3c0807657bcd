#!/usr/bin/env bash
# The unprivileged half of `make test`: runs pytest as a user that owns nothing on this machine, on the given directories or, without any,
# on those with the claims that must hold for such a user as well. MARKS=torture chooses the full counts.
# Usage: unprivileged.sh [--report FILE] [DIRECTORY...]   FILE gets what ran, in pytest's XML, with the properties of each test.
#
# The user needs no entry in /etc/passwd, and gets a home, an environment and capabilities (none) of its own. A checkout that such a user cannot
# reach, below a home directory with mode 0700 for instance, is copied (scripts/reachable.py). Started by somebody who is not root, there is nothing
# to add: the suite has just run unprivileged, and it is said that the privileged half is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

loudly() { if [ -t 2 ]; then printf '\033[1;31m%s\033[0m\n' "$*" >&2; else printf '%s\n' "$*" >&2; fi; }
fail() { loudly "unprivileged: $*"; exit 1; }

if [ "$(id -u)" -ne 0 ]; then
    loudly "NOT TESTED: the suite ran as uid $(id -u) only. What the sandbox promises to root needs: sudo make test"
    exit 0
fi

report='' reporting=()
if [ "${1:-}" = --report ]; then report=$2; shift 2; fi
[ $# -gt 0 ] || set -- tests/contract tests/security tests/e2e
folders=()
for folder in "$@"; do
    if [ -n "$(find "$folder" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then folders+=("$folder"); fi
done
[ ${#folders[@]} -gt 0 ] || { loudly "NOT TESTED: none of $* has tests yet, so nothing ran unprivileged"; exit 0; }
command -v setpriv >/dev/null || fail "setpriv is missing (apt-get install util-linux), so nothing can be run as another user"

owners_of_processes() { stat --format=%u /proc/[0-9]* 2>/dev/null || true; }

# 60706 to 61183 is the range that the distributions and systemd leave alone. The directory reserves an id: two that start at the same moment
# see no process of each other yet, and each kills whatever runs as its user in the end. Not below /tmp: a sandbox has a /tmp of its own, so a
# project there would be invisible in it.
taken=$(owners_of_processes | sort -u)
for uid in $(shuf --input-range=60706-61183); do
    if grep -qx "$uid" <<<"$taken" || getent passwd "$uid" >/dev/null; then continue; fi
    top=/var/tmp/agent-sandbox-unprivileged.$uid
    if mkdir --mode 755 "$top" 2>/dev/null; then break; fi
    top=''
done
[ -n "${top:-}" ] || fail "no unused user id between 60706 and 61183"
# Whatever is still running as this user can only have come from here. One that has ended (Z) only waits for the machine's init to take note.
leftovers() {
    local pid
    for pid in $(find /proc -maxdepth 1 -name '[0-9]*' -uid "$uid" -printf '%f\n' 2>/dev/null); do
        if ! grep -qs '^State:[[:space:]]*Z' "/proc/$pid/status" && [ -e "/proc/$pid" ]; then printf '%s\n' "$pid"; fi
    done
}
clean_up() {
    local pid
    for pid in $(leftovers); do kill -KILL "$pid" 2>/dev/null || true; done
    rm -rf --one-file-system "$top"
}
trap clean_up EXIT
trap 'exit 130' INT TERM
install --directory --owner "$uid" --group "$uid" --mode 700 "$top"/home "$top"/home/{state,data,cache,config,run}
# Only the user can write to its home, and only root to where the report goes.
if [ -n "$report" ]; then reporting=(--quiet --junitxml="$top/home/report.xml" -o junit_family=xunit1); fi

python=$PWD/.venv/bin/python
checkout=$("$python" -m scripts.reachable "$top")
[ "$checkout" = "$PWD" ] || printf 'unprivileged: other users cannot reach this checkout; testing a copy\n' >&2
# Evaluation data is named only where there is some that the user can read; tests that want it say so otherwise.
data=${AGENT_SANDBOX_EVAL_DATA:-}

as_user() {
    env --ignore-environment PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 TERM="${TERM:-dumb}" \
        HOME="$top/home" XDG_STATE_HOME="$top/home/state" XDG_DATA_HOME="$top/home/data" XDG_CACHE_HOME="$top/home/cache" \
        XDG_CONFIG_HOME="$top/home/config" XDG_RUNTIME_DIR="$top/home/run" TMPDIR="$top/home" PYTEST_DEBUG_TEMPROOT="$top/home" \
        ${AGENT_SANDBOX_SHARED_CACHE:+"AGENT_SANDBOX_SHARED_CACHE=$AGENT_SANDBOX_SHARED_CACHE"} \
        PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY="$top/home/hypothesis" ${data:+"AGENT_SANDBOX_EVAL_DATA=$data"} \
        ${AGENT_SANDBOX_TEST_PATIENCE:+"AGENT_SANDBOX_TEST_PATIENCE=$AGENT_SANDBOX_TEST_PATIENCE"} \
        setpriv --reuid "$uid" --regid "$uid" --clear-groups --inh-caps=-all --ambient-caps=-all -- "$@"
}

cd "$checkout"
if [ -n "$data" ] && ! as_user test -r "$data" -a -x "$data"; then
    cp -RL "$data" "$top/data"
    chmod -R go=rX "$top/data"
    data=$top/data
fi
printf 'unprivileged: %s as uid %s, with no capabilities\n' "${folders[*]}" "$uid" >&2
status=0
# Tests that need root have just run as root; skipping them here would only hide a skip that matters.
as_user .venv/bin/python -m pytest -p no:cacheprovider -m "(${MARKS:-not torture}) and not needs_root" "${reporting[@]}" "${folders[@]}" || status=$?
if [ -n "$report" ] && [ -e "$top/home/report.xml" ]; then cp "$top/home/report.xml" "$report"; fi
# What is just ending is not left behind; what stays is.
for _ in $(seq 100); do
    [ -n "$(leftovers)" ] || break
    sleep 0.1
done
if [ -n "$(leftovers)" ]; then
    loudly "unprivileged: processes were left behind:"
    for pid in $(leftovers); do printf '  %s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)" >&2; done
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
