"""An answer, sealed: by whom, to exactly which question, for how long, and whether it holds once or for the whole run."""

from __future__ import annotations

from enum import Enum

from agent_sandbox.spelling import Seal, same
from agent_sandbox.values import dataclass

PURPOSE = b"approvals"  # what the key is derived for
_TITLE, _FACTOR = "approval 2", "second factor"


class Decision(Enum):
    """What somebody said."""

    ONCE = "once"
    FOR_THIS_RUN = "run"  # also to the same question again, until the run or its time is over
    NO = "no"


@dataclass(frozen=True)
class Answer:
    """What somebody said to the question with this digest. `until` is when it ends, in seconds since the epoch; `factor` whether who said
    it has shown a second factor."""

    digest: str
    decision: Decision
    by: str
    until: float
    factor: bool = False


def sealed(answer: Answer, key: Seal) -> bytes:
    """The answer as it is kept."""
    message = _message(answer)
    return message + key.on(message).hex().encode() + b"\n"


def opened(content: bytes, key: Seal) -> Answer | None:
    """The answer that was kept; None when it was not sealed with this key, or is not exactly what `sealed` made."""
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
