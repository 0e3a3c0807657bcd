"""A program that is not allowed, in every spelling and through every tool that is: what the parser missed does not run either.

Each line starts one and the same program, which lies in a directory of PATH and leaves a mark. Where nothing is restricted every line
leaves one: that is the control arm. In the view that allows the tools of all lines, and not that program, none does.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.approval_rules import question_about
from agent_sandbox.policy.model import AskRules
from agent_sandbox.readers.shell.analyze import understand
from agent_sandbox.readers.shell.effects import EffectKind
from tests.security.conftest import Tell
from tests.security.harness import Box, case
from tests.security.test_programs import gated

pytestmark = pytest.mark.once

NAME = "leavemark"
LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")

# Runs each line in a shell and a directory of its own, several at once, and tells which left a mark.
_RUN = """
import concurrent.futures, json, os, signal, subprocess
with open(LINES) as file:
    lines = json.load(file)
os.makedirs("/tmp/marks")
def run(number):
    place, mark = f"/tmp/{number}", f"/tmp/marks/{number}"
    os.mkdir(place)
    env = {"PATH": f"{TOOLS}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": place, "TERM": "dumb"}
    shell = subprocess.Popen(["bash", "-c", lines[number].replace("@O", mark)], cwd=place, env=env, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        shell.wait(60)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shell.wait()
    return os.path.exists(mark)
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(json.dumps(list(pool.map(run, range(len(lines))))))
"""


class Spelling(NamedTuple):
    needs: tuple[str, ...]
    line: str


def spellings() -> list[Spelling]:
    """Those for which this machine has the tools."""
    found = []
    for text in Path(__file__).with_name("spellings.txt").read_text(encoding="utf-8").splitlines():
        if text and not text.startswith("#"):
            needs, _, line = text.partition(" | ")
            tools = tuple(each.strip() for each in needs.split(",") if each != "-")
            if all(map(shutil.which, tools)):
                found.append(Spelling(tools, line.replace("⏎", "\n")))
    return found


def _probe(project: Path, chosen: list[Spelling]) -> str:
    """The probe that runs the lines, with the program that they start in the project."""
    tools = project / "tools"
    if not tools.exists():
        tools.mkdir()
        shutil.copy(os.path.realpath(shutil.which("touch") or ""), tools / NAME)
    library = next(path for path in Path("/usr/lib").rglob("libm.so.6"))
    names = {
        "@T": f"{tools}/{NAME}",
        "@D": str(tools),
        "@L": next(path for path in LOADERS if os.path.exists(path)),
        "@S": str(library),
    }
    lines = []
    for each in chosen:
        line = each.line
        for name, value in names.items():
            line = line.replace(name, value)
        lines.append(line)
    (project / "lines.json").write_text(json.dumps(lines))
    return f"TOOLS, LINES = {str(tools)!r}, {str(project / 'lines.json')!r}\n{_RUN}"


def _environment(box: Box) -> dict[str, str]:
    return {**box.environment, "PATH": f"{box.project}/tools:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}


@pytest.mark.both
@case(41)
def test_a_program_that_is_not_allowed_does_not_run_however_it_is_spelt(box: Box, number: int, tell: Tell) -> None:
    chosen = spellings()
    probe, env = _probe(box.project, chosen), _environment(box)
    allowed = sorted({tool for each in spellings() for tool in each.needs} | {"cat", "chmod", "cp", "mkdir", "rm", "ls"})
    control = box.probe(probe, env=env)
    idle = [each.line for each, marked in zip(chosen, control, strict=True) if not marked]
    assert idle == [], "the control arm: every line starts it"
    inside = gated(box, *allowed, shell=True).probe(probe, env=env)
    assert [each.line for each, marked in zip(chosen, inside, strict=True) if marked] == []
    named = gated(box, *allowed, NAME, shell=True).probe(_probe(box.project, chosen[:3]), env=env)
    assert all(named), "and where it is allowed by its name, its name starts it"
    tell(f"none of {len(chosen)} lines started it", control="with no rules every line does, and with its name allowed the plain ones do")


def test_no_spelling_is_taken_for_harmless() -> None:
    """Where the reader of commands does not find the program, it says that there is something that it does not know."""
    harmless = []
    for each in spellings():
        found = understand(each.line)
        vague = found.unreadable or found.unknown or found.kinds & {EffectKind.RUNS_CODE, EffectKind.UNKNOWN}
        if not (NAME in found.tools or any(tool.endswith(f"/{NAME}") for tool in found.tools) or "@" in "".join(found.tools) or vague):
            harmless.append((each.line, found.tools))
    assert harmless == []


# A script that the line writes to a file and then runs is a file that is run, and what is in those is not looked for.
_IN_A_FILE = ("> f;", "> s;", "> post-commit;", "make -f -", "| ed -s")


def test_whoever_is_to_be_asked_about_a_program_is_asked_in_every_spelling_that_stands_on_the_line() -> None:
    rules, unasked = AskRules(commands=(f"{NAME} **",)), list[str]()
    for each in spellings():
        line = each.line.replace("@T", f"/usr/bin/{NAME}").replace("@D", "/usr/bin").replace("@L", LOADERS[0])
        if question_about(rules, RunCommand.of(["bash", "-c", line])) is None and not any(mark in line for mark in _IN_A_FILE):
            unasked.append(line)
    assert unasked == []
    harmless = (
        "git status",
        "pytest -q",
        "make test",
        "npm run build",
        "python3 script.py",
        "ls -la && cat README.md",
        "EDITOR=vim git log",
    )
    assert [line for line in harmless if question_about(rules, RunCommand.of(["bash", "-c", line]))] == [], (
        "and nobody is asked about the rest"
    )
