"""Which names of Python's modules need more of a runtime than that the module can be imported.

A name stands for everything below it: `subprocess` for `subprocess.run`, `os.exec` only for itself. Modules that are as often imported for
harmless things (`threading` for its locks) are listed by the names that matter.
"""

from __future__ import annotations

from agent_sandbox.runtime.routing.model import Feature

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
    # See `numpy_integers` for what depends on the arguments.
    Feature.WIDE_INTEGERS: """
        sys.maxsize numpy.arange numpy.indices numpy.mgrid numpy.ogrid numpy.tri numpy.bincount numpy.fromiter numpy.fromstring
        numpy.loadtxt numpy.genfromtxt numpy.fromfunction numpy.r_ numpy.c_ numpy.vander numpy.int_ numpy.uint numpy.intp numpy.uintp
        numpy.long numpy.ulong numpy.random.randint numpy.random.random_integers numpy.random.choice
        numpy.random.permutation
    """,
}
FEATURE_OF = {name: feature for feature, names in _NEEDS.items() for name in names.split()}

# What a function brings along that its own module does not show.
IMPLIES = {
    **dict.fromkeys(("pandas.read_parquet", "pandas.read_feather", "pandas.read_orc"), "pyarrow"),
    "pandas.read_hdf": "tables",
    "pandas.read_clipboard": "pyperclip",
    "pandas.read_gbq": "pandas_gbq",
}
IMPLIES_OF_METHOD = {"to_parquet": "pyarrow", "to_feather": "pyarrow", "to_orc": "pyarrow", "to_hdf": "tables", "to_clipboard": "pyperclip"}

# Running or loading what the text does not hold.
_OPAQUE = """
    runpy.run_path runpy.run_module pickle.load pickle.loads pickle.Unpickler marshal.load marshal.loads shelve.open dill joblib.load
    cloudpickle.load cloudpickle.loads importlib.util.spec_from_file_location importlib.util.module_from_spec importlib.machinery zipimport
    importlib.reload importlib.util.find_spec importlib.find_loader code codeop sys.path sys.meta_path sys.path_hooks types.FunctionType
    types.CodeType site.addsitedir pandas.read_pickle pandas.eval numpy.load imp
"""
OPAQUE = frozenset(_OPAQUE.split())
MACHINE_FILES = ("/proc", "/sys", "/dev")


def feature_of(name: str) -> Feature | None:
    """The feature that a dotted name needs, by itself or by what it lies in."""
    while name:
        if name in FEATURE_OF:
            return FEATURE_OF[name]
        name = name.rpartition(".")[0]
    return None


def opaque(name: str) -> bool:
    """Whether a dotted name runs or loads what the text does not hold."""
    while name:
        if name in OPAQUE:
            return True
        name = name.rpartition(".")[0]
    return False
