"""Read Python source: the modules, names and features that it uses, without running or importing any of it.

`read_python` is the entry point, `Walk` collects what a syntax tree uses, and the tables say which dotted name needs which feature. Text
that is too large, not Python for this interpreter, or too intricate is not read at all, and goes to a runtime that need not understand it.
"""

from __future__ import annotations

import _ast as ast
from collections.abc import Sequence

from agent_sandbox.readers.bounds import too_much
from agent_sandbox.readers.python import Names, children, names_an_encoding, nodes_of, own_name, parse
from agent_sandbox.runtime.router.model import Feature, Reading

_MAKE = frozenset({"array", "asarray", "asanyarray", "matrix", "full", "full_like"})
_COMPUTES = """
    sum prod cumsum cumprod dot matmul multiply power square add outer kron append concatenate stack vstack hstack repeat tile inner vdot
"""
_COMPUTE = frozenset(_COMPUTES.split())
_LEAVES = 4096  # numbers of one literal that are inspected
_ROUNDS = 3  # of code in strings in code
_LONG_LOOP = 20_000_000  # iterations; native code is several times faster, which then outweighs its slower start
_MUCH_MEMORY = 1 << 28  # elements or bytes; a 32-bit address space is full soon after
_RUN_TEXT = frozenset({"builtins.exec", "builtins.eval", "builtins.compile"})
_MAY_RUN_TEXT = frozenset({"timeit.timeit", "timeit.repeat", "timeit.Timer", "cProfile.run", "profile.run", "pdb.run"})
_IMPORTERS = frozenset({"builtins.__import__", "importlib.import_module", "importlib.__import__"})
_FILLED = frozenset(
    {"numpy.zeros", "numpy.ones", "numpy.empty", "numpy.full", "numpy.random.rand", "numpy.random.randn", "numpy.random.random"}
)
_NATIVE_WIDTH = frozenset("lLnNP")  # format characters of `struct` and `array`
_MOST_UNSEEN = 8
_LONGEST_WORD = 40
# Attributes through which code reaches objects that it never names.
_INNARDS = frozenset(
    {
        "__subclasses__",
        "__globals__",
        "__builtins__",
        "__loader__",
        "__spec__",
        "f_globals",
        "f_builtins",
        "gi_frame",
        "tb_frame",
        "__code__",
    }
)
_CATCHES = frozenset({"ImportError", "ModuleNotFoundError"})

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


def by_its_width(node: ast.Call, name: str) -> bool:
    """Whether a call of this dotted name makes integers of the machine's width."""
    module, _, function = name.rpartition(".")
    if types := [keyword.value for keyword in node.keywords if keyword.arg == "dtype"]:
        return any(default_integer(each) for each in types)
    if module != "numpy" or not node.args:
        return False
    if any(default_integer(each) for each in node.args[1:]):
        return True
    if function in _MAKE:
        return _integers(node.args[-1 if function.startswith("full") else 0], unknown=True)
    return function in _COMPUTE and any(_integers(each, unknown=False) for each in node.args)


def default_integer(node: ast.expr) -> bool:
    """Whether an expression is the type `int`, by name or as a string."""
    return (isinstance(node, ast.Name) and node.id == "int") or (isinstance(node, ast.Constant) and node.value in ("int", "uint"))


def _integers(node: ast.expr, *, unknown: bool) -> bool:
    """Whether all numbers in a literal are integers; `unknown` if the text does not tell."""
    waiting, integers = [node], False
    for _ in range(_LEAVES):
        if not waiting:
            return integers
        each = waiting.pop()
        if isinstance(each, (ast.List, ast.Tuple, ast.Set)):
            waiting += each.elts
        elif isinstance(each, ast.UnaryOp):
            waiting.append(each.operand)
        elif not isinstance(each, ast.Constant):
            return unknown
        elif isinstance(each.value, (float, complex)):
            return False
        else:
            integers = integers or type(each.value) is int
    return unknown


def feature_of(name: str) -> Feature | None:
    """Return the feature that a dotted name, or a module or class containing it, needs; None if none."""
    while name:
        if name in FEATURE_OF:
            return FEATURE_OF[name]
        name = name.rpartition(".")[0]
    return None


def opaque(name: str) -> bool:
    """Whether a dotted name runs or loads something that is not in the text."""
    while name:
        if name in OPAQUE:
            return True
        name = name.rpartition(".")[0]
    return False


