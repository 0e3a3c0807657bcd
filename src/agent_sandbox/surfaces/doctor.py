"""`doctor`: one row for each thing a sandbox needs of this machine, proved by a live try, with what to do where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from agent_sandbox.kernel import probes
from agent_sandbox.kernel.probes import Trial
from agent_sandbox.surfaces import trials
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.messages import shown
from agent_sandbox.surfaces.remedies import Situation, idmapping_remedy, remedy
from agent_sandbox.surfaces.style import Style

Status = Literal["ok", "weaker", "missing"]
_FULL_LANDLOCK = 6  # the first ABI with everything that the rules use


@dataclass(frozen=True)
class Row:
    """One capability. `gives` is what it is for, `found` what the try showed, `remedy` what to do unless it is ok."""

    name: str
    status: Status
    gives: str
    found: str
    remedy: str = ""
    required: bool = True

    @property
    def fatal(self) -> bool:
        """Whether nothing can run without it."""
        return self.required and self.status == "missing"


def doctor(request: Request) -> int:
    """The verb `doctor`. Exits with 1 when something required is missing."""
    here = Situation.look()
    rows = examine(here)
    broken = any(row.fatal for row in rows)
    if request.has("--json"):
        from agent_sandbox.surfaces.documents import print_document

        print_document("doctor", {"host": here.name, "usable": not broken, "rows": [asdict(row) for row in rows]})
    else:
        report(rows, here)
    return 1 if broken else 0


def report(rows: list[Row], here: Situation) -> None:
    """Print the rows for people."""
    style = Style.of_stdout()
    width = max(len(row.name) for row in rows)
    print(shown(here.name))
    for row in rows:
        optional = "" if row.required or row.status != "missing" else " (optional)"
        print(f"{style.status(row.status, 8)}{row.name:<{width}}  {row.gives}: {shown(row.found)}{optional}")
        if row.remedy and row.status != "ok":
            print(f"{'':8}{'':{width}}  -> {shown(row.remedy)}")
    missing = [row.name for row in rows if row.fatal]
    verdict = f"Nothing can run here: {', '.join(missing)}." if missing else "Sandboxes work on this machine."
    print(style.heading(verdict))


def examine(here: Situation) -> list[Row]:
    """Try everything out."""
    rows = [
        _row("user namespaces", probes.user_namespace(), "rights of its own, none over the machine", remedy(here)),
        _row("namespaces", probes.own_namespaces(), "own processes, no network", remedy(here)),
        _row("mount copies", probes.mount_api(), "a view made of the machine's own mounts", remedy(here)),
        _row("overlay", probes.overlay(), "every write is captured", remedy(here) or "load the module: modprobe overlay"),
        _row("own /proc", probes.own_proc(), "sees no process but its own", remedy(here)),
    ]
    if here.root:
        rows.append(_row("idmapped mounts", probes.idmapped_root(), "never the machine's root", idmapping_remedy(here)))
    rows += [
        _row(
            "seccomp",
            probes.system_call_filter(),
            "few ways into the kernel",
            "use a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
        ),
        _landlock(probes.landlock_rules()),
        _row("pidfd", probes.process_handles(), "nothing outlives its supervisor", "Linux 5.3 or later is needed"),
        _row("openat2", probes.safe_opening(), "reading what a guest wrote without being led astray", "Linux 5.6 or later is needed"),
        _control_groups(),
    ]
    whole: list[tuple[str, Callable[[], Trial], str, str]] = [
        ("a run", trials.throw_away, "all of it together, on a clone of this machine", remedy(here)),
        (
            "state directory",
            trials.state_directory,
            "sandboxes that outlive a command",
            "point XDG_STATE_HOME to a directory of your own with space",
        ),
        ("a kept run", trials.kept, "layers on the disk of the state directory", "point XDG_STATE_HOME to a local disk (ext4, xfs, btrfs)"),
    ]
    rows += [_row(name, try_out(), gives, what_to_do) for name, try_out, gives, what_to_do in whole]
    return [*rows, *(_interpreter(language) for language in ("python", "bash", "javascript", "ruby"))]


def _row(name: str, trial: Trial, gives: str, what_to_do: str) -> Row:
    return Row(name, "ok" if trial.worked else "missing", gives, trial.said, "" if trial.worked else what_to_do)


def _landlock(trial: Trial) -> Row:
    gives, newer = (
        "a second wall for devices, writes and signals",
        "a newer kernel has all of it (6.12); without it the view alone is the wall",
    )
    if not trial.worked:
        return Row(
            "Landlock",
            "weaker",
            gives,
            trial.said,
            f"{newer}; if it is switched off, add lsm=landlock,… to the kernel's command line",
            False,
        )
    version = int("".join(character for character in trial.said if character.isdigit()) or 0)
    full = version >= _FULL_LANDLOCK
    return Row("Landlock", "ok" if full else "weaker", gives, trial.said, "" if full else newer, False)


def _control_groups() -> Row:
    enforced, missing = probes.control_group()
    gives = "limits that many processes together cannot outrun"
    found = "; ".join([*(f"{name} enforced" for name in sorted(enforced)), *(f"{name}: {why}" for name, why in sorted(missing.items()))])
    if not missing:
        return Row("control groups", "ok", gives, found, "", False)
    what_to_do = "limits are watched instead; for hard ones run as root, or under: systemd-run --user --scope -p Delegate=yes"
    return Row("control groups", "weaker", gives, found, what_to_do, False)


def _interpreter(language: str) -> Row:
    trial, package = trials.interpreter(language)
    return Row(
        language,
        "ok" if trial.worked else "missing",
        f"{language} code",
        trial.said,
        "" if trial.worked else f"install it: apt-get install {package}",
        language in ("python", "bash"),
    )
