"""Probes on permission: the policy, approvals, capabilities, saved plans, and the record of it all."""

from __future__ import annotations

import json
import os
import shutil
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

from agent_sandbox._fast.encoding import Seal, canonical_form
from agent_sandbox.engine.approvals import question as questions
from agent_sandbox.engine.approvals.inbox import Inbox
from agent_sandbox.engine.approvals.question import Answer, Decision, Question, decoded, sealed
from agent_sandbox.engine.gate import Granted
from agent_sandbox.ledger import private_files
from agent_sandbox.policy.action import RunCommand
from agent_sandbox.policy.tokens import Only, Token, attenuate, caveats_of, parse, spell
from agent_sandbox.selftest.bench import DecoyBench
from agent_sandbox.selftest.boxes import Found, NoAnswer
from agent_sandbox.selftest.probe import PRODUCT, Probes
from agent_sandbox.selftest.product import Product, Scratch, findings

SUBJECT = Probes("a kept run", "state directory")

_ASKS = '[approvals]\ncommands = ["touch marked-*"]\n'
_WAIT_SECONDS = 300.0  # how long a question of the inbox probe waits, on a clock that the probe turns
_HOUR = 3600.0


@SUBJECT.probe(
    "policy-denied",
    "What the policy denies, or what cannot be guaranteed, does not run.",
    "runs a forbidden program, a program that needs an approval, and one under a guarantee that no runtime here gives",
    boxes=(PRODUCT,),
    own_control=True,
)
def denied(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench, _ASKS) as place:
        place.must("run", "--", "touch", "honest")
        place("run", "--deny-command", "touch", "--", "touch", "forbidden")
        asked = place.is_asked("run", "--", "touch", "marked-it")
        strict = f"{place.top}/strict.toml"
        Path(strict).write_text('requires = ["separate-kernel"]\n')
        place("run", "--policy", strict, "--", "touch", "unguarded")
        seen = place.must("run", "--", "ls").out.split()
    if "honest" not in seen:
        raise NoAnswer("what is allowed does not run either")
    return findings(forbidden="forbidden" in seen, needs_approval=not asked or "marked-it" in seen, not_guaranteed="unguarded" in seen)


