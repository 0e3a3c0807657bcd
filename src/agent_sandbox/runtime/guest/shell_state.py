"""The state of a shell between two commands, as data, and the scripts with which bash loads and writes it. Pure: nothing is run here.

Texts are as bash writes them (`declare -p`, `declare -f`, `alias -p`, `trap -p`), so bash can read them again. They come from the program:
whatever they say is loaded into a shell of that program and nowhere else.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX = "\0shell\0"  # begins a turn that is a command; a turn without it is Python code of ours
ON_EXIT = b"EXIT"
MOST_NAMED = 3  # names in one remark

# Bash makes these variables anew in each shell.
MADE_BY_BASH = frozenset(
    b"BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_EXECUTION_STRING BASH_LINENO "
    b"BASH_MONOSECONDS BASH_SOURCE BASH_SUBSHELL BASH_TRAPSIG BASH_VERSINFO BASH_VERSION COMP_WORDBREAKS DIRSTACK EPOCHREALTIME "
    b"EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD LINENO PIPESTATUS PPID RANDOM SECONDS SHELLOPTS SRANDOM UID _".split()
)
# Bash sets these in a new shell; the program may have unset them.
_SET_AT_START = b"HOSTNAME HOSTTYPE IFS MACHTYPE OLDPWD OPTERR OPTIND OSTYPE PATH PS4 PWD SHELL SHLVL TERM".split()
_UNREMARKABLE = frozenset(b"BASH_LOADABLES_PATH BASH_REMATCH HOSTNAME HOSTTYPE IFS MACHTYPE OPTERR OPTIND OSTYPE PS4 SHLVL TERM".split())
_NEVER_SET = frozenset((b"noexec", b"onecmd", b"restricted"))  # a shell with these could not load or write a state
_WITH_THE_COMMAND = (b"verbose", b"xtrace")  # what loads the state must not be printed
_ALIASES = b"expand_aliases"  # set after all functions are read: no alias is replaced in them a second time
_DEBUGGER = b"extdebug"
_POSIX = b"POSIXLY_CORRECT"  # whoever sets it enters the mode of POSIX
_LATE_TRAPS = (b"ERR", b"RETURN", b"DEBUG")  # what loads the state must not spring them

_RECORD = re.compile(rb"""(?:[^\n'"\\$]++|\\.|\$'(?:[^'\\]++|\\.)*+'|'[^']*+'|"(?:[^"\\]++|\\.)*+"|\$)++""", re.DOTALL)

# Writes the state, in a subshell, which it may change as it likes. An assignment enters the mode of POSIX, in which no function of the
# program hides `set` or `unset`; then `builtin` can be freed, and aliases are switched off before the rest is read. Status and options are
# read before that. Under `set -T`, a trap on DEBUG sees the first three commands of it.
_DUMP = r"""(
POSIXLY_CORRECT="$? ${FUNCNAME:+f} :$SHELLOPTS :$BASHOPTS ${POSIXLY_CORRECT+=}${POSIXLY_CORRECT-}"
\trap -p >&@OUT@
\trap - DEBUG ERR RETURN
\set +aefkmuvx -- "$POSIXLY_CORRECT" "$@"
(\unset -f declare printf; \printf '\0'; \declare -f builtin) >&@OUT@
\unset -f builtin
\builtin set +o posix
\builtin shopt -u expand_aliases
\builtin eval @WRITE@
) >/dev/null 2>&1"""
# Fields end with NUL, which no value holds. If `exit` was called in a function, its local variables hide global ones: those are uncovered,
# one by one.
_WRITE = r"""{
  builtin printf '\0%s\0%s\0%s\0' @KEY@ "$BASHPID" "$1"
  builtin alias -p; builtin printf '\0'
  builtin set +o; builtin printf '\0'
  builtin shopt -p; builtin printf '\0'
  builtin umask; builtin printf '\0'
  builtin pwd -L; builtin printf '\0'
  builtin printf '%s\0' "${#DIRSTACK[@]}" "${DIRSTACK[@]}" "$#" "$@"
  builtin mapfile -t names_@KEY@ <<<"$(builtin declare -F)"
  for name_@KEY@ in "${names_@KEY@[@]}"; do
    if [[ ! $name_@KEY@ ]]; then builtin break; fi  # there are none
    builtin printf '%s\0' "$name_@KEY@"; builtin declare -f -- "${name_@KEY@#declare * }"; builtin printf '\0'
  done
  builtin printf '\0'
  builtin unset -v names_@KEY@ name_@KEY@
  if [[ ${1#* } != f* ]]; then
    builtin declare -p
  else
    uncover_@KEY@() {
      builtin mapfile -t names_@KEY@ <<<"$(builtin compgen -A variable)"
      for name_@KEY@ in "${names_@KEY@[@]}"; do
        for scope_@KEY@ in "$@"; do
          if [[ ! -R $name_@KEY@ ]]; then builtin break; fi
          builtin declare -p "$name_@KEY@"; builtin unset -n "$name_@KEY@"
        done
        builtin declare -gt "$name_@KEY@"
      done
      for name_@KEY@ in "${names_@KEY@[@]}"; do
        if [[ $name_@KEY@ == *@KEY@ ]]; then builtin continue; fi
        for scope_@KEY@ in "$@"; do
          builtin declare -p "$name_@KEY@" || builtin break
          builtin unset -v "$name_@KEY@" || builtin break
        done
      done
    }
    uncover_@KEY@ global "${FUNCNAME[@]}"
  fi
  builtin printf '\0%s\0' @END@
} >&@OUT@
@AFTER@
"""


class UnkeptState(Exception):
    """A command left no state. The message says why."""


class ShellState:
    """The state of a shell. Names and values are bytes: a shell knows no characters."""

    def __init__(self, directory: bytes, arguments: Iterable[bytes], environment: Mapping[bytes, bytes]) -> None:
        """Begin with this environment, and else with what bash has by itself."""
        self.fresh = True  # no command has ended yet
        self.writer = 0  # the process that wrote it
        self.status = 0
        self.directory = directory
        self.arguments = list(arguments)
        self.variables = {name: b"declare -x %s=%s" % (name, quoted(value)) for name, value in environment.items()}
        self.functions: dict[bytes, tuple[bytes, bytes]] = {}  # name: attributes, text
        self.aliases: dict[bytes, bytes] = {}  # name: quoted text
        self.traps: dict[bytes, bytes] = {}  # signal: quoted command
        self.options: dict[bytes, bool] = {}  # of `set -o`
        self.switches: dict[bytes, bool] = {_ALIASES: True}  # of `shopt`; a session is used as a shell at a terminal is
        self.mask = b""
        self.stack: list[bytes] = []  # of directories, without the present one

    def described(self, first: ShellState) -> list[tuple[str, str, bytes]]:
        """Return what the state holds: name, kind and text of each. A name without blanks and brackets is that of a variable.

        Of options, those are named that are not as in the first state.
        """
        shown: list[tuple[str, str, bytes]] = [("working directory", "directory", self.directory)]
        for name, text in self.variables.items():
            if name not in _UNREMARKABLE:
                _, flags, rest = text.split(b" ", 2)
                shown.append((readable(name), _kind(flags), rest.partition(b"=")[2]))
        shown += [(f"{readable(name)}()", "function", text) for name, (_, text) in self.functions.items()]
        shown += [(f"alias {readable(name)}", "alias", text) for name, text in self.aliases.items()]
        shown += [(f"trap {readable(name)}", "trap", text) for name, text in self.traps.items()]
        for word, now, then in (("set -o", self.options, first.options), ("shopt", self.switches, first.switches)):
            shown += [(f"{word} {readable(name)}", "option", b"on" if on else b"off") for name, on in now.items() if on != then.get(name)]
        lists = [("positional parameters", self.arguments), ("directory stack", self.stack)]
        shown += [(name, "array", b" ".join(map(quoted, each))) for name, each in lists if each]
        return [*shown, ("creation mask", "mask", self.mask)]


class ShellScript:
    """The input of one bash: the line that it begins with, what loads the state, and the command.

    `numbers` are its private descriptors, by name. `key` is part of the names that it uses for itself, so that they are no one else's.
    """

    def __init__(self, state: ShellState, numbers: Mapping[str, int], key: str) -> None:
        self._state, self._numbers, self._key = state, numbers, key
        # One of them is not hidden: see `read_state`. A backslash keeps aliases away.
        self._builtin = b"\\command " if b"builtin" in state.functions else b"\\builtin "
        exit_trap = self._dump("exit")
        if (own := state.traps.get(ON_EXIT)) is not None:
            exit_trap += b"\n" + b"%seval %s" % (self._builtin, own) + b"\n" + self._dump("exit")
        self._exit_trap = quoted(exit_trap)

    @property
    def loaded(self) -> bytes:
        """The bytes that the shell writes first, when it has loaded the state."""
        return f"loaded {self._key}".encode()

    def is_ours(self, trap: bytes) -> bool:
        """Return whether a trap on EXIT is the one that this script has set."""
        return self._key.encode() in trap

    def line(self) -> bytes:
        """Return the line that bash begins with. All of it is read before anything runs, so no alias of the program is replaced in it."""
        status = b"$(%sexit %d)" % (self._builtin, self._state.status) if self._state.status else b""
        command, trouble = self._numbers["command"], self._numbers["trouble"]
        load = b". /dev/fd/%d && %seval " % (self._numbers["loading"], self._builtin)
        # After the command, the dump ends this shell, so that no trap on EXIT runs. A state that is only looked at may kill nothing.
        end = b"{ %s=; \\trap - DEBUG EXIT; } >/dev/null 2>&1" % _POSIX
        return load + b'"$(</dev/fd/%d)%s" %d<&- %d>&-;%s;%s' % (command, status, command, trouble, self._dump("turn"), end)

    def loading(self) -> bytes:
        """Return the text that loads the state, in an order in which no part of it disturbs a later one."""
        state, do = self._state, self._builtin
        # Before functions are defined, every command is the one of bash. It knows the `(` of an array only after a plain `declare`.
        lines = [text for name, text in state.variables.items() if name != _POSIX]
        if not state.fresh and (gone := [name for name in _SET_AT_START if name not in state.variables]):
            lines.append(b"unset -v " + b" ".join(gone))
        lines.append(b"umask " + quoted(state.mask) if state.mask else b"")
        lines += [b"pushd -n %s >/dev/null" % quoted(each) for each in reversed(state.stack)]
        lines += [b"alias -- %s=%s" % (quoted(name), text) for name, text in state.aliases.items()]
        lines += [b"trap -- %s %s" % (text, name) for name, text in state.traps.items() if name not in (*_LATE_TRAPS, ON_EXIT)]
        lines += [b"trap -- %s EXIT" % self._exit_trap, b"set -- " + b" ".join(map(quoted, state.arguments)), b"shopt -s extglob"]
        errors, trouble = self._numbers["errors"], self._numbers["trouble"]
        lines += [b"exec 2>&%d %d>&- %d<&-" % (errors, errors, self._numbers["loading"]), b"{"]
        for name, (attributes, text) in state.functions.items():  # each by itself: one that cannot be read is no hindrance to the next
            lines.append(b"%seval %s" % (do, quoted(text)))
            if attributes != b"-f":
                lines.append(b"%sdeclare %s -- %s" % (do, attributes, quoted(name)))
        if _POSIX in state.variables:
            lines.append(do + state.variables[_POSIX])
        chosen = [(name, on) for name, on in state.options.items() if name not in (*_NEVER_SET, *_WITH_THE_COMMAND)]
        if chosen:
            lines.append(do + b"set" + b"".join(b" %so %s" % (b"-" if on else b"+", quoted(name)) for name, on in chosen))
        switches = {b"extglob": False, **state.switches}
        if not switches.get(_DEBUGGER, True):  # it is off, and switching it off would switch functrace and errtrace off
            del switches[_DEBUGGER]
        for flag, wanted in ((b"-u", False), (b"-s", True)):
            names = [name for name, on in switches.items() if on is wanted and not _is_derived(name)]
            if names:
                lines.append(b"%sshopt %s %s" % (do, flag, b" ".join(map(quoted, names))))
        lines.append(b"%sprintf '%%s\\0' %s >&%d" % (do, quoted(self.loaded), self._numbers["state"]))
        lines.append(b"} 2>&%d" % trouble)
        return b"\n".join(lines) + b"\n"

    def command(self, text: bytes) -> bytes:
        """Return the command, after what would show or spring while the state is loaded."""
        state, do = self._state, self._builtin
        head = [b"%sset -o %s" % (do, name) for name in _WITH_THE_COMMAND if state.options.get(name)]
        traps = [b"%strap -- %s %s" % (do, state.traps[name], name) for name in _LATE_TRAPS if name in state.traps]
        if traps:
            head.append(b"{ %s; } 2>/dev/null" % b"; ".join(traps))
        if head and state.status:
            head.append(b"{ (%sexit %d) && \\:; } 2>/dev/null" % (do, state.status))
        return b"; ".join(head) + (b"\n" if head else b"") + text

    def _dump(self, end: str) -> bytes:
        after = "builtin kill -KILL $$" if end == "turn" else 'builtin exit "${1%% *}"'
        values = {"KEY": self._key, "OUT": str(self._numbers["state"]), "END": f"{end}_{self._key}", "AFTER": after}
        values["WRITE"] = quoted(_filled(_WRITE, values).encode()).decode()
        return _filled(_DUMP, values).encode()


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Return a text with values in the place of their names, which stand between two @."""
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], template)


def read_state(data: bytes, key: str, before: ShellState, script: ShellScript) -> tuple[ShellState, bool, list[str]]:
    """Read what a shell has written. Return the state, whether the shell was ended by the command, and remarks. Raises `UnkeptState`."""
    try:
        return _read(data, key, before, script)
    except (ValueError, IndexError, StopIteration) as error:
        raise UnkeptState("something else was written to its descriptor") from error


def read_status(data: bytes, key: str) -> int | None:
    """Return the exit code that a shell has written with its state; None if it has not."""
    found = re.findall(rb"\x00%s\x00\d+\x00(\d{1,3}) " % key.encode(), data)
    return int(found[-1]) if found else None


def _read(data: bytes, key: str, before: ShellState, script: ShellScript) -> tuple[ShellState, bool, list[str]]:
    end = max(data.rfind(b"\0%s_%s\0" % (word, key.encode())) for word in (b"turn", b"exit"))
    start = data.rfind(b"\0%s\0" % key.encode(), 0, max(end, 0))
    if start < 0:
        raise UnkeptState("its shell left none, as after exec, a signal, exit with a new trap on EXIT, or for lack of processes")
    exited = data[end + 1 :].startswith(b"exit")
    before_that, _, hidden = data[:start].rpartition(b"\0")  # the function `builtin`
    traps = before_that.rpartition(b"\0")[2]
    fields = iter(data[start + 1 : end].split(b"\0"))
    next(fields)
    state = ShellState(before.directory, (), {})
    state.writer = int(next(fields))
    state.fresh = False
    status, in_function, options, switches, posix = next(fields).split(b" ", 4)
    state.status = int(status)
    for text in records(traps):  # trap -- 'COMMAND' NAME
        command, _, name = text.removeprefix(b"trap -- ").rpartition(b" ")
        if command not in (b"-", b""):  # in the mode of POSIX, all signals are listed
            state.traps[name] = command
    if script.is_ours(state.traps.get(ON_EXIT, b"")):
        del state.traps[ON_EXIT]
        if ON_EXIT in before.traps and not exited:  # otherwise it has run
            state.traps[ON_EXIT] = before.traps[ON_EXIT]
    for text in records(next(fields)):
        name, _, value = text.removeprefix(b"alias ").removeprefix(b"-- ").partition(b"=")
        state.aliases[name] = value
    on = options[1:].split(b":")
    state.options = {line.rpartition(b" ")[2]: line.rpartition(b" ")[2] in on for line in next(fields).splitlines()}
    on = switches[1:].split(b":")
    state.switches = {line.rpartition(b" ")[2]: line.rpartition(b" ")[2] in on for line in next(fields).splitlines()}
    state.mask = next(fields).strip()
    directory = next(fields).removesuffix(b"\n")
    if directory.startswith(b"/"):  # in one that is gone, bash may say ".."
        state.directory = directory
    state.stack = [next(fields) for _ in range(int(next(fields)))][1:]
    state.arguments = [next(fields) for _ in range(int(next(fields)))][1:]
    if in_function:  # these are the function's own
        state.arguments = before.arguments
    while line := next(fields):  # declare -fx NAME
        _, attributes, name = line.split(b" ", 2)
        state.functions[name] = (attributes, next(fields))
    if hidden:
        state.functions[b"builtin"] = (b"-f", hidden)
    if b"builtin" in state.functions and b"command" in state.functions:
        raise UnkeptState("its functions replace both builtin and command")
    state.variables, remarks = _variables(b"\0".join(fields), before, uncovered=bool(in_function), key=key.encode())
    if posix.startswith(b"="):
        flags = before.variables.get(_POSIX, b"declare -- ").split(b" ", 2)[1]
        state.variables[_POSIX] = b"declare %s %s=%s" % (flags, _POSIX, quoted(posix[1:]))
    return state, exited, remarks


def _variables(text: bytes, before: ShellState, *, uncovered: bool, key: bytes) -> tuple[dict[bytes, bytes], list[str]]:
    """Return the variables in the output of `declare -p`, by name, and remarks.

    If they were uncovered, the last of each name counts. It has the attribute t, with which global variables were marked. One without it
    is local and cannot be unset: then the global variable stays as it was before. References were uncovered first, and so had no mark.
    """
    found: dict[bytes, bytes] = {}
    references = set()
    for each in records(text):
        _, flags, rest = each.split(b" ", 2)
        name = rest.partition(b"=")[0]
        if name not in MADE_BY_BASH and key not in name:
            found[name] = each
            if b"n" in flags:
                references.add(name)
    if not uncovered:
        return found, []
    covered = []
    for name, each in list(found.items()):
        word, flags, rest = each.split(b" ", 2)
        if b"t" in flags:
            flags = flags.replace(b"t", b"")
            found[name] = b"%s %s %s" % (word, flags if flags != b"-" else b"--", rest)
            if found[name] != b"declare -- %s" % name:
                continue
            if name not in references:  # it was made by marking it
                del found[name]
                continue
        else:
            covered.append(readable(name))
        if name in before.variables:
            found[name] = before.variables[name]
        else:
            del found[name]
    if not covered:
        return found, []
    why = "exit was called in a function with read-only local variables, so global ones of that name are as before"
    return found, [f"{why}: {', '.join(covered[:MOST_NAMED])}"]


def _is_derived(switch: bytes) -> bool:
    """Return whether a switch of `shopt` follows from how bash was started, or from BASH_COMPAT."""
    return switch in (b"login_shell", b"restricted_shell") or (switch.startswith(b"compat") and switch[6:].isdigit())


def records(text: bytes) -> list[bytes]:
    """Split text that bash has written into its commands: at the ends of lines that are not quoted."""
    return [found[0] for found in _RECORD.finditer(text)]


def quoted(value: bytes) -> bytes:
    """Quote a value for bash."""
    return b"'" + value.replace(b"'", b"'\\''") + b"'"


def readable(value: bytes) -> str:
    """Return bytes as text to be shown."""
    return value.decode("utf-8", "backslashreplace")


def _kind(flags: bytes) -> str:
    """Return the kind of a variable in words, from the attributes that `declare` shows."""
    kinds = ((b"A", "associative array"), (b"a", "array"), (b"n", "reference"), (b"i", "integer"))
    kind = next((words for letter, words in kinds if letter in flags), "string")
    return kind + (", exported" if b"x" in flags else "") + (", read-only" if b"r" in flags else "")
