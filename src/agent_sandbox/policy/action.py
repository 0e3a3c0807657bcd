"""Actions: the requests of an agent as values, to be judged, recorded and identified by a digest.

An action holds enough to decide, and to recognise the same request again. It holds no environment values and no source text: those may be
secret or huge. The words of a command line are kept as they are, because they are judged. A secret among them is recorded, so pass it
through the environment instead.
"""

from __future__ import annotations

from agent_sandbox._fast.encoding import canonical_digest, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import bracketed
from agent_sandbox.policy.paths import normalise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LANGUAGES = ("python", "javascript", "ruby", "bash")
FILE_READS = ("read", "list", "stat", "exists")
FILE_WRITES = ("write", "mkdir", "remove")
_ALIASES = {"python3": "python", "py": "python", "js": "javascript", "node": "javascript", "nodejs": "javascript", "rb": "ruby"}
_ALIASES |= {"shell": "bash", "sh": "bash"}


def canonical_language(name: str) -> str:
    """Return the canonical name of a language: `python` for `py`. An unknown name is returned in lower case, and `decide` denies it."""
    lowered = name.strip().lower()
    return _ALIASES.get(lowered, lowered)


class _Request:
    """The base of all actions."""

    def digest(self) -> str:
        """Return the digest that identifies this exact request."""
        return canonical_digest(self)


@dataclass(frozen=True)
class RunCode(_Request):
    """Run source in a language. `cwd=None` is the sandbox's own scratch directory.

    `programs` are the programs that the source, if it is a command line, would start; they allow an early and clear refusal. `touches` are
    the approval rules that apply to it, each with its reason; None if it was not analysed.
    """

    language: str
    source_sha256: str
    size: int
    cwd: str | None = None
    environment: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    touches: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, language: str, source: bytes, *, cwd: str | bytes | None = None, environment: Iterable[str] = (), programs: Iterable[str] = ()
    ) -> RunCode:
        """Make the action from the caller's values. Raises `PolicyError` for an invalid path or name."""
        digest = sha256(source).hexdigest()
        return cls(canonical_language(language), digest, len(source), _directory(cwd), _names(environment), tuple(programs))


@dataclass(frozen=True)
class RunCommand(_Request):
    """Run a program with arguments. `cwd=None` is the sandbox's own scratch directory."""

    argv: tuple[str, ...]
    cwd: str | None = None
    environment: tuple[str, ...] = ()

    @classmethod
    def of(cls, argv: Sequence[str], *, cwd: str | bytes | None = None, environment: Iterable[str] = ()) -> RunCommand:
        """Make the action from the caller's values. Raises `PolicyError` for an invalid word, path or name."""
        if isinstance(argv, str) or not argv or not argv[0]:
            raise PolicyError(f"a command is a sequence of words whose first is a program, not {argv!r}", hint='write ["ls", "-l"]')
        for word in argv:
            if "\0" in word:
                raise PolicyError(f"a word of a command cannot hold a NUL character: {word[:80]!r}", hint="remove it")
        return cls(tuple(argv), _directory(cwd), _names(environment))


@dataclass(frozen=True)
class Promote(_Request):
    """Promote changes of a sandbox to the real tree at `root`.

    `changes_sha256` identifies exactly the changes that were shown. `protected` are the classes of protected files among them, `approved`
    the classes that a person approved by name. `drift` says what to do if the real tree has changed: refuse, merge or force.
    """

    root: str
    changes_sha256: str
    count: int
    protected: tuple[str, ...] = ()
    approved: tuple[str, ...] = ()
    drift: str = "refuse"


@dataclass(frozen=True)
class Undo(_Request):
    """Undo the promotion of this name."""

    root: str
    promotion: str
    drift: str = "refuse"


@dataclass(frozen=True)
class CallTool(_Request):
    """Call a tool: a function of the caller that the sandboxed program may call. Of its arguments, only a digest is stored."""

    tool: str
    words_sha256: str
    size: int

    @classmethod
    def of(cls, tool: str, words: bytes) -> CallTool:
        """Make the action. `words` is the complete message with which the program requests the call."""
        return cls(tool, sha256(words).hexdigest(), len(words))


@dataclass(frozen=True)
class UseFile(_Request):
    """Do one thing with a file in the sandbox's view, for the caller. Of content to be written, only size and digest are stored.

    `operation` is one of `FILE_READS` or `FILE_WRITES`, `path` is normalised. Links on the way are followed inside the view, not here.
    """

    operation: str
    path: str
    content_sha256: str = ""
    size: int = 0

    @classmethod
    def of(cls, operation: str, path: str | bytes, content: bytes | None = None) -> UseFile:
        """Make the action. Raises `PolicyError` for an invalid path."""
        if content is None:
            return cls(operation, normalise(path))
        return cls(operation, normalise(path), sha256(content).hexdigest(), len(content))


@dataclass(frozen=True)
class OpenNetwork(_Request):
    """Open the network further, for a time: hosts and presets as `--network` takes them.

    `requests` limit the requests that are then permitted. `reason` is what the agent says about it.
    """

    hosts: tuple[str, ...]
    requests: tuple[str, ...] = ()
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Connect(_Request):
    """Let a run reach a host: with one request, or, without a method, with one connection whose bytes are not read as requests.

    `path` has no query. `data` names a rule of the search and the place where something was found that would leave with the request; the
    value is not in it.
    """

    host: str
    port: int
    method: str = ""
    path: str = ""
    data: str = ""

    @property
    def target(self) -> str:
        """The host with its port."""
        return f"{bracketed(self.host)}:{self.port}"


Action = RunCode | RunCommand | Promote | Undo | CallTool | UseFile | OpenNetwork | Connect


def _directory(cwd: str | bytes | None) -> str | None:
    return None if cwd is None else normalise(cwd)


def _names(environment: Iterable[str]) -> tuple[str, ...]:
    names = tuple(sorted(set(environment)))
    for name in names:
        if not name or "=" in name or "\0" in name:
            raise PolicyError(f"not a name of an environment variable: {name!r}", hint="names are not empty and hold neither '=' nor NUL")
    return names
