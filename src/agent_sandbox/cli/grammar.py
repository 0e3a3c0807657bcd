"""The grammar of the command line as data: verbs, options and their help.

Verbs of later versions are listed too, so that they are refused by name instead of being misread.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass, field, replace

if TYPE_CHECKING:
    from collections.abc import Mapping

ANY = 1 << 30


@dataclass(frozen=True)
class Option:
    """One option. `value` is the name of its value in help, empty for a switch."""

    name: str
    value: str = ""
    help: str = ""
    short: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verb:
    """One verb. `words` are the least and most arguments it takes. With `command`, the arguments are a command with its own options.

    `helps` explains options that mean something else for this verb than for most. `project` is whether the verb is about a project.
    """

    usage: str
    summary: str
    options: tuple[str, ...] = ()
    words: tuple[int, int] = (0, 0)
    command: bool = False
    too_many: str = ""
    details: str = ""
    later: str = ""
    helps: Mapping[str, str] = field(default_factory=dict)
    project: bool = True

    @property
    def every_option(self) -> tuple[str, ...]:
        """The verb's own options, and those of every verb."""
        return (*self.options, *(name for name in COMMON if self.project or name != "--project"))


_OPTIONS = (
    Option("--json", help="print one JSON document on standard output"),
    Option("--quiet", help="suppress messages", short=("-q",)),
    Option("--help", help="show help for a verb", short=("-h",)),
    Option("--version", help="show the version"),
    Option("--color", "WHEN", "colours: auto (on a terminal, as NO_COLOR and CLICOLOR_FORCE say), always or never"),
    Option("--project", "DIR", "the project; default: the nearest directory with .git or agent-sandbox.toml"),
    Option("--throw-away", help="use a new sandbox and throw it away afterwards", short=("--rm",)),
    Option("--cwd", "DIR", "start in this directory; default: the current one"),
    Option("--env", "NAME[=VALUE]", "set this variable for the program; without a value, pass yours on", short=("-e",)),
    Option("--env-file", "FILE", "set the variables in this file of NAME=VALUE lines; --env overrides them"),
    Option("--timeout", "TIME", "time limit: 30, 1.5, 5m, 1h, 2d, none"),
    Option("--memory", "SIZE", "memory limit of all processes together: 512M, 2G, none"),
    Option("--disk", "SIZE", "limit of what is written: 512M, 2G, none"),
    Option("--processes", "N", "limit of processes and threads"),
    Option("--deny", "PATH", "hide this path, or all paths that match this pattern"),
    Option("--reveal", "PATH", "show this path, which is hidden as a secret by default"),
    Option("--caches", help="also caches such as __pycache__, which are left behind otherwise"),
    Option("--system", help="capabilities for package managers (as root only)"),
    Option("--watch-reads", help="record which files of the project are read, so that status can report their drift (as root only)"),
    Option("--observe", help="log every file, program, name and address that is tried, allowed or denied; slower"),
    Option("--explain", help="print where the program would run and what it would see, and stop"),
    Option("--wait", help="wait while another run uses the sandbox (the default)"),
    Option("--no-wait", help="fail at once while another run uses the sandbox"),
    Option("--runtime", "NAME", "isolation: process, wasm (code inside WebAssembly) or auto (the cheapest that is enough)"),
    Option("--language", "NAME", "python, javascript, ruby or bash, instead of guessing", short=("-l",)),
    Option("--all", help="show also caches, and changes elsewhere in full"),
    Option("--stat", help="show only the number of changed lines of each file"),
    Option("--side-by-side", help="show two columns, as wide as the terminal", short=("-s",)),
    Option("--patch", help="print a patch of the project for `git apply`"),
    Option("--raw", help="print a patch even on a terminal, which may act on its bytes"),
    Option("--name-only", help="show only names"),
    Option("--only", "GLOB", "only these paths: 'src/*.py', docs, /etc/*; may be repeated"),
    Option("--no-pager", help="do not use $AGENT_SANDBOX_PAGER, $PAGER or less for long output"),
    Option("--yes", help="do not ask", short=("-y",)),
    Option("--skip", "GLOB", "leave out these paths; may be repeated"),
    Option("--merge", help="where reality has changed too, merge both sides"),
    Option("--force", help="where reality has changed too, take the sandbox's side"),
    Option("--resolve", "SIDE", "resolve merge conflicts: ours (the sandbox), theirs (reality) or markers"),
    Option("--approve", "KINDS", "approve these protected kinds of changes, separated by commas"),
    Option("--dry-run", help="show what would be done, and stop"),
    Option("--expect", "DIGEST", "promote only changes with this digest, which diff prints; 12 digits of it are enough"),
    Option("--unused", "DAYS", "also sandboxes that were not used for so many days"),
    Option("--unchanged", help="also sandboxes without changes"),
    Option("--forget", "SNAPSHOT", "forget this snapshot, by number or label"),
    Option("--since", "TIME", "only entries from then on: 2026-11-16, 2026-11-16T06:30, 30m, 2h, 7d"),
    Option("--until", "TIME", "only entries before then"),
    Option("--denied", help="only refused actions"),
    Option("--category", "NAME", "process|code|promotion|tool|file|network|capability|approval|elevation|experiment|outcome|ledger"),
    Option("--level", "NAME", "only this level and above: debug, info, warning, error, critical"),
    Option("--sandbox", "ID", "only this sandbox, by its name in `log --all`"),
    Option("--grep", "WORDS", "only entries with these words"),
    Option("--limit", "N", "the newest N entries, or none for all; default: 100"),
    Option("--follow", help="go on with each new entry", short=("-f",)),
    Option("--format", "FORM", "export all entries as jsonl, csv or ocsf"),
    Option("--keys", "DIR", "the directory with the key and the anchor of a copied ledger"),
    Option("--checkpoint", "FILE", "a signed checkpoint to compare with; may be repeated"),
    Option("--public-key", "HEX", "the key that checkpoints must be signed with"),
    Option("--for-run", help="allow the same question again in that run"),
    Option("--refuse", help="answer no"),
    Option("--capability", "TOKEN", "use this token of `grant` instead of asking (also in AGENT_SANDBOX_CAPABILITY)"),
    Option("--for", "TIME", "how long it holds: 90, 10m, 1h, 2d"),
    Option("--times", "N", "how often it may be used"),
    Option("--elevate", help="relax rules of the policy"),
    Option("--code", "DIGITS", "the second factor, where one is needed"),
    Option("--enroll", help="make a second factor, once, and print it for an authenticator"),
    Option("--of", "USER", "questions to this user (as root only)"),
    Option("--watch", help="wait for questions and ask about each"),
    Option("--simulate", help="keep nothing; show what it would do and how risky that is (the same as sim)"),
    Option("--files-only", help="carry out only the file changes of a plan with requests"),
    Option("--add", help="print the project's policy file, widened by what was learnt"),
    Option("--diff", help="keep nothing; show what it would change (the same as diff COMMAND)"),
    Option("--allow", "PROGRAMS", "start only these programs: git,curl,python*"),
    Option("--deny-command", "PROGRAMS", "never start these programs"),
    Option("--policy", "NAME|FILE", "apply this policy too: high, medium, low, another preset, or a file"),
    Option(
        "--network", "HOSTS", "let it reach these hosts: api.example.com, *.example.com, db.example.com:5432, packages, git-hosts, llm-apis"
    ),
    Option("--allow-network", help="let it reach every public host at ports 80 and 443"),
    Option(
        "--secret",
        "NAME@HOSTS",
        "let it use a secret that it never sees, towards these hosts: GITHUB_TOKEN@api.github.com, KEY=file:PATH@HOST+header:X-Api-Key",
    ),
    Option("--intent", "NAME", "declare what it is about to do: only what this intent of your policy opens can be reached"),
    Option("--budget", "BUDGET", 'limit what it exchanges with hosts: "api.example.com 10MB 100/min", "* sent:50MB requests:500"'),
    Option("--no-dlp", help="do not search what leaves for secrets and personal data"),
    Option(
        "--publish", "PORT[:INNER]", "let programs of this machine reach a server of the sandbox at http://127.0.0.1:PORT, while it runs"
    ),
    Option("--record-network", "FILE", "write down the requests that it sends and their answers, without credentials"),
    Option("--record-bodies", help="with --record-network: their bodies too, without secrets and personal data that are found"),
    Option("--replay-network", "FILE", "answer its requests from a record of --record-network; nothing leaves"),
    Option("--send", help="in a simulation: also send requests that may change something at their host, such as POST"),
    Option("--deterministic", help="the same output, changes and fuel every time: virtual time, seeded randomness; only for code"),
    Option("--seed", "N", "the seed of a deterministic run; default: 0"),
    Option("--fuel", "N", "limit of instructions of code inside WebAssembly"),
    Option("--check", "COMMAND", "an attempt passes if this command exits with 0 in its sandbox"),
    Option("--promote", help="promote the winner, as promote does: it asks, or needs --yes and --approve"),
    Option("--first", help="end when one attempt has passed, which is the winner; cancel the others"),
    Option("--total-timeout", "TIME", "time limit of the whole experiment: 30, 5m, 1h"),
    Option("--cpu", "TIME", "limit of processor time of all attempts together, shared equally: 30, 5m"),
    Option("--jobs", "N", "run at most so many attempts at once; never more than processors and memory allow", short=("-j",)),
    Option("--report", "FILE", "a JUnit XML file that the check writes in the project, for the number of tests"),
    Option("--live", "WHICH", "what attempts see as it changes, not frozen: stores (the default: large node_modules, …), all or none"),
    Option("--keep", "WHICH", "keep the attempts for an hour: all (the default), winner, or none (the default after a promotion)"),
    Option("--record", "FILE", "write a record of a deterministic, throw-away run, for replay"),
)
OPTIONS = {spelling: option for option in _OPTIONS for spelling in (option.name, *option.short)}
COMMON = ("--json", "--quiet", "--color", "--help", "--project")

