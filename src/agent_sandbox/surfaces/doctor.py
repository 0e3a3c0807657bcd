"""`doctor`: one row for each thing a sandbox needs of this machine, proved by a live try, with what to do where it fails."""

from __future__ import annotations

from collections.abc import Callable

from agent_sandbox.kernel import landlock, probes
from agent_sandbox.kernel.probes import Trial
from agent_sandbox.policy.action import LANGUAGES
from agent_sandbox.surfaces import trials
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.remedies import Situation, idmapping_remedy, remedy
from agent_sandbox.surfaces.rows import Row, document, report

_FULL_LANDLOCK = 6  # the first ABI with everything that the rules use


def doctor(request: Request) -> int:
    """The verb `doctor`. Exits with 1 when something required is missing."""
    here = Situation.look()
    rows = examine(here)
    broken = any(row.fatal for row in rows)
    if request.has("--json"):
        document(rows, here.name)
    else:
        report(rows, here.name)
    return 1 if broken else 0


def examine(here: Situation) -> list[Row]:
    """Try everything out."""
    cure = remedy(here)
    tries: list[tuple[str, Callable[[], Trial], str, str]] = [
        ("user namespaces", probes.user_namespace, "rights of its own, none over the machine", cure),
        ("namespaces", probes.own_namespaces, "own processes, no network", cure),
        ("mount copies", probes.mount_api, "a view made of the machine's own mounts", cure),
        ("overlay", probes.overlay, "every write is captured", cure or "load the module: modprobe overlay"),
        ("own /proc", probes.own_proc, "sees no process but its own", cure),
        ("seccomp", probes.system_call_filter, "few ways into the kernel", "needs CONFIG_SECCOMP_FILTER, on x86_64 or aarch64"),
        ("pidfd", probes.process_handles, "nothing outlives its supervisor", "Linux 5.3 or later is needed"),
        ("openat2", probes.safe_opening, "reads what a guest wrote without being led astray", "Linux 5.6 or later is needed"),
        ("a run", trials.throw_away, "all of it together, on a clone of this machine", cure),
        ("state directory", trials.state_directory, "sandboxes that outlive a command", "point XDG_STATE_HOME to a directory of your own"),
        ("a kept run", trials.kept, "layers on that directory's disk", "point XDG_STATE_HOME to a local disk (ext4, xfs, btrfs)"),
    ]
    if here.root:
        tries.insert(5, ("idmapped mounts", probes.idmapped_root, "never the machine's root", idmapping_remedy(here)))
    rows = [_required(name, try_out(), gives, what_to_do) for name, try_out, gives, what_to_do in tries]
    images = [_images(here)] if here.root else []
    return [*rows, *images, _landlock(), _control_groups(), *(_interpreter(language) for language in LANGUAGES), _wasm()]


def _required(name: str, trial: Trial, gives: str, what_to_do: str) -> Row:
    return Row(name, "ok" if trial.worked else "missing", gives, trial.said, "" if trial.worked else what_to_do)


def _images(here: Situation) -> Row:
    trial = trials.image()
    gives = "a hard disk limit for a kept sandbox, and snapshots at no cost"
    if trial.worked:
        return Row("images", "ok", gives, trial.said, "", False)
    remedy = "kept sandboxes are directories: their limit is watched, snapshots are copies. "
    remedy += "Loop devices are not to be had in this container" if here.container else "Install e2fsprogs, and: modprobe loop"
    return Row("images", "weaker", gives, trial.said, remedy, False)


def _landlock() -> Row:
    trial = probes.landlock_rules()
    gives = "a second wall for devices, writes and signals"
    if trial.worked and landlock.abi() >= _FULL_LANDLOCK:
        return Row("Landlock", "ok", gives, trial.said, "", False)
    cure = "Linux 6.12 has all of it; where it is switched off, put lsm=landlock,… on the kernel's command line. The view stays the wall"
    return Row("Landlock", "weaker", gives, trial.said, cure, False)


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


def _wasm() -> Row:
    trial, what_to_do = trials.wasm()
    return Row("wasm", "ok" if trial.worked else "missing", "Python and JavaScript inside WebAssembly", trial.said, what_to_do, False)
