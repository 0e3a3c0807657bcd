"""Find out what a program needs of a runtime: modules, names and features, from what the reader of its language found in its text.

The tables say which dotted name needs which feature. A text that is too large, malformed or too complex is not read at all; the program
then goes to a runtime that can run anything. A string counts as code where the program can run it.
"""

from __future__ import annotations

import _ast as ast  # only the node classes; `ast` itself is slow to load

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.readers import too_much
from agent_sandbox.readers.python import ImportChoice, elements, has_only_integers, is_int_type, names_an_encoding, number, repetitions
from agent_sandbox.readers.python import read as read_python
from agent_sandbox.readers.python_values import IMPORTERS, Resolver, own_name
from agent_sandbox.runtime.router.model import Feature, ProgramNeeds

if TYPE_CHECKING:
    from collections.abc import Container

    from agent_sandbox.readers.javascript import JavaScriptSource

_MAKE = frozenset({"array", "asarray", "asanyarray", "matrix", "full", "full_like"})
_COMPUTES = """
    sum prod cumsum cumprod dot matmul multiply power square add outer kron append concatenate stack vstack hstack repeat tile inner vdot
"""
_COMPUTE = frozenset(_COMPUTES.split())
_ROUNDS = 3  # levels of code in strings in code that are read
_LONG_LOOP = 20_000_000  # iterations; in a longer loop, faster native code outweighs its slower start
_MUCH_MEMORY = 1 << 28  # elements or bytes; a little more fills a 32-bit address space
_RUN_TEXT = frozenset({"builtins.exec", "builtins.eval", "builtins.compile"})
_MAY_RUN_TEXT = frozenset({"timeit.timeit", "timeit.repeat", "timeit.Timer", "cProfile.run", "profile.run", "pdb.run"})
_FILLED = frozenset(
    {"numpy.zeros", "numpy.ones", "numpy.empty", "numpy.full", "numpy.random.rand", "numpy.random.randn", "numpy.random.random"}
)
_NATIVE_WIDTH = frozenset("lLnNP")  # format characters of `struct` and `array`
_MOST_UNSEEN = 8
_LONGEST_WORD = 40
# Attributes through which code reaches objects that it never names.
_INNARDS = frozenset(
    {
        *("__subclasses__", "__globals__", "__builtins__", "__loader__", "__spec__", "__code__"),
        *("f_globals", "f_builtins", "gi_frame", "tb_frame"),
    }
)

