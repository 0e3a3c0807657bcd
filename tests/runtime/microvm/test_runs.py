"""Programs in a virtual machine: another kernel, the same streams, ends, limits and changes as in `process`."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.errors import LaunchFailed, RuntimeUnavailable
from agent_sandbox.kernel.mount_plan import Overlay, ThrowAway, quote_target
from agent_sandbox.kernel.wire import close_all
from agent_sandbox.policy.model import MIB, Guarantee, Limits, cloned
from agent_sandbox.runtime.base import Argv, Completed, Confined, ExitReason, Launch, PythonCode
from agent_sandbox.runtime.microvm.runtime import TRAITS, MicroVmRuntime
from agent_sandbox.runtime.microvm.template import Recipe
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.view.plan import MachineFacts, Needs, plan_view
from tests.leftovers import children
from tests.patience import until
from tests.runtime.microvm.machines import runtime_in

LIMITS = Limits(wall_seconds=600, memory_bytes=256 * MIB, output_bytes=4 * MIB, processes=64, disk_bytes=64 * MIB)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MicroVmRuntime]:
    made = runtime_in(tmp_path_factory.mktemp("machines"))
    yield made
    made.close()


@pytest.fixture
def project() -> Iterator[Path]:
    """A project right below a shared directory: without root, the view of a plan made here cannot be changed deeper below others' ones."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        (Path(place) / "src").mkdir()
        (Path(place) / "greeting.txt").write_text("hello\n")
        (Path(place) / "src" / "app.py").write_text("")
        yield Path(place)


def launch(program: Argv | PythonCode, project: Path, *, limits: Limits = LIMITS, stdin: bytes = b"") -> Launch:
    policy = cloned(masks=(), limits=limits)
    plan = plan_view(policy.files, Needs(), ThrowAway(64 * MIB), host=MachineFacts.look(), scratch_bytes=64 * MIB)
    env = {"PATH": "/usr/bin:/bin", "CANARY": "seen"}
    return Launch(program, plan, str(project), env, limits, policy.requires, stdin=stdin)


def ran(runtime: MicroVmRuntime | ProcessRuntime, launched: Launch) -> Completed:
    with runtime.launch(launched) as guest:
        return guest.wait()


SHOWN = """
echo "kernel $(uname -r)"; echo "$CANARY"; cat; echo new > greeting.txt; rm src/app.py; mkdir made; ln -s greeting.txt made/link
echo wrong >&2; ls /proc | grep -c '^[0-9]'; touch /tmp/x /run/x /dev/shm/x; head -c 200000 /dev/zero; kill -TERM $$
"""


def test_a_command_runs_on_another_kernel_with_the_streams_end_and_changes_of_process(runtime: MicroVmRuntime, project: Path) -> None:
    work = launch(Argv(("/bin/sh", "-c", SHOWN)), project, stdin=b"input\n" * 20000)
    ends = []
    for each in (runtime, ProcessRuntime()):
        with each.launch(work) as guest:
            done = guest.wait()
            assert guest.layers is not None and done.stderr == b"wrong\n"
            uppers = [upper for top in os.scandir(f"/proc/self/fd/{guest.layers}") for upper in os.walk(f"{top.path}/upper")]
            parent = next(Path(place) for place, _, names in uppers if "greeting.txt" in names)
            changed = {path.name for path in parent.rglob("*")}
            written = parent / "greeting.txt"
            ends.append((done.exit.code, done.exit.signal, done.stderr, changed, written.read_text(), os.stat(written).st_uid))
            lines = done.stdout.split(b"\n")
            assert lines[1] == b"seen" and lines[2] == b"input" and done.stdout.endswith(bytes(200000))
        each.close() if isinstance(each, ProcessRuntime) else None
        kernel = lines[0].decode().removeprefix("kernel ")
        assert (kernel == os.uname().release) is isinstance(each, ProcessRuntime)
    assert ends[0] == ends[1] and ends[0][1] == signal.SIGTERM and ends[0][3] >= {"greeting.txt", "made", "link"}
    assert (project / "greeting.txt").read_text() == "hello\n" and (project / "src" / "app.py").exists()


