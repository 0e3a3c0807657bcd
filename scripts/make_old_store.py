"""Make the stores in tests/workspace/old_store: what an earlier version of this program left on disk.

That version is taken from git and run as it was, as root (layers in an image) and as a user who is not (layers in directories). Needs root,
git, GNU tar and xz. `tests/workspace/test_old_store.py` unpacks the stores at the same path and opens them with the present version.

Usage: python -m scripts.make_old_store [COMMIT]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from agent_sandbox.kernel import syscalls as sc

COMMIT = "74da0b3"  # the last one before the rooms and names of the house changed
CHECKOUT = Path(__file__).resolve().parent.parent
FIXTURES = CHECKOUT / "tests/workspace/old_store"
PLACE = Path("/srv/agent-sandbox-old-store")
USER = 1000  # owner of the rootless store

FILES = {
    "promoted.txt": "before\n",
    "edit.txt": "one\ntwo\n",
    "gone.txt": "this goes\n",
    "old-name.txt": "".join(f"line {number} of a file that is renamed\n" for number in range(20)),
    "mode.sh": "#!/bin/sh\necho mode\n",
    "keep.txt": "nobody touches this\n",
}
FIRST = "echo after > promoted.txt; echo new > promoted-new.txt"
SECOND = "echo TWO >> edit.txt"
THIRD = "; ".join(
    (
        "echo three >> edit.txt; rm gone.txt; mv old-name.txt new-name.txt; chmod 755 mode.sh; ln -s edit.txt link",
        "rmdir empty; mkdir -p new/inner; echo inside > new/inner/file",
        "rm -r replaced; mkdir replaced; echo fresh > replaced/fresh",  # an opaque directory
    )
)
STEPS = (
    ("run", FIRST),
    ("promote", "--yes"),
    ("run", SECOND),
    ("snapshot", "first"),
    ("run", THIRD),
    ("sim", "echo planned > planned.txt"),
    ("grant", "run git push **", "--for", "1h"),
    ("log", "verify"),
)


def make(source: str, uid: int) -> None:
    """Make one store with the version in `source`, as this user, and pack it."""
    PLACE.mkdir(mode=0o755)
    try:
        project = PLACE / "project"
        for directory in ("empty", "replaced/before"):
            (project / directory).mkdir(parents=True)
        for name, text in FILES.items():
            (project / name).write_text(text)
        for path in (PLACE, project, *project.rglob("*")):
            os.chown(path, uid, uid)
        environment = {
            "PATH": os.defpath,
            "HOME": str(PLACE),
            "LANG": "C.UTF-8",
            "PYTHONPATH": source,
            "PYTHONDONTWRITEBYTECODE": "1",
            "AGENT_SANDBOX_STATE": str(PLACE / "state"),
            "AGENT_SANDBOX_KEYS": str(PLACE / "keys"),
        }
        for step in STEPS:
            command = ["/usr/bin/python3", "-m", "agent_sandbox", *step]
            subprocess.run(command, cwd=project, env=environment, user=uid, group=uid, extra_groups=[], umask=0o022, check=True)
        target = FIXTURES / f"{'root' if uid == 0 else 'user'}.tar.xz"
        pack = ["tar", "--format=posix", "--sparse", "--xattrs", "--xattrs-include=user.*", "--sort=name", "--numeric-owner"]
        subprocess.run([*pack, "-C", str(PLACE), "-cJf", str(target), "."], env={**os.environ, "XZ_OPT": "-9e"}, check=True)
        print(f"{target.relative_to(CHECKOUT)}: {target.stat().st_size:,} bytes")
    finally:
        shutil.rmtree(PLACE)


def mount_over(target: Path, source: Path) -> None:
    """Show a new directory at `target`, in a mount namespace of our own. The test does the same, so a sandbox has the same layers there."""
    source.mkdir()
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    sc.mount(str(source), str(target), None, sc.MS_BIND)


def main(commit: str = COMMIT) -> None:
    """Take that version from git and let it make both stores."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as checkout:
        os.chmod(checkout, 0o755)
        archive = subprocess.run(["git", "-C", str(CHECKOUT), "archive", commit, "src"], stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", checkout], input=archive, check=True)
        FIXTURES.mkdir(exist_ok=True)
        mount_over(PLACE.parent, Path(checkout, "place"))
        for uid in (0, USER):
            make(f"{checkout}/src", uid)


if __name__ == "__main__":
    main(*sys.argv[1:])
