"""Follow three actions through our code and print how long the way is.

Each action runs in an interpreter of its own, with a project and a state directory that are removed afterwards. A profiler counts, of the
files below src/agent_sandbox:

- files: those with a function that was called;
- functions: distinct functions, methods and lambdas that were called. Module and class bodies are not functions, nor are comprehensions;
  a function that is called only while a module is imported does not count;
- depth: our functions on the stack when the `launch` of a runtime is entered, `launch` included; the greatest, if there are several.

Only the process itself is followed, not those that it forks or starts. All of its threads are, so that the numbers of `execute` vary by one
or two: a pool makes the next guest beside it.

Usage: python -m scripts.walk [--verbose] [--limit ACTION[.COLUMN]=NUMBER]... [ACTION...]
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
OURS = f"{CHECKOUT}/src/agent_sandbox/"
RUNTIMES = f"{OURS}runtime/"
COLUMNS = ("files", "functions", "depth")
PLACE = "/var/tmp"  # not /tmp: a sandbox has one of its own, and would not show the project
COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})  # calls before Python 3.12 only
CHILD = "import sys; sys.path[:0] = {path!r}; from scripts.walk import follow; follow({step!r}, {report!r})"
FILE = "greeting.txt"


class Call(NamedTuple):
    """The first call of a function: where it is defined, and how many of our functions were on the stack, itself included."""

    file: str
    line: int
    name: str
    depth: int


class Walk(NamedTuple):
    """One action, followed: the functions in the order of their first calls, and the deepest stack of a launch; empty without any."""

    calls: list[Call]
    launch: list[str]

    def number(self, column: str) -> int | None:
        """Return the number in one column of the table."""
        match column:
            case "files":
                return len({call.file for call in self.calls})
            case "functions":
                return len(self.calls)
            case _:
                return len(self.launch) or None


class Profiler:
    """A profile function for `sys.setprofile` that notes first calls and launches."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int, str], int] = {}
        self.launch: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS) or not is_function(code):
            return
        key = (code.co_filename, code.co_firstlineno, code.co_qualname)
        is_launch = code.co_name == "launch" and code.co_filename.startswith(RUNTIMES)
        if (key in self.calls and not is_launch) or (stack := stack_of(frame)) is None:
            return
        self.calls.setdefault(key, len(stack))
        if is_launch and len(stack) > len(self.launch):
            self.launch = [shown(code.co_filename, code.co_firstlineno, code.co_qualname) for code in reversed(stack)]


def is_function(code: CodeType) -> bool:
    """Whether this is the code of a function, and not of a module, a class or a comprehension."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in COMPREHENSIONS


def stack_of(frame: FrameType) -> list[CodeType] | None:
    """Return our functions on the stack, the innermost first, or None while one of our modules is being imported."""
    stack = []
    step: FrameType | None = frame
    while step is not None:
        code = step.f_code
        if code.co_filename.startswith(OURS):
            if code.co_name == "<module>":
                return None
            if is_function(code):
                stack.append(code)
        step = step.f_back
    return stack


def shown(file: str, line: int, name: str) -> str:
    """Return a function as it is printed."""
    return f"{file.removeprefix(OURS)}:{line} {name}"


def command(*line: str) -> None:
    """Run a command line of `agent-sandbox`. Raises SystemExit when it fails."""
    from agent_sandbox.cli.main import main

    if code := main(line):
        raise SystemExit(code)


def execute() -> None:
    """Run a line of Python in the SDK's sandbox. Raises SystemExit when it fails."""
    from agent_sandbox import Sandbox

    result = Sandbox().execute("print(1)")
    if not result.success:
        raise SystemExit(f"it failed: {result}")


def promote() -> None:
    """Promote the change of a file that a run has made. Raises SystemExit when it fails."""
    command("promote", "--yes")
    if Path(FILE).read_text() != "changed\n":
        raise SystemExit("nothing was promoted")


STEPS: dict[str, Callable[[], None]] = {
    "run": lambda: command("run", "--", "true"),
    "execute": execute,
    "change": lambda: command("run", "--", "sh", "-c", f"echo changed > {FILE}"),
    "promote": promote,
}
ACTIONS = {"run": ("run",), "execute": ("execute",), "promote": ("change", "promote")}  # its steps; the last is counted