FILE_OPERATIONS = """
import os, random, sys
chance, names = random.Random(int(sys.argv[1])), ["a", "b", "c", "d/a", "d/b", "d/c", "e", "e/a", "x y", "\\udcff"]
for number in range(120):
    one, other, size = chance.choice(names), chance.choice(names), chance.choice([0, 5, 9000, 70000])
    kind, data = chance.randrange(12), b"%d " % number * chance.choice([1, 9000])
    try:
        if kind <= 3:
            with open(one, ["wb", "ab", "r+b", "xb"][kind]) as file:
                file.write(data)
        elif kind == 4:
            os.truncate(one, size)
        elif kind == 5:
            os.mkdir(one)
        elif kind == 6:
            os.unlink(one)
        elif kind == 7:
            os.rename(one, other)
        elif kind == 8:
            os.link(one, other)
        elif kind == 9:
            os.symlink(other, one)
        elif kind == 10:
            os.chmod(one, 0o700 if os.path.isdir(one) else chance.choice([0o600, 0o644, 0o755]))
        else:
            with open(one, "rb") as file:
                print(number, len(file.read()), os.fstat(file.fileno()).st_nlink)
    except OSError as error:
        print(number, type(error).__name__)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_program_changes_the_same_files_as_in_process(runtime: MicroVmRuntime, project: Path, seed: int) -> None:
    """Two files of the project are one hard link: writing to one changes that one alone, in the layers of a run."""
    (project / "a").write_text("1")
    os.link(project / "a", project / "b")
    (project / "d").mkdir()
    os.link(project / "a", project / "d" / "c")
    work = launch(PythonCode(FILE_OPERATIONS, argv=(str(seed),)), project)
    own = Overlay(str(project), str(project), quote_target(str(project)))
    work = replace(work, root=replace(work.root, steps=(*work.root.steps[:-1], own, work.root.steps[-1])))
    ends = []
    for each in (runtime, ProcessRuntime()):
        with each.launch(work) as guest:
            done = guest.wait()
            assert done.exit.code == 0 and guest.layers is not None, done.stderr
            top = f"/proc/self/fd/{guest.layers}/{quote_target(str(project))}/upper"
            found = {}
            for place, directories, names in os.walk(top):
                for path in (os.path.join(place, name) for name in (*directories, *names)):
                    status = os.lstat(path)
                    what = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
                    what = Path(path).read_text() if stat.S_ISREG(status.st_mode) else what
                    found[os.path.relpath(path, top)] = (status.st_mode, what)
            ends.append((done.stdout, found))
        each.close() if isinstance(each, ProcessRuntime) else None
    assert ends[0] == ends[1] and len(ends[0][1]) > 3


FACTS = """
import os, socket, sys, time
def refused(what):
    try:
        what()
        return "allowed"
    except OSError as error:
        return error.errno
