"""An outer program takes the place of the guest's program: the same view, limits, ending and changes, and never more than its user."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.kernel import namespaces, seccomp, syscall_rules, syscalls
from agent_sandbox.kernel.mount_plan import (
    Devices,
    MountPlan,
    Overlay,
    Proc,
    SealRoot,
    SkeletonRoot,
    Symlink,
    ThrowAway,
    Tmpfs,
    quote_target,
)
from agent_sandbox.policy.model import MIB, Guarantee, Limits
from agent_sandbox.runtime import outer_view
from agent_sandbox.runtime.base import Argv, Completed, ExitReason, Launch, OuterProgram
from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from agent_sandbox.runtime.process.pool import kind_of
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.patience import stretched

SEARCHED = "/usr/sbin:/usr/bin:/sbin:/bin"
LIMITS = Limits(wall_seconds=stretched(60), memory_bytes=512 * MIB, disk_bytes=32 * MIB)
PERL = "my ($n, @a) = @ARGV; my $r = syscall($n, map { $_ + 0 } @a); print $r < 0 ? $! + 0 : 0, qq(\\n)"  # the error of a call, by number
NEW_USER = syscalls.CLONE_NEWUSER
# What no outer program may do either: the machine's clock, keys, modules, programs of the kernel, handles of files, other processes' ends.
REFUSED = ("bpf", "keyctl", "init_module", "kexec_load", "open_by_handle_at", "perf_event_open", "reboot", "settimeofday", "swapon")


@pytest.fixture(scope="module")
def runtime() -> Iterator[ProcessRuntime]:
    made = ProcessRuntime(inner_root=outer_view.VIEW)
    yield made
    made.close()


def launch_of(words: list[str], project: Path, capabilities: frozenset[str] = namespaces.OUTER_PROGRAM, **changes: object) -> Launch:
    links = [Symlink(f"/{name}", os.readlink(f"/{name}")) for name in ("bin", "lib", "lib64") if os.path.islink(f"/{name}")]
    plan = MountPlan(
        ThrowAway(32 * MIB),
        (
            SkeletonRoot(),
            *links,
            Overlay("/usr", "/usr", quote_target("/usr"), writable=False),
            Overlay(str(project), str(project), quote_target(str(project))),
            Tmpfs("/tmp", 16 * MIB, 0o1777),
            Tmpfs("/run", 16 * MIB),
            Devices(16 * MIB),
            Proc(),
            SealRoot(),
        ),
    )
    files: tuple[tuple[str, bytes], ...] = changes.pop("files", ())  # type: ignore[assignment]
    return Launch(
        Argv(tuple(words)),
        outer_view.around(plan),
        "/",
        {"PATH": SEARCHED, "XDG_RUNTIME_DIR": "/run"},
        LIMITS,
        frozenset({Guarantee.FILES_CONFINED}),
        outer=OuterProgram(files, capabilities),
        **changes,  # type: ignore[arg-type]
    )


def run(runtime: ProcessRuntime, launch: Launch) -> Completed:
    with runtime.launch(launch) as guest:
        return guest.wait()


def errors_of(calls: dict[str, tuple[int, ...]]) -> list[str]:
    """Shell lines that make these system calls, each printing its name and its error."""
    numbers = syscall_rules.numbers(syscalls.MACHINE)
    return [f"echo {name} $(perl -e '{PERL}' {numbers[name]} {' '.join(map(str, given))})" for name, given in calls.items()]


def answers(completed: Completed) -> dict[str, int]:
    return {name: int(error) for name, error in (line.split() for line in completed.stdout.decode().splitlines())}


def test_it_makes_walls_in_the_guests_user_namespace_and_is_nobody_outside(runtime: ProcessRuntime, project: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("outside")
    project.joinpath("shown").write_text("inside")
    script = f"""
        id -u; sed 's/  */ /g' /proc/self/uid_map
        mount -t tmpfs mine /tmp && unshare --pid --fork --mount-proc echo walls
        cat {outer_view.VIEW}{project}/shown {canary} {outer_view.VIEW}{canary}; ls /
        umount /usr {outer_view.VIEW}/usr; mount -o remount,bind,rw /usr
        cat /proc/self/status; exit 7
    """
    completed = run(runtime, launch_of(["sh", "-c", script], project))
    lines = completed.stdout.decode().splitlines()
    outside = int(lines[1].split()[1])
    assert lines[0] == "0" and outside == (os.geteuid() or outside) != 0
    assert lines[2] == "walls"
    assert completed.stdout.count(b"inside") == 1 and b"outside" not in completed.stdout, "the machine's files are not there"
    assert completed.stderr.count(b"umount") >= 2 and completed.stderr.count(b"mount: /usr") >= 1, "nothing of the view can be taken off"
    kept = sum(1 << namespaces.CAPABILITIES[name] for name in namespaces.OUTER_PROGRAM)
    assert f"CapBnd:\t{kept:016x}" in lines and "Seccomp:\t2" in lines and "NoNewPrivs:\t1" in lines
    assert (completed.exit.code, completed.exit.reason) == (7, ExitReason.EXITED)


def test_without_capabilities_it_has_the_walls_of_every_guest(runtime: ProcessRuntime, project: Path) -> None:
    tries = ["mount -t tmpfs mine /tmp && echo mounted", "grep CapEff /proc/self/status", *errors_of({"unshare": (NEW_USER,)})]
    completed = run(runtime, launch_of(["sh", "-c", "\n".join(tries)], project, frozenset()))
    assert completed.stdout.decode().split() == ["CapEff:", "0" * 16, "unshare", str(errno.EPERM)]


def test_its_filter_permits_walls_and_nothing_of_the_machine(runtime: ProcessRuntime, project: Path) -> None:
    tried: dict[str, tuple[int, ...]] = {"unshare": (NEW_USER,), **dict.fromkeys(REFUSED, (0, 0, 0))}
    tried["reboot"] = (0xFEE1DEAD, 672274793, 0)  # a harmless order: no Ctrl-Alt-Del
    completed = run(runtime, launch_of(["sh", "-c", "\n".join(errors_of(tried))], project))
    assert answers(completed) == {"unshare": 0, **dict.fromkeys(REFUSED, errno.EPERM)}
    every = {name: answer.describe() for name, _, answer in seccomp.compile_filter(processes=True, outer=True).answers}
    plain = {name: answer.describe() for name, _, answer in seccomp.compile_filter(processes=True).answers}
    assert {name for name in every if every[name] != plain[name]} == syscall_rules.MAKES_WALLS


def test_its_writes_below_the_view_are_the_changes_of_the_run(runtime: ProcessRuntime, project: Path) -> None:
    project.joinpath("old").write_text("old")
    script = f"cd {outer_view.VIEW}{project} && cat old && echo new > new && rm old && cat /run/given/a"
    with runtime.launch(launch_of(["sh", "-c", script], project, files=(("/run/given/a", b"given"),))) as guest:
        completed = guest.wait()
        assert guest.layers is not None
        upper = f"/proc/self/fd/{guest.layers}/{quote_target(str(project))}/upper"
        assert sorted(os.listdir(upper)) == ["new", "old"] and os.stat(f"{upper}/old").st_rdev == 0
    assert completed.stdout == b"oldgiven" and project.joinpath("old").read_text() == "old" and not project.joinpath("new").exists()


def _left(mark: str) -> list[str]:
    """The processes with this word in their command line, or in a process of ours below one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("ending", ["caller", "kill", "init"])
