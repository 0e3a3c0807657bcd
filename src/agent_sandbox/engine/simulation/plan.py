"""The effect plan: the observed effects of a simulated command, as a value with one canonical text.

The text is stored, a person approves it, and its digest identifies the plan. So the plan holds the digest of every file's content, and
applying it compares each content again.
"""

from __future__ import annotations

from agent_sandbox._fast.encoding import as_json, canonical_form, sha256
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.simulation.risk import NONE, Level, Risk, of_deletions, of_unlisted, of_unseen, worst
from agent_sandbox.policy.hosts import bracketed

if TYPE_CHECKING:
    from typing import Any

FORMAT = 2
NOTHING_WAITS, BARE = "", "bare"  # as the base of a plan: an empty sandbox, and none at all


@dataclass(frozen=True)
class FileEffect:
    """A path that would change on the machine. The fields from `type` on describe the new state, and are empty for a deletion."""

    path: str
    change: str  # added, modified, deleted, retyped, mode, owner or xattr
    place: str  # project, elsewhere or noise
    type: str = ""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    target: str = ""  # of a link
    device: int = 0
    sha256: str = ""  # of a file's content
    xattrs: tuple[tuple[str, str], ...] = ()  # names, and values in hexadecimal
    inside: int = 0  # entries of a directory that go away with it
    risk: Risk = NONE


@dataclass(frozen=True)
class ProgramUse:
    """A started program, by path. If the run was not observed, a program that the command names, by name."""

    program: str
    times: int = 1
    allowed: bool = True
    risk: Risk = NONE


@dataclass(frozen=True)
class NetworkRequest:
    """An attempted connection (`connect`), a looked-up name (`resolve`), or an opened port (`listen`). `allowed` is by the policy."""

    action: str
    target: str
    program: str = ""
    times: int = 1
    risk: Risk = NONE
    allowed: bool = False


@dataclass(frozen=True)
class HttpRequest:
    """A request over HTTP that the policy allows. `sent` is whether the simulation sent it; if not, carrying the plan out would.

    `path` is without the query; empty if it cannot be told. `secrets` are the names of those that were put in.
    """

    method: str
    host: str
    port: int
    tls: bool
    path: str
    times: int = 1
    sent: bool = False
    secrets: tuple[str, ...] = ()
    risk: Risk = NONE

    @property
    def target(self) -> str:
        """The address, without the port if it is the usual one, and without the query."""
        host = bracketed(self.host)
        port = "" if self.port == (443 if self.tls else 80) else f":{self.port}"
        return f"http{'s' if self.tls else ''}://{host}{port}{self.path or '/(withheld)'}"


@dataclass(frozen=True)
class Rerun:
    """The settings of the second run of a command, which carries out a plan with requests.

    `rules` are the network rules of the simulation as JSON, `apart` is the digest of its other rules. `secrets` are bound secrets as they
    were written, without values, and `variables` the names of variables that it was handed. `code` is false for a command.
    """

    rules: str
    apart: str
    secrets: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    code: bool = False


@dataclass(frozen=True)
class SecretUse:
    """A hidden file that the run tried to open (`file`), or a variable given to the run that looks like a secret (`variable`)."""

    sort: str
    name: str
    why: str = ""
    program: str = ""
    risk: Risk = NONE


@dataclass(frozen=True)
class Prediction:
    """An effect that the text of the command predicts: see `readers.shell`."""

    effect: str
    what: str
    risk: Risk = NONE


