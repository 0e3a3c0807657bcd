"""Where work runs when the machine may choose: the cheaper runtime, the other one when something is missing, and never weaker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox._fast.values import replace
from agent_sandbox.engine import plan_launch
from agent_sandbox.engine import runtimes as engine_runtimes
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.retry import HeldOutput
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import RoutingQuestion, Runtimes, modules_in, only
from agent_sandbox.engine.turns import InterpreterTurns, Turn
from agent_sandbox.engine.work import Code, Command, Outcome, Work
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.ledger.event import Intent
from agent_sandbox.ledger.event import OutcomeEvent as Ended
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import Guarantee, Limits, Policy, cloned, locked
from agent_sandbox.policy.paths import Tree
from agent_sandbox.policy.secrets import Mask
from agent_sandbox.runtime.base import ExitReason
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.runtime.router.model import Workload
from agent_sandbox.runtime.wasm.runtime import WasmRuntime
from agent_sandbox.testing import FakeRuntime
from agent_sandbox.workspace.store import Store
from scripts.compile_wasm import CACHE, RECORDS
from tests import compiled
from tests.ledger.samples import read
from tests.patience import given_time
from tests.registries import registry_of

ENV = {"PATH": os.defpath}
# What the one inside lacks, under a name that reading the code does not tell.
LACKS = "import importlib, sys\nimportlib.import_module('multi' + sys.byteorder[:0] + 'processing.synchronize')\n"
# Whether it is outside, asked in a way that does not by itself decide where it runs.
OUTSIDE = "import sys; print('linux' in sys.implementation._multiarch)"
FAKED = "import sys\nsys.stderr.write('ModuleNotFoundError: No module named x\\n')\nsys.exit(1)"


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessRuntime]:
    made = ProcessRuntime()
    yield made
    made.close()


@pytest.fixture(scope="module")
def wasm() -> Iterator[WasmRuntime]:
    made = compiled.runtime()
    yield made
    made.close()


@pytest.fixture
def auto(process: ProcessRuntime, wasm: WasmRuntime) -> Runtimes:
    return Runtimes("auto", registry_of(process=lambda: process, wasm=lambda: wasm))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def session(runtimes: Runtimes, ledger: Path, policy: Policy | None = None, **more: object) -> Session:
    return Session(Gate(policy or locked(), Ledger(ledger, clock=lambda: 0.0), clock=lambda: 0.0), runtimes, **more)  # type: ignore[arg-type]


def python(source: str, **more: object) -> Work:
    return Work(Code("python", source), ENV, **more)  # type: ignore[arg-type]


def facts(ledger: Path) -> list[dict[str, object]]:
    """How each action ended, after checking that each was announced once."""
    events = [entry.event for entry in read(ledger)]
    assert [type(event) for event in events] == [Intent, Ended] * (len(events) // 2)
    return [dict(event.facts) for event in events if isinstance(event, Ended)]


def test_what_the_cheaper_one_has_runs_there(auto: Runtimes, ledger: Path) -> None:
    outcome = session(auto, ledger).run(python(OUTSIDE))
    assert (outcome.stdout, outcome.route.runtime, outcome.route.fell_forward) == (b"False\n", "wasm", "")
    assert outcome.route.passed_over == (("process", "costs more"),)
    assert facts(ledger)[0]["runtime"] == "wasm"


@pytest.mark.parametrize(
    "work",
    [
        Work(Command(("echo", "True")), ENV),
        python("import ctypes\nctypes.CDLL(None)\n" + OUTSIDE),
        Work(Code("bash", "echo True"), ENV),
        python(OUTSIDE, preload=("csv", "sched")),
    ],
    ids=["command", "native code", "bash", "preloaded modules"],
)
def test_what_it_has_not_runs_on_the_other_at_once(auto: Runtimes, ledger: Path, work: Work) -> None:
    outcome = session(auto, ledger, locked(processes=True)).run(work)
    assert (outcome.stdout, outcome.route.runtime, outcome.route.fell_forward) == (b"True\n", "process", "")


def test_what_turns_out_to_lack_something_starts_again_as_if_nothing_had_been(auto: Runtimes, ledger: Path) -> None:
    source = "open('/tmp/trace', 'x').close()\nprint(input())\n" + LACKS + OUTSIDE
    started: list[object] = []
    outcome = session(auto, ledger).run(python(source, stdin=b"given\n", on_start=started.append))
    assert (outcome.exit.code, outcome.stdout) == (0, b"given\nTrue\n"), outcome
    assert outcome.route.runtime == "process" and outcome.route.fell_forward.startswith(("ModuleNotFoundError: ", "ImportError: "))
    assert outcome.route.passed_over == (("wasm", outcome.route.fell_forward),)
    assert len(started) == 2
    (ended,) = facts(ledger)
    assert (ended["runtime"], ended["fell_forward"]) == ("process", outcome.route.fell_forward.partition(":")[0])


@pytest.mark.skipif(shutil.which("node") is None, reason="node is NOT INSTALLED: where JavaScript goes on was not tried")
def test_javascript_goes_the_same_ways(auto: Runtimes, ledger: Path) -> None:
    ways = {
        "console.log(6 * 7)": ("wasm", ""),
        "const fs = require('fs'); console.log(42)": ("process", ""),
        "const fs = eval('requ' + 'ire')('fs'); console.log(42)": ("process", "ReferenceError: require is not defined"),
    }
    for source, (runtime, lacked) in ways.items():
        outcome = session(auto, ledger).run(Work(Code("javascript", source), ENV))
        found = (outcome.stdout, outcome.route.runtime, outcome.route.fell_forward.replace("'require'", "require"))
        assert found == (b"42\n", runtime, lacked), outcome


def test_of_the_first_try_no_change_is_told(auto: Runtimes, ledger: Path, project: Path) -> None:
    policy = locked(read=True, write=True, allowed=[Tree(str(project))], allow_hidden=True)
    told: list[list[str]] = []
    source = f"import sys\nopen({str(project)!r} + f'/{{sys.implementation._multiarch}}', 'w').close()\n" + LACKS
    work = python(source, on_changes=lambda changes, _: told.append([os.path.basename(change.path) for change in changes]))
    outcome = session(auto, ledger, policy).run(work)
    assert outcome.route.fell_forward
    assert len(told) == 1 and "linux" in told[0][0]
    assert told == [[os.path.basename(change.path) for change in outcome.changes]]


@pytest.mark.parametrize("where", ["in planning it", "in launching it"])
def test_what_cannot_start_again_stays_as_it_was(
    auto: Runtimes, process: ProcessRuntime, ledger: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeUnavailable("no interpreter here", missing=("python",))

    target: object = plan_launch if where == "in planning it" else process
    monkeypatch.setattr(target, "prepare" if target is plan_launch else "launch", fail)
    started: list[object] = []
    outcome = session(auto, ledger).run(python(FAKED, on_start=started.append))
    assert len(started) == 1
    assert (outcome.exit.code, outcome.route.runtime, outcome.route.fell_forward) == (1, "wasm", "")
    assert outcome.route.notes == ("it could not start again on process: no interpreter here",)
    assert b"ModuleNotFoundError" in outcome.stderr


def test_who_fakes_a_lack_gets_one_more_run_and_no_third(auto: Runtimes, ledger: Path) -> None:
    started: list[object] = []
    outcome = session(auto, ledger).run(python(FAKED, on_start=started.append))
    assert (len(started), outcome.exit.code, outcome.route.runtime) == (2, 1, "process")
    assert b"ModuleNotFoundError" in outcome.stderr


REACH = """
import os, socket
def refused(deed):
    try:
        deed()
    except Exception:
        return True
    return False
