"""The compiled setup helper: its guests are confined exactly as those of the reference, and where it cannot, no guest exists.

What a guest can see of its confinement is compared value by value. The control arms compile the helper with one of its walls torn out: each
of them has to show in that comparison.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import hatch_build
from agent_sandbox.policy.model import cloned, locked
from agent_sandbox.policy.paths import parse
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.process import script_shelf
from agent_sandbox.runtime.process.script_shelf import ScriptShelf
from tests.security.harness import GENEROUS, Box

CHECKOUT = Path(__file__).resolve().parents[2]
HELPER = hatch_build.KERNEL / "helper"

pytestmark = pytest.mark.skipif(
    not (CHECKOUT / hatch_build.LIBRARY).exists(), reason="the setup helper is not compiled: no C compiler was there at `make setup`"
)

_PROBE = r"""
import ctypes, fcntl, json, os, re, resource, signal, socket, stat, struct
libc = ctypes.CDLL(None, use_errno=True)
def text(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return error.errno
def tried(function, *arguments):
    try:
        return repr(function(*arguments))
    except OSError as error:
        return error.errno
def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments), ctypes.get_errno()
def status(pid):
    lines = text(f"/proc/{pid}/status")
    if isinstance(lines, int):
        return lines
    kept = "Umask Uid Gid Groups NSpid NSsid CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Seccomp_filters Threads".split()
    kept += ["SigBlk", "SigIgn", "SigCgt"] if pid == "self" else []
    return {line.split(":")[0]: line.split(":")[1].split() for line in lines.splitlines() if line.split(":")[0] in kept}
def mounts():
    seen = []
    for line in text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        # numbers of mounts and devices differ from run to run, and that of the descriptor of shared mask layers
        seen.append([words[4], words[5], words[6:], re.sub(r"/proc/self/fd/\d+", "/proc/self/fd/N", after)])
    return seen
def entries(path):
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return error.errno
    seen = {}
    for name in names:
        try:
            this = os.lstat(f"{path}/{name}")
            link = os.readlink(f"{path}/{name}") if stat.S_ISLNK(this.st_mode) else ""
            seen[name] = [this.st_mode, this.st_uid, this.st_gid, this.st_rdev, this.st_size if stat.S_ISREG(this.st_mode) else 0, link]
        except OSError as error:
            seen[name] = error.errno
    return seen
def space(path):
    try:
        this = os.statvfs(path)
    except OSError as error:
        return error.errno
    return [this.f_bsize, this.f_blocks if path != "/" else 0, this.f_files if path != "/" else 0, this.f_flag]
def opened(number):
    try:
        return os.fstat(number)
    except OSError:
        return None
