"""Shell sessions: each turn is a command, and what it leaves, the next one finds. With a timeline, each command is a step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox import AskRules, AsyncSandbox, PolicyError, Sandbox, SandboxError, SandboxSession, SandboxStatus, shell

pytestmark = pytest.mark.once

Open = Callable[..., SandboxSession]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Open shell sessions. Options of the session are `timeline`, `env_vars` and `args`; all others are of the sandbox."""
    made: list[SandboxSession] = []

    def start(**options: Any) -> SandboxSession:
        own = {name: options.pop(name) for name in ("timeline", "env_vars", "args") if name in options}
        settings = {"validate_code": False, "allow_subprocess": True, "runtime": "process", **options}
        made.append(Sandbox(**settings).session(language="shell", **own))
        return made[-1]

    yield start
    for session in made:
        session.close()


def said(session: SandboxSession, command: str) -> str:
    """Run a command that must succeed without a remark. Return what it prints."""
    result = session.run(command)
    assert (result.exit_code, result.stderr, result.notes) == (0, "", ()), (command, result, result.stderr, result.notes)
    return result.stdout


@pytest.mark.both
def test_what_a_command_leaves_the_next_one_finds(opened: Open) -> None:
    session = opened(env_vars={"GIVEN": "g"}, args=["one", "two words"])
    assert said(session, 'echo "$GIVEN|$1|$2|$#"') == "g|one|two words|2\n"
    said(session, "plain='a b'; export out=ward; declare -i number=40+2; list=(x 'y z'); declare -A map=([k]='v w'); declare -r fixed=1")
    assert said(session, 'echo "$plain|$out|$number|${list[1]}|${map[k]}|$fixed"; env | grep ^out=; declare -p fixed') == (
        'a b|ward|42|y z|v w|1\nout=ward\ndeclare -r fixed="1"\n'
    )
    said(session, "twice() { echo $(($1 * 2)); }; alias four='twice 2'; set -- new; umask 027; set -o pipefail; shopt -s nullglob")
    assert said(session, "twice 5; four; echo $1 $#; umask; set -o | grep -c 'pipefail.*on'; echo /none*") == "10\n4\nnew 1\n0027\n1\n\n"
    said(session, "mkdir -p /tmp/a/b; cd /tmp/a; pushd b >/dev/null; trap 'echo caught' USR1; PWD_BEFORE=$PWD")
    assert said(session, "pwd; kill -USR1 $$; popd >/dev/null; pwd; echo $OLDPWD") == "/tmp/a/b\ncaught\n/tmp/a\n/tmp/a/b\n"
    assert session.run("(exit 7)").exit_code == 7
    assert said(session, "echo $?") == "7\n"
    assert said(session, "unset plain IFS; unset -f twice; unalias four; trap - USR1; type twice four 2>/dev/null; trap -p USR1") == ""
    assert said(session, 'echo "${plain-gone} ${IFS-gone}"; type twice four 2>/dev/null; trap -p USR1; ls | cat') == "gone gone\nb\n"


def test_the_state_is_kept_however_a_command_ends(opened: Open) -> None:
    session = opened()
    said(session, "kept=0; other=0; f() { local kept=local other=local; local -n ref=kept; g; }; g() { local kept=deeper; exit 9; }")
    ends = {
        "kept=1; exit 3": 3,
        "kept=2; set -e; false; kept=no": 1,
        "set +e; kept=3; set -u; echo $nothing; kept=no": 127,
        "set +u; kept=4; nonesuch": 127,
        "kept=5\nif": 2,
        "kept=6; f one two": 9,
        "kept=7; : ${nothing?it is unset}; kept=no": 127,
        "kept=8; kill -TERM $$": 143,
        "kept=9; cat <<END\nno end": 0,
    }
    for number, (command, code) in enumerate(ends.items(), 1):
        ended = session.run(command)
        assert (ended.exit_code, ended.success, ended.notes) == (code, code == 0, ()), (command, ended, ended.stderr, ended.notes)
        assert said(session, 'echo "$kept $other ${ref-none}"') == f"{number} 0 none\n", command
    assert session.ended == ""


