"""A run in an image: the image's files, the project beside them, every wall of `process`, and changes of both listed apart."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import ContainerIsolation, IsolationConfig, PolicyError, RuntimeUnavailable, Sandbox, SandboxStatus
from agent_sandbox.assembly import here
from agent_sandbox.container_images import load_image, remove_image
from agent_sandbox.kernel import syscall_rules, syscalls
from agent_sandbox.kernel.mount_plan import IMAGES, Devices, ImageRoot, MountPlan, Proc, ThrowAway, Tmpfs
from agent_sandbox.testing import CLAIMS, Bench, Claim
from tests.images import archive, entry, slim
from tests.patience import stretched

NUMBERS = syscall_rules.numbers(syscalls.MACHINE)
LOOK = f"""
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def error(number, *given):
    ctypes.set_errno(0)
    return 0 if libc.syscall(number, *given) >= 0 else ctypes.get_errno()
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps(dict(
    python=sys.executable, root=sorted(os.listdir("/")), map=open("/proc/self/uid_map").read().split(),
    capabilities=status["CapEff"].strip() + status["CapBnd"].strip(), filter=status["Seccomp"].strip(), new=status["NoNewPrivs"].strip(),
    devices=[name for _, name in socket.if_nameindex()], processes=len([name for name in os.listdir("/proc") if name.isdigit()]),
    unshare=error({NUMBERS["unshare"]}, {syscalls.CLONE_NEWUSER}), mount=error({NUMBERS["mount"]}, 0, b"/tmp", b"tmpfs", 0, 0),
    ptrace=error({NUMBERS["ptrace"]}, 0), bpf=error({NUMBERS["bpf"]}, 0, 0, 0), canary=os.path.exists(CANARY), variables=dict(os.environ),
)))
"""


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    yield slim()
    here().process().close()


def in_image(image: str, project: Path, **settings: object) -> Sandbox:
    """A sandbox that shows the project, and nothing else of the machine."""
    defaults: dict[str, object] = {
        "allow_file_read": True,
        "allow_file_write": True,
        "allow_subprocess": True,
        "allowed_paths": [str(project)],
        "validate_code": False,
        "timeout_seconds": stretched(60),
    }
    return Sandbox(image=image, **{**defaults, **settings})  # type: ignore[arg-type]


def test_every_wall_of_a_process_stands_in_an_image(image: str, project: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("not in the image")
    with in_image(image, project, env_vars={"GIVEN": "1", "PATH": "/nowhere"}) as sandbox:
        result = sandbox.execute(LOOK.replace("CANARY", repr(str(canary))))
    assert result.status is SandboxStatus.COMPLETED, result.stderr
    seen = json.loads(result.stdout)
    assert seen["python"].startswith("/usr/bin/python3")
    assert set(seen["root"]) - set(os.listdir(sandbox_root(image))) <= {str(project).split("/")[1]}, "the image's files"
    assert int(seen["map"][1]) == (os.geteuid() or int(seen["map"][1])) != 0, "never the machine's root"
    assert seen["capabilities"] == "0" * 32 and (seen["filter"], seen["new"]) == ("2", "1")
    assert seen["devices"] == ["lo"] and seen["processes"] <= 3
    assert {seen[name] for name in ("unshare", "mount", "ptrace", "bpf")} == {errno.EPERM}
    assert canary.exists() and not seen["canary"], "of the machine only the project is there"
    assert seen["variables"]["GIVEN"] == "1" and "/nowhere" not in seen["variables"]["PATH"], "programs are found where the image has them"
    assert result.route is not None and result.route.runtime == "container"


def sandbox_root(image: str) -> str:
    return here().container().image(image).root


# Where an image differs from every other runtime, and why.
DECLARED = {"the_environment_is_complete_and_nothing_else": "the variables of the image come first, and PATH and HOME are the image's"}


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.__name__ not in DECLARED], ids=lambda claim: claim.__name__)
def test_the_contract_of_every_runtime_holds_in_an_image(claim: Claim, image: str) -> None:
    scratch = Tmpfs("/tmp", 64 << 20, 0o1777), Tmpfs("/run", 16 << 20), Devices(16 << 20), Proc()
    claim(Bench(here().container(), MountPlan(ThrowAway(64 << 20), (ImageRoot(image), *scratch))))


def test_the_declared_differences_are_there(image: str) -> None:
    """If one goes, the claim is kept, and must be tried like the others."""
    different = [claim for claim in CLAIMS if claim.__name__ in DECLARED]
    assert len(different) == len(DECLARED)
    for claim in different:
        with pytest.raises(AssertionError):
            test_the_contract_of_every_runtime_holds_in_an_image(claim, image)


def test_the_projects_changes_are_a_change_set_and_the_images_are_listed_apart(image: str, project: Path) -> None:
    (project / "old").write_text("old")
    before = sorted(os.listdir(os.path.join(sandbox_root(image), "etc")))
    code = f"cd {project} && cat old && rm old && echo new > new && rm /etc/hosts && echo x >> /etc/group && echo y > /etc/added"
    with in_image(image, project) as sandbox:
        result = sandbox.execute(code, "bash")
    assert (result.exit_code, result.stdout) == (0, "old"), result.stderr
    changes = {change.path: change.kind.value for change in result.changes}
    root = IMAGES + sandbox_root(image)
    assert changes == {
        f"{project}/old": "deleted",
        f"{project}/new": "added",
        f"{root}/etc/hosts": "deleted",
        f"{root}/etc/group": "modified",
        f"{root}/etc/added": "added",
    }
    assert (project / "old").exists() and not (project / "new").exists(), "nothing is real"
    assert sorted(os.listdir(os.path.join(sandbox_root(image), "etc"))) == before, "and the image is as it was"


def test_limits_signals_and_exit_codes_are_those_of_every_run(image: str, project: Path) -> None:
    with in_image(image, project) as sandbox:
        assert sandbox.execute("exit 7", "bash").exit_code == 7
        assert sandbox.execute("kill -TERM $$", "bash").exit_code == 128 + signal.SIGTERM
        assert sandbox.execute("head -c 1000000 /dev/zero", "bash").limits_hit == ("output",)
        assert sandbox.execute("x = b'.' * (1 << 30)").exit_code != 0, "more memory than the limit"
    with in_image(image, project, timeout_seconds=0.5) as sandbox:
        assert sandbox.execute("while True: pass").status is SandboxStatus.TIMEOUT


def test_the_examples_of_the_isolation_backends_hold(image: str) -> None:
    backend = ContainerIsolation(image=image)
    assert backend.is_available() and not ContainerIsolation("nobody/has-this:1").is_available()
    config = IsolationConfig(timeout_seconds=stretched(30), env_vars={"API_KEY": "secret"})
    result = backend.execute(code='import os; print("in container", os.environ["API_KEY"])', language="python", config=config)
    assert result.stdout == "in container secret\n" and result.status is SandboxStatus.COMPLETED
    refused = backend.execute("import os\nos.fork()", config=config)
    assert refused.status is SandboxStatus.FAILED and "not permitted" in refused.stderr, "processes need a permission here, too"
    denied = backend.execute("open('/etc/x', 'w')", config=config)
    assert "Read-only" in denied.stderr or "Permission" in denied.stderr
    assert repr(backend) == f"ContainerIsolation(image={image!r})"


def test_what_an_image_cannot_have_is_refused_and_says_so(image: str, project: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="tools and preload"):
        Sandbox(image=image, tools=[max])
    with pytest.raises(PolicyError, match="needs an image"):
        Sandbox(runtime="container")
    with pytest.raises(PolicyError, match="runs no image"):
        Sandbox(runtime="wasm", image=image)
    with in_image(image, project, allowed_commands=["true"]) as sandbox, pytest.raises(RuntimeUnavailable, match="programs-confined"):
        sandbox.execute("true", "bash")
    with in_image(image, project) as sandbox, pytest.raises(RuntimeUnavailable, match="a session needs our interpreter"):
        sandbox.session().run("1")
    with in_image(image, project) as sandbox, pytest.raises(PolicyError, match="no interpreter of ours"):
        sandbox.live()
    with in_image("nobody/has-this:1", project) as sandbox, pytest.raises(RuntimeUnavailable, match="is not on this machine"):
        sandbox.execute("1")
    foreign = load_image(archive(tmp_path, [entry("a", "1")], config={"architecture": "s390x"}), name="foreign:1")
    try:
        with in_image("foreign:1", project) as sandbox, pytest.raises(RuntimeUnavailable, match="is for s390x"):
            sandbox.execute("1")
    finally:
        remove_image(foreign.id)


def shell_with_libraries() -> list[tuple[tarfile.TarInfo, bytes]]:
    """A shell of this machine, as entries of a layer."""
    listed = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout
    paths = ["/bin/sh", *(word for word in listed.split() if word.startswith("/"))]
    shell = [entry(path[1:], type=tarfile.REGTYPE, mode=0o755, size=os.path.getsize(path)) for path in paths]
    return [(info, Path(path).read_bytes()) for (info, _), path in zip(shell, paths, strict=True)]


def test_links_of_an_image_do_not_lead_the_project_elsewhere(project: Path, tmp_path: Path) -> None:
    top = str(project).split("/")[1]
    hostile = [entry(top, type=tarfile.SYMTYPE, linkname="/tmp"), entry("tmp", type=tarfile.SYMTYPE, linkname="/proc/1/root")]
    made = load_image(archive(tmp_path, [*hostile, *shell_with_libraries()]), name="hostile:1")
    try:
        (project / "file").write_text("here")
        with in_image("hostile:1", project) as sandbox:
            ran = sandbox.run(["/bin/sh", "-c", f"read line < {project}/file; echo $line; echo new > {project}/new; echo t > /tmp/t"])
        assert ran.stdout == "here\n" and [change.path for change in ran.changes] == [f"{project}/new"]
        assert os.path.islink(os.path.join(made.root, top)), "the control arm: the link is in the image"
    finally:
        remove_image(made.id)


def test_a_network_in_an_image_is_the_egress_and_nothing_else(image: str, project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        code = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 5)\nexcept OSError as error:\n    print(error)"
        with in_image(image, project) as sandbox:
            assert "refused" in sandbox.execute(code).stdout
        with pytest.raises(TimeoutError):
            server.accept()
