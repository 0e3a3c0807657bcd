"""Find the files of a project that hold secrets, so that a run can hide them.

Every directory of the project is listed, except dependencies and caches (`SKIPPED`). The listing is remembered in the state directory: a
directory whose times have not changed is not listed again, so that a later run pays for one `stat` a directory. Only files with a
suspicious name are read, and read again when their status changes.

A directory that cannot be searched is hidden, and a remark says so: one beyond the limits, one that cannot be listed, one that is too deep.
A file that is the same in git's HEAD is shown, because its content is in the repository anyway, unless it holds a private key or a token.

Links are not followed. A file that appears after the search is visible until the next run, unless `policy.secrets` lists its name.
"""

from __future__ import annotations

import errno
import marshal
import os
import stat
import time
from zlib import crc32

from agent_sandbox._fast.contexts import suppress
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.policy import secret_content, secret_names
from agent_sandbox.policy.secret_names import KEY_STORE, NAME, TOKEN, Suspicion
from agent_sandbox.policy.secrets import FoundMask
from agent_sandbox.workspace.durable import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

# Dependencies, caches and the object store of git. They carry test keys by the hundred, and are not the user's own files.
SKIPPED = frozenset(
    {
        *(".git", ".hg", "node_modules", "bower_components", "site-packages", "dist-packages", "__pycache__", ".tox", ".nox"),
        *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".pnpm-store", ".gradle", ".m2"),
    }
)
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib", "/etc/", "/dev/", "/proc/", "/sys/", "/nix/store/")
_IN_GIT = (".git/config", ".git/credentials")  # addresses of remotes may hold a token
_UNREADABLE = "something that could not be examined"
NOT_SEARCHED, TOO_MANY = "not searched for secrets", "a directory full of secrets"
_SETTLED_NS = 3_000_000_000  # an entry that changed this recently may change again without another time: some filesystems count by 2 s
_KEY_BYTES, _HEAD_BYTES, _TRACKED_BYTES = 1 << 20, 16 << 10, 1 << 20
_LONGEST_PATH = 3000  # bytes; a mask needs room before its path
_MOST_IN_DIRECTORY = 256  # hidden files; beyond this the directory is hidden as a whole
_MOST_UNSEARCHED = 256
_MOST_CACHES = 64
_KEY_EXTENSIONS = (".pem", ".key", ".der", ".p8", ".pk8", ".asc", ".gpg", ".pgp", ".priv", ".sec", ".rsa")

Status = tuple[int, ...]
Listing = tuple[Status, tuple[str, ...], tuple[str, ...]]  # status of a directory, its subdirectories, and its suspected names


@dataclass(frozen=True)
class SearchLimits:
    """The limits of one search: entries to list, and seconds. The next search goes on from there, because listings are remembered."""

    entries: int = 2_000_000
    seconds: float = 20.0


@dataclass(frozen=True)
class SecretFiles:
    """The result of a search: a mask for each file with a secret, and for each directory that could not be searched.

    `shown` are files that have the name of a secret, and are shown because git tracks them.
    """

    masks: tuple[FoundMask, ...]
    shown: frozenset[str]


