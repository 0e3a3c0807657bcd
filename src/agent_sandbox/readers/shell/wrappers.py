"""A table of tools that start other tools, such as `sudo`, and functions that find the started command in their arguments."""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox._fast.values import dataclass, field
from agent_sandbox.readers.shell import POSIX_SHELLS
from agent_sandbox.readers.shell.effects import Effect, EffectKind, split, words
from agent_sandbox.readers.shell.expansion import Field

SHELLS = frozenset(POSIX_SHELLS)
# Shell builtins: no program is started for them. `analyze` knows the effects of some.
BUILTINS = words(
    """
    : . [ alias bg bind break builtin caller cd command compgen complete continue declare dirs disown echo enable eval exec exit
    export false fc fg getopts hash help history jobs kill let local logout mapfile popd printf pushd pwd read readarray readonly
    return set shift shopt source suspend test times trap true type typeset ulimit umask unalias unset wait
    """
)
LOADERS = ("ld-linux", "ld-musl", "ld64.so", "ld.so")  # prefixes of the names of dynamic loaders, which start their argument
_MORE = Field("…", known=False)  # arguments that are not in the text


@dataclass(frozen=True)
class Wrapper:
    """A tool that runs the command in its arguments.

    valued: its own options that take a value.
    skip: the number of its own operands before the command.
    scripts: options whose value is a command line.
    joined: whether the remaining arguments together are one command line for a shell.
    more: whether the command gets further arguments that are not in the text.
    builtin: whether it is a shell builtin, so that no program is started for it.
    only_looks: options with which it starts no command.
    """

    valued: str = ""
    skip: int = 0
    scripts: str = ""
    joined: bool = False
    more: bool = False
    builtin: bool = False
    only_looks: str = ""
    effects: tuple[Effect, ...] = field(default=())


_PRIVILEGE = (Effect(EffectKind.PRIVILEGE),)
_SYSTEM = (Effect(EffectKind.SYSTEM),)

WRAPPERS: dict[str, Wrapper] = {
    "sudo": Wrapper(
        "-u -g -C -p -h -r -t -U -D -R -T --user --group --prompt --host --chdir", effects=_PRIVILEGE, only_looks="-l -v -k -K --list"
    ),
    "doas": Wrapper("-u -C", effects=_PRIVILEGE),
    "su": Wrapper("-s -g -G --shell --group", skip=1, scripts="-c --command", effects=_PRIVILEGE),
    "runuser": Wrapper("-s -g -G -u --shell --group", scripts="-c --command", effects=_PRIVILEGE),
    "pkexec": Wrapper("--user", effects=_PRIVILEGE),
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "nice": Wrapper("-n --adjustment"),
    "ionice": Wrapper("-c -n -p --class --classdata"),
    "chrt": Wrapper(skip=1),
    "taskset": Wrapper(skip=1),
    "stdbuf": Wrapper("-i -o -e --input --output --error"),
    "timeout": Wrapper("-k -s --kill-after --signal", skip=1),
    "time": Wrapper("-f -o --format --output"),
    "command": Wrapper(builtin=True, only_looks="-v -V"),
    "builtin": Wrapper(builtin=True),
    "exec": Wrapper("-a", builtin=True),
    "caffeinate": Wrapper("-t -w"),
    "unbuffer": Wrapper(),
    "fakeroot": Wrapper("-l -i -s"),
    "proot": Wrapper("-r -b -w"),
    "xvfb-run": Wrapper("-n -s -e"),
    "dbus-run-session": Wrapper(),
    "chronic": Wrapper(),
    "strace": Wrapper("-e -o -p -s -u", effects=(Effect(EffectKind.PROCESSES),)),
    "ltrace": Wrapper("-e -o -p -s -u", effects=(Effect(EffectKind.PROCESSES),)),
    "chroot": Wrapper("--userspec --groups", skip=1, effects=_SYSTEM),
    "unshare": Wrapper("--mount-proc --setuid --setgid", effects=_SYSTEM),
    "nsenter": Wrapper("-t -S -G --target", effects=_SYSTEM),
    "systemd-run": Wrapper("-p -u --unit --property --uid --slice", effects=_SYSTEM),
    "setarch": Wrapper(skip=1),
    "flock": Wrapper("-w -E --timeout", skip=1, scripts="-c --command"),
    "script": Wrapper("-t -O -I", scripts="-c --command", effects=(Effect(EffectKind.WRITES, "typescript"),)),
    "watch": Wrapper("-n --interval", joined=True),
    "entr": Wrapper(more=True),
    "xargs": Wrapper("-I -n -P -d -L -a -E -s --max-args --max-procs --delimiter --arg-file --replace --max-lines", more=True),
    "parallel": Wrapper("-j --jobs -n -a --colsep -N", joined=True, more=True),
    "busybox": Wrapper(),
    "toybox": Wrapper(),
    "ld.so": Wrapper("--argv0 --library-path --preload --audit --inhibit-rpath --glibc-hwcaps-prepend --glibc-hwcaps-mask"),
    "ssh-agent": Wrapper("-t -a"),
    "dotenv": Wrapper("-f"),
    "direnv": Wrapper(skip=2),
}
# Subcommands after which another command begins, as in `poetry run pytest`.
RUNNERS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("poetry", "pipenv", "pdm", "hatch", "rye", "uv", "conda", "mamba"), frozenset({"run"})),
    **dict.fromkeys(("npm", "pnpm", "bundle", "rbenv", "pyenv", "asdf", "mise"), frozenset({"exec"})),
}


