"""A hundred programs whose output, changes or work would differ from one ordinary run to the next, or might.

Each is run in a project with a few files (`FILES`), with `STDIN` as its input.
"""

from __future__ import annotations

STDIN = b"".join(b"line %d of the input\n" % number for number in range(20_000))  # several times what a pipe holds

FILES = {
    "alpha.txt": "first\n",
    "zebra.txt": "last\n",
    "notes/one.md": "# one\n",
    "notes/two.md": "# two\n",
    "notes/deep/three.md": "# three\n",
    "data.csv": "name,count\nx,3\ny,5\nz,8\n",
    "module_beside.py": "import random\nVALUE = random.random()\n",
    **{f"many/{number:03}": str(number) for number in range(300)},
}

_TIME = {
    "time of day": "import time; print(time.time(), time.time_ns())",
    "monotonic clock": "import time; print(time.monotonic(), time.monotonic_ns())",
    "performance counter": "import time; print([time.perf_counter() for _ in range(5)])",
    "processor time": "import time; print(time.process_time(), time.thread_time() if hasattr(time, 'thread_time') else None)",
    "date and time": "import datetime; print(datetime.datetime.now(), datetime.date.today(), datetime.datetime.now(datetime.UTC))",
    "formatted time": "import time; print(time.strftime('%c'), time.localtime(), time.gmtime())",
    "a loop that waits": "import time\nend, turns = time.monotonic() + 0.1, 0\nwhile time.monotonic() < end: turns += 1\nprint(turns)",
    "a measured loop": "import time\nbegan = time.perf_counter()\nsum(range(100_000))\nprint(time.perf_counter() - began)",
    "timeit": "import timeit; print(timeit.timeit('sum(range(100))', number=100))",
    "a log with times": "import logging; logging.basicConfig(format='%(asctime)s %(process)d %(message)s'); logging.warning('hello')",
    "email date": "from email.utils import formatdate, make_msgid; print(formatdate(), make_msgid(domain='here'))",
}
_SLEEPING = {
    "a long sleep": "import time; time.sleep(86_400); print(time.time())",
    "many sleeps": "import time\nfor _ in range(50): time.sleep(0.1)\nprint(time.monotonic())",
    "asyncio sleeps": "import asyncio\nasync def main():\n    await asyncio.sleep(5)\n    print(asyncio.get_running_loop().time())\n"
    "try: asyncio.run(main())\nexcept Exception as error: print(type(error), error)",
    "select with a timeout": "import select, time; print(select.select([], [], [], 3.5), time.monotonic())",
    "select on input": "import select, sys; print(select.select([0], [1], [], 9))",
    "a scheduler": "import sched, time\ns = sched.scheduler()\nfor d in (3, 1, 2): s.enter(d, 1, print, (d, time.monotonic()))\ns.run()",
    "a sleep that cannot be": "import time\ntry: time.sleep(-1)\nexcept ValueError as error: print(error, time.monotonic())",
    "a timeout by the clock": "import time\nt = time.time()\nwhile time.time() - t < 2: time.sleep(0.25)\nprint(time.time() - t)",
}
_CHANCE = {
    "random": "import random; print(random.random(), random.randint(0, 10**9), random.choice('abcdef'))",
    "shuffle": "import random\nx = list(range(50))\nrandom.shuffle(x)\nprint(x)",
    "gauss": "import random; print([random.gauss(0, 1) for _ in range(5)])",
    "a generator of its own": "import random; print(random.Random().random(), random.Random(3).random())",
    "system random": "import random; print(random.SystemRandom().random())",
    "urandom": "import os; print(os.urandom(40).hex(), len(os.urandom(200_000)))",
    "secrets": "import secrets; print(secrets.token_hex(), secrets.token_urlsafe(), secrets.randbelow(10**12))",
    "uuid1": "import uuid; print(uuid.uuid1(), uuid.uuid1())",
    "uuid4": "import uuid; print([uuid.uuid4() for _ in range(5)])",
    "uuid of this machine": "import uuid; print(uuid.getnode())",
    "a temporary file": "import tempfile; print(tempfile.NamedTemporaryFile().name, tempfile.mkdtemp())",
    "a temporary name": "import tempfile; print(tempfile.mktemp(), tempfile.gettempdir())",
    "numpy random": "import numpy as np; print(np.random.rand(3), np.random.default_rng().integers(0, 10**9, 3))",
    "monte carlo": "import random; print(sum(random.random()**2 + random.random()**2 < 1 for _ in range(5000)) / 1250)",
    "state of the generator": "import random, hashlib; print(hashlib.sha256(repr(random.getstate()).encode()).hexdigest())",
}
_ORDER = {
    "a set of strings": "print({word for word in 'the quick brown fox jumps over the lazy dog'.split()})",
    "hashes": "print(hash('word'), hash(b'word'), hash(3.5), hash((1, 'a')), hash(None))",
    "a set of objects": "class C:\n    pass\nprint([type(x).__name__ for x in {C(), C(), 1, 'x'}], {C(): 1 for _ in range(3)})",
    "hash by identity": "print([hash(object()) for _ in range(5)])",
    "environment": "import os; print(dict(os.environ), list(os.environ))",
    "a set through json": "import json; print(json.dumps(sorted({'b': 1, 'a': 2}.items())), json.dumps({k: 1 for k in {'x', 'y', 'z'}}))",
    "counting words": "from collections import Counter; print(Counter(open('zebra.txt').read() + open('alpha.txt').read()).most_common())",
}
_ADDRESSES = {
    "an object": "print(object(), object())",
    "identities": "print([id(object()) for _ in range(3)], id([]), id({}), id('x' * 50))",
    "a function": "def f(): pass\nprint(f, lambda: 1, f.__code__)",
    "a bound method": "class C:\n    def m(self): pass\nprint(C().m, C)",
    "a generator": "print(x for x in ())",
    "garbage": "import gc\na = []\na.append(a)\ndel a\nprint(gc.collect(), gc.get_count(), len(gc.get_objects()))",
    "weak references": "import weakref\nclass C: pass\nc = C()\nprint(weakref.ref(c), c)",
    "a traceback with an object": "class C: pass\nraise ValueError(C())",
    "sizes": "import sys; print(sys.getsizeof([]), sys.getrefcount(object()), sys.getallocatedblocks())",
}
_FILES = {
    "a listing": "import os; print(os.listdir('.'), os.listdir('notes'))",
    "a large listing": "import os; print(os.listdir('many'))",
    "a scan": "import os; print([(e.name, e.inode(), e.is_dir()) for e in os.scandir('.')])",
    "a walk": "import os; print(list(os.walk('notes')))",
    "glob": "import glob; print(glob.glob('**/*.md', recursive=True))",
    "pathlib": "import pathlib; print([str(p) for p in pathlib.Path('.').rglob('*.txt')], pathlib.Path('alpha.txt').stat())",
    "stat": "import os; print(os.stat('alpha.txt'), os.stat('.'), os.stat('notes'))",
    "stat of descriptors": "import os; print([os.fstat(n) for n in range(3)], os.fstat(os.open('alpha.txt', os.O_RDONLY)))",
    "when files were changed": "import os; print([os.path.getmtime(n) for n in os.listdir('.')], os.path.getctime('alpha.txt'))",
    "the newest file": "import os\nopen('new', 'w').close()\nprint(max(os.listdir('.'), key=os.path.getmtime), os.stat('new'))",
    "the same file": "import os; os.symlink('alpha.txt', 'link'); print(os.path.samefile('alpha.txt', 'link'), os.lstat('link'))",
    "a hard link": "import os; os.link('alpha.txt', 'twin'); print(os.stat('twin').st_ino == os.stat('alpha.txt').st_ino, os.stat('twin'))",
    "a renamed file": "import os\nbefore = os.stat('alpha.txt')\nos.rename('alpha.txt', 'beta.txt')\nprint(before, os.stat('beta.txt'))",
    "set times": "import os; os.utime('alpha.txt', (1, 2)); print(os.stat('alpha.txt')); os.utime('.'); print(os.stat('.'))",
    "a copy": "import shutil, os; print(shutil.copy2('alpha.txt', 'copy'), os.stat('copy'))",
    "a tree copied": "import shutil, os; shutil.copytree('notes', 'copied'); print([os.stat(p) for p in sorted(os.listdir('.'))])",
    "a tree removed": "import shutil, os; shutil.rmtree('notes'); print(os.listdir('.'), os.stat('.'))",
    "an archive": "import zipfile, hashlib\nwith zipfile.ZipFile('a.zip', 'w') as z: z.write('alpha.txt'); z.writestr('x', 'y')\n"
    "print(hashlib.sha256(open('a.zip', 'rb').read()).hexdigest())",
    "a compressed file": "import gzip, hashlib\nwith gzip.open('a.gz', 'wb') as f: f.write(b'text' * 1000)\n"
    "print(hashlib.sha256(open('a.gz', 'rb').read()).hexdigest())",
    "tar": "import tarfile, hashlib\nwith tarfile.open('a.tar', 'w') as t: t.add('notes')\n"
    "print(hashlib.sha256(open('a.tar', 'rb').read()).hexdigest())",
    "a file of random content": "import os; open('noise', 'wb').write(os.urandom(5000))",
    "files with random names": "import tempfile\nfor _ in range(5): tempfile.mkstemp(dir='.', prefix='made-')",
    "a changed file": "import time\nwith open('alpha.txt', 'a') as f: f.write(str(time.time()))",
    "a compiled module": "import py_compile; print(py_compile.compile('module_beside.py', cfile='c'), open('c', 'rb').read())",
    "a module beside it": "import sys; sys.path.insert(0, '.'); import module_beside; print(module_beside.VALUE, module_beside.__file__)",
    "sqlite or none": "try:\n    import sqlite3\n    c = sqlite3.connect('x.db')\n    c.execute('create table t (a)')\n    c.commit()\n"
    "except ImportError as error:\n    print(error)",
    "a directory read while it changes": "import os\nfor e in os.scandir('many'):\n    os.unlink(e.path)\nprint(os.listdir('many'))",
}
_ENDS = {
    "an exception": "import time; raise RuntimeError(time.time())",
    "a chain of exceptions": "try:\n    {}['x']\nexcept KeyError as error:\n    raise ValueError(id(error)) from error",
    "an exit code": "import random, sys; sys.exit(random.randrange(2, 100))",
    "a hard exit": "import os, time; print(time.time(), flush=True); os._exit(int(time.monotonic() * 10_000) % 100)",
    "an abort": "import os, random; print(random.random(), flush=True); os.abort()",
    "too deep": "def f(n): return f(n + 1)\ntry: f(0)\nexcept RecursionError as error: print(error)",
    "too much memory": "kept = []\ntry:\n    while True: kept.append(bytearray(1 << 20))\nexcept MemoryError: print(len(kept))",
    "a syntax error": "print(1\nif",
    "at the end": "import atexit, time\natexit.register(lambda: print(time.time()))\nclass C:\n    def __del__(self): print(self)\nc = C()",
    "a thread, refused": "import threading as t\ntry: t.Thread(target=print).start()\nexcept RuntimeError as e: print(e, t.main_thread())",
    "a process, refused": "import subprocess\ntry: subprocess.run(['true'])\nexcept OSError as error: print(repr(error))",
    "a network, refused": "import socket\ntry: socket.create_connection(('127.0.0.1', 1))\nexcept Exception as error: print(repr(error))",
}
_INPUT = {
    "all input": "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())",
    "input by lines": "import sys; print(sum(len(line) for line in sys.stdin))",
    "input in pieces": "import os\nwhile piece := os.read(0, 100_000): print(len(piece))",
    "some of the input": "import sys; print(sys.stdin.readline(), sys.stdin.readline())",
}
_NUMBERS = {
    "floats": "import math; print([math.sin(n) * math.exp(-n) for n in range(8)], 0.1 + 0.2, math.fsum([0.1] * 10))",
    "nan": "import struct; x = float('inf') - float('inf'); print(x, struct.pack('<d', x), hash(x), {x, x})",
    "decimals": "import decimal; print(decimal.Decimal(2).sqrt(), decimal.getcontext())",
    "describe": "import pandas as pd; print(pd.read_csv('data.csv').describe())",
    "pandas sample": "import pandas as pd; print(pd.DataFrame({'a': range(100)}).sample(5), pd.Timestamp.now())",
    "numpy sums": "import numpy as np; a = np.random.rand(1000); print(a.sum(), a.std(), np.linalg.norm(a), np.argsort(a)[:5])",
    "numpy empty": "import numpy as np; print(np.empty(50).tolist(), np.arange(3).__array_interface__['data'])",
}

DIFFERING = frozenset({**_TIME, **_CHANCE, **_ADDRESSES})  # many of these differ in ordinary runs
PROGRAMS = {**_TIME, **_SLEEPING, **_CHANCE, **_ORDER, **_ADDRESSES, **_FILES, **_ENDS, **_INPUT, **_NUMBERS}
