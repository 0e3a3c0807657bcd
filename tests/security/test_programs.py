"""Only some tools are allowed: every way to start another one all the same, tried by a guest that can make any system call.

The guest is Python code in a sandbox whose rules allow git alone. Its control arm is the same code in a sandbox with no rules about tools,
where every way works.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.policy.model import ProgramRules, cloned
from agent_sandbox.policy.programs import LINE_SHELLS
from tests.readers.shell.corpus import corpus
from tests.security.conftest import Tell
from tests.security.harness import Box, case

# Each way tries to have `basename MARK` executed, which prints the mark.
_WAYS = """
import ctypes, json, mmap, os, shutil, subprocess, sys
MARK, TOOL = "mark-of-a-tool-that-ran", "/usr/bin/basename"
LOADER = os.path.realpath("/lib64/ld-linux-x86-64.so.2" if os.path.exists("/lib64/ld-linux-x86-64.so.2") else "/lib/ld-linux-aarch64.so.1")
libc = ctypes.CDLL(None, use_errno=True)

def ran(argv, **how):
    try:
        done = subprocess.run(argv, capture_output=True, timeout=20, **how)
    except OSError:
        return False
    return MARK.encode() in done.stdout

def tool():
    with open(IMAGE, "rb") as file:  # the tool's bytes, as a guest might have downloaded them
        return file.read()

def written(path, content=None):
    with open(path, "wb") as file:
        file.write(tool() if content is None else content)
    os.chmod(path, 0o755)
    return path

def in_memory():
    fd = libc.memfd_create(b"tool", 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    os.write(fd, tool())
    return fd

def execveat(fd):
    child = os.fork()
    if child == 0:
        argv = (ctypes.c_char_p * 3)(b"basename", MARK.encode(), None)
        number = 322 if os.uname().machine == "x86_64" else 281
        out = os.open(OUT, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(out, 1)
        libc.syscall(number, fd, b"", argv, (ctypes.c_char_p * 1)(None), 0x1000)
        os._exit(1)
    os.waitpid(child, 0)
    with open(OUT) as file:
        return MARK in file.read()

def link(where, make):
    make(TOOL, where)
    return where

def mapped(path):
    fd = os.open(written(path), os.O_RDWR)
    mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
    return True

def made_code(path):
    fd = os.open(written(path), os.O_RDONLY)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
    return libc.mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ | mmap.PROT_EXEC) == 0

def replaced(how):
    how(written(f"{PROJECT}/instead"), shutil.which("git"))
    return ran(["git", MARK])

def overwritten(ours, theirs):
    with open(theirs, "r+b") as file:
        file.write(open(ours, "rb").read())

def anonymous_file(directory):
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o755)
    os.write(fd, tool())
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return readable

def rewritten_memory():
    buffer = ctypes.create_string_buffer(b"before")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(ctypes.addressof(buffer))
        memory.write(b"after!")
    return buffer.value == b"after!"

def by_git(*options, **env):
    return ran(["git", *options], cwd=REPOSITORY, env={"PATH": os.environ["PATH"], "HOME": "/tmp", **env})

def hooked(script):
    written(f"{REPOSITORY}/.git/hooks/pre-commit", script.encode())
    by_git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "x")
    return os.path.exists("/tmp/hooked") and MARK in open("/tmp/hooked").read()

def preloaded(library):
    said = subprocess.run(["git", "--version"], capture_output=True, env={"LD_PRELOAD": library})
    return said.returncode == 0 and b"cannot be preloaded" not in said.stderr

def through_descriptor(fd):
    return ran([f"/proc/self/fd/{fd}", MARK], pass_fds=[fd])

WAYS = {
    "by its name": lambda: ran(["basename", MARK]),
    "by its path": lambda: ran([TOOL, MARK]),
    "by another path": lambda: ran(["/proc/self/root" + TOOL, MARK]),
    "through the loader": lambda: ran([LOADER, TOOL, MARK]),
    "through a copy of the loader": lambda: ran([shutil.copy(LOADER, f"{PROJECT}/ld"), TOOL, MARK]),
    "a link": lambda: ran([link(f"{PROJECT}/link", os.symlink), MARK]),
    "a hard link": lambda: ran([link("/usr/bin/linked", os.link), MARK]),
    "a script for it": lambda: ran([written(f"{PROJECT}/script", f"#!{TOOL} {MARK}\\n".encode())]) or
        subprocess.run([f"{PROJECT}/script"], capture_output=True).stdout != b"",
    "a script for the loader": lambda: ran([written(f"{PROJECT}/loaded", f"#!{LOADER} {IMAGE}\\n".encode()), MARK]) or
        subprocess.run([f"{PROJECT}/loaded", MARK], capture_output=True).stdout != b"",
    **{f"written to {place}": lambda place=place: ran([written(f"{place}/tool"), MARK]) for place in PLACES},
    **{f"written to {place}, through the loader": lambda place=place: ran([LOADER, written(f"{place}/tool2"), MARK]) for place in PLACES},
    **{f"mapped from {place}": lambda place=place: mapped(f"{place}/tool3") for place in PLACES},
    "in place of another tool": lambda: ran([written("/usr/bin/git-mine"), MARK]),
    "a file in memory": lambda: through_descriptor(in_memory()),
    "a file in memory, through the loader": lambda: (fd := in_memory()) and ran([LOADER, f"/proc/self/fd/{fd}", MARK], pass_fds=[fd]),
    "a file in memory, by descriptor": lambda: execveat(in_memory()),
    "a file without a name": lambda: through_descriptor(anonymous_file(PROJECT)),
    "a file without a name, by descriptor": lambda: execveat(anonymous_file(PROJECT)),
    "by descriptor": lambda: execveat(os.open(TOOL, os.O_RDONLY)),
    "loaded into git": lambda: preloaded(written("/tmp/spy.so", open(LIBRARY, "rb").read())),
    "an alias of git": lambda: by_git("-c", f"alias.x=!{TOOL} {MARK}", "x"),
    "a hook of git": lambda: hooked(f"#!/bin/sh\\n{TOOL} {MARK} > /tmp/hooked\\n"),
    "what git connects with": lambda: by_git("ls-remote", "ssh://host/x", GIT_SSH_COMMAND=f"{TOOL} {MARK} > /tmp/connected;") or
        os.path.exists("/tmp/connected") and MARK in open("/tmp/connected").read(),
    "git that looks for helpers elsewhere": lambda: bool(written(f"{PROJECT}/git-mark")) and by_git("mark", MARK, GIT_EXEC_PATH=PROJECT),
    "its own memory rewritten": rewritten_memory,
    "a mapped file made code": lambda: made_code(f"{PROJECT}/tool4"),
    "instead of git": lambda: replaced(lambda ours, theirs: os.replace(shutil.copy(ours, theirs + "-new"), theirs)),
    "over git": lambda: replaced(overwritten),
}

