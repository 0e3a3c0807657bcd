"""The effects of tools with special argument rules: find, dd, tar, sed, interpreters, downloaders, databases, Git."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from agent_sandbox.readers.shell.effects import Effect, EffectKind, on_path, split, words
from agent_sandbox.readers.shell.expansion import Field

_CURL_VALUED = words(
    """
    -o --output -X --request -H --header -d --data --data-raw --data-binary --data-urlencode -F --form -u --user -A --user-agent
    -e --referer -b --cookie -c --cookie-jar -T --upload-file -x --proxy -m --max-time --connect-timeout -w --write-out --retry -K
    --config -E --cert --key --cacert -D --dump-header --resolve -r --range --url --json --limit-rate -C --interface --unix-socket
    """
)
_WGET_VALUED = words(
    """
    -O --output-document -P --directory-prefix -o --output-file -a --append-output -t --tries -T --timeout -U --user-agent
    --header --post-data --post-file --method --body-data --body-file -i --input-file -e --execute --user --password -A -R -l --level -w
    --wait -Q
    """
)
_SQL_DESTROYS = frozenset({"drop", "delete", "truncate"})
_SQL_WRITES = frozenset({"insert", "update", "create", "alter", "grant", "revoke", "copy", "merge", "replace", "vacuum", "reindex"})
_GIT_VALUED = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env"})
_GIT_SUB_VALUED = frozenset({"-m", "-F", "-b", "-B", "-u", "-o", "--output", "-n", "--depth", "--author", "--date", "--format", "--since"})
_GIT_READS = words(
    """
    log status diff show blame rev-parse ls-files ls-tree describe grep shortlog cat-file rev-list help version merge-base
    name-rev for-each-ref diff-tree diff-files diff-index whatchanged check-ignore check-attr count-objects var show-ref
    show-branch cherry range-diff verify-commit verify-tag fsck annotate --version --help
    """
)
_GIT_WRITES = words(
    """
    add commit merge rebase cherry-pick revert mv init switch apply am notes bisect format-patch bundle update-index write-tree
    commit-tree hash-object update-ref symbolic-ref read-tree checkout-index sparse-checkout replace repack pack-refs mktree stage
    maintenance
    """
)
_GIT_NETWORK = words(
    """
    clone fetch pull push ls-remote request-pull send-email fetch-pack send-pack lfs svn p4 daemon
    """
)
_GIT_DESTROYS = words("clean filter-branch filter-repo gc prune rm")
_GIT_CODE_SETTINGS = (
    *("alias.", "core.pager", "core.editor", "core.sshcommand", "core.fsmonitor", "core.hookspath", "core.gitproxy", "pager."),
    *("diff.external", "credential.helper", "filter.", "gpg.program", "sequence.editor", "uploadpack.", "protocol.ext.allow"),
)
# Subcommands that only read unless given something to change: the words with which they only read, and those with which they destroy.
_GIT_LISTING = {
    "branch": (
        frozenset({"-l", "--list", "-a", "-r", "-v", "--show-current", "--contains", "--merged", "--no-merged"}),
        {"-d", "-D", "--delete"},
    ),
    "tag": (frozenset({"-l", "--list", "-n", "--contains", "--points-at", "-v"}), {"-d", "--delete", "-f", "--force"}),
    "remote": (frozenset({"-v", "--verbose"}), {"remove", "rm", "prune"}),
    "stash": (frozenset({"list", "show"}), {"drop", "clear"}),
    "worktree": (frozenset({"list"}), {"remove", "prune"}),
    "submodule": (frozenset({"status", "summary"}), {"deinit"}),
    "config": (
        frozenset({"--get", "--get-all", "--list", "-l", "--get-regexp", "list", "get"}),
        {"--unset", "--unset-all", "--remove-section"},
    ),
    "reflog": (frozenset({"show", "exists"}), {"expire", "delete"}),
    "archive": (frozenset(), set()),
}
_GIT_NEEDS_NO_OPERAND = frozenset({"branch", "tag", "remote", "submodule", "reflog", "archive"})


def dd(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `dd if=… of=…`."""
    effects: list[Effect] = []
    for field in fields:
        name, _, value = field.shown.partition("=")
        if name in ("if", "of"):
            effects += on_path(EffectKind.READS if name == "if" else EffectKind.WRITES, value)
    return effects