@dataclass(frozen=True)
class Input:
    """A file of the project that the run read, and the digest of its content; empty if the file changed during the run."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Ended:
    """How the simulated run ended: exit code, reason, and the limits it reached."""

    code: int
    reason: str
    limits_hit: tuple[str, ...] = ()
    risk: Risk = NONE


@dataclass(frozen=True)
class EffectPlan:
    """The effects of a command. `digest` identifies the whole plan.

    `governed` is the digest of the policy of the simulation. `base` is the digest of the sandbox's unpromoted changes that the command saw,
    or `BARE` if it ran on the bare machine. When the plan is applied, the policy and these changes must be the same; `BARE` is not
    compared. `watched` says whether the run was observed. If it was not, `programs` are the programs that the command line names.
    """

    command: tuple[str, ...]
    cwd: str
    project: str
    created: float
    governed: str
    base: str
    ended: Ended
    files: tuple[FileEffect, ...] = ()
    programs: tuple[ProgramUse, ...] = ()
    network: tuple[NetworkRequest, ...] = ()
    http: tuple[HttpRequest, ...] = ()
    untold: int = 0  # how many more requests over HTTP there were
    rerun: Rerun | None = None  # of a simulation with a network
    secrets: tuple[SecretUse, ...] = ()
    predicted: tuple[Prediction, ...] = ()
    read: tuple[Input, ...] = ()  # files of the project that the run was observed to read; see `effects.inputs_of`
    words: tuple[str, ...] = ()  # a summary in sentences, each after a prefix of ours: git, sandbox
    notes: tuple[str, ...] = ()
    watched: bool = False
    unseen: str = ""  # why some attempts of the run were not observed
    unlisted: str = ""  # why its file changes are not known, or not exactly enough to be applied

    @property
    def risk(self) -> Risk:
        """The highest risk in the plan."""
        risks = [self.ended.risk, of_unlisted(self.unlisted), of_unseen(self.unseen), of_deletions(self.deletions)]
        risks += [each.risk for each in self.files]
        risks += [each.risk for each in self.programs]
        risks += [each.risk for each in self.network]
        risks += [each.risk for each in self.http]
        risks += [each.risk for each in self.secrets]
        return worst([*risks, *(each.risk for each in self.predicted)])

    @property
    def on_the_sandbox(self) -> bool:
        """Whether the command saw unpromoted changes of the project's sandbox."""
        return self.base not in (NOTHING_WAITS, BARE)

    @property
    def deletions(self) -> int:
        """The number of deleted files and directories, not counting caches."""
        return sum(1 + effect.inside for effect in self.files if effect.change == "deleted" and effect.place != "noise")

    @property
    def requests(self) -> tuple[str, ...]:
        """The hosts and addresses that the command asked for, each once. Without observation, those that its text names."""
        if self.watched:
            reached = [each.target for each in self.network if each.action == "connect"]
            hosts = {target.rpartition(":")[0] for target in reached}
            asked = [each.target for each in self.network if each.action == "resolve" and each.target not in hosts]
            return tuple(dict.fromkeys([*reached, *asked]))
        return tuple(
            dict.fromkeys(each.what or "an address that its text does not tell" for each in self.predicted if each.effect == "network")
        )

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """The permissions that the command needs, and no more: programs, paths to write, hosts."""
        hosts = (each.target for each in self.network if each.action == "connect")
        return {
            "programs": tuple(dict.fromkeys(each.program for each in self.programs if each.allowed)),
            "write": tuple(effect.path for effect in self.files),
            "hosts": tuple(dict.fromkeys(hosts)) or self.requests,
        }

    def text(self) -> str:
        """Return the canonical text of the plan. Cached, because a plan may have a hundred thousand files."""
        text: str | None = self.__dict__.get("_text")
        if text is None:
            text = self.__dict__["_text"] = as_json({"format": FORMAT, "plan": canonical_form(self)}, sort_keys=True)
        return text

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the canonical text, in hexadecimal."""
        return digest_of(self.text())


def digest_of(text: str) -> str:
    """Return the SHA-256 digest of a plan's canonical text."""
    return sha256(text.encode("ascii")).hexdigest()


def read(text: str) -> EffectPlan:
    """Parse the canonical text of a plan. Raises ValueError for any other text."""
    from json import loads  # only to read a plan that was kept

    try:
        document = loads(text)
        if document["format"] != FORMAT:
            raise ValueError("written by another version")
        plan = _value(document["plan"])
        if isinstance(plan, EffectPlan) and plan.text() == text:
            return plan
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError("not a plan") from error
    raise ValueError("not as this version spells it")


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (EffectPlan, FileEffect, ProgramUse, NetworkRequest, HttpRequest, Rerun, SecretUse, Prediction, Input, Ended, Risk)
}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_value(each) for each in plain)
    if not isinstance(plain, dict):
        return plain
    made = _KINDS[plain["kind"]](**{name: _value(value) for name, value in plain.items() if name != "kind"})
    return replace(made, level=Level(made.level)) if isinstance(made, Risk) else made
