"""The runtimes that the attacks are tried on, and the attacks that do not apply to one of them, each with its reason.

`make security` tries every attack on every runtime. `make test` tries all of them on `process`, and a sample on `container` and `gvisor`;
the sample of `microvm`, which has to be booted first, is in tests/runtime/microvm/test_runs.py. A reason is a row of the table, as a result
is: nothing is skipped in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.errors import RuntimeUnavailable
from agent_sandbox.runtime.base import Runtime
from agent_sandbox.runtime.gvisor.runtime import GvisorRuntime
from agent_sandbox.runtime.microvm.runtime import MicroVmRuntime
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from tests.images import slim
from tests.security.cases import INAPPLICABLE, UNAVAILABLE

PROCESS, HEAVIER = "process", ("container", "gvisor", "microvm")
# For `make test`: of one file, so that an image is made once.
SAMPLE = frozenset({"test_secrets_cannot_be_read_by_name", "test_every_way_to_open_a_file_gets_the_same_answer"})

_NO_LIST = "a policy with a list of programs is refused: it cannot give programs-confined"
_NO_TERMINAL = "it has no terminal, and a run that asks for one is refused"
_OWN_OBJECTS = "these are objects of its own kernel, paid for out of the run's memory"
_OWN_FILES = "its own kernel counts these; outside, what runs it has a limit of its own on open files"
_OWN_PROC = "its own kernel makes what is found, so there is no list of the machine's to compare with"
_OWN_FIRST = "the first process inside is our agent: it knows nothing of the machine, and who harms it harms its own run"
_OWN_SEAT = "it is about init outside; inside, our agent confines the program"
_NO_EXCHANGE = "the file server between it and the view cannot exchange two names"
_MANY = "hundreds of its runs take half an hour; `make torture` kills as many"

_NOT_SEEN = "its processes are none of the machine's; test_gvisor.py and microvm/test_runs.py bound and end them"
_SAME_READER = "the reader outside is the same for every runtime, and is tried with `process`"
_TEMPLATE = "its interpreter is in the template, which is made anew if the interpreter of the machine is another"

# By test, then by runtime.
REASONS: Mapping[str, Mapping[str, str]] = {
    "test_a_guest_cannot_answer_its_own_question": {"container": "the image does not hold the program that answers"},
    "test_a_look_around_finds_what_it_found_before_and_nothing_new": {"gvisor": _OWN_PROC, "microvm": _OWN_PROC},
    "test_devices_are_no_meeting_place": {"gvisor": "its devices are made by its own kernel, for one run"},
    "test_an_install_script_reaches_nothing_real": {"container": "the image has neither pip nor npm"},
    "test_what_the_kernel_counts_cannot_be_used_up": {"gvisor": _OWN_OBJECTS, "microvm": _OWN_OBJECTS},
    "test_descriptors_kept_on_their_way_do_not_keep_others_from_starting": {"gvisor": _OWN_OBJECTS, "microvm": _OWN_OBJECTS},
    "test_a_run_holds_no_more_than_its_share_of_the_machines_open_files": {"gvisor": _OWN_FILES, "microvm": _OWN_FILES},
    "test_files_of_the_clone_that_a_run_maps_are_not_held_against_it": {"gvisor": _OWN_FILES, "microvm": _OWN_FILES},
    "test_a_run_leaves_no_more_than_its_share_of_closing_connections": {"gvisor": _OWN_OBJECTS, "microvm": _OWN_OBJECTS},
    "test_socket_buffers_are_bounded_with_the_memory": {"microvm": _OWN_OBJECTS},
    "test_pipes_and_sockets_left_in_a_layer_block_nobody": {
        "gvisor": "pipes and sockets stay in its own kernel, and reach no layer",
        "microvm": "the file server of QEMU makes neither pipes nor sockets",
    },
    "test_nobody_inside_has_any_capability": {
        "microvm": "threads of its kernel and our agent have theirs; tests/runtime/microvm/test_runs.py tries the program's",
    },
    "test_a_stage_that_still_has_a_power_does_not_begin": {"gvisor": _OWN_SEAT, "microvm": _OWN_SEAT},
    "test_nothing_can_be_typed_into_a_terminal": {"gvisor": _NO_TERMINAL, "microvm": _NO_TERMINAL},
    "test_signals_and_limits_reach_nobody_else": {"microvm": "user 0 of a machine meets the threads of its kernel, which ignore it"},
    "test_no_signal_reaches_init_or_anybody_outside_by_any_route": {"gvisor": _OWN_FIRST},
    "test_a_crowd_that_harasses_init_does_not_move_the_deadline": {"gvisor": _OWN_FIRST},
    "test_init_can_be_neither_slowed_down_nor_changed": {"gvisor": _OWN_FIRST, "microvm": _OWN_FIRST},
    "test_the_parent_of_a_guest_is_out_of_its_reach": {"gvisor": _OWN_FIRST},
    "test_nothing_but_what_is_allowed_is_executed_however_it_is_spelt": dict.fromkeys(HEAVIER, _NO_LIST),
    "test_what_a_line_starts_is_not_there_whether_or_not_it_was_understood": dict.fromkeys(HEAVIER, _NO_LIST),
    "test_a_program_that_is_not_allowed_does_not_run_however_it_is_spelt": dict.fromkeys(HEAVIER, _NO_LIST),
    "test_a_guest_that_swaps_directories_while_we_read_and_measure_its_layers_gains_nothing": {
        "gvisor": _NO_EXCHANGE,
        "microvm": _NO_EXCHANGE,
    },
    "test_a_bomb_of_processes_is_bounded": {"gvisor": _NOT_SEEN, "microvm": _NOT_SEEN},
    "test_everything_is_dead_a_second_after_the_deadline": {"gvisor": _NOT_SEEN, "microvm": _NOT_SEEN},
    "test_a_flood_of_output_is_bounded": dict.fromkeys(HEAVIER, _SAME_READER),
    "test_no_program_of_the_projects_is_run_on_the_host": {
        "container": "the image's own PATH counts, so the fakes are not even found inside"
    },
    "test_a_command_line_too_long_is_refused_cleanly": {"gvisor": "its own kernel has other bounds, and answers ENAMETOOLONG"},
    "test_nothing_can_be_had_from_init": {"gvisor": _OWN_FIRST, "microvm": _OWN_FIRST},
    "test_a_helper_swapped_on_disk_is_not_executed": {
        "gvisor": "its agent runs on the interpreter of the view: one that was swapped in a stored sandbox starts nothing there any more",
        "microvm": _TEMPLATE,
    },
    "test_the_helpers_own_program_cannot_be_changed_through_proc": {"microvm": _TEMPLATE},
    "test_no_engine_is_executed_so_none_can_be_too_old": {
        "container": "it is about what our own process executes, which is the same",
        "gvisor": "runsc is executed, and asked for its version and flags: tests/runtime/gvisor/test_runsc.py",
        "microvm": "QEMU is executed, behind every wall of `process`",
    },
    "test_three_hundred_mixed_runs_hold_on_to_nothing": {"gvisor": _MANY, "microvm": _MANY},
}


def on(test: str) -> list[object]:
    """Return the runtimes that a test is tried on, as parameters of pytest: those of `make security` only are marked `heavier`."""
    chosen: list[object] = [PROCESS]
    for name in HEAVIER:
        marks = [pytest.mark.slow if test in SAMPLE and name != "microvm" else pytest.mark.heavier]
        if why := REASONS.get(test, {}).get(name):
            marks.append(pytest.mark.skip(reason=INAPPLICABLE + why))
        chosen.append(pytest.param(name, marks=marks))
    return chosen


def make(name: str, scratch: Path) -> Runtime:
    """Return a runtime of this name. Skips, with the reason, if this machine has none. `scratch` is for what has to be made first."""
    try:
        return _MAKERS[name](scratch)
    except RuntimeUnavailable as error:
        pytest.skip(f"{UNAVAILABLE}{name}: {error.message}: {error.hint}")


def another(runtime: Runtime, **how: bool | int) -> Runtime:
    """Return a second runtime of the same kind. A closed `microvm` starts again with the next run, so it is its own second."""
    match runtime.traits.name:
        case "container":
            return here().container(ProcessRuntime(**how))  # type: ignore[arg-type]
        case "gvisor":
            return GvisorRuntime(**how)  # type: ignore[arg-type]
        case "microvm":
            return runtime
    return ProcessRuntime(**how)  # type: ignore[arg-type]


def _container(scratch: Path) -> Runtime:
    slim()
    return here().container(ProcessRuntime())


def _gvisor(scratch: Path) -> Runtime:
    made = GvisorRuntime()
    made.program()
    return made


def _microvm(scratch: Path) -> Runtime:
    made = MicroVmRuntime(str(scratch), kernel=os.environ.get("AGENT_SANDBOX_KERNEL", ""))
    made.recipe()
    return made


_MAKERS: Mapping[str, Callable[[Path], Runtime]] = {
    PROCESS: lambda scratch: ProcessRuntime(),
    "container": _container,
    "gvisor": _gvisor,
    "microvm": _microvm,
}
