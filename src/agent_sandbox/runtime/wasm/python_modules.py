"""The modules of the Python in the `wasm` runtime: CPython 3.15 for WASI with the scientific packages linked into it.

The table was made by importing every module inside, and by comparing the names in each with those of a CPython for Linux. It holds for the
pinned version of that Python, and must be made anew for another version. A surplus entry costs a retry in another runtime, a missing entry
a slower start.
"""

from __future__ import annotations

_STANDARD = """
    abc annotationlib argparse array ast asyncio atexit base64 bdb binascii bisect builtins bz2 cProfile calendar cmath cmd code
    codecs codeop collections colorsys compileall compression concurrent configparser contextlib contextvars copy copyreg csv ctypes
    dataclasses datetime dbm decimal difflib dis doctest email encodings enum errno faulthandler filecmp fileinput fnmatch fractions
    ftplib functools gc genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http imaplib importlib inspect
    io ipaddress itertools json keyword linecache locale logging lzma mailbox marshal math mimetypes mmap modulefinder
    multiprocessing netrc ntpath nturl2path numbers opcode operator optparse os pathlib pdb pickle pickletools pkgutil platform
    plistlib poplib posix posixpath pprint profile profiling pstats py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random
    re reprlib rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3
    stat statistics string stringprep struct subprocess symtable sys sysconfig tabnanny tarfile tempfile textwrap threading time
    timeit token tokenize tomllib trace traceback tracemalloc types typing unicodedata unittest urllib uuid warnings wave weakref
    webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zlib zoneinfo __future__ _abc _aix_support _android_support
    _apple_support _ast _ast_unparse _asyncio _bisect _blake2 _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp
    _codecs_kr _codecs_tw _collections _collections_abc _colorize _compat_pickle _contextvars _csv _datetime _elementtree
    _frozen_importlib _frozen_importlib_external _functools _heapq _hmac _imp _io _json _locale _lsprof _lzma _markupbase
    _math_integer _md5 _multibytecodec _opcode _opcode_metadata _operator _osx_support _pickle _py_abc _py_warnings _pydatetime
    _pydecimal _pyio _pylong _pyrepl _queue _random _sha1 _sha2 _sha3 _signal _sitebuiltins _socket _sqlite3 _sre _stat _statistics
    _string _strptime _struct _suggestions _symtable _sysconfig _thread _threading_local _tokenize _tracemalloc _types _typing
    _warnings _weakref _weakrefset _zoneinfo
"""

_PACKAGES = """
    PIL attr attrs bs4 charset_normalizer cloudpickle contourpy cycler dateutil defusedxml et_xmlfile fontTools formulaic html5lib
    interface_meta jinja2 joblib kiwisolver lxml markupsafe matplotlib more_itertools mpl_toolkits mpmath narwhals networkx numpy
    openpyxl packaging pandas patsy pylab pyparsing pypdf regex reportlab scipy seaborn six sklearn soupsieve statsmodels sympy
    tabulate threadpoolctl tlz tomli_w toolz tqdm typing_extensions tzdata webencodings wrapt xlrd xlsxwriter xmltodict yaml
"""

