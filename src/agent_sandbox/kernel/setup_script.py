"""The setup script of a run: its request and mount plan as a flat list of steps, for the compiled helper that sets most guests up.

`guest_setup` and `mount_steps` are the reference: they set up every kind of run, and explain every failure. The helper
(`helper/setup.c`) performs scripts of the commonest kind alone, and declines whatever turns out otherwise; then the reference makes the
guest. So a script has no alternatives in it. Every number and option of a mount comes from here, where the reference has it, too.
"""

from __future__ import annotations

import marshal
import os
import struct

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.kernel import ids, landlock, mount_plan, namespaces, usage, wire
from agent_sandbox.kernel.counters import QUIET_TICK
from agent_sandbox.kernel.init import TICK
from agent_sandbox.kernel.mount_plan import DEVICES, DIGEST, MountPlan, Overlay, ThrowAway
from agent_sandbox.kernel.mount_steps import LINKS_OF_DEV, PROC_MASKED, PROC_READONLY, TERMINALS, needs_masks, sized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from agent_sandbox.kernel.mask_layers import Findings

PROTOCOL, LARGEST = 1, 8 << 20  # as in helper/helper.h: its version, and the most bytes of a script
_ROOT, _READABLE, _USERXATTR, _PYTHON = 1, 2, 4, 8
_NOTHING, _SOMETHING, _AN_ERROR = 0, 1, 2  # kinds of findings
_PARENT, _WHITEOUT, _OPAQUE = 0, 1, 2  # kinds of entries of a mask layer
_UNLIMITED = (1 << 64) - 1
_STEPS = (
    mount_plan.Overlay,
    mount_plan.Bind,
    mount_plan.Tmpfs,
    mount_plan.Directory,
    mount_plan.Symlink,
    mount_plan.NewFile,
    mount_plan.SkeletonRoot,
    mount_plan.SealRoot,
    mount_plan.Devices,
    mount_plan.Proc,
)
# What only the reference does, by the names in a request.
_ONLY_BY_REFERENCE = (
    "outer",
    "agent",
    "inner_root",
    "system",
    "farewell",
    "observe",
    "network",
    "inward",
    "checkpoints",
    "inside",
    "terminal",
)


@dataclass(frozen=True)
class Ids:
    """The ids of a keeper's guests: shifted if it is root, else its own."""

    root: bool
    uid: int = 0
    gid: int = 0

    @property
    def shift(self) -> int:
        return ids.FIRST_ID if self.root else 0


def is_possible(request: dict[str, Any], plan: MountPlan) -> bool:
    """Return whether the helper can set up a run of this request and plan."""
    if any(request[name] for name in _ONLY_BY_REFERENCE) or request["may_fork"] != request["may_exec"]:
        return False
    if not isinstance(plan.layers, ThrowAway) or not all(isinstance(step, _STEPS) for step in plan.steps):
        return False
    overlays = [step for step in plan.steps if isinstance(step, Overlay)]
    return not any(each.links or each.links_over or each.links_instead for each in overlays)


def compose(request: dict[str, Any], plan: MountPlan, findings: dict[int, Findings] | None, *, ids_of: Ids, abi: int) -> bytes:
    """Return the script of a run. Call it only if `is_possible`. Raises ValueError if it is too large, or the plan is wrong.

    `findings` are those of the mask layers that are sent with the script; None if the helper makes its own. `abi` is that of the kernel's
    Landlock.
    """
    flags = (_ROOT if ids_of.root else _USERXATTR) | (_READABLE if request["readable"] else 0) | (_PYTHON if request["python"] else 0)
    rules = landlock.plan(version=abi, writable=request["scratch"], executable=request["executables"])
    ready = {"kind": "ready", "notes": rules.gaps(), "asked": 0, "search": (), "doors": (0, 0), "shares_proc": False, "masks": None}
    uncounted = None if "processes" in request["enforced"] else request["processes"]
    weighed = "memory" in request["enforced"]
    watched = request["cpu_seconds"] is not None or uncounted is not None or not weighed
    patience = TICK if watched else QUIET_TICK  # until init has limits or counters to look at
    most = _UNLIMITED if request["open_files"] is None else request["open_files"]
    number = filter_number(processes=request["may_fork"], execute=request["may_exec"])
    head = struct.pack("=7I", PROTOCOL, flags, ids_of.shift, ids_of.uid, ids_of.gid, number, round(patience * 1000))
    head += struct.pack("=QQ", most, _UNLIMITED if uncounted is None else uncounted - 1)
    limits = usage.limits(
        cpu_seconds=request["cpu_seconds"],
        processes=uncounted,
        file_bytes=None if weighed else request["file_bytes"],
    )
    guest_limits = usage.limits(data_bytes=None if weighed else request["memory_bytes"])
    parts = (
        b"".join(_text(name) + _text(f"{value}") for name, value in namespaces.BOUNDS),
        b"".join(struct.pack("=IQQ", *limit) for limit in limits),
        b"".join(struct.pack("=IQQ", *limit) for limit in guest_limits),
        _ruleset(rules),
        wire.pack(ready),
        marshal.dumps(_notes(request, plan)),
        b"".join(_steps(plan, findings, ids_of.shift)),
    )
    script = b"".join((head, _text(namespaces.HOSTNAME), _text(request["tmp"]), *map(_bytes, parts)))
    if len(script) > LARGEST:
        raise ValueError(f"a script of {len(script):,} bytes")
    return script


def filter_number(*, processes: bool, execute: bool) -> int:
    """Return the number under which the helper has the filter of such guests."""
    return 2 * processes + execute