_RUNNING = (
    *("--throw-away", "--cwd", "--env", "--env-file", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system"),
    *("--allow", "--deny-command", "--network", "--allow-network", "--secret", "--intent", "--budget", "--no-dlp", "--publish"),
    *("--record-network", "--record-bodies", "--replay-network", "--capability", "--policy", "--explain", "--wait", "--no-wait"),
    *("--watch-reads", "--observe"),
)
_RUNTIMES = ("--runtime", "--deterministic", "--seed", "--fuel", "--record", "--send")
_SHOWING = ("--all", "--stat", "--side-by-side", "--patch", "--raw", "--name-only", "--only", "--no-pager")

VERBS = {
    "run": Verb(
        'run [OPTION…] "COMMAND" | run [OPTION…] -- PROGRAM [ARGUMENT…]',
        "run a command on a copy-on-write clone of this machine",
        (*_RUNNING, *_RUNTIMES, "--diff", "--simulate"),
        (1, ANY),
        command=True,
        details="""  agent-sandbox run "make test"
  agent-sandbox run --timeout 5m --memory 2G -- npm test
  agent-sandbox run --throw-away "rm -rf node_modules && ls"

A single word is a line for bash; several words, or those after --, are a program and its arguments. Changes are kept in
the project's sandbox, on top of those of earlier runs. The machine itself is never written. There is no network, unless --network
names hosts or --allow-network opens all public ones.

It exits as the command does; 124 timed out, 125 the sandbox could not start, 126 denied or not executable,
127 not found, 128+n ended by signal n, 137 out of memory.""",
    ),
    "shell": Verb(
        "shell [OPTION…]",
        "work in the sandbox yourself, in an interactive shell",
        _RUNNING,
        details="""  agent-sandbox shell
  agent-sandbox shell --throw-away --env-file .env

It starts $SHELL, or bash or sh, on a terminal of its own in the same sandbox as `run`; its prompt begins with (sandbox). In
every other shell than bash, start-up files that set a prompt hide that mark; the variable AGENT_SANDBOX is 1. It needs a
terminal, exits as the shell does, and then says how much is changed.""",
    ),
    "code": Verb(
        "code FILE|- [--language NAME] [OPTION…] [-- ARGUMENT…]",
        "run a file of Python, JavaScript, Ruby or Bash in the same sandbox",
        (*_RUNNING, *_RUNTIMES, "--diff", "--simulate", "--language"),
        (1, ANY),
        too_many="arguments for the code follow --",
        details="""  agent-sandbox code analyse.py -- --fast data.csv
  agent-sandbox code --runtime auto --throw-away analyse.py
  echo 'print(6 * 7)' | agent-sandbox code - --language python

The language is that of --language, of the file's extension, or of its first line. With - the code is read from standard
input.""",
    ),
    "replay": Verb(
        "replay RECORD [--env NAME[=VALUE]] [--timeout TIME]",
        "run a recorded run again, and report where it departs from its record",
        ("--env", "--timeout", "--cwd"),
        (1, 1),
        details="""  agent-sandbox code --deterministic --throw-away --record /var/tmp/run.json analyse.py
  agent-sandbox replay /var/tmp/run.json

It exits with 0 if output, changes, exit and fuel were the same; with 1 if they were not, and prints where; with 125 if it
cannot be run again here: another engine, other rules about files, a missing variable. Output of the code is not shown. A
record holds code from whoever made it: it runs in a throw-away sandbox, and its record permits nothing.""",
    ),
    "diff": Verb(
        'diff [OPTION…] [PATH… | "COMMAND" | -- PROGRAM [ARGUMENT…]]',
        "show what the sandbox would change, or what a command would",
        (
            *_SHOWING,
            *("--cwd", "--env", "--env-file", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system"),
            "--runtime",
            *("--allow", "--deny-command", "--network", "--allow-network", "--secret", "--intent", "--budget", "--no-dlp", "--policy"),
        ),
        (0, ANY),
        command=True,
        details="""  agent-sandbox diff --only 'src/*.py' --side-by-side
  agent-sandbox diff --patch | git apply
  agent-sandbox diff README.md src
  agent-sandbox diff "make format"

First the project, as a unified diff; then a list of changes elsewhere. Caches are one line; promote leaves them. Invisible
characters are shown escaped, and removed lines are never left out.

Words that all name files or directories, changed or not, are paths to show. Otherwise they are a command; what follows --
always is one. A command runs on a throw-away clone, and nothing of it is kept. Its output goes to standard error, the diff to standard
output, and diff exits as the command does.""",
    ),
    "sim": Verb(
        'sim [OPTION…] "COMMAND" | sim [OPTION…] -- PROGRAM [ARGUMENT…]',
        "run a command on a throw-away clone, and show what it would do",
        (*_RUNNING, *_RUNTIMES, "--all", "--stat", "--side-by-side", "--no-pager"),
        (1, ANY),
        command=True,
        details="""  agent-sandbox sim "make clean"
  agent-sandbox --simulate run "git commit -m 'fix: bug'"

It prints an effect plan: changed files, started programs, network requests, secrets that it tried to read or was given, how it ends, and
the risk of each. The clone has the changes in the project's sandbox (not with --throw-away). Neither is changed. With a network, requests
that only read are sent; others (POST, PUT, DELETE, WebSocket, what is no HTTP) get a 403 and are listed, unless --send sends them.

The command's output goes to standard error, the plan to standard output, and sim exits as the command does. The plan is
kept for an hour, for carry-out to do exactly what it says.""",
    ),
    "carry-out": Verb(
        "carry-out [DIGEST [--yes] [--approve KINDS] [--system] [--caches] [--files-only] [--env NAME[=VALUE]]]",
        "carry out a plan of sim, exactly",
        (
            *("--yes", "--approve", "--system", "--caches", "--files-only", "--env", "--env-file", "--capability"),
            *("--all", "--stat", "--side-by-side", "--no-pager"),
        ),
        (0, 1),
        helps={"--system": "also changes outside the project"},
        details="""  agent-sandbox carry-out
  agent-sandbox carry-out 3f9a1c0b2d4e --yes
  agent-sandbox carry-out 3f9a --approve git-history

Without a digest it lists the plans. With the first letters of one, it shows that plan once more and asks. The files become
what the plan says, byte for byte, all of them or none; `undo` takes that back. It is refused if anything has changed since:
the plan, the policy, the changes in the sandbox, or a file of the project that it changes or read. A plan works once.

Protected kinds of files need --approve, as for promote. For a plan with requests, the command runs again on a clone, and may send
exactly these: the hosts, ports, methods and paths of the plan. Anything else is refused and reported. If its files come out as
planned, they are carried over; else they are a plan of their own. Variables of --env must be given again. With --files-only
nothing runs, and only the files of the plan are carried over.

It exits with 1 if reality has changed or the command did something else, with 3 if it was not approved; then no file was changed.""",
    ),
    "try": Verb(
        'try NAME="COMMAND"… [--check "COMMAND"] [--promote] [OPTION…] | try [ID[/NAME]] [--promote] [--side-by-side]',
        "try several approaches at once, compare them, and promote the winner",
        (
            *("--check", "--promote", "--first", "--timeout", "--total-timeout", "--cpu", "--jobs", "--report", "--live", "--keep"),
            *("--side-by-side", "--yes", "--approve", "--merge", "--force", "--resolve", "--caches", "--expect", "--only", "--skip"),
            *("--cwd", "--env", "--env-file", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system", "--allow"),
            *("--deny-command", "--network", "--allow-network", "--secret", "--intent", "--budget", "--no-dlp", "--capability", "--policy"),
        ),
        (0, ANY),
        helps={
            "--timeout": "time limit of each attempt with its check: 30, 5m, 1h",
            "--memory": "memory limit of each attempt; fewer run at once if memory is short. Default: an equal share",
            "--side-by-side": "show the diffs of all attempts beside one another",
        },
        details="""  agent-sandbox try a="sed -i s/2/3/ app.py" b="git revert HEAD" --check "pytest -q"
  agent-sandbox try a="npm update" b="npm ci" --check "npm test" --first --timeout 5m --promote
  agent-sandbox try 3f9a1c/b --promote

Each command is a line for bash, in a sandbox of its own. All start from the same frozen copy of the project, with the changes in the
project's sandbox, and run at once, as many as processors and memory allow. The check runs on a copy of each attempt's sandbox, so
nothing that it writes is promoted. An attempt that does not exit with 0 is not checked.

Among those that pass, the winner has the fewest failed tests, then the most passed tests, the fewest changed lines, the fewest changed
files, or else was given first. Numbers of tests are claims of its output (pytest, unittest, Jest, go test, TAP, JUnit XML).

Without --promote nothing real is changed, and attempts are kept for an hour: `try` lists experiments, `try ID` shows one again, and with
--promote promotes its winner or the named attempt. `undo` takes that back.

It exits with 0 if an attempt passed, with 1 if none did or reality has changed, 3 not approved, 124 the whole time was over, 126 or 127
if the check could not be started.""",
    ),
    "status": Verb(
        "status [--all]",
        "describe the project's sandbox, its changes, and what has changed in reality since",
        ("--all",),
        helps={"--all": "list every path that has changed in reality"},
        details="""  agent-sandbox status
  agent-sandbox status --json

Drift is what has changed in reality since the clone was made. If the sandbox changed the same files, `promote` refuses them
until you say what to do.""",
    ),
    "promote": Verb(
        "promote [--only GLOB] [--skip GLOB] [--yes] [OPTION…]",
        "apply the sandbox's changes to the project, all or none (also: apply)",
        (
            *("--only", "--skip", "--yes", "--system", "--caches", "--merge", "--force", "--resolve", "--approve", "--expect", "--dry-run"),
            "--capability",
        ),
        helps={"--system": "also changes outside the project"},
        details="""  agent-sandbox promote --only 'src/*' --yes
  agent-sandbox promote --yes --expect 3f9a12c07b5e
  agent-sandbox promote --merge --resolve markers
  agent-sandbox promote --approve git-history,ci

It shows what would be promoted and asks: y promotes it, d shows the whole diff, s lets you choose files, Enter is no. With
--expect it is refused if the changes are not exactly those that `diff` showed with the same --only (`diff --all` for
--caches --system).

Files that have changed in reality since the sandbox first touched them are refused, unless --merge or --force says what to
do. Protected kinds of files, which run by themselves or are trusted without a look (git hooks, CI workflows, shell start-up
files, new dependencies, …), need --approve: --yes does not cover them. On a terminal you are asked about each kind; those
that you refuse are left out, and the rest is promoted.

It is done as a whole or not at all: after a crash, the next verb in this project finishes it or takes it back.
It exits with 1 if reality has changed or a conflict is open, with 3 if it was not approved or not as
expected; then nothing was changed.""",
    ),
    "undo": Verb(
        "undo [--yes]",
        "take the last promotion back",
        ("--yes", "--capability"),
        details="""All files are as they were before, and the changes are in the sandbox again if nothing has run there since.
It is refused if one of these files has changed since. On a terminal it asks first; without one it needs --yes, and exits
with 3.""",
    ),
    "reset": Verb(
        "reset [--yes]",
        "forget everything the sandbox changed",
        ("--yes",),
        details="On a terminal it asks first. Without one it needs --yes; else it forgets nothing, and exits with 3.",
    ),
    "list": Verb(
        "list",
        "list all your sandboxes: size, changes, last use, and whether their projects still exist",
        project=False,
        details="""The size is what a sandbox takes on the disk. Changes are those that were not promoted; caches do not count.""",
    ),
    "prune": Verb(
        "prune [--unused DAYS] [--unchanged] [--dry-run] [--yes] | prune SANDBOX… [--dry-run] [--yes]",
        "remove sandboxes whose project is gone, and what crashes left behind",
        ("--unused", "--unchanged", "--dry-run", "--yes"),
        (0, ANY),
        project=False,
        details="""  agent-sandbox prune --dry-run
  agent-sandbox prune --unused 30 --unchanged
  agent-sandbox prune app-1f2e3d4c5b6a7988

It shows each sandbox that it would remove, why, how much space that frees, and what would be lost with it; then it asks.
Without a terminal it needs --yes. A sandbox in use is never removed.

A project is gone if its directory is missing from the disk that held it. If that disk is not mounted, or nothing is known
about it, the sandbox stays; name it, as `list` does, to remove it. A project that was moved is gone, too.

It exits with 3 if you say no or it needs --yes, and with 1 if something could not be removed.""",
    ),
    "snapshot": Verb(
        "snapshot [LABEL]",
        "save the sandbox's state, to go back to",
        words=(0, 1),
        details="""  agent-sandbox snapshot before-the-upgrade
  agent-sandbox snapshots
  agent-sandbox rollback before-the-upgrade

A snapshot has a number and, if you like, a label. As root it costs the same however much has changed; otherwise the
changes are copied. There is no snapshot while a run goes on.""",
    ),
    "rollback": Verb(
        "rollback [SNAPSHOT]",
        "go back to a snapshot",
        words=(0, 1),
        details="""  agent-sandbox rollback
  agent-sandbox rollback 2

By number or label; without one, to the last. The present state is saved as a snapshot too, if something ran since the
last, so nothing is lost. The machine itself is not touched.""",
    ),
    "snapshots": Verb(
        "snapshots [--forget SNAPSHOT [--yes]]",
        "list the snapshots as a tree, or forget one",
        ("--forget", "--yes"),
        details="""Forgetting a snapshot frees what only it needed. The sandbox and other snapshots stay as they are. On a terminal it asks
first; without one it needs --yes, and exits with 3.""",
    ),
    "policy": Verb(
        'policy explain | lint | schema | policy test "COMMAND" | policy learn [OPTION…] "COMMAND"… | policy learn -- PROGRAM [ARGUMENT…]',
        "explain, check and test the policy files, or learn a policy from commands",
        ("--policy", "--network", "--allow-network", "--add", "--cwd", "--env", "--env-file", "--timeout"),
        (1, ANY),
        too_many="put the command in quotes",
        details="""  agent-sandbox policy explain
  agent-sandbox policy explain --policy low
  agent-sandbox policy test "git push --force"
  agent-sandbox policy learn "make" "make check" > agent-sandbox.toml

Policy files are /etc/agent-sandbox/policy.toml, ~/.config/agent-sandbox/policy.toml, and in the project agent-sandbox.toml,
or the table tool.agent-sandbox of pyproject.toml. Each can only take away from what those before it left. Options on the
command line override the last two, never the first. --policy applies one more, a preset or a file, which can only take
away, too. The network is opened by --network, by --allow-network, or by network.outbound = true in your own file or in one
that --policy names; a project's file opens none.

test runs nothing: it says what the command would start and do. It exits with 126 if the command would be denied, and with 3
if a person would be asked. lint exits with 1 if something is odd. schema prints a JSON Schema of policy files.

learn runs commands without input, each on a throw-away clone and under the system's file alone, observes them, and prints
the smallest policy that would have allowed them; each line says what needed it. Then it runs them again under that policy,
and says whether they end the same way. Their output goes to standard error. --add prints the project's own file, widened:
write it to another file, because a shell empties that one first. It exits as the commands do, and with 1 if they end
differently.""",
    ),
    "log": Verb(
        "log [OPTION…] | log verify [FILE] | log checkpoint",
        "show and export the record of all actions, and verify that it is unchanged and complete",
        (
            *("--since", "--until", "--denied", "--category", "--level", "--sandbox", "--grep", "--limit", "--follow", "--format"),
            *("--all", "--no-pager", "--keys", "--checkpoint", "--public-key"),
        ),
        (0, 2),
        helps={"--all": "the entries of all projects"},
        details="""  agent-sandbox log --denied --since 2h
  agent-sandbox log --follow --format ocsf
  agent-sandbox log verify
  agent-sandbox log checkpoint > elsewhere/checkpoint
  agent-sandbox log verify copy-of-the-ledger --checkpoint elsewhere/checkpoint

Every action is recorded before it is done, and its outcome afterwards. Without --all it shows the entries of this project;
an export with --format holds all, unless --project names one. NO END marks an action whose end is not recorded: it was
killed, or it still runs. It exits with 1 if entries are missing that the ledger once had.

`log verify` gives two verdicts: whether entries were changed, and whether all entries are there. The second needs evidence
from elsewhere: the anchor in the directory of the ledger's key, or a stored checkpoint. It exits with 1 if either fails.
`log checkpoint` signs the last entry, and needs the extra `sign`.""",
    ),
    "approve": Verb(
        "approve [DIGEST] [--for-run [--timeout TIME]] [--refuse] [--watch] [--code DIGITS]",
        "show the questions that wait for an answer, and answer them",
        ("--for-run", "--timeout", "--refuse", "--watch", "--yes", "--code", "--enroll", "--of"),
        (0, 1),
        project=False,
        helps={
            "--timeout": "with --for-run: how long the answer holds: 90, 10m, 1h",
            "--yes": "allow it without asking; needs the whole digest",
        },
        details="""  agent-sandbox approve
  agent-sandbox approve 3f9a --for-run --timeout 10m
  agent-sandbox approve --watch

Without a digest it shows every question that waits and, on a terminal, asks about each. With one, or its first letters,
about that one. An answer is valid for exactly what is shown. Yes holds once; with --for-run also for the same question
again in that run, for an hour or as --timeout says. A host is then reached with every request of that run.

Without a terminal, give --yes with the whole digest, or --refuse with some letters of it. No answer is a refusal. It exits
with 3 if nothing was answered.""",
    ),
    "deny": Verb(
        "deny DIGEST",
        "refuse a question that waits",
        ("--of",),
        (1, 1),
        project=False,
        details="""  agent-sandbox deny 3f9a

The same as approve DIGEST --refuse. Some letters of the digest are enough.""",
    ),
    "grant": Verb(
        'grant "PATTERN"… --for TIME [--times N] | grant --elevate [--allow PROGRAMS] [--reveal PATH] [--memory SIZE] --for TIME',
        "pre-approve actions, or relax a rule, for a limited time",
        ("--for", "--times", "--sandbox", "--code", "--elevate", "--allow", "--reveal", "--timeout", "--memory", "--disk", "--processes"),
        (0, ANY),
        too_many="put each pattern in quotes",
        helps={
            "--sandbox": "grant it to this sandbox, by its name in `log --all`, instead of the project's",
            "--allow": "with --elevate: these programs may be started, too",
            "--reveal": "with --elevate: show this path, which is hidden as a secret",
            "--timeout": "with --elevate: this time limit instead: 5m, 1h",
            "--memory": "with --elevate: this memory limit instead: 512M, 16G",
            "--disk": "with --elevate: this disk limit instead: 512M, 16G",
            "--processes": "with --elevate: this limit of processes and threads instead",
            "--elevate": "relax rules of the policy, with at least one of --allow, --reveal and the limits",
        },
        details="""  agent-sandbox grant "run git push **" --for 10m --times 3
  agent-sandbox run --capability "$TOKEN" "git push origin main"
  agent-sandbox grant "network api.example.com GET,HEAD" --for 10m
  agent-sandbox grant --elevate --allow curl --memory 16G --for 10m

A pattern is words: run, code, call, promote, undo or propose, then what. A word that ends with * covers every word that begins so,
and ** in last place any number of words. What the policy denies stays denied. After network comes a host, and methods if
only they are meant: a run that holds the token reaches it.

The token is a secret: anybody who has it can use it, in that sandbox, until it expires. Sandboxed programs never see it.
With --elevate there is no token: for that time the runs of the sandbox may do more than the user's and the project's policy
files allow, never more than the system's. Such a run ends with the elevation, and that is recorded.""",
    ),
    "revoke": Verb(
        "revoke NAME… | revoke --all",
        "take back capabilities and elevations",
        ("--all",),
        (0, ANY),
        project=False,
        helps={"--all": "everything that is granted, in all projects"},
        details="""  agent-sandbox capabilities
  agent-sandbox revoke 0f3c5b7a9d1e2f4a6b8c0d1e2f3a4b5c
  agent-sandbox revoke --all

Names are those that `capabilities` lists. From then on they allow nothing: not the next run, the next turn or the next call
of a tool. A program that was started under one before goes on; its process is named. Its next request to a host of the
capability is refused.""",
    ),
    "capabilities": Verb(
        "capabilities",
        "list what is granted, to which sandbox, by whom and for how long",
        project=False,
        details="It lists capabilities and elevations of all projects that have not expired, and how often each was used.",
    ),
    "doctor": Verb(
        "doctor",
        "check what this machine can enforce, and say what to do about the rest",
        project=False,
        details="It exits with 1 if something required is missing.",
    ),
    "verify": Verb(
        "verify [OPTION…]",
        "attack sandboxes on this machine, and report for each promise whether it held",
        ("--env", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system", "--runtime"),
        details="""Two sandboxes are attacked: one as `run` makes them, with the options given here, and one as Sandbox() in Python. Each
attempt is first made without a sandbox, to show that it can succeed: reading planted secrets, writing real files,
reaching listeners, processes and the kernel, using too much of everything, leaving something behind.

It exits with 1 if something got through, or could not be tried. What this machine refuses even without a sandbox is called
inconclusive and changes nothing. The runs are recorded in the ledger like any other.""",
    ),
    "setup": Verb(
        "setup",
        "make the state directory, check the machine, and say what to do next",
        project=False,
        details="""With the extra `wasm` it also compiles the interpreter for code inside WebAssembly: once, for some minutes.""",
    ),
    "completion": Verb(
        "completion bash|zsh|fish",
        "print a completion script for a shell",
        words=(1, ANY),
        project=False,
        details="""  eval "$(agent-sandbox completion bash)"                                          in ~/.bashrc
  eval "$(agent-sandbox completion zsh)"                                           in ~/.zshrc, after compinit
  agent-sandbox completion fish > ~/.config/fish/completions/agent-sandbox.fish

It completes verbs, options and their values: snapshots, protected kinds, presets, sandboxes, categories of the log.
`completion words -- LINE…` prints the words that may stand at the end of a line; the scripts use it.""",
    ),
    "help": Verb("help [VERB]", "show help", words=(0, 1), project=False),
    "version": Verb("version", "show the version", project=False),
}

_LATER = {
    "time travel": ("timeline", "rewind", "fork"),
    "the daemon": ("serve",),
    "the MCP server": ("mcp",),
}
VERBS["simulate"] = replace(VERBS["sim"], usage="simulate …", summary="the same as sim")
VERBS["apply"] = replace(VERBS["promote"], usage="apply …", summary="the same as promote")
_NOT_YET = Verb("", "", tuple(OPTIONS), (0, ANY), command=True)
VERBS |= {name: replace(_NOT_YET, later=what) for what, names in _LATER.items() for name in names}