_NEEDS = {
    Feature.PROCESSES: """
        subprocess multiprocessing os.fork os.forkpty os.system os.popen os.posix_spawn os.posix_spawnp os.kill os.killpg os.startfile
        os.execl os.execle os.execlp os.execlpe os.execv os.execve os.execvp os.execvpe
        os.spawnl os.spawnle os.spawnlp os.spawnlpe os.spawnv os.spawnve os.spawnvp os.spawnvpe
        os.wait os.wait3 os.wait4 os.waitid os.waitpid os.pipe os.pipe2 pty _posixsubprocess
        concurrent.futures.ProcessPoolExecutor concurrent.futures.process sys.executable sh plumbum pexpect sarge invoke fabric ray dask
        psutil pip ensurepip venv virtualenv webbrowser.open pydoc.pager asyncio.create_subprocess_exec asyncio.create_subprocess_shell
    """,
    Feature.THREADS: """
        threading.Thread threading.Timer threading._start_new_thread _thread.start_new_thread _thread.start_new
        concurrent.futures.ThreadPoolExecutor concurrent.futures.thread concurrent.futures.InterpreterPoolExecutor concurrent.interpreters
        multiprocessing.dummy logging.handlers.QueueListener faulthandler.dump_traceback_later gevent eventlet greenlet
    """,
    Feature.SOCKETS: """
        socket _socket socketserver ssl select selectors http.client http.server urllib.request urllib.robotparser urllib2 ftplib imaplib
        poplib smtplib smtpd telnetlib nntplib asyncore asynchat xmlrpc.client xmlrpc.server wsgiref.simple_server
        logging.handlers.SocketHandler logging.handlers.DatagramHandler logging.handlers.SysLogHandler logging.handlers.HTTPHandler
        logging.handlers.SMTPHandler logging.config.listen requests httpx urllib3 aiohttp websocket websockets paramiko boto3 botocore grpc
        redis pymongo psycopg2 psycopg pymysql mysql flask fastapi uvicorn django tornado twisted zmq selenium playwright openai anthropic
    """,
    Feature.EVENT_LOOP: "asyncio trio anyio curio uvloop",
    Feature.SIGNALS: "signal _signal faulthandler.register",
    Feature.NATIVE_CODE: """
        ctypes _ctypes cffi _cffi_backend cython pyximport numba llvmlite pybind11 cppyy torch tensorflow jax cv2 distutils setuptools
        importlib.machinery.ExtensionFileLoader sys.setdlopenflags sys.getdlopenflags _imp.create_dynamic imp.load_dynamic
        numpy.ctypeslib numpy.f2py scipy.weave scipy.LowLevelCallable
    """,
    Feature.SHARED_MEMORY: "mmap multiprocessing.shared_memory numpy.memmap",
    Feature.MACHINE: """
        platform sys.platform sys.getwindowsversion os.uname os.cpu_count os.process_cpu_count os.sched_getaffinity os.getloadavg os.sysconf
        os.confstr sysconfig.get_platform distro cpuinfo shutil.which shutil.disk_usage os.get_exec_path site.getsitepackages
        importlib.metadata pkg_resources pkgutil.iter_modules pkgutil.walk_packages sys.version sys.prefix sys.base_prefix
    """,
    Feature.POSIX: """
        fcntl resource grp pwd spwd crypt syslog termios tty curses readline tkinter turtle nis os.chmod os.fchmod os.lchmod os.chown
        os.fchown os.lchown os.umask os.getuid os.geteuid os.getgid os.getegid os.getlogin os.getgroups os.setuid os.setgid os.mkfifo
        os.mknod os.chroot os.getppid os.getpgid os.setsid os.nice os.ttyname os.openpty os.get_terminal_size
        shutil.chown shutil.copymode shutil.copystat shutil.get_terminal_size getpass.getuser
        inotify pyinotify watchdog pygame PyQt5 PyQt6 PySide6 wx gi
    """,
    # `by_its_width` recognises the calls that depend on their arguments.
    Feature.WIDE_INTEGERS: """
        sys.maxsize numpy.arange numpy.indices numpy.mgrid numpy.ogrid numpy.tri numpy.bincount numpy.fromiter numpy.fromstring
        numpy.loadtxt numpy.genfromtxt numpy.fromfunction numpy.r_ numpy.c_ numpy.vander numpy.int_ numpy.uint numpy.intp numpy.uintp
        numpy.long numpy.ulong numpy.random.randint numpy.random.random_integers numpy.random.choice
        numpy.random.permutation
    """,
}
FEATURE_OF = {name: feature for feature, names in _NEEDS.items() for name in names.split()}

# Modules that a function needs besides its own.
IMPLIES = {
    **dict.fromkeys(("pandas.read_parquet", "pandas.read_feather", "pandas.read_orc"), "pyarrow"),
    "pandas.read_hdf": "tables",
    "pandas.read_clipboard": "pyperclip",
    "pandas.read_gbq": "pandas_gbq",
}
IMPLIES_OF_METHOD = {"to_parquet": "pyarrow", "to_feather": "pyarrow", "to_orc": "pyarrow", "to_hdf": "tables", "to_clipboard": "pyperclip"}

# Names that run or load something that is not in the text.
_OPAQUE = """
    runpy.run_path runpy.run_module pickle.load pickle.loads pickle.Unpickler marshal.load marshal.loads shelve.open dill joblib.load
    cloudpickle.load cloudpickle.loads importlib.util.spec_from_file_location importlib.util.module_from_spec importlib.machinery zipimport
    importlib.reload importlib.util.find_spec importlib.find_loader code codeop sys.path sys.meta_path sys.path_hooks types.FunctionType
    types.CodeType site.addsitedir pandas.read_pickle pandas.eval numpy.load imp
"""
OPAQUE = frozenset(_OPAQUE.split())
MACHINE_FILES = ("/proc", "/sys", "/dev")


_NODE_NAMES = """
    require module exports process Buffer global __dirname __filename setImmediate clearImmediate fetch URL URLSearchParams TextEncoder
    TextDecoder AbortController AbortSignal Event EventTarget performance crypto structuredClone WebAssembly Worker MessageChannel
    BroadcastChannel Blob File FormData Headers Request Response WebSocket EventSource ReadableStream WritableStream TransformStream
    Intl SharedArrayBuffer Atomics navigator document window localStorage XMLHttpRequest Deno Bun
"""
_NODE = frozenset(_NODE_NAMES.split())
_NODE_METHODS = frozenset({"toLocaleString", "toLocaleDateString", "toLocaleTimeString", "localeCompare"})  # correct only with Intl
_MAKES_CODE = frozenset({"eval", "Function", "constructor", "GeneratorFunction", "AsyncFunction"})


