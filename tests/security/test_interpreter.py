"""Python turned against itself. No jail inside the interpreter is counted on: a payload may do whatever Python can, and finds nothing."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.security.conftest import Tell
from tests.security.harness import ENVIRONMENT, Box, case, outside

# Each trick counts the canaries in all it got hold of. The canary is given in disguise, so that the search does not find itself.
TRICKS = r"""
import builtins, ctypes, gc, io, json, os, pickle, re, string, sys
import warnings; warnings.simplefilter("ignore")
disguised = DISGUISED
def found_in(data):
    data = data if isinstance(data, (bytes, bytearray)) else str(data).encode(errors="replace")
    return len(re.findall(b"".join(b"[%c]" % (byte ^ 1) for byte in disguised), data))
def memory():
    count = 0
    with open("/proc/self/mem", "rb", buffering=0) as image:
        for line in open("/proc/self/maps"):
            start, end, mode = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()
            if mode[0] == "r" and "[v" not in line:
                image.seek(int(start, 16))
                try: count += found_in(image.read(int(end, 16) - int(start, 16)))
                except OSError: pass
    return count
def object_graph():
    gc.unfreeze()
    seen, todo, count = set(), [*gc.get_objects(), sys.modules, vars(builtins)], 0
    while todo:
        each = todo.pop()
        if id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, (str, bytes, bytearray)): count += found_in(each)
            else: todo += gc.get_referents(each)
    return count
def subclasses():
    reached = []
    for kind in ().__class__.__base__.__subclasses__():
        names = getattr(kind.__init__, "__globals__", {})
        reached += [names.get("environ"), names.get("os"), getattr(sys.modules.get(kind.__module__), "environ", None)]
    return sum(found_in(repr(each.environ if each is os else each)) for each in reached)
def frames():
    count, frame = 0, sys._getframe()
    while frame:
        count += found_in(repr(frame.f_locals)) + found_in(repr([frame.f_globals[name] for name in frame.f_globals if name != "disguised"]))
        frame = frame.f_back
    return count + sum(found_in(repr(each.f_locals)) for each in sys._current_frames().values())
def group_of_exceptions():
    try: raise ExceptionGroup("g", [ValueError(1), KeyError(2)])
    except* ValueError as group: frame = group.__traceback__.tb_frame
    except* KeyError: pass
    return found_in(repr(frame.f_builtins["__import__"]("os").environ))
def format_string():
    class Holder:
        def __init__(self): pass
    return found_in("{0.__init__.__globals__[os].environ}".format(Holder()))
def builtins_replaced():
    kept, opened = builtins.open, []
    builtins.open = lambda *words, **more: opened.append(words) or kept(*words, **more)
    try: builtins.__import__("importlib").reload(string)
    finally: builtins.open = kept
    return found_in(repr(opened))
def audit_hook():
    heard = []
    sys.addaudithook(lambda *event: heard.append(repr(event)) if len(heard) < 2000 else None)
    os.system("true")
    return sum(map(found_in, heard))
class Payload:
    def __reduce__(self):
        return (eval, (f"__import__('os').popen('cat {SECRETS}/.ssh/id_rsa /proc/*/environ 2>/dev/null; env').read()", {}))
def unpickled(): return found_in(pickle.loads(pickle.dumps(Payload())))
def c_environment():
    pointer, count, at = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"), 0, 0
    while pointer and pointer[at]:
        count += found_in(pointer[at])
        at += 1
    return count
def files():
    count = 0
    for name in (SECRETS + "/.ssh/id_rsa", "/proc/self/environ", "/proc/1/environ", "/proc/1/cmdline", "/proc/self/cmdline"):
        try: count += found_in(open(name, "rb").read(1 << 20))
        except OSError: pass
    return count
def our_own_modules():
    assert not [name for name in sys.modules if name.startswith("agent_sandbox")]
    try:
        import agent_sandbox
        return found_in(agent_sandbox.Sandbox(validate_code=False).execute(f"print(open('{SECRETS}/.ssh/id_rsa').read())").stdout)
    except Exception:
        return 0
def code_object():
    def f(): return 1
    f.__code__ = f.__code__.replace(co_consts=(None, 7))
    return 0 if f() == 7 else 1
tricks = (memory, object_graph, subclasses, frames, group_of_exceptions, format_string, builtins_replaced, audit_hook, unpickled,
          c_environment, files, our_own_modules, code_object)