def enter(walk: Walk, node: ast.Call) -> list[ast.AST]:
    """Record a call. Returns the nodes to visit next, last first."""
    for name in sorted(walk.names.origins(node.func)):
        if not name.startswith("builtins."):
            walk.use(name, node.lineno)
        _named(walk, node, name)
    for name in sorted(walk.names.origins(node)):  # its result: a module, an attribute
        walk.use(name, node.lineno)
    _method(walk, node)
    if by_its_width(node, ""):
        walk.need(Feature.WIDE_INTEGERS, "the type int", node.lineno)
    followed = isinstance(node.func, ast.Name)
    return [each for each in children(node) if not (followed and each is node.func)]


def _named(walk: Walk, node: ast.Call, name: str) -> None:
    """Record a call of a function that may have this dotted name."""
    first = node.args[0] if node.args else next((each.value for each in node.keywords if each.arg in ("name", "source", "stmt")), None)
    if name in _IMPORTERS:
        _import(walk, node, first)
    elif name in _RUN_TEXT or name in _MAY_RUN_TEXT:
        _run_text(walk, node, first, certain=name in _RUN_TEXT)
    elif name == "builtins.getattr":
        if len(node.args) > 1 and walk.names.texts(node.args[1]) is None:
            walk.computed_attribute = walk.computed_attribute or node.lineno
    elif name == "builtins.range":
        if max((_number(each) for each in node.args), default=0) >= _LONG_LOOP:
            walk.need(Feature.LONG_LOOPS, "range", node.lineno)
    elif name in ("builtins.bytes", "builtins.bytearray") or name in _FILLED:
        if _elements(node.args) >= _MUCH_MEMORY:
            walk.need(Feature.MUCH_MEMORY, name.removeprefix("builtins."), node.lineno)
    elif name.startswith("pandas.read_"):
        if first is not None and any("://" in text for text in walk.names.texts(first) or ()):
            walk.need(Feature.SOCKETS, f"{name} of an address", node.lineno)
    elif (name.startswith("struct.") or name == "array.array") and _by_native_width(walk, first):
        walk.need(Feature.WIDE_INTEGERS, name, node.lineno)
    if name.startswith("numpy.") and by_its_width(node, name):
        walk.need(Feature.WIDE_INTEGERS, name, node.lineno)


def _import(walk: Walk, node: ast.Call, first: ast.expr | None) -> None:
    names = None if first is None else walk.names.texts(first)
    for name in sorted(names or ()):
        if name.startswith("."):
            walk.miss("imports from a package of its own", node.lineno)
        else:
            walk.module(name, node.lineno)
    if names is None:
        walk.miss("imports a module by a computed name", node.lineno)


def _run_text(walk: Walk, node: ast.Call, first: ast.expr | None, *, certain: bool) -> None:
    texts = None if first is None else walk.names.texts(first)
    if texts is not None:
        walk.code |= texts
    elif certain and not (isinstance(first, ast.Call) and walk.names.origins(first.func) & _RUN_TEXT):
        walk.miss("runs text that it computes", node.lineno)


def _method(walk: Walk, node: ast.Call) -> None:
    """Record a method of an unknown object, recognised by its name alone if a module with such methods is imported."""
    if not isinstance(node.func, ast.Attribute):
        return
    imported = {name.partition(".")[0] for name in walk.modules}
    method = node.func.attr
    if "pandas" in imported and method in IMPLIES_OF_METHOD:
        walk.modules.setdefault(IMPLIES_OF_METHOD[method], node.lineno)
    if "numpy" in imported and method in ("randint", "permutation"):  # `integers` of a Generator has 64 bits everywhere
        walk.need(Feature.WIDE_INTEGERS, f".{method}()", node.lineno)
    if imported & {"numpy", "pandas"} and method in ("astype", "view") and any(default_integer(each) for each in node.args):
        walk.need(Feature.WIDE_INTEGERS, f".{method}(int)", node.lineno)
    if "pathlib" in imported and method in ("chmod", "lchmod", "owner"):
        walk.need(Feature.POSIX, f".{method}()", node.lineno)


def _by_native_width(walk: Walk, first: ast.expr | None) -> bool:
    texts = (walk.names.texts(first) if first is not None else None) or ()
    return any(_NATIVE_WIDTH & set(text) and not text.startswith(("<", ">", "=", "!")) for text in texts)