def by_its_width(node: ast.Call, name: str) -> bool:
    """Return whether a call of this dotted name makes integers whose size depends on the machine (32 or 64 bits)."""
    module, _, function = name.rpartition(".")
    if types := [keyword.value for keyword in node.keywords if keyword.arg == "dtype"]:
        return any(is_int_type(each) for each in types)
    if module != "numpy" or not node.args:
        return False
    if any(is_int_type(each) for each in node.args[1:]):
        return True
    if function in _MAKE:
        return has_only_integers(node.args[-1 if function.startswith("full") else 0], unknown=True)
    return function in _COMPUTE and any(has_only_integers(each, unknown=False) for each in node.args)


def _nearest(name: str, table: Container[str]) -> str:
    """Return the dotted name if it is in the table, else the nearest module or class around it that is; empty if there is none."""
    while name and name not in table:
        name = name.rpartition(".")[0]
    return name


def _call(needs: _Collector, node: ast.Call) -> None:
    """Record the needs of a call."""
    for name in sorted(needs.names.origins(node.func)):
        if not name.startswith("builtins."):
            needs.use(name, node.lineno)
        _named(needs, node, name)
    for name in sorted(needs.names.origins(node)):  # its result: a module, an attribute
        needs.use(name, node.lineno)
    _method(needs, node)
    if by_its_width(node, ""):
        needs.need(Feature.WIDE_INTEGERS, "the type int", node.lineno)


def _named(needs: _Collector, node: ast.Call, name: str) -> None:
    """Record the needs of a call to a function that may have this dotted name."""
    first = node.args[0] if node.args else next((each.value for each in node.keywords if each.arg in ("name", "source", "stmt")), None)
    if name in IMPORTERS:
        _import(needs, node, first)
    elif name in _RUN_TEXT or name in _MAY_RUN_TEXT:
        _run_text(needs, node, first, certain=name in _RUN_TEXT)
    elif name == "builtins.getattr":
        if len(node.args) > 1 and needs.names.texts(node.args[1]) is None:
            needs.computed_attribute = needs.computed_attribute or node.lineno
    elif name == "builtins.range":
        if max((number(each) for each in node.args), default=0) >= _LONG_LOOP:
            needs.need(Feature.LONG_LOOPS, "range", node.lineno)
    elif name in ("builtins.bytes", "builtins.bytearray") or name in _FILLED:
        if elements(node.args) >= _MUCH_MEMORY:
            needs.need(Feature.MUCH_MEMORY, name.removeprefix("builtins."), node.lineno)
    elif name.startswith("pandas.read_"):
        if first is not None and any("://" in text for text in needs.names.texts(first) or ()):
            needs.need(Feature.SOCKETS, f"{name} of an address", node.lineno)
    elif (name.startswith("struct.") or name == "array.array") and _by_native_width(needs, first):
        needs.need(Feature.WIDE_INTEGERS, name, node.lineno)
    if name.startswith("numpy.") and by_its_width(node, name):
        needs.need(Feature.WIDE_INTEGERS, name, node.lineno)


def _import(needs: _Collector, node: ast.Call, first: ast.expr | None) -> None:
    names = None if first is None else needs.names.texts(first)
    for name in sorted(names or ()):
        if name.startswith("."):
            needs.miss("imports from a package of its own", node.lineno)
        else:
            needs.module(name, node.lineno)
    if names is None:
        needs.miss("imports a module by a computed name", node.lineno)


def _run_text(needs: _Collector, node: ast.Call, first: ast.expr | None, *, certain: bool) -> None:
    texts = None if first is None else needs.names.texts(first)
    if texts is not None:
        needs.code |= texts
    elif certain and not (isinstance(first, ast.Call) and needs.names.origins(first.func) & _RUN_TEXT):
        needs.miss("runs text that it computes", node.lineno)