def loopback():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return struct.unpack("16sh22x", fcntl.ioctl(sock, 0x8913, struct.pack("16sh22x", b"lo", 0)))[1]
seen = {
    "self": status("self"), "init": status(1), "mounts": mounts(), "names": list(os.uname())[:2], "environment": dict(os.environ),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
    "identity": [os.getpid(), os.getppid(), os.getsid(0), os.getpgid(0), os.getresuid(), os.getresgid(), os.getgroups()],
    "descriptors": {number: stat.S_IFMT(os.fstat(number).st_mode) for number in range(1024) if opened(number)},
    "prctl": [libc.prctl(option, 0, 0, 0, 0) for option in (3, 7, 27, 39)],  # dumpable, keep caps, securebits, no_new_privs
    "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "wakeup": signal.set_wakeup_fd(-1),
    "root": entries("/"), "dev": entries("/dev"), "shm": entries("/dev/shm"), "pts": entries("/dev/pts"), "etc": entries("/etc"),
    "run": entries("/run"), "tmp": entries("/tmp"), "net": entries("/sys/class/net"),
    "spaces": {path: space(path) for path in ("/", "/tmp", "/run", "/dev", "/dev/shm")},
    "proc": {name: entries(f"/proc/{name}") for name in ("acpi", "scsi", "asound")},
    "masked": {name: text(f"/proc/{name}")[:10] if isinstance(text(f"/proc/{name}"), str) else text(f"/proc/{name}")
               for name in ("keys", "key-users", "timer_list", "kmsg", "sysrq-trigger", "sched_debug", "latency_stats")},
    "user settings": [text(f"/proc/sys/user/max_inotify_{name}") for name in ("instances", "watches")],
    "settings": [tried(os.open, path, os.O_WRONLY) for path in
                 ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/overcommit_memory", "/proc/irq", "/proc/1/mem")],
    "init's": [tried(os.readlink, f"/proc/1/{name}") for name in ("exe", "root", "cwd", "ns/mnt", "ns/user")],
    "namespaces": [len({os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")})],
    "cgroup": [line.split(":", 1)[1] for line in text("/proc/self/cgroup").splitlines()],
    "loopback": loopback(),
    "devices": [tried(os.mknod, f"/tmp/device{kind}", kind | 0o600, 0x103) for kind in (stat.S_IFCHR, stat.S_IFBLK)],
    "made": [tried(os.mkdir, path) for path in ("/made", "/etc/made", "/usr/made", "/tmp/made", "/dev/made", "/dev/shm/made", "/run/made")],
    "secret": text(SECRET),
    "signalled": [tried(os.kill, 1, 0), tried(os.kill, 1, 9)],
    "calls": {number: call(number, 0, 0, 0, 0, 0, 0) for number in CALLS},
    "sockets": {family: tried(lambda family=family: socket.socket(family, socket.SOCK_DGRAM).close()) for family in range(1, 46)},
}
print(json.dumps(seen, sort_keys=True, default=str))
"""
# unshare, mount, ptrace, keyctl, add_key, bpf, perf_event_open, userfaultfd, init_module, kexec_load, reboot, setns, pivot_root, swapon,
# chroot, acct, syslog, settimeofday, io_uring_setup, name_to_handle_at, open_by_handle_at, memfd_create, personality, fanotify_init
_CALLS = (272, 165, 101, 250, 248, 321, 298, 323, 175, 246, 169, 308, 155, 167, 161, 163, 103, 164, 425, 303, 304, 319, 135, 300)


def probe(secret: str = "/none") -> str:
    """What a guest sees of its confinement, and of a file that is hidden from it."""
    calls = _CALLS if os.uname().machine == "x86_64" else ()
    return _PROBE.replace("CALLS", repr(calls)).replace("SECRET", repr(secret))


class Counted:
    """How many scripts were sent, and how many the helper declined."""

    def __init__(self) -> None:
        self.sent = self.declined = 0


@contextmanager
def counting(*, reference: bool = False) -> Iterator[Counted]:
    """Count scripts while the block lasts; with `reference`, send none."""
    counted = Counted()
    find, decline = ScriptShelf.find, ScriptShelf.decline

    def found(self: ScriptShelf, *of: Any) -> bytes | None:
        script = None if reference else find(self, *of)
        counted.sent += script is not None
        return script

    def declined(self: ScriptShelf, plan: Any) -> None:
        counted.declined += 1
        decline(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptShelf, "find", found)
        patch.setattr(ScriptShelf, "decline", declined)
        yield counted


def by_helper(box: Box, source: str, *, runs: int = 1) -> Any:
    """Run a probe in guests that the helper makes, and return what the last one said. Fails if the helper made none."""
    said = None
    with box.fresh() as own:
        for number in range(runs):
            with counting() as counted:
                said = own.probe(source, cwd="/tmp")
            assert number == 1 or (counted.sent, counted.declined) == (1, 0), f"run {number}: the second one makes layers for all others"
    return said


def by_reference(box: Box, source: str, *, runs: int = 1) -> Any:
    """The same in guests of the reference."""
    with box.fresh() as own, counting(reference=True):
        return [own.probe(source, cwd="/tmp") for _ in range(runs)][-1]


VIEWS = pytest.mark.parametrize("view", ["locked", "files", "clone"])


def viewed(box: Box, view: str) -> Box:
    """The box with this preset."""
    if view == "locked":
        return box.with_(policy=locked(limits=GENEROUS))
    return box.files(read=True, write=True, allow_hidden=True, allowed=[parse(str(box.project))]) if view == "files" else box


@VIEWS
def test_a_guest_of_the_helper_is_confined_exactly_as_one_of_the_reference(box: Box, view: str) -> None:
    own = viewed(box, view)
    for runs in (1, 3):  # with mask layers of its own, and with those that an earlier run made
        seen, expected = by_helper(own, probe(), runs=runs), by_reference(own, probe(), runs=runs)
        for name in expected:
            assert seen[name] == expected[name], name
        assert expected["self"]["NoNewPrivs"] == ["1"], "the control arm: the probe saw something"
        assert len(expected["mounts"]) > 8


LIMITS = replace(GENEROUS, wall_seconds=20.0)
_FORK = "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        os._exit(0) if os.fork() else os._exit(0)\n"
# A program, its limits, and whether it is still under way when the helper hands it over to Python.
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("pass", {}),
    "a code": ("raise SystemExit(7)", {}),
    "an error": ("1 / 0", {}),
    "a signal": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", {}),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {}),
    "the deadline": ("import time; time.sleep(60)", {"wall_seconds": 0.02}),
    "the deadline, later": ("import time; time.sleep(60)", {"wall_seconds": 0.8}),
    "a longer run": ("import time; time.sleep(0.8); raise SystemExit(5)", {}),
    "processor time": ("while True: pass", {"cpu_seconds": 1.0}),
    "a full disk": ("open('/tmp/file', 'wb').write(bytes(64 << 20))", {"disk_bytes": 8 << 20}),
    "too much memory": ("held = [bytes([n]) * (8 << 20) for n in range(64)]; import time; time.sleep(5)", {"memory_bytes": 96 << 20}),
    "children left behind": (_FORK + "raise SystemExit(3)", {}),
    "children left behind, later": (_FORK + "time.sleep(0.8); raise SystemExit(3)", {}),
    "a background process": ("import os, time\nif os.fork() == 0: time.sleep(60)\nraise SystemExit(4)", {}),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_reported_as_by_the_reference(box: Box, end: str) -> None:
    source, limits = ENDS[end]
    own = box.with_(limits=replace(LIMITS, **limits))
    with counting() as counted:
        ours = own.python(source)
    assert (counted.sent, counted.declined) == (1, 0)
    with own.fresh() as other, counting(reference=True):
        expected = other.python(source)
    for name in ("code", "reason", "signal", "limits_hit"):
        assert getattr(ours.exit, name) == getattr(expected.exit, name), name
    assert (ours.stdout, ours.stderr) == (expected.stdout, expected.stderr)


def test_no_zombie_stays_while_the_helper_watches(box: Box) -> None:
    left = """
import json, os, time
for _ in range(20):
    if os.fork() == 0:
        os.fork()
        os._exit(0)
    os.wait()
def zombies():
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    found += file.read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                pass
    return found
seen = [zombies()]
while seen[-1] and len(seen) < 100_000:
    seen.append(zombies())
print(json.dumps(seen[-1]))
"""
    with counting() as counted:
        assert box.probe(left) == 0
    assert (counted.sent, counted.declined) == (1, 0)


def test_a_script_that_is_cut_off_is_declined_and_the_reference_makes_the_guest(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    find = ScriptShelf.find
    cut = [1.0]

    def shortened(self: ScriptShelf, *of: Any) -> bytes | None:
        script = find(self, *of)
        if script is None:
            return None
        return script[: int(len(script) * cut[0])]

    with box.fresh() as own, counting() as counted:
        monkeypatch.setattr(ScriptShelf, "find", shortened)
        for number in range(24):
            cut[0] = number / 24
            with monkeypatch.context() as patch:
                patch.setattr(script_shelf, "DECLINED_SECONDS", -1.0)  # the helper is asked again by the next run
                assert own.probe("print(1)", cwd="/") == 1
            assert counted.declined == number + 1
        cut[0] = 1.0
        assert own.probe("print(1)", cwd="/") == 1
        assert counted.declined == 24, "the control arm: a whole one is performed"


_NAMES = """
import json, os
print(json.dumps(sorted((path, sorted(below), sorted(files)) for path, below, files in os.walk(TOP))))
"""


def test_masks_within_masks_are_the_same_as_by_the_reference(box: Box) -> None:
    """Nothing is made in the layer below a hidden or emptied directory: its name would show."""
    rules = Random(7)
    top = box.project / "masked"
    places = [f"{a}{b}{c}" for a in ("a", "b") for b in ("", "/c", "/d") for c in ("", "/e", "/f/g")]
    for place in places:
        if rules.random() < 0.7:
            (top / place).mkdir(parents=True, exist_ok=True)
        elif not (top / place).exists():
            (top / place).parent.mkdir(parents=True, exist_ok=True)
            (top / place).write_text("CANARY")
    source = _NAMES.replace("TOP", repr(str(top)))
    whole = box.unmasked.probe(source)
    differed = 0
    for _ in range(12):
        chosen = [Mask(str(top / place), "hidden", stays=rules.random() < 0.5) for place in rules.sample(places, 6)]
        own = box.with_(policy=cloned(masks=chosen, limits=GENEROUS))
        with own.fresh() as one, counting() as counted:
            seen = one.probe(source, cwd="/tmp")
        with own.fresh() as other, counting(reference=True):
            assert other.probe(source, cwd="/tmp") == seen, chosen
        assert (counted.sent, counted.declined) in ((1, 0), (0, 0)), "or the reference has objected to the plan"
        differed += seen != whole
    assert differed, "the control arm: something was hidden"


def test_hooks_of_modules_after_a_fork_run_before_the_guest_has_a_program(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in init, without a filter. A module that they import later than that could be the guest's."""
    packages, proof = box.project / "site-packages", box.project / "proof"
    packages.mkdir()
    hook = "def hook():\n    try:\n        import planted\n    except ImportError:\n        pass\n"
    (packages / "hooked.py").write_text(f"import os\n{hook}os.register_at_fork(after_in_parent=hook)\n")
    planting = f"""
import json, os, time
with open({str(packages / "planted.py")!r}, "w") as file:
    file.write("open({str(proof)!r}, 'w').close()")
time.sleep(0.8)
print(json.dumps(os.path.exists({str(proof)!r})))
"""
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    with box.fresh() as own, counting() as counted:
        assert own.probe(planting, preload=("hooked",)) is False
    assert (counted.sent, counted.declined) == (1, 0)


@contextmanager
def copied(tmp_path: Path, helper: str = "") -> Iterator[Path]:
    """A copy of the product, with its helper compiled from these sources."""
    top = tmp_path / "copy"
    shutil.copytree(CHECKOUT / "src", top / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    yield top


# A program of its own: an application that uses the copy. It says what its guest saw, and how often the helper was used and declined.
_APPLICATION = """
import json, sys
from agent_sandbox import Sandbox
from agent_sandbox.runtime.process import mask_shelf
from agent_sandbox.runtime.process.script_shelf import ScriptShelf
mask_shelf._worth_sharing = lambda plan: False  # the reference makes shared layers, and the pool may give us its guest
find, decline, counted = ScriptShelf.find, ScriptShelf.decline, [0, 0]
def found(self, *of):
    script = find(self, *of)
    counted[0] += script is not None
    return script
def declined(self, plan):
    counted[1] += 1
    decline(self, plan)
ScriptShelf.find, ScriptShelf.decline = found, declined
with Sandbox(allow_file_read=True, allow_file_write=True, allow_subprocess=True, validate_code=False) as sandbox:
    result = sandbox.execute(sys.stdin.read())
print(json.dumps([result.stdout, result.error or result.stderr, *counted]))
"""


def applied(copy: Path, home: Path, source: str) -> tuple[Any, str, int, int]:
    """Run a probe with a copy of the product: what it saw, the error, how many scripts were sent, and how many were declined."""
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}", "HOME": str(home), "AGENT_SANDBOX_STATE": str(copy / "state")}
    command = [sys.executable, "-c", _APPLICATION]
    ran = subprocess.run(command, input=source, capture_output=True, text=True, env=environment, cwd=home, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    stdout, error, sent, declined = json.loads(ran.stdout)
    return json.loads(stdout) if stdout else None, error, sent, declined


def test_without_a_helper_and_with_one_of_another_version_all_is_as_before(tmp_path: Path, home: Path) -> None:
    source = probe()
    with copied(tmp_path) as copy:
        assert not (copy / hatch_build.LIBRARY).exists()
        expected, error, *counted = applied(copy, home, source)
        assert (error, counted) == ("", [0, 0])
        for change in ("", "/* another */\n"):
            assert hatch_build.compile_helper(copy) == ""
            (copy / HELPER / "watch.c").write_text((copy / HELPER / "watch.c").read_text() + change)
            seen, error, *counted = applied(copy, home, source)
            assert (error, seen) == ("", expected)
            assert (counted[0] > 0, counted[1]) == (not change, 0), "one of other sources is not used"
        header = copy / HELPER / "helper.h"
        header.write_text(re.sub(r"#define PROTOCOL \d+", "#define PROTOCOL 99999", header.read_text()))
        assert hatch_build.compile_helper(copy) == ""
        seen, error, *counted = applied(copy, home, source)
        assert (error, counted) == ("", [0, 0])
        assert seen == expected


# A wall of the helper, by the lines that are left out of it, and what then shows.
WALLS: dict[str, tuple[tuple[tuple[str, str, str], ...], str]] = {
    "a session of its own": ((("setup.c", " || setsid() < 0", ""),), "identity"),
    "landlock": ((("setup.c", "if (high[4] >= 0 && syscall(NR_landlock_restrict_self, high[4], 0) != 0)", "if (0)"),), "signalled"),
    "the filter": ((("setup.c", "long thread = install_filter(script->filter);", "long thread = 0;"),), "self"),
    "capabilities": (
        (("setup.c", "    drop_capabilities();\n", ""), ("setup.c", "if (has_capabilities())", "if (0)")),
        "self",
    ),
    "init cannot be traced": (
        (
            ("setup.c", "prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0", "prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0"),
            ("setup.c", "if (high[4] >= 0 && syscall(NR_landlock_restrict_self, high[4], 0) != 0)", "if (0)"),  # it stands before, too
        ),
        "init's",
    ),
    "no new privileges of init": ((("setup.c", "    need(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);\n", ""),), "init"),
    "masks": ((("view.c", "need(mknod(place, S_IFCHR, 0) == 0);", "return;"),), "secret"),
    "read-only devices": ((("view.c", "    seal(dev, MS_NOSUID | MS_NOEXEC);\n", ""),), "made"),
    "what /proc reveals": ((("view.c", 'mount_on(proc, below, "r/dev/null", NULL, MS_BIND, NULL);', ";"),), "masked"),
    "the settings in /proc": (
        (("view.c", 'mount_on(proc, below, "", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | QUIET | MS_NOEXEC, NULL);', ";"),),
        "mounts",
    ),
    "nosuid": ((("helper.h", "#define QUIET (MS_NOSUID | MS_NODEV)", "#define QUIET MS_NODEV"),), "mounts"),
    "descriptors": ((("setup.c", "if (syscall(NR_close_range, 4u, ~0u, 0) != 0)", "if (0)"),), "descriptors"),
    "limits": (
        (("setup.c", "    need(lower_limits(script.limits));\n", ""), ("setup.c", " || !lower_limits(script->guest_limits)", "")),
        "limits",
    ),
    "objects of the kernel": ((("setup.c", "bound_kernel_objects(settings, script.bounds);", "close(settings);"),), "user settings"),
    "the name of the machine": (
        (("setup.c", "need(sethostname(script.hostname, strlen(script.hostname)) == 0);", ""),),
        "names",
    ),
    "a control group of its own": ((("powers.c", "need(unshare(CLONE_NEWCGROUP) == 0);", ""),), "cgroup"),
}


@pytest.mark.slow
def test_a_wall_that_is_torn_out_of_the_helper_shows(tmp_path: Path, home: Path) -> None:
    secret = home / ".env"
    secret.write_text("CANARY")
    source = probe(str(secret))
    silent = []
    with copied(tmp_path) as copy:
        assert hatch_build.compile_helper(copy) == ""
        whole, error, *counted = applied(copy, home, source)
        assert (error, counted[0] > 0, counted[1]) == ("", True, 0)
        assert whole["secret"] == 2
        for wall, (changes, shows) in WALLS.items():
            originals = {name: (copy / HELPER / name).read_text() for name, _, _ in changes}
            for name, line, instead in changes:
                text = (copy / HELPER / name).read_text()
                assert text.count(line) == 1, f"{wall}: {line!r} is not once in {name}"
                (copy / HELPER / name).write_text(text.replace(line, instead))
            assert hatch_build.compile_helper(copy) == "", wall
            seen, _, *counted = applied(copy, home, source)
            assert counted[0] > 0 and counted[1] == 0, wall
            if seen is not None and seen[shows] == whole[shows]:
                silent.append(wall)
            for name, text in originals.items():
                (copy / HELPER / name).write_text(text)
    assert not silent, "torn down, and nothing showed"