# Names that are missing although their module exists: WASI has nothing to build them on, or Python has dropped them since.
_ABSENT = {
    "ast": "Bytes Ellipsis NameConstant Num Str",
    "configparser": "LegacyInterpolation SafeConfigParser",
    "errno": """
        EADV EBADE EBADFD EBADR EBADRQC EBADSLT EBFONT ECHRNG ECOMM EDEADLOCK EDOTDOT EHOSTDOWN EISNAM EKEYEXPIRED EKEYREJECTED
        EKEYREVOKED EL2HLT EL2NSYNC EL3HLT EL3RST ELIBACC ELIBBAD ELIBEXEC ELIBMAX ELIBSCN ELNRNG EMEDIUMTYPE ENAVAIL ENOANO
        ENOCSI ENODATA ENOKEY ENOMEDIUM ENONET ENOPKG ENOSR ENOSTR ENOTBLK ENOTNAM ENOTUNIQ EPFNOSUPPORT EREMCHG EREMOTE EREMOTEIO
        ERESTART ERFKILL ESOCKTNOSUPPORT ESRMNT ESTRPIPE ETIME ETOOMANYREFS EUCLEAN EUNATCH EUSERS EXFULL
    """,
    "glob": "glob0 glob1",
    "hashlib": "pbkdf2_hmac scrypt",
    "importlib": "find_loader",
    "locale": "bind_textdomain_codeset bindtextdomain dcgettext dgettext format gettext resetlocale textdomain",
    "os": """
        CLD_CONTINUED CLD_DUMPED CLD_EXITED CLD_KILLED CLD_STOPPED CLD_TRAPPED EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE
        GRND_NONBLOCK GRND_RANDOM MFD_ALLOW_SEALING MFD_CLOEXEC MFD_HUGETLB MFD_HUGE_16GB MFD_HUGE_16MB MFD_HUGE_1GB MFD_HUGE_1MB
        MFD_HUGE_256MB MFD_HUGE_2GB MFD_HUGE_2MB MFD_HUGE_32MB MFD_HUGE_512KB MFD_HUGE_512MB MFD_HUGE_64KB MFD_HUGE_8MB
        MFD_HUGE_MASK MFD_HUGE_SHIFT O_ASYNC O_DIRECT O_FSYNC O_LARGEFILE O_NDELAY O_NOATIME O_PATH O_TMPFILE POSIX_SPAWN_CLOSE
        POSIX_SPAWN_DUP2 POSIX_SPAWN_OPEN PRIO_PGRP PRIO_PROCESS PRIO_USER P_ALL P_NOWAIT P_NOWAITO P_PGID P_PID P_PIDFD P_WAIT
        RTLD_DEEPBIND RWF_APPEND RWF_DSYNC RWF_HIPRI RWF_NOWAIT RWF_SYNC SCHED_BATCH SCHED_FIFO SCHED_IDLE SCHED_OTHER
        SCHED_RESET_ON_FORK SCHED_RR SEEK_DATA SEEK_HOLE SPLICE_F_MORE SPLICE_F_MOVE SPLICE_F_NONBLOCK ST_APPEND ST_MANDLOCK
        ST_NOATIME ST_NODEV ST_NODIRATIME ST_NOEXEC ST_NOSUID ST_RDONLY ST_RELATIME ST_SYNCHRONOUS ST_WRITE TMP_MAX WCONTINUED
        WCOREDUMP WEXITED WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WNOWAIT WSTOPPED WSTOPSIG WTERMSIG
        WUNTRACED XATTR_CREATE XATTR_REPLACE XATTR_SIZE_MAX chown chroot copy_file_range ctermid eventfd eventfd_read
        eventfd_write execv execve fchdir fchmod fchown fork forkpty fstatvfs fwalk get_terminal_size getegid geteuid getgid
        getgrouplist getgroups getloadavg getlogin getpgid getpgrp getppid getpriority getrandom getresgid getresuid getsid getuid
        getxattr initgroups kill killpg lchown listxattr lockf login_tty major makedev memfd_create minor mkfifo mknod nice
        openpty pidfd_open pipe posix_fallocate posix_spawn posix_spawnp preadv pwritev readv register_at_fork removexattr
        sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler sched_param
        sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler sendfile setegid seteuid setgid setgroups
        setpgid setpgrp setpriority setregid setresgid setresuid setreuid setsid setuid setxattr spawnl spawnle spawnlp spawnlpe
        spawnv spawnve spawnvp spawnvpe splice statvfs sync system tcgetpgrp tcsetpgrp ttyname umask wait wait3 wait4 waitid
        waitid_result waitpid waitstatus_to_exitcode writev
    """,
    "pkgutil": "ImpImporter ImpLoader find_loader get_loader",
    "shutil": "disk_usage",
    "sqlite3": "enable_shared_cache version version_info",
    "threading": "get_native_id",
    "time": """
        CLOCK_BOOTTIME CLOCK_MONOTONIC_RAW CLOCK_PROCESS_CPUTIME_ID CLOCK_TAI CLOCK_THREAD_CPUTIME_ID clock_settime
        clock_settime_ns thread_time thread_time_ns tzset
    """,
    "typing": "ByteString io no_type_check_decorator re",
    "unittest": "findTestCases getTestCaseNames makeSuite",
    "collections.abc": "ByteString",
    "importlib.abc": "Finder ResourceReader Traversable TraversableResources",
    "re": "TEMPLATE template",
    "importlib.util": "module_for_loader set_loader set_package",
}
_ABSENT_MODULES = """
    compression.zstd concurrent.interpreters dbm.gnu dbm.ndbm multiprocessing.shared_memory multiprocessing.synchronize curses.ascii
    ctypes.wintypes
"""

MODULES = frozenset(_STANDARD.split()) | frozenset(_PACKAGES.split())
ABSENT = frozenset(f"{module}.{name}" for module, names in _ABSENT.items() for name in names.split()) | frozenset(_ABSENT_MODULES.split())