def _method(needs: _Collector, node: ast.Call) -> None:
    """Record the needs of a method call on an unknown object. Only the method's name and the imported modules tell what it is."""
    if not isinstance(node.func, ast.Attribute):
        return
    imported = {name.partition(".")[0] for name in needs.modules}
    method = node.func.attr
    if "pandas" in imported and method in IMPLIES_OF_METHOD:
        needs.modules.setdefault(IMPLIES_OF_METHOD[method], node.lineno)
    if "numpy" in imported and method in ("randint", "permutation"):  # `integers` of a Generator has 64 bits everywhere
        needs.need(Feature.WIDE_INTEGERS, f".{method}()", node.lineno)
    if imported & {"numpy", "pandas"} and method in ("astype", "view") and any(is_int_type(each) for each in node.args):
        needs.need(Feature.WIDE_INTEGERS, f".{method}(int)", node.lineno)
    if "pathlib" in imported and method in ("chmod", "lchmod", "owner"):
        needs.need(Feature.POSIX, f".{method}()", node.lineno)


def _by_native_width(needs: _Collector, first: ast.expr | None) -> bool:
    texts = (needs.names.texts(first) if first is not None else None) or ()
    return any(_NATIVE_WIDTH & set(text) and not text.startswith(("<", ">", "=", "!")) for text in texts)


class _Collector:
    """Collects the needs of a Python program. `code` are strings that the program runs as code."""

    def __init__(self, names: Resolver) -> None:
        self.names = names
        self.code: set[str] = set()
        self.modules: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.computed_attribute = 0
        self._choices: list[tuple[tuple[str, ...], ...]] = []
        self._features: dict[Feature, str] = {}
        self._unseen: dict[str, None] = {}
        self._escaped: dict[str, int] = {}
        self._words: set[str] = set()
        self._open_loop = 0

    def result(self, *unseen: str) -> ProgramNeeds:
        """Return the collected needs as a value."""
        for name in FEATURE_OF if self._escaped else ():
            module, _, attribute = name.rpartition(".")
            if module in self._escaped and attribute in self._words:
                self.use(name, self._escaped[module])
        if self.computed_attribute and any(name.partition(".")[0] in self._escaped for name in FEATURE_OF):
            self.miss("looks attributes of modules up by a computed name", self.computed_attribute)
        doubts = (*self._unseen, *unseen)
        return ProgramNeeds(
            self.modules,
            self.used,
            tuple(self._choices),
            self._features,
            doubts[:_MOST_UNSEEN],
            loose=self._escaped,
            words=frozenset(self._words),
            open_loop=self._open_loop,
        )

    def module(self, name: str, line: int) -> None:
        """Record the import of this module."""
        self.modules.setdefault(name, line)
        self.use(name, line)

    def use(self, name: str, line: int) -> None:
        """Record the use of this dotted name."""
        name = own_name(name)
        self.used.setdefault(name, line)
        if feature := FEATURE_OF.get(_nearest(name, FEATURE_OF)):
            self.need(feature, name, line)
        if _nearest(name, OPAQUE):
            self.miss(f"uses {name[:80]}, which loads or runs what its text does not hold", line)
        if (brought := IMPLIES.get(name)) is not None:
            self.modules.setdefault(brought, line)

    def need(self, feature: Feature, what: str, line: int) -> None:
        """Record a needed feature, unless it is recorded already."""
        self._features.setdefault(feature, f"{what[:80]} (line {line})")

    def miss(self, what: str, line: int) -> None:
        """Record that something cannot be determined from the text."""
        self._unseen.setdefault(f"it {what} (line {line})")

    def add(self, node: ast.AST | ImportChoice) -> None:
        """Record what one node of the program uses."""
        match node:
            case ast.Import(names=names):
                for each in names:
                    self.module(each.name, node.lineno)
            case ast.ImportFrom():
                self._import_from(node)
            case ImportChoice():
                self._choose(node)
            case ast.Attribute(attr=attr):
                self._words.add(attr)
                if attr in _INNARDS:
                    self.miss(f"reaches for {attr}", node.lineno)
                for name in sorted(self.names.origins(node)):
                    self.use(name, node.lineno)
            case ast.Name():
                self._passed_around(node)
            case ast.Call():
                _call(self, node)
            case ast.Constant(value=str(text)):
                self._text(text, node.lineno)
            case ast.Subscript():
                for name in sorted(self.names.origins(node)):
                    self.use(name, node.lineno)
            case ast.BinOp():
                if repetitions(node) >= _MUCH_MEMORY:
                    self.need(Feature.MUCH_MEMORY, "a sequence repeated", node.lineno)
            case ast.While():
                self._open_loop = self._open_loop or node.lineno

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            self.miss("imports from a package of its own", node.lineno)
            return
        self.module(node.module, node.lineno)
        for each in node.names:
            if each.name != "*":
                self.use(f"{node.module}.{each.name}", node.lineno)

    def _choose(self, choice: ImportChoice) -> None:
        """Record an import with fallbacks. Which of them is used depends on the modules of the runtime."""
        self._choices.append(tuple(choice.alternatives))
        for names in choice.alternatives:
            for name in names:
                self.use(name, choice.lineno)

    def _passed_around(self, node: ast.Name) -> None:
        """Record a name that is passed on as a value. Its use elsewhere is not followed."""
        for name in sorted(self.names.origins(node)):
            if name in ("builtins.exec", "builtins.eval", "builtins.compile", "builtins.__import__", "builtins.getattr", "builtins"):
                self.miss(f"passes {name} around", node.lineno)
            elif not name.startswith("builtins."):
                self._escaped.setdefault(name, node.lineno)
                self.use(name, node.lineno)

    def _text(self, text: str, line: int) -> None:
        if len(text) <= _LONGEST_WORD and text.isidentifier():
            self._words.add(text)
        if text.startswith(MACHINE_FILES) and text.split("/")[1] in ("proc", "sys", "dev"):
            self.need(Feature.MACHINE, text, line)


