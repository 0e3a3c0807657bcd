"""Analyse a command line: go through it in order, track its variables, and record the programs it starts and their effects.

`understand` is the entry point. It never raises, and its time is bounded by the length of the text: steps are counted, and anything
beyond their limit is reported as unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from agent_sandbox.readers.shell.effects import Effect, EffectKind, Understanding, Use, on_path
from agent_sandbox.readers.shell.expansion import Field, expand, hides_command, is_command, joined, loads, printed, printed_by
from agent_sandbox.readers.shell.parser import parse
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
    executed_by_find,
    shell_script,
    unwrap,
    unwrap_env,
)

_STEPS = 2000  # commands and program starts
_DEEPEST = 24  # scripts in scripts, functions in functions, wrappers in wrappers
_ROUNDS = 8  # iterations of a loop over known words
_MOST_UNKNOWN = 16
_LONGEST_VALUE = 4096  # of a variable: `x=$x$x` doubles it each time
_DECLARES = frozenset({"export", "declare", "typeset", "local", "readonly"})
# Builtins that evaluate their arguments as numbers or variable names.
_COMPUTES = _DECLARES | {"let", "test", "[", "unset", "read", "mapfile", "readarray", "wait"}


def understand(text: str, *, effects: bool = True, goes_on: bool = False) -> Understanding:
    """Return the tools and effects of a command line, as bash would read it. `effects=False` skips the effects of known tools.

    `goes_on` says that later command lines run in the same shell. Functions and aliases are then read where they are defined, and named as
    unknown: a later line that uses them is read without this one.
    """
    reading = _Reading(effects, goes_on)
    try:
        reading.script(text)
    except Unreadable as error:
        return Understanding(unreadable=str(error))
    except RecursionError:  # the parser's own bounds prevent this, unless the caller leaves it little stack
        return Understanding(unreadable="it is nested too deep")
    return reading.result()


def understand_argv(argv: Sequence[str], *, effects: bool = True) -> Understanding:
    """Return the tools and effects of a program with its arguments, started without a shell."""
    reading = _Reading(effects)
    reading.start([Field(word) for word in argv], piped=None, redirections=())
    return reading.result()


class _Reading:
    def __init__(self, effects: bool, goes_on: bool = False) -> None:
        self._effects = effects
        self._goes_on = goes_on
        self._uses: dict[Use, None] = {}
        self._unknown: dict[str, None] = {}
        self._variables: dict[str, str | None] = {}
        self._functions: dict[str, Program] = {}
        self._calling: set[int] = set()  # ids of the function bodies being walked
        self._aliases: dict[str, str] = {}
        self._steps = 0
        self._depth = 0

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
        """Analyse the pipelines of a program, in order."""
        for pipeline in program:
            self._pipeline(pipeline)

    def _pipeline(self, pipeline: Pipeline) -> None:
        for index, command in enumerate(pipeline.commands):
            self._steps += 1
            if self._steps > _STEPS or self._depth > _DEEPEST:
                self._miss("it goes on for longer than is read")
                return
            before = pipeline.commands[:index] or None
            self._depth += 1
            self._command(command, before)
            self._depth -= 1

    def _command(self, command: Command, before: tuple[Command, ...] | None) -> None:
        match command:
            case Simple():
                self._simple(command, before)
            case FunctionDefinition(name=name, body=body):
                self._functions[name] = body
                if self._goes_on:
                    self._miss(f"later commands may call the function {name}")
                    self._optional_bodies((body,))
            case Compound(bodies=bodies, words=words, redirections=redirections):
                self._substituted(words)
                self._computed(field for word in words for field in self._expanded(word))
                self._redirected(redirections)
                self._optional_bodies(bodies)
            case _:
                self._redirected(command.redirections)
                self._loop(command)

    def _optional_bodies(self, bodies: Sequence[Program]) -> None:
        """Analyse the bodies of an `if`, a loop or the like, which may not run. Variables that they change are unknown afterwards."""
        for body in bodies:
            before = dict(self._variables)
            self.program(body)
            changed = {name for name, value in self._variables.items() if before.get(name, "\0") != value}
            self._variables.update(dict.fromkeys(changed))

    def _loop(self, loop: ForLoop) -> None:
        words = loop.words or ()
        self._substituted(words)
        fields = [field for word in words for field in self._expanded(word)]
        few = 0 < len(fields) <= _ROUNDS
        for value in [field.text if not field.pattern else None for field in fields] if few else [None]:
            self._variables[loop.name] = value
            self._optional_bodies((loop.body,))
        self._variables[loop.name] = None

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
                self.program(part.program)
            elif isinstance(part, Variable | Arithmetic):
                waiting += part.nested
                if isinstance(part, Variable) and part.rest.endswith("@P"):
                    self._miss(f"it expands what is in ${part.name} as a prompt, with the commands in it")

    def _simple(self, command: Simple, before: tuple[Command, ...] | None) -> None:
        self._substituted([*(word for _, word in command.assignments), *command.words])
        self._redirected(command.redirections)
        for name, word in command.assignments:
            shown = " ".join(field.shown for field in self._expanded(word))
            self._set(name.removesuffix("+"), Field(shown, self._value(word) is not None))
        if command.words:
            fields = [field for word in command.words for field in self._expanded(word)]
            self.start(fields, piped=before, redirections=command.redirections)
        else:
            for name, word in command.assignments:
                self._assign(name, self._value(word))

    def _set(self, name: str, value: Field) -> None:
        """Record the code in the value of an environment variable, if later programs would run or load it."""
        if is_command(name, value.shown):
            self._inner_script(value, f"{name}=")
        elif loads(name, value):
            self._note(f"{name}=", [value], [Effect(EffectKind.RUNS_CODE, name)], builtin=True)

    def _computed(self, fields: Iterable[Field]) -> None:
        if any(hides_command(each.shown) for each in fields):
            self._miss("it computes with a text that has a command in it")

    def _assign(self, name: str, value: str | None) -> None:
        self._computed([Field(value or "")])
        plain = name.removesuffix("+")
        earlier = self._variables.get(plain) if name.endswith("+") else ""
        known = None if value is None or earlier is None else earlier + value
        self._variables[plain] = None if known is None or len(known) > _LONGEST_VALUE else known

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

    def start(self, fields: Sequence[Field], *, piped: tuple[Command, ...] | None, redirections: Sequence[Redirection]) -> None:
        """Record the program that these fields start and, if it is a wrapper such as `sudo`, the program that it starts in turn.

        `piped` are the commands before it in its pipeline; None if there are none.
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
        self._named(name, list(rest), piped, redirections)
        self._depth -= 1

    def _named(self, name: str, rest: list[Field], piped: tuple[Command, ...] | None, redirections: Sequence[Redirection]) -> None:
        if name in self._aliases:
            text = self._aliases.pop(name)  # removed meanwhile: an alias may begin with its own name
            self._inner_script(Field(" ".join([text, *(_quoted(each) for each in rest)]), all(each.known for each in rest)), name)
            self._named(name, rest, piped, redirections)  # scripts ignore aliases unless told otherwise
            self._aliases[name] = text
        elif name in self._functions:
            self._call(name, rest)
        elif name in BUILTINS and name not in WRAPPERS:
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
            self._inside(tool, inner.command, inner.scripts, piped, redirections)
        elif wrapper is not None:
            inner = unwrap(tool, wrapper, rest)
            self._note(tool, rest, wrapper.effects, builtin=wrapper.builtin)
            self._inside(tool, inner.command, inner.scripts, piped, redirections)
        elif tool in SHELLS:
            self._shell(tool, rest, piped, redirections)
        elif tool in RUNNERS and rest and rest[0].text in RUNNERS[tool]:
            self._note(tool, rest, [Effect(EffectKind.RUNS_CODE, f"{tool} {rest[0].shown}")])
            self.start([each for each in rest[1:] if each.shown != "--"], piped=piped, redirections=redirections)
        else:
            self._known(tool, rest)
            if tool in ("find", "fd", "fdfind"):
                for command in executed_by_find(rest):
                    self.start(command, piped=None, redirections=())

    def _inside(
        self,
        of: str,
        command: Sequence[Field],
        scripts: Sequence[Field],
        piped: tuple[Command, ...] | None,
        redirections: Sequence[Redirection],
    ) -> None:
        for script in scripts:
            self._inner_script(script, of)
        self.start(command, piped=piped, redirections=redirections)

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
            self._inner_script(script, tool)
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
        self._inner_script(Field(text or "", text is not None), tool)

    def _input(self, piped: tuple[Command, ...] | None, redirections: Sequence[Redirection]) -> str | None:
        """Return the text that a program reads as standard input; None if the command line does not reveal it."""
        for each in redirections:
            if each.operator.startswith("<<"):
                return self._value(each.word)
        return printed_by(piped, self._variables) if piped and not any(each.operator == "<" for each in redirections) else None

    def _fed(self, tool: str, files: Sequence[Field]) -> None:
        """Record a script file as unknown if its name is unknown, or if it is below /dev or /proc, where its text cannot be read."""
        if any(not each.known or each.shown.startswith(("/dev/", "/proc/")) for each in files):
            self._miss(f"{tool} runs what it is fed")

    def _call(self, name: str, rest: Sequence[Field]) -> None:
        """Analyse the body of a function with these arguments as `$1` and so on. A recursive call is skipped."""
        body = self._functions[name]
        if id(body) in self._calling:  # not its name: a function may define another of the same name
            return
        self._calling.add(id(body))
        before = {number: self._variables.get(number) for number in (*map(str, range(1, 10)), "@", "*")}
        self._set_arguments(rest)
        self.program(body)
        self._variables.update(before)
        self._calling.discard(id(body))

    def _set_arguments(self, fields: Sequence[Field]) -> None:
        """Set `$1` to `$9`, `$@` and `$*`."""
        for number in range(1, 10):
            self._variables[str(number)] = fields[number - 1].text if number <= len(fields) else ""
        everything = " ".join(each.shown for each in fields) if all(each.known for each in fields) else None
        self._variables["@"] = self._variables["*"] = everything

    def _builtin(self, name: str, rest: list[Field]) -> None:
        """Record the effects of a shell builtin with these arguments, and the variables that it changes."""
        if name in _COMPUTES:
            self._computed(rest)
        callback = next((at for at, each in enumerate(rest[:-1]) if each.shown == "-C"), None)
        if callback is not None and name in ("compgen", "mapfile", "readarray"):
            self._inner_script(rest[callback + 1], name)
        if name == "eval":
            self._note(name, rest, [Effect(EffectKind.RUNS_CODE, "eval")], builtin=True)
            self._inner_script(Field(" ".join(each.shown for each in rest), all(each.known for each in rest)), name)
        elif name in ("source", "."):
            self._note(name, rest, [Effect(EffectKind.RUNS_CODE, each.shown) for each in rest[:1]], builtin=True)
            self._fed(name, rest[:1])
        elif name == "trap" and len(rest) > 1 and not rest[0].shown.startswith("-"):
            self._inner_script(rest[0], name)
        elif name == "kill":
            self._note(name, rest, [Effect(EffectKind.PROCESSES)] if not any(each.shown == "-l" for each in rest) else (), builtin=True)
        elif name == "hash" and len(rest) == 3 and rest[0].shown == "-p":
            self._aliases[rest[2].shown] = _quoted(rest[1])
        elif name == "enable" and any(each.shown.startswith("-f") for each in rest):
            self._note(name, rest, [Effect(EffectKind.RUNS_CODE, "enable -f")], builtin=True)
        elif name in _DECLARES and any(each.shown.startswith("-") and "n" in each.shown for each in rest) and name != "export":
            self._miss(f"{name} gives a variable another name")
        elif name in _DECLARES or name == "alias":
            for each in rest:
                variable, equals, value = each.shown.partition("=")
                if equals and name != "alias":
                    self._set(variable, Field(value, each.known))
                if equals and name == "alias":
                    if self._goes_on:
                        self._miss(f"later commands may use the alias {variable}")
                        self._inner_script(Field(value, each.known), name)
                    self._aliases[variable] = value
                elif equals and variable.removesuffix("+").isidentifier():
                    self._assign(variable, value if each.known else None)
        elif name == "set" and any(each.shown == "--" or not each.shown.startswith(("-", "+")) for each in rest):
            start = next((at for at, each in enumerate(rest) if each.shown == "--"), -1)
            self._set_arguments(rest[start + 1 :] if start >= 0 else [Field("…", known=False)] * 9)
        elif name == "shift":
            self._set_arguments([Field("…", known=False)] * 9)
        elif name in ("read", "mapfile", "readarray", "unset", "getopts"):
            self._variables.update(dict.fromkeys(each.shown for each in rest if each.shown.isidentifier()))


def _quoted(field: Field) -> str:
    return "'" + field.shown.replace("'", "'\\''") + "'"
