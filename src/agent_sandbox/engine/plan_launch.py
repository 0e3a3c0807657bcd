"""Plan a launch: which program runs, which files the guest sees, and within which limits. Only values are computed; nothing runs.

Code runs on the interpreter of its language. A locked sandbox shows only the files that the interpreter needs: the interpreter itself, its
standard library and packages, and the shared libraries of the system. It shows no home directories, no configuration and no other programs.
"""

from __future__ import annotations

import os
import sys
import time

from agent_sandbox._fast.functions import lru_cache
from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, replace
from agent_sandbox.engine.work import Code
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.kernel.mount_plan import Copies, ImageRoot, MountPlan, SealRoot, SkeletonRoot
from agent_sandbox.policy.paths import Beneath, Tree, contains
from agent_sandbox.policy.secrets import FoundMask, Mask
from agent_sandbox.runtime.base import Argv, Hosted, JavaScriptCode, Launch, PythonCode, Script
from agent_sandbox.workspace.view.observations import Observations
from agent_sandbox.workspace.view.plan import Needs, plan_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from agent_sandbox.engine.work import Work
    from agent_sandbox.kernel.mount_plan import Layers
    from agent_sandbox.policy.model import FileRules, Limits, Policy, ProgramRules
    from agent_sandbox.runtime.base import Traits
    from agent_sandbox.workspace.view.executables import Executables
    from agent_sandbox.workspace.view.plan import MachineFacts

SCRATCH = "/tmp"  # the working directory of work that names none
LOOK_AGAIN_SECONDS = 60.0  # after which the programs of the machine are listed again
DISK_BYTES = 1 << 30  # size of the tmpfs of a throw-away sandbox if the policy sets no limit: a filesystem in memory must have some size
KNOWN_SECONDS = 5.0  # after this time we notice that an interpreter was installed or removed
_NAMED = 5  # paths in one remark
_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib", "/usr/share/zoneinfo")
_TOP_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_TOOLS = ("/usr", "/bin", "/sbin", "/etc/alternatives")  # what programs that start programs expect
_COPIED = ("/etc/ld.so.cache", "/etc/localtime")
_PASSWD = "root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
_NSSWITCH = b"passwd: files\ngroup: files\nhosts: files dns\n"
_HOSTS = b"127.0.0.1 localhost sandbox\n::1 localhost\n"


@dataclass(frozen=True)
class Gating:
    """The effect of the program rules: the file rules with denied programs masked, and the only files that can be executed.

    `executables` is None if all files can be executed.
    """

    files: FileRules
    executables: Executables | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _RecentPlan:
    """A view that was planned before, with its inputs.

    Until the time `until` it may be used again without a look at the disk. Later it may be used while the machine has the same mounts, and
    `disk`, if there are observations, still holds.
    """

    needs: Needs
    gating: Gating | None
    plan: MountPlan
    host: MachineFacts
    disk: Observations | None
    until: float = 0.0

    def fits(self, needs: Needs, gating: Gating | None, look: Callable[[], MachineFacts]) -> bool:
        """Return whether planning with these inputs would give the same plan now."""
        if self.needs != needs or self.gating != gating:
            return False
        return time.monotonic() < self.until or (self.disk is not None and self.host == look() and self.disk.hold())


