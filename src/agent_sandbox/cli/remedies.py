"""Remedies for a machine on which sandboxes do not work, derived from settings in /proc.

This module only explains failures. `kernel.probes` finds out, by trying, which features work.
"""

from __future__ import annotations

import os
import sys

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.cli.render.messages import Console, shown
from agent_sandbox.cli.results import VerbResult

if TYPE_CHECKING:
    from typing import Literal

APPARMOR = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
MAX_USERNS = "/proc/sys/user/max_user_namespaces"
CLONE_USERNS = "/proc/sys/kernel/unprivileged_userns_clone"
NESTED = (
    "this runs in a sandbox of agent-sandbox, whose system-call filter refuses another one inside: start the program itself; "
    "the sandbox around it confines it and captures its changes"
)
# What to do where a run works, and yet sees the processes around it.
OWN_PROC = (
    "a run shares the /proc around it, read-only, and says so; a policy that requires processes-invisible is refused. "
    "For a /proc of its own start the container with --security-opt unmask=ALL (podman) or systempaths=unconfined (docker)"
)
OLDEST = (5, 13)  # overlays without root: 5.11; mount_setattr: 5.12; Landlock: 5.13
OLDEST_FOR_ROOT = (5, 19)  # overlays over idmapped mounts


@dataclass(frozen=True)
class CheckRow:
    """One check of the machine: the benefit of the feature (`gives`), the finding (`found`), and the remedy if it is not ok."""

    name: str
    status: Literal["ok", "weaker", "missing"]
    gives: str
    found: str
    remedy: str = ""
    required: bool = True

    @property
    def fatal(self) -> bool:
        """Whether this check failed and no sandbox can run because of that."""
        return self.required and self.status == "missing"


@dataclass(frozen=True)
class DoctorResult(VerbResult):
    """The checks of a machine, and whether sandboxes can run there."""

    kind = "doctor"

    host: str
    usable: bool
    rows: tuple[CheckRow, ...]

    @property
    def code(self) -> int:
        """1 if something required is missing, else 0."""
        return 0 if self.usable else 1

    def text(self, console: Console) -> None:
        style = console.style
        width = max(len(row.name) for row in self.rows)
        print(shown(self.host))
        for row in self.rows:
            optional = "" if row.required or row.status != "missing" else " (optional)"
            print(f"{style.status(row.status, 8)}{row.name:<{width}}  {row.gives}: {shown(row.found)}{optional}")
            if row.remedy and row.status != "ok":
                print(f"{'':8}{'':{width}}  -> {shown(row.remedy)}")
        linux = sys.platform == "linux"
        works = "Sandboxes work on this machine." if linux else "Python code runs on this machine, behind one wall."
        missing = [row.name for row in self.rows if row.fatal]
        print(style.heading(f"Nothing can run here: {', '.join(missing)}." if missing else works))

    @classmethod
    def of(cls, rows: list[CheckRow], host: str) -> DoctorResult:
        """Return the result of these checks."""
        return cls(host, not any(row.fatal for row in rows), tuple(rows))


@dataclass(frozen=True)
class Situation:
    """Facts about the machine that can be read without trying anything."""

    release: str  # of the kernel, as uname says it
    root: bool
    container: str = ""  # the engine, when we are in one
    wsl: int = 0  # 1 or 2
    max_user_namespaces: int | None = None
    userns_clone: int | None = None  # Debian's own switch
    apparmor_restricts: bool = False
    filtered: bool = False  # whether a system call filter is already in force
    nested: bool = False  # whether we are in a sandbox of this program

    @classmethod
    def look(cls) -> Situation:
        """Read these facts from this machine."""
        release = os.uname().release
        lowered = release.lower()
        status = _read("/proc/self/status")
        return cls(
            release,
            os.geteuid() == 0,
            _container(),
            0 if "microsoft" not in lowered else 2 if "wsl2" in lowered else 1,
            _number(MAX_USERNS),
            _number(CLONE_USERNS),
            _number(APPARMOR) == 1,
            "\nSeccomp:\t2" in status,
            _nested(status),
        )

    @property
    def version(self) -> tuple[int, int]:
        """The first two numbers of the kernel's version."""
        major, minor, *_ = [*self.release.split("."), "0", "0"]
        return _leading(major), _leading(minor)

    @property
    def name(self) -> str:
        """A description of the machine, for the head of a report."""
        parts = [f"Linux {self.release}", "as root" if self.root else "as an ordinary user"]
        parts += ["in a sandbox of this program"] if self.nested else [f"in a container ({self.container})"] if self.container else []
        parts += [f"under WSL{self.wsl}"] if self.wsl else []
        return ", ".join(parts)