@SUBJECT.probe(
    "policy-narrows",
    "A policy file of the project cannot widen what the user allows.",
    "denies a program and a path in the user's file, and allows only others in the project's file",
    boxes=(PRODUCT,),
    own_control=True,
)
def narrows(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        config = Path(place.home, ".config/agent-sandbox")
        config.mkdir(parents=True)
        Path(place.elsewhere, "file").write_text(bench.token)
        read = ("run", "--", "cat", f"{place.elsewhere}/file")
        if bench.token not in place.must(*read).out:
            raise NoAnswer("the file cannot be read before it is denied")
        place.must("run", "--", "touch", "honest")
        (config / "policy.toml").write_text(
            f'[files]\ndenied = ["{place.elsewhere}"]\n[processes]\nmax = 40\ndenied_commands = ["touch"]\n'
        )
        place.write("agent-sandbox.toml", "[files]\ndenied = []\n[processes]\nmax = 400\ndenied_commands = []\n")
        widened = place(*read)
        place("run", "--", "touch", "widened")
        seen = place.must("run", "--", "ls").out.split()
        limit = place.must("run", "--explain", "--json", "--", "true").out
    if "honest" not in seen:
        raise NoAnswer("what is allowed does not run either")
    return findings(programs="widened" in seen, paths=bench.token in widened.out, limits='"processes": 400' in limit)


@SUBJECT.probe(
    "own-state",
    "The product's own state and keys cannot be read or changed from a sandbox.",
    "reads the ledger, its key and its anchor from inside, and writes to the ledger, its key and the waiting approvals",
    boxes=(PRODUCT,),
    own_control=True,
)
def own_state(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        place.must("run", "--", "true")
        os.makedirs(f"{place.state}/approvals/waiting", exist_ok=True)
        key = Path(place.keys, private_files.KEY)
        ledger = Path(place.state, "ledger.jsonl")
        before = key.read_bytes(), os.listdir(f"{place.state}/approvals/waiting")
        look = place.must("run", f"cat {ledger} 2>/dev/null | head -c 20; echo; cat {key} 2>/dev/null | od -An -tx1 | head -1; echo end")
        write = f"echo x >> {ledger}; echo x > {key}; mkdir -p {place.state}/approvals/waiting/planted"
        place("run", f"({write}) 2>/dev/null; true")
        after = key.read_bytes(), os.listdir(f"{place.state}/approvals/waiting")
        lines = look.out.split("\n")
        intact = place("log", "verify").code == 0
    if "end" not in lines:
        raise NoAnswer("nothing was looked at")
    return findings(read_the_ledger=bool(lines[0]), read_the_keys=len(lines) > 3, write=after != before or not intact)


@SUBJECT.probe(
    "found-secrets",
    "Secrets that no list names are found by their content, and hidden.",
    "reads a private key and a file with a token, both new in the project, from inside",
    boxes=(PRODUCT,),
    own_control=True,
)
def found_secrets(bench: DecoyBench, product: Product) -> Found:
    # Neither like a path, which begins with "/", nor a word without a digit: the search takes such values for no token.
    words = "k7" + b64encode(os.urandom(96)).decode().translate({ord("/"): "a", ord("+"): "b"})
    key = f"-----BEGIN PRIVATE KEY-----\n{words[:64]}\n{words[64:]}\n-----END PRIVATE KEY-----\n"
    texts = {"deploy.pem": key, "gradle.properties": f"signing_key={words[:40]}\n", "plain.txt": f"{words}\n"}
    with product.scratch(bench) as place:
        for name, text in texts.items():
            place.write(name, text)
        seen = {name: words[:40] in place("run", "--", "cat", name).out for name in texts}
    if not seen.pop("plain.txt"):
        raise NoAnswer("an ordinary file cannot be read either")
    return findings(**seen)


@SUBJECT.probe(
    "approvals",
    "An answer counts for exactly what was asked, once, in time, and only if a person gave it.",
    "plants answers to a question: to another question, without the key, used before, too late, and as a link; and changes the question",
    boxes=(PRODUCT,),
    own_control=True,
)
def approvals(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        desk = _Desk(place)
        if not desk.grants(desk.answer_honestly):
            raise NoAnswer("an honest answer is not taken either")
        forged = {
            "for_another_question": lambda asked: desk.sealed(Answer("0" * 64, Decision.ONCE, "eve", asked.until)),
            "without_the_key": lambda asked: sealed(Answer(asked.digest(), Decision.ONCE, "eve", asked.until), Seal(b"k" * 32)),
            "too_late": lambda asked: desk.sealed(Answer(asked.digest(), Decision.ONCE, "eve", asked.asked - 1)),
            "used_before": lambda asked: desk.used,
        }
        got = {way: desk.grants(lambda make=make: desk.plant(make)) for way, make in forged.items()}  # type: ignore[misc]
        got["as_a_link"] = desk.grants(desk.plant_link)
        got["question_changed_after_it_was_shown"] = desk.grants(desk.answer_changed)
        return findings(**got)


class _Desk:
    """An inbox of the product with its real key, a clock to turn, and somebody who acts while a question waits."""

    def __init__(self, place: Scratch) -> None:
        self._key = private_files.load_key(place.keys).derived(questions.PURPOSE)
        self._now = time.time()
        self._act: Callable[[], object] = lambda: None
        self._acted = False
        self._place = place
        self.used = b""  # the answer to the honest question
        directory = os.path.join(place.state, "approvals")
        self._inbox = Inbox(directory, self._key, place.assembly.ledger(), clock=lambda: self._now, pause=self._pause)
        self._number = 0

    def grants(self, act: Callable[[], object]) -> bool:
        """Ask a new question, act while it waits, and return whether it is granted."""
        self._act, self._acted = act, False
        self._number += 1
        action = canonical_form(RunCommand(("touch", f"marked-{self._number}"), self._place.project))
        asked = Question(action, "p" * 64, "box", f"run{self._number}", "it asks", self._now, self._now + _WAIT_SECONDS, asker=os.getuid())
        return isinstance(self._inbox.ask(asked), Granted)

    def sealed(self, answer: Answer) -> bytes:
        """Return the bytes of an answer, sealed with the product's key."""
        return sealed(answer, self._key)

    def answer_honestly(self) -> None:
        """Answer as a person does, and keep the bytes of the answer."""
        for waiting in self._inbox.waiting():
            self._inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="you")
        self.used = (self._waiting()[0] / "answer").read_bytes()

    def answer_changed(self) -> None:
        """Answer a question under a digest that was shown, after the stored question was exchanged for another."""
        (place,) = self._waiting()
        other = place.with_name("1" * 64)
        shutil.copytree(place, other)
        asked = decoded((place / "question").read_bytes())
        assert asked is not None
        (place / "question").chmod(0o600)
        (place / "question").write_bytes((place / "question").read_bytes().replace(b"marked-", b"harmless-"))
        for waiting in self._inbox.waiting():
            self._inbox.answer(waiting.name, Decision.ONCE, digest=waiting.digest, by="you")

    def plant(self, make: Callable[[Question], bytes]) -> None:
        """Put a forged answer beside the waiting question."""
        for place in self._waiting():
            asked = decoded((place / "question").read_bytes())
            assert asked is not None
            (place / "answer").write_bytes(make(asked))
            (place / "answer").chmod(0o644)

    def plant_link(self) -> None:
        """Put a link to a good answer, which lies elsewhere, beside the waiting question."""
        for place in self._waiting():
            asked = decoded((place / "question").read_bytes())
            assert asked is not None
            target = Path(self._place.elsewhere, f"answer-{self._number}")
            target.write_bytes(self.sealed(Answer(asked.digest(), Decision.ONCE, "eve", asked.until)))
            (place / "answer").symlink_to(target)

    def _waiting(self) -> list[Path]:
        return list(Path(self._place.state, "approvals", "waiting").glob("?" * 64))

    def _pause(self) -> None:
        """Act at the first pause of a question. At the next one, when the deed has had its chance, let the time of the question pass."""
        if self._acted:
            self._now += _WAIT_SECONDS
        else:
            self._acted = True
            self._act()


@SUBJECT.probe(
    "capabilities",
    "A capability allows what it names, in its sandbox, for its time and as often as it says.",
    "uses a token for another command, after its time, once too often, after its revocation, widened, and in another sandbox",
    boxes=(PRODUCT,),
    own_control=True,
)
def capabilities(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench, _ASKS) as place, product.scratch(bench, _ASKS) as other:
        token = place.must("grant", "run touch marked-a", "--for", "10m", "--times", "9", "-q").out.strip()
        once = place.must("grant", "run touch marked-a", "--for", "10m", "--times", "1", "-q").out.strip()
        place.must("run", "--capability", token, "--", "touch", "marked-a")
        place.must("run", "--capability", once, "--", "touch", "marked-a")
        shutil.rmtree(f"{other.top}/state", ignore_errors=True)
        got = {
            "another_command": place.is_asked("run", "--capability", token, "--", "touch", "marked-b"),
            "used_up": place.is_asked("run", "--capability", once, "--", "touch", "marked-a"),
            "widened": place.is_asked("run", "--capability", _widened(token), "--", "touch", "marked-b"),
            "expired": _later(place).is_asked("run", "--capability", token, "--", "touch", "marked-a"),
        }
        elsewhere = _moved(place, other)
        got["another_sandbox"] = elsewhere.is_asked("run", "--capability", token, "--", "touch", "marked-a")
        place.must("revoke", "--all")
        got["revoked"] = place.is_asked("run", "--capability", token, "--", "touch", "marked-a")
    return findings(**{way: not asked for way, asked in got.items()})


def _widened(text: str) -> str:
    """Return the token with another pattern in place of its own, under the old signature."""
    token = parse(text)
    assert token is not None
    wider = attenuate(Token(token.identity, (), token.signature), Only((("run", "touch", "marked-b"),))).caveats[0]
    own = [wider if isinstance(caveat, Only) else text for caveat, text in zip(caveats_of(token), token.caveats, strict=True)]
    return spell(Token(token.identity, tuple(own), token.signature))


def _later(place: Scratch) -> Scratch:
    """Return the same place, an hour later."""
    return _Later(place.top)


class _Later(Scratch):
    """A place whose commands run an hour later."""

    def _start(self, line: tuple[str, ...], prepare: Callable[[], None], output: int, errors: int) -> int:
        now = time.time

        def wait() -> None:
            time.time = lambda: now() + _HOUR
            prepare()

        return super()._start(line, wait, output, errors)


def _moved(place: Scratch, other: Scratch) -> Scratch:
    """Return the other place with the state and keys of this one: another sandbox of the same user."""
    for name in ("state", "keys"):
        shutil.rmtree(f"{other.top}/{name}", ignore_errors=True)
        os.symlink(f"{place.top}/{name}", f"{other.top}/{name}")
    return other


@SUBJECT.probe(
    "plans",
    "A saved plan is carried out exactly as it was shown, once, or not at all.",
    "alters the text of a plan, the files it holds, and the real files it rests on; carries it out when it is too old, and twice",
    boxes=(PRODUCT,),
    own_control=True,
)
def plans(bench: DecoyBench, product: Product) -> Found:
    got = {}
    with product.scratch(bench) as place:
        place.write("file", "one\n")
        digest = json.loads(place.must("--json", "sim", "echo two > file; echo new > made").out)["digest"]
        carry = ("carry-out", digest, "--yes")
        (text,) = Path(place.state, "plans").glob("*/plan-*")
        (made,) = (path for path in text.parent.rglob("made") if path.is_file())
        for way, path, change in (("text_altered", text, (b"made", b"nade")), ("files_altered", made, (b"new", b"bad"))):
            shown = path.read_bytes()
            path.write_bytes(shown.replace(*change))
            place(*carry)
            got[way] = any(place.read(name) is not None for name in ("made", "nade"))
            if got[way]:
                return findings(**got)  # the plan is used up
            path.write_bytes(shown)
        os.utime(text, times=(time.time() - 2 * _HOUR,) * 2)
        place(*carry)
        got["too_old"] = place.read("made") is not None
        if got["too_old"]:
            return findings(**got)
        # The old plan has been removed.
        digest = json.loads(place.must("--json", "sim", "echo two > file; echo new > made").out)["digest"]
        carry = ("carry-out", digest, "--yes")
        place.write("file", "mine\n")
        place(*carry)
        got["reality_changed"] = place.read("made") is not None
        place.write("file", "one\n")
        place.must(*carry)
        if (place.read("file"), place.read("made")) != ("two\n", "new\n"):
            raise NoAnswer("an honest plan is not carried out either")
        place.write("file", "one\n")
        os.unlink(f"{place.project}/made")
        place(*carry)
        got["twice"] = place.read("made") is not None
    return findings(**got)


@SUBJECT.probe(
    "ledger-altered",
    "A ledger that was altered, cut, emptied, removed or rewritten is found.",
    "does each to a copy of a ledger and its closed files, with the key and the anchor as they are, and asks log verify",
    boxes=(PRODUCT,),
    own_control=True,
)
def ledger_altered(bench: DecoyBench, product: Product) -> Found:
    with product.scratch(bench) as place:
        place("run", "--throw-away", "--", "false")
        place.must("run", "--throw-away", "--", "true")
        place.must("log", "verify")
        ledger = Path(place.state, "ledger.jsonl")
        written = ledger.read_bytes()
        lines = written.splitlines(keepends=True)
        if len(lines) < 4:
            raise NoAnswer("the ledger has too few entries to cut")
        wrong = {
            "altered": written.replace(b'"false"', b'"trues"'),
            "entry_removed": b"".join(lines[:1] + lines[2:]),
            "end_cut": b"".join(lines[:-1]),
            "emptied": b"",
            "order_changed": b"".join([*lines[:1], lines[2], lines[1], *lines[3:]]),
        }
        if wrong["altered"] == written:
            raise NoAnswer("the ledger does not name the program that ran")
        got = {}
        for way, content in wrong.items():
            ledger.write_bytes(content)
            got[way] = place("log", "verify").code == 0
        ledger.unlink()
        got["removed"] = place("log", "verify").code == 0
        # Written anew by the product itself, with another key.
        anew = Scratch(f"{place.top}/elsewhere")
        os.mkdir(anew.project)
        os.mkdir(anew.home)
        anew("run", "--throw-away", "--", "true")
        ledger.write_bytes(Path(anew.state, "ledger.jsonl").read_bytes())
        got["rewritten"] = place("log", "verify").code == 0
        ledger.write_bytes(written)
        place.must("log", "verify")
    return findings(**got)