class LaunchPlanner:
    """Plans launches under one policy. Safe to use from many threads."""

    def __init__(self, policy: Policy, project: str | None, look: Callable[[], MachineFacts]) -> None:
        self._policy = policy
        self._project = project
        self._look = look
        self._recent: dict[str, _RecentPlan] = {}  # by runtime; each is replaced whole, so threads may share it

    @property
    def disk_bytes(self) -> int:
        """The size limit of throw-away layers, in bytes."""
        return self._policy.limits.disk_bytes or DISK_BYTES

    def forget(self) -> None:
        """Drop recent plans. Called when the machine's mounts have changed."""
        self._recent.clear()

    def launch(self, work: Work, runtime: Traits, layers: Layers, limits: Limits) -> Launch:
        """Return the launch of a piece of work. Raises `RuntimeUnavailable` if the runtime cannot run it, and as `plan_view` does."""
        program, executables, plan = self._plan(work, runtime, layers)
        policy = self._policy
        return Launch(
            program=program,
            root=plan,
            cwd=work.cwd or SCRATCH,
            env=work.env,
            limits=limits,
            requires=policy.requires,
            stdin=work.stdin,
            processes=policy.processes,
            writable=policy.files.write,
            system=policy.system,
            terminal=work.terminal,
            executables=executables,
            preload=work.preload,
            on_output=work.on_output,
            collect=work.collect,
        )

    def _plan(self, work: Work, runtime: Traits, layers: Layers) -> tuple[Argv | Hosted | Script, tuple[str, ...], MountPlan]:
        """Return the program, the files that it must be able to execute, and the mount plan of the view."""
        policy, what = self._policy, work.what
        brought = isinstance(what, Code) and what.language in runtime.brings
        if runtime.images:
            return self._plan_in_image(work, layers)
        if policy.image:
            why = f"the runtime {runtime.name!r} shows the files of this machine, and the image {policy.image!r} is named"
            raise RuntimeUnavailable(why, missing=("images",), hint="use --runtime container or auto, or leave the image out")
        if not runtime.views and (policy.files.read or policy.files.write):
            why = f"the runtime {runtime.name!r} shows no files of the machine, and the policy grants some"
            raise RuntimeUnavailable(why, missing=("view",), hint="run it without file permissions, or on Linux")
        if not runtime.views and not brought:
            raise RuntimeUnavailable(
                f"the runtime {runtime.name!r} runs Python code only", missing=("native-programs",), hint="run it on Linux"
            )
        if isinstance(what, Code) and brought:
            view = self._view(runtime.name, Needs(), layers) if runtime.views else MountPlan(layers, ())
            return hosted(what.language, what.source, what.arguments), (), view
        program: Argv | Hosted | Script
        if isinstance(what, Code):
            path = work.env.get("PATH", os.defpath)
            code = prepare(what.language, what.source, arguments=what.arguments, search_path=path, processes=policy.processes)
            program, needs, executables = code.program, code.needs, code.executables
            if work.shell:  # the interpreter starts it for each turn
                executables = prepare("bash", "", arguments=(), search_path=path, processes=policy.processes).executables
            if isinstance(program, PythonCode) and what.file is not None:
                program = replace(program, file=what.file)
        else:
            program, needs, executables = Argv(what.argv), tools(), ()
        return program, executables, self._view(runtime.name, needs, layers, self._gating(work, program, executables))

    def _plan_in_image(self, work: Work, layers: Layers) -> tuple[Argv | Hosted | Script, tuple[str, ...], MountPlan]:
        """Return the program and the mount plan of a run in an image: its files, and the project or the named paths of the machine.

        The interpreter is the image's, so only its name is known here.
        """
        policy, what = self._policy, work.what
        if not policy.image:
            raise RuntimeUnavailable("the runtime 'container' needs an image", missing=("image",), hint="--image NAME, or image= in Python")
        whole = any(isinstance(pattern, Tree | Beneath) and pattern.path == "/" for pattern in policy.files.allowed)
        chosen = policy.files
        if whole:
            chosen = replace(chosen, allowed=(Tree(self._project),) if self._project and self._project != "/" else ())
        plan = plan_view(chosen, Needs(), layers, host=self._look(), project=self._project, scratch_bytes=self.disk_bytes)
        kept = (step for step in plan.steps if not isinstance(step, SkeletonRoot | SealRoot))
        root = ImageRoot(policy.image, writable=policy.files.write)
        notes = (*plan.notes, *remarks_on(mask for mask in policy.files.masks if self._project and contains(self._project, mask.path)))
        program: Argv | Script = Argv(what.argv) if not isinstance(what, Code) else _script_in_image(what)
        return program, (), replace(plan, steps=(root, *kept), notes=notes)

    def _gating(self, work: Work, program: Argv | Hosted | Script, executables: tuple[str, ...]) -> Gating | None:
        """Return the effect of the program rules; None if they restrict nothing, or if the guest may not start programs."""
        if not (self._policy.processes and self._policy.programs.restricts):
            return None
        from agent_sandbox.policy.programs import reads_a_line  # few policies name programs

        return gating_of(
            self._policy,
            search_path=work.env.get("PATH", os.defpath),
            interpreter=executables,
            python=isinstance(program, PythonCode),
            line=isinstance(program, Argv) and reads_a_line(program.words),
            project=self._project,
            environment=program.file.environment if isinstance(program, PythonCode) and program.file is not None else "",
        )

    def _view(self, runtime: str, needs: Needs, layers: Layers, gating: Gating | None = None) -> MountPlan:
        """Return the mount plan of the view. A recent plan is used again if the disk and the mounts still give the same one.

        If the policy shows no files of the machine, it is used again for some seconds without a look.
        """
        files, recent = self._policy.files, self._recent.get(runtime)
        if recent is not None and recent.fits(needs, gating, self._look):
            return recent.plan if recent.plan.layers == layers else replace(recent.plan, layers=layers)
        rules, code = (files, None) if gating is None else (gating.files, gating.executables)
        host, scratch, disk = self._look(), self.disk_bytes, Observations()
        plan = plan_view(rules, needs, layers, host=host, project=self._project, scratch_bytes=scratch, executables=code, disk=disk)
        notes = (*remarks_on(files.masks), *(gating.notes if gating is not None else ()))
        if notes:
            plan = replace(plan, notes=(*plan.notes, *notes))
        shown = files.read or files.write
        copied = any(isinstance(step, Copies) for step in plan.steps)  # what is copied is found anew for each run
        if not shown or not copied:
            until = 0.0 if shown else time.monotonic() + KNOWN_SECONDS
            self._recent[runtime] = _RecentPlan(needs, gating, plan, host, None if copied else disk, until)
        return plan


