"""The patterns that the early code check looks for, by language, and the values for its findings. Data and values only."""

from __future__ import annotations

from enum import Enum

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import Policy


class CodeGrant(Enum):
    """A permission that a sandbox grants. It lifts patterns: nobody need be warned about what the sandbox permits anyway."""

    FILES = "files"
    NETWORK = "network"
    PROCESSES = "processes"
    SHELL = "shell"


@dataclass(frozen=True)
class Rule:
    """A pattern, the names it matches, and why a match is an issue.

    `names` are written like patterns. `eval(` is the language's own function of that name. `os.system` is a name in a module.
    `types.FunctionType(` is a name that counts only where it is called. `subprocess` is a module with everything in it. A name after `!` is
    an exception, and does not match. In Bash, a name is a tool, or one of the default patterns. Without names, the pattern is its own name.
    `granted_by` are the permissions that together lift the rule; if empty, no permission lifts it.
    """

    pattern: str
    reason: str
    names: tuple[str, ...] = ()
    granted_by: frozenset[CodeGrant] = frozenset()

    def __post_init__(self) -> None:
        for name in (self.pattern, *self.names):
            if not name.strip() or len(name) > 200:
                raise PolicyError(f"not a pattern of code: {name[:80]!r}", hint='write "eval(", "os.system" or "subprocess"')

    @property
    def spelt(self) -> tuple[str, ...]:
        """The names that the rule matches: `names` or, if empty, the pattern itself."""
        return self.names or (self.pattern,)


@dataclass(frozen=True)
class Issue:
    """A pattern that was found, the line of its first match, and the permissions that together would lift it.

    `tried` is the name that the program used, as the rule spells it: `pathlib.Path.write_text` for the pattern `open(`.
    """

    pattern: str
    reason: str
    line: int
    granted_by: frozenset[CodeGrant] = frozenset()
    tried: str = ""


