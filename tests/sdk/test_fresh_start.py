"""Each run begins with the same clean slate, whoever ran before, and with nothing of the caller's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from agent_sandbox import Sandbox

PRIVATE = [
    *("/home", "/root", "/var", "/opt", "/srv", "/boot", "/mnt", "/etc/hostname", "/etc/shadow", "/etc/ssh", "/etc/machine-id"),
    *("/etc/resolv.conf", "/usr/bin/bash", "/usr/share/doc"),
]

# Looks through all its own memory for what has the shape of a canary; no canary is part of it.
HUNT = """
import re
found = set()
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in maps:
        writable = re.match("([0-9a-f]+)-([0-9a-f]+) rw", line)
        if writable:
            start, end = (int(part, 16) for part in writable.groups())
            memory.seek(start)
            found.update(re.findall(b"canary-[0-9a-f]{16}", memory.read(end - start)))
print(sorted(each.decode() for each in found))
"""


def test_the_environment_is_exactly_what_was_given(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_CALLER", "hush")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    told = json.loads(Sandbox(env_vars={"A": "1", "B": "2"}).execute(code, env_vars={"B": "3", "C": "é"}).stdout)
    assert told == {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "A": "1", "B": "3", "C": "é"}


@pytest.mark.parametrize("language", ["javascript", "bash"])
def test_the_environment_of_native_programs_holds_nothing_of_the_callers(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_CALLER", "hush")
    code = {"javascript": "console.log(Object.keys(process.env).sort().join())", "bash": "compgen -e | sort | tr '\\n' ,"}[language]
    result = Sandbox(allow_subprocess=True).execute(code, language)
    names = set(result.stdout.strip().strip(",").split(","))
    assert {"HOME", "LANG", "PATH"} <= names <= {"HOME", "LANG", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}, result.stderr


def test_nothing_of_the_machine_is_shown_but_the_interpreter_and_its_packages(sandbox: Sandbox) -> None:
    looked = json.loads(sandbox.execute(f"import json, os\nprint(json.dumps([path for path in {PRIVATE} if os.path.exists(path)]))").stdout)
    interpreter = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, os.__file__)]
    assert [path for path in looked if not any(_leads_to(path, place) for place in interpreter)] == []
    assert [path for path in PRIVATE if os.path.exists(path)], "the control: outside they are there"


def test_the_account_file_is_not_the_machines(sandbox: Sandbox) -> None:
    inside = sandbox.execute("print(open('/etc/passwd').read(), end='')").stdout
    assert "root" in inside
    assert inside != Path("/etc/passwd").read_text()


def test_the_guest_sees_no_process_but_its_own(sandbox: Sandbox) -> None:
    seen = sandbox.execute("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))").stdout
    assert int(seen) <= 3
    assert sum(name.isdigit() for name in os.listdir("/proc")) > 3


def test_the_guest_has_no_network_but_its_own_loopback(sandbox: Sandbox) -> None:
    assert sandbox.execute("import socket; print(socket.if_nameindex())").stdout == "[(1, 'lo')]\n"


def test_no_descriptor_of_the_callers_is_inherited(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "open").write_text("canary")
    with open(tmp_path / "open") as kept:
        os.set_inheritable(kept.fileno(), True)
        links = sandbox.execute(
            "import os\nfor fd in os.listdir('/proc/self/fd'):\n  try: print(os.readlink('/proc/self/fd/' + fd))\n  except OSError: pass"
        ).stdout.split()
    assert all(link.startswith(("pipe:", "/proc/")) for link in links), links


def test_each_run_draws_its_own_random_numbers(sandbox: Sandbox) -> None:
    code = "import random, uuid, os; print(random.random(), uuid.uuid4(), os.urandom(8))"
    assert len({sandbox.execute(code).stdout for _ in range(4)}) == 4


def test_nothing_passes_from_one_run_to_the_next(sandbox: Sandbox) -> None:
    sandbox.execute("import sys, os\nsys.modules['planted'] = sys\nopen('/tmp/planted', 'w').write('x')\nos.environ['PLANTED'] = 'x'")
    result = sandbox.execute("import os, sys; print(os.path.exists('/tmp/planted'), 'planted' in sys.modules, 'PLANTED' in os.environ)")
    assert result.stdout == "False False False\n"


def test_a_run_cannot_find_the_code_input_or_secrets_of_the_one_before_in_its_memory(sandbox: Sandbox) -> None:
    canary = "canary-" + os.urandom(8).hex()
    before = sandbox.execute(f"known = {canary!r}\n{HUNT}", env_vars={"KEY": canary}, stdin=canary)
    after = sandbox.execute(HUNT)
    assert before.stdout == f"['{canary}']\n", "the control: where it is, it is found"
    assert after.stdout == "[]\n"


def test_writes_to_scratch_do_not_reach_the_machine(sandbox: Sandbox) -> None:
    name = f"/tmp/from-a-sandbox-{os.getpid()}"
    assert sandbox.execute(f"open({name!r}, 'w').write('x'); print(open({name!r}).read())").stdout == "x\n"
    assert not os.path.exists(name)


def _leads_to(path: str, place: str) -> bool:
    return place == path or place.startswith(path + "/") or path.startswith(place + "/")


def test_modules_to_preload_are_there_and_only_then() -> None:
    code = "import sys; print('fractions' in sys.modules)"
    assert Sandbox(preload=["fractions"]).execute(code).stdout == "True\n"
    assert Sandbox().execute(code).stdout == "False\n"