def remarks_on(masks: Iterable[Mask]) -> Iterator[str]:
    """Yield a sentence for each reason why files are hidden that somebody may expect to see."""
    reasons: dict[str, list[str]] = {}
    for mask in masks:
        if isinstance(mask, FoundMask) and mask.remark:
            reasons.setdefault(mask.remark, []).append(mask.path)
    for reason, paths in reasons.items():
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        yield f"hidden: {', '.join(map(repr, paths[:_NAMED]))}{more}: {reason} (--reveal PATH shows it)"


def gating_of(
    policy: Policy,
    *,
    search_path: str,
    interpreter: Sequence[str],
    python: bool,
    line: bool,
    project: str | None,
    environment: str = "",
) -> Gating:
    """Return the effect of the program rules on the files of one run.

    `interpreter` is the program that runs the code. If `python` is set, the code is Python, and its modules can be executed too, with those
    of the virtual environment `environment`. If `line` is set, the code is a command line for a shell.

    Raises `PolicyError` for a rule that allows one tool of a multi-tool program such as busybox, and not the others.
    """
    if not policy.programs.groups:
        hidden, notes = _denied(policy.programs, search_path, _signs(search_path, ()))
        masks = (*policy.files.masks, *(Mask(path, "a denied tool") for path in hidden))
        return Gating(replace(policy.files, masks=masks), None, notes)
    modules = (*python_modules(), *([environment] if environment else [])) if python else ()
    rules = replace(policy.programs, lines=True) if line else policy.programs
    signs = _signs(search_path, modules)
    return Gating(policy.files, _executables(rules, search_path, tuple(interpreter[:1]), modules, project, signs))


def _signs(search_path: str, modules: Sequence[str]) -> tuple[int, ...]:
    """Return numbers that change when programs or modules are installed or removed. They are cache keys: listing all files is slow.

    Some installations change no directory's time. So one number also changes every few seconds, and a new program is found by then at the
    latest.
    """
    from agent_sandbox.kernel.elf import CACHE

    return (int(time.monotonic() / LOOK_AGAIN_SECONDS), *(_changed(path) for path in (*search_path.split(os.pathsep), *modules, CACHE)))


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=8)
def _executables(
    rules: ProgramRules, search_path: str, programs: tuple[str, ...], modules: tuple[str, ...], project: str | None, signs: tuple[int, ...]
) -> Executables:
    from agent_sandbox.workspace.view.executables import find_executables

    return find_executables(rules, search_path=search_path, programs=programs, modules=modules, project=project)