@dataclass(frozen=True)
class Validation:
    """The issues in the order of the text, each pattern once. Code without issues may still do anything: see `policy.code`."""

    issues: tuple[Issue, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether no issue was found."""
        return not self.issues


class Matcher:
    """Finds the rule that matches a name in code. Rules in `apart` are never matched by name."""

    def __init__(self, rules: tuple[Rule, ...], apart: tuple[Rule, ...] = ()) -> None:
        self.rules = rules
        self.patterns = frozenset(rule.pattern for rule in rules)
        self._of: dict[str, Rule | None] = {}
        for rule in rules:
            if rule in apart:
                continue
            for name in rule.spelt:
                self._of[name.removeprefix("!")] = None if name.startswith("!") else rule
        self.words = frozenset(part for name in self._of for part in name.removesuffix("(").split("."))

    def function(self, name: str) -> Rule | None:
        """Return the rule for a built-in function of the language; None if there is none."""
        return self._of.get(f"{name}(")

    def name(self, dotted: str) -> Rule | None:
        """Return the rule for a dotted name: its own rule, or else the rule of its nearest parent; None if there is none."""
        return self._of.get(self.spelling(dotted))

    def spelling(self, dotted: str) -> str:
        """Return the name, or its nearest parent, that a rule spells; empty if there is none."""
        while dotted and dotted not in self._of:
            dotted = dotted.rpartition(".")[0]
        return dotted

    def within(self, module: str) -> bool:
        """Return whether a rule matches some name in this module."""
        return any(name.startswith(f"{module}.") for name in self._of)


class Findings:
    """The issues found so far; the first match of each pattern is kept."""

    def __init__(self) -> None:
        self._issues: dict[str, Issue] = {}

    def add(self, rule: Rule | None, line: int, tried: str = "") -> None:
        """Record that a rule matches on this line, by the name that was tried. None is ignored."""
        if rule is not None and ((before := self._issues.get(rule.pattern)) is None or line < before.line):
            self._issues[rule.pattern] = Issue(rule.pattern, rule.reason, line, rule.granted_by, tried.removeprefix("builtins."))

    def result(self) -> Validation:
        """Return all issues, in the order of their lines."""
        return Validation(tuple(sorted(self._issues.values(), key=lambda issue: (issue.line, issue.pattern))))


_FILES, _NETWORK, _PROCESSES = frozenset({CodeGrant.FILES}), frozenset({CodeGrant.NETWORK}), frozenset({CodeGrant.PROCESSES})
_SHELL = frozenset({CodeGrant.PROCESSES, CodeGrant.SHELL})


def _in(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names.split())


_EXEC = "execl execle execlp execlpe execv execve execvp execvpe spawnl spawnle spawnlp spawnlpe spawnv spawnve spawnvp spawnvpe"
_PATH = "open read_text read_bytes write_text write_bytes unlink rename replace rmdir touch symlink_to hardlink_to chmod"

PYTHON = (
    Rule("os.system", "runs a command line in a shell", (*_in("os", "system popen"), "commands", "popen2"), _SHELL),
    Rule(
        "subprocess",
        "starts other programs",
        (
            *("subprocess", "_posixsubprocess", "pexpect", "pty.spawn", "pty.fork", "sh", "plumbum"),
            *_in("os", f"{_EXEC} fork forkpty posix_spawn posix_spawnp startfile"),
            *_in("asyncio", "create_subprocess_exec create_subprocess_shell subprocess"),
            *_in("multiprocessing", "Process Pool Manager get_context set_start_method spawn popen_fork"),
        ),
        _PROCESSES,
    ),
    Rule(
        "__import__",
        "imports a module by a name that may be computed",
        (
            *("__import__(", "builtins.__import__", "importlib.import_module", "importlib.__import__", "importlib.reload", "runpy", "imp"),
            *("importlib.util", "importlib.machinery", "importlib._bootstrap", "pkgutil", "zipimport", "__loader__"),
        ),
    ),
    Rule("eval(", "evaluates text as code", ("eval(", "builtins.eval")),
    Rule(
        "exec(", "runs text as code", ("exec(", "builtins.exec", "code", "codeop", "marshal.loads", "types.CodeType", "types.FunctionType(")
    ),
    Rule("compile(", "makes code out of text", ("compile(", "builtins.compile")),
    Rule(
        "open(",
        "uses a file, and this sandbox has none but those below /tmp",
        (
            *("open(", "builtins.open", "io.open", "io.FileIO", "_io.open", "_io.FileIO", "os.open", "codecs.open", "_pyio", "fileinput"),
            *_in("pathlib.Path", _PATH),
        ),
        _FILES,
    ),
    Rule(
        "socket",
        "opens network connections",
        (
            *("socket", "_socket", "socketserver", "asyncio.open_connection", "asyncio.start_server"),
            *("paramiko", "websocket", "websockets", "zmq"),
        ),
        _NETWORK,
    ),
    Rule("requests", "makes requests over the network", ("requests", "httpx", "aiohttp", "pycurl", "requests_html", "grequests"), _NETWORK),
    Rule(
        "urllib",
        "makes requests over the network",
        (
            *("urllib", "!urllib.parse", "!urllib.error", "!urllib.robotparser", "urllib2", "urllib3", "http.client", "http.server"),
            *("ftplib", "smtplib", "poplib", "imaplib", "telnetlib", "nntplib", "xmlrpc"),
        ),
        _NETWORK,
    ),
    Rule("ctypes", "calls into native code, past everything that Python checks", ("ctypes", "_ctypes", "cffi")),
)
REFLECTION = Rule("__subclasses__", "reaches objects that the program does not name")
COMPUTED = Rule("getattr(", "looks up a computed name in a module")
INTRICATE = Rule("unreadable", "is too large or too intricate to be checked")
PYTHON_REFLECTION = (REFLECTION, COMPUTED, INTRICATE)

JAVASCRIPT = (
    Rule("eval(", "evaluates text as code", ("eval(", "Function(", "vm", "AsyncFunction(", "GeneratorFunction(")),
    Rule("child_process", "starts other programs", ("child_process", "cluster", "Deno.Command", "Deno.run", "Bun.spawn"), _PROCESSES),
    Rule("fs", "opens files, and this sandbox shows none", ("fs", "fs/promises", "Deno.readTextFile", "Deno.open", "Bun.file"), _FILES),
    Rule("net", "opens network connections", ("net", "tls", "dgram", "dns", "dns/promises", "WebSocket(", "EventSource("), _NETWORK),
    Rule(
        "http",
        "makes requests over the network",
        ("http", "https", "http2", "fetch(", "XMLHttpRequest(", "axios", "got", "node-fetch", "undici", "request", "superagent", "ws"),
        _NETWORK,
    ),
    Rule("process.binding", "uses internals of Node.js", ("process.binding", "process._linkedBinding", "process.dlopen", "inspector")),
    Rule("require(", "loads a module by a computed name", ("require(", "import(")),
    Rule("constructor", "reaches a constructor that makes code out of text"),
)

RUBY = (
    Rule("eval(", "evaluates text as code", ("eval(", "instance_eval(", "class_eval(", "module_eval(", "binding.eval", "RubyVM")),
    Rule(
        "system(",
        "starts other programs",
        ("system(", "exec(", "spawn(", "fork(", "syscall(", "IO.popen", "Open3", "open3", "PTY", "pty"),
        _SHELL,
    ),
    Rule("`", "runs a command line in a shell", ("`",), _SHELL),
    Rule(
        "open(",
        "opens a file, and this sandbox shows none",
        (
            "open(",
            *_in("File", "open read write new readlines foreach delete"),
            *_in("IO", "read write binread readlines foreach"),
            "FileUtils",
        ),
        _FILES,
    ),
    Rule("socket", "opens network connections", ("socket", "TCPSocket", "UDPSocket", "Socket", "TCPServer", "UNIXSocket"), _NETWORK),
    Rule(
        "net/http",
        "makes requests over the network",
        ("net/http", "net/https", "open-uri", "Net", "URI.open", "httparty", "HTTParty", "faraday", "Faraday", "net/ftp", "net/smtp"),
        _NETWORK,
    ),
    Rule("send(", "calls a method by a computed name", ("send(", "__send__(", "public_send(", "const_get(", "ObjectSpace")),
    Rule("fiddle", "calls into native code", ("fiddle", "Fiddle", "ffi", "FFI", "dl")),
)

BASH = (
    Rule("eval", "evaluates text as a command line"),
    Rule("| sh", "runs the output of another command as a command line", ("| sh",)),
    Rule("$command", "starts a program by a computed name", ("$command",)),
    Rule("network", "uses the network", ("network",), _NETWORK),
    Rule("rm -rf /", "removes or overwrites the whole machine or one of its disks", ("rm -rf /",)),
    Rule(":(){ :|:& };:", "starts itself twice, without end", (":(){ :|:& };:",)),
)

DEFAULT: dict[str, tuple[Rule, ...]] = {
    "python": PYTHON + PYTHON_REFLECTION,
    "javascript": (*JAVASCRIPT, INTRICATE),
    "ruby": (*RUBY, INTRICATE),
    "bash": (*BASH, INTRICATE),
}


def granted(policy: Policy) -> frozenset[CodeGrant]:
    """Return the permissions that a policy grants, about which code needs no warning."""
    grants = {CodeGrant.FILES} if policy.files.read or policy.files.write else set()
    if policy.processes:
        grants |= {CodeGrant.PROCESSES, CodeGrant.SHELL} if policy.programs.shell else {CodeGrant.PROCESSES}
    if policy.network.asks:
        grants.add(CodeGrant.NETWORK)
    return frozenset(grants)
