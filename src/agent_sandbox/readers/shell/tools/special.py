"""Tools whose arguments follow rules of their own: find, dd, tar, sed, interpreters, fetchers, databases."""

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
    --header --post-data --post-file --method --body-data -i --input-file -e --execute --user --password -A -R -l --level -w
    --wait -Q
    """
)
_SQL_DESTROYS = frozenset({"drop", "delete", "truncate"})
_SQL_WRITES = frozenset({"insert", "update", "create", "alter", "grant", "revoke", "copy", "merge", "replace", "vacuum", "reindex"})


def dd(fields: Sequence[Field]) -> list[Effect]:
    """`dd if=… of=…`."""
    found: list[Effect] = []
    for field in fields:
        name, _, value = field.shown.partition("=")
        if name in ("if", "of"):
            found += on_path(Kind.READS if name == "if" else Kind.WRITES, value)
    return found


def find(fields: Sequence[Field]) -> list[Effect]:
    """`find`: it reads, unless it is told to delete or to list into a file. What it executes is read apart."""
    words = [field.shown for field in fields]
    where = [word for word in _leading(words) if not word.startswith("-")] or ["."]
    found = [Effect(Kind.READS, word) for word in where]
    found += [Effect(Kind.DESTROYS, word) for word in where if "-delete" in words]
    for option, value in pairwise(words):
        found += on_path(Kind.WRITES, value) if option in ("-fprint", "-fprintf", "-fls", "-fprint0") else []
    return found


def _leading(words: list[str]) -> list[str]:
    end = next(
        (index for index, word in enumerate(words) if (word.startswith("-") and word not in ("-H", "-L", "-P")) or word in ("(", "!")),
        len(words),
    )
    return words[:end]


def tar(fields: Sequence[Field]) -> list[Effect]:
    """`tar`, also with its letters without a dash."""
    words = [field.shown for field in fields]
    if words and not words[0].startswith("-"):
        fields = [Field(f"-{words[0]}", fields[0].known), *fields[1:]]
    valued = frozenset(
        {"-f", "--file", "-C", "--directory", "-T", "--exclude", "-X", "--transform", "-I", "--use-compress-program", "--to-command"}
    )
    arguments, _ = split(fields, valued)
    archive = next((value.shown for value in arguments.values({"-f", "--file"})), "-")
    into = next((value.shown for value in arguments.values({"-C", "--directory"})), ".")
    found = [Effect(Kind.RUNS_CODE, "tar")] if arguments.has("--to-command", "-I", "--use-compress-program", "--checkpoint-action") else []
    if arguments.has("-x", "--extract", "--get"):
        written = [] if arguments.has("-O", "--to-stdout") else [Effect(Kind.WRITES, into)]
        return [*on_path(Kind.READS, archive), *written, *found]
    if arguments.has("-c", "--create", "-r", "--append", "-u", "--update"):
        removed = [Effect(Kind.DESTROYS, each.shown) for each in arguments.operands] if arguments.has("--remove-files") else []
        return [*(Effect(Kind.READS, each.shown) for each in arguments.operands), *on_path(Kind.WRITES, archive), *removed, *found]
    if arguments.has("--delete"):
        return [Effect(Kind.DESTROYS, archive), *found]
    return [*on_path(Kind.READS, archive), *found]


def sed(fields: Sequence[Field]) -> list[Effect]:
    """`sed`: `-i` writes its files, and a script may write or run by itself."""
    arguments, _ = split(
        [Field("-i") if field.shown.startswith("-i") else field for field in fields], frozenset({"-e", "-f", "--expression", "--file"})
    )
    scripts, operands = arguments.values({"-e", "--expression"}), list(arguments.operands)
    if not arguments.has("-e", "--expression", "-f", "--file") and operands:
        scripts.append(operands.pop(0))
    kind = Kind.WRITES if arguments.has("-i", "--in-place") else Kind.READS
    found = [Effect(kind, each.shown) for each in operands]
    for script in (part.strip() for each in scripts for part in each.shown.replace("\n", ";").split(";")):
        command = script.lstrip("0123456789,$!{ ")
        flags = _substitution_flags(script)
        if "e" in flags or command == "e" or command.startswith("e ") or command.rpartition("/")[2].lstrip("{ ").startswith("e "):
            found.append(Effect(Kind.RUNS_CODE, script))
        if flags.startswith("w ") or command.startswith("w "):
            found.append(Effect(Kind.WRITES, script.rpartition("w ")[2]))
    return found


def _substitution_flags(script: str) -> str:
    """What stands behind the last delimiter of an `s` command, whatever its delimiter is; empty where that are no flags."""
    for at, letter in enumerate(script[:-1]):
        delimiter = script[at + 1]
        if letter == "s" and not delimiter.isalnum() and delimiter not in " \\\n":
            flags = script.rpartition(delimiter)[2].rstrip("} ")
            if flags.startswith("w ") or set(flags) <= set("gpiIeMm0123456789"):
                return flags
    return ""


def curl(fields: Sequence[Field]) -> list[Effect]:
    """`curl`: where to, what is sent, and which files it writes."""
    arguments, _ = split(fields, _CURL_VALUED)
    if arguments.has("--version", "-V", "--help") and not arguments.operands:
        return []
    found = [Effect(Kind.NETWORK, each.shown) for each in (*arguments.operands, *arguments.values({"--url"}))] or [Effect(Kind.NETWORK)]
    for value in arguments.values({"-o", "--output", "-c", "--cookie-jar", "-D", "--dump-header"}):
        found += on_path(Kind.WRITES, value.shown)
    if arguments.has("-O", "--remote-name", "--remote-name-all", "-J"):
        found.append(Effect(Kind.WRITES, "."))
    sent = arguments.values({"-d", "--data", "--data-binary", "--data-urlencode", "-F", "--form", "--json"})
    found += [Effect(Kind.READS, each.shown.partition("@")[2].partition(";")[0]) for each in sent if "@" in each.shown and each.known]
    found += [Effect(Kind.READS, each.shown) for each in arguments.values({"-T", "--upload-file", "-K", "--config"})]
    return found


def wget(fields: Sequence[Field]) -> list[Effect]:
    """`wget` writes what it fetches, unless it is told to print it."""
    arguments, _ = split(fields, _WGET_VALUED)
    outputs = arguments.values({"-O", "--output-document"})
    found = [Effect(Kind.NETWORK, each.shown) for each in arguments.operands] or [Effect(Kind.NETWORK)]
    if outputs:
        return [*found, *(effect for value in outputs for effect in on_path(Kind.WRITES, value.shown))]
    if arguments.has("--spider"):
        return found
    into = next((value.shown for value in arguments.values({"-P", "--directory-prefix"})), ".")
    found += [Effect(Kind.READS, each.shown) for each in arguments.values({"--post-file", "-i", "--input-file"})]
    return [*found, Effect(Kind.WRITES, into)]


def interpreter(name: str, *code: str) -> Callable[[Sequence[Field]], list[Effect]]:
    """A tool that runs code: given (`code` are the options), of a module, of a file, or typed in."""

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
    """Of `python -m …`, what is known of the module."""
    if option != "-m" or not words:
        return []
    if words[0] in ("pip", "ensurepip") and words[1:] and words[1] in ("install", "download", "wheel"):
        return [Effect(Kind.NETWORK, "pip"), Effect(Kind.WRITES, "packages")]
    if words[0] == "http.server":
        return [Effect(Kind.NETWORK, "http.server")]
    return [Effect(Kind.WRITES, words[1] if words[1:] else ".")] if words[0] in ("venv", "virtualenv") else []


def database(fields: Sequence[Field]) -> list[Effect]:
    """Clients of databases: what the statements in their arguments do, by their first words. The connection may leave the machine."""
    valued = frozenset(
        {"-c", "--command", "-e", "--execute", "--eval", "-f", "--file", "-h", "--host", "-U", "-u", "-d", "-p", "-P", "-D", "-o"}
    )
    arguments, _ = split(fields, valued)
    statements = arguments.values({"-c", "--command", "-e", "--execute", "--eval"})
    found = [Effect(Kind.NETWORK, "database")]
    words = {word.lower().strip("(;") for statement in statements for word in statement.shown.replace(";", " ; ").split()}
    if words & _SQL_DESTROYS:
        found.append(Effect(Kind.DESTROYS, "database"))
    if words & _SQL_WRITES or not statements:
        found.append(Effect(Kind.WRITES, "database"))
    if any("\\!" in statement.shown or "program" in statement.shown.lower() for statement in statements):
        found.append(Effect(Kind.RUNS_CODE, "database"))
    found += [Effect(Kind.READS, value.shown) for value in arguments.values({"-f", "--file"})]
    return found


def sqlite(fields: Sequence[Field]) -> list[Effect]:
    """`sqlite3 FILE STATEMENT…`: a database that is a file."""
    arguments, _ = split(fields, frozenset({"-cmd", "-init", "-separator"}))
    file, statements = arguments.operands[:1], arguments.operands[1:]
    words = {word.lower().strip("(;") for statement in statements for word in statement.shown.split()}
    kind = Kind.DESTROYS if words & _SQL_DESTROYS else Kind.WRITES if words & _SQL_WRITES or not statements else Kind.READS
    code = [Effect(Kind.RUNS_CODE, "sqlite3")] if any(each.shown.startswith((".shell", ".system", ".load")) for each in statements) else []
    return [*(Effect(kind, each.shown) for each in file), *code]


def ssh(fields: Sequence[Field]) -> list[Effect]:
    """`ssh HOST …`: what is run there is not run here."""
    arguments, at = split(
        fields, frozenset({"-i", "-p", "-l", "-o", "-L", "-R", "-D", "-F", "-J", "-W", "-b", "-c", "-E", "-S"}), stop_at_operand=True
    )
    host = fields[at].shown if at < len(fields) else ""
    code = [Effect(Kind.RUNS_CODE, value.shown) for value in arguments.values({"-o"}) if "command" in value.shown.lower()]
    return [Effect(Kind.NETWORK, host), *code]


def rsync(fields: Sequence[Field]) -> list[Effect]:
    """`rsync`: the last operand is written, `host:` leaves the machine, `--delete` takes away what is not at the source."""
    arguments, _ = split(fields, frozenset({"-e", "--rsh", "--exclude", "--include", "--exclude-from", "--files-from", "--log-file", "-f"}))
    operands = [each.shown for each in arguments.operands]
    remote = [each for each in operands if ":" in each.partition("/")[0] or each.startswith("rsync://")]
    found = [Effect(Kind.NETWORK, each) for each in remote]
    if arguments.has("-n", "--dry-run"):
        return [*found, *(Effect(Kind.READS, each) for each in operands)]
    found += [Effect(Kind.READS, each) for each in operands[:-1]]
    found += [Effect(Kind.WRITES, each) for each in operands[-1:]]
    found += [Effect(Kind.DESTROYS, each) for each in operands[-1:] if any(name.startswith("--delete") for name, _ in arguments.options)]
    found += [Effect(Kind.DESTROYS, each) for each in operands[:-1] if arguments.has("--remove-source-files")]
    return [
        *found,
        *(Effect(Kind.RUNS_CODE, value.shown) for value in arguments.values({"-e", "--rsh"}) if not value.shown.startswith("ssh")),
    ]


def awk(fields: Sequence[Field]) -> list[Effect]:
    """`awk`: a language of its own that can run commands and write files."""
    arguments, _ = split(fields, frozenset({"-F", "-v", "-f", "--file", "-i", "--include"}))
    operands = list(arguments.operands)
    script = "" if arguments.has("-f", "--file") or not operands else operands.pop(0).shown
    found = [Effect(Kind.READS, each.shown) for each in operands]
    found += [Effect(Kind.READS, value.shown) for value in arguments.values({"-f", "--file"})]
    found += [Effect(Kind.WRITES, value.shown) for value in arguments.values({"-i"}) if value.shown == "inplace"]
    if "system(" in script or "|" in script.replace("||", "") or "getline" in script or arguments.has("-f", "--file"):
        found.append(Effect(Kind.RUNS_CODE, "awk"))
    if any(mark in script for mark in ('> "', '>"', ">>")):
        found.append(Effect(Kind.WRITES, "awk"))
    return found