def needs_of_python(text: str) -> ProgramNeeds:
    """Return the needs of a Python program. Never raises, whatever the text."""
    source = read_python(text)
    if not source.too_large and names_an_encoding(text):
        return ProgramNeeds(unreadable="it names an encoding of its own")
    if source.unreadable:
        return ProgramNeeds(unreadable=source.unreadable)
    known, unparsed = {text}, False
    for _ in range(_ROUNDS):
        needs = _Collector(source.names)
        for node in source.executed():
            needs.add(node)
        if source.names.exhausted:
            return ProgramNeeds(unreadable="it is too intricate to follow")
        if not (fresh := sorted(needs.code - known)):
            return needs.result(*(("it runs text that is not Python",) if unparsed else ()))
        known |= needs.code
        if why := too_much("".join(known)):
            return ProgramNeeds(unreadable=f"with the text it runs, {why}")
        for each in fresh:
            unparsed = bool(source.add(each.strip())) or unparsed
    return ProgramNeeds(unreadable="it runs text within text too deep to follow")


def needs_of_javascript(text: str) -> ProgramNeeds:
    """Return the needs of a JavaScript program: whether it uses what only Node.js has. Never raises, whatever the text."""
    import re  # slow to load, as is the reader; neither is needed for Python

    from agent_sandbox.readers.javascript import read

    source = read(text, unescape=False)
    if source.unreadable:
        return ProgramNeeds(unreadable=source.unreadable)
    tokens, names = source.tokens, _NODE - (source.declared - {"require"})
    features: dict[Feature, str] = {}
    unseen: dict[str, None] = {}
    makes_code = any(kind == "word" and text in _MAKES_CODE for kind, text, _ in tokens)
    for at, (kind, text, line) in enumerate(tokens):
        after_dot = at > 0 and tokens[at - 1][1] == "."
        if kind == "word" and (text in _NODE_METHODS if after_dot else text in names):
            features.setdefault(Feature.NODE, f"{text} (line {line})")
        elif kind == "word" and text == "import" and not after_dot:
            _import_module(source, at, features, unseen)
        elif kind == "word" and text in ("globalThis", "eval", "Function") and not after_dot:
            unseen.setdefault(f"it uses {text}, which reaches what its text does not name (line {line})")
        elif kind == "text" and makes_code and (hidden := names.intersection(re.findall(r"[^\W\d][\w$]*", text))):
            features.setdefault(Feature.NODE, f"{min(hidden)} in a string (line {line})")
        elif kind == "mark" and text == "\\":
            unseen.setdefault(f"it spells a name with escapes (line {line})")
    return ProgramNeeds(features=features, unseen=tuple(unseen)[:8])


def _import_module(source: JavaScriptSource, at: int, features: dict[Feature, str], unseen: dict[str, None]) -> None:
    """Record the module of an `import`: the next string of the statement."""
    line = source.tokens[at][2]
    for kind, text, _ in source.tokens[at + 1 : at + 200]:
        if kind == "text":
            if text[1:2] in (".", "/"):
                unseen.setdefault(f"the module {text[1:-1][:80]} lies beside the code and was not read (line {line})")
            else:
                features.setdefault(Feature.NODE, f"the module {text[1:-1][:80]} (line {line})")
            return
        if text in (";", ")", "="):
            break
    unseen.setdefault(f"it imports a module by a computed name (line {line})")