def test_a_command_that_takes_its_shell_away_leaves_the_state_before_it_and_says_so(opened: Open) -> None:
    session = opened(max_memory_mb=2048)
    said(session, "x=before; trap 'echo ran once' EXIT")
    large = "x=lost; printf -v y %70000000s"
    ends = {"x=lost; exec true": 0, "x=lost; kill -9 $$": 137, "x=lost; trap 'echo mine' EXIT; exit 2": 2, large: 0}
    ends |= {"x=lost; builtin() { :; }; command() { :; }; false": 1}
    for command, code in ends.items():
        ended = session.run(command)
        assert ended.exit_code == code, (command, ended)
        assert ["the state before this command stays" in each for each in ended.notes] == [True], (command, ended.notes)
        assert said(session, "echo $x") == "before\n", command
    assert session.run("x=after; exit 4").stdout == "ran once\n"
    assert said(session, "echo $x; exit 0") == "after\n"  # it has run


HOSTILE = r"""
BASH_ENV=/nonesuch FUNCNEST=3 GLOBIGNORE='*'; readonly fixed=1; declare -n ref=target; target=t; printf -v huge '%300000s' x
odd=$'line\nend\ttab\001\377 "quoted" '"'single'"' $(touch /tmp/canary) `touch /tmp/canary` \\'
for name in declare set unset trap exit printf shopt alias kill mapfile pwd umask export readonly local builtin eval; do
  command eval "$name() { echo hijacked; }"
done
command alias for=oops builtin=oops if=oops {=oops
"""


def test_nothing_that_the_program_defines_disturbs_the_state(opened: Open) -> None:
    session = opened()
    session.run(HOSTILE)
    probe = 'echo "${#huge} $ref $fixed"; command printf %s "$odd" | od -An -c | tr -s " "; ls /tmp/canary 2>/dev/null; declare; builtin'
    first = session.run(probe).stdout
    assert first.startswith("300000 t 1\n") and "377" in first and "canary" not in first.replace("/tmp/canary", "", 2), first
    for _ in range(2):
        again = session.run(f"{probe}; exit")
        assert (again.stdout, again.notes) == (f"{first}hijacked\n", ()), again
    session.run(
        "command unalias for builtin if {; command unset -f declare set unset trap eval exit printf shopt alias builtin kill mapfile"
    )
    session.run("trap 'seen=$((seen + 1))' DEBUG")
    session.run(":; :")
    assert session.run("echo $seen").stdout == "3\n", "the trap runs for each command, and for none of ours"
    assert session.run("trap - DEBUG; set -x; echo traced").stderr.count("traced") == 1
    shown = session.run("echo again")
    assert shown.stderr.splitlines() == ["++ echo again"]


def test_a_directory_that_is_gone_is_replaced_by_none(opened: Open) -> None:
    session = opened()
    said(session, "mkdir -p /tmp/gone; cd /tmp/gone; touch /tmp/canary")
    session.run("rmdir /tmp/gone")
    lost = session.run("echo new > file; ls /tmp")
    assert lost.stdout.split() == ["canary"] and "cannot be entered" in lost.notes[0], lost
    session.run("rm -rf -- * ../* 2>/dev/null")
    assert session.run("ls /tmp; cd /tmp").stdout.split() == ["canary"]
    assert said(session, "echo > file; ls") == "canary\nfile\n"


def test_a_command_reads_its_input_and_its_output_is_limited(opened: Open) -> None:
    session = opened(max_output_bytes=20_000)
    assert session.run("read first; cat", stdin="one\ntwo\n").stdout == "two\n"
    assert said(session, "echo $first; cat") == "one\n"
    assert session.run("head -c 100 /dev/zero | tr '\\0' a").stdout == "a" * 100
    much = session.run("kept=1; yes | head -c 1000000")
    assert len(much.stdout) == 20_000 and "output" in much.limits_hit
    control = opened(max_output_bytes=2_000_000)
    assert len(control.run("yes | head -c 1000000").stdout) == 1_000_000


def test_a_command_that_exceeds_its_time_ends_the_session(opened: Open) -> None:
    session = opened()
    assert session.run("sleep 1000", timeout=1).status is SandboxStatus.TIMEOUT
    with pytest.raises(SandboxError, match="this session has ended"):
        session.run("echo")


