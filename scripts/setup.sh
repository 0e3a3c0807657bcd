#!/usr/bin/env bash
# Everything the project needs on a fresh machine: .venv in the checkout with the project installed in it and, as root on Debian or Ubuntu,
# the system packages that the tests use. Run through `make setup`. Idempotent, and quick when there is nothing to do.
#
# PYTHON=/path/to/python chooses the interpreter. Otherwise the system's own is preferred to one from PATH: an interpreter in somebody's
# home directory cannot be executed by the unprivileged user that half of the tests run as.
#
# --core installs only the program itself, which has no dependencies: seconds, and enough for `make demo`.
# --without-wasm leaves out what takes minutes, for who has it compiled beside something else (`scripts/suite.py`).
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv
readonly INSTALLED=$VENV/.installed-from  # what the environment was made from; it is remade when this no longer agrees
readonly CORE=$VENV/.core-installed-from  # the same, where only the program is in it
readonly TRIED=$VENV/.packages-tried      # system packages that could not be installed, so that each `make` does not try again

# command or file, Debian package, what is missing without it
readonly TOOLS='
node      nodejs      JavaScript runs
npm       npm         the test that installs an npm package inside a clone
ruby      ruby        Ruby runs
git       git         the tests that commit inside a clone
setpriv   util-linux  the unprivileged half of the tests
ip        iproute2    the tests that look at the network from inside
nft       nftables    the tests of the network wall
strace    strace      the tests that read system calls
bwrap     bubblewrap  the comparison with bubblewrap
curl      curl        the tests of the network with real clients
wget      wget        the same, with wget
psql      postgresql-client  the same, with a client of PostgreSQL
redis-cli redis-tools the same, with a client of Redis
runsc     runsc       runs on a kernel in user space
qemu-system-x86_64 qemu-system-x86 runs in a virtual machine
podman    podman      the tests that get an image from podman
crun      crun        the test of an OCI runtime on a view
'

say() { printf 'setup: %s\n' "$*" >&2; }
warn() { if [ -t 2 ]; then printf '\033[1;31msetup: %s\033[0m\n' "$*" >&2; else say "WARNING: $*"; fi; }
fail() { warn "$@"; exit 1; }
is_root() { [ "$(id -u)" -eq 0 ]; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Settings of the caller's shell that would reach into the new environment, or send its packages elsewhere.
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PATH="$PATH:/usr/sbin:/sbin"
# Other users run from this checkout too.
umask 022

apt_updated=
apt_install() {
    is_root && command -v apt-get >/dev/null || return 1
    if [ -z "$apt_updated" ]; then
        apt_updated=yes
        DEBIAN_FRONTEND=noninteractive apt-get -qq update >&2 || true
    fi
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends "$@" >&2 </dev/null
}

choose_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        candidate=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not a program"
        new_enough "$candidate" || fail "PYTHON=$PYTHON is older than 3.11 or does not start"
        printf '%s\n' "$candidate"
        return
    fi
    for candidate in /usr/bin/python3 "$(command -v python3 || true)" /usr/bin/python3.1[1-9]; do
        if [ -x "$candidate" ] && new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found; install one (Debian 12: apt-get install python3), or name it: make setup PYTHON=/path/to/python3"
}

# Debian splits ensurepip off into python3-venv, so `python3 -m venv` is there and fails. Each way that works without it is tried in turn.
make_environment() {
    local python=$1 version
    rm -rf "$VENV"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    has_ensurepip() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }
    if ! has_ensurepip && is_root; then
        say "installing python$version-venv"
        apt_install "python$version-venv" || apt_install python3-venv || true
    fi
    if has_ensurepip; then
        "$python" -m venv "$VENV"
    elif command -v virtualenv >/dev/null; then
        virtualenv --quiet --python "$python" "$VENV"
    elif command -v uv >/dev/null; then
        uv venv --quiet --seed --python "$python" "$VENV"
    elif "$python" -c 'import pip, venv' 2>/dev/null; then
        "$python" -m venv --without-pip "$VENV"
        "$python" -m pip --python "$VENV/bin/python" install --quiet pip
    else
        fail "$python can make no virtual environment; type: sudo apt-get install python$version-venv   and then again: make setup"
    fi
}