def _notes(request: dict[str, Any], plan: MountPlan) -> tuple[dict[str, Any], list[str]]:
    """Return what init needs to watch a longer run, for `guest_setup.become_init_of_helper`."""
    left_out = ("plan", "scratch", "executables")
    private = [step.target for step in plan.steps if isinstance(step, mount_plan.Tmpfs)]
    return {name: value for name, value in request.items() if name not in left_out}, private


def _steps(plan: MountPlan, findings: dict[int, Findings] | None, shift: int) -> Iterator[bytes]:
    assert isinstance(plan.layers, ThrowAway)
    yield _text(f"{sized(plan.layers.size_bytes)},mode=700")
    owner = f",uid={shift},gid={shift}" if shift else ""
    for number, step in enumerate(plan.steps):
        match step:
            case mount_plan.Overlay():
                yield _code("o") + _overlay(step, (findings or {}).get(number, {}))
            case mount_plan.Bind(source=source, target=target):
                yield _code("b") + _text(source) + _text(target)
            case mount_plan.Tmpfs(target=target, size_bytes=size, mode=mode):
                yield _code("t") + _text(target) + _text(f"{sized(size)},mode={mode:o}{owner}")
            case mount_plan.Directory(target=target):
                yield _code("d") + _text(target)
            case mount_plan.Symlink(target=target, to=to):
                yield _code("l") + _text(target) + _text(to)
            case mount_plan.NewFile(target=target, content=content):
                yield _code("f") + _text(target) + _bytes(content)
            case mount_plan.SkeletonRoot():
                yield _code("k")
            case mount_plan.SealRoot(target=target):
                yield _code("s") + _text(target)
            case mount_plan.Devices(shm_bytes=size):
                nodes = [_text(name) + struct.pack("=II", *numbers) for name, numbers in DEVICES.items()]
                links = [_text(name) + _text(to) for name, to in LINKS_OF_DEV]
                yield _code("v") + _text(TERMINALS) + _text(f"{sized(size)},mode=1777") + _list(nodes) + _list(links)
            case mount_plan.Proc():
                yield _code("p") + _list(map(_text, PROC_READONLY)) + _list(map(_text, PROC_MASKED))
            case _:
                raise ValueError(f"not a step of a script: {step!r}")


def _overlay(step: Overlay, findings: Findings) -> bytes:
    recorded = step.target if step.key.startswith(DIGEST) else ""
    head = _text(step.source) + _text(step.target) + _text(step.key) + _text(recorded) + struct.pack("=I", bool(step.writable))
    directories = dict.fromkeys((*step.places, *map(os.path.dirname, step.files)))
    parts = (
        b"".join(_finding(path, seen) for path, seen in findings.items()),
        b"".join(_masks(step)),
        b"".join(_text(place) for place in directories if place),
        b"".join(map(_text, step.files)),
    )
    return head + struct.pack("=I", needs_masks(step)) + b"".join(map(_bytes, parts))


def _finding(path: str, seen: tuple[int, int, int] | None) -> bytes:
    if seen is None:
        return _text(path) + struct.pack("=4I", _NOTHING, 0, 0, 0)
    first, uid, gid = seen
    if uid < 0:
        return _text(path) + struct.pack("=4I", _AN_ERROR, first, 0, 0)
    return _text(path) + struct.pack("=4I", _SOMETHING, first, uid, gid)


def _masks(step: Overlay) -> Iterator[bytes]:
    """Yield the entries of a mask layer, each after its parents. Raises ValueError if a wider mask comes after a narrower one."""
    made: dict[str, int] = {"": _PARENT}

    def parents(path: str) -> Iterator[str]:
        if path not in made:
            yield from parents(os.path.dirname(path))
            made[path] = _PARENT
            yield path

    def hidden(path: str) -> bool:
        """Whether a wider mask hides it: an emptied directory is one in the layer, too, and whatever were made in it would show."""
        while path := os.path.dirname(path):
            if made.get(path, _PARENT) != _PARENT:
                return True
        return False

    for mask in step.masks:
        if hidden(mask.path):
            continue
        for parent in parents(os.path.dirname(mask.path)):
            yield struct.pack("=I", _PARENT) + _text(parent)
        if mask.path in made:
            if made[mask.path] == _PARENT:
                raise ValueError(f"a wider mask must come before the narrower ones in it: {mask.path}")
            continue
        made[mask.path] = _OPAQUE if mask.keep else _WHITEOUT
        yield struct.pack("=I", made[mask.path]) + _text(mask.path)
    for path in step.stand_ins:
        for parent in () if hidden(path) else parents(path):
            yield struct.pack("=I", _PARENT) + _text(parent)


def _ruleset(rules: landlock.Ruleset) -> bytes:
    scoped = sum(landlock.SCOPES[name][0] for name in rules.scoped)
    grants = [_text(grant.path) + struct.pack("=Q", landlock.bits(grant.rights)) for grant in rules.grants]
    return struct.pack("=3Q", landlock.bits(rules.handled), scoped, landlock.bits(landlock.OF_A_FILE)) + b"".join(grants)


def _code(letter: str) -> bytes:
    return struct.pack("=I", ord(letter))


def _bytes(content: bytes) -> bytes:
    return struct.pack("=I", len(content)) + content


def _text(text: str) -> bytes:
    raw = os.fsencode(text)
    if b"\0" in raw:
        raise ValueError(f"a zero byte in {text!r}")
    return _bytes(raw + b"\0")


def _list(items: Iterable[bytes]) -> bytes:
    parts = list(items)
    return struct.pack("=I", len(parts)) + b"".join(parts)