def test_a_trap_on_exit_runs_when_the_session_is_closed(opened: Open, tmp_path: Path) -> None:
    session = opened(allow_file_write=True, allowed_paths=[tmp_path], working_dir=tmp_path)
    session.run("echo 1 > first; trap 'echo 2 > second' EXIT")
    assert session.run("ls").stdout == "first\n"
    session.close()
    assert [change.path for change in session.changes] == [f"{tmp_path}/first", f"{tmp_path}/second"]


def test_a_program_that_is_denied_is_denied_in_a_command_too(opened: Open) -> None:
    denied, control = opened(denied_commands=["touch"]), opened()
    for session, wall in ((denied, True), (control, False)):
        read = session.run("touch /tmp/canary-1")  # the text is read as that of a shell
        assert (read.exit_code is None and "does not allow the program 'touch'" in str(read.error)) == wall, read
        said(session, "program=touch")
        said(session, "late() { command $program /tmp/canary-2; }")
        session.run("$program /tmp/canary-3; late")  # no text says it: the program is not there
        seen = session.run("ls /tmp").stdout.split()
        assert seen == ([] if wall else ["canary-1", "canary-2", "canary-3"])
    allowed = opened(allowed_commands=["cat", "ls"])
    assert said_by(allowed, "cat /etc/hostname /dev/null 2>/dev/null; ls /tmp; echo done").endswith("done\n")
    assert allowed.run("program=touch").success and allowed.run("$program /tmp/canary").exit_code == 127
    assert said_by(allowed, "ls /tmp") == ""


def said_by(session: SandboxSession, command: str) -> str:
    """Return what a command prints, whatever is remarked on."""
    return session.run(command).stdout


def test_a_command_is_approved_as_that_of_a_run_is() -> None:
    asked: list[str] = []
    yes = [False]

    def approver(action: Any, question: Any) -> bool:
        asked.append(question.because.rule)
        return yes[0]

    rules = AskRules(commands=("rm",))
    sandbox = Sandbox(validate_code=False, allow_subprocess=True, runtime="process", asks=rules, approver=approver)
    with sandbox.session(language="shell") as session:
        session.run("echo > /tmp/canary")
        for command in ("rm /tmp/canary", "ls() { rm /tmp/canary; }", "alias ls='rm /tmp/canary'", "x=rm; $x /tmp/canary"):
            before = len(asked)
            assert session.run(command).exit_code is None and len(asked) == before + 1, command
        assert sandbox.run(shell("ls() { rm /tmp/canary; }")).exit_code == 0, "no later command of a run can call it"
        assert session.run("test -e /tmp/canary").success
        yes[0] = True
        assert session.run("rm /tmp/canary").success and not session.run("test -e /tmp/canary").success


def before(session: SandboxSession, text: str) -> int:
    """Return the last step whose command is this one."""
    return next(step.number for step in reversed(session.timeline.steps) if step.text == text)


def test_each_command_is_a_step_to_look_at_and_to_return_to(opened: Open) -> None:
    session = opened(timeline=True)
    for command in ("x=1; f() { echo old; }; mkdir d", "cd d; echo one > file", "x=2; f() { echo new; }; set -e; alias a=b; rm file"):
        said(session, command)
    assert [step.text for step in session.timeline if step.text][:2] == ["x=1; f() { echo old; }; mkdir d", "cd d; echo one > file"]
    old, new = before(session, "x=2; f() { echo new; }; set -e; alias a=b; rm file"), session.timeline.here[-1].number
    shown = {each.name: (each.type, each.repr) for each in session.inspect(old).variables}
    assert shown["x"] == ("string", '"1"') and shown["working directory"] == ("directory", "/tmp/d"), shown
    assert shown["PATH"][0] == "string, exported" and "echo old" in shown["f()"][1] and "alias a" not in shown, shown
    difference = session.timeline.diff(old, new)
    assert difference.variables == {"alias a": "new", "f()": "changed", "set -o errexit": "new", "x": "changed"}
    assert difference.files == {"/tmp/d/file": "gone"}
    state = session.inspect(old)
    assert state.evaluate("x=3; rm file; f; echo $x $(pwd)").repr == "old\n3 /tmp/d\n"
    assert state.evaluate("echo $x; cat file").repr == "1\none\n" and state.read("/tmp/d/file") == b"one\n" and state.frames == ()
    for asked, why in (("nonesuch", "exit code 127: .*not found"), ("sleep 1000", "no answer within"), ("exit 3", "exit code 3")):
        with pytest.raises(SandboxError, match=why):
            state.evaluate(asked, timeout=1 if "sleep" in asked else 60)
    session.rewind(old)
    assert said(session, "f; echo $x; pwd; cat file; echo $-") == "old\n1\n/tmp/d\none\nhBc\n"
    session.rewind(new)
    assert said(session, "f; echo $x; ls; echo $-") == "new\n2\nehBc\n"