capabilities = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:"))]
print(time.time(), os.urandom(16).hex(), len(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else 0)
print(*capabilities)
print(refused(lambda: os.mknod("/tmp/port", 0o20600, os.makedev(10, 1))), refused(lambda: open("/dev/mem")))
print(refused(lambda: os.chroot("/")))
print(refused(lambda: socket.create_connection(("192.0.2.1", 80), 1)))
sys.exit(5)
"""


def test_python_code_starts_with_the_right_time_fresh_randomness_and_no_power_over_its_machine(
    runtime: MicroVmRuntime, project: Path
) -> None:
    seen = []
    for _ in range(2):
        before = time.time()
        done = ran(runtime, launch(PythonCode(FACTS), project))
        assert done.exit.code == 5, done.stderr
        first, powers, devices, root, network = done.stdout.decode().splitlines()
        clock, noise, _ = first.split()
        assert before - 1 < float(clock) < time.time() + 1
        assert powers.split() == ["0000000000000000", "0000000000000000", "1", "2"]
        assert "allowed" not in devices + root + network
        seen.append(noise)
    assert seen[0] != seen[1], "two machines from one template draw the same random numbers"


TRACES = """
import os, sys
print(sorted(os.environ), sys.argv, sys.path[0], os.getcwd(), [name for name in sys.modules if name.startswith("agent_sandbox.")])
print(os.listdir("/run"), os.listdir("/tmp"), os.listdir("/run/sandbox"), len(os.listdir("/proc/self/fd")))
print(sum(name.isdigit() for name in os.listdir("/proc")) < 100, open(__file__).read() != "")
"""


def test_a_machine_that_has_waited_and_rehearsed_shows_its_program_what_a_new_one_shows(runtime: MicroVmRuntime, project: Path) -> None:
    pooled = runtime_in(Path(runtime._shelf.own), warm=1)
    try:
        work = launch(PythonCode(TRACES), project)
        new = ran(pooled, work)
        assert until(lambda: pooled._guests._pool is not None and pooled._guests._pool.waiting == 1)
        waited = ran(pooled, work)
    finally:
        pooled.close()
    assert new.exit.code == 0, new.stderr
    assert (waited.stdout, waited.stderr, waited.exit.code) == (new.stdout, b"", 0)


SETTINGS = """
import os
for name in ("sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/vm/overcommit_memory", "sysrq-trigger", "irq/default_smp_affinity"):
    try:
        os.close(os.open(f"/proc/{name}", os.O_WRONLY))
        print("open" if os.stat(f"/proc/{name}").st_rdev != os.stat("/dev/null").st_rdev else "covered")
    except OSError as error:
        print(error.strerror)
"""


def test_a_program_cannot_change_what_the_kernel_of_its_machine_starts(runtime: MicroVmRuntime, project: Path) -> None:
    """As root it is user 0 of the machine: without a capability, and yet the owner of these files."""
    done = ran(runtime, launch(PythonCode(SETTINGS), project))
    answers = done.stdout.decode().split("\n")[:-1]
    assert len(answers) == 5 and "open" not in answers, done
    if os.geteuid() == 0:
        bare = subprocess.run([sys.executable, "-c", SETTINGS], capture_output=True, text=True, check=True)
        assert "open" in bare.stdout.split(), "the control arm: outside root opens them"


@pytest.mark.torture
def test_the_limits_of_a_run_hold_inside_the_machine_and_are_named(runtime: MicroVmRuntime, project: Path) -> None:
    hungry = "x = bytearray(120 << 20); print(len(x))"
    short = replace(LIMITS, memory_bytes=64 * MIB)
    done = ran(runtime, launch(PythonCode(hungry), project, limits=short))
    assert (done.exit.reason, done.exit.code, done.stdout) == (ExitReason.OUT_OF_MEMORY, 137, b"") and "memory" in done.exit.limits_hit
    assert ran(runtime, launch(PythonCode(hungry), project, limits=replace(LIMITS, memory_bytes=300 * MIB))).exit.code == 0
    forks = "import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(600)"
    done = ran(runtime, launch(PythonCode(forks), project, limits=replace(LIMITS, processes=8)))
    assert done.exit.code == 1 and "processes" in done.exit.limits_hit
    done = ran(runtime, launch(PythonCode("print('began')\nwhile True: pass"), project, limits=replace(LIMITS, wall_seconds=1.5)))
    assert done.exit.reason is ExitReason.TIMED_OUT and done.stdout == b"began\n"


CONNECTS = """
import os, socket
def said(family, address):
    with socket.socket(family) as sock:
        sock.settimeout(60)
        try:
            sock.connect((address, PORT))
            sock.sendall(b"x" * 200000)
            sock.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: sock.recv(65536), b"")).decode()
        except OSError as error:
            return type(error).__name__
PORT = 80
print(said(socket.AF_INET, "192.0.2.1"), said(socket.AF_INET6, "2001:db8::7"))
PORT = 81
print(said(socket.AF_INET, "192.0.2.1"))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(60)
    sock.sendto(b"query", ("192.0.2.53", 53))
    print(sock.recvfrom(100))
