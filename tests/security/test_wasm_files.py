"""Files, attacked from inside WebAssembly: the view is the same one, and everything that holds for other guests holds there."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import replace

import pytest

from agent_sandbox.policy.paths import parse
from agent_sandbox.runtime.base import ExitReason
from scripts.compile_wasm import CACHE
from tests.patience import until
from tests.security.conftest import Tell
from tests.security.harness import GENEROUS, ROOT, Box, case, meanwhile, outside, reading, snapshot


@case(2, 10)
def test_links_lead_to_what_the_view_has_there_and_writes_end_in_the_change_set(number: int, inside: Box, tell: Tell) -> None:
    canary = inside.project.parent / "canary.txt"
    canary.write_text("real")
    (inside.project / "key").symlink_to(inside.home / ".ssh/id_rsa")
    (inside.project / "out").symlink_to("../canary.txt")
    (inside.project / "absolute").symlink_to(canary)
    planted = [inside.project / "agent-sandbox.toml", inside.project / ".git/config", inside.home / ".bashrc"]
    before = snapshot(inside.project), snapshot(inside.home)
    source = f"""
import json
done = []
for name in {["key", "out", "absolute", *map(str, planted)]!r}:
    try:
        with open(name, "w") as file: file.write("planted")
        done.append(name)
    except OSError:
        pass
print(json.dumps([done, open("out").read()]))
"""
    outcome = inside.python(source)
    done, read = json.loads(outcome.stdout)
    assert read == "planted" and {"out", *map(str, planted)} <= set(done), done
    assert (snapshot(inside.project), snapshot(inside.home)) == before and canary.read_text() == "real"
    assert {str(canary), *map(str, planted)} <= {change.path for change in outcome.changes}, "each is shown before anybody takes it over"
    assert inside.probe(reading(*planted)) == [], "and the next run starts without it"
    outside(source, cwd=inside.project)
    assert canary.read_text() == "planted"
    tell("captured, listed, and gone with the run", control="without a sandbox the same code writes through the links")


RULES = {"/p/*.key": {"x.key"}, "/p/**/.env": {".env"}, "/p/[[]x]": {"[x]"}}


@case(11, 14)
@pytest.mark.parametrize("pattern", RULES)
def test_a_denied_name_is_not_there_and_cannot_be_reached_by_another(number: int, pattern: str, inside: Box, tell: Tell) -> None:
    place = inside.project / "p"
    place.mkdir()
    for name in ("x.key", "m", "[x]", ".env", "7", "harmless.txt"):
        (place / name).write_text("CANARY")
    hidden = RULES[pattern]
    everything = inside.files(read=True, write=True, allow_hidden=True, allowed=[parse(str(inside.project))])
    assert everything.policy is not None
    rules = replace(everything.policy.files, denied=(parse(str(inside.project) + pattern),))
    denied = inside.with_(policy=replace(everything.policy, files=rules))
    source = f"""
import json, os
os.chdir({str(place)!r})
told = [name for name in os.listdir(".") if name in {sorted(hidden)!r}]
for name in {sorted(hidden)!r}:
    for deed in (lambda: open(name).read(), lambda: os.link(name, "twin-" + name), lambda: os.rename(name, "moved-" + name),
                 lambda: open("./../p//" + name).read(), lambda: os.stat(name)):
        try:
            deed()
            told.append(name)
        except OSError:
            pass
print(json.dumps(told))
"""
    assert denied.probe(source, cwd=str(inside.project)) == []
    told = everything.probe(source, cwd=str(inside.project))
    assert hidden <= set(told)
    tell(f"hides {sorted(hidden)} from every question", control=f"without the rule {len(told)} answers")


@case(5, 7)
def test_nothing_of_the_kernels_is_in_its_view(number: int, inside: Box, tell: Tell) -> None:
    """Neither under its own name nor under that of a link, a directory above, or the library."""
    paths = ["/proc/self/mem", "/proc/1/root/etc/passwd", "/dev/mem", "/dev/kmsg", "/compiled", "/view", "/library"]
    paths += [f"{start}{'../' * 10}{path[1:]}" for path in paths for start in ("/", "/tmp/", "/usr/local/lib/")]
    source = f"""