@pytest.mark.both
def test_processes_that_a_command_leaves_are_named_and_a_failure_is_marked(opened: Open) -> None:
    session = opened(timeline=True)
    said(session, "x=1; sleep 1000 & sleep 1000 &")
    lost = [step.lost for step in session.timeline.here]
    assert lost[-1] == ("2 children",)
    session.run("echo why >&2; exit 6")
    failed = session.timeline.failed
    assert failed is not None and (failed.text, failed.error) == ("echo why >&2; exit 6", "why")
    session.rewind(1)
    assert said(session, "echo ${x-none}; cat /proc/[0-9]*/comm | grep -c '^sleep$' || :") == "none\n0\n"
    assert session.timeline.here[-1].lost == ()


def test_a_state_that_was_given_up_is_reached_by_running_its_commands_again(opened: Open) -> None:
    session = opened(timeline=True)
    session._recording().tree.most = 2
    commands = {"x=1": "", "read y; (exit 5)": "input\n", "exit 3": "", "echo $x $y $? > f": "", "x=2": "", ":": ""}
    for command, stdin in commands.items():
        session.run(command, stdin=stdin)
    wanted = before(session, "x=2")
    assert not session.timeline[wanted].kept
    again = session.rewind(wanted)
    assert "echo $x $y $? > f" in again.ran_again.splitlines()
    assert said(session, "cat f; echo $x $y") == "1 input 3\n1 input\n"


def test_a_session_that_cannot_be_a_shells_is_refused() -> None:
    sandbox = Sandbox(validate_code=False)
    with pytest.raises(PolicyError, match="allow_subprocess=True"):
        sandbox.session(language="shell")
    able = Sandbox(validate_code=False, allow_subprocess=True)
    with pytest.raises(PolicyError, match="tools are for Python code"):
        able.session(language="bash", tools=[before])
    with pytest.raises(PolicyError, match="each command is a step"):
        able.session(language="shell", timeline=True, steps="line")
    with pytest.raises(PolicyError, match="there are no sessions in 'ruby'"):
        able.session(language="ruby")
    with able.session(language="sh") as session:
        assert session.run("echo control").stdout == "control\n"


def test_the_text_of_a_command_is_checked_as_that_of_a_shell() -> None:
    with Sandbox(allow_subprocess=True, allow_file_write=False).session(language="shell") as session:
        assert session.run("os.system() { echo 'import socket'; }; os.system").stdout == "import socket\n", "as Python, it is refused"
        refused = session.run("curl http://example.com | sh")
        assert refused.exit_code is None and "not permitted" in str(refused.error)
        assert session.run("echo a\0b").exit_code is None


def test_shell_sessions_are_there_for_asyncio() -> None:
    async def main() -> list[object]:
        sandbox = AsyncSandbox(validate_code=False, allow_subprocess=True, runtime="process")
        async with sandbox, sandbox.session(language="shell", timeline=True) as session:
            await session.run("x=1")
            second = await session.run("x=2; echo $x")
            state = await session.inspect(3)
            return [second.stdout, (await state.evaluate("echo $x")).repr, (await session.diff(3, 4)).variables]

    assert asyncio.run(main()) == ["2\n", "1\n", {"x": "changed"}]


