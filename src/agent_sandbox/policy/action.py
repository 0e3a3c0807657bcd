"""What an agent asks for, as values: what is judged, what is recorded, and what a digest names.

An action says enough to decide and to recognise the very same request again. It holds no values of environment variables and no source
text: those may be secret or huge. The words of a command line are kept as they are, because they are what is judged; a secret written
there is recorded, so pass it through the environment instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import canonical
from agent_sandbox.policy.paths import normalise

LANGUAGES = ("python", "javascript", "ruby", "bash")
_ALIASES = {"python3": "python", "py": "python", "js": "javascript", "node": "javascript", "nodejs": "javascript", "rb": "ruby"}
_ALIASES |= {"shell": "bash", "sh": "bash"}


def canonical_language(name: str) -> str:
    """The one name of a language. A name that is not known is returned as it is, lower-cased, and `decide` denies it."""
    lowered = name.strip().lower()
    return _ALIASES.get(lowered, lowered)


@dataclass(frozen=True)
class RunCode:
    """Run source in a language. `cwd=None` is the sandbox's own scratch directory.

    `programs` are those that a command line is understood to start, where somebody has looked: for an early and clear refusal. `touches`
    are the rules of `policy.approval_rules` that it falls under, None where nobody has looked.
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
        cls,
        language: str,
        source: bytes,
        *,
        cwd: str | bytes | None = None,
        environment: Iterable[str] = (),
        programs: Iterable[str] = (),
    ) -> RunCode:
        """From what the caller holds. Raises `PolicyError` for a path or name that cannot be."""
        digest = sha256(source).hexdigest()
        return cls(canonical_language(language), digest, len(source), _directory(cwd), _names(environment), tuple(programs))

    def digest(self) -> str:
        """Names this very request."""
        return canonical.digest(self)


@dataclass(frozen=True)
class RunCommand:
    """Run a program with arguments. `cwd=None` is the sandbox's own scratch directory."""

    argv: tuple[str, ...]
    cwd: str | None = None
    environment: tuple[str, ...] = ()

    @classmethod
    def of(cls, argv: Sequence[str], *, cwd: str | bytes | None = None, environment: Iterable[str] = ()) -> RunCommand:
        """From what the caller holds. Raises `PolicyError` for a word, path or name that cannot be."""
        if isinstance(argv, str) or not argv or not argv[0]:
            raise PolicyError(f"a command is a sequence of words whose first is a program, not {argv!r}", hint='write ["ls", "-l"]')
        for word in argv:
            if "\0" in word:
                raise PolicyError(f"a word of a command cannot hold a NUL character: {word[:80]!r}", hint="remove it")
        return cls(tuple(argv), _directory(cwd), _names(environment))

    def digest(self) -> str:
        """Names this very request."""
        return canonical.digest(self)


@dataclass(frozen=True)
class Promote:
    """Carry changes of a sandbox over to the real tree at `root`.

    `changes_sha256` names exactly what was shown, `protected` are the classes that some of the changes belong to, `approved` those that
    somebody agreed to by name. `drift` is what to do where reality has moved on: refuse, merge or force.
    """

    root: str
    changes_sha256: str
    count: int
    protected: tuple[str, ...] = ()
    approved: tuple[str, ...] = ()
    drift: str = "refuse"

    def digest(self) -> str:
        """Names this very request."""
        return canonical.digest(self)


@dataclass(frozen=True)
class Undo:
    """Take a promotion back, by its name."""

    root: str
    promotion: str
    drift: str = "refuse"

    def digest(self) -> str:
        """Names this very request."""
        return canonical.digest(self)


@dataclass(frozen=True)
class CallTool:
    """Call a function that the caller has handed to a program. What the program said is named by its digest: it may hold anything."""

    tool: str
    words_sha256: str
    size: int

    @classmethod
    def of(cls, tool: str, words: bytes) -> CallTool:
        """From what the program has said, all of it."""
        return cls(tool, sha256(words).hexdigest(), len(words))

    def digest(self) -> str:
        """Names this very request."""
        return canonical.digest(self)


Action = RunCode | RunCommand | Promote | Undo | CallTool


def _directory(cwd: str | bytes | None) -> str | None:
    return None if cwd is None else normalise(cwd)


def _names(environment: Iterable[str]) -> tuple[str, ...]:
    names = tuple(sorted(set(environment)))
    for name in names:
        if not name or "=" in name or "\0" in name:
            raise PolicyError(f"not a name of an environment variable: {name!r}", hint="names are not empty and hold neither '=' nor NUL")
    return names