import json, os
reached = []
for number, path in enumerate({paths!r}):
    for name in (path, f"/tmp/link{{number}}"):
        try:
            if name != path:
                os.symlink(path.lstrip("/") if number % 2 else path, name)
            open(name, "rb")
            reached.append(path)
        except IsADirectoryError:
            reached.append(path)
        except OSError:
            pass
print(json.dumps(reached))
"""
    assert inside.probe(source) == []
    assert outside("import json; print(json.dumps([open(p, 'rb').name for p in ('/proc/self/mem',)]))") == ["/proc/self/mem"]
    tell(f"{len(paths)} names, and as many links: not there", control="without a sandbox the first is opened")


@case(17)
def test_a_hard_link_is_one_of_its_own_layer(number: int, inside: Box, tell: Tell) -> None:
    before = snapshot(inside.project)
    source = """
import json, os
os.link("greeting.txt", "twin")
with open("twin", "a") as file: file.write("CHANGED")
print(json.dumps([open("twin").read(), os.stat("twin").st_nlink]))
"""
    text, _ = inside.probe(source)
    assert "CHANGED" in text and snapshot(inside.project) == before
    outside(source, cwd=inside.project)
    assert "CHANGED" in (inside.project / "greeting.txt").read_text()
    tell("written to its own layer", control="without a sandbox the real file is changed through the link")


@case(20)
def test_pipes_sockets_and_devices_in_the_project_hold_nobody_up(number: int, inside: Box, tell: Tell) -> None:
    os.mkfifo(inside.project / "pipe")
    if ROOT:
        os.mknod(inside.project / "device", 0o20666, os.makedev(1, 1))  # all of the machine's memory
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(inside.project, os.O_PATH)
        try:
            listener.bind(f"/proc/self/fd/{here}/socket")  # its whole name would be too long
        finally:
            os.close(here)
        limited = inside.with_(limits=replace(GENEROUS, wall_seconds=1.0))
        for name in ("socket", "device"):
            ran = inside.python(f"print(open({name!r}, 'rb').read(1))")
            assert ran.exit.code == 1 and b"Error" in ran.stderr, (name, ran)
        ran = limited.python("print(open('pipe').read())")
        assert ran.exit.code != 0 or ran.stdout == b"\n", ran
        assert inside.python("print('fine')").stdout == b"fine\n"
        writer = os.open(inside.project / "pipe", os.O_RDWR | os.O_NONBLOCK)
        os.write(writer, b"CANARY")
        assert b"CANARY" not in limited.python("print(open('pipe').read(6))").stdout, "it is another pipe there"
        assert os.read(writer, 6) == b"CANARY"
        os.close(writer)
    tell(f"an error, or the run's own deadline ({ran.exit.reason.value})", control="outside the same pipe gives what was written to it")


@case(22)
def test_another_run_is_nowhere_to_be_seen(number: int, inside: Box, tell: Tell) -> None:
    source = "open('/tmp/secret', 'w').write('CANARY'); open('secret', 'w').write('CANARY'); print('ready')\ninput()"
    with meanwhile(inside, source):
        assert inside.probe(reading("/tmp/secret", str(inside.project / "secret"))) == []
    kept = inside.kept
    assert kept.python("open('secret', 'w').write('CANARY')").exit.code == 0
    assert kept.probe(reading(str(inside.project / "secret"))) == ["CANARY"]
    tell("nothing of it", control="two runs on the same layers share their files")


@case(4, prio="P0")
def test_a_directory_that_becomes_a_link_while_it_is_walked_leads_nowhere(number: int, inside: Box, tell: Tell) -> None:
    """A thread of the machine swaps a real directory of the project for links out of it, while code inside walks through it."""
    way = inside.project / "way"
    way.mkdir()
    (way / "id_rsa").write_text("harmless")
    stop = threading.Event()
    swaps = [0]

    def swap() -> None:
        link, aside = inside.project / "link", inside.project / "aside"
        while not stop.is_set():
            link.symlink_to(f"{'../' * 30}{inside.home}/.ssh")
            way.rename(aside)
            link.rename(way)
            way.unlink()
            aside.rename(way)
            swaps[0] += 1

    thread = threading.Thread(target=swap)
    thread.start()
    source = """