def find(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `find`: it reads, unless told to delete or to list into a file.

    The commands that it executes are analysed elsewhere, by `wrappers.executed_by_find`.
    """
    words = [field.shown for field in fields]
    where = [word for word in _leading(words) if not word.startswith("-")] or ["."]
    effects = [Effect(EffectKind.READS, word) for word in where]
    effects += [Effect(EffectKind.DESTROYS, word) for word in where if "-delete" in words]
    for option, value in pairwise(words):
        effects += on_path(EffectKind.WRITES, value) if option in ("-fprint", "-fprintf", "-fls", "-fprint0") else []
    return effects


def _leading(words: list[str]) -> list[str]:
    end = next(
        (index for index, word in enumerate(words) if (word.startswith("-") and word not in ("-H", "-L", "-P")) or word in ("(", "!")),
        len(words),
    )
    return words[:end]


def tar(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `tar`, also for option letters without a dash."""
    words = [field.shown for field in fields]
    if words and not words[0].startswith("-"):
        fields = [Field(f"-{words[0]}", fields[0].known), *fields[1:]]
    valued = frozenset(
        {"-f", "--file", "-C", "--directory", "-T", "--exclude", "-X", "--transform", "-I", "--use-compress-program", "--to-command"}
    )
    arguments, _ = split(fields, valued)
    archive = next((value.shown for value in arguments.values({"-f", "--file"})), "-")
    into = next((value.shown for value in arguments.values({"-C", "--directory"})), ".")
    effects = (
        [Effect(EffectKind.RUNS_CODE, "tar")]
        if arguments.has("--to-command", "-I", "--use-compress-program", "--checkpoint-action")
        else []
    )
    if arguments.has("-x", "--extract", "--get"):
        written = [] if arguments.has("-O", "--to-stdout") else [Effect(EffectKind.WRITES, into)]
        return [*on_path(EffectKind.READS, archive), *written, *effects]
    if arguments.has("-c", "--create", "-r", "--append", "-u", "--update"):
        removed = [Effect(EffectKind.DESTROYS, each.shown) for each in arguments.operands] if arguments.has("--remove-files") else []
        return [
            *(Effect(EffectKind.READS, each.shown) for each in arguments.operands),
            *on_path(EffectKind.WRITES, archive),
            *removed,
            *effects,
        ]
    if arguments.has("--delete"):
        return [Effect(EffectKind.DESTROYS, archive), *effects]
    return [*on_path(EffectKind.READS, archive), *effects]


def sed(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `sed`: `-i` writes its files, and a script may itself write files or run commands."""
    arguments, _ = split(
        [Field("-i") if field.shown.startswith("-i") else field for field in fields], frozenset({"-e", "-f", "--expression", "--file"})
    )
    scripts, operands = arguments.values({"-e", "--expression"}), list(arguments.operands)
    if not arguments.has("-e", "--expression", "-f", "--file") and operands:
        scripts.append(operands.pop(0))
    kind = EffectKind.WRITES if arguments.has("-i", "--in-place") else EffectKind.READS
    effects = [Effect(kind, each.shown) for each in operands]
    for script in (part.strip() for each in scripts for part in each.shown.replace("\n", ";").split(";")):
        command = script.lstrip("0123456789,$!{ ")
        flags = _substitution_flags(script)
        if "e" in flags or command == "e" or command.startswith("e ") or command.rpartition("/")[2].lstrip("{ ").startswith("e "):
            effects.append(Effect(EffectKind.RUNS_CODE, script))
        if flags.startswith("w ") or command.startswith("w "):
            effects.append(Effect(EffectKind.WRITES, script.rpartition("w ")[2]))
    return effects


def _substitution_flags(script: str) -> str:
    """Return the flags after the last delimiter of an `s` command, whatever the delimiter; empty if there are none."""
    for at, letter in enumerate(script[:-1]):
        delimiter = script[at + 1]
        if letter == "s" and not delimiter.isalnum() and delimiter not in " \\\n":
            flags = script.rpartition(delimiter)[2].rstrip("} ")
            if flags.startswith("w ") or set(flags) <= set("gpiIeMm0123456789"):
                return flags
    return ""


def curl(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `curl`: the addresses, the files that it sends and those that it writes."""
    arguments, _ = split(fields, _CURL_VALUED)
    if arguments.has("--version", "-V", "--help") and not arguments.operands:
        return []
    effects = [Effect(EffectKind.NETWORK, each.shown) for each in (*arguments.operands, *arguments.values({"--url"}))] or [
        Effect(EffectKind.NETWORK)
    ]
    for value in arguments.values({"-o", "--output", "-c", "--cookie-jar", "-D", "--dump-header"}):
        effects += on_path(EffectKind.WRITES, value.shown)
    if arguments.has("-O", "--remote-name", "--remote-name-all", "-J"):
        effects.append(Effect(EffectKind.WRITES, "."))
    sent = arguments.values({"-d", "--data", "--data-binary", "--data-urlencode", "-F", "--form", "--json"})
    effects += [
        Effect(EffectKind.READS, each.shown.partition("@")[2].partition(";")[0]) for each in sent if "@" in each.shown and each.known
    ]
    effects += [Effect(EffectKind.READS, each.shown) for each in arguments.values({"-T", "--upload-file", "-K", "--config"})]
    return effects


def wget(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `wget`: it writes the pages that it fetches, except with `-O -` or `--spider`."""
    arguments, _ = split(fields, _WGET_VALUED)
    outputs = arguments.values({"-O", "--output-document"})
    effects = [Effect(EffectKind.NETWORK, each.shown) for each in arguments.operands] or [Effect(EffectKind.NETWORK)]
    effects += [Effect(EffectKind.READS, each.shown) for each in arguments.values({"--post-file", "--body-file", "-i", "--input-file"})]
    if outputs:
        return [*effects, *(effect for value in outputs for effect in on_path(EffectKind.WRITES, value.shown))]
    if arguments.has("--spider"):
        return effects
    into = next((value.shown for value in arguments.values({"-P", "--directory-prefix"})), ".")
    return [*effects, Effect(EffectKind.WRITES, into)]


def interpreter(name: str, *code: str) -> Callable[[Sequence[Field]], list[Effect]]:
    """Return a function that returns the effects of an interpreter. `code` are the options after which code or a module's name follows."""

    def effects(fields: Sequence[Field]) -> list[Effect]:
        words = [field.shown for field in fields]
        if words and all(word in ("--version", "-V", "-v", "--help", "-h", "-VV") for word in words):
            return []
        for index, word in enumerate(words):
            if word in code:
                return [Effect(EffectKind.RUNS_CODE, f"{name} {word}"), *_module(words[index + 1 : index + 3], word)]
            if not word.startswith("-"):
                return [Effect(EffectKind.RUNS_CODE, word)]
        return [Effect(EffectKind.RUNS_CODE, "standard input")]

    return effects


def _module(words: list[str], option: str) -> list[Effect]:
    """Return the effects of a known module started by `python -m`. `words` are the words after `option`."""
    if option != "-m" or not words:
        return []
    if words[0] in ("pip", "ensurepip") and words[1:] and words[1] in ("install", "download", "wheel"):
        return [Effect(EffectKind.NETWORK, "pip"), Effect(EffectKind.WRITES, "packages")]
    if words[0] == "http.server":
        return [Effect(EffectKind.NETWORK, "http.server")]
    return [Effect(EffectKind.WRITES, words[1] if words[1:] else ".")] if words[0] in ("venv", "virtualenv") else []


def database(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of a database client: it uses the network, and the words of its statements show whether it writes or deletes."""
    valued = frozenset(
        {"-c", "--command", "-e", "--execute", "--eval", "-f", "--file", "-h", "--host", "-U", "-u", "-d", "-p", "-P", "-D", "-o"}
    )
    arguments, _ = split(fields, valued)
    statements = arguments.values({"-c", "--command", "-e", "--execute", "--eval"})
    effects = [Effect(EffectKind.NETWORK, "database")]
    words = {word.lower().strip("(;") for statement in statements for word in statement.shown.replace(";", " ; ").split()}
    if words & _SQL_DESTROYS:
        effects.append(Effect(EffectKind.DESTROYS, "database"))
    if words & _SQL_WRITES or not statements:
        effects.append(Effect(EffectKind.WRITES, "database"))
    if any("\\!" in statement.shown or "program" in statement.shown.lower() for statement in statements):
        effects.append(Effect(EffectKind.RUNS_CODE, "database"))
    effects += [Effect(EffectKind.READS, value.shown) for value in arguments.values({"-f", "--file"})]
    return effects


def sqlite(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `sqlite3 FILE STATEMENT…`: its database is a file."""
    arguments, _ = split(fields, frozenset({"-cmd", "-init", "-separator"}))
    file, statements = arguments.operands[:1], arguments.operands[1:]
    words = {word.lower().strip("(;") for statement in statements for word in statement.shown.split()}
    kind = (
        EffectKind.DESTROYS if words & _SQL_DESTROYS else EffectKind.WRITES if words & _SQL_WRITES or not statements else EffectKind.READS
    )
    code = (
        [Effect(EffectKind.RUNS_CODE, "sqlite3")]
        if any(each.shown.startswith((".shell", ".system", ".load")) for each in statements)
        else []
    )
    return [*(Effect(kind, each.shown) for each in file), *code]


def ssh(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `ssh HOST …`. The remote command is not analysed, because it runs on another machine."""
    arguments, at = split(
        fields, frozenset({"-i", "-p", "-l", "-o", "-L", "-R", "-D", "-F", "-J", "-W", "-b", "-c", "-E", "-S"}), stop_at_operand=True
    )
    host = fields[at].shown if at < len(fields) else ""
    code = [Effect(EffectKind.RUNS_CODE, value.shown) for value in arguments.values({"-o"}) if "command" in value.shown.lower()]
    return [Effect(EffectKind.NETWORK, host), *code]


def rsync(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `rsync`: it writes the last operand, `host:` uses the network, `--delete` removes files the source lacks."""
    arguments, _ = split(fields, frozenset({"-e", "--rsh", "--exclude", "--include", "--exclude-from", "--files-from", "--log-file", "-f"}))
    operands = [each.shown for each in arguments.operands]
    remote = [each for each in operands if ":" in each.partition("/")[0] or each.startswith("rsync://")]
    effects = [Effect(EffectKind.NETWORK, each) for each in remote]
    if arguments.has("-n", "--dry-run"):
        return [*effects, *(Effect(EffectKind.READS, each) for each in operands)]
    effects += [Effect(EffectKind.READS, each) for each in operands[:-1]]
    effects += [Effect(EffectKind.WRITES, each) for each in operands[-1:]]
    effects += [
        Effect(EffectKind.DESTROYS, each) for each in operands[-1:] if any(name.startswith("--delete") for name, _ in arguments.options)
    ]
    effects += [Effect(EffectKind.DESTROYS, each) for each in operands[:-1] if arguments.has("--remove-source-files")]
    return [
        *effects,
        *(Effect(EffectKind.RUNS_CODE, value.shown) for value in arguments.values({"-e", "--rsh"}) if not value.shown.startswith("ssh")),
    ]


def awk(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `awk`, a language that can run commands and write files."""
    arguments, _ = split(fields, frozenset({"-F", "-v", "-f", "--file", "-i", "--include"}))
    operands = list(arguments.operands)
    script = "" if arguments.has("-f", "--file") or not operands else operands.pop(0).shown
    effects = [Effect(EffectKind.READS, each.shown) for each in operands]
    effects += [Effect(EffectKind.READS, value.shown) for value in arguments.values({"-f", "--file"})]
    effects += [Effect(EffectKind.WRITES, value.shown) for value in arguments.values({"-i"}) if value.shown == "inplace"]
    if "system(" in script or "|" in script.replace("||", "") or "getline" in script or arguments.has("-f", "--file"):
        effects.append(Effect(EffectKind.RUNS_CODE, "awk"))
    if any(mark in script for mark in ('> "', '>"', ">>")):
        effects.append(Effect(EffectKind.WRITES, "awk"))
    return effects


def git(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `git …`."""
    before, at = split(fields, _GIT_VALUED, stop_at_operand=True)
    settings = [
        Effect(EffectKind.RUNS_CODE, value.shown)
        for value in before.values({"-c", "--config-env", "--exec-path"})
        if _git_runs_code(value.shown)
    ]
    if at >= len(fields):
        return settings
    name, rest = fields[at].text, fields[at + 1 :]
    if name is None:
        return [*settings, Effect(EffectKind.UNKNOWN, fields[at].shown)]
    return [*settings, *_git_of_subcommand(name, rest)]


def _git_runs_code(setting: str) -> bool:
    return setting.lower().startswith(_GIT_CODE_SETTINGS) or setting.startswith("/")


def _git_of_subcommand(name: str, rest: Sequence[Field]) -> list[Effect]:
    arguments, _ = split(rest, _GIT_SUB_VALUED)
    words = [field.shown for field in rest]
    what = f"git {name}"
    if name in _GIT_READS:
        written = arguments.values({"-o", "--output"}) if name in ("diff", "log", "show") else []
        return [Effect(EffectKind.READS, what), *(Effect(EffectKind.WRITES, value.shown) for value in written)]
    if name in _GIT_NETWORK:
        return _git_network(name, what, words)
    if name == "clean":
        return [Effect(EffectKind.READS if arguments.has("-n", "--dry-run") else EffectKind.DESTROYS, what)]
    if name == "reset":
        return [Effect(EffectKind.DESTROYS if arguments.has("--hard", "--merge") else EffectKind.WRITES, what)]
    if name in ("checkout", "restore"):
        return [Effect(EffectKind.DESTROYS if _git_discards(name, words) else EffectKind.WRITES, what)]
    if name == "rm":
        return [Effect(EffectKind.WRITES if arguments.has("--cached") else EffectKind.DESTROYS, what)]
    if name in _GIT_LISTING:
        return _git_listing(name, what, words)
    if name in ("commit", "rebase") and any(word in ("-x", "--exec") for word in words):
        return [Effect(EffectKind.WRITES, what), Effect(EffectKind.RUNS_CODE, what)]
    if name == "bisect" and words[:1] == ["run"]:
        return [Effect(EffectKind.WRITES, what), Effect(EffectKind.RUNS_CODE, what)]
    if name in _GIT_DESTROYS:
        return [Effect(EffectKind.DESTROYS, what)]
    return [Effect(EffectKind.WRITES if name in _GIT_WRITES else EffectKind.UNKNOWN, what)]


def _git_network(name: str, what: str, words: list[str]) -> list[Effect]:
    effects = [Effect(EffectKind.NETWORK, what)]
    if name in ("clone", "fetch", "pull"):
        effects.append(Effect(EffectKind.WRITES, what))
    forced = {"-f", "--force", "--force-with-lease", "--mirror", "--delete", "-d", "--prune"}
    if name == "push" and any(word.partition("=")[0] in forced or word.startswith(("+", ":")) for word in words):
        effects.append(Effect(EffectKind.DESTROYS, what))
    if any(word.startswith(("ext::", "--upload-pack", "--receive-pack", "--exec")) for word in words):
        effects.append(Effect(EffectKind.RUNS_CODE, what))
    return effects


def _git_discards(name: str, words: list[str]) -> bool:
    if any(word in ("-f", "--force", ".", "--ours", "--theirs", "-p", "--patch") for word in words) or "--" in words:
        return True
    return name == "restore" and not ("--staged" in words or "-S" in words)


def _git_listing(name: str, what: str, words: list[str]) -> list[Effect]:
    lists, destroys = _GIT_LISTING[name]
    if destroys & {*words}:
        return [Effect(EffectKind.DESTROYS, what)]
    plain = [word for word in words if not word.startswith("-")]
    if (not plain and name in _GIT_NEEDS_NO_OPERAND) or (lists & {*words}) or (name == "config" and len(plain) == 1):
        return [Effect(EffectKind.READS, what)]
    if name == "remote" and plain[:1] in (["show"], ["update"]):
        return [Effect(EffectKind.NETWORK, what)]
    effects = (
        [Effect(EffectKind.WRITES, what)]
        if name != "archive" or any(word.startswith(("-o", "--output")) for word in words)
        else [Effect(EffectKind.READS, what)]
    )
    if name == "submodule" and plain[:1] in (["add"], ["update"]):
        effects.append(Effect(EffectKind.NETWORK, what))
    if name == "submodule" and plain[:1] == ["foreach"]:
        effects.append(Effect(EffectKind.RUNS_CODE, what))
    if name == "config" and any(_git_runs_code(word) for word in plain):
        effects.append(Effect(EffectKind.RUNS_CODE, plain[0]))
    return effects
