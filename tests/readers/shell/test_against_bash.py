"""What bash really starts was foreseen: each command of the corpus runs in a sandbox, where every tool is a stand-in that says its name.

The other way round is no claim: a branch that is not taken is foreseen and does not run.
"""

from __future__ import annotations

import base64
import json
import random
import shlex
import shutil
from collections.abc import Iterator

import pytest

from agent_sandbox import Sandbox
from agent_sandbox.assembly import here
from agent_sandbox.readers.shell.analyze import understand
from agent_sandbox.readers.shell.tools.tables import TOOLS
from agent_sandbox.readers.shell.wrappers import BUILTINS, WRAPPERS
from tests.readers.shell.corpus import corpus
from tests.readers.shell.test_state import LINES

SAMPLE = 60
# Real ones, so that what they start is seen: they are wrappers, or what they print is the name of a program.
REAL = "env xargs timeout nohup nice find bash sh base64 rev xxd tr setsid stdbuf flock cat sort head which".split()  # noqa: SIM905
# Endless; or still running when the next begins; or a path, for which there is no stand-in.
LEFT_OUT = (":(){", "while true", "until false", " &", ">(", "<(", "coproc", "/bin/")

SIMPLE = [
    *("rm x", "git push --force", "ls -l", "cat a", "sed -i s/a/b/ a", "r\\m x", '"git" log', "$'\\x6cs'", "{rm,x}", "env rm x", "make"),
    *("find . -name y -delete", "xargs rm < a", "touch z; rm z", "ls | grep a"),
]
# {c} is a command, {q} the same in quotes, {b} in base64.
AROUND = [
    *("if true; then {c}; fi", "if false; then :; else {c}; fi", "{{ {c}; }}", "( {c} )", "true && {c}", "false || {c}", "! {c}"),
    *(
        "for i in 1 2; do {c}; done",
        "while true; do {c}; break; done",
        "case a in a) {c};; esac",
        "f() {{ {c}; }}; f",
        "function g {{ {c}; }}\ng",
    ),
    *(
        "x=$({c})",
        'echo "$({c})"',
        "echo `{c}`",
        "echo ${{u:-$({c})}}",
        "a=( $({c}) )",
        "export Z=$({c})",
        "[[ -n $({c}) ]]",
        "cat <<E\n$({c})\nE\n",
    ),
    *(
        "bash -c {q}",
        "sh -c {q}",
        "eval {q}",
        "echo {q} | sh",
        "sh <<< {q}",
        "bash <<'EOF'\n{c}\nEOF\n",
        "printf %s {q} | bash",
        "base64 -d <<< {b} | sh",
    ),
    *(
        "env A=1 bash -c {q}",
        "timeout 5 bash -c {q}",
        "find . -maxdepth 0 -exec sh -c {q} \\;",
        "echo x | xargs -I@ sh -c {q}",
        "nohup sh -c {q}",
    ),
    *(
        "trap {q} EXIT",
        'cmd={q}; eval "$cmd"',
        'cmd={q}; bash -c "$cmd"',
        'set -- {q}; eval "$1"',
        "(( 1 )) && {c}",
        "{c} | cat",
        "{c} 2>/dev/null >&2",
    ),
]

DRIVER = """
import json, os, shutil, subprocess, sys
names, real, commands = json.load(sys.stdin)
os.mkdir("/tmp/stand-ins")
for name in names:
    body = f"#!/bin/bash -p\\necho {name} >> /tmp/log\\n"
    if name in real:
        body += f'exec {shutil.which(name)} "$@"\\n'
    elif name in ("sudo", "busybox", "strace"):
        body += 'while [[ $1 == -* ]]; do shift; done; "$@"\\n'
    elif name == "su":
        body += '/bin/bash -c "${@: -1}"\\n'
    else:
        body += "echo out\\n"
    with open(f"/tmp/stand-ins/{name}", "w") as file:
        file.write(body)
    os.chmod(file.name, 0o755)
seen = {}
for command in commands:
    shutil.rmtree("/tmp/here", ignore_errors=True)
    os.makedirs("/tmp/here/build")
    os.makedirs("/tmp/here/.git")
    for name in ("a", "x.log", "x.tmp", "y.bak", "lock", "list.txt"):
        open(f"/tmp/here/{name}", "w").close()
    open("/tmp/log", "w").close()
    try:
        subprocess.run(
            ["/bin/bash", "-c", command], cwd="/tmp/here", env={"PATH": "/tmp/stand-ins", "HOME": "/tmp/here"}, timeout=30,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        pass
    with open("/tmp/log") as log:
        seen[command] = log.read().split()
json.dump(seen, sys.stdout)
"""


@pytest.fixture(scope="module", autouse=True)
def _no_zygote_is_left() -> Iterator[None]:
    yield
    here().process().close()


def started(commands: list[str]) -> dict[str, list[str]]:
    """The programs that bash starts for each command."""
    names = sorted({*TOOLS, *WRAPPERS, "env", "rake", "frobnicate"} - BUILTINS - {"time"})
    with Sandbox(
        validate_code=False, allow_subprocess=True, timeout_seconds=500, max_memory_mb=1024, max_output_bytes=10_000_000, max_processes=500
    ) as sandbox:
        result = sandbox.execute(DRIVER, stdin=json.dumps([names, REAL, commands]))
    assert result.success, result.stderr
    seen: dict[str, list[str]] = json.loads(result.stdout)
    return seen


def unforeseen(seen: dict[str, list[str]]) -> list[tuple[str, set[str]]]:
    """What was started of a command that was said to be understood whole, and not foreseen."""
    read = {command: understand(command) for command in seen}
    whole = {command: found for command, found in read.items() if not found.unknown and not found.unreadable}
    return [(command, more) for command, found in whole.items() if (more := {*seen[command]} - {*found.tools})]


def composed(count: int, seed: int) -> list[str]:
    """Simple commands in shapes in shapes."""
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        command = rng.choice(SIMPLE)
        for _ in range(rng.randint(1, 3)):
            encoded = base64.b64encode(command.encode()).decode()
            command = rng.choice(AROUND).format(c=command, q=shlex.quote(command), b=encoded)
        found[command] = None
    return list(found)


def commands() -> list[str]:
    return [command for command, _, _ in corpus() if not any(part in command for part in LEFT_OUT)]


@pytest.mark.skipif(shutil.which("xxd") is None, reason="xxd is not installed")
def test_what_bash_starts_was_foreseen() -> None:
    seen = started([*random.Random(6).sample(commands(), SAMPLE), *composed(SAMPLE, seed=6)])
    assert sum(map(bool, seen.values())) > SAMPLE / 2, "the stand-ins were not found"
    assert unforeseen(seen) == []


def test_what_may_or_may_not_be_done_is_foreseen_where_bash_does_it() -> None:
    seen = started(LINES)
    assert [line for line, found in seen.items() if "rm" not in found] == [], "these lines really start rm"
    assert unforeseen(seen) == []


@pytest.mark.torture
def test_what_bash_starts_was_foreseen_for_the_whole_corpus_and_for_many_shapes_of_simple_commands() -> None:
    seen = started([*commands(), *composed(3000, seed=7)])
    assert len(seen) > 3400
    assert unforeseen(seen) == []
