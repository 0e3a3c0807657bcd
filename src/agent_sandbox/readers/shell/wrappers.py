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
    flags: its own options that take none, or only one in the same word after `=`. Any other is said to be unknown: the next word may be its
    value, and not the command.
    attached: its own short options that may have a value in the same word, and never in the next.
    skip: the number of its own operands before the command.
    scripts: options whose value is a command line.
    joined: whether the remaining arguments together are one command line for a shell.
    more: whether the command gets further arguments that are not in the text.
    builtin: whether it is a shell builtin, so that no program is started for it.
    only_looks: options with which it starts no command.
    """

    valued: str = ""
    flags: str = ""
    attached: str = ""
    skip: int = 0
    scripts: str = ""
    joined: bool = False
    more: bool = False
    builtin: bool = False
    only_looks: str = ""
    effects: tuple[Effect, ...] = field(default=())


_PRIVILEGE = (Effect(EffectKind.PRIVILEGE),)
_SYSTEM = (Effect(EffectKind.SYSTEM),)
_USER_OPTIONS = "--shell --group --supp-group --whitelist-environment"  # of `su` and `runuser`
_USER_FLAGS = "-f -l -m -p -P --fast --login --preserve-environment --pty"
_USER_SCRIPTS = "-c --command --session-command"

WRAPPERS: dict[str, Wrapper] = {
    "sudo": Wrapper(
        "-u -g -a -c -C -p -h -r -t -T -U -D -R --user --group --close-from --prompt --host --role --type --command-timeout --other-user "
        "--chdir --chroot",
        "-A -b -B -E -H -i -K -k -l -n -N -P -S -s -v -V --askpass --background --bell --preserve-env --set-home --login --list "
        "--non-interactive --no-update --preserve-groups --stdin --shell --remove-timestamp --reset-timestamp --validate --version",
        effects=_PRIVILEGE,
        only_looks="-l -v -k -K --list",
    ),
    "doas": Wrapper("-u -C", "-L -n -s", effects=_PRIVILEGE),
    "su": Wrapper(f"-s -g -G -w {_USER_OPTIONS}", _USER_FLAGS, skip=1, scripts=_USER_SCRIPTS, effects=_PRIVILEGE),
    "runuser": Wrapper(f"-s -g -G -u -w --user {_USER_OPTIONS}", _USER_FLAGS, scripts=_USER_SCRIPTS, effects=_PRIVILEGE),
    "pkexec": Wrapper("--user", "--disable-internal-agent --keep-cwd", effects=_PRIVILEGE),
    "nohup": Wrapper(),
    "setsid": Wrapper("", "-c -f -w --ctty --fork --wait"),
    "nice": Wrapper("-n --adjustment", " ".join(f"-{digit}" for digit in range(10))),
    "ionice": Wrapper("-c -n -p -P -u --class --classdata --pid --pgid --uid", "-t --ignore"),
    "chrt": Wrapper(
        "-T -P -D --sched-runtime --sched-period --sched-deadline",
        "-a -b -d -f -i -m -o -r -R -v --all-tasks --batch --deadline --fifo --idle --max --other --rr --reset-on-fork --verbose",
        skip=1,
    ),
    "taskset": Wrapper("", "-a -c -p --all-tasks --cpu-list --pid", skip=1),
    "stdbuf": Wrapper("-i -o -e --input --output --error"),
    "timeout": Wrapper("-k -s --kill-after --signal", "-f -p -v --foreground --preserve-status --verbose", skip=1),
    "time": Wrapper("-f -o --format --output", "-a -p -q -v --append --portability --quiet --verbose"),
    "command": Wrapper("", "-p -v -V", builtin=True, only_looks="-v -V"),
    "builtin": Wrapper(builtin=True),
    "exec": Wrapper("-a", "-c -l", builtin=True),
    "caffeinate": Wrapper("-t -w", "-d -i -m -s -u"),
    "unbuffer": Wrapper("", "-p"),
    "fakeroot": Wrapper("-l -i -s -b --lib --faked", "-u -h -v --unknown-is-real"),
    "proot": Wrapper("-r -b -w -q -R -S --rootfs --bind --pwd --cwd", "-0 --root-id"),
    "xvfb-run": Wrapper(
        "-n -s -e -f -p -w --server-num --server-args --error-file --auth-file --xauth-protocol --wait",
        "-a -l --auto-servernum --listen-tcp",
    ),
    "dbus-run-session": Wrapper("--config-file --dbus-daemon"),
    "chronic": Wrapper("", "-e -v"),
    "strace": Wrapper(
        "-e -o -p -s -u -E -a -b -I -O -P -S -U -X --trace --output --attach --string-limit --user --env",
        "-A -c -C -d -D -f -F -i -k -n -N -q -r -t -T -v -w -x -y -Y -z -Z --follow-forks --output-append-mode --summary --summary-only",
        effects=(Effect(EffectKind.PROCESSES),),
    ),
    "ltrace": Wrapper("-e -o -p -s -u -A -a -D -F -l -n -w -x", "-b -c -C -f -i -L -r -S -t -T", effects=(Effect(EffectKind.PROCESSES),)),
    "chroot": Wrapper("--userspec --groups", "--skip-chdir", skip=1, effects=_SYSTEM),
    "unshare": Wrapper(
        "-S -G -R -w -l --setuid --setgid --root --wd --map-user --map-group --map-users --map-groups --propagation --setgroups "
        "--load-interp --monotonic --boottime --owner",
        "-c -C -f -i -m -n -p -r -T -u -U --cgroup --fork --ipc --keep-caps --kill-child --map-auto --map-current-user --map-root-user "
        "--mount --mount-proc --net --pid --time --user --uts",
        effects=_SYSTEM,
    ),
    "nsenter": Wrapper(
        "-t -S -G --target --setuid --setgid",
        "-a -e -F -Z --all --cgroup --env --follow-context --ipc --mount --net --no-fork --pid --preserve-credentials --root --time --user "
        "--uts --wd",
        "-C -i -m -n -p -r -T -u -U -w",
        effects=_SYSTEM,
    ),
    "systemd-run": Wrapper(
        "-p -u -E -M -H --unit --property --uid --gid --slice --description --service-type --nice --working-directory --setenv --machine "
        "--host --on-active --on-boot --on-calendar --on-startup --on-unit-active --on-unit-inactive",
        "-d -G -P -q -r -S -t --collect --no-ask-password --no-block --pipe --pty --quiet --remain-after-exit --same-dir --scope "
        "--send-sighup --shell --system --user --wait",
        effects=_SYSTEM,
    ),
    "setarch": Wrapper(skip=1),
    "flock": Wrapper(
        "-w -E --wait --timeout --conflict-exit-code",
        "-e -F -n -o -s -u -x --close --exclusive --nb --no-fork --nonblock --shared --unlock --verbose",
        skip=1,
        scripts="-c --command",
    ),
    "script": Wrapper(
        "-T -O -I -B -m -o -E --log-out --log-in --log-io --log-timing --logging-format --output-limit --echo",
        "-a -e -f -q --append --flush --force --quiet --return --timing",
        "-t",
        scripts="-c --command",
        effects=(Effect(EffectKind.WRITES, "typescript"),),
    ),
    "watch": Wrapper(
        "-n -q --interval --equexit",
        "-b -c -C -e -g -p -r -t -w -x --beep --chgexit --color --differences --errexit --exec --no-color --no-rerun --no-title --no-wrap "
        "--precise",
        "-d",
        joined=True,
    ),
    "entr": Wrapper("", "-a -c -d -n -p -r -x -z", more=True),
    "xargs": Wrapper(
        "-I -n -P -d -L -a -E -s --max-args --max-procs --delimiter --arg-file --max-chars --process-slot-var",
        "-0 -i -o -p -r -t -x --null --open-tty --interactive --no-run-if-empty --verbose --exit --show-limits --eof --replace --max-lines",
        "-e -l",
        more=True,
    ),
    "parallel": Wrapper(
        "-j -n -a -N -L -P --jobs --arg-file --colsep --delay --halt --joblog --max-args --max-lines --max-procs --results --retries "
        "--timeout",
        "-0 -k -t --bar --dry-run --eta --group --keep-order --line-buffer --no-run-if-empty --null --progress --resume --ungroup "
        "--verbose --will-cite",
        joined=True,
        more=True,
    ),
    "busybox": Wrapper(),
    "toybox": Wrapper(),
    "ld.so": Wrapper(
        "--argv0 --library-path --preload --audit --inhibit-rpath --glibc-hwcaps-prepend --glibc-hwcaps-mask",
        "--inhibit-cache --list --verify",
    ),
    "ssh-agent": Wrapper("-t -a -E -P", "-c -d -D -k -s"),
    "dotenv": Wrapper("-f"),
    "direnv": Wrapper(skip=2),
}
_ENV = Wrapper(
    "-u --unset -C --chdir -a --argv0",
    "-0 -i -v --block-signal --debug --default-signal --ignore-environment --ignore-signal --list-signal-handling --null",
    scripts="-S --split-string",
)
# Subcommands after which another command begins, as in `poetry run pytest`.
RUNNERS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("poetry", "pipenv", "pdm", "hatch", "rye", "uv", "conda", "mamba"), frozenset({"run"})),
    **dict.fromkeys(("npm", "pnpm", "bundle", "rbenv", "pyenv", "asdf", "mise"), frozenset({"exec"})),
}


@dataclass(frozen=True)
class Inner:
    """The command, or the command lines, that a wrapper starts; both empty if it starts nothing.

    `odd` is an option of its own that is not known, so that its command may be another; empty if there is none.
    """

    command: tuple[Field, ...] = ()
    scripts: tuple[Field, ...] = ()
    odd: str = ""


def unwrap(name: str, wrapper: Wrapper, fields: Sequence[Field]) -> Inner:
    """Return the command in the arguments of a wrapper."""
    valued = frozenset((*wrapper.valued.split(), *wrapper.scripts.split()))
    arguments, at = split(fields, valued, stop_at_operand=True)
    scripts = tuple(arguments.values(wrapper.scripts.split()))
    odd = _odd_option(wrapper, fields[:at])
    if any(arguments.has(option) for option in wrapper.only_looks.split()):
        return Inner(odd=odd)
    if wrapper.scripts:  # su - user -c …: the option may come late
        later, _ = split(fields, valued)
        scripts = tuple(later.values(wrapper.scripts.split()))
        if scripts:
            return Inner(scripts=scripts, odd=odd)
    rest = list(fields[at + wrapper.skip :]) if at < len(fields) else []
    if wrapper.skip and rest and rest[0].shown.startswith("-"):
        odd = odd or rest[0].shown
    if name == "sudo":
        rest = _without_assignments(rest)
    if name == "xargs" and not rest:
        return Inner(odd=odd)  # xargs without a command echoes
    if wrapper.more:
        holes = [value.shown for value in arguments.values({"-I", "--replace"})] or ["{}"]
        rest = [Field(each.shown, known=False) if any(hole in each.shown for hole in holes) else each for each in rest]
    if wrapper.joined and rest:
        text = " ".join(each.shown for each in rest)
        return Inner(scripts=(Field(text, all(each.known for each in rest)),), odd=odd)
    return Inner((*rest, _MORE) if wrapper.more and rest else tuple(rest), odd=odd)


def unwrap_env(fields: Sequence[Field]) -> Inner:
    """Return the command in the arguments of `env`: `env -i A=b command …` or `env -S "command …"`."""
    scripts_options = _ENV.scripts.split()
    arguments, at = split(fields, frozenset((*_ENV.valued.split(), *scripts_options)), stop_at_operand=True)
    odd = _odd_option(_ENV, fields[:at])
    scripts = arguments.values(scripts_options)
    if scripts:
        text = " ".join(each.shown for each in (*scripts, *fields[at:]))
        if text.lstrip().startswith("-") or "=" in "".join(text.split()[:1]):
            odd = odd or "-S"  # what it splits begins with options or variables
        return Inner(scripts=(Field(text, scripts[0].known),), odd=odd)
    rest = fields[at + 1 :] if at < len(fields) and fields[at].shown == "-" else fields[at:]
    return Inner(tuple(_without_assignments(rest)), odd=odd)


def _odd_option(wrapper: Wrapper, fields: Sequence[Field]) -> str:
    """Return the first option that is not one of a wrapper; empty if there is none. Its own name may be a beginning of a known one."""
    valued = {*wrapper.valued.split(), *wrapper.scripts.split()}
    flags, attached = wrapper.flags.split(), wrapper.attached.split()
    at = 0
    while at < len(fields):
        text = fields[at].shown
        at += 1
        name, equals, _ = text.partition("=")
        if text == "--":
            return ""
        if text.startswith("--"):
            if name not in valued and name not in flags:
                return name
            at += name in valued and not equals
            continue
        for place, letter in enumerate(text[1:], start=2):
            if f"-{letter}" in valued:
                at += place == len(text)
                break
            if f"-{letter}" in attached:
                break
            if f"-{letter}" not in flags or (letter == "i" and wrapper.more and place < len(text)):  # what follows is put into the command
                return f"-{letter}"
    return ""


def _without_assignments(fields: Sequence[Field]) -> list[Field]:
    rest = list(fields)
    while rest and "=" in rest[0].shown:
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
        if text.startswith(("-", "+")) and not text.startswith("--") and "c" in text:
            rest = fields[index + 1 :]
            value = 1 if text.endswith(("o", "O")) else 0
            return _first_operand(rest[value:]), None
        if text == "-s":
            return None, None  # it reads its input, whatever follows
        if not text.startswith(("-", "+")):
            return None, each
    return None, None


def _first_operand(fields: Sequence[Field]) -> Field | None:
    """Return the command line behind the options of a shell that may follow `-c`."""
    at = 0
    while at < len(fields) and fields[at].shown.startswith(("-", "+")) and fields[at].shown != "--":
        at += 2 if fields[at].shown.endswith(("o", "O")) else 1
    at += at < len(fields) and fields[at].shown == "--"
    return fields[at] if at < len(fields) else None
