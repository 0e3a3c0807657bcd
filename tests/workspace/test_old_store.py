"""A store that an earlier version wrote opens now, with everything that was in it.

`scripts/make_old_store.py` made the stores in old_store/ with that version: one of root (an image) and one of a user (directories). They
hold the path at which they were made, so each is unpacked there, in a mount namespace of the test's own: nothing of it is on the machine,
and two suites do not meet. The user's store is opened in a user namespace in which we are that user, whoever we are. A checkout
may be hidden below that path, so the program is run from a copy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pytest

import agent_sandbox
from agent_sandbox.kernel import syscalls as sc
from agent_sandbox.kernel.ids import write_maps
from scripts.make_old_store import FILES, PLACE, USER, mount_over
from tests.kernel.children import in_child

STORES = Path(__file__).with_name("old_store")
PROJECT = PLACE / "project"
PYTHON = os.path.realpath(sys.executable)  # read before the place of the stores hides the checkout
COPY = "AGENT_SANDBOX_TEST_COPY"  # the variable with the place of the copied program
XATTR = "SCHILY.xattr."
NOW = {**{name: text for name, text in FILES.items() if name != "promoted.txt"}, "promoted.txt": "after\n", "promoted-new.txt": "new\n"}
THEN = {
    **{name: text for name, text in NOW.items() if name not in ("gone.txt", "old-name.txt")},
    "edit.txt": FILES["edit.txt"] + "TWO\nthree\n",
    "new-name.txt": FILES["old-name.txt"],
    "new/inner/file": "inside\n",
    "replaced/fresh": "fresh\n",
}
PENDING = {
    ("edit.txt", "modified"),
    ("gone.txt", "deleted"),
    ("old-name.txt", "deleted"),
    ("new-name.txt", "added"),
    ("mode.sh", "mode"),
    ("link", "added"),
    ("empty", "deleted"),
    ("new", "added"),
    ("new/inner", "added"),
    ("new/inner/file", "added"),
    ("replaced/before", "deleted"),
    ("replaced/fresh", "added"),
}


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON that it printed."""
        assert self.code == 0, self
        value: dict[str, Any] = json.loads(self.stdout)
        return value


