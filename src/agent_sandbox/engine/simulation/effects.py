"""Turn the outcome of a simulated run into effects: changed files with digests, programs, network requests, secrets."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from agent_sandbox._fast.encoding import sha256
from agent_sandbox._fast.values import TYPE_CHECKING, replace
from agent_sandbox.engine.simulation import risk
from agent_sandbox.engine.simulation.plan import FileEffect, HttpRequest, Input, NetworkRequest, Prediction, ProgramUse, SecretUse
from agent_sandbox.engine.work import Code, Work
from agent_sandbox.errors import WorkspaceError
from agent_sandbox.kernel.mount_plan import IMAGES
from agent_sandbox.ledger.encoding import without_secrets
from agent_sandbox.policy.hosts import bracketed
from agent_sandbox.policy.paths import ancestors, contains
from agent_sandbox.policy.programs import reads_a_line
from agent_sandbox.policy.secrets import Mask, names_a_secret
from agent_sandbox.readers.shell.analyze import understand, understand_argv
from agent_sandbox.readers.shell.effects import EffectKind, Understanding
from agent_sandbox.workspace import beneath
from agent_sandbox.workspace.changes import Change, ChangeSet, Contents, place_of
from agent_sandbox.workspace.nodes import EntryType
from agent_sandbox.workspace.promotion.inspect import TreeContext, look_at, protected_classes
from agent_sandbox.workspace.protected import classes_of_all

if TYPE_CHECKING:
    from agent_sandbox.egress.orders import RequestMade
    from agent_sandbox.runtime.observe import Observed

MOST_READ = 2 << 30  # bytes of all changed files together: a sparse file costs nothing to make, and hours to read
_CHUNK = 1 << 20
_NETWORK = ("connect", "resolve", "listen")
_OPENING = ("read", "write", "execute")


def file_effects(changes: ChangeSet, contents: Contents, project: str) -> tuple[dict[str, FileEffect], str]:
    """Return the effects of changes by path, without risks, and the reason why some content was not read; empty if all was read."""
    room, problem = MOST_READ, ""
    effects: dict[str, FileEffect] = {}
    for change in changes:
        digest = ""
        if change.after is not None and change.after.type is EntryType.FILE:
            room -= change.after.size
            try:
                digest = _digest(change, contents) if room >= 0 else ""
                problem = problem or ("" if room >= 0 else "it changed more than is read for a plan")
            except OSError as error:
                problem = problem or f"what it wrote to {change.path!r} cannot be read: {error.strerror}"
        effects[change.path] = _effect(change, place_of(change.path, project), digest)
    return effects, problem


def _effect(change: Change, place: str, digest: str) -> FileEffect:
    node = change.after
    if node is None:
        return FileEffect(change.path, change.kind.value, place, inside=change.inside)
    xattrs = tuple(sorted((name, value.hex()) for name, value in node.xattrs.items()))
    look = (node.type.value, node.mode, node.uid, node.gid, node.size, node.target, node.device)
    return FileEffect(change.path, change.kind.value, place, *look, digest, xattrs, change.inside)


def _digest(change: Change, contents: Contents) -> str:
    fd = contents.open_file(change)
    try:
        digest = sha256()
        while piece := os.read(fd, _CHUNK):
            digest.update(piece)
        return digest.hexdigest()
    finally:
        os.close(fd)


def with_risks(
    effects: Iterable[FileEffect], changes: ChangeSet, contents: Contents, project: str, around: TreeContext
) -> tuple[FileEffect, ...]:
    """Return the effects with their risks. `changes` are the changes that the effects describe."""
    classes: dict[str, frozenset[str]] = {}
    outside = ChangeSet(tuple(change for change in changes.outside(project) if not change.path.startswith(IMAGES)))  # an image's stay in it
    for root, part in ((project, changes.within(project)), ("/", outside)):
        if len(part):
            try:
                classes |= protected_classes(part, look_at(root, part), contents, root=root, around=around)
            except (OSError, WorkspaceError):  # the real files cannot be examined; most classes depend on names alone
                classes |= classes_of_all(part, root)
    by_path = {change.path: change for change in changes}
    return tuple(
        replace(effect, risk=risk.of_change(by_path[effect.path], classes.get(effect.path, frozenset()), place=effect.place))
        for effect in effects
    )


def understood(work: Work) -> Understanding | None:
    """Return the analysis of a command or of bash code; None for code in another language."""
    if isinstance(work.what, Code):
        return understand(work.what.source) if work.what.language == "bash" else None
    argv = work.what.argv
    return understand(argv[-1]) if reads_a_line(argv) else understand_argv(argv)


def predictions(read: Understanding | None) -> Iterator[Prediction]:
    """Yield the predicted effects of a command that a person should see."""
    for effect in read.effects if read else ():
        minded = risk.of_prediction(effect.kind)
        if minded is not risk.NONE:
            yield Prediction(effect.kind.value, effect.what, minded)
    for what in read.unknown if read else ():
        yield Prediction("unknown", what, risk.of_prediction(EffectKind.UNKNOWN))


def programs(observed: Iterable[Observed], read: Understanding | None, *, watched: bool) -> tuple[ProgramUse, ...]:
    """Return each started program with its number of starts. If the run was not `watched`, return the programs that the text names."""
    if not watched:
        return tuple(ProgramUse(tool) for tool in (read.tools if read else ()))
    times: dict[tuple[str, bool], int] = {}
    for each in observed:
        if each.kind == "execute":
            key = (each.target, each.allowed)
            times[key] = times.get(key, 0) + each.times
    return tuple(ProgramUse(path, count, allowed, risk.of_program(allowed)) for (path, allowed), count in times.items())


def requests(observed: Iterable[Observed], http: Iterable[HttpRequest] = ()) -> tuple[NetworkRequest, ...]:
    """Return the network requests among the observed attempts. `http` are the requests over HTTP, which have the risk of their hosts."""
    listed = {f"{bracketed(each.host)}:{each.port}" for each in http}
    attempts = [(each, each.allowed and each.target in listed) for each in observed if each.kind in _NETWORK]
    return tuple(
        NetworkRequest(each.kind, each.target, each.program, each.times, risk.of_request(each.kind, each.target, listed=told), each.allowed)
        for each, told in attempts
    )


def http_requests(made: Iterable[RequestMade]) -> tuple[HttpRequest, ...]:
    """Return the requests over HTTP of a run, with their risks."""
    return tuple(
        HttpRequest(
            *(each.method, each.name, each.port, each.tls, each.path, each.times, each.left, each.secrets),
            risk.of_http(each.method, each.name, each.path, each.secrets),
        )
        for each in made
    )


def secrets(observed: Iterable[Observed], masks: Iterable[Mask], env: Mapping[str, str]) -> tuple[SecretUse, ...]:
    """Return the hidden files that the run tried to open, and its environment variables whose name or value looks like a secret."""
    why = {mask.path: mask.why for mask in masks}
    uses: dict[tuple[str, str], SecretUse] = {}
    for each in observed:
        barred = each.kind in _OPENING and not each.allowed
        mask = next((path for path in ancestors(each.target) if path in why), None) if barred else None
        if mask is not None:
            use = SecretUse("file", each.target, why[mask], each.program, risk.of_secret("file", why[mask]))
            uses.setdefault((each.target, each.program), use)
    for name, value in sorted(env.items()):
        if names_a_secret(name):
            uses[("", name)] = SecretUse("variable", name, "its name looks like a secret", risk=risk.of_secret("variable", ""))
        elif without_secrets({"value": value})["value"] != value:
            uses[("", name)] = SecretUse("variable", name, "its value looks like a secret", risk=risk.of_secret("variable", ""))
    return tuple(uses.values())


MOST_FILES = 5_000
MOST_BYTES = 256 << 20
NOT_ALL = "it read more files of the project than are recorded: carry-out cannot check whether all of them are unchanged"
_CHUNK = 1 << 20


def inputs_of(observed: Iterable[Observed], project: str, *, since_ns: int, besides: Collection[str]) -> tuple[tuple[Input, ...], bool]:
    """Return the files of the project that the run read, and whether the list is complete.

    A file that changed after `since_ns` has no digest. `besides` are paths that the plan changes. They are left out, because applying the
    plan compares them with the real files anyway.
    """
    inputs: list[Input] = []
    room = MOST_BYTES
    with _opened(project) as top:
        for path in dict.fromkeys(each.target for each in observed if each.kind == "read" and each.allowed):
            if path in besides or not contains(project, path):
                continue
            seen = _look(top, path, project, room)
            if seen is None:
                continue
            size, changed_ns, digest = seen
            room -= size
            if room < 0 or len(inputs) == MOST_FILES:
                return tuple(inputs), False
            inputs.append(Input(path, digest if changed_ns <= since_ns else ""))
    return tuple(inputs), True


def moved(inputs: Iterable[Input], project: str) -> Iterator[str]:
    """Yield the paths of inputs that have changed since the simulation, or that had no digest."""
    with _opened(project) as top:
        for each in inputs:
            seen = _look(top, each.path, project, MOST_BYTES)
            if seen is None or not each.sha256 or seen[2] != each.sha256:
                yield each.path


@contextmanager
def _opened(project: str) -> Iterator[int]:
    top = os.open(project, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield top
    finally:
        os.close(top)


def _look(top: int, path: str, project: str, most: int) -> tuple[int, int, str] | None:
    """Return size, change time and digest of a regular file; None if it is missing, unreadable, behind a link, or no regular file."""
    try:
        fd = beneath.open_file(top, path[len(project.rstrip("/")) :].lstrip("/"), one_filesystem=False)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        digest = sha256()
        while status.st_size <= most and (piece := os.read(fd, _CHUNK)):
            digest.update(piece)
        return status.st_size, status.st_ctime_ns, digest.hexdigest()
    finally:
        os.close(fd)