def size_of(walk: Walk, node: ast.BinOp) -> None:
    """Record a sequence that is repeated often enough to need much memory."""
    if isinstance(node.op, ast.Mult):
        sequences = (ast.List, ast.Tuple, ast.JoinedStr)
        for each, other in ((node.left, node.right), (node.right, node.left)):
            text = isinstance(each, ast.Constant) and isinstance(each.value, (str, bytes))
            if (text or isinstance(each, sequences)) and _number(other) >= _MUCH_MEMORY:
                walk.need(Feature.MUCH_MEMORY, "a sequence repeated", node.lineno)


def _elements(shape: list[ast.expr]) -> int:
    if len(shape) == 1 and isinstance(shape[0], (ast.Tuple, ast.List)):
        shape = shape[0].elts
    product = 1
    for each in shape[:8]:
        product *= max(1, _number(each))
    return product if shape else 0


def _number(node: ast.expr, depth: int = 6) -> int:
    """Return the integer value of a constant expression, capped where more makes no difference; 0 if the text does not tell."""
    if isinstance(node, ast.Constant):
        return min(node.value, 1 << 64) if type(node.value) is int else 0
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name) and node.func.id == "int":
        value = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        return int(min(value, 1e18)) if isinstance(value, float) and value > 0 else 0
    if isinstance(node, ast.BinOp) and depth:
        left, right = _number(node.left, depth - 1), _number(node.right, depth - 1)
        match node.op:
            case ast.Mult():
                return min(left * right, 1 << 64)
            case ast.Add():
                return min(left + right, 1 << 64)
            case ast.Pow() if 0 <= right <= 64:
                return min(int(left**right), 1 << 64)
            case ast.LShift() if 0 <= right <= 64:
                return min(left << right, 1 << 64)
    return 0