print(json.dumps({trick.__name__: trick() for trick in tricks}))
"""
FIND_THE_ENVIRONMENT = {
    "memory",
    "object_graph",
    "subclasses",
    "frames",
    "group_of_exceptions",
    "format_string",
    "unpickled",
    "c_environment",
}


def _tricks(canary: str, home: Path) -> str:
    disguised = bytes(byte ^ 1 for byte in canary.encode())
    return f"SECRETS = {str(home)!r}\n" + TRICKS.replace("DISGUISED", repr(disguised))


@case(55)
def test_nothing_of_ours_is_found_by_turning_the_interpreter_inside_out(
    number: int, box: Box, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """The canary is in the supervisor's environment and memory, in a secret file, and in the run before: its code, variables and input."""
    canary = f"canary-{secrets.token_hex(12)}"
    (box.home / ".ssh" / "id_rsa").write_text(canary)
    held_by_the_supervisor = [canary * 100]
    monkeypatch.setenv("SECRET_OF_THE_HOST", canary)
    with box.fresh(warm=2) as fresh:  # a zygote and guests that are made while all this is around
        before = {**ENVIRONMENT, "SECRET": canary}
        earlier = fresh.python(f"import sys; x = {canary!r} * 1000; print(len(sys.stdin.read()))", env=before, stdin=canary.encode())
        assert earlier.stdout == f"{len(canary)}\n".encode()
        found = [fresh.probe(_tricks(canary, box.home)) for _ in range(2)]
        assert all(set(each.values()) == {0} for each in found), found
        planted = fresh.probe(_tricks(canary, box.home), env={**before, "OTHER": canary})
    assert held_by_the_supervisor
    seen_when_given = {name for name, count in planted.items() if count}
    ours = set() if box.runtime.traits.images else {"frames"}  # only our interpreter is the caller of the code
    assert seen_when_given >= FIND_THE_ENVIRONMENT - {"frames"} | ours, planted
    control = outside(_tricks(canary, box.home))
    assert {name for name, count in control.items() if count} >= FIND_THE_ENVIRONMENT - {"frames"} | {"files"}, control
    tell(f"{len(found[0])} tricks ran, 0 found anything", control=f"given the canary, {len(seen_when_given)} find it; outside as well")


@case(55)
def test_what_a_payload_does_to_its_interpreter_ends_with_it(number: int, box: Box, tell: Tell) -> None:
    """Guests are forks of one zygote: whatever one breaks in memory, the next has as it was."""
    vandal = """
import builtins, ctypes, os, sys, random, json
builtins.print = builtins.open = None
json.dumps = lambda *_: "false"
os.getpid = lambda: 0
sys.modules["json"] = None
ctypes.memset(id(7), 8, 4)
for name in list(sys.modules):
    if name not in ("sys", "builtins", "os", "ctypes"): sys.modules.pop(name)
os.write(1, b"done")
os._exit(0)
"""
    check = "import json, os; print(json.dumps([3 + 4 == 7, os.getpid() > 0, callable(open), len('x' * 7)]))"
    assert box.python(vandal).stdout == b"done"
    assert box.probe(check) == [True, True, True, 7]
    broken = box.python(
        vandal.replace("os.write(1", "os.write(2").replace("os._exit(0)", "os.write(1, repr(os.getpid()).encode()); os._exit(0)")
    )
    assert broken.stdout == b"0", "the control arm: within the run it did take effect"
    tell("the next guest is as good as new", control="inside the run it took effect")


@case(55)
def test_the_parent_of_a_guest_is_out_of_its_reach(number: int, box: Box, tell: Tell) -> None:
    """A fork shares pages with the zygote, copied when written: writing to all of them changes nobody else's."""
    source = """
import ctypes, json, os
marker = ctypes.create_string_buffer(b"untouched", 4096)
pid = os.fork()
if pid == 0:
    ctypes.memmove(marker, b"overwritten", 11)
    os._exit(0)
os.waitpid(pid, 0)
answers = []
for name in ("mem", "environ", "maps", "fd/0", "root", "cwd", "exe", "task/1/mem"):
    try:
        os.close(os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY))
        answers.append(name)
    except OSError:
        pass
print(json.dumps([marker.value.decode(), os.getppid(), answers]))
"""
    assert box.probe(source) == ["untouched", 1, []]
    text, parent, opened = outside(source)
    assert (text, parent) == ("untouched", os.getpid()) and {"mem", "environ", "maps"} <= set(opened)
    tell("its parent is init, and closed", control="outside its parent's memory can be opened")