PROBE = (
    "{ declare -p a b c d E F G 2>/dev/null; declare -f; alias; pwd; umask; set +o; shopt; trap -p USR1 USR2; dirs -l; "
    'echo "$# $*"; find /tmp/w -type f -print -exec cat {} + 2>/dev/null | sort; :; } | sha256sum'
)


def quoted(value: str) -> str:
    """Quote a value for a shell."""
    return "'" + value.replace("'", "'\\''") + "'"


def random_command(chance: random.Random) -> str:
    """Return a command that changes the state of a shell or its files."""
    name, value = chance.choice("abcd"), "".join(chance.choice("xyz \n\t'\"\\$`*\x7fé") for _ in range(chance.randint(0, 6)))
    word = quoted(value)
    return chance.choice(
        [
            f"unset {name}; {name}={word}",
            f"unset {name}; {name}=({word} 2 3)",
            f"unset {name}; declare -A {name}=([{chance.choice('kl')}]={word})",
            f"export {chance.choice('EFG')}={word}",
            f"unset {name}",
            f"{chance.choice('fg')}() {{ local a={chance.randint(0, 9)}; cat <<X\n{chance.randint(0, 99)} $a\nX\n}}",
            f'{chance.choice("fg")}() {{ case $1 in a|b) echo "$@" ;; *) for i in 1 2; do :; done; esac; }}',
            f"unset -f {chance.choice('fg')}",
            f"alias {name}=echo\\ {chance.randint(0, 9)}",
            f"unalias {name}",
            f"mkdir -p /tmp/w/{name}; cd /tmp/w/{name}",
            f"pushd /tmp/w/{name}",
            "popd",
            "cd ..",
            f"printf %s {word} > /tmp/w/{name}.txt",
            f"rm -f /tmp/w/{name}.txt",
            f"umask 0{chance.randint(0, 7)}{chance.randint(0, 7)}",
            f"set {chance.choice('-+')}o {chance.choice(['pipefail', 'noclobber', 'noglob', 'functrace'])}",
            f"shopt -{chance.choice('su')} {chance.choice(['nullglob', 'extglob', 'dotglob'])}",
            f"set -- {word} {chance.randint(0, 9)}",
            f"trap {word} USR{chance.randint(1, 2)}",
            "shift",
            "false",
        ]
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(1, 40))])
def test_every_state_is_that_of_one_bash_that_ran_straight_to_it(opened: Open, seed: int) -> None:
    chance = random.Random(seed)
    session = opened(timeline=True, max_memory_mb=4096)
    kept: list[tuple[int, list[str]]] = []  # steps, each with the commands that led to it
    way: list[str] = []
    for command in ["mkdir -p /tmp/w; cd /tmp/w", *(random_command(chance) for _ in range(20))]:
        if kept and chance.random() < 0.15:
            number, way = chance.choice(kept)
            session.rewind(number)
        assert session.run(command).notes == (), command
        *_, step, _ = session.timeline.here
        kept.append((step.number, way))
        way = [*way, command]
    for number, led in chance.sample([each for each in kept if session.timeline[each[0]].kept], 6):
        straight = "".join(f"eval {quoted(each)} >/dev/null 2>&1\n" for each in led)
        ran = session._sandbox.run(shell(f"shopt -s expand_aliases\n{straight}{PROBE}"))
        assert session.inspect(number).evaluate(PROBE).repr == ran.stdout != "", (seed, number, led)


@pytest.mark.both
def test_a_shell_is_forked_with_its_variables_directory_and_files() -> None:
    with Sandbox(validate_code=False, allow_subprocess=True).session(language="shell", timeline=True) as session:
        session.run("mkdir /tmp/place; cd /tmp/place; words=(a b); echo 1 >file")
        one, other = session.fork(count=2)
        with one, other:
            assert one.run("words+=(c); echo 2 >>file; echo ${words[@]}; cat file; pwd").stdout == "a b c\n1\n2\n/tmp/place\n"
            assert other.run("echo ${words[@]}; cat file; pwd").stdout == "a b\n1\n/tmp/place\n"
        assert session.run("echo ${words[@]}; cat file").stdout == "a b\n1\n"
