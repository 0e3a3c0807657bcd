"""Analyse a command line: go through it in order, track its variables, and record the programs it starts and their effects.

`understand` is the entry point. It never raises, and its time is bounded by the length of the text: steps are counted, and anything
beyond their limit is reported as unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from agent_sandbox.readers.shell.effects import Effect, EffectKind, Understanding, Use, on_path
from agent_sandbox.readers.shell.expansion import (
    Field,
    document_of,
    expand,
    hides_command,
    holds_command,
    is_command,
    joined,
    loads,
    printed,
    printed_by,
)
from agent_sandbox.readers.shell.parser import parse
from agent_sandbox.readers.shell.state import Bodies, LineState, either
from agent_sandbox.readers.shell.syntax import (
    Arithmetic,
    Command,
    Compound,
    ForLoop,
    FunctionDefinition,
    Part,
    Pipeline,
    Program,
    Redirection,
    Simple,
    Substitution,
    Unreadable,
    Variable,
    Word,
)
from agent_sandbox.readers.shell.tools import effects_of
from agent_sandbox.readers.shell.wrappers import (
    BUILTINS,
    LOADERS,
    RUNNERS,
    SHELLS,
    WRAPPERS,
    Inner,
    executed_by_find,
    shell_script,
    unwrap,
    unwrap_env,
)

_STEPS = 2000  # commands and program starts
_DEEPEST = 24  # scripts in scripts, functions in functions, wrappers in wrappers
_ROUNDS = 8  # iterations of a loop over known words
_AGAIN = 6  # times that a body is read again, because it changes what its next iteration does
_MOST_UNKNOWN = 16
_DECLARES = frozenset({"export", "declare", "typeset", "local", "readonly"})
# Builtins that evaluate their arguments as numbers or variable names.
_COMPUTES = _DECLARES | {"let", "test", "[", "unset", "read", "mapfile", "readarray", "wait", "printf", "getopts"}
_KEPT = frozenset(
    {":", ".", "eval", "exec", "export", "readonly", "set", "source", "trap", "unset"}
)  # keep assignments before them, in `sh`
_PLAIN_OPTIONS = frozenset("-gxraApfFI")  # of `declare`, with which a value is the one that is assigned
_NOT_FOUND = "command_not_found_handle"  # the function that is called for a program that does not exist


def understand(text: str, *, effects: bool = True, goes_on: bool = False) -> Understanding:
    """Return the tools and effects of a command line, as bash would read it. `effects=False` skips the effects of known tools.

    `goes_on` says that later command lines run in the same shell. Functions and aliases are then read where they are defined, and named as
    unknown: a later line that uses them is read without this one.
    """
    reading = _Reading(effects, goes_on)
    try:
        reading.script(text)
        reading.end()
    except Unreadable as error:
        return Understanding(unreadable=str(error))
    except RecursionError:  # the parser's own bounds prevent this, unless the caller leaves it little stack
        return Understanding(unreadable="it is nested too deep")
    return reading.result()


def understand_argv(argv: Sequence[str], *, effects: bool = True) -> Understanding:
    """Return the tools and effects of a program with its arguments, started without a shell."""
    reading = _Reading(effects)
    reading.start([Field(word) for word in argv], piped=None, redirections=(), direct=False)
    reading.end()
    return reading.result()


class _Reading:
    def __init__(self, effects: bool, goes_on: bool = False) -> None:
        self._effects = effects
        self._goes_on = goes_on
        self._uses: dict[Use, None] = {}
        self._unknown: dict[str, None] = {}
        self._state = LineState()
        self._defined: dict[str, Bodies] = {}  # every function there ever was
        self._calling: dict[int, list[LineState]] = {}  # the function bodies being walked, with the states in which they began
        self._local: list[set[str]] = []  # the variables of each function being walked
        self._aliases: dict[str, tuple[str, ...]] = {}  # every text that a name ever stood for
        self._traps: dict[Field, None] = {}
        self._steps = 0
        self._depth = 0

    @property
    def _variables(self) -> dict[str, str | None]:
        return self._state.variables

    def end(self) -> None:
        """Analyse what is run at an unknown time: by then, variables and functions may be any."""
        self._state = LineState({}, {name: either(bodies, (None,)) for name, bodies in self._defined.items()})
        for script in self._traps:
            self._inner_script(script, "trap")
        self._optional_bodies([body for body in self._defined.get(_NOT_FOUND, ()) if body is not None])

    def result(self) -> Understanding:
        """Return everything that was recorded."""
        return Understanding(tuple(self._uses), tuple(self._unknown)[:_MOST_UNKNOWN])

    def script(self, text: str) -> None:
        """Parse a command line, and record its programs and effects. Raises `Unreadable`."""
        self.program(parse(text))

    def _inner_script(self, field: Field, of: str) -> None:
        """Analyse the command line that the program `of` runs; record it as unknown if its text is unknown or unreadable."""
        if field.text is None:
            self._miss(f"{of} runs a command line that it computes")
            return
        try:
            self.script(field.text)
        except Unreadable as error:
            self._miss(f"{of} runs a text that is no command line: {error}")

    def _miss(self, what: str) -> None:
        self._unknown.setdefault(what[:200])

    def _note(self, tool: str, arguments: Sequence[Field], effects: Sequence[Effect], *, builtin: bool = False) -> None:
        self._uses.setdefault(Use(tool, tuple(each.shown for each in arguments), tuple(effects), builtin))

    def program(self, program: Program) -> None:
        """Analyse the pipelines of a program, in order. Those behind `&&` and `||` may not run."""
        at = 0
        while at < len(program):
            self._pipeline(program[at])
            at += 1
            if at < len(program) and program[at].joined:
                at = self._joined(program, at)

    def _joined(self, program: Program, at: int) -> int:
        """Analyse the pipelines from this place on that `&&` and `||` join to the one before them; return where they end."""
        first, doubtful = self._state.copy(), False
        while at < len(program) and program[at].joined:
            doubtful = doubtful or program[at].joined == "||"
            if doubtful:  # what stands between may not have been done; behind && alone, it has
                self._state.doubt(first)
            self._pipeline(program[at])
            at += 1
        self._state.doubt(first)
        return at

    def _pipeline(self, pipeline: Pipeline) -> None:
        apart = len(pipeline.commands) > 1 or pipeline.background
        for index, command in enumerate(pipeline.commands):
            self._steps += 1
            if self._steps > _STEPS or self._depth > _DEEPEST:
                self._miss("it goes on for longer than is read")
                return
            before = pipeline.commands[:index] or None
            earlier = self._state.copy() if apart else None
            self._depth += 1
            self._command(command, before)
            self._depth -= 1
            if earlier is not None:  # it is another process; or not, with some options of the shell
                self._state.doubt(earlier)

    def _command(self, command: Command, piped: tuple[Command, ...] | None) -> None:
        match command:
            case Simple():
                self._simple(command, piped)
            case FunctionDefinition(name=name, body=body):
                self._state.functions[name] = (body,)
                self._defined[name] = either(self._defined.get(name, ()), (body,))
                if self._goes_on:
                    self._miss(f"later commands may call the function {name}")
                    self._optional_bodies((body,))
            case Compound(kind=kind, bodies=bodies, words=words, redirections=redirections):
                self._substituted(words)
                self._computed(field for word in words for field in self._expanded(word))
                self._redirected(redirections)
                if kind in ("while", "until"):
                    self._repeated(bodies)
                elif kind == "(":  # another process
                    before = self._state.copy()
                    self._optional_bodies(bodies)
                    self._state.put_back(before)
                else:
                    self._optional_bodies(bodies)
            case _:
                self._redirected(command.redirections)
                self._loop(command)

    def _optional_bodies(self, bodies: Sequence[Program]) -> None:
        """Analyse the bodies of an `if`, a loop or the like, which may not run. What they change is unknown afterwards."""
        for body in bodies:
            before = self._state.copy()
            self.program(body)
            self._state.doubt(before)

    def _repeated(self, bodies: Sequence[Program]) -> None:
        """Analyse bodies that may run any number of times: again while an iteration changes what the next one does."""
        for _ in range(_AGAIN):
            before = self._state.copy()
            self._optional_bodies(bodies)
            if self._state.is_like(before):
                return
        self._miss("it is not clear what a loop does after many rounds")

    def _loop(self, loop: ForLoop) -> None:
        words = loop.words or ()
        self._substituted(words)
        fields = [field for word in words for field in self._expanded(word)]
        if loop.kind == "for" and 0 < len(fields) <= _ROUNDS:
            for value in [field.text if not field.pattern else None for field in fields]:
                before = self._state.copy()
                self._state.assign(loop.name, value)
                self.program(loop.body)
                self._state.doubt(before)
        else:
            self._state.forget(loop.name)
            self._repeated((loop.body,))
        self._state.forget(loop.name)

    def _expanded(self, word: Word) -> list[Field]:
        return expand(word, self._variables, lambda program: printed(program, self._variables))

    def _value(self, word: Word) -> str | None:
        return joined(word, self._variables, lambda program: printed(program, self._variables))

    def _substituted(self, words: Sequence[Word]) -> None:
        """Analyse the programs whose output is substituted into these words, as in `$(…)`."""
        waiting: deque[Part] = deque(part for word in words for part in word)
        while waiting:
            part = waiting.popleft()
            if isinstance(part, Substitution):
                before = self._state.copy()
                self.program(part.program)
                self._state.put_back(before)  # it was another process
            elif isinstance(part, Variable | Arithmetic):
                waiting += part.nested
                if isinstance(part, Variable) and part.rest.endswith("@P"):
                    self._miss(f"it expands what is in ${part.name} as a prompt, with the commands in it")
                if isinstance(part, Variable) and part.rest.startswith(("=", ":=")) and not self._variables.get(part.name):
                    self._state.forget(part.name)  # it is assigned where it has no value

    def _simple(self, command: Simple, piped: tuple[Command, ...] | None) -> None:
        self._substituted([*(word for _, word in command.assignments), *command.words])
        self._redirected(command.redirections)
        fields = [field for word in command.words for field in self._expanded(word)]
        before = self._state.copy() if command.assignments and command.words else None
        for name, word in command.assignments:  # each sees those before it
            value = self._value(word)
            self._set(name.rstrip("+["), Field(" ".join(field.shown for field in self._expanded(word)), value is not None))
            self._assign(name, value)
        assigned = dict(self._variables) if before is not None else {}
        self.start(fields, piped=piped, redirections=command.redirections)
        if before is None:
            return
        # The assignments are those of this command alone, but for some builtins in some modes.
        first = fields[0].text if fields else None
        kept = first is None or first in _KEPT or (first in BUILTINS and first in WRAPPERS)
        for name in {name.rstrip("+[") for name, _ in command.assignments}:
            if kept or self._variables.get(name) != assigned[name]:
                self._state.forget(name)
            elif name in before.variables:
                self._variables[name] = before.variables[name]
            else:
                del self._variables[name]

    def _set(self, name: str, value: Field) -> None:
        """Record the code in the value of an environment variable, if later programs would run or load it."""
        if is_command(name, value.shown):
            self._child(value, f"{name}=")
        elif loads(name, value):
            self._note(f"{name}=", [value], [Effect(EffectKind.RUNS_CODE, name)], builtin=True)

    def _computed(self, fields: Iterable[Field]) -> None:
        if any(hides_command(each.shown) for each in fields):
            self._miss("it computes with a text that has a command in it")

    def _assign(self, name: str, value: str | None) -> None:
        """Set a variable. Its name ends with `+` if the value is added, and with `[` if it is one of several."""
        self._computed([Field(value or "")])
        plain = name.rstrip("+[")
        if plain in ("BASH_ALIASES", "BASH_CMDS"):
            self._miss(f"{plain} gives a program another name")
        self._state.assign(plain, None if name.endswith("[") else value, add=name.endswith("+"))

    def _redirected(self, redirections: Sequence[Redirection]) -> None:
        for each in redirections:
            self._substituted([each.word])
            if each.operator.startswith("<<"):
                continue
            for field in self._expanded(each.word)[:1]:
                is_number = each.operator in (">&", "<&") and (field.shown.isdigit() or field.shown == "-")
                kind = EffectKind.READS if each.operator in ("<", "<&") else EffectKind.WRITES
                if not is_number and (effects := on_path(kind, field.shown)):
                    self._note(each.operator, [field], effects, builtin=True)

    def start(
        self,
        fields: Sequence[Field],
        *,
        piped: tuple[Command, ...] | None,
        redirections: Sequence[Redirection],
        direct: bool = True,
    ) -> None:
        """Record the program that these fields start and, if it is a wrapper such as `sudo`, the program that it starts in turn.

        `piped` are the commands before it in its pipeline; None if there are none. `direct` is whether the shell itself starts it, which
        looks among its functions first.
        """
        if not fields:
            return
        self._steps += 1
        if self._steps > _STEPS or self._depth > _DEEPEST:
            self._miss("it goes on for longer than is read")
            return
        name, rest = fields[0].text, fields[1:]
        if name is None or fields[0].pattern:
            self._miss(f"it starts a program whose name it computes: {fields[0].shown}")
            return
        self._depth += 1
        self._named(name, list(rest), piped, redirections, direct)
        self._depth -= 1

    def _named(
        self, name: str, rest: list[Field], piped: tuple[Command, ...] | None, redirections: Sequence[Redirection], direct: bool
    ) -> None:
        if name in self._aliases:
            texts = self._aliases.pop(name)  # removed meanwhile: an alias may begin with its own name
            before = self._state.copy()
            for text in texts:
                self._inner_script(Field(" ".join([text, *(_quoted(each) for each in rest)]), all(each.known for each in rest)), name)
            self._state.doubt(before)
            self._named(name, rest, piped, redirections, direct)  # scripts ignore aliases unless told otherwise
            self._aliases[name] = texts
            return
        bodies = self._state.functions.get(name, (None,)) if direct else (None,)
        earlier = self._state.copy() if len(bodies) > 1 else None
        for body in bodies:
            if body is None:
                self._itself(name, rest, piped, redirections)
            else:
                self._call(body, rest)
            if earlier is not None:
                self._state.doubt(earlier)

    def _itself(self, name: str, rest: list[Field], piped: tuple[Command, ...] | None, redirections: Sequence[Redirection]) -> None:
        """Record a builtin or a program, which no function stands before."""
        if name in BUILTINS and name not in WRAPPERS:
            self._builtin(name, rest)
        else:
            self._tool(name, rest, piped, redirections)

    def _tool(self, name: str, rest: list[Field], piped: tuple[Command, ...] | None, redirections: Sequence[Redirection]) -> None:
        tool = name.rpartition("/")[2] if name.startswith(("/bin/", "/usr/", "/sbin/", "/opt/", "/lib")) else name
        wrapper = WRAPPERS.get("ld.so" if tool.startswith(LOADERS) else tool)
        if tool == "env":
            inner = unwrap_env(rest)
            self._note(tool, rest, ())
            for name, equals, value in (each.shown.partition("=") for each in rest):
                if equals and name.isidentifier():
                    self._set(name, Field(value, "…" not in value))
            self._inside(tool, inner, piped, redirections)
        elif wrapper is not None:
            inner = unwrap(tool, wrapper, rest)
            self._note(tool, rest, wrapper.effects, builtin=wrapper.builtin)
            self._inside(tool, inner, piped, redirections, here=wrapper.builtin)
        elif tool in SHELLS:
            self._shell(tool, rest, piped, redirections)
        elif tool in RUNNERS and rest and rest[0].text in RUNNERS[tool]:
            self._note(tool, rest, [Effect(EffectKind.RUNS_CODE, f"{tool} {rest[0].shown}")])
            self.start([each for each in rest[1:] if each.shown != "--"], piped=piped, redirections=redirections, direct=False)
        else:
            self._known(tool, rest)
            if tool in ("find", "fd", "fdfind"):
                for command in executed_by_find(rest):
                    self.start(command, piped=None, redirections=(), direct=False)

    def _inside(
        self,
        of: str,
        inner: Inner,
        piped: tuple[Command, ...] | None,
        redirections: Sequence[Redirection],
        *,
        here: bool = False,
    ) -> None:
        """Analyse what a wrapper starts; with `here`, the shell itself does it."""
        if inner.odd:
            self._miss(f"{of} has an option that is not known here: {inner.odd}")
        for script in inner.scripts:
            self._child(script, of)
        before = self._state.copy()
        self.start(inner.command, piped=piped, redirections=redirections, direct=False)
        if not here:
            self._state.put_back(before)

    def _child(self, script: Field, of: str) -> None:
        """Analyse the command line that another shell runs. It has those variables and functions that were exported, if any."""
        before = self._state.copy()
        self._state.variables = {}
        self._state.functions = {name: either(bodies, (None,)) for name, bodies in before.functions.items()}
        self._inner_script(script, of)
        self._state.put_back(before)

    def _known(self, tool: str, rest: Sequence[Field]) -> None:
        effects = effects_of(tool, rest) if self._effects else ()
        if effects is None:
            own = "/" in tool
            self._note(tool, rest, [Effect(EffectKind.RUNS_CODE, tool) if own else Effect(EffectKind.UNKNOWN, tool)])
        else:
            self._note(tool, rest, effects)

    def _shell(self, tool: str, rest: list[Field], piped: tuple[Command, ...] | None, redirections: Sequence[Redirection]) -> None:
        script, file = shell_script(rest)
        if script is not None:
            self._note(tool, rest, () if script.known else [Effect(EffectKind.RUNS_CODE, script.shown)])
            self._child(script, tool)
            return
        if file is not None:
            self._note(tool, rest, [Effect(EffectKind.RUNS_CODE, file.shown)])
            self._fed(tool, [file])
            return
        if all(each.shown in ("--version", "--help") for each in rest) and rest:
            self._note(tool, rest, ())
            return
        text = self._input(piped, redirections)
        self._note(tool, rest, [Effect(EffectKind.RUNS_CODE, "standard input")])
        self._child(Field(text or "", text is not None), tool)

    def _input(self, piped: tuple[Command, ...] | None, redirections: Sequence[Redirection]) -> str | None:
        """Return the text that a program reads as standard input; None if the command line does not reveal it."""
        text = printed_by(piped, self._variables) if piped else None
        return document_of(redirections, text, self._variables, lambda program: printed(program, self._variables))

    def _fed(self, tool: str, files: Sequence[Field]) -> None:
        """Record a script file as unknown if its name is unknown, or if it is below /dev or /proc, where its text cannot be read."""
        if any(not each.known or each.shown.startswith(("/dev/", "/proc/")) for each in files):
            self._miss(f"{tool} runs what it is fed")

    def _call(self, body: Program, rest: Sequence[Field]) -> None:
        """Analyse the body of a function with these arguments as `$1` and so on.

        A call within itself is read again where it differs from those before it, with what differs unknown.
        """
        numbers = (*map(str, range(1, 10)), "@", "*")
        before = {number: self._variables.get(number) for number in numbers}
        self._set_arguments(rest)
        begun = self._calling.setdefault(id(body), [])  # not by its name: a function may define another of the same name
        if begun:
            self._state.doubt(begun[-1])
        if not any(self._state.is_like(each) for each in begun):
            begun.append(self._state.copy())
            self._local.append(set())
            self.program(body)
            self._state.forget(*self._local.pop())
            begun.pop()
        self._variables.update(before)

    def _set_arguments(self, fields: Sequence[Field]) -> None:
        """Set `$1` to `$9`, `$@` and `$*`."""
        for number in range(1, 10):
            self._variables[str(number)] = fields[number - 1].text if number <= len(fields) else ""
        plain = all(each.known and each.shown and not each.pattern and not set(each.shown) & set(" \t\n") for each in fields)
        everything = " ".join(each.shown for each in fields) if plain else None
        self._variables["@"] = self._variables["*"] = everything

    def _builtin(self, name: str, rest: list[Field]) -> None:
        """Record the effects of a shell builtin with these arguments, and the variables that it changes."""
        if name in _COMPUTES:
            self._computed(rest)
        callback = next((at for at, each in enumerate(rest[:-1]) if each.shown == "-C"), None)
        if callback is not None and name in ("compgen", "mapfile", "readarray"):
            before = self._state.copy()
            self._inner_script(rest[callback + 1], name)
            self._state.doubt(before)
        if name in ("eval", "trap", "source", ".") and rest and rest[0].shown == "--":
            rest = rest[1:]
        if name == "eval":
            self._note(name, rest, [Effect(EffectKind.RUNS_CODE, "eval")], builtin=True)
            self._inner_script(Field(" ".join(each.shown for each in rest), all(each.known for each in rest)), name)
        elif name in ("source", "."):
            self._note(name, rest, [Effect(EffectKind.RUNS_CODE, each.shown) for each in rest[:1]], builtin=True)
            self._fed(name, rest[:1])
            self._state.forget(*self._variables)
        elif name == "trap" and len(rest) > 1 and not rest[0].shown.startswith("-"):
            self._traps[rest[0]] = None
        elif name == "kill":
            self._note(name, rest, [Effect(EffectKind.PROCESSES)] if not any(each.shown == "-l" for each in rest) else (), builtin=True)
        elif name == "hash" and len(rest) == 3 and rest[0].shown == "-p":
            self._alias(rest[2].shown, _quoted(rest[1]))
        elif name == "enable" and any(each.shown.startswith("-f") for each in rest):
            self._note(name, rest, [Effect(EffectKind.RUNS_CODE, "enable -f")], builtin=True)
        elif name in _DECLARES and any(each.shown.startswith("-") and "n" in each.shown for each in rest) and name != "export":
            self._miss(f"{name} gives a variable another name")
        elif name == "compgen" and any(holds_command(each.shown) or not each.known or each.shown.startswith("-F") for each in rest):
            self._miss("compgen runs what makes its list")
        elif name == "printf" and rest and rest[0].shown.startswith("-v"):
            self._state.forget(*(each.shown.removeprefix("-v").partition("[")[0] for each in rest[:2]))
        elif name in _DECLARES or name == "alias":
            options = {letter for each in rest if each.shown.startswith(("-", "+")) for letter in each.shown[1:]}
            for each in rest:
                variable, equals, value = each.shown.partition("=")
                if equals and name != "alias":
                    self._set(variable, Field(value, each.known))
                if equals and name == "alias":
                    if self._goes_on:
                        self._miss(f"later commands may use the alias {variable}")
                        self._inner_script(Field(value, each.known), name)
                    self._alias(variable, value)
                elif name != "alias" and (plain := variable.removesuffix("+").partition("[")[0]).isidentifier():
                    if not options <= _PLAIN_OPTIONS:
                        self._state.odd.add(plain)
                    if name == "local" and not self._local:
                        self._state.forget(plain)  # it fails outside of a function
                    elif equals:
                        self._assign(plain + ("[" if "[" in variable else variable[len(plain) :]), value if each.known else None)
                    if self._local:
                        self._local[-1].add(plain)
                        if not equals:
                            self._state.forget(plain)
        elif name == "set" and any(each.shown == "--" or not each.shown.startswith(("-", "+")) for each in rest):
            start = next((at for at, each in enumerate(rest) if each.shown == "--"), -1)
            self._set_arguments(rest[start + 1 :] if start >= 0 else [Field("…", known=False)] * 9)
        elif name == "shift":
            self._set_arguments([Field("…", known=False)] * 9)
        elif name in ("read", "mapfile", "readarray", "unset", "getopts", "wait"):
            # An option and its name may be one word: `read -ra name` and `read -raname`.
            names = {each.shown.partition("[")[0][start:] for each in rest for start in range(8 if each.shown.startswith("-") else 1)}
            self._state.forget(*(each for each in names if each.isidentifier()))
            if name == "unset":
                if not all(each.known for each in rest):
                    self._state.functions = {each: either(bodies, (None,)) for each, bodies in self._state.functions.items()}
                for each in rest:
                    self._state.functions.pop(each.shown, None)

    def _alias(self, name: str, text: str) -> None:
        self._aliases[name] = tuple(dict.fromkeys((*self._aliases.get(name, ()), text)))


def _quoted(field: Field) -> str:
    return "'" + field.shown.replace("'", "'\\''") + "'"