# What the environment depends on: a checkout that was moved or copied, or a changed pyproject.toml or setup helper, has another one.
fingerprint() { { pwd -P; cat pyproject.toml hatch_build.py scripts/setup.sh bin/* src/agent_sandbox/kernel/helper/*; } | sha256sum | cut -d' ' -f1; }

environment_is_sound() {
    new_enough "$VENV/bin/python" || return 1
    [ -z "${PYTHON:-}" ] || [ "$(readlink -f "$VENV/bin/python")" = "$(readlink -f "$(command -v "$PYTHON")")" ]
}

# The program and these extras of it, noted in this file.
set_up_python() {
    local extras=$1 note=$2 wanted python
    wanted=$(fingerprint)
    if environment_is_sound && { [ "$(cat "$INSTALLED" 2>/dev/null)" = "$wanted" ] || [ "$(cat "$note" 2>/dev/null)" = "$wanted" ]; }; then
        return
    fi
    [ -w . ] || fail "$PWD is not yours to write, and its .venv is missing or out of date: run make setup as its owner"
    if ! environment_is_sound || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(choose_python)
        say "making $VENV with $python"
        make_environment "$python"
    fi
    say "installing the program${extras:+ and its development tools} into $VENV"
    rm -f "$INSTALLED" "$CORE"
    "$VENV/bin/python" -m pip install --quiet --editable ".$extras"
    printf '%s\n' "$wanted" >"$note"
}

# Debian keeps the interpreter's own tests in a package of their own, one for each version.
tests_of_python() {
    "$VENV/bin/python" -c 'import sys, sysconfig
print("%s/test/test_json" % sysconfig.get_path("stdlib"), "libpython%d.%d-testsuite" % sys.version_info[:2], "the tests of CPython inside WebAssembly")'
}

missing_tools() {
    local tool package without
    while read -r tool package without; do
        if [ -n "$tool" ] && ! command -v "$tool" >/dev/null && ! [ -e "$tool" ]; then
            printf '%s %s %s\n' "$tool" "$package" "$without"
        fi
    done <<<"$TOOLS$(tests_of_python)"
}

set_up_tools() {
    local missing package tool without
    missing=$(missing_tools)
    [ -n "$missing" ] || return 0
    if is_root && command -v apt-get >/dev/null && [ "$(cat "$TRIED" 2>/dev/null)" != "$missing" ]; then
        # One at a time: one that cannot be had must not keep the others away.
        while read -r package; do
            say "installing the system package $package"
            apt_install "$package" || true
        done < <(cut -d' ' -f2 <<<"$missing" | sort -u)
        missing=$(missing_tools)
        [ -n "$missing" ] || { rm -f "$TRIED"; return 0; }
        printf '%s\n' "$missing" >"$TRIED"
    fi
    while read -r tool package without; do
        warn "$tool is not installed, so these are missing: $without (package $package)"
    done <<<"$missing"
    if is_root; then
        say "to have it tried again: rm $TRIED && make setup"
    else
        say "to install: sudo apt-get install $(cut -d' ' -f2 <<<"$missing" | sort -u | tr '\n' ' ')"
    fi
}

# Debian 12 has a runsc of 2022, which is too old for its own `ls`. That of its backports is only unpacked, so that no setting of apt changes.
readonly RUNSC=/usr/local/lib/agent-sandbox/runsc
set_up_runsc() {
    local scratch apt release site
    if ! is_root || ! command -v apt-get >/dev/null || [ -x "$RUNSC" ] || [ -e "$TRIED-runsc" ]; then return 0; fi
    if runsc help run 2>&1 | grep -q -- -pass-fd; then return 0; fi
    release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    site=$(apt-get indextargets --format '$(CODENAME) $(SITE)' 2>/dev/null | sed -n "s/^$release //p" | head -1)
    scratch=$(mktemp -d)
    chmod 755 "$scratch"
    mkdir -p "$scratch/lists/partial" "$scratch/archives/partial"
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s-backports main\n' "$site" "$release" >"$scratch/sources"
    apt=(apt-get -qq -o "Dir::Etc::SourceList=$scratch/sources" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$scratch/lists"
        -o "Dir::Cache=$scratch" -o APT::Sandbox::User=root)
    say "unpacking runsc of Debian's backports into $(dirname "$RUNSC")"
    if ! (cd "$scratch" && "${apt[@]}" update >&2 && "${apt[@]}" download runsc >&2 && dpkg -x runsc_*.deb unpacked \
        && install -D --mode 755 unpacked/usr/bin/runsc "$RUNSC"); then
        warn "a current runsc cannot be had, so these are missing: runs on a kernel in user space"
        touch "$TRIED-runsc"
    fi
    rm -rf "$scratch"
}

# The kernel that virtual machines boot. Its package is only unpacked: installed, it would be this machine's own at its next start.
readonly KERNEL=/usr/local/lib/agent-sandbox/kernel
set_up_kernel() {
    local package scratch
    if ! is_root || ! command -v apt-get >/dev/null || compgen -G "$KERNEL/boot/vmlinuz-*" >/dev/null || [ -e "$TRIED-kernel" ]; then return 0; fi
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
    scratch=$(mktemp -d)
    say "unpacking the kernel ${package:-linux-image-amd64} into $KERNEL, for virtual machines"
    if ! { [ -n "$package" ] && (cd "$scratch" && chmod 755 . && apt-get -qq download "$package" >&2) \
        && dpkg -x "$scratch"/*.deb "$scratch/unpacked" && mkdir -p "$(dirname "$KERNEL")" && rm -rf "$KERNEL" && mv "$scratch/unpacked" "$KERNEL"; }; then
        warn "the package linux-image-amd64 cannot be had, so these are missing: runs in a virtual machine"
        touch "$TRIED-kernel"
    fi
    rm -rf "$scratch"
}

# Two of us at once would build into the same directory. The lock is on the checkout itself and ends with this process.
if command -v flock >/dev/null; then
    exec 9<.
    flock 9
fi
if [ "${1:-}" = --core ]; then
    set_up_python '' "$CORE" 9<&-
    exit 0
fi
set_up_python '[dev]' "$INSTALLED" 9<&-
if [ "${1:-}" != --without-wasm ]; then "$VENV/bin/python" -m scripts.compile_wasm 9<&-; fi
set_up_tools 9<&-
set_up_runsc 9<&-
set_up_kernel 9<&-
if ! is_root; then
    say "not root: hard memory limits, disk quotas, the system profile and the tests marked needs_root will be missing here"
fi