def remedy_here() -> str:
    """Return a remedy for this machine's obstacle to user namespaces and mounts; empty if none is known, or if they work when tried."""
    from agent_sandbox.kernel import probes  # only after a failure

    here = Situation.look()
    namespaces_work, overlays_work = probes.user_namespace().worked, probes.overlay().worked
    if here.root and namespaces_work and overlays_work and not probes.idmapped_root().worked:
        return idmapping_remedy(here)
    return "" if namespaces_work and overlays_work else remedy(here, namespaces_work=namespaces_work)


def remedy(here: Situation, *, namespaces_work: bool = False) -> str:
    """Return a remedy for the first obstacle to user namespaces and mounts; empty if none is known.

    With `namespaces_work`, user namespaces have been tried, and something else is in the way.
    """
    if here.nested:
        return NESTED
    if here.wsl == 1:
        return "WSL1 has no namespaces: convert the distribution with: wsl --set-version NAME 2"
    if here.version < OLDEST:
        update = "run: wsl --update" if here.wsl else "update the kernel"
        needed = f"{OLDEST[0]}.{OLDEST[1]} or later is needed (overlays without root came with 5.11, mount_setattr with 5.12)"
        return f"Linux {here.release} is too old: {needed}; {update}"
    if here.root and here.version < OLDEST_FOR_ROOT:
        return f"Linux {here.release} is too old for root: overlays over idmapped mounts came with 5.19; start it as an ordinary user"
    if here.max_user_namespaces == 0:
        return "user namespaces are switched off here: sysctl -w user.max_user_namespaces=15000 (as root; keep it in /etc/sysctl.d)"
    if here.userns_clone == 0 and not here.root:
        return "this kernel keeps user namespaces to root: sysctl -w kernel.unprivileged_userns_clone=1 (as root; keep it in /etc/sysctl.d)"
    if here.container and here.root and namespaces_work:
        return (
            f"root of this container ({here.container}) may not mount, and an ordinary user may, in a user namespace: run this as one "
            "(start the container with --user 1000), or start the container with --privileged"
        )
    if here.container and here.filtered and not namespaces_work:
        return (
            f"the seccomp profile of this container ({here.container}) forbids namespaces: start it with --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined, or with --privileged"
        )
    if here.apparmor_restricts and not here.root:
        return (
            "AppArmor takes the capabilities from user namespaces here (Ubuntu 23.10 and later): as root, "
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give this program a profile that permits `userns`"
        )
    if here.container:
        return (
            f"inside a container ({here.container}) start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined or --privileged, and run this as an ordinary user: a root filesystem that is itself an "
            "overlay cannot be idmapped"
        )
    return ""


def idmapping_remedy(here: Situation) -> str:
    """Return a remedy for a root filesystem without support for idmapped mounts, which sandboxes started by root need."""
    if here.nested:
        return NESTED
    if here.container:
        return "the root filesystem of a container is an overlay, which cannot be idmapped: run this as an ordinary user"
    return "run this as an ordinary user, or on a root filesystem that can be idmapped (ext4, xfs, btrfs; Linux 5.12 to 5.15 and later)"


def _nested(status: str) -> bool:
    """Return whether we are in a sandbox of this program: by its id map or, without root, by its host name and its filter."""
    from agent_sandbox.kernel.guest_setup import HOSTNAME  # needs Linux
    from agent_sandbox.kernel.ids import FIRST_ID

    outside = _read("/proc/self/uid_map").split()[1:2]
    return outside == [str(FIRST_ID)] or (os.uname().nodename == HOSTNAME and "\nNoNewPrivs:\t1" in status and "\nSeccomp:\t2" in status)


def _container() -> str:
    # First the file that is made at each start: an image may hold the other.
    marker = "podman" if os.path.exists("/run/.containerenv") else "docker" if os.path.exists("/.dockerenv") else ""
    if marker and (not _in_first_pid_namespace() or _root_is_overlay()):  # else it is a file left in an image that a machine was made of
        return marker
    for word in ("docker", "kubepods", "containerd", "libpod", "lxc"):
        if word in _read("/proc/1/cgroup"):
            return word
    return ""


def _in_first_pid_namespace() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC  # the same on every machine (PROC_PID_INIT_INO)
    except OSError:
        return False


def _root_is_overlay() -> bool:
    return any(line.split()[4] == "/" and " - overlay " in line for line in _read("/proc/self/mountinfo").splitlines())


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _leading(text: str) -> int:
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits) if digits else 0
