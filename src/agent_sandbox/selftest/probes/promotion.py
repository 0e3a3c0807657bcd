"""Probes on the way from the sandbox to reality: drift, protected kinds of files, links, crashes, and the review before a promotion."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Found, NoAnswer
from agent_sandbox.selftest.probe import PRODUCT, Probes
from agent_sandbox.selftest.product import Product, Scratch, findings, reason
from agent_sandbox.workspace.promotion import exchange, staging

SUBJECT = Probes("a kept run", "state directory", "openat2")

_YES = ("promote", "--yes")
_HIDDEN = "\x1b]0;owned\x07\u202e\u200b"  # a title for the terminal, a turn of direction, and a character without width


@SUBJECT.probe(
    "promote-drift",
    "A file that has changed in reality is not overwritten.",
    "changes a real file after the sandbox did, and promotes; then changes one in the moment before it is exchanged",
    boxes=(PRODUCT,),
    own_control=True,
)
def drift(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        for name in ("calm", "moved", "raced"):
            place.write(name, "one\n")
        place.must("run", "for name in calm moved raced; do echo two > $name; done")
        place.must(*_YES, "--only", "calm")
        _must_be(place, "calm", "two\n")
        place.write("moved", "mine\n")
        place(*_YES, "--only", "moved")
        place(*_YES, "--only", "raced", prepare=_race(f"{place.project}/raced"))
        return findings(
            changed_before=place.read("moved") != "mine\n",
            changed_meanwhile=place.read("raced") != "mine\n",
        )


def _race(path: str) -> Callable[[], None]:
    """Return a function that makes somebody write to this path when the promotion has checked it for the last time."""

    def prepare() -> None:
        check = exchange.check

        def raced(*arguments: object) -> None:
            check(*arguments)  # type: ignore[arg-type]
            Path(path).write_text("mine\n")

        exchange.check = raced  # type: ignore[assignment]

    return prepare


@SUBJECT.probe(
    "promote-protected",
    "Files that run by themselves are not promoted with the others.",
    "makes a CI workflow, a git hook, a link out of the project and a setuid program, and promotes with --yes alone",
    boxes=(PRODUCT,),
    own_control=True,
)
def protected(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        os.makedirs(f"{place.project}/.git/hooks")
        names = {"workflow": ".github/workflows/a.yml", "hook": ".git/hooks/post-checkout", "link": "out", "setuid": "power"}
        make = (
            f"mkdir -p .github/workflows; ln -s {place.elsewhere} out; echo a > .github/workflows/a.yml; echo a > .git/hooks/post-checkout"
        )
        place.must("run", f"{make}; echo a > power; chmod 4755 power; echo a > plain")
        place(*_YES)
        for name in (*names.values(), "plain"):
            place(*_YES, "--only", name)
        _must_be(place, "plain", "a\n")
        got = {way: os.path.lexists(f"{place.project}/{name}") for way, name in names.items()}
        return findings(**{**got, "setuid": got["setuid"] and bool(os.stat(f"{place.project}/power").st_mode & stat.S_ISUID)})


@SUBJECT.probe(
    "promote-outside",
    "A promotion stays inside the project.",
    "changes a file outside the project; exchanges a directory of the project for a link to elsewhere; and promotes",
    boxes=(PRODUCT,),
    own_control=True,
)
def outside(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        for name in ("sub", "raced"):
            os.mkdir(f"{place.project}/{name}")
        place.must("run", f"echo two > sub/file; echo two > raced/file; echo two > plain; echo two > {place.elsewhere}/far")
        place.must(*_YES, "--only", "plain")
        _must_be(place, "plain", "two\n")
        reach = (*_YES, "--caches", "--only", f"{place.elsewhere}/far")  # the bench may lie where scratch files do, as in /var/tmp
        said = place(*reach)
        far = os.path.exists(f"{place.elsewhere}/far")
        if not far and "outside the project" not in said.err:
            raise NoAnswer(f"what lies outside stays there for another reason: exit code {said.code}, {reason(said.err)}")
        place(*_YES, "--only", "raced/file", prepare=_exchanged(place, "raced"))
        raced = os.path.exists(f"{place.elsewhere}/file")
        _put_link(place, "sub")
        place(*_YES, "--only", "sub/file")
        place(*_YES, "--only", "sub/file", "--force")
        linked = os.path.exists(f"{place.elsewhere}/file") and not raced
        place.must(*reach, "--system")
        if not os.path.exists(f"{place.elsewhere}/far"):
            raise NoAnswer("what lies outside is not promoted with --system either")
        return findings(file_elsewhere=far, through_a_link=linked, through_a_link_meanwhile=raced)


def _exchanged(place: Scratch, name: str) -> Callable[[], None]:
    """Return a function that makes somebody exchange a directory for a link once the promotion has begun to stage files."""

    def prepare() -> None:
        make = staging.make

        def raced(*arguments: object) -> object:
            _put_link(place, name)
            return make(*arguments)  # type: ignore[arg-type]

        staging.make = raced  # type: ignore[assignment]

    return prepare


def _put_link(place: Scratch, name: str) -> None:
    shutil.rmtree(f"{place.project}/{name}")
    os.symlink(place.elsewhere, f"{place.project}/{name}")


@SUBJECT.probe(
    "promote-crash",
    "A promotion that is killed is finished or taken back by the next command.",
    "kills a promotion of three files with SIGKILL before its first, its second and its third file, and looks after the next command",
    boxes=(PRODUCT,),
    own_control=True,
)
def crash(bench: DecoyBench, product: Product) -> Found:
    names = ("a", "b", "c")
    halves = {}
    with product.scratch(bench) as place:
        for name in names:
            place.write(name, "one\n")
        place.must("run", "for name in a b c; do echo two > $name; done")
        for made in range(len(names)):
            said = place(*_YES, prepare=lambda made=made: _killed_after(made))  # type: ignore[misc]
            if said.code != -signal.SIGKILL:
                raise NoAnswer(f"the promotion was not killed: it ended with {said.code}")
            place("status")
            halves[f"after_{made}_files"] = len({place.read(name) for name in names}) > 1 or bool(_staged(place))
            if any(halves.values()):
                return findings(**halves)
        place.must(*_YES)
        _must_be(place, "c", "two\n")
    return findings(**halves)


def _killed_after(made: int) -> None:
    """Make this process kill itself when this many files have been exchanged."""
    make, count = exchange.make, [0]

    def cut(*arguments: object) -> None:
        if count[0] == made:
            os.kill(os.getpid(), signal.SIGKILL)
        make(*arguments)  # type: ignore[arg-type]
        count[0] += 1

    exchange.make = cut  # type: ignore[assignment]


def _staged(place: Scratch) -> list[str]:
    return [name for name in os.listdir(place.project) if name not in ("a", "b", "c", "agent-sandbox.toml")]


@SUBJECT.probe(
    "review-complete",
    "The diff shows exactly what a promotion writes.",
    "adds, changes, removes and renames files, some with odd names, and compares the diff with what has changed in reality",
    boxes=(PRODUCT,),
    own_control=True,
)
def complete(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        for name in ("changed", "removed", "moved", "mode", "same"):
            place.write(name, "one\n")
        odd = "mkdir -p deep/er; echo two > deep/er/file; echo two > 'odd \"name'; echo two > .dot; ln -s changed link"
        place.must("run", f"echo two > changed; rm removed; mv moved again; chmod 700 mode; {odd}")
        before = _tree(place.project)
        shown = {row["path"] for row in json.loads(place.must("--json", "diff").out)["changes"]}
        text = place.must("diff", "--no-pager").out
        place.must(*_YES)
        after = _tree(place.project)
    written = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if not written:
        raise NoAnswer("the promotion wrote nothing")
    unseen, unwritten = sorted(written - shown), sorted(shown - written)
    return findings(
        written_and_not_shown=", ".join(map(os.path.basename, unseen)),
        shown_and_not_written=", ".join(map(os.path.basename, unwritten)),
        changed_line_not_shown="+two" not in text or "-one" not in text,
    )


def _tree(top: str) -> dict[str, tuple[int, str]]:
    entries = {}
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content = os.readlink(path) if kind == stat.S_IFLNK else Path(path).read_text() if kind == stat.S_IFREG else ""
            entries[path] = (status.st_mode, content)
    return entries


@SUBJECT.probe(
    "review-visible",
    "Names and contents cannot hide or fake anything in a review.",
    "puts a command for the terminal, a turn of direction and an invisible character into a name and a line; reads diff and promote",
    boxes=(PRODUCT,),
    own_control=True,
)
def visible(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        place.must("run", "--", "bash", "-c", 'printf "seen %s\\n" "$0" > "name $0"', _HIDDEN)
        texts = {"diff": place("diff", "--no-pager"), "promote": place("promote", "--dry-run"), "status": place("status")}
    if "seen" not in texts["diff"].out or "name" not in texts["promote"].out + texts["promote"].err:
        raise NoAnswer("the changed file is not shown at all")
    return findings(
        **{verb: any(each in said.out + said.err for each in _HIDDEN if not each.isprintable()) for verb, said in texts.items()}
    )


@SUBJECT.probe(
    "review-expected",
    "With --expect, only the changes that were shown are promoted.",
    "changes the sandbox after the digest was shown, and promotes with that digest",
    boxes=(PRODUCT,),
    own_control=True,
)
def expected(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        place.must("run", "echo two > file")
        shown = json.loads(place.must("--json", "diff").out)["digest"]
        place.must("run", "echo three > file")
        place(*_YES, "--expect", shown)
        if place.read("file") is not None:
            return findings(changed_after_the_review=True)
        fresh = json.loads(place.must("--json", "diff").out)["digest"]
        place.must(*_YES, "--expect", fresh)
        _must_be(place, "file", "three\n")
        return findings(changed_after_the_review=False)


def _must_be(place: Scratch, name: str, text: str) -> None:
    """Raise `NoAnswer` unless the real file has this text: an honest promotion must work for a refusal to show anything."""
    if place.read(name) != text:
        raise NoAnswer(f"an honest promotion does not write {name!r}")
