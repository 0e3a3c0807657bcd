"""A place like a container of Podman with its defaults, made with namespaces and a system-call filter: an ordinary user, a new /proc and
another host name refused. Parts of /proc are covered, for which the kernel refuses a new one in a user namespace."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

CANARY = "canary-1d0c77"
USER = 60_321  # for the tests that root starts: nobody's
CONTAINER = """
import ctypes, os, platform, struct, sys
from agent_sandbox.kernel import namespaces, syscalls as sc
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid({user}, {user}, {user})
    os.setresuid({user}, {user}, {user})
    sc.prctl(sc.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
namespaces.enter_own_user_namespace()
sc.unshare(sc.CLONE_NEWNS)
sc.mount("", "/", None, sc.MS_REC | sc.MS_PRIVATE)
for name in {covered}:
    if os.path.exists(f"/proc/{{name}}"):
        sc.mount("/dev/null", f"/proc/{{name}}", None, sc.MS_BIND)
for name in {read_only}:
    sc.mount(f"/proc/{{name}}", f"/proc/{{name}}", None, sc.MS_BIND | sc.MS_REC)
    sc.mount("", f"/proc/{{name}}", None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
if {filtered}:
    number = {{"x86_64": 170, "aarch64": 161}}[platform.machine()]  # sethostname
    # Load the number; if it is this one, answer EPERM; else allow.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    program = Program(len(steps), ctypes.addressof(text))
    assert ctypes.CDLL(None, use_errno=True).prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class Container:
    """A place of an ordinary user in which a new /proc and sethostname are refused, or, as the control, are not."""

    home: Path
    checkout: Path  # that its user can read
    masked: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter of the checkout."""
        return str(self.checkout / ".venv/bin/python")

    @property
    def program(self) -> tuple[str, ...]:
        """The command line, to which a verb is added."""
        return self.python, "-m", "agent_sandbox"

    def start(self, *line: str, **more: str) -> subprocess.Popen[bytes]:
        covered, read_only = (("keys", "timer_list", "version", "kcore"), ("bus", "fs", "irq", "sys")) if self.masked else ((), ())
        code = CONTAINER.format(user=USER, covered=covered, read_only=read_only, filtered=self.masked)
        given = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", **self.environment, **more}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([self.python, "-c", code, *line], cwd=self.home / "project", env=given, **pipes)  # type: ignore[call-overload,no-any-return]

    def __call__(self, *line: str) -> subprocess.CompletedProcess[bytes]:
        with self.start(*self.program, *line) as running:
            out, err = running.communicate(timeout=300)
        return subprocess.CompletedProcess(line, running.returncode, out, err)


@contextmanager
def made_container(checkout: Path) -> Iterator[Container]:
    """Make one, with a home directory and a project, and remove them. The fixture `reachable_checkout` has a checkout for it.

    Not below a directory of pytest's: another pytest closes that to everybody else whenever it starts.
    """
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="container") as place:
        home = Path(place) / "home"
        (home / "project").mkdir(parents=True)
        for each in (Path(place), home, home / "project"):
            if root:
                os.chown(each, USER, USER)
        yield Container(home, checkout)


def control(container: Container) -> Container:
    """The same user without the refusals."""
    return replace(container, masked=False)


# A neighbour of the same user in the same container, a look at it without a sandbox, and the same look from a sandbox.
NEIGHBOUR = """
cat > look <<'END'
tr '\\0' '\\n' < /proc/$1/environ | grep SECRET
cat /proc/$1/root/$PWD/beside 2>/dev/null
echo 500 > /proc/$1/oom_score_adj && echo WRITTEN
[ "$2" = end ] && kill -9 $1 && echo KILLED
echo SAW $(cat /proc/$1/comm)
END
echo reached > beside
SECRET={canary} sleep 600 &
until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done
sh look $!
echo SANDBOXED
{program} --quiet run --throw-away -- sh look $! end
echo AFTERWARDS $(cat /proc/$!/comm /proc/$!/oom_score_adj)
kill $!
"""