print(sorted(os.listdir({shown!r})), refused(lambda: open({secret!r})), refused(lambda: open({shown!r} + '/written', 'w')))
print(refused(lambda: socket.create_connection(('127.0.0.1', 1), timeout=2)), refused(lambda: os.fork()))
"""


def test_after_falling_forward_the_same_walls_stand(auto: Runtimes, wasm: WasmRuntime, ledger: Path, project: Path) -> None:
    (project / "secret.txt").write_text("canary")
    masks = [Mask(str(project / "secret.txt"), "a secret of the test")]
    policy = locked(read=True, allowed=[Tree(str(project))], denied=[Tree(str(project / "src"))], allow_hidden=True, masks=masks)
    reach = REACH.format(shown=str(project), secret=str(project / "secret.txt"))
    unread = f"import sys; exec(bytes.fromhex({(LACKS + reach).encode().hex()!r} + sys.byteorder[:0]).decode())"
    inside, after = session(only(wasm), ledger, policy).run(python(reach)), session(auto, ledger, policy).run(python(unread))
    assert (inside.route.runtime, after.route.runtime, bool(after.route.fell_forward)) == ("wasm", "process", True)
    assert after.stdout == inside.stdout, (inside, after)
    assert after.stdout == b"['.git', 'greeting.txt'] True True\nTrue True\n"


def test_both_tries_together_stay_within_the_time(auto: Runtimes, ledger: Path) -> None:
    def attempt(limit: float) -> Outcome:
        policy = locked(limits=Limits(wall_seconds=limit))
        part = f"time.sleep({0.6 * limit})\n"  # either alone stays within it
        return session(auto, ledger, policy).run(python(f"import time\n{part}{LACKS}{part}"))

    outcome = given_time(attempt, lambda made: made.route.fell_forward, seconds=2.0)
    assert outcome.route.fell_forward
    assert outcome.exit.reason is ExitReason.TIMED_OUT


def test_what_is_required_and_only_one_gives_leads_there_and_stays_there(auto: Runtimes, ledger: Path, wasm: WasmRuntime) -> None:
    class Deterministic(WasmRuntime):
        traits = replace(WasmRuntime.traits, guarantees=WasmRuntime.traits.guarantees | {Guarantee.DETERMINISTIC})

    made = Deterministic(*wasm._directories)
    policy = locked()
    policy = replace(policy, requires=policy.requires | {Guarantee.DETERMINISTIC})
    runtimes = Runtimes("auto", registry_of(process=ProcessRuntime, wasm=lambda: made))
    route = session(runtimes, ledger, policy).route(python("import subprocess"))
    assert (route.runtime, route.fall_forward) == ("wasm", None)
    with pytest.raises(RuntimeUnavailable, match="does not give deterministic"):
        session(auto, ledger, policy).run(Work(Code("bash", "true"), ENV))


def streamed(work: Work) -> tuple[Work, list[tuple[str, bytes]]]:
    seen: list[tuple[str, bytes]] = []
    return replace(work, on_output=lambda stream, data: seen.append((stream, data)), collect=False), seen


def test_output_that_was_passed_on_is_not_taken_back(auto: Runtimes, ledger: Path) -> None:
    work, seen = streamed(python("print('shown', flush=True)\nimport pandas\npandas.no_such_thing"))
    outcome = session(auto, ledger).run(work)
    assert (outcome.route.runtime, outcome.route.fell_forward, outcome.exit.code) == ("wasm", "", 1)
    assert b"".join(data for _, data in seen).startswith(b"shown\nTraceback") and b"no_such_thing" in seen[-1][1]


def test_before_anything_was_passed_on_it_may_start_again(auto: Runtimes, ledger: Path) -> None:
    work, seen = streamed(
        python("import sys\nif 'linux' not in sys.implementation._multiarch:\n    raise ImportError('too new')\nprint('done')")
    )
    outcome = session(auto, ledger).run(work)
    assert (outcome.route.runtime, outcome.route.fell_forward) == ("process", "ImportError: too new")
    assert seen == [("stdout", b"done\n")]


def test_a_traceback_of_its_own_is_held_back_no_longer_than_it_runs(auto: Runtimes, ledger: Path) -> None:
    work, seen = streamed(python("import json\njson.loads('{')"))
    outcome = session(auto, ledger).run(work)
    assert (outcome.route.runtime, outcome.exit.code) == ("wasm", 1)
    assert {stream for stream, _ in seen} == {"stderr"} and b"JSONDecodeError" in b"".join(data for _, data in seen)


def test_what_may_be_an_end_is_held_and_anything_else_passed_on_in_order() -> None:
    seen: list[tuple[str, bytes]] = []
    held = HeldOutput(lambda stream, data: seen.append((stream, data)))
    held("stderr", b"Trace")
    held("stderr", b"back (most recent call last):\n  File")
    assert (seen, held.passed) == ([], False)
    held("stdout", b"more")
    assert seen == [("stderr", b"Traceback (most recent call last):\n  File"), ("stdout", b"more")] and held.passed
    another = HeldOutput(lambda stream, data: seen.append((stream, data)))
    another("stderr", b"Tracing")
    assert seen[-1] == ("stderr", b"Tracing") and another.passed
    flood = HeldOutput(lambda stream, data: None)
    flood("stderr", b"Traceback (most recent call last):" + b"x" * (1 << 20))
    assert flood.passed


def test_input_from_a_descriptor_is_not_read_twice(auto: Runtimes, ledger: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"once\n")
    os.close(writing)
    try:
        outcome = session(auto, ledger).run(python("print(input())\n" + LACKS, stdin=reading))
    finally:
        os.close(reading)
    assert (outcome.route.runtime, outcome.stdout, outcome.exit.code) == ("process", b"once\n", 0)


def test_what_has_called_a_tool_does_not_start_again(auto: Runtimes, ledger: Path) -> None:
    called: list[int] = []
    for source, times in (("note(1)\n" + FAKED, 1), (FAKED, 2)):
        started: list[object] = []
        work = python(source, tools={"note": called.append}, on_start=started.append)
        outcome = session(auto, ledger, locked(tools=["note"])).run(work)
        assert (len(started), bool(outcome.route.fell_forward)) == (times, times == 2)
    assert called == [1]


def test_a_stored_sandbox_tries_nothing_that_it_would_have_to_take_back(
    auto: Runtimes, ledger: Path, project: Path, tmp_path: Path
) -> None:
    state = Store.open(str(tmp_path / "state")).sandbox_for(str(project))
    kept = session(auto, ledger, cloned(masks=()), project=str(project), state=state)
    lacking = kept.run(python("open('kept', 'x').close()\n" + LACKS, cwd=str(project)))
    assert (lacking.route.runtime, lacking.route.fell_forward, lacking.exit.code) == ("process", "", 0)
    plain = kept.run(python("print(open('kept').read() == '')", cwd=str(project)))
    assert (plain.route.runtime, plain.stdout) == ("wasm", b"True\n"), "what cannot lack anything may go there"


def test_modules_beside_the_code_are_a_reason_for_care(auto: Runtimes, ledger: Path, project: Path) -> None:
    (project / "helpers.py").write_text("import ctypes\nctypes.CDLL(None)\nplace = 'outside'\n")
    policy = locked(read=True, allowed=[Tree(str(project))], allow_hidden=True)
    outcome = session(auto, ledger, policy).run(python("import helpers; print(helpers.place)", cwd=str(project)))
    assert outcome.stdout == b"outside\n", outcome
    streams, _ = streamed(python("import helpers; print(helpers.place)", cwd=str(project)))
    assert session(auto, ledger, policy).run(streams).route.fell_forward == "", "it was not tried where it could not be taken back"


def test_a_directory_too_large_to_look_at_is_one_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").touch()
    (tmp_path / "two").mkdir()
    assert modules_in(str(tmp_path)) == frozenset({"one", "two"})
    assert modules_in(str(tmp_path / "gone")) is None
    monkeypatch.setattr(engine_runtimes, "_MOST_MODULES", 1)
    assert modules_in(str(tmp_path)) is None


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[WasmRuntime]:
    """One whose compiled files are not those that were made here."""
    (tmp_path / "records").mkdir()
    for record in RECORDS.iterdir():
        (tmp_path / "records" / record.name).write_text("0" * 64)
    made = WasmRuntime(str(CACHE), str(tmp_path / "records"))
    yield made
    made.close()


def test_one_that_cannot_be_launched_is_passed_over_with_its_reason(process: ProcessRuntime, broken: WasmRuntime, ledger: Path) -> None:
    runtimes = Runtimes("auto", registry_of(process=lambda: process, wasm=lambda: broken))
    for _ in range(2):
        outcome = session(runtimes, ledger).run(python("print(1)"))
        assert (outcome.stdout, outcome.route.runtime) == (b"1\n", "process")
        ((name, why),) = outcome.route.passed_over
        assert name == "wasm" and "not what was made here" in why
    with pytest.raises(RuntimeUnavailable, match="not what was made here"):
        session(Runtimes("wasm", registry_of(process=lambda: process, wasm=lambda: broken)), ledger).run(python("print(1)"))


def test_what_failed_is_tried_again_after_a_while(process: ProcessRuntime, broken: WasmRuntime, wasm: WasmRuntime, ledger: Path) -> None:
    now, registry = [0.0], registry_of(process=lambda: process, wasm=lambda: broken)
    runtimes = Runtimes("auto", registry, clock=lambda: now[0])
    assert session(runtimes, ledger).run(python("print(1)")).route.runtime == "process"
    registry.register("wasm", lambda: wasm)
    assert session(runtimes, ledger).run(python("print(1)")).route.runtime == "process"
    now[0] = 61.0
    assert session(runtimes, ledger).run(python("print(1)")).route.runtime == "wasm"


def test_a_wish_is_a_wish(process: ProcessRuntime, wasm: WasmRuntime, ledger: Path) -> None:
    for wish, said in (("process", b"True\n"), ("wasm", b"False\n")):
        runtimes = Runtimes(wish, registry_of(process=lambda: process, wasm=lambda: wasm))
        outcome = session(runtimes, ledger).run(python(OUTSIDE))
        assert (outcome.stdout, outcome.route.runtime, outcome.route.passed_over) == (said, wish, ())
    lacking = session(Runtimes("wasm", registry_of(process=lambda: process, wasm=lambda: wasm)), ledger).run(python(LACKS))
    assert (lacking.exit.code, lacking.route.fell_forward) == (1, "")


def test_nobody_pays_for_a_runtime_that_is_not_chosen(process: ProcessRuntime, ledger: Path) -> None:
    def never() -> WasmRuntime:
        raise AssertionError("it was made")

    assert (
        session(Runtimes("process", registry_of(process=lambda: process, wasm=never)), ledger).run(python("print(1)")).route.runtime
        == "process"
    )


def test_a_session_goes_where_later_turns_may_need_anything(auto: Runtimes, ledger: Path) -> None:
    turns = InterpreterTurns(session(auto, ledger), python(""))
    try:
        assert turns.run(Turn("x = 1", wall=30)).outcome.route.runtime == "process"
        turned = turns.run(Turn("import socket; socket.socketpair(); x + 1", wall=30))
        assert (turned.outcome.exit.code, turned.value) == (0, 2)
    finally:
        turns.close()


def test_the_module_of_the_callers_tools_is_on_every_runtime(auto: Runtimes, ledger: Path) -> None:
    called: list[int] = []
    work = python("from host_tools import note; note(1)", tools={"note": called.append})
    outcome = session(auto, ledger, locked(tools=["note"])).run(work)
    assert (outcome.route.runtime, called) == ("wasm", [1])


def test_a_heavy_runtime_is_not_even_asked_while_a_light_one_will_do() -> None:
    """It takes long to say whether a heavy one is there. A requirement that only the heavy one gives leads to it, and so does --explain."""
    asked: list[str] = []

    class Heavy(FakeRuntime):
        def absence(self) -> str:
            asked.append("heavy")
            return ""

    light = FakeRuntime("light", cost=20)
    light.traits = replace(light.traits, guarantees=frozenset(Guarantee) - {Guarantee.USER_SPACE_KERNEL})
    registry = registry_of(light=lambda: light)
    registry.register("heavy", lambda: Heavy("heavy", cost=40), light=False)
    runtimes = Runtimes("auto", registry)
    policy = locked()
    strict = replace(policy, requires=policy.requires | {Guarantee.USER_SPACE_KERNEL})

    def ask() -> RoutingQuestion:
        return RoutingQuestion(Workload("python", "print(1)"))

    assert (runtimes.choose(policy, ask).route.runtime, asked) == ("light", [])
    assert runtimes.choose(policy, ask, acting=False).route.passed_over == (("heavy", "costs more"),)
    assert runtimes.choose(strict, ask).route.runtime == "heavy" and asked != []
