"""A policy that was learnt lets the same happen again, and each of its lines is needed: on real commands, run under it and under less."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from shlex import quote
from shutil import which

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.engine import learn as engine_learn
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.learn import ObservedRun, difference, propose
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Command, Outcome, Work
from agent_sandbox.errors import Denied
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.explanation import lint
from agent_sandbox.policy.files.document import Document, parse_toml
from agent_sandbox.policy.files.layers import effective
from agent_sandbox.policy.model import Policy, cloned
from agent_sandbox.policy.proposal import Proposal, as_toml
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.observe import Observed
from agent_sandbox.runtime.process.runtime import ProcessRuntime

COMMANDS = {
    "git": "git add -A && git commit -q -m 'fix: bug' && git log --oneline",
    "make": "make -s",
    "python": "/usr/bin/python3 report.py ../shared/rows.csv",
    "packages": "/usr/bin/python3 -m zipfile -c wheel.whl src && mkdir -p lib && /usr/bin/python3 -m zipfile -e wheel.whl lib",
    "pipeline": "cat ../shared/rows.csv | sort | uniq -c | tee counts.txt | wc -l",
    "sed": "find src -name '*.txt' -exec sed -i s/one/two/ {} +",
    "tar": "tar --numeric-owner -czf src.tar.gz src && mkdir out && tar -xzf src.tar.gz -C out",
    "reading": "grep -r one src ../shared/rows.csv",
    "the shell alone": "read -r line < ../shared/rows.csv; echo $line > first.txt",
    "a branch not taken": "true || curl http://192.0.2.1",
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[ProcessRuntime]:
    shared = ProcessRuntime()
    yield shared
    shared.close()


class Somebody:
    """Somebody with a home, a project in it, and shared data beside that."""

    def __init__(self, home: Path, runtime: ProcessRuntime) -> None:
        self.home, self.project, self.runtime = home, home / "app", runtime
        self.env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", "TZ": "UTC"}
        self.env |= {f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}  # so that what it writes is the same
        self.ceiling = cloned(masks=[Mask(str(home / ".ssh"), "private keys")])

    def run(self, line: str | tuple[str, ...], policy: Policy) -> Outcome:
        gate = Gate(policy, Ledger(self.home / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
        argv = ("bash", "-c", line) if isinstance(line, str) else line
        work = Work(Command(argv), self.env, cwd=str(self.project), observe=True)
        return Session(gate, only(self.runtime), project=str(self.project)).run(work)

    def learn(self, *lines: str | tuple[str, ...], named: bool = False) -> tuple[Proposal, list[Outcome]]:
        outcomes = [self.run(line, self.ceiling) for line in lines]
        works = [Work(Command(("bash", "-c", each) if isinstance(each, str) else each), self.env, cwd=str(self.project)) for each in lines]
        ran = [ObservedRun(work, outcome) for work, outcome in zip(works, outcomes, strict=True)]
        return propose(ran, self.ceiling, project=str(self.project), home=str(self.home), named=named), outcomes

    def again(self, line: str | tuple[str, ...], document: Document, first: Outcome) -> str:
        """How it differs under a policy: as `difference` says, or in what it prints, writes and reads, which is always the same here."""
        try:
            again = self.run(line, effective(self.ceiling, [document], home=str(self.home)).policy)
        except Denied as error:
            return error.message
        if how := difference(first, again):
            return how
        return next((name for name in ("printed", "changed", "used") if getattr(self, name)(first) != getattr(self, name)(again)), "")

    def printed(self, outcome: Outcome) -> tuple[bytes, bytes]:
        return outcome.stdout, outcome.stderr

    def changed(self, outcome: Outcome) -> list[object]:
        sizes = [(change.path, change.kind, change.after.size if change.after else 0) for change in outcome.changes]
        return [each for each in sizes if "/.git/" not in each[0]]  # git writes the times of files into its index

    def used(self, outcome: Outcome) -> set[str]:
        """Settings and data. `access` is not observed: whoever asks first whether it may read does not read what it may not."""
        files = [each.target for each in outcome.observed if each.kind in ("read", "write") and each.allowed]
        return {path for path in files if path.startswith((f"{self.home}/", "/etc/")) and os.path.exists(path)}


@pytest.fixture
def somebody(tmp_path: Path, runtime: ProcessRuntime) -> Somebody:
    home = tmp_path / "home"
    project, shared = home / "app", home / "shared"
    (project / "src" / "deep").mkdir(parents=True)
    shared.mkdir()
    (home / ".gitconfig").write_text("[user]\n\tname = Ada\n\temail = ada@example.com\n")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("secret")
    (project / "src" / "a.txt").write_text("one\n")
    (project / "src" / "deep" / "b.txt").write_text("one\n")
    (shared / "rows.csv").write_text("b,2\na,1\n")
    (project / "Makefile").write_text("all: out.txt\nout.txt: src/a.txt\n\ttr a-z A-Z < src/a.txt | sort > out.txt\n")
    (project / "report.py").write_text(
        "import csv, json, sys\njson.dump(sorted(csv.reader(open(sys.argv[1]))), open('report.json', 'w'))\n"
    )
    subprocess.run(["git", "init", "-q", str(project)], check=True, env={"HOME": str(home), "PATH": os.environ["PATH"]})
    return Somebody(home, runtime)


def parts_of(document: Document) -> Iterator[tuple[str, Document]]:
    """The document without each item of its lists in turn, and what that is."""
    for key, value in document.settings:
        for item in value if isinstance(value, tuple) else ():
            rest = tuple(each for each in value if each != item)
            yield f"{key} without {item}", Document(tuple((name, rest if name == key else kept) for name, kept in document.settings))


def test_a_name_in_the_runs_own_proc_is_not_looked_up_in_ours(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        own = Observed("write", f"/proc/self/fd/{file.fileno()}", "/usr/bin/tar", allowed=True)
        (tmp_path / "link").symlink_to("file")
        linked = Observed("read", str(tmp_path / "link"), "/usr/bin/tar", allowed=True)
        assert os.path.realpath(own.target) == str(tmp_path / "file"), "the control: here it leads to a file"
        assert list(engine_learn._behind_links([own, linked], ())) == [linked.target]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_happens_under_what_was_learnt_and_not_under_less(name: str, somebody: Somebody) -> None:
    line = COMMANDS[name]
    if name == "make" and which("make") is None:
        pytest.skip("make is not installed")
    proposal, (first,) = somebody.learn(line)
    assert first.exit.code == 0 or name == "a branch not taken", first.stderr
    document = proposal.document()
    assert somebody.again(line, document, first) == ""
    assert document.get("files.write") is (False if not len(first.changes) else None)
    for what, less in parts_of(document):
        assert somebody.again(line, less, first) != "", what
    known = ("processes.commands: ", "is empty", "runs what it is given")
    assert [each for each in lint([document]) if not any(words in f"{each.key}: {each.what}" for words in known)] == []


def test_secrets_are_not_proposed_and_nothing_else_of_the_home_is(somebody: Somebody) -> None:
    proposal, _ = somebody.learn("cat ~/.ssh/id ~/.gitconfig; ls ~ > /dev/null")
    assert proposal.document().get("files.allowed") == ("~/app", "~/.gitconfig")
    said = "\n".join(proposal.left_out)
    assert f"{somebody.home}/.ssh/id, which cat tried, stays hidden (private keys)" in said
    assert f"{somebody.home} (ls) would take {somebody.home} as a whole, which is never proposed" in said


def test_several_commands_have_one_policy_and_each_needs_its_part(somebody: Somebody) -> None:
    lines = ("git status --short > state.txt", "sort ../shared/rows.csv | tee sorted.txt")
    proposal, outcomes = somebody.learn(*lines)
    assert proposal.document().get("processes.commands") == ("git", "sort", "tee")
    for line, first in zip(lines, outcomes, strict=True):
        assert somebody.again(line, proposal.document(), first) == ""
    for what, less in parts_of(proposal.document()):
        assert any(somebody.again(line, less, first) for line, first in zip(lines, outcomes, strict=True)), what


def test_a_program_of_the_project_cannot_be_named_so_there_is_no_list(somebody: Somebody) -> None:
    script = somebody.project / "build.sh"
    script.write_text("#!/bin/sh\ntouch built\n")
    script.chmod(0o755)
    proposal, (first,) = somebody.learn("./build.sh")
    assert proposal.document().get("processes.commands") is None
    assert any(f"{script} was executed" in words for words in proposal.left_out)
    assert somebody.again("./build.sh", proposal.document(), first) == ""


def test_a_command_without_a_shell_names_its_shells(somebody: Somebody) -> None:
    line = ("/usr/bin/env", "sh", "-c", "cat src/a.txt > copy.txt")
    proposal, (first,) = somebody.learn(line)
    assert proposal.document().get("processes.commands") == ("cat", "env", "sh")
    assert proposal.remarks[0].startswith("env starts other programs")
    assert any("runs what it is given" in words for words in proposal.remarks[1:]), "a shell, under the name of its file"
    assert somebody.again(line, proposal.document(), first) == ""


def test_a_file_behind_a_link_is_there_under_both_names(somebody: Somebody) -> None:
    (somebody.home / "dotfiles").mkdir()
    (somebody.home / "dotfiles" / "settings").write_text("mine\n")
    (somebody.home / ".settings").symlink_to("dotfiles/settings")
    (somebody.project / "data").symlink_to("../shared")
    line = "cat ~/.settings data/rows.csv > all.txt"
    proposal, (first,) = somebody.learn(line)
    assert proposal.document().get("files.allowed") == ("~/app", "~/.settings", "~/shared/rows.csv")
    assert somebody.again(line, proposal.document(), first) == ""


def test_amounts_that_were_used_are_enough_and_less_is_not(somebody: Somebody) -> None:
    line = "/usr/bin/python3 -c 'x = bytearray(300 << 20); import os; os._exit(0)'"
    proposal, (first,) = somebody.learn(line)
    assert proposal.document().get("limits.memory_mb") == 2048
    assert somebody.again(line, proposal.document(), first) == ""
    less = Document((*(each for each in proposal.document().settings if each[0] != "limits.memory_mb"), ("limits.memory_mb", 100)))
    assert somebody.again(line, less, first) != ""


def test_what_is_above_is_never_reached_beyond(somebody: Somebody) -> None:
    policy = somebody.ceiling
    barred = replace(
        policy, files=replace(policy.files, masks=(*policy.files.masks, Mask(str(somebody.home / "shared"), "not for agents")))
    )
    somebody.ceiling = barred
    proposal, _ = somebody.learn("cat ../shared/rows.csv; cat src/a.txt")
    assert proposal.document().get("files.allowed") == ("~/app",)
    assert any("not for agents" in words for words in proposal.left_out)


STRANGE = (
    "plain.txt",
    "with space.txt",
    "star*.txt",
    "[a-z].txt",
    "quote\"'.txt",
    "line\nend.txt",
    "\u202eright.txt",
    "#hash.txt",
    ".hidden.txt",
)
ATOMS = (
    "cat {a} {b} > {made}",
    "sort {a} | tee {made}",
    "cp {a} {made}",
    "cp {a} {beside}",
    "grep -h o {a} {b}",
    "sed -i s/o/0/ {a}",
    "mv {a} {made}",
    "rm {a}",
    "mkdir -p new/deep && ln -s {a} new/deep/link && cat new/deep/link",
    "tar -cf {made} -P {a}",
    "find {place} -type f | sort",
    "/usr/bin/python3 -c 'import sys; open(sys.argv[2], \"w\").write(open(sys.argv[1]).read())' {a} {made}",
    "while read -r line; do echo $line; done < {a}",
    "head -c 1 {a} {b} && touch {made}",
    "chmod 600 {a}; cat {a}",
)


def _random_line(random: Random, somebody: Somebody) -> str:
    """Something that somebody might type, about files that are there, in and out of the project."""
    places = [somebody.project, somebody.home / "shared", somebody.home / "deep" / "er"]
    real = [str(path) for place in places for path in sorted(place.iterdir()) if path.is_file() or path.is_symlink()]

    def made(place: Path) -> str:
        return quote(str(place / f"made-{random.randrange(3)}{random.choice(STRANGE)}"))

    atoms = [
        random.choice(ATOMS).format(
            a=quote(random.choice(real)),
            b=quote(random.choice(real)),
            made=made(random.choice(places)),
            beside=made(somebody.home / "shared"),
            place=quote(str(random.choice(places))),
        )
        for _ in range(random.randint(1, 3))
    ]
    return f"{random.choice((' ; ', ' && ', ' || '))}".join(atoms)


@pytest.mark.parametrize("seed", [1, pytest.param(None, marks=pytest.mark.torture)])
def test_whatever_is_typed_happens_again_under_what_was_learnt_and_not_under_less(seed: int | None, somebody: Somebody) -> None:
    random = Random(seed)
    (somebody.home / "far").mkdir()
    (somebody.home / "far" / "away.txt").write_text("one far away\n")
    for place in (somebody.home / "shared", somebody.home / "deep" / "er", somebody.project):
        place.mkdir(parents=True, exist_ok=True)
        for name in STRANGE:
            (place / name).write_text(f"one {name}\ntwo\n")
        (place / "linked").symlink_to(somebody.home / "far" / "away.txt")
    for _ in range(5 if seed else 200):
        line = _random_line(random, somebody)
        proposal, (first,) = somebody.learn(line)
        said = (line, proposal.document(), proposal.left_out)
        if any("cannot be written" in words for words in proposal.left_out):
            continue
        if somebody.again(line, proposal.document(), first):  # who reads a link, or asks what a file is, is not observed
            proposal, (first,) = somebody.learn(line, named=True)
            assert somebody.again(line, proposal.document(), first) == "", said
        else:
            for what, less in parts_of(proposal.document()):
                assert somebody.again(line, less, first) != "", (what, *said)
        parse_toml(as_toml(proposal), origin="x")