@dataclass(frozen=True)
class Inner:
    """The command, or the command lines, that a wrapper starts; both empty if it starts nothing."""

    command: tuple[Field, ...] = ()
    scripts: tuple[Field, ...] = ()


def unwrap(name: str, wrapper: Wrapper, fields: Sequence[Field]) -> Inner:
    """Return the command in the arguments of a wrapper."""
    valued = frozenset((*wrapper.valued.split(), *wrapper.scripts.split()))
    arguments, at = split(fields, valued, stop_at_operand=True)
    scripts = tuple(arguments.values(wrapper.scripts.split()))
    if any(arguments.has(option) for option in wrapper.only_looks.split()):
        return Inner()
    if wrapper.scripts:  # su - user -c …: the option may come late
        later, _ = split(fields, valued)
        scripts = tuple(later.values(wrapper.scripts.split()))
        if scripts:
            return Inner(scripts=scripts)
    rest = list(fields[at + wrapper.skip :]) if at < len(fields) else []
    if name == "sudo":
        rest = _without_assignments(rest)
    if name == "xargs" and not rest:
        return Inner()  # xargs without a command echoes
    if wrapper.more:
        holes = [value.shown for value in arguments.values({"-I", "--replace"})] or ["{}"]
        rest = [Field(each.shown, known=False) if any(hole in each.shown for hole in holes) else each for each in rest]
    if wrapper.joined and rest:
        text = " ".join(each.shown for each in rest)
        return Inner(scripts=(Field(text, all(each.known for each in rest)),))
    return Inner((*rest, _MORE) if wrapper.more and rest else tuple(rest))


def unwrap_env(fields: Sequence[Field]) -> Inner:
    """Return the command in the arguments of `env`: `env -i A=b command …` or `env -S "command …"`."""
    valued = frozenset({"-u", "--unset", "-C", "--chdir", "-S", "--split-string"})
    arguments, at = split(fields, valued, stop_at_operand=True)
    scripts = arguments.values({"-S", "--split-string"})
    if scripts:
        return Inner(scripts=(Field(" ".join(each.shown for each in (*scripts, *fields[at:])), scripts[0].known),))
    return Inner(tuple(_without_assignments(fields[at:])))


def _without_assignments(fields: Sequence[Field]) -> list[Field]:
    rest = list(fields)
    while rest and "=" in rest[0].shown and rest[0].shown.partition("=")[0].isidentifier():
        rest.pop(0)
    return rest


def executed_by_find(fields: Sequence[Field]) -> list[tuple[Field, ...]]:
    """Return the commands after `-exec` and similar options of `find` or `fd`."""
    commands: list[tuple[Field, ...]] = []
    at = 0
    while at < len(fields):
        if fields[at].shown in ("-exec", "-execdir", "-ok", "-okdir", "-x", "--exec", "-X", "--exec-batch"):
            end = next((i for i in range(at + 1, len(fields)) if fields[i].shown == ";" or _ends(fields, i)), len(fields))
            words = (Field("…", known=False) if "{}" in each.shown else each for each in fields[at + 1 : end])
            commands.append(tuple(words))
            at = end
        at += 1
    return commands


def _ends(fields: Sequence[Field], at: int) -> bool:
    return fields[at].shown == "+" and fields[at - 1].shown == "{}"


def shell_script(fields: Sequence[Field]) -> tuple[Field | None, Field | None]:
    """Return the command line after `-c`, or the script file, in a shell's arguments; both None if the shell reads standard input."""
    for index, each in enumerate(fields):
        text = each.shown
        before = fields[index - 1].shown if index else ""
        if before in ("--rcfile", "--init-file") or (before[:1] in ("-", "+") and before[1:2] != "-" and before.endswith(("o", "O"))):
            continue  # the value of the previous option, as in -o pipefail
        if text.startswith("-") and not text.startswith("--") and "c" in text:
            rest = fields[index + 1 :]
            value = 1 if text.endswith(("o", "O")) else 0
            return next((field for field in rest[value:] if not field.shown.startswith("-")), None), None
        if text == "-s":
            return None, None  # it reads its input, whatever follows
        if not text.startswith(("-", "+")):
            return None, each
    return None, None