found = {}
for name, way in WAYS.items():
    try:
        found[name] = bool(way())
    except OSError as error:
        found[name] = False
print(json.dumps(found))
"""


def _attempts(project: Path) -> str:
    library = next(path for path in Path("/usr/lib").rglob("libm.so.6"))
    image = project / "downloaded"
    shutil.copy("/usr/bin/basename", image)
    repository = project / "repository"
    subprocess.run(["git", "init", "-q", repository], check=True)
    places = [str(project), "/tmp", "/dev/shm", "/run", *(["/usr/bin", "/opt"] if os.geteuid() == 0 else [])]
    values = {
        "PROJECT": str(project),
        "OUT": "/tmp/out",
        "IMAGE": str(image),
        "LIBRARY": str(library),
        "PLACES": places,
        "REPOSITORY": str(repository),
    }
    return "".join(f"{name} = {value!r}\n" for name, value in values.items()) + _WAYS


def gated(box: Box, *allowed: str, shell: bool = False, denied: tuple[str, ...] = ()) -> Box:
    """The same box, in which only these tools may be started."""
    return box.with_(policy=cloned(masks=box.rules.masks, limits=box.limits, programs=ProgramRules((allowed,), denied, lines=shell)))


@case(41, prio="P2")
def test_nothing_but_what_is_allowed_is_executed_however_it_is_spelt(box: Box, number: int, tell: Tell) -> None:
    attempts = _attempts(box.project)
    control = box.probe(attempts)
    only_for_root = {"a hard link", "in place of another tool", "instead of git", "over git"} if os.geteuid() else set()
    assert [way for way, worked in control.items() if not worked and way not in only_for_root] == []
    for shell in (False, True):
        inside = gated(box, "git", shell=shell).probe(attempts)
        assert [way for way, worked in inside.items() if worked] == [], f"with a shell: {shell}"
    tell(f"none of {len(control)} ways", control=f"{sum(map(bool, control.values()))} of them work without rules")


# Runs each line in a shell of its own, in a directory of its own, where every tool is a stand-in that says that it was started.
_LINES = """
import json, os, signal, subprocess
LOG = "/tmp/started"
with open(LINES) as file:
    lines = json.load(file)
started = []
for number, line in enumerate(lines):
    place = f"/tmp/{number}"
    os.mkdir(place)
    open(LOG, "w").close()
    shell = subprocess.Popen(["bash", "-c", line], cwd=place, env={"PATH": f"{STAND_INS}:/usr/bin:/bin", "HOME": place, "LOG": LOG},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        shell.wait(10)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shell.wait()
    with open(LOG) as file:
        started.append(sorted(set(file.read().split())))
print(json.dumps(started))
"""
_STAND_IN = '#!/bin/sh\necho "${0##*/}" >> "$LOG"\n'


def _stand_ins(project: Path, lines: list[str], tools: set[str]) -> str:
    """The probe that runs the lines, with what it needs in the project."""
    place = project / "stand-ins"
    place.mkdir()
    for name in tools:
        (place / name).write_text(_STAND_IN)
        (place / name).chmod(0o755)
    (project / "lines.json").write_text(json.dumps(lines))
    return f"STAND_INS, LINES = {str(place)!r}, {str(project / 'lines.json')!r}\n{_LINES}"


@case(41, prio="P2")
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.torture)])
def test_what_a_line_starts_is_not_there_whether_or_not_it_was_understood(box: Box, number: int, every: int, tell: Tell) -> None:
    """The corpus of command lines: without rules their tools are started, with none of them allowed not one is."""
    chosen = corpus()[::every]
    names = {name for _, tools, _ in corpus() for name in tools if "/" not in name} - set(LINE_SHELLS) - {"sleep"}
    probe = _stand_ins(box.project, [line for line, _, _ in chosen], names)
    control = box.probe(probe)
    labelled = [names.intersection(tools) for _, tools, _ in chosen]
    meant = sum(bool(tools.intersection(started)) for tools, started in zip(labelled, control, strict=True))
    assert meant > 0.8 * sum(map(bool, labelled)), "the control arm: most lines start what they are labelled with"
    inside = gated(box, "git-nothing", shell=True).probe(probe)
    assert [line for (line, _, _), started in zip(chosen, inside, strict=True) if started] == []
    tell(f"not one of {len(chosen)} lines started a tool", control=f"{meant} of them start what they are labelled with, without rules")
