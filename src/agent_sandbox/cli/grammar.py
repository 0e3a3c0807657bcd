"""The grammar of the command line as data: verbs, options and what they are for. `manual` has the longer texts."""

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
    `named` is whether the first word of a verb with a command names what the command is run in.
    """

    usage: str
    summary: str
    options: tuple[str, ...] = ()
    words: tuple[int, int] = (0, 0)
    command: bool = False
    too_many: str = ""
    helps: Mapping[str, str] = field(default_factory=dict)
    project: bool = True
    named: bool = False

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
    Option("--runtime", "NAME", "isolation: process, wasm, container, gvisor, microvm, or auto (the cheapest that is enough)"),
    Option("--image", "NAME", "run in this container image, with the project beside its files, instead of a clone of this machine"),
    Option("--pull", help="let podman or docker get the image from its registry"),
    Option("--with", "PACKAGES", "the packages of this machine to make the image from; default: python3"),
    Option("--name", "NAME", "the name of the image; default: the one in the archive"),
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
    Option("--most", "N", "command lines to perform at once; more wait. Default: eight for each processor"),
    Option("--http", help="serve HTTP, too, on a socket that only this user can reach"),
    Option("--listen", "ADDRESS", "serve HTTP, too, on this address of the loopback: 127.0.0.1:8765"),
    Option("--token-file", "FILE", "the token that requests to --listen have to bear; made if it does not exist"),
    Option("--log", "FORM", "messages of the daemon: text, or json, a line for each event; default: text"),
    Option("--unit", "KIND", "print a unit of systemd: user, or system, a template with a user as instance"),
    Option("--status", help="describe the daemon that runs"),
    Option("--stop", help="end the daemon that runs, when what it performs has ended"),
    Option("--unused", "DAYS", "also sandboxes that were not used for so many days"),
    Option("--unchanged", help="also sandboxes without changes"),
    Option("--forget", "SNAPSHOT", "forget this snapshot, by number or label"),
    Option("--since", "TIME", "only entries from then on: 2026-11-16, 2026-11-16T06:30, 30m, 2h, 7d"),
    Option("--until", "TIME", "only entries before then"),
    Option("--denied", help="only refused actions"),
    Option(
        "--category", "NAME", "process|code|promotion|tool|file|network|capability|approval|elevation|experiment|checkpoint|outcome|ledger"
    ),
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
    Option("--undo", help="take the change back"),
    Option("--scope", "WHERE", "whose settings: user (the default), project, or machine (claude only, as root)"),
    Option("--record", "FILE", "write a record of a deterministic, throw-away run, for replay"),
    Option(
        "--detach", help="let it run on in the background, and print the name of its sandbox: see exec, logs, stop and ps", short=("-d",)
    ),
    Option("--idle", "TIME", "with --detach: end the sandbox when it was not used for so long: 10m, 1h (the default), none"),
    Option("--stdin", help="pass standard input to the program; it is read to its end first", short=("-i",)),
    Option("--terminal", help="give the program your terminal, as for a shell or an editor", short=("-t",)),
    Option("--timeline", help="keep the state before every step of a file of Python code, or before this command: see timeline"),
    Option("--in", "ID", "go on in this held session with a timeline; last for the newest"),
    Option("--error", help="the state just before the last error"),
    Option("--end", help="end the session, or with --all all of them"),
    Option("--keep-files", help="put the files that the session changed into the project's sandbox, for diff and promote"),
    Option("--eval", "EXPRESSION", "evaluate an expression there; whatever it does is undone"),
    Option("--file", "PATH", "print a file as it was"),
    Option("--list", "PATH", "list a directory as it was"),
    Option("--count", "N", "how many; default: 1"),
)
OPTIONS = {spelling: option for option in _OPTIONS for spelling in (option.name, *option.short)}
COMMON = ("--json", "--quiet", "--color", "--help", "--project")

_RUNNING = (
    *("--throw-away", "--cwd", "--env", "--env-file", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system"),
    *("--allow", "--deny-command", "--network", "--allow-network", "--secret", "--intent", "--budget", "--no-dlp", "--publish"),
    *("--record-network", "--record-bodies", "--replay-network", "--capability", "--policy", "--explain", "--wait", "--no-wait"),
    *("--watch-reads", "--observe", "--image"),
)
_RUNTIMES = ("--runtime", "--deterministic", "--seed", "--fuel", "--record", "--send")
_TIMELINE = ("--timeline", "--in", "--for")
_TIMELINE_HELPS = {"--for": "with --timeline: how long the session is kept after its last use: 10m, 1h (the default), 1d"}
_RUN_HELPS = {"--for": f"{_TIMELINE_HELPS['--for']}; with --detach: how long the sandbox may run: 8h (the default), 7d"}
_SHOWING = ("--all", "--stat", "--side-by-side", "--patch", "--raw", "--name-only", "--only", "--no-pager")

VERBS = {
    "run": Verb(
        'run [OPTION…] "COMMAND" | run [OPTION…] -- PROGRAM [ARGUMENT…]',
        "run a command on a copy-on-write clone of this machine",
        (*_RUNNING, *_RUNTIMES, "--diff", "--simulate", *_TIMELINE, "--detach", "--idle"),
        (1, ANY),
        command=True,
        helps=_RUN_HELPS,
    ),
    "ps": Verb(
        "ps [--all]",
        "list the sandboxes that run on in the background, and those that were lost",
        ("--all",),
        project=False,
        helps={"--all": "also those that have ended, for a day"},
    ),
    "exec": Verb(
        'exec [OPTION…] NAME "COMMAND" | exec [OPTION…] NAME -- PROGRAM [ARGUMENT…]',
        "run a program in a sandbox that runs in the background, beside its others",
        ("--cwd", "--env", "--env-file", "--timeout", "--stdin", "--terminal"),
        (2, ANY),
        command=True,
        project=False,
        named=True,
        helps={"--cwd": "start in this directory; default: the one that the sandbox was started in"},
    ),
    "logs": Verb(
        "logs NAME [--follow] [--limit N]",
        "print what a program in the background has printed",
        ("--follow", "--limit"),
        (1, 1),
        project=False,
        helps={"--follow": "go on with what it prints, until the sandbox ends", "--limit": "the newest N lines"},
    ),
    "stop": Verb(
        "stop NAME… [--timeout TIME] | stop --all [--timeout TIME]",
        "end sandboxes in the background; their changes are kept",
        ("--all", "--timeout"),
        (0, ANY),
        project=False,
        helps={"--all": "all that run", "--timeout": "how long its program may take to end before it is killed; default: 10"},
    ),
    "shell": Verb(
        "shell [OPTION…]",
        "work in the sandbox yourself, in an interactive shell",
        _RUNNING,
    ),
    "code": Verb(
        "code FILE|- [--language NAME] [OPTION…] [-- ARGUMENT…]",
        "run a file of Python, JavaScript, Ruby or Bash in the same sandbox",
        (*_RUNNING, *_RUNTIMES, "--diff", "--simulate", "--language", *_TIMELINE),
        (1, ANY),
        too_many="arguments for the code follow --",
        helps=_TIMELINE_HELPS,
    ),
    "replay": Verb(
        "replay RECORD [--env NAME[=VALUE]] [--timeout TIME]",
        "run a recorded run again, and report where it departs from its record",
        ("--env", "--timeout", "--cwd"),
        (1, 1),
    ),
    "diff": Verb(
        'diff [OPTION…] [PATH… | "COMMAND" | -- PROGRAM [ARGUMENT…]]',
        "show what the sandbox would change, or what a command would",
        (
            *_SHOWING,
            *("--cwd", "--env", "--env-file", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system"),
            *("--runtime", "--image"),
            *("--allow", "--deny-command", "--network", "--allow-network", "--secret", "--intent", "--budget", "--no-dlp", "--policy"),
        ),
        (0, ANY),
        command=True,
    ),
    "sim": Verb(
        'sim [OPTION…] "COMMAND" | sim [OPTION…] -- PROGRAM [ARGUMENT…]',
        "run a command on a throw-away clone, and show what it would do",
        (*_RUNNING, *_RUNTIMES, "--all", "--stat", "--side-by-side", "--no-pager"),
        (1, ANY),
        command=True,
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
    ),
    "agent": Verb(
        "agent [OPTION…] -- PROGRAM [ARGUMENT…]",
        "run a whole coding agent in the sandbox: its API can be reached, its key stays outside",
        _RUNNING,
        (1, ANY),
        command=True,
    ),
    "connect": Verb(
        "connect claude|codex|gemini|cursor|vscode [--scope WHERE] [--undo] [--dry-run] [--yes]",
        "connect a coding agent of this machine to the sandbox, or take that back",
        ("--scope", "--undo", "--dry-run", "--yes"),
        (1, 1),
    ),
    "hook": Verb(
        "hook claude|codex|gemini",
        "answer a tool call of a coding agent, which writes it to standard input",
        words=(1, 1),
        project=False,
    ),
    "shell-prefix": Verb(
        "shell-prefix [--project DIR] -- COMMAND",
        "run one shell command in the sandbox, for programs that put a prefix before their commands",
        words=(1, 1),
        command=True,
    ),
    "timeline": Verb(
        "timeline [ID] | timeline SANDBOX|DIR | timeline --all | timeline [ID] --end|--keep-files | timeline --all --end",
        "show the steps of a session, or the runs of a sandbox; list sessions, or end them",
        ("--all", "--end", "--keep-files"),
        (0, 1),
        project=False,
        helps={"--all": "all sessions that are held"},
    ),
    "rewind": Verb(
        "rewind [ID] STEP | rewind [ID] --error | rewind SANDBOX|DIR STEP",
        "return a session to the state before a step, memory and files; or a sandbox, files only",
        ("--error",),
        (0, 2),
        project=False,
    ),
    "inspect": Verb(
        "inspect [ID] [STEP] [--eval EXPRESSION | --file PATH | --list PATH] | inspect [ID] STEP [STEP] --diff",
        "look at the variables and files of a session before a step, or at the files of a sandbox",
        ("--eval", "--file", "--list", "--diff", "--error", "--timeout"),
        (0, 3),
        project=False,
        helps={"--diff": "compare the states before two steps", "--timeout": "time limit of the answer; default: 10"},
    ),
    "fork": Verb(
        "fork [ID] [STEP] [--count N]",
        "make independent sessions from the state before a step, memory and files",
        ("--count", "--error"),
        (0, 2),
        project=False,
    ),
    "status": Verb(
        "status [--all]",
        "describe the project's sandbox, its changes, and what has changed in reality since",
        ("--all",),
        helps={"--all": "list every path that has changed in reality"},
    ),
    "promote": Verb(
        "promote [--only GLOB] [--skip GLOB] [--yes] [OPTION…]",
        "apply the sandbox's changes to the project, all or none (also: apply)",
        (
            *("--only", "--skip", "--yes", "--system", "--caches", "--merge", "--force", "--resolve", "--approve", "--expect", "--dry-run"),
            "--capability",
        ),
        helps={"--system": "also changes outside the project"},
    ),
    "undo": Verb(
        "undo [--yes]",
        "take the last promotion back",
        ("--yes", "--capability"),
    ),
    "reset": Verb(
        "reset [--yes]",
        "forget everything the sandbox changed",
        ("--yes",),
    ),
    "list": Verb(
        "list",
        "list all your sandboxes: size, changes, last use, and whether their projects still exist",
        project=False,
    ),
    "prune": Verb(
        "prune [--unused DAYS] [--unchanged] [--dry-run] [--yes] | prune SANDBOX… [--dry-run] [--yes]",
        "remove sandboxes whose project is gone, and what crashes left behind",
        ("--unused", "--unchanged", "--dry-run", "--yes"),
        (0, ANY),
        project=False,
    ),
    "snapshot": Verb(
        "snapshot [LABEL]",
        "save the sandbox's state, to go back to",
        words=(0, 1),
    ),
    "rollback": Verb(
        "rollback [SNAPSHOT]",
        "go back to a snapshot",
        words=(0, 1),
    ),
    "snapshots": Verb(
        "snapshots [--forget SNAPSHOT [--yes]]",
        "list the snapshots as a tree, or forget one",
        ("--forget", "--yes"),
    ),
    "checkpoints": Verb(
        "checkpoints | checkpoints show|delete ID [--yes] | checkpoints export ID FILE | checkpoints import FILE",
        "list the saved sessions of wasm, delete one, or carry one to another machine",
        ("--yes",),
        (0, 3),
        project=False,
    ),
    "image": Verb(
        "image | image add NAME [--pull] | image load FILE [--name NAME] | image from-machine NAME [--with PACKAGES] | image remove NAME",
        "list the container images for runs, add, make or remove one",
        ("--pull", "--with", "--name", "--yes"),
        (0, 2),
        project=False,
    ),
    "policy": Verb(
        'policy explain | lint | schema | policy test "COMMAND" | policy learn [OPTION…] "COMMAND"… | policy learn -- PROGRAM [ARGUMENT…]',
        "explain, check and test the policy files, or learn a policy from commands",
        ("--policy", "--network", "--allow-network", "--add", "--cwd", "--env", "--env-file", "--timeout"),
        (1, ANY),
        too_many="put the command in quotes",
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
    ),
    "deny": Verb(
        "deny DIGEST",
        "refuse a question that waits",
        ("--of",),
        (1, 1),
        project=False,
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
    ),
    "revoke": Verb(
        "revoke NAME… | revoke --all",
        "take back capabilities and elevations",
        ("--all",),
        (0, ANY),
        project=False,
        helps={"--all": "everything that is granted, in all projects"},
    ),
    "capabilities": Verb(
        "capabilities",
        "list what is granted, to which sandbox, by whom and for how long",
        project=False,
    ),
    "serve": Verb(
        "serve [--most N] [--http] [--listen ADDRESS --token-file FILE] [--log FORM] | serve --status | serve --stop | serve --unit KIND",
        "run the daemon of this user, which performs command lines, and serves them over HTTP",
        ("--most", "--http", "--listen", "--token-file", "--log", "--status", "--stop", "--unit"),
        project=False,
    ),
    "mcp": Verb(
        "mcp [OPTION…] [--listen ADDRESS]",
        "serve the project's sandbox to an MCP client: its model runs, reads and changes in the sandbox",
        (
            *("--listen", "--env", "--env-file", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal"),
            *("--allow", "--deny-command", "--network", "--allow-network", "--secret", "--intent", "--budget", "--no-dlp"),
            *("--capability", "--policy"),
        ),
        helps={
            "--listen": "serve streamable HTTP at this local address instead, with a token: 127.0.0.1:8765",
            "--timeout": "longest time of one call: 30, 5m, 1h; by default a call has 10m, and may ask for more",
        },
    ),
    "doctor": Verb(
        "doctor",
        "check what this machine can enforce, and say what to do about the rest",
        project=False,
    ),
    "verify": Verb(
        "verify [OPTION…]",
        "attack sandboxes on this machine, and report for each promise whether it held",
        ("--env", "--timeout", "--memory", "--disk", "--processes", "--deny", "--reveal", "--system", "--runtime", "--image"),
    ),
    "setup": Verb(
        "setup [microvm]",
        "make the state directory, check the machine, and say what to do next; or make the virtual machine of the runtime microvm",
        words=(0, 1),
        project=False,
    ),
    "completion": Verb(
        "completion bash|zsh|fish",
        "print a completion script for a shell",
        words=(1, ANY),
        project=False,
    ),
    "help": Verb("help [VERB]", "show help", words=(0, 1), project=False),
    "version": Verb("version", "show the version", project=False),
}

VERBS["simulate"] = replace(VERBS["sim"], usage="simulate …", summary="the same as sim")
VERBS["apply"] = replace(VERBS["promote"], usage="apply …", summary="the same as promote")
