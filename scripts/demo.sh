#!/usr/bin/env bash
# The main job, end to end: a command runs on a clone of this machine, its changes are shown, what it must not do is refused, and the real
# disk is as it was.
# Everything happens in a directory of its own; this exits non-zero if the real disk was touched.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

# Not below /tmp: a sandbox has a /tmp of its own, so a project there would be invisible in it.
top=$(mktemp --directory /var/tmp/agent-sandbox-demo.XXXXXX)
trap 'chmod -R u+rwX "$top" && rm -rf --one-file-system "$top"' EXIT
mkdir -p "$top/project" "$top/state"
export XDG_STATE_HOME="$top/state" XDG_DATA_HOME="$top/state" XDG_CACHE_HOME="$top/state"
# Outside the project: as root a file of the system's, else one in the home directory, because a clone lets nobody do what they may not do outside it.
if [ "$(id -u)" -eq 0 ]; then outside=/etc/agent-sandbox-demo.conf; else outside=$HOME/agent-sandbox-demo.conf; fi

title() { if [ -t 1 ]; then printf '\n\033[1m%s\033[0m\n' "$1"; else printf '\n%s\n' "$1"; fi; }
# Prints the command as a person would type it, then runs it just so.
show() { printf '$ %s\n' "$1"; bash -c "$1"; }
refused() { if show "$1"; then echo "demo: this was not refused; this is a bug" >&2; exit 1; fi; }
real_disk() { find "$top/project" -type f -exec sha256sum {} + | sort; ls -l "$outside" 2>&1 || true; }

cd "$top/project"
git init --quiet 2>/dev/null || true
printf 'Hello from the real disk.\n' >greeting.txt
printf 'Do not lose these notes.\n' >notes.txt
printf 'API_KEY=a-real-secret\n' >.env
before=$(real_disk)

title "A project with two files"
show 'head *.txt'

title "An agent edits one, deletes the other and writes outside the project: all of it on a clone"
show "agent-sandbox run \"sed -i 's/real disk/clone/' greeting.txt; rm notes.txt; echo planted > $outside; ls; cat greeting.txt $outside\""

title "What it changed"
show 'agent-sandbox diff'

title "The real disk"
show 'head *.txt'
show "ls $outside" || true

title "A secret, the network, and a program that is not allowed: refused"
refused 'agent-sandbox run "cat .env"'
refused 'agent-sandbox run "exec 3<>/dev/tcp/192.0.2.1/80"'
refused 'agent-sandbox run --allow ls,cat "python3 -c 1"'

title "Forget it"
show 'agent-sandbox reset --yes'
show 'agent-sandbox diff'

if [ "$(real_disk)" != "$before" ]; then
    echo "demo: the real disk was changed; this is a bug" >&2
    exit 1
fi
title "The real disk is byte for byte as it was."