def follow(step: str, report: str) -> None:
    """Carry out a step in this process, which was started for it, and write its calls to a file."""
    profiler = Profiler()
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        STEPS[step]()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    with open(report, "w", encoding="utf-8") as file:
        json.dump({"calls": [(*key, depth) for key, depth in profiler.calls.items()], "launch": profiler.launch}, file)


def walk(action: str) -> Walk:
    """Follow an action in a fresh interpreter, project and state directory. Raises SystemExit when it fails."""
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-walk-", dir=PLACE) as scratch:
        project, report = Path(scratch, "project"), Path(scratch, "report.json")
        (project / ".git").mkdir(parents=True)
        (project / FILE).write_text("hello\n")
        for step in ACTIONS[action]:
            code = CHILD.format(path=[str(CHECKOUT), str(CHECKOUT / "src")], step=step, report=str(report))
            child, environment = [sys.executable, "-I", "-c", code], environment_in(scratch)
            done = subprocess.run(child, cwd=project, env=environment, input="", capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"walk: {step} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
        found = json.loads(report.read_text(encoding="utf-8"))
    return Walk([Call(*call) for call in found["calls"]], found["launch"])


def environment_in(scratch: str) -> dict[str, str]:
    """Return our environment with the state, and everything else that is kept or configured, below this directory."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_SANDBOX_")}
    places = {f"XDG_{kind}_HOME": f"{scratch}/{kind.lower()}" for kind in ("DATA", "CACHE", "CONFIG")}
    return {**own, **places, "AGENT_SANDBOX_STATE": f"{scratch}/state", "AGENT_SANDBOX_NO_BACKGROUND": "1"}


def exceeded(walks: dict[str, Walk], limits: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    """Return a line for each limit that an action exceeds, or that nothing was measured for."""
    for action, column, limit in limits:
        number = walks[action].number(column) if action in walks else None
        if number is None:
            yield f"{action}: {column} was not measured, and may not be more than {limit}"
        elif number > limit:
            yield f"{action}: {number} {column}, more than {limit}"


def parse_limit(text: str) -> tuple[str, str, int]:
    """Parse `run=60` (files) or `run.depth=8`. Raises ArgumentTypeError."""
    name, _, number = text.partition("=")
    action, _, column = name.partition(".")
    if action not in ACTIONS or (column or "files") not in COLUMNS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not ACTION[.COLUMN]=NUMBER, as in run=60 or run.depth=8")
    return action, column or "files", int(number)


def show(walks: dict[str, Walk], *, verbose: bool) -> None:
    """Print the table; before it, if `verbose`, the calls of each action and the stack of its launch."""
    for action, each in walks.items() if verbose else ():
        print(f"{action}:")
        for call in each.calls:
            print(f"{call.depth:4}  {shown(call.file, call.line, call.name)}")
        print(f"\n{action}, the stack at the launch:" if each.launch else "")
        for depth, function in enumerate(each.launch, start=1):
            print(f"{depth:4}  {function}")
        print()
    print(f"{'action':<10}", *(f"{column:>10}" for column in COLUMNS))
    for action, each in walks.items():
        numbers = (each.number(column) for column in COLUMNS)
        print(f"{action:<10}", *(f"{'-' if number is None else number:>10}" for number in numbers))


def main() -> int:
    """Follow the actions, print the table, and return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description="count the files and functions of ours that an action passes through")
    parser.add_argument("actions", nargs="*", metavar="ACTION", help=f"{', '.join(ACTIONS)} (default: all)")
    parser.add_argument("--verbose", action="store_true", help="list functions in order of first call, with depth")
    limit = "fail above this number, of files unless a column is named (files, functions, depth)"
    parser.add_argument("--limit", type=parse_limit, action="append", default=[], metavar="ACTION[.COLUMN]=NUMBER", help=limit)
    arguments = parser.parse_args()
    if unknown := set(arguments.actions) - set(ACTIONS):
        parser.error(f"unknown action: {', '.join(sorted(unknown))}")
    walks = {action: walk(action) for action in ACTIONS if action in (arguments.actions or ACTIONS)}
    show(walks, verbose=arguments.verbose)
    lines = [*exceeded(walks, arguments.limit)]
    for line in lines:
        print(f"walk: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