print(open("/run/agent-sandbox/trusted").read())
"""


def serve_doors(guest: Confined) -> None:
    """Stand in for the egress: answer each connection with the address that it was for, and trust something."""
    assert guest.doors is not None
    with open(os.open("trusted", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=guest.doors.trust), "w") as file:
        file.write("a certificate")

    def accept(fd: int) -> None:
        with socket.socket(fileno=fd) as listener:
            listener.setblocking(True)
            for _ in range(2):
                link, _ = listener.accept()
                with link, link.makefile("rb") as file:
                    link.sendall(f"{len(file.read())} bytes to {link.getsockname()[0]}".encode())

    def answer(fd: int) -> None:
        with socket.socket(fileno=fd) as resolver:
            resolver.setblocking(True)
            query, wanted, _, sender = resolver.recvmsg(100, 256)
            resolver.sendmsg([b"answer to " + query], wanted, 0, sender)

    listener, resolver = guest.doors.listeners[0], guest.doors.resolvers[0]
    for work, fd in ((accept, listener), (answer, resolver)):
        threading.Thread(target=work, args=(fd,), daemon=True).start()
    close_all([fd for fd in guest.doors.all if fd not in (listener, resolver)])


def test_what_a_program_connects_to_arrives_at_the_doors_of_its_run(runtime: MicroVmRuntime, project: Path) -> None:
    done = ran(runtime, replace(launch(PythonCode(CONNECTS), project), network=(80,), on_ready=(serve_doors,)))
    assert done.stdout.decode().splitlines() == [
        "200000 bytes to ::ffff:192.0.2.1 200000 bytes to 2001:db8::7",
        "ConnectionRefusedError",
        "(b'answer to query', ('192.0.2.53', 53))",
        "a certificate",
    ], done.stderr


def test_a_killed_run_leaves_no_machine_behind(runtime: MicroVmRuntime, project: Path) -> None:
    begun = threading.Event()
    work = replace(launch(Argv(("/bin/sh", "-c", "echo up; sleep 1000")), project), on_output=lambda *_: begun.set())
    before = set(_machines())
    with runtime.launch(work) as guest:
        waiter = threading.Thread(target=guest.wait)
        waiter.start()
        assert begun.wait(60)
        assert len(set(_machines()) - before) == 1, "a machine must be there, or its end shows nothing"
        guest.kill()
        waiter.join(60)
    assert set(_machines()) <= before


def test_a_machine_that_is_killed_ends_its_run_and_leaves_nothing(runtime: MicroVmRuntime, project: Path) -> None:
    before = set(_machines())

    def kill(*_: object) -> None:
        for pid in set(_machines()) - before:
            os.kill(pid, signal.SIGKILL)

    done = ran(runtime, replace(launch(Argv(("/bin/sh", "-c", "echo up; sleep 1000")), project), on_output=kill))
    assert (done.exit.code, done.exit.signal) == (137, 9) and b"has ended before its program did" in done.stderr
    assert set(_machines()) <= before


@pytest.mark.torture
def test_machines_killed_at_any_moment_leave_nothing(runtime: MicroVmRuntime, project: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments, before = random.Random(seed), set(_machines())
    for _ in range(60):
        ends: list[object] = []

        def run(ends: list[object] = ends) -> None:
            try:
                ends.append(ran(runtime, launch(Argv(("/bin/sh", "-c", "sleep 2")), project)).exit.reason)
            except LaunchFailed as error:
                ends.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(moments.uniform(0, 3))
        for pid in set(_machines()) - before:
            os.kill(pid, signal.SIGKILL)
        thread.join()
        assert isinstance(ends[0], LaunchFailed) or ends[0] in (ExitReason.KILLED, ExitReason.EXITED), ends
    assert set(_machines()) <= before


def _machines() -> list[int]:
    """Return the QEMU processes below this one."""
    below, found = [os.getpid()], []
    while below:
        pid = below.pop()
        below += children(pid)
        try:
            found += [pid] if b"qemu" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] else []
        except OSError:
            continue
    return found


def test_what_a_machine_cannot_give_is_refused_with_its_name(runtime: MicroVmRuntime, project: Path) -> None:
    for guarantee in (Guarantee.PROGRAMS_CONFINED, Guarantee.DETERMINISTIC):
        with pytest.raises(RuntimeUnavailable) as refused:
            runtime.launch(replace(launch(PythonCode(""), project), requires=frozenset({guarantee})))
        assert refused.value.missing == (guarantee.value,)
    assert {Guarantee.SEPARATE_KERNEL, Guarantee.EGRESS_ONLY} <= TRAITS.guarantees
    with pytest.raises(RuntimeUnavailable, match="published port"):
        runtime.launch(replace(launch(PythonCode(""), project), inward=True))


def test_a_template_that_was_truncated_is_made_again_by_the_next_run(runtime: MicroVmRuntime, project: Path) -> None:
    recipe = runtime.recipe(LIMITS.memory_bytes)
    template = runtime.template(recipe)
    assert template is not None
    runtime.close()  # its zygote has the template in memory
    os.truncate(os.path.join(template.directory, "ram"), 4096)
    made: list[str] = []

    def refuse(self: MicroVmRuntime, recipe: Recipe, progress: object, *, only_own: bool) -> None:
        made.append(recipe.key)
        raise RuntimeUnavailable("making another takes long")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MicroVmRuntime, "make", refuse)
        with pytest.raises(RuntimeUnavailable, match="takes long"):
            runtime.launch(launch(PythonCode(""), project))
    assert made == [recipe.key] and runtime.template(recipe) is None, "the damaged one is gone, and another was asked for"