class SearchMemory:
    """The listings and verdicts of earlier searches, kept in one file. A missing, damaged or outdated file counts as empty."""

    def __init__(self, file: str, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._file = file
        self._now = now_ns
        self._stamp = _rules()
        self.changed = False
        self.directories: dict[str, Listing] = {}
        self.tracked: tuple[str, dict[str, str | None]] = ("", {})  # commit, and the object ids of suspected files
        self._verdicts: dict[str, tuple[Status, str, str]] = {}  # by path: status, what decided, the verdict
        self._used: dict[str, tuple[Status, str, str]] = {}
        with suppress(OSError, ValueError, EOFError, TypeError):
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                # A file of another user is not believed: it could hold the verdict that nothing here is secret.
                content = opened.read() if os.fstat(opened.fileno()).st_uid == os.geteuid() else b""
            if _checksum(memoryview(content)[4:]) == content[:4]:
                stamp, directories, verdicts, tracked = marshal.loads(memoryview(content)[4:])
                if stamp == self._stamp:
                    self.directories, self._verdicts, self.tracked = directories, verdicts, tracked

    def settled(self, status: os.stat_result) -> bool:
        """Return whether the last change of an entry is so old that the next change is certain to alter its times."""
        return status.st_ctime_ns < self._now() - _SETTLED_NS

    def verdict(self, path: str, status: os.stat_result, rule: str) -> str | None:
        """Return the remembered verdict on a file with this status; None if there is none.

        `rule` is the rule that the file is judged by: a verdict under another rule does not count.
        """
        known = self._verdicts.get(path)
        if known is None or known[:2] != (_key(status), rule):
            return None
        self._used[path] = known
        return known[2]

    def remember(self, path: str, status: os.stat_result, rule: str, verdict: str) -> None:
        """Remember a verdict, unless the file changed so recently that its times may not show the next change."""
        if self.settled(status):
            self._used[path], self.changed = (_key(status), rule, verdict), True

    def save(self) -> None:
        """Write the memory to its file if it has changed. A failure is ignored: then the next search only takes longer."""
        if not self.changed:
            return
        content = marshal.dumps((self._stamp, self.directories, self._used, self.tracked))
        with suppress(OSError):
            directory = os.path.dirname(self._file)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            if os.stat(directory).st_uid != os.geteuid():  # somebody else's state: as root, we write nothing there
                return
            write_atomically(self._file, _checksum(content) + content, sync=False)
            _remove_oldest(directory)


def hidden_in_project(
    project: str,
    memory: SearchMemory,
    *,
    skip: Collection[str] = (),
    limits: SearchLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SecretFiles:
    """Search a project for secrets. Paths in `skip` are not entered, because they are hidden anyway."""
    search = _Search(os.path.normpath(project), memory, frozenset(skip), limits or SearchLimits(), clock)
    search.walk()
    masks = tuple(_folded(search.masks(), project))
    return SecretFiles(masks, frozenset(search.shown))


def content_secret(path: str, memory: SearchMemory, *, named_so: bool = False, tokens: bool = True) -> str:
    """Return the kind of secret in a file, as `secret_content` names it; empty if none, or if it is no regular file.

    `named_so` says that the file is named like a key, and `tokens` that tokens count, too. A file that cannot be examined gets a kind of
    its own.
    """
    most = _KEY_BYTES if named_so else _HEAD_BYTES
    try:
        status = os.stat(path)
    except OSError as error:
        return "" if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else _UNREADABLE
    if not stat.S_ISREG(status.st_mode):
        return ""
    rule = f"{named_so}{tokens}"
    if (known := memory.verdict(path, status, rule)) is not None:
        return known
    try:
        content = _read(path, most)
    except OSError:
        return _UNREADABLE
    if len(content) > most and named_so:
        return _UNREADABLE
    verdict = secret_content.secret_in(content, named_so=named_so, tokens=tokens)
    if (
        not verdict
        and path.lower().endswith((".key", ".priv"))
        and len(content.split()) in (1, 2)
        and not secret_content.is_public(content)
    ):
        verdict = secret_content.PRIVATE_KEY
    memory.remember(path, status, rule, verdict)
    return verdict


def holds_secret(path: str, suspicion: Suspicion, memory: SearchMemory) -> str:
    """Return the kind of secret in a suspected file; empty if it holds none. The file is read only if its name does not decide."""
    if suspicion.by == NAME:
        return suspicion.why
    named_so = path.lower().endswith(_KEY_EXTENSIONS) or path.rpartition("/")[2].startswith("id_")
    # A file that is not named like settings, such as a script, may well mention a token.
    return content_secret(path, memory, named_so=named_so, tokens=suspicion.by == TOKEN)


_GAVE_UP = "the project has too many entries, or is too slow to list; the next run searches on"


class _TooMany(Exception):
    """A directory has more entries than the search may list."""


class _Search:
    def __init__(self, project: str, memory: SearchMemory, skip: frozenset[str], limits: SearchLimits, clock: Callable[[], float]) -> None:
        self._project, self._memory, self._skip = project, memory, skip
        self._prefix = project.rstrip("/") + "/"
        self._entries, self._until, self._clock = limits.entries, clock() + limits.seconds, clock
        self._suspects: list[tuple[str, Suspicion]] = []
        self.shown: set[str] = set()
        self._unsearched: dict[str, str] = {}
        self._device: int | None = None

    def walk(self) -> None:
        """List the directories of the project, the outermost first. Collects suspected files and directories that could not be searched."""
        known, seen = self._memory.directories, dict[str, Listing]()
        level, inner = [""], list[str]()
        while level:
            for at, path in enumerate(level):
                record = known.get(path)
                if record is None or record[0] != self._status(path):
                    if path and (self._entries <= 0 or self._clock() > self._until):
                        self._give_up([*level[at:], *inner])
                        inner = []
                        break
                    record = self._directory(path)
                    if record is None:
                        continue
                status, subdirectories, names = record
                if status:
                    seen[path] = record
                self._entries -= 1
                start = f"{path}/" if path else ""
                if names:
                    self._suspect(start, names)
                inner += [start + name for name in subdirectories]
            level, inner = inner, []
        if seen != known:
            self._memory.directories, self._memory.changed = seen, True

    def masks(self) -> Iterator[FoundMask]:
        """Yield a mask for each file with a secret and each unsearched directory. A remark explains a mask that may surprise a person."""
        for path, why in self._unsearched.items():
            yield FoundMask(self._prefix + path, NOT_SEARCHED, remark=why)
        hidden: list[tuple[str, Suspicion, str]] = []
        for path, suspicion in self._suspects:
            if (content := self._judged(path, suspicion)) is not None:
                hidden.append((path, suspicion, content))
        blobs, unknown = self._tracked([path for path, _, _ in hidden])
        for path, suspicion, content in hidden:
            blob = blobs.get(path)
            remark = f"it holds {content}" if content else ""
            remark = f"it is not known whether git tracks it: {unknown}" if unknown else remark
            if blob is not None:
                remark = self._why_hidden(path, suspicion, content, blob)
                if not remark:
                    self.shown.add(self._prefix + path)
                    continue
            yield FoundMask(self._prefix + path, suspicion.why, remark=remark)

    def _status(self, path: str) -> Status | None:
        """Return the inode and change time of a directory; None if it cannot be examined. While both stay the same, so does its listing."""
        try:
            status = os.stat(self._prefix + path, follow_symlinks=not path)  # the project itself may be named by a link
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def _directory(self, path: str) -> Listing | None:
        """List a directory. Return None if it is not searched; if it must then be hidden, the reason is noted."""
        place = self._prefix + path if path else self._project
        if len(place) > _LONGEST_PATH // 4 and len(os.fsencode(place)) > _LONGEST_PATH:
            self._unsearched[path] = "it lies too deep"
            return None
        try:
            status = os.stat(place, follow_symlinks=not path)
            if not stat.S_ISDIR(status.st_mode):
                return None  # replaced meanwhile
            if self._device is None:
                self._device = os.stat(self._project).st_dev
            if status.st_dev != self._device and _is_pseudo(place):
                return None
            subdirectories, names = self._listed(place, path)
        except FileNotFoundError:
            return None
        except _TooMany:
            self._unsearched[path] = _GAVE_UP
            return None
        except OSError as error:
            if path and self._is_ours(place):
                self._unsearched[path] = f"it cannot be listed ({error.strerror})"
            return None
        return (status.st_ino, status.st_ctime_ns) if self._memory.settled(status) else (), subdirectories, names

    def _listed(self, place: str, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the subdirectories and the suspected names of a directory.

        Raises `_TooMany` above the limit, except for the top directory of the project.
        """
        subdirectories: list[str] = []
        names: list[str] = []
        suspicion_of = secret_names.suspicion_of
        with os.scandir(place) as entries:
            for entry in entries:
                self._entries -= 1
                if self._entries < 0 and path:
                    raise _TooMany
                name = entry.name
                if entry.is_dir(follow_symlinks=False):
                    if name not in SKIPPED and f"{place}/{name}" not in self._skip:
                        subdirectories.append(name)
                    elif name == ".git":
                        names += _IN_GIT
                elif suspicion_of(name, directory=path) is not None and (entry.is_file(follow_symlinks=False) or entry.is_symlink()):
                    names.append(name)
        return tuple(subdirectories), tuple(names)

    def _is_ours(self, place: str) -> bool:
        """Return whether a directory belongs to this user. A guest, who is the same user, could then make it readable."""
        try:
            return os.stat(place, follow_symlinks=False).st_uid == os.geteuid()
        except OSError:
            return False

    def _suspect(self, start: str, names: tuple[str, ...]) -> None:
        for name in names:
            if (suspicion := secret_names.suspicion_of(name, directory=start)) is not None:
                self._suspects.append((start + name, suspicion))

    def _judged(self, path: str, suspicion: Suspicion) -> str | None:
        """Return the kind of secret seen in a suspected file; empty if its name alone decides; None if it holds no secret."""
        place = self._prefix + path
        if suspicion.by == NAME:
            return None if os.path.islink(place) and _points_to_nothing_secret(place) else ""
        if self._clock() > self._until:
            return _UNREADABLE
        return holds_secret(place, suspicion, self._memory) or None

    def _tracked(self, paths: list[str]) -> tuple[dict[str, str | None], str]:
        """Return the object id of each file in HEAD, None if git does not track it. If this is unknown, return nothing and the reason."""
        if not paths:
            return {}, ""
        from agent_sandbox.workspace.git import tracked  # most projects have nothing to ask about

        try:
            head = tracked.head_of(self._project)
            known, blobs = self._memory.tracked
            if head != known or any(path not in blobs for path in paths):
                found = tracked.tracked_blobs(self._project, paths) if head else {}
                blobs = {path: found.get(path) for path in paths}
                self._memory.tracked, self._memory.changed = (head, blobs), True
            return blobs, ""
        except (tracked.UnknownHead, OSError) as error:
            return {}, str(error)

    def _why_hidden(self, path: str, suspicion: Suspicion, content: str, blob: str) -> str:
        """Return why a tracked file stays hidden; empty if it is shown."""
        if content or suspicion is KEY_STORE:
            return f"git tracks it, but it holds {content or secret_content.PRIVATE_KEY}"
        place = self._prefix + path
        try:
            status = os.stat(place, follow_symlinks=False)
            if (known := self._memory.verdict(place, status, blob)) is not None:
                return known
            text = _read(place, _TRACKED_BYTES) if stat.S_ISREG(status.st_mode) else None
        except OSError:
            return f"git tracks it, but it holds {_UNREADABLE}"
        if text is None or len(text) > _TRACKED_BYTES:
            return f"git tracks it, but it holds {_UNREADABLE}"
        from agent_sandbox.workspace.git.tracked import blob_id  # loaded already

        if blob_id(text) != blob:
            verdict = "git tracks it, but it differs from HEAD"
        else:
            verdict = f"git tracks it, but it holds {found}" if (found := secret_content.secret_in(text)) else ""
        self._memory.remember(place, status, blob, verdict)
        return verdict

    def _give_up(self, pending: list[str]) -> None:
        for path in _outer(pending):
            self._unsearched[path] = _GAVE_UP


def _points_to_nothing_secret(link: str) -> bool:
    """Return whether a link leads to a directory, to a template, or to a file of the system.

    A mask on the link would hide its target, too.
    """
    real = os.path.realpath(link)
    return os.path.isdir(real) or secret_names.is_template(os.path.basename(real)) or real.startswith(_SYSTEM)


def _outer(paths: list[str]) -> Iterable[str]:
    """Return the paths; if they are too many for one mask each, return directories above them instead."""
    depth = max(path.count("/") for path in paths) + 1
    outer = set(paths)
    while len(outer) > _MOST_UNSEARCHED and depth > 1:
        depth -= 1
        outer = {"/".join(path.split("/")[:depth]) for path in paths}
    return sorted(outer)


def _folded(masks: Iterable[FoundMask], project: str) -> Iterator[FoundMask]:
    """Yield the masks, but only one for a directory with very many secrets, because each mask costs time at every start."""
    found = list(masks)
    counts: dict[str, int] = {}
    for mask in found:
        directory = mask.path.rpartition("/")[0]
        counts[directory] = counts.get(directory, 0) + 1
    full = {directory for directory, count in counts.items() if count > _MOST_IN_DIRECTORY and directory != project.rstrip("/")}
    for directory in sorted(full):
        yield FoundMask(directory, TOO_MANY, remark=f"it holds {counts[directory]:,} secrets")
    yield from (mask for mask in found if mask.path.rpartition("/")[0] not in full)


def _read(path: str, most: int) -> bytes:
    """Return the first `most` + 1 bytes of a regular file; nothing for any other file. Never waits for a pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb", buffering=0) as file:
        return file.read(most + 1) or b"" if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""


def _key(status: os.stat_result) -> Status:
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns  # whatever else changes sets the change time


def _checksum(content: bytes | memoryview) -> bytes:
    return crc32(content).to_bytes(4)  # against a torn file; nobody but its owner can write it


def _is_pseudo(place: str) -> bool:
    """Return whether a directory is on a filesystem such as /proc, which no view shows."""
    from agent_sandbox.kernel import mountinfo  # only for a project with something mounted in it

    mounts = [mount for mount in mountinfo.visible(mountinfo.read()) if mount.target == os.path.realpath(place)]
    return any(mount.fstype in mountinfo.PSEUDO for mount in mounts)


def _rules() -> tuple[int, ...]:
    """Return a value that changes with the rules for secrets, so that results of older rules are not used."""
    stamps: list[int] = [1]
    for module in (secret_names, secret_content):
        with suppress(OSError):
            status = os.stat(str(module.__file__))
            stamps += (status.st_mtime_ns, status.st_size)  # an installer may give the files of every version the same time
    return tuple(stamps)


def _remove_oldest(directory: str) -> None:
    names = [entry for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
    if len(names) > _MOST_CACHES:
        for entry in sorted(names, key=lambda entry: entry.stat().st_mtime_ns)[:-_MOST_CACHES]:
            os.unlink(entry.path)