import json, collections, time
seen, until = collections.Counter(), time.time() + 120
for _ in range(3000):
    if time.time() > until or any("CANARY" in text for text in seen):
        break
    try:
        seen[open("way/id_rsa").read()] += 1
    except OSError as error:
        seen[type(error).__name__] += 1
print(json.dumps(seen))
"""
    try:
        seen = inside.probe(source)
        until(lambda: seen.update(inside.probe(source)) or swaps[0] > 100)  # as often as a busy disk lets it be swapped
        control = outside(source.replace("3000", "10_000_000"), cwd=inside.project)
    finally:
        stop.set()
        thread.join()
    assert swaps[0] > 100 and not [text for text in seen if "CANARY" in text], seen
    assert [text for text in control if "CANARY" in text], control
    tell(f"{sum(seen.values())} reads during {swaps[0]} swaps: {seen}", control="without a sandbox the same walk reads the key")


@case(136, 138)
def test_floods_of_memory_and_output_end_their_own_run(number: int, inside: Box, tell: Tell) -> None:
    limited = inside.with_(limits=replace(GENEROUS, memory_bytes=256 << 20, output_bytes=1 << 20))
    for source in ("x = bytearray(1 << 20)\nwhile True: x = x + x", "x = {}\nwhile True: x[len(x)] = str(len(x)) * 100", "'x' * (1 << 31)"):
        ran = limited.python(source)
        assert ran.exit.reason is ExitReason.OUT_OF_MEMORY or b"MemoryError" in ran.stderr or b"OverflowError" in ran.stderr, ran
    ran = limited.python("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert ran.exit.reason is ExitReason.OUTPUT_LIMIT and len(ran.stdout) == 1 << 20, ran.exit
    assert limited.python("print(len(bytearray(32 << 20)))").stdout == b"33554432\n"
    tell("each ended for its own limit", control="within its limits the same runtime does its work")


@case(167)
def test_what_one_run_does_to_the_compiled_module_reaches_no_other(number: int, box: Box, inside: Box, tell: Tell) -> None:
    """A guest of the other runtime sees the machine's files, the cache of compiled modules among them, and may write to its clone."""
    module = next(CACHE.glob("*-module"))
    facts = module.stat()
    spoil = f"open({str(module)!r}, 'r+b').write(b'PWNED'); print('written')"
    written = box.python(spoil)
    own = ROOT or facts.st_uid == os.geteuid()
    assert (written.stdout == b"written\n") is own, "a clone lets its owner; it is somebody else's file for others"
    after = module.stat()  # but for when it was last read: others read it too
    assert (after.st_ino, after.st_mode, after.st_size, after.st_mtime_ns, after.st_ctime_ns) == (
        *(facts.st_ino, facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns),
    )
    assert module.read_bytes()[:5] != b"PWNED"
    assert inside.python("print('fine')").stdout == b"fine\n"
    copy = inside.project / "copy"
    copy.write_bytes(b"harmless")
    outside(f"import json; open({str(copy)!r}, 'r+b').write(b'PWNED'); print(json.dumps(1))")
    assert copy.read_bytes()[:5] == b"PWNED"
    tell("written to its own layer; the next run is as ever", control="without a sandbox such a write changes the file")
