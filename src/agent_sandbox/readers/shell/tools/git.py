"""The effects of Git by subcommand: which read, write, destroy for good, or leave the machine."""

from __future__ import annotations

from collections.abc import Sequence

from agent_sandbox.readers.shell.effects import Effect, Kind, split
from agent_sandbox.readers.shell.expansion import Field
from agent_sandbox.readers.shell.tools.spec import words

_VALUED = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env"})
_SUB_VALUED = frozenset({"-m", "-F", "-b", "-B", "-u", "-o", "--output", "-n", "--depth", "--author", "--date", "--format", "--since"})
_READS = words(
    """
    log status diff show blame rev-parse ls-files ls-tree describe grep shortlog cat-file rev-list help version merge-base
    name-rev for-each-ref diff-tree diff-files diff-index whatchanged check-ignore check-attr count-objects var show-ref
    show-branch cherry range-diff verify-commit verify-tag fsck annotate --version --help
    """
)
_WRITES = words(
    """
    add commit merge rebase cherry-pick revert mv init switch apply am notes bisect format-patch bundle update-index write-tree
    commit-tree hash-object update-ref symbolic-ref read-tree checkout-index sparse-checkout replace repack pack-refs mktree stage
    maintenance
    """
)
_NETWORK = words(
    """
    clone fetch pull push ls-remote request-pull send-email fetch-pack send-pack lfs svn p4 daemon
    """
)
_DESTROYS = words("clean filter-branch filter-repo gc prune rm")
_CODE_SETTINGS = (
    *("alias.", "core.pager", "core.editor", "core.sshcommand", "core.fsmonitor", "core.hookspath", "core.gitproxy", "pager."),
    *("diff.external", "credential.helper", "filter.", "gpg.program", "sequence.editor", "uploadpack.", "protocol.ext.allow"),
)
# Subcommands that only read unless given something to change: the words with which they only read, and those with which they destroy.
_LISTING = {
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
_NEEDS_NO_OPERAND = frozenset({"branch", "tag", "remote", "submodule", "reflog", "archive"})


def effects(fields: Sequence[Field]) -> list[Effect]:
    """Return the effects of `git …`."""
    before, at = split(fields, _VALUED, stop_at_operand=True)
    settings = [
        Effect(Kind.RUNS_CODE, value.shown) for value in before.values({"-c", "--config-env", "--exec-path"}) if _runs_code(value.shown)
    ]
    if at >= len(fields):
        return settings
    name, rest = fields[at].text, fields[at + 1 :]
    if name is None:
        return [*settings, Effect(Kind.UNKNOWN, fields[at].shown)]
    return [*settings, *_of_subcommand(name, rest)]


def _runs_code(setting: str) -> bool:
    return setting.lower().startswith(_CODE_SETTINGS) or setting.startswith("/")


def _of_subcommand(name: str, rest: Sequence[Field]) -> list[Effect]:
    arguments, _ = split(rest, _SUB_VALUED)
    words = [field.shown for field in rest]
    what = f"git {name}"
    if name in _READS:
        written = arguments.values({"-o", "--output"}) if name in ("diff", "log", "show") else []
        return [Effect(Kind.READS, what), *(Effect(Kind.WRITES, value.shown) for value in written)]
    if name in _NETWORK:
        return _network(name, what, words)
    if name == "clean":
        return [Effect(Kind.READS if arguments.has("-n", "--dry-run") else Kind.DESTROYS, what)]
    if name == "reset":
        return [Effect(Kind.DESTROYS if arguments.has("--hard", "--merge") else Kind.WRITES, what)]
    if name in ("checkout", "restore"):
        return [Effect(Kind.DESTROYS if _discards(name, words) else Kind.WRITES, what)]
    if name == "rm":
        return [Effect(Kind.WRITES if arguments.has("--cached") else Kind.DESTROYS, what)]
    if name in _LISTING:
        return _listing(name, what, words)
    if name in ("commit", "rebase") and any(word in ("-x", "--exec") for word in words):
        return [Effect(Kind.WRITES, what), Effect(Kind.RUNS_CODE, what)]
    if name == "bisect" and words[:1] == ["run"]:
        return [Effect(Kind.WRITES, what), Effect(Kind.RUNS_CODE, what)]
    if name in _DESTROYS:
        return [Effect(Kind.DESTROYS, what)]
    return [Effect(Kind.WRITES if name in _WRITES else Kind.UNKNOWN, what)]


def _network(name: str, what: str, words: list[str]) -> list[Effect]:
    effects = [Effect(Kind.NETWORK, what)]
    if name in ("clone", "fetch", "pull"):
        effects.append(Effect(Kind.WRITES, what))
    forced = {"-f", "--force", "--force-with-lease", "--mirror", "--delete", "-d", "--prune"}
    if name == "push" and any(word.partition("=")[0] in forced or word.startswith(("+", ":")) for word in words):
        effects.append(Effect(Kind.DESTROYS, what))
    if any(word.startswith(("ext::", "--upload-pack", "--receive-pack", "--exec")) for word in words):
        effects.append(Effect(Kind.RUNS_CODE, what))
    return effects


def _discards(name: str, words: list[str]) -> bool:
    if any(word in ("-f", "--force", ".", "--ours", "--theirs", "-p", "--patch") for word in words) or "--" in words:
        return True
    return name == "restore" and not ("--staged" in words or "-S" in words)


def _listing(name: str, what: str, words: list[str]) -> list[Effect]:
    lists, destroys = _LISTING[name]
    if destroys & {*words}:
        return [Effect(Kind.DESTROYS, what)]
    plain = [word for word in words if not word.startswith("-")]
    if (not plain and name in _NEEDS_NO_OPERAND) or (lists & {*words}) or (name == "config" and len(plain) == 1):
        return [Effect(Kind.READS, what)]
    if name == "remote" and plain[:1] in (["show"], ["update"]):
        return [Effect(Kind.NETWORK, what)]
    effects = (
        [Effect(Kind.WRITES, what)]
        if name != "archive" or any(word.startswith(("-o", "--output")) for word in words)
        else [Effect(Kind.READS, what)]
    )
    if name == "submodule" and plain[:1] in (["add"], ["update"]):
        effects.append(Effect(Kind.NETWORK, what))
    if name == "submodule" and plain[:1] == ["foreach"]:
        effects.append(Effect(Kind.RUNS_CODE, what))
    if name == "config" and any(_runs_code(word) for word in plain):
        effects.append(Effect(Kind.RUNS_CODE, plain[0]))
    return effects
