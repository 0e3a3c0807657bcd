"""The effects of tools with special argument rules: find, dd, tar, sed, interpreters, downloaders, databases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from agent_sandbox.readers.shell.effects import Effect, Kind, split
from agent_sandbox.readers.shell.expansion import Field
from agent_sandbox.readers.shell.tools.spec import on_path, words

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


def dd(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `dd if=… of=…`."""
    effects: list[Effect] = []
    for field in fields:
        name, _, value = field.shown.partition("=")
        if name in ("if", "of"):
            effects += on_path(Kind.READS if name == "if" else Kind.WRITES, value)
    return effects


def find(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `find`: it reads, unless told to delete or to list into a file.

    The commands that it executes are analysed elsewhere, by `wrappers.executed_by_find`.
    """
    words = [field.shown for field in fields]
    where = [word for word in _leading(words) if not word.startswith("-")] or ["."]
    effects = [Effect(Kind.READS, word) for word in where]
    effects += [Effect(Kind.DESTROYS, word) for word in where if "-delete" in words]
    for option, value in pairwise(words):
        effects += on_path(Kind.WRITES, value) if option in ("-fprint", "-fprintf", "-fls", "-fprint0") else []
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
        [Effect(Kind.RUNS_CODE, "tar")] if arguments.has("--to-command", "-I", "--use-compress-program", "--checkpoint-action") else []
    )
    if arguments.has("-x", "--extract", "--get"):
        written = [] if arguments.has("-O", "--to-stdout") else [Effect(Kind.WRITES, into)]
        return [*on_path(Kind.READS, archive), *written, *effects]
    if arguments.has("-c", "--create", "-r", "--append", "-u", "--update"):
        removed = [Effect(Kind.DESTROYS, each.shown) for each in arguments.operands] if arguments.has("--remove-files") else []
        return [*(Effect(Kind.READS, each.shown) for each in arguments.operands), *on_path(Kind.WRITES, archive), *removed, *effects]
    if arguments.has("--delete"):
        return [Effect(Kind.DESTROYS, archive), *effects]
    return [*on_path(Kind.READS, archive), *effects]


def sed(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `sed`: `-i` writes its files, and a script may itself write files or run commands."""
    arguments, _ = split(
        [Field("-i") if field.shown.startswith("-i") else field for field in fields], frozenset({"-e", "-f", "--expression", "--file"})
    )
    scripts, operands = arguments.values({"-e", "--expression"}), list(arguments.operands)
    if not arguments.has("-e", "--expression", "-f", "--file") and operands:
        scripts.append(operands.pop(0))
    kind = Kind.WRITES if arguments.has("-i", "--in-place") else Kind.READS
    effects = [Effect(kind, each.shown) for each in operands]
    for script in (part.strip() for each in scripts for part in each.shown.replace("\n", ";").split(";")):
        command = script.lstrip("0123456789,$!{ ")
        flags = _substitution_flags(script)
        if "e" in flags or command == "e" or command.startswith("e ") or command.rpartition("/")[2].lstrip("{ ").startswith("e "):
            effects.append(Effect(Kind.RUNS_CODE, script))
        if flags.startswith("w ") or command.startswith("w "):
            effects.append(Effect(Kind.WRITES, script.rpartition("w ")[2]))
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
    effects = [Effect(Kind.NETWORK, each.shown) for each in (*arguments.operands, *arguments.values({"--url"}))] or [Effect(Kind.NETWORK)]
    for value in arguments.values({"-o", "--output", "-c", "--cookie-jar", "-D", "--dump-header"}):
        effects += on_path(Kind.WRITES, value.shown)
    if arguments.has("-O", "--remote-name", "--remote-name-all", "-J"):
        effects.append(Effect(Kind.WRITES, "."))
    sent = arguments.values({"-d", "--data", "--data-binary", "--data-urlencode", "-F", "--form", "--json"})
    effects += [Effect(Kind.READS, each.shown.partition("@")[2].partition(";")[0]) for each in sent if "@" in each.shown and each.known]
    effects += [Effect(Kind.READS, each.shown) for each in arguments.values({"-T", "--upload-file", "-K", "--config"})]
    return effects


def wget(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `wget`: it writes the pages that it fetches, unless told to print them."""
    arguments, _ = split(fields, _WGET_VALUED)
    outputs = arguments.values({"-O", "--output-document"})
    effects = [Effect(Kind.NETWORK, each.shown) for each in arguments.operands] or [Effect(Kind.NETWORK)]
    effects += [Effect(Kind.READS, each.shown) for each in arguments.values({"--post-file", "--body-file", "-i", "--input-file"})]
    if outputs:
        return [*effects, *(effect for value in outputs for effect in on_path(Kind.WRITES, value.shown))]
    if arguments.has("--spider"):
        return effects
    into = next((value.shown for value in arguments.values({"-P", "--directory-prefix"})), ".")
    return [*effects, Effect(Kind.WRITES, into)]


def interpreter(name: str, *code: str) -> Callable[[Sequence[Field]], list[Effect]]:
    """Return the effects function of an interpreter: code given by the options `code`, from a module, a file or standard input."""

    def effects(fields: Sequence[Field]) -> list[Effect]:
        words = [field.shown for field in fields]
        if words and all(word in ("--version", "-V", "-v", "--help", "-h", "-VV") for word in words):
            return []
        for index, word in enumerate(words):
            if word in code:
                return [Effect(Kind.RUNS_CODE, f"{name} {word}"), *_module(words[index + 1 : index + 3], word)]
            if not word.startswith("-"):
                return [Effect(Kind.RUNS_CODE, word)]
        return [Effect(Kind.RUNS_CODE, "standard input")]

    return effects


def _module(words: list[str], option: str) -> list[Effect]:
    """Return the known effects of the module of `python -m …`."""
    if option != "-m" or not words:
        return []
    if words[0] in ("pip", "ensurepip") and words[1:] and words[1] in ("install", "download", "wheel"):
        return [Effect(Kind.NETWORK, "pip"), Effect(Kind.WRITES, "packages")]
    if words[0] == "http.server":
        return [Effect(Kind.NETWORK, "http.server")]
    return [Effect(Kind.WRITES, words[1] if words[1:] else ".")] if words[0] in ("venv", "virtualenv") else []


def database(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of a database client, by the words of the statements in its arguments. The connection may leave the machine."""
    valued = frozenset(
        {"-c", "--command", "-e", "--execute", "--eval", "-f", "--file", "-h", "--host", "-U", "-u", "-d", "-p", "-P", "-D", "-o"}
    )
    arguments, _ = split(fields, valued)
    statements = arguments.values({"-c", "--command", "-e", "--execute", "--eval"})
    effects = [Effect(Kind.NETWORK, "database")]
    words = {word.lower().strip("(;") for statement in statements for word in statement.shown.replace(";", " ; ").split()}
    if words & _SQL_DESTROYS:
        effects.append(Effect(Kind.DESTROYS, "database"))
    if words & _SQL_WRITES or not statements:
        effects.append(Effect(Kind.WRITES, "database"))
    if any("\\!" in statement.shown or "program" in statement.shown.lower() for statement in statements):
        effects.append(Effect(Kind.RUNS_CODE, "database"))
    effects += [Effect(Kind.READS, value.shown) for value in arguments.values({"-f", "--file"})]
    return effects


def sqlite(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `sqlite3 FILE STATEMENT…`: its database is a file."""
    arguments, _ = split(fields, frozenset({"-cmd", "-init", "-separator"}))
    file, statements = arguments.operands[:1], arguments.operands[1:]
    words = {word.lower().strip("(;") for statement in statements for word in statement.shown.split()}
    kind = Kind.DESTROYS if words & _SQL_DESTROYS else Kind.WRITES if words & _SQL_WRITES or not statements else Kind.READS
    code = [Effect(Kind.RUNS_CODE, "sqlite3")] if any(each.shown.startswith((".shell", ".system", ".load")) for each in statements) else []
    return [*(Effect(kind, each.shown) for each in file), *code]


def ssh(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `ssh HOST …`. The remote command is not run here."""
    arguments, at = split(
        fields, frozenset({"-i", "-p", "-l", "-o", "-L", "-R", "-D", "-F", "-J", "-W", "-b", "-c", "-E", "-S"}), stop_at_operand=True
    )
    host = fields[at].shown if at < len(fields) else ""
    code = [Effect(Kind.RUNS_CODE, value.shown) for value in arguments.values({"-o"}) if "command" in value.shown.lower()]
    return [Effect(Kind.NETWORK, host), *code]


def rsync(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `rsync`: it writes the last operand, `host:` leaves the machine, `--delete` removes files the source lacks."""
    arguments, _ = split(fields, frozenset({"-e", "--rsh", "--exclude", "--include", "--exclude-from", "--files-from", "--log-file", "-f"}))
    operands = [each.shown for each in arguments.operands]
    remote = [each for each in operands if ":" in each.partition("/")[0] or each.startswith("rsync://")]
    effects = [Effect(Kind.NETWORK, each) for each in remote]
    if arguments.has("-n", "--dry-run"):
        return [*effects, *(Effect(Kind.READS, each) for each in operands)]
    effects += [Effect(Kind.READS, each) for each in operands[:-1]]
    effects += [Effect(Kind.WRITES, each) for each in operands[-1:]]
    effects += [Effect(Kind.DESTROYS, each) for each in operands[-1:] if any(name.startswith("--delete") for name, _ in arguments.options)]
    effects += [Effect(Kind.DESTROYS, each) for each in operands[:-1] if arguments.has("--remove-source-files")]
    return [
        *effects,
        *(Effect(Kind.RUNS_CODE, value.shown) for value in arguments.values({"-e", "--rsh"}) if not value.shown.startswith("ssh")),
    ]


def awk(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `awk`, a language that can run commands and write files."""
    arguments, _ = split(fields, frozenset({"-F", "-v", "-f", "--file", "-i", "--include"}))
    operands = list(arguments.operands)
    script = "" if arguments.has("-f", "--file") or not operands else operands.pop(0).shown
    effects = [Effect(Kind.READS, each.shown) for each in operands]
    effects += [Effect(Kind.READS, value.shown) for value in arguments.values({"-f", "--file"})]
    effects += [Effect(Kind.WRITES, value.shown) for value in arguments.values({"-i"}) if value.shown == "inplace"]
    if "system(" in script or "|" in script.replace("||", "") or "getline" in script or arguments.has("-f", "--file"):
        effects.append(Effect(Kind.RUNS_CODE, "awk"))
    if any(mark in script for mark in ('> "', '>"', ">>")):
        effects.append(Effect(Kind.WRITES, "awk"))
    return effects
