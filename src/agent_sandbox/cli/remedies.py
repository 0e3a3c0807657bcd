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
        parts += [f"in a container ({self.container})"] if self.container else []
        parts += [f"under WSL{self.wsl}"] if self.wsl else []
        return ", ".join(parts)


def remedy_here() -> str:
    """Return a remedy for this machine's obstacle to user namespaces and mounts; empty if none is known."""
    return remedy(Situation.look())


def remedy(here: Situation) -> str:
    """Return a remedy for the first obstacle to user namespaces and mounts; empty if none is known."""
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
    if here.container and here.filtered:
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
    if here.container:
        return "the root filesystem of a container is an overlay, which cannot be idmapped: run this as an ordinary user"
    return "run this as an ordinary user, or on a root filesystem that can be idmapped (ext4, xfs, btrfs; Linux 5.12 to 5.15 and later)"


def _container() -> str:
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    for word in ("docker", "kubepods", "containerd", "libpod", "lxc"):
        if word in _read("/proc/1/cgroup"):
            return word
    return ""


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
