"""The manual of each verb, which help prints below its usage: examples, then what happens. Only help loads it."""

from __future__ import annotations

MANUAL = {
    "run": """  agent-sandbox run "make test"
  agent-sandbox run --timeout 5m --memory 2G -- npm test
  agent-sandbox run --throw-away "rm -rf node_modules && ls"
  agent-sandbox run --detach --publish 3000 "npm run dev"

A single word is a line for bash; several words, or those after --, are a program and its arguments. Changes are kept in
the project's sandbox, on top of those of earlier runs. The machine itself is never written. There is no network, unless --network
names hosts or --allow-network opens all public ones.

With --detach it prints the name of the sandbox as soon as the program runs, and the sandbox goes on without the command: until the
program ends, `stop`, 8 hours (--for), or an hour without use (--idle). `exec` runs more programs in it. The sandbox of the project is in
use meanwhile; --throw-away uses another one.

It exits as the command does; 124 timed out, 125 the sandbox could not start, 126 denied or not executable,
127 not found, 128+n ended by signal n, 137 out of memory.""",
    "ps": """  agent-sandbox ps
  agent-sandbox ps --all

A sandbox is lost if the process that held it was killed: then nothing of it runs, and what it had changed is in its project's sandbox.
Those that have ended are listed with --all for a day, and can still be asked for their output. `prune` forgets them.""",
    "exec": """  agent-sandbox exec d3f9a12 -- curl -s localhost:8000
  agent-sandbox exec --env NODE_ENV=test d3f9a12 "npm test && tail -n 3 server.log"
  agent-sandbox exec -i d3f9a12 -- sh < script.sh
  agent-sandbox exec -t d3f9a12 -- bash

The program sees the files, processes, /tmp and network of the others in that sandbox, and has the variables and the directory that the
sandbox was started with. The policy is that of the sandbox: each program is decided and recorded, and limits of memory, disk and processes
are for all together. It ends with its caller, and in any case with the sandbox. What it leaves in the background goes on.

Input is passed with --stdin, up to 16 MiB; or it is typed, with --terminal, which gives the program a terminal of its own: every key goes
there, Ctrl-C too. It exits as the program does, and otherwise as run; a program that met the memory limit ends with 137.""",
    "logs": """  agent-sandbox logs d3f9a12 --follow
  agent-sandbox logs d3f9a12 --limit 20

It prints what the first program of the sandbox has printed, to standard output and standard error as the program did. The newest output
is kept on disk, about 24 MB, until a day after the sandbox has ended. Output of exec goes to its caller and is not in it.""",
    "stop": """  agent-sandbox stop d3f9a12
  agent-sandbox stop --all --timeout 30

The first program and the processes of its group get SIGTERM. When it has ended, or after 10 seconds (--timeout), everything else in the
sandbox is ended. The changes are in the sandbox of the project then: see diff and promote.""",
    "shell": """  agent-sandbox shell
  agent-sandbox shell --throw-away --env-file .env

It starts $SHELL, or bash or sh, on a terminal of its own in the same sandbox as `run`; its prompt begins with (sandbox). In
every other shell than bash, start-up files that set a prompt hide that mark; the variable AGENT_SANDBOX is 1. It needs a
terminal, exits as the shell does, and then says how much is changed.""",
    "code": """  agent-sandbox code analyse.py -- --fast data.csv
  agent-sandbox code --runtime auto --throw-away analyse.py
  echo 'print(6 * 7)' | agent-sandbox code - --language python

The language is that of --language, of the file's extension, or of its first line. With - the code is read from standard
input.""",
    "replay": """  agent-sandbox code --deterministic --throw-away --record /var/tmp/run.json analyse.py
  agent-sandbox replay /var/tmp/run.json

It exits with 0 if output, changes, exit and fuel were the same; with 1 if they were not, and prints where; with 125 if it
cannot be run again here: another engine, other rules about files, a missing variable. Output of the code is not shown. A
record holds code from whoever made it: it runs in a throw-away sandbox, and its record permits nothing.""",
    "diff": """  agent-sandbox diff --only 'src/*.py' --side-by-side
  agent-sandbox diff --patch | git apply
  agent-sandbox diff README.md src
  agent-sandbox diff "make format"

First the project, as a unified diff; then a list of changes elsewhere. Caches are one line; promote leaves them. Invisible
characters are shown escaped, and removed lines are never left out.

Words that all name files or directories, changed or not, are paths to show. Otherwise they are a command; what follows --
always is one. A command runs on a throw-away clone, and nothing of it is kept. Its output goes to standard error, the diff to standard
output, and diff exits as the command does.""",
    "sim": """  agent-sandbox sim "make clean"
  agent-sandbox --simulate run "git commit -m 'fix: bug'"

It prints an effect plan: changed files, started programs, network requests, secrets that it tried to read or was given, how it ends, and
the risk of each. The clone has the changes in the project's sandbox (not with --throw-away). Neither is changed. With a network, requests
that only read are sent; others (POST, PUT, DELETE, WebSocket, what is no HTTP) get a 403 and are listed, unless --send sends them.

The command's output goes to standard error, the plan to standard output, and sim exits as the command does. The plan is
kept for an hour, for carry-out to do exactly what it says.""",
    "carry-out": """  agent-sandbox carry-out
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
    "try": """  agent-sandbox try a="sed -i s/2/3/ app.py" b="git revert HEAD" --check "pytest -q"
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
    "agent": """  agent-sandbox agent -- claude
  agent-sandbox agent -- codex exec "mend the tests"
  agent-sandbox agent --network packages -- gemini

The program runs in the project's sandbox and can reach its API. Its key (ANTHROPIC_API_KEY, OPENAI_API_KEY, GEMINI_API_KEY) is a
placeholder inside; the egress puts the key in on the way to that API only. Settings and logins in your home directory are hidden inside;
--reveal shows a file. Options of `run` add to this. For another program name its hosts and its key:
--network api.example.com --secret KEY@api.example.com.""",
    "connect": """  agent-sandbox connect claude
  agent-sandbox connect codex --scope project --dry-run
  agent-sandbox connect gemini --undo

It shows the change of the program's settings as a diff, and asks; --yes makes it without asking. claude, codex and gemini get the hook, the
MCP server, and permissions of their own that hold if the hook dies; cursor and vscode, whose tools it cannot rewrite, get the MCP server.
A second time it changes nothing. --undo takes back what was changed, and keeps what you have changed since.""",
    "hook": """  agent-sandbox hook claude < event.json

`connect` puts it into the program's settings. Shell commands are rewritten so that they run in the project's sandbox; tools that use files
of the machine are refused, with the command to use instead. Whatever goes wrong, it refuses, with exit code 2.
~/.config/agent-sandbox/coding-agents.toml may list commands that run directly (direct) or are asked about (ask), and tools that are
left to the program (tools).""",
    "shell-prefix": """  CLAUDE_CODE_SHELL_PREFIX=agent-sandbox-shell claude
  agent-sandbox shell-prefix -- 'make test && ls'

It is `run --quiet -- bash -c COMMAND` and takes no option that permits more. The program `agent-sandbox-shell` is the same as one word,
which Claude Code needs: it takes the whole prefix for the name of a program. In a sandbox it starts the command itself.""",
    "timeline": """  agent-sandbox run --timeline analysis.py
  agent-sandbox timeline
  agent-sandbox timeline t3f9a12 --end

`run --timeline FILE [ARGUMENT…]` runs a file of Python code statement by statement, and keeps the state before each: all variables, and all
files that it may write. Afterwards a background process holds the session, until nobody has used it for an hour (or --for TIME), or
until --end. Without an ID, the verbs use the newest session.

Each line is a step: number, time, the first line of the statement, the error that it raised, and the files that it changed. > marks the
present state, * the steps that led to it, ✗ an error, - a state that is not kept. After rewind, the old future is another branch,
which is indented.

The code sees the project, the interpreter with its packages and the programs of the system, and not the rest of the machine. It has no
standard input and no terminal. It changes neither the project nor the project's sandbox; `inspect --file` reads what it wrote. --keep-files
writes the files of the project that it has changed up to now into the project's sandbox, with their content and without their modes; from
there `diff` shows them and `promote` applies them.

  agent-sandbox run --timeline -- make test
  agent-sandbox timeline .
  agent-sandbox rewind . 3
  agent-sandbox inspect . 3 --file report.txt

`run --timeline` with a command, which has blanks or follows --, runs it in the project's sandbox as ever, and takes a snapshot before it.
With . or another directory, or the name of a sandbox as `list` shows it, the verbs show these runs, go back to the files before one of
them, and read, list and compare files. There is no memory to return to. A hundred runs are kept. A run without --timeline counts to the one
before it.""",
    "rewind": """  agent-sandbox rewind 7
  agent-sandbox rewind --error
  echo "print(rows)" | agent-sandbox run --in last -

--error is the state just before the last error. From there, `run --in ID FILE` goes on: with - the code is read from standard input, and
`last` is the newest session. A state that was given up is reached by running again what came after the one before it, which is
said; with a network it is refused. Processes that the code had started are ended; pipes and connections are not restored.""",
    "inspect": """  agent-sandbox inspect
  agent-sandbox inspect 7 --eval "rows[:3]"
  agent-sandbox inspect 7 --file rows.csv > rows.csv
  agent-sandbox inspect 3 7 --diff

It shows the state before a step; without one, the present state, or after an error the one just before it, with the frames of the error and
their variables. Of tables and arrays it shows shape, columns and the first rows. Nothing is changed, whatever a repr or an expression
does. --diff compares with the present state if only one step is named. Files of the project that the code has not changed are shown as
they are now.

It exits with 1 if the expression raises or the file cannot be read in that state, with 2 if there is no such step or session.""",
    "fork": """  agent-sandbox fork 7 --count 3
  agent-sandbox run --in t3f9a12.2 fix.py

It prints the id of each new session. They have the memory and the files of that state, run independently of one another, and are held
like the session that they come from, which rests until they are ended. A fork keeps no states: `rewind`, `inspect` and `fork` run
its code again to reach one, and say so. Without a step, it is the present state.""",
    "status": """  agent-sandbox status
  agent-sandbox status --json

Drift is what has changed in reality since the clone was made. If the sandbox changed the same files, `promote` refuses them
until you say what to do.""",
    "promote": """  agent-sandbox promote --only 'src/*' --yes
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
    "undo": """All files are as they were before, and the changes are in the sandbox again if nothing has run there since.
It is refused if one of these files has changed since. On a terminal it asks first; without one it needs --yes, and exits
with 3.""",
    "reset": """On a terminal it asks first. Without one it needs --yes; else it forgets nothing, and exits with 3.""",
    "list": """The size is what a sandbox takes on the disk. Changes are those that were not promoted; caches do not count.""",
    "prune": """  agent-sandbox prune --dry-run
  agent-sandbox prune --unused 30 --unchanged
  agent-sandbox prune app-1f2e3d4c5b6a7988

It shows each sandbox that it would remove, why, how much space that frees, and what would be lost with it; then it asks.
Without a terminal it needs --yes. A sandbox in use is never removed.

A project is gone if its directory is missing from the disk that held it. If that disk is not mounted, or nothing is known
about it, the sandbox stays; name it, as `list` does, to remove it. A project that was moved is gone, too.

It exits with 3 if you say no or it needs --yes, and with 1 if something could not be removed.""",
    "snapshot": """  agent-sandbox snapshot before-the-upgrade
  agent-sandbox snapshots
  agent-sandbox rollback before-the-upgrade

A snapshot has a number and, if you like, a label. As root it costs the same however much has changed; otherwise the
changes are copied. There is no snapshot while a run goes on.""",
    "rollback": """  agent-sandbox rollback
  agent-sandbox rollback 2

By number or label; without one, to the last. The present state is saved as a snapshot too, if something ran since the
last, so nothing is lost. The machine itself is not touched.""",
    "checkpoints": """  agent-sandbox checkpoints
  agent-sandbox checkpoints export 3f9a1c0b2d4e session.checkpoint
  agent-sandbox checkpoints import session.checkpoint
  agent-sandbox checkpoints delete "after loading"

`session.checkpoint("after loading")` in Python saves a session, and `Sandbox(runtime="wasm").resume("after loading")` goes on from there.
ID is a name, or the first letters of an id. A checkpoint holds all memory and files of its session: guard it as you guard those. One from
somebody else is a program of theirs: it can do what the sandbox that resumes it permits. On a terminal, delete asks; elsewhere it needs
--yes.""",
    "image": """  agent-sandbox image from-machine python:3.11-slim
  agent-sandbox run --image python:3.11-slim -- python3 --version
  agent-sandbox image add node:22-slim
  agent-sandbox image load image.tar --name mine:1

Podman and docker only supply images: `add` copies one that they have, and --pull lets them get it from their registry first.
`load` takes an archive of `podman save` or `docker save`. `from-machine` makes an image of installed packages and what they
depend on, without a network. Every image is unpacked inside a sandbox, without devices and setuid bits. A run in an image has
the walls of every other run, sees of the machine only the project, and never pulls. What it changes in the files of the image
stays in the sandbox, and is listed apart, below /dev/image. On a terminal, remove asks; elsewhere it needs --yes.""",
    "snapshots": """Forgetting a snapshot frees what only it needed. The sandbox and other snapshots stay as they are. On a terminal it asks
first; without one it needs --yes, and exits with 3.""",
    "policy": """  agent-sandbox policy explain
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
    "log": """  agent-sandbox log --denied --since 2h
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
    "approve": """  agent-sandbox approve
  agent-sandbox approve 3f9a --for-run --timeout 10m
  agent-sandbox approve --watch

Without a digest it shows every question that waits and, on a terminal, asks about each. With one, or its first letters,
about that one. An answer is valid for exactly what is shown. Yes holds once; with --for-run also for the same question
again in that run, for an hour or as --timeout says. A host is then reached with every request of that run.

Without a terminal, give --yes with the whole digest, or --refuse with some letters of it. No answer is a refusal. It exits
with 3 if nothing was answered.""",
    "deny": """  agent-sandbox deny 3f9a

The same as approve DIGEST --refuse. Some letters of the digest are enough.""",
    "grant": """  agent-sandbox grant "run git push **" --for 10m --times 3
  agent-sandbox run --capability "$TOKEN" "git push origin main"
  agent-sandbox grant "network api.example.com GET,HEAD" --for 10m
  agent-sandbox grant --elevate --allow curl --memory 16G --for 10m

A pattern is words: run, code, call, promote, undo or propose, then what. A word that ends with * covers every word that begins so,
and ** in last place any number of words. What the policy denies stays denied. After network comes a host, and methods if
only they are meant: a run that holds the token reaches it.

The token is a secret: anybody who has it can use it, in that sandbox, until it expires. Sandboxed programs never see it.
With --elevate there is no token: for that time the runs of the sandbox may do more than the user's and the project's policy
files allow, never more than the system's. Such a run ends with the elevation, and that is recorded.""",
    "revoke": """  agent-sandbox capabilities
  agent-sandbox revoke 0f3c5b7a9d1e2f4a6b8c0d1e2f3a4b5c
  agent-sandbox revoke --all

Names are those that `capabilities` lists. From then on they allow nothing: not the next run, the next turn or the next call
of a tool. A program that was started under one before goes on; its process is named. Its next request to a host of the
capability is refused.""",
    "capabilities": """It lists capabilities and elevations of all projects that have not expired, and how often each was used.""",
    "serve": """  agent-sandbox serve
  agent-sandbox serve --status

It runs until Ctrl-C, SIGTERM or serve --stop. While it does, run, code, sim, diff, status, list, log, snapshot, snapshots, rollback, exec,
logs and ps are performed by it, with the caller's streams, directory and environment, and with the same results. Sandboxes in the
background and sessions with a timeline that are begun then are owned by it: they end with it, in order if it is asked to stop.

The caller performs the command itself where the daemon could not do exactly the same: at a terminal, in a container, with other limits or
rights, or after an upgrade. With AGENT_SANDBOX_NO_DAEMON=1 no daemon is used. A caller that is killed ends its command; a daemon that is
killed ends all of them.""",
    "mcp": """  claude mcp add sandbox -- agent-sandbox mcp --project "$PWD"
  agent-sandbox mcp --network packages --memory 4G
  agent-sandbox mcp --listen 127.0.0.1:8765

Without --listen it speaks on standard input and output, and ends with them. With it, clients need the token in
AGENT_SANDBOX_MCP_TOKEN, or the one that is printed. The options are the policy of everything that the model does; the model
can narrow it, and not widen it. Real files are changed by its tool promote alone, which asks you: in the client if it can
ask, else by `agent-sandbox approve`. It needs the extra `mcp`.""",
    "doctor": """It exits with 1 if something required is missing.""",
    "verify": """Two sandboxes are attacked: one as `run` makes them, with the options given here, and one as Sandbox() in Python. Each
attempt is first made without a sandbox, to show that it can succeed: reading planted secrets, writing real files,
reaching listeners, processes and the kernel, using too much of everything, leaving something behind.

--image NAME, --runtime gvisor and --runtime microvm attack a sandbox of that runtime as well, in a column of its own.

It exits with 1 if something got through, or could not be tried. What this machine refuses even without a sandbox is called
inconclusive and changes nothing. The runs are recorded in the ledger like any other.""",
    "setup": """With the extra `wasm` it also compiles the interpreter for code inside WebAssembly: once, for some minutes.

`setup microvm` boots a virtual machine once and saves it, so that later runs start from there. Otherwise the first run does it.""",
    "completion": """  eval "$(agent-sandbox completion bash)"                                          in ~/.bashrc
  eval "$(agent-sandbox completion zsh)"                                           in ~/.zshrc, after compinit
  agent-sandbox completion fish > ~/.config/fish/completions/agent-sandbox.fish

It completes verbs, options and their values: snapshots, protected kinds, presets, sandboxes, categories of the log.
`completion words -- LINE…` prints the words that may stand at the end of a line; the scripts use it.""",
}
MANUAL |= {"simulate": MANUAL["sim"], "apply": MANUAL["promote"]}
