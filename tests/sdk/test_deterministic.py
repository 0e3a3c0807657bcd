"""Deterministic runs, records and replays, as programs use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox import PolicyError, RecordError, RuntimeUnavailable, Sandbox, SandboxStatus, replay
from agent_sandbox.assembly import here
from tests import compiled

DRAWS = "import random, time; print(random.random(), time.time())"


@pytest.fixture(scope="module", autouse=True)
def _set_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("set-up")
    compiled.offer(place / "cache", place / "state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("AGENT_SANDBOX_STATE", str(place / "state"))
        yield
        here().wasm().close()


@pytest.mark.parametrize("runtime", ["wasm", "auto"])
def test_it_is_a_setting_and_an_option_of_each_run(runtime: str) -> None:
    with Sandbox(runtime=runtime, deterministic=True, seed=7) as sandbox:
        first, again = sandbox.execute(DRAWS), sandbox.execute(DRAWS)
        assert first.stdout == again.stdout and first.exit and again.exit and first.exit.usage.fuel == again.exit.usage.fuel
        assert first.route is not None and first.route.runtime == "wasm"
        assert sandbox.execute(DRAWS, seed=8).stdout != first.stdout
        assert sandbox.execute(DRAWS, deterministic=False).stdout != first.stdout
    with Sandbox(runtime=runtime) as ordinary:
        assert ordinary.execute(DRAWS, deterministic=True, seed=7).stdout == first.stdout
        assert ordinary.execute(DRAWS).stdout != ordinary.execute(DRAWS).stdout


def test_what_cannot_be_is_refused() -> None:
    for settings in ({"deterministic": True}, {"max_fuel": 5}, {"runtime": "wasm", "seed": -1}, {"runtime": "wasm", "seed": True}):
        with pytest.raises(PolicyError):
            Sandbox(**settings)
    with Sandbox() as process, pytest.raises(RuntimeUnavailable, match="deterministic"):
        process.execute(DRAWS, deterministic=True)
    with Sandbox(runtime="wasm") as wasm:
        with pytest.raises(PolicyError, match="deterministic"):
            wasm.execute(DRAWS, record="/var/tmp/never")
        with pytest.raises(RecordError, match="written"):
            wasm.execute("print('never run')", deterministic=True, record="/not there/at all")


def test_fuel_is_a_limit_like_time() -> None:
    with Sandbox(runtime="wasm", max_fuel=20_000_000) as sandbox:
        ended = sandbox.execute("while True: pass")
        assert (ended.status, ended.limits_hit) == (SandboxStatus.TIMEOUT, ("fuel",)) and "fuel" in (ended.error or "")
        fine = sandbox.execute("print(1)")
        assert fine.success and fine.exit is not None and fine.exit.usage.fuel is not None


def test_a_run_that_real_time_ended_says_that_it_is_not_deterministic() -> None:
    with Sandbox(runtime="wasm", deterministic=True, timeout_seconds=0.3) as sandbox:
        assert any("not deterministic" in note for note in sandbox.execute("while True: pass").notes)
    with Sandbox(runtime="wasm", deterministic=True) as sandbox:
        assert sandbox.execute("import time; time.sleep(10**6); print('at once')").stdout == "at once\n"


def test_a_record_is_replayed_by_itself(tmp_path: Path) -> None:
    with Sandbox(runtime="wasm", max_fuel=10**9, env_vars={"TOKEN": "a secret"}) as sandbox:
        first = sandbox.execute(
            "import sys, os; print(sys.stdin.read(), os.environ['TOKEN'])", deterministic=True, stdin="x", record=tmp_path / "r"
        )
    assert "a secret" not in (tmp_path / "r").read_text()
    again = replay(tmp_path / "r", env_vars={"TOKEN": "a secret"})
    assert again.same and again.result.stdout == first.stdout
    for wrong in ({}, {"TOKEN": "another"}, {"TOKEN": "a secret", "MORE": ""}):
        with pytest.raises(RecordError, match="environment variable"):
            replay(tmp_path / "r", env_vars=wrong)


def test_a_record_grants_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("content")
    reading = f"print(open({str(tmp_path / 'data' / 'file')!r}).read())"
    with Sandbox(runtime="wasm", deterministic=True, allow_file_read=True, allowed_paths=[tmp_path / "data"]) as sandbox:
        assert sandbox.execute(reading, record=tmp_path / "r").stdout == "content\n"
        assert sandbox.replay(tmp_path / "r").same
        (tmp_path / "data" / "file").write_text("changed")
        departures = sandbox.replay(tmp_path / "r").departures
        assert [each.what for each in departures][:2] == ["input", "stdout"]
    with pytest.raises(RecordError, match="other file rules"):
        replay(tmp_path / "r")


def test_a_record_of_another_engine_or_with_other_limits_is_not_run(tmp_path: Path) -> None:
    with Sandbox(runtime="wasm", deterministic=True) as sandbox:
        sandbox.execute("print(1)", record=tmp_path / "r")
        for name, changed, said in (
            ("engine", {"identity": {"engine": "0.1"}}, "another engine"),
            ("memory", {"limits": {"memory_bytes": 1 << 50}}, "max_memory_mb"),
        ):
            document = json.loads((tmp_path / "r").read_text())
            for field, values in changed.items():
                document[field].update(values)
            (tmp_path / name).write_text(json.dumps(document))
            for attempt in (replay, sandbox.replay):
                with pytest.raises(RecordError, match=said):
                    attempt(tmp_path / name)


def test_turns_and_tools_are_the_same_each_time_when_the_tools_are() -> None:
    def taken() -> list[object]:
        with Sandbox(runtime="wasm", deterministic=True, tools={"double": lambda x: 2 * x}) as sandbox, sandbox.session() as session:
            return [
                session.run(code).value
                for code in ("import random, time, uuid", "[random.random(), time.time()]", "[str(uuid.uuid4()), double(4)]")
            ]

    first = taken()
    assert first == taken() and first[2][1] == 8  # type: ignore[index]


def test_fuel_is_a_limit_of_the_session() -> None:
    with Sandbox(runtime="wasm", max_fuel=200_000_000).session() as session:
        assert session.run("1").value == 1
        ended = session.run("while True: pass")
        assert ended.limits_hit == ("fuel",) and "fuel-limit" in session.ended
