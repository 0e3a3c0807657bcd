"""The verbs and options of the command line, as data: what can be typed, what help says of it, and what is still to come.

What a later version brings is listed too, so that it is refused by name instead of being misread or ignored.
"""

from __future__ import annotations

from agent_sandbox._fast.values import dataclass, replace

ANY = 1 << 30


@dataclass(frozen=True)
class Option:
    """One option. `value` is what its value is called in help; empty for a switch. `later` says what it arrives with."""

    name: str
    value: str = ""
    help: str = ""
    short: tuple[str, ...] = ()
    later: str = ""


@dataclass(frozen=True)
class Verb:
    """One verb. `words` is how many it takes, at least and at most; `command` says that its words are a command with options of its own."""

    usage: str
    summary: str
    options: tuple[str, ...] = ()
    words: tuple[int, int] = (0, 0)
    command: bool = False
    too_many: str = ""
    details: str = ""
    later: str = ""


_OPTIONS = (
    Option("--forget", "SNAPSHOT", "forget this snapshot, by number or label"),
    Option("--json", help="one JSON document on standard output"),
    Option("--quiet", help="no remarks of ours on standard error", short=("-q",)),
    Option("--help", help="say what a verb does", short=("-h",)),
    Option("--version", help="say which version this is"),
    Option("--project", "DIR", "the project, instead of the nearest directory with .git or agent-sandbox.toml"),
    Option("--throw-away", help="in a new sandbox that nothing is kept of", short=("--rm",)),
    Option("--cwd", "DIR", "where to start, instead of the current directory"),
    Option("--env", "NAME[=VALUE]", "give the program this variable; without a value, yours", short=("-e",)),
    Option("--timeout", "TIME", "end it after this long: 30, 1.5, 5m, 1h"),
    Option("--memory", "SIZE", "memory of all its processes together: 512M, 2G, none"),
    Option("--disk", "SIZE", "how much it may write: 512M, 2G, none"),
    Option("--processes", "N", "how many processes and threads it may have"),
    Option("--deny", "PATH", "hide this path, or what matches this pattern"),
    Option("--reveal", "PATH", "show this path although it is one of the secrets that are hidden"),
    Option("--system", help="run: capabilities for package managers inside (as root only); promote: outside the project, too"),
    Option("--watch-reads", help="keep which files of the project it opens, for status to tell what of that moved on (as root only)"),
    Option("--observe", help="write the files, programs, names and addresses that it tries to the log, allowed and denied; slower"),
    Option("--explain", help="print where the program would run and what it would see there, one line for each step, and stop"),
    Option("--wait", help="wait while another run has the sandbox (this is what happens anyway)"),
    Option("--no-wait", help="fail at once when another run has the sandbox"),
    Option("--runtime", "NAME", "the kind of isolation: process, wasm (code inside WebAssembly) or auto (the cheapest that does)"),
    Option("--language", "NAME", "python, javascript, ruby or bash, instead of guessing", short=("-l",)),
    Option("--all", help="caches and what changed elsewhere on the machine in full, too"),
    Option("--stat", help="only how many lines of each file"),
    Option("--side-by-side", help="in two columns, as wide as the terminal", short=("-s",)),
    Option("--patch", help="what `git apply` takes: the project's changes, relative to it"),
    Option("--raw", help="print a patch although standard output is a terminal, which may act on what is in it"),
    Option("--name-only", help="only the names"),
    Option("--only", "GLOB", "only what this pattern covers: 'src/*.py', docs, /etc/*; may be given more than once"),
    Option("--no-pager", help="do not send long output through $AGENT_SANDBOX_PAGER, $PAGER or less"),
    Option("--yes", help="do not ask", short=("-y",)),
    Option("--skip", "GLOB", "leave out what this pattern covers; may be given more than once"),
    Option("--merge", help="where reality has moved on, bring both sides together"),
    Option("--force", help="where reality has moved on, take the sandbox's side"),
    Option("--resolve", "SIDE", "what to do about conflicts of a merge: ours (the sandbox), theirs (reality) or markers"),
    Option("--approve", "KINDS", "agree to these protected kinds of changes, separated by commas"),
    Option("--dry-run", help="show what would be done, and stop"),
    Option("--since", "TIME", "only entries from then on: 2026-11-16, 2026-11-16T06:30, 30m, 2h, 7d"),
    Option("--until", "TIME", "only entries before then"),
    Option("--denied", help="only what was refused"),
    Option("--category", "NAME", "only process, code, promotion, file, network, capability, approval, outcome or ledger"),
    Option("--level", "NAME", "only debug, info, warning, error or critical, and what is graver"),
    Option("--sandbox", "ID", "this sandbox, by its name in the log; granting: instead of the project's"),
    Option("--grep", "WORDS", "only entries with these words"),
    Option("--limit", "N", "the newest N entries (100), or none for all"),
    Option("--follow", help="go on with each new entry", short=("-f",)),
    Option("--format", "FORM", "for other programs: jsonl, csv or ocsf; all entries"),
    Option("--keys", "DIR", "where the key and the anchor of a copied ledger are"),
    Option("--checkpoint", "FILE", "a signed checkpoint to compare with; may be given more than once"),
    Option("--public-key", "HEX", "the key that checkpoints must be signed with"),
    Option("--for-run", help="yes also to the same question again in that run"),
    Option("--refuse", help="no"),
    Option("--capability", "TOKEN", "what `grant` printed: allows what it covers without asking (also in AGENT_SANDBOX_CAPABILITY)"),
    Option("--for", "TIME", "for this long: 90, 10m, 1h"),
    Option("--times", "N", "only so often"),
    Option("--elevate", help="lift rules of the policy: what --allow, --reveal, --timeout, --memory, --disk and --processes say"),
    Option("--code", "DIGITS", "the second factor, where the question needs one"),
    Option("--enroll", help="make a second factor, once, and print what an authenticator reads"),
    Option("--of", "USER", "the questions of this user (as root only)"),
    Option("--watch", help="wait for questions and ask about each as it comes"),
    Option("--simulate", help="keep nothing; show what it would do, and how much to mind it (as `sim COMMAND` does)"),
    Option("--files-only", help="carry over what a plan changed although it reaches beyond files, too, and that is not done"),
    Option("--add", help="print the project's policy file, widened by what was learnt"),
    Option("--diff", help="keep nothing; show on standard output what it would change (as `diff COMMAND` does)"),
    Option("--allow", "PROGRAMS", "let only these programs be started: git,curl,python*"),
    Option("--deny-command", "PROGRAMS", "let these programs not be started, whatever is allowed"),
    Option("--policy", "NAME|FILE", "hold it to this policy as well: high, medium, low, another preset, or a file"),
    Option("--network", later="the egress"),
    Option("--allow-network", later="the egress"),
    Option("--deterministic", help="the same output, changes and fuel every time: virtual time, seeded randomness; only code"),
    Option("--seed", "N", "what the randomness of a deterministic run begins with; 0 without it"),
    Option("--fuel", "N", "how many instructions code inside WebAssembly may execute"),
    Option("--record", "FILE", "write a record of a deterministic, throw-away run, for replay"),
)
OPTIONS = {spelling: option for option in _OPTIONS for spelling in (option.name, *option.short)}
COMMON = ("--json", "--quiet", "--help", "--project")

