"""Guests are forks of one zygote: what they share with it is no secret, and what they were given is not in the next one."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from tests.security.harness import ENVIRONMENT, Box

SCAN = """
import json, re
found = 0
# Not spelled out, neither here nor as a value: the search must not find itself.
needle = re.compile(b"".join(b"[%c]" % (byte ^ 1) for byte in NEEDLE))
with open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in open("/proc/self/maps"):
        start, end, mode = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\\S+)", line).groups()
        if mode[0] == "r" and "[v" not in line:
            memory.seek(int(start, 16))
            try:
                found += len(needle.findall(memory.read(int(end, 16) - int(start, 16))))
            except OSError:
                continue
print(json.dumps(found))
"""


def _scan_for(marker: bytes) -> str:
    return SCAN.replace("NEEDLE", repr(bytes(byte ^ 1 for byte in marker)))


def test_nothing_given_to_one_guest_is_in_the_memory_of_the_next(box: Box) -> None:
    for place, marker in (("code", "marker-in-code-5f1a"), ("variable", "marker-in-variable-77c0"), ("input", "marker-in-input-e2b9")):
        code = f"import sys; data = sys.stdin.read(); x = {marker if place == 'code' else 'none'!r}; print(len(data))"
        env = {**ENVIRONMENT, "MARKER": marker} if place == "variable" else ENVIRONMENT
        box.python(code, env=env, stdin=marker.encode() if place == "input" else b"")
        assert box.probe(_scan_for(marker.encode())) == 0, place


def test_the_scan_does_find_what_is_there(box: Box) -> None:
    assert box.probe(_scan_for(b"marker-of-control-31d4") + "\n", env={**ENVIRONMENT, "MARKER": "marker-of-control-31d4"}) > 0


def test_no_path_of_the_state_directory_is_in_a_guests_environment_or_command_line(box: Box) -> None:
    outcome = box.python("print(open('/proc/self/environ').read(), open('/proc/self/cmdline').read())")
    assert str(box.project.parent).encode() not in outcome.stdout


def test_preloaded_modules_are_there_already(box: Box) -> None:
    code = "import sys; print('decimal' in sys.modules)"
    assert box.python(code).stdout == b"False\n"
    assert box.python(code, preload=("decimal",)).stdout == b"True\n"


def test_a_module_that_cannot_be_preloaded_is_named(box: Box) -> None:
    with pytest.raises(PolicyError, match="no_such_module"):
        box.python("pass", preload=("no_such_module",))


def test_guests_draw_different_numbers(box: Box) -> None:
    code = "import os, random, uuid, secrets; print(random.random(), os.urandom(8).hex(), uuid.uuid4(), secrets.token_hex(8))"
    first, second = box.python(code).stdout.split(), box.python(code).stdout.split()
    assert not set(first) & set(second)


def test_code_behaves_as_a_script(box: Box) -> None:
    outcome = box.python("import sys, threading\nif __name__ == '__main__':\n    print(input())\n    sys.exit('bye')", stdin=b"line\n")
    assert (outcome.stdout, outcome.stderr, outcome.exit.code) == (b"line\n", b"bye\n", 1)
    failing = box.python("def f():\n    1 / 0\nf()")
    assert b"line 2, in f" in failing.stderr and failing.exit.code == 1
