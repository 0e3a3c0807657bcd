"""What holds for every route, whatever the code, the guarantees and the host."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.policy.model import Guarantee, Limits, locked
from agent_sandbox.readers import LARGEST, MOST_MARKS
from agent_sandbox.runtime.base import COMMAND, Traits
from agent_sandbox.runtime.router.model import Candidate, Feature, Permits, Route, Workload
from agent_sandbox.runtime.router.route import explain, read, route
from tests.runtime.router.candidates import process_host, wasm_host
from tests.runtime.router.snippets import labelled

ALL = frozenset(Guarantee)
WASM = wasm_host(ALL - {Guarantee.SEPARATE_KERNEL})
PROCESS = process_host(ALL - {Guarantee.SEPARATE_KERNEL, Guarantee.DETERMINISTIC})
KERNEL = Candidate(Traits("microvm", 50, PROCESS.traits.languages, ALL - {Guarantee.DETERMINISTIC}))
HOSTS = (WASM, PROCESS, KERNEL)
SOURCES = [(language, source) for _, language, source, _ in labelled() if len(source) < 10_000]

LANGUAGES = st.sampled_from(["python", "javascript", "ruby", "bash", COMMAND, "cobol", ""])
GUARANTEES = st.frozensets(st.sampled_from(list(Guarantee)))
# Text that looks like code: words of the readers' own lists in any order, with every kind of bracket and blank.
WORDS = [
    "import ",
    "os",
    "exec(",
    "'",
    '"',
    "`${",
    "}",
    ")",
    "(",
    "\n",
    "  ",
    "def f(",
    "try:\n ",
    "except ImportError:\n ",
    "=",
    "x",
    ".",
    "/",
    "\\",
]
WORDS += [
    "__import__",
    "getattr(",
    "from ",
    "lambda:",
    "[",
    "]",
    "if ",
    ",",
    "process",
    "require(",
    "//",
    "/*",
    "#",
    "\0",
    "\ud800",
    "f'{",
    "é",
    "1",
]
TEXT = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(WORDS), max_size=60).map("".join))
WORK = st.one_of(
    st.builds(lambda chosen, repeatable: Workload(chosen[0], chosen[1], repeatable), st.sampled_from(SOURCES), st.booleans()),
    st.builds(Workload, LANGUAGES, TEXT, st.booleans(), st.frozensets(st.sampled_from(["os", "x", "json"]))),
)
TRAITS = st.builds(
    Traits,
    st.sampled_from(["wasm", "process", "gvisor", "microvm"]),
    st.integers(0, 5),
    st.frozensets(LANGUAGES),
    GUARANTEES,
    features=st.one_of(st.none(), st.frozensets(st.sampled_from(list(Feature)))),
    modules=st.one_of(st.none(), st.just(frozenset({"os", "json", "sys"}))),
    absent=st.frozensets(st.sampled_from(["os.fork", "json.tool"])),
)
HOST = st.builds(Candidate, TRAITS, st.sampled_from(["", "", "not installed"]))


@settings(max_examples=400, deadline=None)
@given(WORK, GUARANTEES, st.builds(Permits, st.booleans(), st.booleans()), st.lists(HOST, max_size=4, unique_by=lambda host: host.name))
def test_a_route_is_total_deterministic_and_never_weaker_than_required(
    work: Workload, requires: frozenset[Guarantee], permits: Permits, hosts: list[Candidate]
) -> None:
    chosen = route(work, requires, permits, hosts)
    assert all(route(work, requires, permits, order) == chosen for order in itertools.islice(itertools.permutations(hosts), 3))
    by_name = {host.name: host for host in hosts}
    eligible = {
        each.name
        for each in hosts
        if not each.unavailable and requires <= each.traits.guarantees and work.language in each.traits.languages
    }
    assert {*filter(None, (chosen.runtime, chosen.fall_forward))} <= eligible
    assert (chosen.runtime is None) == (not eligible)
    assert {name for name, _ in chosen.passed_over} == by_name.keys() - {chosen.runtime}
    assert chosen.fall_forward is None or (work.repeatable and chosen.runtime != chosen.fall_forward)
    assert chosen.why
    assert all(why for _, why in chosen.passed_over)
    assert explain(chosen)[0].startswith(f"runtime: {chosen.runtime or 'none'}: ")


def test_the_same_question_has_the_same_answer_in_another_process() -> None:
    program = (
        "import hashlib; from tests.runtime.router.test_route import *; "
        "answers = repr([route(Workload(*each), frozenset(), Permits(), HOSTS) for each in SOURCES]); "
        "print(hashlib.sha256(answers.encode()).hexdigest())"
    )
    checkout = Path(__file__).parents[3]
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=checkout,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(answers) == 1


@settings(max_examples=200, deadline=None)
@given(WORK, GUARANTEES, st.sampled_from(list(Guarantee)))
def test_requiring_more_never_leads_to_a_cheaper_runtime(work: Workload, requires: frozenset[Guarantee], more: Guarantee) -> None:
    # Without DETERMINISTIC, which only the cheapest gives: there the way is down, and that is meant.
    hosts = [PROCESS, KERNEL, wasm_host(PROCESS.traits.guarantees)]
    cost = {host.name: host.traits.cost for host in hosts}
    before = route(work, requires, Permits(), hosts).runtime
    after = route(work, requires | {more}, Permits(), hosts).runtime
    assert after is None or (before is not None and cost[after] >= cost[before])


@settings(max_examples=200, deadline=None)
@given(WORK)
def test_permissions_explain_and_never_choose(work: Workload) -> None:
    routes = [route(work, frozenset(), Permits(*each), HOSTS) for each in itertools.product((False, True), repeat=2)]
    assert len({(each.runtime, each.fall_forward, each.passed_over) for each in routes}) == 1


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_random_bytes_are_read_or_not_but_never_raise(language: str) -> None:
    made = random.Random(5)
    for _ in range(300):
        data = made.randbytes(made.randrange(400))
        for encoding in ("latin-1", "utf-16-le"):
            read(Workload(language, data.decode(encoding, "replace")))
        assert route(Workload(language, data.decode("utf-8", "surrogateescape")), frozenset(), Permits(), HOSTS).runtime in (
            "wasm",
            "process",
        )


def test_damaged_programs_still_get_a_route() -> None:
    made = random.Random(6)
    for _ in range(400):
        language, source = made.choice(SOURCES)
        cut = made.randrange(len(source) + 1)
        other = made.choice(SOURCES)[1]
        damaged = made.choice([source[:cut], source[cut:], source[:cut] + other, source[:cut] + chr(made.randrange(0x3000)) + source[cut:]])
        assert route(Workload(language, damaged), frozenset(), Permits(), HOSTS).runtime in ("wasm", "process")


# Each as large as is read at all. What is claimed is that they come back, within the test's own time.
HOSTILE = {
    "statements": "a;" * (MOST_MARKS // 2),
    "attributes": "a" + ".b" * (MOST_MARKS - 1),
    "signs": "-" * (MOST_MARKS - 1) + "1",
    "names-of-names": "import os as x0\n" + "".join(f"x{a}=x{b}\n" for a in range(10) for b in range(10)) + "x9.f()\n" * 9_000,
    "modules-handed-around": "".join(f"import a{n}\nf(a{n})\nx.b{n}\n" for n in range(5_000)),
    "code-in-strings": "exec('1')\n" * 7_000,
    "one-line-of-text": "'" + "a" * (LARGEST - 10) + "'",
    "escaped-quotes": "'\\" * (MOST_MARKS // 2),
    "slashes": "=/[" * (MOST_MARKS // 3),
    "templates": "`${" * (MOST_MARKS // 3),
    "classes": ("=/[" + "a" * 190 + "][") * 2_000,
    "comments": "/*" * (MOST_MARKS // 2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_given_up_or_read_in_bounded_time(name: str) -> None:
    for language in ("python", "javascript"):
        assert route(Workload(language, HOSTILE[name]), frozenset(), Permits(), HOSTS).runtime in ("wasm", "process")


def test_reading_runs_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the router ran something")

    read(Workload("python", "import os"))  # what the reader itself loads, it has loaded
    before = set(sys.modules)
    monkeypatch.setattr(builtins, "exec", refuse)
    monkeypatch.setattr(builtins, "eval", refuse)
    read(Workload("python", "import antigravity, this\nexec('import antigravity')\neval('1')\n__import__('lib2to3')"))
    assert set(sys.modules) == before


def test_a_warning_of_the_parser_reaches_nobody(recwarn: pytest.WarningsRecorder) -> None:
    assert not read(Workload("python", r"print('\d', 1if 1else 2)")).unreadable
    assert not recwarn.list


def test_determinism_leads_to_the_only_runtime_that_gives_it() -> None:
    chosen = route(Workload("python", "print(1)"), frozenset({Guarantee.DETERMINISTIC}), Permits(), HOSTS)
    assert (chosen.runtime, chosen.fall_forward) == ("wasm", None)


def test_determinism_is_kept_even_when_the_code_will_miss_something() -> None:
    chosen = route(Workload("python", "import subprocess"), frozenset({Guarantee.DETERMINISTIC}), Permits(), HOSTS)
    assert (chosen.runtime, chosen.fall_forward) == ("wasm", None)
    assert chosen.why == "nothing else here gives what is required, although it starts processes: subprocess (line 1)"


def test_a_kernel_of_its_own_leads_past_both_light_ones() -> None:
    chosen = route(Workload("python", "print(1)"), frozenset({Guarantee.SEPARATE_KERNEL}), Permits(), HOSTS)
    assert chosen.runtime == "microvm"
    assert chosen.passed_over == (("wasm", "does not give separate-kernel"), ("process", "does not give separate-kernel"))


def test_while_wasm_is_not_ready_the_process_runtime_does_its_work() -> None:
    hosts = (wasm_host(ALL, unavailable="it is being compiled"), PROCESS)
    chosen = route(Workload("python", "print(1)"), frozenset(), Permits(), hosts)
    assert (chosen.runtime, chosen.passed_over) == ("process", (("wasm", "not available: it is being compiled"),))


def test_where_only_wasm_is_there_it_takes_what_it_can() -> None:
    hosts = (WASM, process_host(frozenset(), unavailable="this is not Linux"))
    assert route(Workload("python", "import torch"), frozenset(), Permits(), hosts).runtime == "wasm"
    nothing = route(Workload("ruby", "puts 1"), frozenset(), Permits(), hosts)
    assert (nothing.runtime, nothing.why) == (None, "no available runtime can run this with every required guarantee")


def test_an_unknown_language_is_named() -> None:
    assert route(Workload("cobol"), frozenset(), Permits(), HOSTS).why == "no runtime here can run 'cobol'"
    assert route(Workload("python"), frozenset(), Permits(), ()).runtime is None


def test_a_module_beside_the_code_shadows_and_was_not_read() -> None:
    for source in ("import helpers", "import json", "try:\n    import json\nexcept ImportError:\n    import helpers"):
        local = frozenset({"helpers", "json"})
        assert route(Workload("python", source, local=local), frozenset(), Permits(), HOSTS).fall_forward == "process"
        assert route(Workload("python", source, repeatable=False, local=local), frozenset(), Permits(), HOSTS).runtime == "process"


def test_a_feature_that_the_runtime_has_gained_is_no_reason_against_it() -> None:
    hosts = (wasm_host(ALL, features=frozenset({Feature.EVENT_LOOP})), PROCESS)
    assert route(Workload("python", "import asyncio\nasyncio.run(f())"), frozenset(), Permits(), hosts).runtime == "wasm"


def test_what_the_policy_forbids_is_said_beforehand() -> None:
    permits = Permits.of(locked(limits=Limits()))
    chosen = route(Workload("python", "import subprocess, socket\nwhile f():\n    pass"), frozenset(), permits, HOSTS)
    assert explain(chosen) == (
        "runtime: process: the cheapest that gives every required guarantee and runs this python",
        "passed over: wasm: it starts processes: subprocess (line 1)",
        "passed over: microvm: costs more",
        "note: it starts processes (subprocess (line 1)), but the policy allows no processes",
        "note: it uses sockets (socket (line 1)), but the policy allows no network",
        "note: how long the loop at line 2 runs cannot be told from the text",
    )


def test_the_explanation_names_what_is_used_and_where_it_would_go_on() -> None:
    chosen = route(Workload("python", "import pandas, json"), frozenset(), Permits(), HOSTS)
    assert explain(chosen) == (
        "runtime: wasm: the cheapest that gives every required guarantee and has what the code uses (json, pandas)",
        "passed over: process: costs more",
        "passed over: microvm: costs more",
        "falls forward: to process, once, on a fresh clone, if something turns out to be missing",
    )


def test_lines_for_people_hold_nothing_that_a_terminal_obeys() -> None:
    source = "import importlib\nimportlib.import_module('a\\x1b[2J\\n\\u202eb')\nopen('/proc/\\x1b]0;x')"
    chosen: Route = route(Workload("python", source), frozenset(), Permits(), HOSTS)
    assert all(line.isprintable() for line in explain(chosen))