_RUNNING = (
    *("--throw-away", "--cwd", "--env", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system"),
    *("--allow", "--deny-command", "--capability", "--policy"),
    *("--explain", "--wait", "--no-wait", "--runtime", "--watch-reads", "--observe", "--deterministic", "--seed", "--fuel", "--record"),
)
_SHOWING = ("--all", "--stat", "--side-by-side", "--patch", "--raw", "--name-only", "--only", "--no-pager")

VERBS = {
    "run": Verb(
        'run [OPTION…] "COMMAND" | run [OPTION…] -- PROGRAM [ARGUMENT…]',
        "run a command on a copy-on-write clone of this machine",
        (*_RUNNING, "--diff", "--simulate"),
        (1, ANY),
        command=True,
        details="""A single word is given to bash; several, or what follows --, are a program and its arguments. What the command
writes is kept in the sandbox of the project, on top of what earlier runs wrote there; the machine itself is
never written. There is no network.

  agent-sandbox run "make test"
  agent-sandbox run --timeout 5m --memory 2G -- npm test
  agent-sandbox run --throw-away "rm -rf node_modules && ls"

It exits as the command does; 124 timed out, 125 the sandbox could not start, 126 denied or not executable,
127 not found, 128+n ended by signal n, 137 out of memory.""",
    ),
    "code": Verb(
        "code FILE|- [--language NAME] [OPTION…] [-- ARGUMENT…]",
        "run a file of Python, JavaScript, Ruby or Bash in the same sandbox",
        (*_RUNNING, "--diff", "--simulate", "--language"),
        (1, ANY),
        too_many="arguments for the code follow --",
        details="""The language is taken from --language, from the name of the file, or from its first line. A - reads the code from
standard input.

  agent-sandbox code analyse.py -- --fast data.csv
  agent-sandbox code --runtime auto --throw-away analyse.py
  echo 'print(6 * 7)' | agent-sandbox code - --language python""",
    ),
    "replay": Verb(
        "replay RECORD [--env NAME[=VALUE]] [--timeout TIME]",
        "run a recorded run again, and say where it departs from its record",
        ("--env", "--timeout", "--cwd"),
        (1, 1),
        details="""It exits with 0 when both runs were the same: output, changes, exit and fuel; with 1 when they were not, having said
where; with 125 when it cannot be run again here: another engine, other rules about files, a variable that is missing.
What it prints is not shown. A record holds code from whoever made it: it runs in a throw-away sandbox, and is granted
nothing by its record.

  agent-sandbox code --deterministic --throw-away --record /var/tmp/run.json analyse.py
  agent-sandbox replay /var/tmp/run.json""",
    ),
    "diff": Verb(
        'diff [OPTION…] ["COMMAND" | -- PROGRAM [ARGUMENT…]]',
        "show what the sandbox would change, or what a command would",
        (
            *_SHOWING,
            *("--cwd", "--env", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system", "--runtime"),
            *("--allow", "--deny-command", "--policy"),
        ),
        (0, ANY),
        command=True,
        details="""First the project, as a unified diff; then a list of what changed elsewhere. Caches are folded into one line.
Characters that cannot be seen are shown escaped, and lines that go away are never left out.

  agent-sandbox diff --only 'src/*.py' --side-by-side
  agent-sandbox diff --patch | git apply
  agent-sandbox diff "make format"

With a command, it runs on a throw-away clone of the machine and nothing of it is kept. What it prints goes to standard
error, the diff to standard output, and it exits as the command does.""",
    ),
    "sim": Verb(
        'sim [OPTION…] "COMMAND" | sim [OPTION…] -- PROGRAM [ARGUMENT…]',
        "run a command on a throw-away clone, and show what it would do",
        (*_RUNNING, "--all", "--stat", "--side-by-side", "--no-pager"),
        (1, ANY),
        command=True,
        details="""It prints an effect plan: which files would change and how, which programs it starts, what it asks of the network,
which secrets it comes near, how it ends, and for each of these how much to mind it. The clone is the machine as the
project's sandbox sees it, with what waits there (not with --throw-away). Neither is changed.

  agent-sandbox sim "make clean"
  agent-sandbox --simulate run "git commit -m 'fix: bug'"

What the command prints goes to standard error, the plan to standard output, and it exits as the command does. The plan is
kept for an hour, for carry-out to do exactly what it says.""",
    ),
    "carry-out": Verb(
        "carry-out [DIGEST [--yes] [--approve KINDS] [--system] [--files-only]]",
        "do what a plan of sim says, exactly",
        ("--yes", "--approve", "--system", "--files-only", "--capability", "--all", "--stat", "--side-by-side", "--no-pager"),
        (0, 1),
        details="""Without a digest it lists the plans there are; with the first letters of one, it shows that once more and asks. The files
become what the plan says, byte for byte, all of them or none; `undo` takes that back. It is refused when anything of it
has changed since: the plan, the policy, what waits in the sandbox, or a file of the project that it changes or read. A
plan is good for once.

Kinds of files that run by themselves need a yes of their own, as for promote. What a plan asked of the network cannot be
done by this version: such a plan is refused, unless --files-only says that its files are wanted without that.

  agent-sandbox carry-out 3f9a1c0b2d4e --yes
  agent-sandbox carry-out 3f9a --approve git-history

It exits with 1 when reality has moved on, with 3 when nobody said yes; nothing was changed then.""",
    ),
    "status": Verb(
        "status [--all]",
        "say what the current sandbox is, what waits in it, and what has moved on in reality since",
        ("--all",),
    ),
    "promote": Verb(
        "promote [--only GLOB] [--skip GLOB] [--yes] [OPTION…]",
        "carry what the sandbox changed over to the project, all of it or nothing (also: apply)",
        ("--only", "--skip", "--yes", "--system", "--merge", "--force", "--resolve", "--approve", "--dry-run", "--capability"),
        details="""It shows what would be carried over and asks. What has changed in reality since the sandbox first touched it
is refused, unless --merge or --force says what to do. Kinds of files that run by themselves or are trusted without
a look (git hooks, CI workflows, shell start-up files, …) need a yes of their own: --yes does not cover them.

  agent-sandbox promote --only 'src/*' --yes
  agent-sandbox promote --merge --resolve markers
  agent-sandbox promote --approve git-history,ci

It is done as a whole or not at all: after a crash, the next verb in this project takes it back or finishes it.
It exits with 1 when reality has moved on or a conflict is open, with 3 when nobody said yes; nothing was changed then.""",
    ),
    "undo": Verb(
        "undo [--yes]",
        "take the last promotion back",
        ("--yes", "--capability"),
        details="""Everything it changed is as it was before, and waits in the sandbox again if nothing has run there since.
It is refused when one of these files has changed since.""",
    ),
    "reset": Verb("reset [--yes]", "forget everything the sandbox changed", ("--yes",), details="On a terminal it asks first."),
    "snapshot": Verb(
        "snapshot [LABEL]",
        "keep what the sandbox is now, to go back to",
        words=(0, 1),
        details="""It has a number and, if you like, a label. As root it costs the same however much has changed; otherwise what has
changed is copied. While a run goes on there is no snapshot.""",
    ),
    "rollback": Verb(
        "rollback [SNAPSHOT]",
        "make the sandbox what it was at a snapshot",
        words=(0, 1),
        details="""By number or label; without one, to the last. What the sandbox is now is kept as a snapshot too, if something ran since
the last, so going back loses nothing. The machine itself is not touched.""",
    ),
    "snapshots": Verb(
        "snapshots [--forget SNAPSHOT]",
        "list the snapshots as a tree, or forget one",
        ("--forget",),
        details="Forgetting one frees what only it needed. What the sandbox is now, and other snapshots, stay as they are.",
    ),
    "policy": Verb(
        'policy explain | lint | schema | policy test "COMMAND" | policy learn [OPTION…] "COMMAND"… | policy learn -- PROGRAM [ARGUMENT…]',
        "say what the policy files mean here, what is odd about them, what they would say to a command, or what it would need",
        ("--policy", "--add", "--cwd", "--env", "--timeout"),
        (1, ANY),
        too_many="put the command in quotes",
        details="""Policy files are /etc/agent-sandbox/policy.toml, ~/.config/agent-sandbox/policy.toml, and in the project
agent-sandbox.toml, or the table tool.agent-sandbox of pyproject.toml. Each can only take away from what those before
it left; an option on the command line counts more than the last two, and never more than the first.

  agent-sandbox policy explain
  agent-sandbox policy test "git push --force"
  agent-sandbox policy explain --policy low

--policy holds everything to one more policy, by the name of a preset or in a file, which can only take away, too.
test runs nothing: it says what the command would start and do, and exits with 126 when it would be denied, and with 3
when somebody would be asked.
lint exits with 1 when there is something to remark on. schema prints a JSON Schema of these files.

  agent-sandbox policy learn "make" "make check" > agent-sandbox.toml

learn runs commands, without input, each on a throw-away clone and under the system's file alone, watches them, and prints
the smallest policy that would have allowed what happened: each line says what asked for it. Then it runs them again under
that policy, and says whether they end the same way. What they print goes to standard error. With --add the project's own
file is widened by as much as that takes, and printed: into another file, because a shell empties that one first. It exits
as the commands do, and with 1 when they end differently.""",
    ),
    "log": Verb(
        "log [OPTION…] | log verify [FILE] | log checkpoint",
        "show what happened, export it, and check that the record of it is unchanged and whole",
        (
            *("--since", "--until", "--denied", "--category", "--level", "--sandbox", "--grep", "--limit", "--follow", "--format"),
            *("--no-pager", "--keys", "--checkpoint", "--public-key"),
        ),
        (0, 2),
        details="""Every action is recorded before it is done, and how it ended after.

  agent-sandbox log --denied --since 2h
  agent-sandbox log --follow --format ocsf
  agent-sandbox log verify
  agent-sandbox log checkpoint > elsewhere/checkpoint
  agent-sandbox log verify copy-of-the-ledger --checkpoint elsewhere/checkpoint

`log verify` says two things apart: whether what is here was changed, and whether all of it is here. The second needs
something from elsewhere: the anchor in the directory of the ledger's key, or a checkpoint that was kept. It exits with 1
when either does not hold. `log checkpoint` signs the last entry, and needs the extra `sign`.""",
    ),
    "approve": Verb(
        "approve [DIGEST] [--for-run [--timeout TIME]] [--refuse] [--watch] [--code DIGITS]",
        "show what waits for somebody's yes, and answer it",
        ("--for-run", "--timeout", "--refuse", "--watch", "--yes", "--code", "--enroll", "--of"),
        (0, 1),
        details="""Without a digest it shows every question that waits and, on a terminal, asks about each. With one, or its first
letters, about that one. An answer is to exactly what is shown: if anything of it changes, it is none. Yes is good
for once; with --for-run also for the same question again in that run, for an hour or as --timeout says.

  agent-sandbox approve
  agent-sandbox approve 3f9a --for-run --timeout 10m
  agent-sandbox approve --watch

Without a terminal, --yes with the whole digest or --refuse with some letters of it is needed. Nobody answering is a
refusal. It exits with 3 when nothing was answered.""",
    ),
    "deny": Verb(
        "deny DIGEST", "say no to what waits for somebody's yes", ("--of",), (1, 1), details="The same as approve DIGEST --refuse."
    ),
    "grant": Verb(
        'grant "PATTERN"… --for TIME [--times N] | grant --elevate [--allow PROGRAMS] [--reveal PATH] [--memory SIZE] --for TIME',
        "permit the project's sandbox what the policy would ask about, or lift a rule of it, for a while",
        ("--for", "--times", "--sandbox", "--code", "--elevate", "--allow", "--reveal", "--timeout", "--memory", "--disk", "--processes"),
        (0, ANY),
        too_many="put each pattern in quotes",
        details="""A pattern is words: run, code, call, promote or undo, then what. A word that ends with * covers every word that
begins so, and ** in last place any number of words. What the policy denies stays denied.

  agent-sandbox grant "run git push **" --for 10m --times 3
  agent-sandbox grant --elevate --allow curl --memory 16G --for 10m
  agent-sandbox run --capability "$TOKEN" "git push origin main"

The token is a secret: who has it can use it, in that sandbox, until its time is over. It is never shown inside.
With --elevate there is no token: for that time the runs of the sandbox have more than the user's and the project's policy
files leave, never more than the system's. A run that has it ends with it, and its end is recorded.""",
    ),
    "revoke": Verb(
        "revoke NAME… | revoke --all",
        "take back what was granted",
        ("--all",),
        (0, ANY),
        details="""Whatever is asked from then on is no longer allowed by it: the next run, the next turn, the next call of a tool. A
program that was started under it before goes on; its process is named.""",
    ),
    "capabilities": Verb("capabilities", "list what is granted, to which sandbox, by whom and for how long"),
    "doctor": Verb(
        "doctor",
        "try out what this machine can enforce, and say what to do about the rest",
        details="It exits with 1 when something is missing without which nothing can run.",
    ),
    "verify": Verb(
        "verify [OPTION…]",
        "attack sandboxes on this machine, and say of each promise whether it held",
        ("--env", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system", "--runtime"),
        details="""Two sandboxes are attacked: one as `run` makes them, with the options given here, and one as Sandbox() in Python. Each
attempt is first made without a sandbox, to show that it can succeed: reading planted secrets, writing real files,
reaching listeners, processes and the kernel, using too much of everything, leaving something behind.

It exits with 1 when something got through, and when something could not be tried. What this machine refuses even
without a sandbox is called inconclusive and changes nothing. The runs are recorded in the ledger like any other.""",
    ),
    "setup": Verb(
        "setup",
        "make the state directory, check the machine, and say what to do next",
        details="""With the extra `wasm` it also compiles the interpreter for code inside WebAssembly: once, for a minute or two.""",
    ),
    "completion": Verb("completion bash|zsh", "print a completion script for a shell", words=(1, 1)),
    "help": Verb("help [VERB]", "say what a verb does", words=(0, 1)),
    "version": Verb("version", "say which version this is"),
}

_LATER = {
    "parallel experiments": ("try",),
    "time travel": ("timeline", "rewind", "fork"),
    "the daemon": ("serve",),
    "the MCP server": ("mcp",),
}
VERBS["simulate"] = replace(VERBS["sim"], usage="simulate …", summary="the same as sim")
VERBS["apply"] = replace(VERBS["promote"], usage="apply …", summary="the same as promote")
_NOT_YET = Verb("", "", tuple(OPTIONS), (0, ANY), command=True)
VERBS |= {name: replace(_NOT_YET, later=what) for what, names in _LATER.items() for name in names}