def sandbox(*arguments: str) -> Ended:
    """Run the present version on the store."""
    environment = {
        "PATH": os.defpath,
        "HOME": str(PLACE),
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.environ[COPY],
        "AGENT_SANDBOX_STATE": str(PLACE / "state"),
        "AGENT_SANDBOX_KEYS": str(PLACE / "keys"),
    }
    command = [PYTHON, "-m", "agent_sandbox", *arguments]
    done = subprocess.run(command, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return Ended(done.returncode, done.stdout, done.stderr)


def files() -> dict[str, str]:
    """The regular files of the project, with their content."""
    return {str(path.relative_to(PROJECT)): path.read_text() for path in PROJECT.rglob("*") if path.is_file() and not path.is_symlink()}


def pending() -> set[tuple[str, str]]:
    """The changes that wait: path and kind."""
    changes = sandbox("diff", "--json").document["changes"]
    return {(os.path.relpath(change["path"], PROJECT), change["kind"]) for change in changes}


Within = Callable[[Callable[[], None]], None]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copy the program to where an old store hides nothing."""
    place = tmp_path_factory.mktemp("program")
    shutil.copytree(Path(agent_sandbox.__file__).parent, place / "agent_sandbox")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COPY, str(place))
        yield


@pytest.fixture(params=[pytest.param("root", marks=pytest.mark.needs_root), "user"])
def within(request: pytest.FixtureRequest, tmp_path: Path, copied: None) -> Within:
    """Do something with an old store, unpacked at its own path in a namespace that ends with it."""
    name: str = request.param
    if not PLACE.parent.is_dir():
        pytest.skip(f"there is no {PLACE.parent} to unpack an old store at")
    try:
        os.setxattr(tmp_path, "user.probe", b"1")
    except OSError as error:
        pytest.skip(f"the filesystem of {tmp_path} holds no attributes of layers: {error.strerror}")

    def enter(archive: BinaryIO) -> None:
        if name == "user":
            ids = os.geteuid(), os.getegid()
            sc.unshare(sc.CLONE_NEWUSER)
            write_maps("self", uid_map=f"{USER} {ids[0]} 1", gid_map=f"{USER} {ids[1]} 1", deny_setgroups=True)
        mount_over(PLACE.parent, tmp_path / "place")
        unpack(archive, PLACE)

    def do(act: Callable[[], None]) -> None:
        def entered() -> None:
            enter(archive)
            act()

        with open(STORES / f"{name}.tar.xz", "rb") as archive:
            in_child(entered)

    return do


def unpack(archive: BinaryIO, place: Path) -> None:
    """Unpack a store, with whiteouts and the attributes of the overlay, and with holes where there were some."""
    place.mkdir(mode=0o755)
    with tarfile.open(fileobj=archive) as tar:
        members = tar.getmembers()
        tar.extraction_filter = lambda member, _: member  # all of it, devices too; Python 3.11 may not know the argument `filter` yet
        tar.extractall(place, members, numeric_owner=True)
    for member in members:
        for key, value in member.pax_headers.items():
            if key.startswith(XATTR):
                os.setxattr(place / member.name, key.removeprefix(XATTR), os.fsencode(value), follow_symlinks=False)


def test_what_waits_in_an_old_store_is_shown(within: Within) -> None:
    def act() -> None:
        assert pending() == PENDING
        (renamed,) = [change for change in sandbox("diff", "--json").document["changes"] if change["path"] == str(PROJECT / "new-name.txt")]
        assert renamed["renamed_from"] == str(PROJECT / "old-name.txt")
        assert sandbox("status", "--json").code == 0
        assert "+three" in sandbox("diff").stdout
        assert files() == NOW

    within(act)


def test_the_snapshots_of_an_old_store_can_be_gone_back_to(within: Within) -> None:
    def act() -> None:
        listed = sandbox("snapshots", "--json").document["snapshots"]
        assert [(each["id"], each["label"]) for each in listed][1:] == [(2, "first")]
        assert sandbox("rollback", "first").code == 0
        assert pending() == {("edit.txt", "modified")}
        assert sandbox("rollback", "before rollback to first").code == 0
        assert pending() == PENDING

    within(act)


def test_an_old_store_is_promoted_and_its_promotions_are_undone(within: Within) -> None:
    def act() -> None:
        done = sandbox("promote", "--yes")
        assert done.code == 0, done
        assert files() == THEN
        assert (PROJECT / "mode.sh").stat().st_mode & 0o777 == 0o755 and os.readlink(PROJECT / "link") == "edit.txt"
        assert not (PROJECT / "empty").exists() and not (PROJECT / "replaced/before").exists()
        assert pending() == set()
        assert sandbox("undo", "--yes").code == 0
        assert files() == NOW and (PROJECT / "empty").is_dir() and (PROJECT / "replaced/before").is_dir()
        assert pending() == PENDING
        undone = sandbox("undo", "--yes")  # the promotion that the earlier version made
        assert undone.code == 0, undone
        assert files() == FILES

    within(act)


def test_the_ledger_of_an_old_store_verifies_and_goes_on(within: Within) -> None:
    def act() -> None:
        before = sandbox("log", "verify", "--json")
        assert before.code == 0, before
        assert "run" in sandbox("log").stdout
        assert sandbox("promote", "--yes").code == 0
        after = sandbox("log", "verify")
        assert after.code == 0 and "integrity   holds" in after.stdout and "complete    holds" in after.stdout, after
        assert sandbox("capabilities", "--json").code == 0

    within(act)


def test_the_next_run_adds_to_an_old_store(within: Within) -> None:
    def act() -> None:
        ran = sandbox("run", "echo four >> edit.txt; cat edit.txt")
        assert ran.code == 0, ran
        assert ran.stdout.endswith("TWO\nthree\nfour\n")
        assert pending() == PENDING

    within(act)


def test_a_store_of_an_unknown_format_is_refused_and_left_alone(within: Within) -> None:
    def act() -> None:
        for text in ("agent-sandbox store 1\n", "agent-sandbox store 3\n"):
            (PLACE / "state/format").write_text(text)
            refused = sandbox("diff")
            assert refused.code != 0 and "store" in refused.stderr, refused
        (PLACE / "state/format").write_text("agent-sandbox store 2\n")
        assert pending() == PENDING

    within(act)
