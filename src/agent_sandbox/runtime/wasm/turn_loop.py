"""A session of turns inside WebAssembly, which can be saved between two turns and resumed in a fresh instance.

The interpreter waits for its next turn inside a call. To be saved it returns from that call first. Then nothing of the program is on the
engine's stack, and the interpreter is exactly its memory: the module has one mutable global, the pointer of its own stack, which is back at
its start whenever no call is under way (`_depth` checks that), and a table that never changes. `_save` writes memory, descriptors and files
to the supervisor, and `_restore` reads them.
"""

from __future__ import annotations

import json
import marshal
from typing import Any

from agent_sandbox.kernel.memory import read_at
from agent_sandbox.runtime.guest_rpc import codec
from agent_sandbox.runtime.guest_rpc.client import Speaker
from agent_sandbox.runtime.guest_rpc.transfer import FACTS, GO_ON, PIECE, READ, REFUSED
from agent_sandbox.runtime.wasm.machine import FIRST_DIRECTORY, PAGE, Instance, MemoryImage, WasmMachine
from agent_sandbox.runtime.wasm.state_files import SessionFiles
from agent_sandbox.runtime.wasm.state_stream import PAGE as SMALL_PAGE
from agent_sandbox.runtime.wasm.state_stream import RUN, StateReader, StateWriter
from agent_sandbox.runtime.wasm.view import LIBRARY, VIEW
from agent_sandbox.runtime.wasm.wasi.descriptors import NotKept, OpenDescriptor

_TURN = b'{"turn":'
_FIRST = b'{"turn":{}}'
_NEXT, _REST = b"next", b"rest"  # our own questions from inside; no tool asks them
_ROOTS = {FIRST_DIRECTORY: LIBRARY, FIRST_DIRECTORY + 1: VIEW}
_GIVEN = (0, 1, 2, *_ROOTS)  # descriptors that every instance begins with
_WARM = 2  # calls after which a function has been specialised
_LARGEST_MEMORY = 1 << 32

# The text of `inside` is part of a record's identity, so its loop of turns stays as it is, and this one takes its place: it can be left and
# entered again. A call into the interpreter runs in the program's own `__main__`, so these functions are found in a module instead. After
# each call the interpreter flushes its streams, which may be objects of the program: so outside of the loop there are none. A saved session
# has these functions in its memory: if what they ask or are called with changes, so must the format of checkpoints.
SESSION = """
def session(host, ours, talk):
    spell, loads = ours.codec.spell, __import__("marshal").loads
    turns = ours.inside.Turns(ours.inside.offered(loads(talk)["tools"], host.call, spell), host.call, spell, ours.ended)
    taken, names, streams = 0, __import__("sys").__dict__, {{}}
    def leave():
        for name in ("stdout", "stderr"):
            if name in names:
                streams[name] = names[name]
            names[name] = None
    def enter():
        for name in ("stdout", "stderr"):
            del names[name]
        names.update(streams)
        streams.clear()
    def take():
        nonlocal taken
        enter()
        turn = loads(host.call(b"next"))
        while turn:
            taken += 1
            turn = loads(host.call(turns._reported(turns._turn(f"<turn {{taken}}>", turn["source"], turn["stdin"]))))
        if turn is None:
            ours.end(turns.main, 0)
        leave()
    def rest():
        host.call(b"rest")
    def again(env, tools):
        __import__("os").environ.update(env)
        turns.main.__dict__.update(ours.inside.offered(loads(tools), host.call, spell))
    leave()
    host.take, host.rest, host.again = take, rest, again
ours = __import__("sys").modules.pop({ours})
ours.begin({path}, {env}, {arguments}, {cwd}, seeded={seeded})
session(__import__("_host"), ours, {talk})
"""
_TAKE, _AT_REST = "__import__('_host').take()", "__import__('_host').rest()"
_AGAIN = "__import__('_host').again({env}, {tools})"
_LEAVE = codec.packed(False)  # in place of a turn: return, and be called again