@lru_cache(maxsize=8)
def _denied(rules: ProgramRules, search_path: str, signs: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    from agent_sandbox.workspace.view.executables import denied_files

    return denied_files(rules, search_path=search_path)


@dataclass(frozen=True)
class NativeInterpreter:
    """An interpreter on the machine: its command names, the trees of its packages, and the system package to install if it is missing."""

    commands: tuple[str, ...]
    trees: tuple[str, ...]
    file: str
    package: str
    flags: tuple[str, ...] = ()


NATIVE = {
    "javascript": NativeInterpreter(("node", "nodejs"), ("/usr/share/nodejs", "/usr/local/share/nodejs"), "main.js", "nodejs"),
    "ruby": NativeInterpreter(("ruby",), ("/var/lib/gems", "/usr/share/rubygems-integration", "/usr/share/ruby"), "main.rb", "ruby"),
    "bash": NativeInterpreter(("bash",), (), "main.sh", "bash"),
}


@dataclass(frozen=True)
class PreparedCode:
    """A piece of code ready to run: the program, the files that it needs in the view, and the files that it must execute."""

    program: PythonCode | Script
    needs: Needs
    executables: tuple[str, ...] = ()


def hosted(language: str, source: str, arguments: tuple[str, ...]) -> Hosted:
    """Return the program that runs this code in a runtime with an interpreter of its own."""
    return PythonCode(source, arguments) if language == "python" else JavaScriptCode(source, arguments)


def prepare(language: str, source: str, *, arguments: tuple[str, ...], search_path: str, processes: bool) -> PreparedCode:
    """Prepare code in a language, given by its canonical name. Raises `RuntimeUnavailable` if there is no interpreter.

    `processes` says whether the guest may start programs, and so needs the tools of the system.
    """
    if language == "python":
        trees = (*_LIBRARIES, *_python_trees())
        binary = _real(sys.executable, _moment())
        return PreparedCode(PythonCode(source, arguments), _needs(trees, (binary,), processes))
    from shutil import which

    interpreter = NATIVE[language]
    command = next((path for name in interpreter.commands if (path := which(name, path=search_path))), None)
    if command is None:
        raise RuntimeUnavailable(
            f"{language} code needs {interpreter.commands[0]}, which is not in {search_path}",
            missing=(interpreter.commands[0],),
            hint=f"install it: apt-get install {interpreter.package}",
        )
    from agent_sandbox.kernel.elf import loader_of

    binary = os.path.realpath(command)
    trees = (*_LIBRARIES, *interpreter.trees, *_prefix_of(binary))
    program = Script((binary, *interpreter.flags), source, interpreter.file, arguments)
    return PreparedCode(program, _needs(trees, (binary,), processes), (binary, *loader_of(binary)))


def _script_in_image(code: Code) -> Script:
    """Return the program that runs this code with the interpreter of an image, by its usual name."""
    if code.language == "python":
        return Script(("python3",), code.source, "main.py", code.arguments)
    interpreter = NATIVE[code.language]
    return Script((interpreter.commands[0], *interpreter.flags), code.source, interpreter.file, code.arguments)


def _python_trees() -> tuple[str, ...]:
    """Return the directories of the running interpreter and its packages."""
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    prefixes = [prefix for prefix in (sys.base_prefix, sys.prefix) if prefix != "/usr"]
    return (*prefixes, *packages)


def python_modules() -> tuple[str, ...]:
    """Return the directories of the running interpreter's modules, including the standard library."""
    return tuple(dict.fromkeys((os.path.dirname(os.__file__), *(path for path in sys.path if os.path.isabs(path) and os.path.isdir(path)))))


def _prefix_of(binary: str) -> tuple[str, ...]:
    """Return the installation directory of an interpreter, such as /opt/node for /opt/node/bin/node; empty for one of the system."""
    prefix = os.path.dirname(os.path.dirname(binary))
    return () if prefix in ("/usr", "/usr/local", "/") else (prefix,)


def _needs(trees: tuple[str, ...], binaries: tuple[str, ...], processes: bool) -> Needs:
    return _needs_at(trees, binaries, processes, _moment())


def _moment() -> int:
    """Return a number that changes every few seconds. It is a cache key for look-ups on disk."""
    return int(time.monotonic() / KNOWN_SECONDS)


@lru_cache(maxsize=4)
def _real(path: str, now: int) -> str:
    return os.path.realpath(path)


@lru_cache(maxsize=16)
def _needs_at(trees: tuple[str, ...], binaries: tuple[str, ...], processes: bool, now: int) -> Needs:
    from agent_sandbox.kernel.elf import loader_of

    links = tuple((f"/{name}", os.readlink(f"/{name}")) for name in _TOP_LINKS if os.path.islink(f"/{name}"))
    directories = tuple(
        f"/{name}" for name in _TOP_LINKS if name.startswith("lib") and os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")
    )
    linked = {target for target, _ in links}
    shown = tuple(dict.fromkeys(tree for tree in (*trees, *directories) if tree not in linked))
    files = (*binaries, *(os.path.realpath(path) for binary in binaries for path in loader_of(binary)))
    return Needs(
        shown,
        tuple(tree for tree in _TOOLS if tree not in linked) if processes else (),
        tuple(dict.fromkeys(files)),
        links,
        (
            ("/etc/passwd", _account(_PASSWD, ":x:{uid}:{gid}:sandbox:/tmp:/bin/sh\n")),
            ("/etc/group", _account(_GROUP, ":x:{gid}:\n")),
            ("/etc/nsswitch.conf", _NSSWITCH),
            ("/etc/hosts", _HOSTS),
            *((path, content) for path in _COPIED if (content := _read(path)) is not None),
        ),
    )


def _account(base: str, line: str) -> bytes:
    """Return the content of /etc/passwd or /etc/group in a locked view: `base`, and without root a line for the user."""
    uid, gid = os.getuid(), os.getgid()
    return (base + (("sandbox" + line).format(uid=uid, gid=gid) if uid else "")).encode()


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def tools() -> Needs:
    """Return the files that a command needs in a view of chosen trees: the programs and libraries of the system."""
    return _needs(_LIBRARIES, (), processes=True)


def forget_looks() -> None:
    """Forget everything that was looked up on the disk, and would count for some seconds more."""
    for remembered in (_executables, _denied, _real, _needs_at):
        remembered.cache_clear()
