"""Promoting in portions: for the sandbox nothing changes, and in the end it is as if promoted at once. Random trees, edits and choices."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox import Workspace, shell
from agent_sandbox.assembly import here
from agent_sandbox.workspace.protected import CLASSES

NAMES = st.sampled_from("abc")
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
EDITS = st.one_of(
    st.builds("mkdir -p $(dirname {0}); echo {1} > {0}".format, PATHS, st.integers(0, 99)),
    st.builds("rm -rf {0}".format, PATHS),
    st.builds("rm -rf {0}; mkdir -p {0}; echo {2} > {0}/{1}".format, PATHS, NAMES, st.integers(0, 99)),
    st.builds("mkdir -p $(dirname {1}); mv -T {0} {1}".format, PATHS, PATHS),
    st.builds("rm -rf {0}; ln -s {1} {0}".format, PATHS, NAMES),
    st.builds("ln {0} {1}".format, PATHS, PATHS),
    st.builds("chmod {1} {0}".format, PATHS, st.sampled_from(["u=rwX,go=", "a+rX", "u+x"])),
    st.builds("cp -a {0} {1}".format, PATHS, PATHS),
)
SCRIPTS = st.lists(EDITS, min_size=1, max_size=6).map(lambda edits: "\n".join(f"{{ {edit}; }} 2>/dev/null" for edit in edits))
LIST = r"find . -mindepth 1 -printf '%P %y %m %l ' \( -type f -exec md5sum {} \; -o -printf '\n' \) | sort"


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("portions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_SANDBOX_STATE", str(made / "state"))
        yield made


def real(project: str) -> list[str]:
    return subprocess.run(["bash", "-c", LIST], cwd=project, check=True, capture_output=True, text=True).stdout.splitlines()


def seen(work: Workspace) -> list[str]:
    return work.run(shell(LIST)).stdout.splitlines()


def try_it(place: Path, before: str, inside: str, choose: st.DataObject, choices: int = 2) -> None:
    project = tempfile.mkdtemp(dir=place)
    subprocess.run(["bash", "-c", before], cwd=project, check=False)
    time.sleep(0.05)  # what changed in the very moment a run begins has no base
    at_first = real(project)
    work = Workspace.over(project)
    try:
        work.run(shell(inside))
        view, trees = seen(work), [at_first]
        for _ in range(choices):
            waiting = [change.path for change in work.changes()]
            only = choose.draw(st.sets(st.sampled_from(waiting), min_size=1)) if waiting else set()
            work.promote(sorted(only), approve=CLASSES)
            assert seen(work) == view
            trees += [real(project)] if trees[-1] != real(project) else []
        work.promote(approve=CLASSES)
        assert real(project) == view and len(work.changes()) == 0
        trees += [real(project)] if trees[-1] != real(project) else []
        for earlier in reversed(trees[:-1]):
            work.undo()
            assert real(project) == earlier
        assert real(project) == at_first
    finally:
        work.reset()
        for directory, _, _ in os.walk(project):
            os.chmod(directory, stat.S_IRWXU)
        shutil.rmtree(project)


@pytest.mark.once
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=SCRIPTS, inside=SCRIPTS, choose=st.data())
def test_in_portions_it_is_as_if_at_once(place: Path, before: str, inside: str, choose: st.DataObject) -> None:
    try_it(place, before, inside, choose)


@pytest.mark.torture
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=SCRIPTS, inside=SCRIPTS, choose=st.data())
def test_in_portions_it_is_as_if_at_once_in_400_cases(place: Path, before: str, inside: str, choose: st.DataObject) -> None:
    try_it(place, before, inside, choose, choices=3)
