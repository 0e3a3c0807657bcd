"""A question to a person, encoded as one sequence of bytes, so that the text shown, the answer and the deed are about the same thing.

The bytes hold the action as the gate judged it, the digest of the policy, the sandbox and the run, the reason for asking, and whatever else
is shown, such as a diff. The answer names the digest of these bytes. A different action, policy, run or diff has another digest, and no
answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from shlex import join
from typing import Any

from agent_sandbox._fast.encoding import Seal, as_json, same, sha256
from agent_sandbox._fast.values import dataclass, fields
from agent_sandbox.workspace.escape import lookalike, visible

_NARROW = 10  # columns of the names at the left


@dataclass(frozen=True)
class Question:
    """A question to a person. `details` is further text to show; times are in seconds since the epoch.

    The inbox sets `nonce`, which makes each question unique.
    """

    action: Mapping[str, Any]  # in JSON types, as the gate judged and will record it
    policy: str
    sandbox: str
    run: str
    why: str
    asked: float
    until: float
    details: str = ""
    nonce: str = ""
    needs: str = ""  # the conditions on an approval, by their names in `policy.approval_rules`
    asker: int = -1  # the user who asks, by number

    def encoded(self) -> bytes:
        """Return the question as bytes."""
        return _bytes({field.name: getattr(self, field.name) for field in fields(self)})

    def digest(self) -> str:
        """Return the digest that identifies this question."""
        return sha256(self.encoded()).hexdigest()

    def group(self) -> str:
        """Return a digest that is the same for questions which differ only in times, asker and nonce. One answer may count for all."""
        return sha256(_bytes([self.action, self.policy, self.sandbox, self.run, self.why, self.details, self.needs])).hexdigest()


def _bytes(value: object) -> bytes:
    # Not in ASCII: there JSON escapes two lone surrogates like the character that they encode in UTF-16, so two questions look the same.
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decoded(content: bytes) -> Question | None:
    """Decode a question; None if the bytes are not exactly one encoded question."""
    try:
        question = Question(**json.loads(content.decode("utf-8", "surrogatepass")))
        shapes: tuple[tuple[Any, type], ...] = ((question.action, dict), (question.needs, str), (question.asker, int))
        return question if all(isinstance(value, shape) for value, shape in shapes) and question.encoded() == content else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def shown(question: Question) -> str:
    """Return the whole question as text for a person, with printable characters and line ends only.

    The text is written from the action itself, not from a description of the action.
    """
    return "\n".join(_lines(question)) + "\n"


def _lines(question: Question) -> Iterator[str]:
    action = dict(question.action)
    kind = action.pop("kind", "")
    argv = action.pop("argv", None)
    yield _line("asks for", kind)
    if isinstance(argv, list):
        words = [str(word) for word in argv]
        yield _line("command", join(words))
        if any(visible(word) != word or "\\" in word for word in words):
            yield from (_line(f"word {number}", word) for number, word in enumerate(words))
    for name, value in sorted(action.items()):
        if value not in (None, [], ""):
            yield _line(name, value if isinstance(value, str) else as_json(value))
    yield _line("because", question.why)
    if question.sandbox or question.run:
        yield _line("in", " ".join(filter(None, (question.sandbox, question.run))))
    if question.needs:
        yield _line("needs", question.needs)
    yield _line("policy", question.policy)
    for remark in sorted({remark for text in _texts(question.action) if (remark := lookalike(text))}):
        yield _line("careful", remark)
    if question.details:
        yield from (f"  | {visible(line)}" for line in question.details.split("\n"))
    yield _line("digest", question.digest())


def _line(name: str, text: object) -> str:
    return f"{visible(str(name)):{_NARROW - 1}} {visible(str(text))}"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


PURPOSE = b"approvals"  # the purpose of the derived key
_TITLE, _FACTOR = "approval 2", "second factor"


class Decision(Enum):
    """Kinds of answer."""

    ONCE = "once"
    FOR_THIS_RUN = "run"  # also to the same question again, until the run or its time is over
    NO = "no"


@dataclass(frozen=True)
class Answer:
    """An answer to the question with this digest, by the person `by`.

    `until` is when it expires, in seconds since the epoch; `factor` says whether a second factor was given.
    """

    digest: str
    decision: Decision
    by: str
    until: float
    factor: bool = False


def sealed(answer: Answer, key: Seal) -> bytes:
    """Return the bytes of an answer as they are stored, with a seal made by the key."""
    message = _message(answer)
    return message + key.on(message).hex().encode() + b"\n"


def opened(content: bytes, key: Seal) -> Answer | None:
    """Decode a stored answer; None unless the bytes are exactly what `sealed` makes with this key."""
    message, line, mark = content.removesuffix(b"\n").rpartition(b"\n")
    if not same(key.on(message + line).hex().encode(), mark):
        return None
    try:
        title, digest, decision, by, until, factor = message.decode("ascii").split("\n")
        answer = Answer(digest, Decision(decision), by.encode("ascii").decode("unicode_escape"), float(until), factor == _FACTOR)
    except ValueError:
        return None
    return answer if title == _TITLE and sealed(answer, key) == content else None


def _message(answer: Answer) -> bytes:
    by = answer.by.encode("unicode_escape").decode("ascii")
    factor = _FACTOR if answer.factor else "no second factor"
    return f"{_TITLE}\n{answer.digest}\n{answer.decision.value}\n{by}\n{answer.until!r}\n{factor}\n".encode("ascii")