def test_whatever_ends_the_run_ends_the_processes_in_namespaces_of_its_own(runtime: ProcessRuntime, project: Path, ending: str) -> None:
    mark = f"{project.parent.name}-{ending}"
    inner = f"setsid sh -c 'echo up; sleep 1000; true' {mark} & sleep 1000; true"
    words = ["unshare", "--pid", "--mount", "--net", "--fork", "sh", "-c", inner, mark]
    guests: list[ProcessGuest] = []
    launch = launch_of(words, project)
    seen: list[int] = []

    def act(name: str, data: bytes) -> None:
        seen.append(len(_left(mark)))
        if ending == "kill":
            guests[0].kill()
        elif ending == "init":
            os.kill(guests[0].init, 9)
        else:
            raise KeyboardInterrupt

    with runtime.launch(replace(launch, on_output=act)) as guest:
        guests.append(guest)
        if ending == "caller":
            with pytest.raises(KeyboardInterrupt):
                guest.wait()
        else:
            assert guest.wait().exit.reason is ExitReason.KILLED
    assert seen[0] >= 3 and _left(mark) == [], "unshare, its shell, and one in a session of its own were there"


def test_its_guests_are_made_by_its_own_runtime_and_not_by_the_pool(project: Path) -> None:
    assert kind_of(launch_of(["true"], project, writable=False)) is None


def configuration(script: str, annotations: dict[str, str]) -> bytes:
    """The configuration of an OCI runtime that adds the guest's own walls to those around it."""
    return json.dumps(
        {
            "ociVersion": "1.0.2",
            "root": {"path": outer_view.VIEW, "readonly": False},
            "process": {
                "args": ["sh", "-c", script],
                "env": [f"PATH={SEARCHED}"],
                "cwd": "/",
                "user": {"uid": 0, "gid": 0},
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
            ],
            "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}], "readonlyPaths": ["/proc/sys"]},
            "annotations": annotations,
        }
    ).encode()


@pytest.mark.parametrize("filtered", [True, False])
def test_an_oci_runtime_runs_on_the_view_with_the_guests_filter(runtime: ProcessRuntime, project: Path, filtered: bool) -> None:
    """The control arm has no filter of the container's: there the guest makes a user namespace."""
    if shutil.which("crun") is None:
        pytest.skip("crun is not installed (apt-get install crun)")
    code = base64.b64encode(seccomp.compile_filter(processes=True).code).decode()
    tries = ["grep CapBnd /proc/self/status", *errors_of({"unshare": (NEW_USER,)}), f"echo made > {project}/made", "exit 7"]
    config = configuration("\n".join(tries), {"run.oci.seccomp_bpf_data": code} if filtered else {})
    words = ["crun", "--cgroup-manager=disabled", "--root=/run/state", "run", "--no-new-keyring", "--bundle=/run/bundle", "guest"]
    with runtime.launch(launch_of(words, project, files=(("/run/bundle/config.json", config),))) as guest:
        completed = guest.wait()
        assert guest.layers is not None
        assert completed.exit.code == 7, completed.stderr
        assert os.listdir(f"/proc/self/fd/{guest.layers}/{quote_target(str(project))}/upper") == ["made"]
    assert completed.stdout.decode().split() == ["CapBnd:", "0" * 16, "unshare", str(errno.EPERM if filtered else 0)]
