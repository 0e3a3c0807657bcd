"""The tools: each takes checked arguments and returns an answer. They run in a thread of their own, one at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_sandbox._calls import encoded
from agent_sandbox.assembly import here
from agent_sandbox.cli.commands.diff import DiffResult, by_kind, judged
from agent_sandbox.cli.commands.experiment import AttemptFacts, TryResult
from agent_sandbox.cli.commands.promote import PromoteResult
from agent_sandbox.cli.commands.sim import SimulationResult
from agent_sandbox.cli.commands.snapshots import RollbackResult, SandboxFacts, SnapshotResult, snapshot_facts
from agent_sandbox.cli.context import sort
from agent_sandbox.cli.elevation import elevation_of
from agent_sandbox.cli.execute import RunResult, code_of
from agent_sandbox.cli.options import CommandOptions, PromoteOptions
from agent_sandbox.cli.permission_options import ElevationOptions
from agent_sandbox.cli.render.changes import ContentFacts, ShownChange, choice_of
from agent_sandbox.cli.render.effects import closing, opening
from agent_sandbox.cli.render.messages import counted
from agent_sandbox.cli.render.protection import path_remarks
from agent_sandbox.cli.results import OMITTED, PathName
from agent_sandbox.engine.experiment.comparison import table
from agent_sandbox.engine.experiment.conduct import AttemptProgress
from agent_sandbox.engine.promote import Wanted
from agent_sandbox.engine.review import reviewed, unified_rows
from agent_sandbox.engine.work import Code, Command
from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.experiments import Experiment
from agent_sandbox.ledger.chain import entries
from agent_sandbox.ledger.export import document as ledger_document
from agent_sandbox.ledger.query import Filter, select
from agent_sandbox.mcp.answers import ToolAnswer, answer, bounded, cut, plain, plain_answer
from agent_sandbox.mcp.calls import ServedCall
from agent_sandbox.mcp.python_sessions import PythonSessions
from agent_sandbox.mcp.workspace import DEFAULT_SECONDS, ServedWorkspace
from agent_sandbox.policy.action import canonical_language
from agent_sandbox.policy.files.document import Document, from_mapping
from agent_sandbox.policy.model import MIB
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.timelines import PastVariable, lines_of
from agent_sandbox.workspace.changes import ChangeSet
from agent_sandbox.workspace.digests import PRINTED
from agent_sandbox.workspace.escape import visible

if TYPE_CHECKING:
    from agent_sandbox.policy.tokens import Token
    from agent_sandbox.result import SandboxResult
    from agent_sandbox.session import SandboxSession
    from agent_sandbox.workspace.experiment_store import AttemptState

LARGEST_FILE = 8 << 20  # bytes of a file that is read or edited
LONGEST_RESOURCE = 100_000  # characters
LEDGER_ENTRIES = 100
_STREAM = 7000  # characters of each of output, errors and value
_LISTED = 500  # entries of a directory
Arguments = Mapping[str, Any]


class Toolbox:
    """The tools of one server. `call` performs one; only one is performed at a time."""

    def __init__(self, options: CommandOptions, env: Mapping[str, str], tokens: Sequence[Token] = ()) -> None:
        """`options` are those of the server, `env` is the environment of what it runs, `tokens` are capabilities of a person."""
        self.workspace = ServedWorkspace(options, env, tokens)
        self._python = PythonSessions(self.workspace)
        self._rewound: dict[int, int] = {}  # the step before which each session is, until its next turn
        self._experiment: Experiment | None = None
        self._tools: dict[str, Callable[[Arguments], ToolAnswer]] = {
            "run": self._run,
            "simulate": self._simulate,
            "read": self._read,
            "list": self._list,
            "write": self._write,
            "edit": self._edit,
            "diff": self._diff,
            "snapshot": self._snapshot,
            "rollback": self._rollback,
            "try": self._try,
            "promote": self._promote,
            "intent": self._intent,
            "request": self._request,
            "python": self._turn,
            "inspect": self._inspect,
            "rewind": self._rewind,
            "fork": self._fork,
        }

    def perform(self, call: ServedCall) -> ToolAnswer:
        """Perform a call. Raises what the sandbox raises."""
        self.workspace.begin(call)
        narrow = call.arguments.get("narrow")
        call.narrow = None if narrow is None else narrowing(narrow)
        return self._tools[call.tool](call.arguments)

    def close(self) -> None:
        """End everything that runs, and take back all questions. The sandbox keeps its changes."""
        self.workspace.kill()
        self.workspace.questions.close()
        self._python.close()
        self._drop_experiment()
        self.workspace.close()

    def _drop_experiment(self) -> None:
        if self._experiment is not None:
            self._experiment.close()
            self._experiment = None

    # Running.

    def _run(self, given: Arguments) -> ToolAnswer:
        what, options = _work(given)
        return run_answer(self.workspace.perform(what, **options))

    def _simulate(self, given: Arguments) -> ToolAnswer:
        what, options = _work(given)
        project = self.workspace.project
        with self.workspace.simulating(what, **options) as simulation:
            plan = simulation.plan
            rows = [row.plain for row in opening(plan)]
            diff = unified_rows(simulation.changes, simulation.contents, _former(simulation), relative_to=project)
            rows += [row.plain for row in diff]
            rows += [row.plain for row in closing(plan, kept=False)]
            result = SimulationResult.of(plan, kept=False, exit=code_of(simulation.outcome.exit, []))
            return answer("\n".join(rows), result)

    # Files.

    def _read(self, given: Arguments) -> ToolAnswer:
        path = given["path"]
        content = self.workspace.files.read_bytes(path, max_bytes=LARGEST_FILE)
        facts: dict[str, Any] = {"path": path, "bytes": len(content)}
        if b"\0" in content[:8192]:
            return plain_answer(f"{visible(path)} is no text: {len(content):,} bytes", "file", {**facts, "text": None}, failed=True)
        lines = content.decode(errors="replace").split("\n")
        first = given.get("offset", 1)
        chosen = lines[first - 1 : first - 1 + given["limit"]] if "limit" in given else lines[first - 1 :]
        text = "\n".join(chosen)
        facts |= {"lines": len(lines), "first": first, "text": text}
        return plain_answer(text, "file", facts)

    def _list(self, given: Arguments) -> ToolAnswer:
        found = self.workspace.files.list(given.get("path", "."))
        marks = {"directory": "/", "link": "@"}
        names = [f"{visible(each.name)}{marks.get(each.kind, '')}" for each in found[:_LISTED]]
        names += [f"[{len(found) - _LISTED:,} more left out]"] if len(found) > _LISTED else []
        facts = [{"name": each.name, "kind": each.kind, "size": each.size, "target": each.target or None} for each in found]
        return plain_answer("\n".join(names) or "(empty)", "listing", {"path": given.get("path", "."), "entries": facts})

    def _write(self, given: Arguments) -> ToolAnswer:
        path, content = given["path"], encoded(given["content"])
        self.workspace.files.write(path, content)
        return plain_answer(f"wrote {len(content):,} bytes in the sandbox", "written", {"path": path, "bytes": len(content)})

    def _edit(self, given: Arguments) -> ToolAnswer:
        path, old, new = given["path"], given["old"], given["new"]
        text = self.workspace.files.read(path, errors="surrogateescape", max_bytes=LARGEST_FILE)
        times = text.count(old)
        if not times or (times > 1 and not given.get("all", False)):
            why = "old does not occur in the file" if not times else f"old occurs {times} times: give more of its surroundings, or all"
            return plain_answer(f"nothing was changed: {why}", "edited", {"path": path, "replaced": 0, "why": why}, failed=True)
        self.workspace.files.write(path, encoded(text.replace(old, new)))
        return plain_answer(f"replaced {counted(times, 'occurrence')} in the sandbox", "edited", {"path": path, "replaced": times})

    # Changes.

    def _diff(self, given: Arguments) -> ToolAnswer:
        if "attempt" in given:
            attempt = given["attempt"]
            text = self._conducted().diff(attempt)
            return plain_answer(text or "no changes in the project", "attempt-diff", {"attempt": attempt, "diff": text})
        result, text = self.pending(tuple(given.get("only", ())))
        return answer(text, result)

    def pending(self, only: tuple[str, ...]) -> tuple[DiffResult, str]:
        """Return the pending changes: as the result of `agent-sandbox diff` without content, and as a unified diff."""
        workspace = self.workspace
        project, policy, stored = workspace.project, workspace.current_policy(), workspace.stored
        wanted = Wanted(choice_of(only, project))
        with reviewed(stored, policy, wanted, here().process) as review:
            rows = unified_rows(review.selection, review.contents, review.former, relative_to=project, digests=review.digests)
            text = "\n".join([*(row.plain for row in rows), *(f"# {each}" for each in review.words)])
            found = sort(ChangeSet(tuple(each for each in review.everything if wanted.chosen(each))), project)
            protection = judged(ChangeSet(found.project), review, project, policy, wanted.progress)
            digest, why_not = review.digest()
        changes = (
            *(ShownChange(each, "project", ContentFacts()) for each in found.project),
            *(ShownChange(each, "elsewhere", ContentFacts()) for each in found.elsewhere),
            *(ShownChange(each, "noise", ContentFacts()) for each in found.noise),
        )
        result = DiffResult(
            PathName(project),
            workspace.id,
            changes,
            review.words,
            digest or OMITTED,
            why_not or OMITTED,
            by_kind(protection),
            path_remarks(protection.remarks),
        )
        elsewhere = len(found.elsewhere)
        notes = [f"# {counted(elsewhere, 'change')} outside the project, which promote leaves out"] if elsewhere else []
        notes += [f"# protected kind {name}: {counted(len(paths), 'file')}" for name, paths in protection.by_class().items()]
        notes += [f"# digest: {digest[:PRINTED]}"] if digest else []
        return result, "\n".join([text or "no changes in the project", *notes])

    def _snapshot(self, given: Arguments) -> ToolAnswer:
        made = snapshot_facts(self.workspace.snapshot(given.get("label", "")))
        return answer(f"saved as snapshot {made.name}", SnapshotResult(self._about(), made))

    def _rollback(self, given: Arguments) -> ToolAnswer:
        done = self.workspace.rollback(given.get("to"))
        to, kept = snapshot_facts(done.to), snapshot_facts(done.kept) if done.kept else None
        saved = f"; the state before is snapshot {kept.id}" if kept else ""
        return answer(f"the sandbox is back at snapshot {to.name}{saved}", RollbackResult(self._about(), to, kept))

    def _about(self) -> SandboxFacts:
        return SandboxFacts(PathName(self.workspace.project), self.workspace.id)

    def _try(self, given: Arguments) -> ToolAnswer:
        self._drop_experiment()
        workspace, call = self.workspace, self.workspace.call
        check = given.get("check")
        experiment = Experiment(
            workspace.project,
            check=None if check is None else _line(check),
            first=given.get("first", False),
            timeout=given.get("timeout_seconds", DEFAULT_SECONDS),
        )
        experiment._use(workspace.twin())
        self._experiment = experiment
        call.ends_by(experiment.cancel)
        for name, line in given["attempts"].items():
            experiment.attempt(name, _line(line))

        def tell(progress: AttemptProgress) -> None:
            call.last_line = f"{progress.name}: {progress.step}"

        done = experiment.run(on_progress=tell)
        facts = tuple(AttemptFacts.of(each, OMITTED) for each in done.results)
        result = TryResult(
            PathName(workspace.project), None, done.winner, round(done.seconds, 3), done.ended or None, facts, OMITTED, True, done.notes
        )
        failures = [f"{each.name}: {each.why}\n{plain(_end_of(each.check or each.run))}" for each in done.results if not each.passed]
        verdict = f"winner: {done.winner}" if done.winner is not None else "no attempt passed"
        return answer("\n".join([*table(done), verdict, *failures]), result)

    def _conducted(self) -> Experiment:
        if self._experiment is None:
            raise PolicyError("there is no experiment", hint="run one with the tool try")
        return self._experiment

    def _promote(self, given: Arguments) -> ToolAnswer:
        options = PromoteOptions(
            only=tuple(given.get("only", ())),
            skip=tuple(given.get("skip", ())),
            drift=given.get("drift", "refuse"),
            expect=given.get("expect"),
        )
        attempt: AttemptState | None = self._conducted()._state_of(given["attempt"]) if "attempt" in given else None
        return promote_answer(self.workspace.promoted(options, attempt))

    # The policy.

    def _intent(self, given: Arguments) -> ToolAnswer:
        name = given.get("name")
        self.workspace.intent(name)
        text = f"declared: only what the intent {visible(name)} opens can be reached" if name else "no intent is declared any more"
        return plain_answer(text, "intent", {"intent": name})

    def _request(self, given: Arguments) -> ToolAnswer:
        seconds, reason = float(given.get("minutes", 10)) * 60, given["reason"]
        limits: list[tuple[str, float]] = []
        if "memory_mb" in given:
            limits.append(("memory_bytes", given["memory_mb"] * MIB))
        if "timeout_seconds" in given:
            limits.append(("wall_seconds", given["timeout_seconds"]))
        project = self.workspace.project
        paths = tuple(os.path.join(project, each) for each in given.get("paths", ()))
        rules = ElevationOptions(tuple(given.get("programs", ())), tuple(limits), paths)
        granted: list[str] = []
        if rules != ElevationOptions():
            granted.append(self.workspace.elevate(elevation_of(rules), seconds=seconds, reason=reason))
        if given.get("hosts"):
            granted += self.workspace.propose_network(*given["hosts"], seconds=seconds, reason=reason)
        if not granted:
            raise PolicyError("nothing is asked for", hint="name hosts, programs, paths or limits")
        return plain_answer(f"granted for {seconds:g} s: {'; '.join(granted)}", "elevation", {"granted": granted, "seconds": seconds})

    # Python sessions.

    def _turn(self, given: Arguments) -> ToolAnswer:
        number = given.get("session", 0)
        if given.get("restart", False):
            self._python.close()
        session = self._python.session(number, begin=True)
        call = self.workspace.call
        call.ends_by(session.kill)
        before = len(session.timeline)
        self._rewound.pop(number, None)
        timeout = min(filter(None, (given.get("timeout_seconds", DEFAULT_SECONDS), self.workspace.most_seconds())))
        done = session.run(given["code"], timeout=timeout, on_output=lambda stream, text: call.output(stream, text.encode()))
        return turn_answer(done, session, number, before)

    def _inspect(self, given: Arguments) -> ToolAnswer:
        number = given.get("session", 0)
        session, step = self._python.session(number), given.get("step")
        if not len(session.timeline):
            return plain_answer("the session has no steps yet", "inspection", {"session": number, "steps": 0})
        state, facts = session.inspect(step or self._rewound.get(number)), dict[str, Any](session=number, step=step)
        if "expression" in given:
            value = state.evaluate(given["expression"])
            return plain_answer(plain(_described(value)), "inspection", {**facts, "value": vars_of(value)})
        if "file" in given:
            content = state.read(given["file"]).decode(errors="replace")
            return plain_answer(content, "inspection", {**facts, "file": given["file"], "text": content})
        lines = [] if step is not None else [*_timeline(session), ""]
        variables: tuple[PastVariable, ...] = ()
        try:
            variables = state.variables
            lines += [_described(each) for each in variables] or ["(no variables)"]
        except SandboxError as error:  # the state may not be kept, but has steps before it
            if step is not None:
                raise
            lines.append(f"({error.message})")
        shown = [vars_of(each) for each in variables]
        return plain_answer(plain("\n".join(lines)), "inspection", {**facts, "variables": shown, "steps": len(session.timeline)})

    def _rewind(self, given: Arguments) -> ToolAnswer:
        number = given.get("session", 0)
        done = self._python.session(number).rewind(given["step"])
        self._rewound[number] = done.step.number
        again = f"; ran again to get there: {done.ran_again}" if done.ran_again else ""
        facts = {"session": number, "step": done.step.number, "ran_again": done.ran_again}
        return plain_answer(plain(f"back before step {done.step.number}: {done.step.text}{again}"), "rewound", facts)

    def _fork(self, given: Arguments) -> ToolAnswer:
        if "close" in given:
            closed = self._python.close_forks(given["close"])
            return plain_answer(f"closed session {', '.join(map(str, closed)) or 'none'}", "closed", {"sessions": list(closed)})
        numbers = self._python.fork(given.get("session", 0), given.get("step"), given.get("count", 1))
        return plain_answer(f"forked as session {', '.join(map(str, numbers))}", "forked", {"sessions": list(numbers)})

    # Resources.

    def timeline(self) -> str:
        """Return the steps of the first Python session, for people."""
        try:
            return cut(plain("\n".join(_timeline(self._python.session()))), LONGEST_RESOURCE)
        except Exception as error:
            return f"{error}"

    def ledger(self) -> dict[str, Any]:
        """Return the newest entries of the ledger that are about this sandbox."""
        path, newest = here().ledger().path, deque[dict[str, Any]](maxlen=LEDGER_ENTRIES)
        total = 0
        try:
            for entry, told in select(entries(path), Filter(sandbox=self.workspace.id)):
                total += 1
                newest.append(ledger_document(entry, told))
        except FileNotFoundError:
            pass
        form: dict[str, Any] = bounded({"schema": "agent-sandbox/log/1", "entries": list(newest)})
        return {**form, "left_out": total - len(newest)}


def narrowing(given: Arguments) -> Document:
    """Return what a model wants tightened as a policy document. Applying a document can only narrow a policy. Raises `PolicyError`."""
    network: dict[str, Any] = {}
    if given.get("network") is False:
        network["outbound"] = False
    if "hosts" in given:
        network["hosts"] = list(given["hosts"])
    processes: dict[str, Any] = {}
    if "commands" in given:
        processes["commands"] = list(given["commands"])
    if "processes" in given:
        processes["max"] = given["processes"]
    limits = {"memory_mb": given["memory_mb"]} if "memory_mb" in given else {}
    files = {"denied": list(given["hide"])} if "hide" in given else {}
    tables = {"network": network, "processes": processes, "limits": limits, "files": files}
    return from_mapping({name: table for name, table in tables.items() if table}, origin="narrow")


def _line(text: str) -> list[str]:
    return ["bash", "-c", text]


def _work(given: Arguments) -> tuple[Code | Command, dict[str, Any]]:
    """Return the work that arguments describe, and its options. Raises `PolicyError` unless it is one of command and code."""
    if ("command" in given) == ("code" in given):
        raise PolicyError("give either command or code", hint='{"command": "make test"}')
    if "language" in given and "code" not in given:
        raise PolicyError("language goes with code", hint="give code instead of command")
    options = {"stdin": encoded(given.get("stdin", "")), "cwd": given.get("cwd"), "timeout": given.get("timeout_seconds")}
    if "command" in given:
        return Command(("bash", "-c", given["command"])), options
    return Code(canonical_language(given.get("language", "python")), given["code"]), options


def run_answer(result: RunResult) -> ToolAnswer:
    """Return the result of a run for the model: how it ended, what it printed, and how many changes wait.

    A program that fails is a result. It is an error if the program could not be started, or did not end by itself.
    """
    used = f"{result.usage.wall_seconds:.1f} s"
    head = f"exit {result.exit} ({used})" if result.reason.value == "exited" else f"exit {result.exit}: {result.reason.value} ({used})"
    parts = [head, *([result.refused] if result.refused else []), *(f"note: {note}" for note in result.notes)]
    for name, data in (("stdout", result.stdout), ("stderr", result.stderr)):
        if data:
            parts += [f"--- {name}", plain(cut(data.decode(errors="replace").rstrip("\n"), _STREAM))]
    if result.limits_hit:
        dropped = "; the rest of the output was dropped" if "output" in result.limits_hit else ""
        parts.append(f"--- limits reached: {', '.join(result.limits_hit)}{dropped}")
    counts = result.changes
    if counts is not None and counts.total:
        parts.append(f"--- {counted(counts.total - counts.in_caches, 'change')} pending in the sandbox")
    return answer("\n".join(parts), result, failed=bool(result.refused) or result.reason is not ExitReason.EXITED)


def promote_answer(result: PromoteResult) -> ToolAnswer:
    """Return what became of a promotion, for the model."""
    if result.why_not is not None:
        return answer(result.why_not, result, failed=result.outcome == "not-approved")
    return answer(f"promoted {counted(len(result.changes), 'change')} to {visible(result.root)}", result)


def turn_answer(done: SandboxResult, session: SandboxSession, number: int, before: int) -> ToolAnswer:
    """Return the result of a turn for the model, with the numbers of its steps."""
    steps = [each.number for each in session.timeline.steps[before:]]
    value = repr(done.value) if done.value is not None else done.value_repr
    parts = [done.error] if done.error else []
    parts += ["--- this is a new session, without variables of an earlier one"] if not before and number == 0 else []
    for name, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        if text:
            parts += [f"--- {name}", cut(text.rstrip("\n"), _STREAM)]
    parts += [f"--- value\n{cut(value, _STREAM)}"] if value is not None else []
    parts += [f"--- steps {steps[0]} to {steps[-1]}"] if steps else []
    parts += [f"--- the session has ended: {session.ended}"] if session.ended else []
    facts = {
        "session": number,
        "status": done.status.value,
        "exit": done.exit_code,
        "error": done.error,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "value": value,
        "steps": steps,
        "ended": session.ended or None,
    }
    return plain_answer(plain("\n".join(parts)) or "done", "turn", facts, failed=done.exit_code is None or bool(session.ended))


def _timeline(session: SandboxSession) -> list[str]:
    timeline = session.timeline
    return [*lines_of(timeline.steps, {step.number for step in timeline.here})] or ["(no steps)"]


def _described(variable: PastVariable) -> str:
    shape = f" {variable.shape}" if variable.shape else ""
    return f"{variable.name}: {variable.type}{shape} = {variable.repr}"


def vars_of(variable: PastVariable) -> dict[str, Any]:
    """Return a variable as JSON types."""
    return {
        "name": variable.name,
        "type": variable.type,
        "bytes": variable.bytes,
        "repr": variable.repr,
        "shape": list(variable.shape),
        "columns": list(variable.columns),
    }


def _end_of(step: Any) -> str:
    return "" if step is None else (step.errors or step.output).decode(errors="replace")[-1500:]


def _former(simulation: Any) -> Any:
    from agent_sandbox.workspace.diff.compare import Formerly  # few calls simulate

    return Formerly(bases=simulation.clone.bases(), read_base=simulation.clone.read_base)