class TurnLoop:
    """Takes the turns of one session, until the supervisor has no more."""

    def __init__(self, machine: WasmMachine, instance: Instance, image: str, reference: MemoryImage, speaker: Speaker) -> None:
        """`image` is the name of the image that the instance began as, and `reference` a mapping of it that nobody has written to."""
        self._machine, self._instance, self._speaker = machine, instance, speaker
        self._image, self._reference = image, reference
        self._report, self._fresh_depth = _FIRST, 0
        self._wanted: dict[str, Any] | None = None  # what shall be saved as soon as the interpreter has returned

    def answer(self, question: bytes) -> bytes:
        """Answer a question from inside: our own ones here, those to tools by the supervisor."""
        if question == _REST:
            return b""
        if question.startswith(b"\0"):  # only this process says how the state of the session crosses
            raise RuntimeError("not a question of a program")
        if question != _NEXT and not question.startswith(_TURN):
            return self._speaker.ask(question)
        order = self._speaker.ask(self._report if question == _NEXT else question)
        message = marshal.loads(order)  # from the supervisor
        if message is not None and "save" in message:
            self._wanted = message["save"]
            return _LEAVE
        return order

    def begin(self, code: str) -> int:
        """Prepare a new session. Return 0, or the code with which the interpreter failed."""
        failed = self._instance.run(code)
        self._fresh_depth = 0 if failed else self._depth()
        return failed

    def resume(self, talk: dict[str, Any]) -> int:
        """Restore a saved session, and give it the environment and tools of now. Tells the supervisor why it cannot, if so."""
        try:
            self._restore(talk["resume"])
        except Exception as error:  # the content may come from anybody, and may break in any way
            why = str(error) if isinstance(error, NotKept) else f"its content is damaged ({type(error).__name__})"
            self._speaker.ask(REFUSED + why.encode("utf-8", "replace")[:1000])
            return 1
        given = {"env": talk["resume"]["env"], "tools": codec.packed(talk["tools"])}
        return self._instance.run(_AGAIN.format(**{name: ascii(value) for name, value in given.items()}))

    def run(self) -> int:
        """Take turns. Returns an exit code if the interpreter failed; otherwise it ends this process itself."""
        while True:
            code = self._instance.run(_TAKE)
            if self._wanted is None:
                return code or 1
            wanted, self._wanted = self._wanted, None
            self._report = self._saved(wanted)

    def _saved(self, wanted: dict[str, Any]) -> bytes:
        try:
            self._save(wanted)
            return codec.spell({"turn": {"code": 0, "value": None}})
        except (NotKept, OSError) as error:
            why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            return codec.spell({"turn": {"code": 1, "value": why[:1000]}})

    def _depth(self) -> int:
        """Return the highest address that the interpreter's own stack has in one and the same call, which grows downwards.

        The interpreter specialises what it has run once or twice, and then needs less of it.
        """
        highest = 0
        for _ in range(_WARM):
            self._machine.door.depth = 0
            self._instance.run(_AT_REST)
            if not self._machine.door.depth:
                raise NotKept("the interpreter does not answer")
            highest = max(highest, self._machine.door.depth)
        return highest

    def _save(self, wanted: dict[str, Any]) -> None:
        depth = self._depth()
        if depth != self._fresh_depth:
            raise NotKept("the interpreter's stack is not empty")
        descriptors = self._machine.descriptors
        numbers = descriptors.open_numbers()
        opened = descriptors.describe([number for number in numbers if number not in _GIVEN], _ROOTS)
        size = self._instance.exported_memory.data_len(self._instance.store)
        self._tell(FACTS + json.dumps({"image": self._image, "memory_bytes": size}).encode())
        writer = StateWriter(lambda piece: self._tell(PIECE + piece))
        with SessionFiles(VIEW) as files:
            files.save(wanted["scratch"], wanted["changed"], writer)
        state = {"depth": depth, "open": [each.plain() for each in opened], "closed": [each for each in _GIVEN if each not in numbers]}
        writer.state({**state, "calls": self._machine.save_calls()})
        self._write_memory(size, writer)
        writer.end()

    def _tell(self, piece: bytes) -> None:
        if self._speaker.ask(piece) != GO_ON:
            raise NotKept("the supervisor takes no more")

    def _write_memory(self, size: int, writer: StateWriter) -> None:
        """Write each page that differs from the image. Memory is first compared in larger pieces, most of which are the same."""
        memory, store = self._instance.exported_memory, self._instance.store
        pages: list[bytes] = []
        first = 0
        for start in range(0, size, PAGE):
            ours, theirs = memory.read(store, start, start + PAGE), self._page_of_image(start)
            for place in range(0, PAGE, SMALL_PAGE) if ours != theirs else ():
                page, before = ours[place : place + SMALL_PAGE], theirs[place : place + SMALL_PAGE]
                if page == before:
                    continue
                number = (start + place) // SMALL_PAGE
                if pages and (number != first + len(pages) or len(pages) == RUN):
                    writer.memory(first, pages)
                    pages = []
                first = first if pages else number
                pages.append(_difference(page, before))
        if pages:
            writer.memory(first, pages)

    def _page_of_image(self, start: int) -> bytes:
        return read_at(self._reference.address + start, PAGE) if start < self._reference.size else bytes(PAGE)

    def _restore(self, wanted: dict[str, Any]) -> None:
        size = int(wanted["memory_bytes"])
        memory, store = self._instance.exported_memory, self._instance.store
        if size % PAGE or not self._reference.size <= size <= _LARGEST_MEMORY:
            raise NotKept("the size of its memory is out of range")
        try:
            self._instance.grow(size)
        except Exception:
            raise NotKept(f"it needs {size >> 20} MB of memory, which this session may not have") from None
        states: list[dict[str, Any]] = []

        def write_pages(first: int, pages: list[bytes]) -> None:
            for number, page in enumerate(pages, first):
                start = number * SMALL_PAGE
                if start + SMALL_PAGE > size:
                    raise NotKept("it has memory beyond its end")
                memory.write(store, _difference(page, memory.read(store, start, start + SMALL_PAGE)), start)

        with SessionFiles(VIEW) as files:
            StateReader(lambda: self._speaker.ask(READ)).read(files.restore, states.append, write_pages)
            files.finish()
        (state,) = states
        self._open_again(state)
        self._machine.restore_calls(state["calls"])
        self._fresh_depth = self._depth()
        if self._fresh_depth != state["depth"]:
            raise NotKept("the interpreter's stack is not where it was")

    def _open_again(self, state: dict[str, Any]) -> None:
        descriptors = self._machine.descriptors
        wanted = [OpenDescriptor.of(each) for each in state["open"]]
        if any(each.number in _GIVEN or each.root not in _ROOTS for each in wanted):
            raise NotKept("its descriptors are not in order")
        descriptors.open_again(wanted, FIRST_DIRECTORY + 1)
        for number in state["closed"]:
            descriptors.close(int(number))


def _difference(page: bytes | bytearray, before: bytes | bytearray) -> bytes:
    return (int.from_bytes(page) ^ int.from_bytes(before)).to_bytes(SMALL_PAGE)