class Walk:
    """A walk through syntax trees, and everything recorded so far. `code` are strings that the program runs as code."""

    def __init__(self, names: Names) -> None:
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

    def through(self, tree: ast.AST) -> None:
        """Record everything in a tree, in the order of its text."""
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            waiting += self._enter(node)

    def reading(self, *unseen: str) -> Reading:
        """Return everything recorded, as a value."""
        for name in FEATURE_OF if self._escaped else ():
            module, _, attribute = name.rpartition(".")
            if module in self._escaped and attribute in self._words:
                self.use(name, self._escaped[module])
        if self.computed_attribute and any(name.partition(".")[0] in self._escaped for name in FEATURE_OF):
            self.miss("looks attributes of modules up by a computed name", self.computed_attribute)
        doubts = (*self._unseen, *unseen)
        return Reading(
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
        if (feature := feature_of(name)) is not None:
            self.need(feature, name, line)
        if opaque(name):
            self.miss(f"uses {name[:80]}, which loads or runs what its text does not hold", line)
        if (brought := IMPLIES.get(name)) is not None:
            self.modules.setdefault(brought, line)

    def need(self, feature: Feature, what: str, line: int) -> None:
        """Record a needed feature; the first occurrence is kept."""
        self._features.setdefault(feature, f"{what[:80]} (line {line})")

    def miss(self, what: str, line: int) -> None:
        """Record something that the text does not tell."""
        self._unseen.setdefault(f"it {what} (line {line})")

    def _enter(self, node: ast.AST) -> Sequence[ast.AST]:
        """Record one node. Returns the nodes to visit next, last first."""
        match node:
            case ast.Import(names=names):
                for each in names:
                    self.module(each.name, node.lineno)
                return []
            case ast.ImportFrom():
                self._import_from(node)
                return []
            case ast.If(test=test, orelse=orelse) if self._never(test):
                return orelse[::-1]
            case ast.Try() if (alternatives := _alternatives(node)) is not None:
                return self._guarded(node, alternatives)
            case ast.Assign(targets=targets, value=ast.Name()) if all(isinstance(each, ast.Name) for each in targets):  # an alias
                return targets[::-1]
            case ast.Attribute(value=value, attr=attr):
                self._words.add(attr)
                if attr in _INNARDS:
                    self.miss(f"reaches for {attr}", node.lineno)
                for name in sorted(self.names.origins(node)):
                    self.use(name, node.lineno)
                return [] if isinstance(value, ast.Name) else [value]
            case ast.Name(ctx=ast.Load()):
                self._passed_around(node)
            case ast.Call():
                return enter(self, node)
            case ast.Constant(value=str(text)):
                self._text(text, node.lineno)
            case ast.Subscript():
                for name in sorted(self.names.origins(node)):
                    self.use(name, node.lineno)
            case ast.BinOp():
                size_of(self, node)
            case ast.While():
                self._open_loop = self._open_loop or node.lineno
        return children(node)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            self.miss("imports from a package of its own", node.lineno)
            return
        self.module(node.module, node.lineno)
        for each in node.names:
            if each.name != "*":
                self.use(f"{node.module}.{each.name}", node.lineno)

    def _guarded(self, node: ast.Try, alternatives: tuple[tuple[str, ...], ...]) -> list[ast.AST]:
        """Record an import with fallbacks: which of them exists depends on the runtime. Returns the other nodes to visit, last first."""
        self._choices.append(alternatives)
        for names in alternatives:
            for name in names:
                self.use(name, node.lineno)
        rest: list[ast.AST] = []
        level: ast.Try | None = node
        while level is not None:
            instead = level.handlers[0].body
            rest += [*(each for each in instead if not isinstance(each, (ast.Import, ast.ImportFrom))), *level.orelse, *level.finalbody]
            if (level := _next_choice(instead)) is not None:
                rest.remove(level)
        return rest[::-1]

    def _never(self, test: ast.expr) -> bool:
        if isinstance(test, ast.Constant):
            return not test.value
        if isinstance(test, ast.Attribute):
            return self.names.origins(test) == {"typing.TYPE_CHECKING"} and isinstance(test.value, ast.Name)
        return isinstance(test, ast.Name) and self.names.is_plain_false(test.id, "typing.TYPE_CHECKING")

    def _passed_around(self, node: ast.Name) -> None:
        """Record a name that is neither called nor accessed here: its further use is not followed."""
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


def _alternatives(node: ast.Try) -> tuple[tuple[str, ...], ...] | None:
    """Return the imports of which a `try … except ImportError` takes the first that exists; None for any other `try`."""
    choices: list[tuple[str, ...]] = []
    current: ast.Try | None = node
    while current is not None:
        here = _imports(current.body)
        if not here or len(current.handlers) != 1 or not _catches_imports(current.handlers[0]):
            return None
        choices.append(here)
        instead = current.handlers[0].body
        current = _next_choice(instead)
        if current is None:
            if not (last := _imports([each for each in instead if isinstance(each, (ast.Import, ast.ImportFrom))])):
                return None
            choices.append(last)
    return tuple(choices)


def _next_choice(instead: list[ast.stmt]) -> ast.Try | None:
    return instead[0] if len(instead) == 1 and isinstance(instead[0], ast.Try) else None


def _imports(body: list[ast.stmt]) -> tuple[str, ...]:
    """Return the modules that these statements import; empty if they do anything else."""
    names: list[str] = []
    for each in body:
        if isinstance(each, ast.Import):
            names += [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            names.append(each.module)
        else:
            return ()
    return tuple(names)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return all(isinstance(each, ast.Name) and each.id in _CATCHES for each in caught)


def read_python(source: str) -> Reading:
    """Return what the text shows. Never raises, whatever the text."""
    if why := too_much(source):
        return Reading(unreadable=why)
    if names_an_encoding(source):
        return Reading(unreadable="it names an encoding of its own")
    tree = parse(source)
    if isinstance(tree, str):
        return Reading(unreadable=tree)
    names, trees, known, unparsed = Names(), [tree], {source}, False
    for node in nodes_of(tree):
        names.add(node)
    for _ in range(_ROUNDS):
        walk = Walk(names)
        for each in trees:
            walk.through(each)
        if names.exhausted:
            return Reading(unreadable="it is too intricate to follow")
        if not (fresh := sorted(walk.code - known)):
            return walk.reading(*(("it runs text that is not Python",) if unparsed else ()))
        known |= walk.code
        if why := too_much("".join(known)):
            return Reading(unreadable=f"with the text it runs, {why}")
        for text in fresh:
            inner = parse(text.strip())
            unparsed = unparsed or isinstance(inner, str)
            if not isinstance(inner, str):
                trees.append(inner)
                for node in nodes_of(inner):
                    names.add(node)
    return Reading(unreadable="it runs text within text too deep to follow")
