"""Results of verbs as values: facts, without text and without live handles.

A result's method `text` prints it as text, and `render.json` as a JSON document; `main` chooses. The fields of a result are the fields of
its document, in the same order. `docs/schemas/` is generated from their types.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, Protocol, dataclass
from agent_sandbox.cli.render.messages import Console, complain, remark

if TYPE_CHECKING:
    from typing import ClassVar

    from agent_sandbox.workspace.changes import Change, Kind
    from agent_sandbox.workspace.nodes import EntryType, Node

NOT_APPROVED = 3  # exit code: a person said no, or could not be asked


class VerbResult(Protocol):
    """The result of a verb. `kind` names its JSON document. If `streamed`, the document was already written by the verb."""

    kind: ClassVar[str]
    streamed: ClassVar[bool] = False

    @property
    def code(self) -> int:
        """The exit code for this result: its field `exit`, or 0 without such a field."""
        code: int = getattr(self, "exit", 0)
        return code

    def text(self, console: Console) -> None:
        """Print the result for people: data on standard output, messages on standard error."""

    def go_on(self) -> None:
        """Do what remains when the result is printed: for almost every verb nothing."""
        return


class Omitted:
    """The type of `OMITTED`, the value of a field that is left out of the document."""


OMITTED = Omitted()


class PathName(str):
    """A path. If it is not UTF-8, a second field `…_hex` in the document holds its exact bytes."""


@dataclass(frozen=True)
class PathFacts:
    """One path of a list."""

    path: PathName


@dataclass(frozen=True)
class PathReason:
    """A path, and the reason why it is listed."""

    path: PathName
    why: str


@dataclass(frozen=True)
class PathRemarks:
    """A path, and remarks on its change, such as its new dependencies."""

    path: PathName
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class NodeFacts:
    """A file, directory, symlink or device, before or after a change."""

    type: EntryType
    mode: str  # octal
    uid: int
    gid: int
    size: int
    target: PathName | Omitted = OMITTED  # of a symlink

    @classmethod
    def of(cls, node: Node) -> NodeFacts:
        """Return the facts about a node."""
        target = PathName(node.target) if node.target else OMITTED
        return cls(node.type, f"{node.mode:04o}", node.uid, node.gid, node.size, target)


@dataclass(frozen=True)
class ChangeFacts:
    """One change of a path, with the state before and after it.

    Results hold a `Change`, which is turned into this type for the document.
    """

    inline = True  # its fields stand among those of the value that holds it

    path: PathName
    kind: Kind
    before: NodeFacts | None
    after: NodeFacts | None
    renamed_from: PathName | Omitted
    link_of: PathName | Omitted
    xattrs: tuple[str, ...]
    inside: int
    masks_real: bool
    unread: bool

    @classmethod
    def of(cls, change: Change) -> ChangeFacts:
        """Return the facts about a change."""
        return cls(
            PathName(change.path),
            change.kind,
            NodeFacts.of(change.before) if change.before is not None else None,
            NodeFacts.of(change.after) if change.after is not None else None,
            PathName(change.renamed_from) if change.renamed_from else OMITTED,
            PathName(change.link_of) if change.link_of else OMITTED,
            change.xattrs,
            change.inside,
            change.masks_real,
            change.unread,
        )


@dataclass(frozen=True)
class PromotionFacts:
    """A completed promotion, or a completed undo of one."""

    inline = True

    promotion: int
    undoes: int | None
    counts: dict[str, int]
    bytes: int
    content_sha256: str
    snapshot: int | None


@dataclass(frozen=True)
class DeclinedResult(VerbResult):
    """The user declined, or could not be asked (`why`). Nothing was changed."""

    kind = "declined"

    verb: str
    exit: int
    why: str

    def text(self, console: Console) -> None:
        remark(f"nothing was changed: {self.why}")


def declined(verb: str, question: str, console: Console, *, yes: bool) -> DeclinedResult | None:
    """Return None if the user agrees to what cannot be taken back: by --yes, or by an answer at the terminal. Else return the result."""
    if yes or (console.asks and console.says_yes(question)):
        return None
    return DeclinedResult(verb, NOT_APPROVED, "not approved" if console.asks else f"{verb} needs --yes")


@dataclass(frozen=True)
class RefusalFacts:
    """The reason for a refusal, and the commands with which a person could permit the action."""

    rule: str
    why: str
    remedy: str
    missing_capability: str | None
    grant: str | None
    elevate: str | None


@dataclass(frozen=True)
class ErrorFacts:
    """An error: its class, its message and a hint."""

    kind: str
    message: str
    hint: str
    refusal: RefusalFacts | Omitted = OMITTED


@dataclass(frozen=True)
class ErrorResult(VerbResult):
    """A failure of this program, or a refusal. Nothing was run in a sandbox."""

    kind = "error"

    error: ErrorFacts
    exit: int

    def text(self, console: Console) -> None:
        complain(self.error.message, self.error.hint)


@dataclass(frozen=True)
class InterruptedResult(VerbResult):
    """The result of a verb that was ended by a signal. Nothing is left behind."""

    kind = "interrupted"

    signal: int

    @property
    def code(self) -> int:
        """128 plus the number of the signal, as in a shell."""
        return 128 + self.signal

    def text(self, console: Console) -> None:
        """Print nothing: the user caused the signal."""
