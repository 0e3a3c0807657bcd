"""`snapshot`, `rollback` and `snapshots`: keep what the sandbox is, go back to it, and see what there is to go back to."""

from __future__ import annotations

import time
from collections.abc import Iterator

from agent_sandbox.cli.change_list import current_and_whole
from agent_sandbox.cli.context import Current
from agent_sandbox.cli.parser import Request
from agent_sandbox.cli.render.messages import remark, shown
from agent_sandbox.workspace.layers.history import History, Snapshot, tree
from agent_sandbox.workspace.stored_sandbox import Stored


def snapshot(request: Request) -> int:
    """The verb `snapshot`. Its id goes to standard output."""
    found = current_and_whole(request)
    made = Stored(found.state).snapshot(*request.words)
    if request.has("--json"):
        _print("snapshot", found, {"snapshot": _document(made)})
    else:
        print(made.id)
        if not request.has("--quiet"):
            remark(f"kept as snapshot {_named(made)} · agent-sandbox rollback {made.id}")
    return 0


def rollback(request: Request) -> int:
    """The verb `rollback`."""
    found = current_and_whole(request)
    done = Stored(found.state).rollback(*request.words)
    if request.has("--json"):
        _print("rollback", found, {"to": _document(done.to), "kept": _document(done.kept) if done.kept else None})
    elif not request.has("--quiet"):
        kept = f"; what was is snapshot {done.kept.id}" if done.kept else ""
        remark(f"the sandbox is what it was at snapshot {_named(done.to)}{kept}")
    return 0


def snapshots(request: Request) -> int:
    """The verb `snapshots`: a tree, in which the one that the sandbox descends from is marked. With --forget, one less."""
    found = current_and_whole(request)
    stored = Stored(found.state)
    forgotten = [stored.forget(name) for name in request.values("--forget")]
    history = stored.snapshots()
    if request.has("--json"):
        listed = [{**_document(each), "head": each.id == history.head} for _, each in tree(history)]
        _print("snapshots", found, {"snapshots": listed, "used": history.used, "forgotten": [_document(each) for each in forgotten]})
        return 0
    for each in forgotten if not request.has("--quiet") else ():
        remark(f"forgot snapshot {_named(each)}")
    for line in _lines(history):
        print(line)
    if not history.snapshots and not forgotten and not request.has("--quiet"):
        remark("this sandbox has no snapshots; make one: agent-sandbox snapshot LABEL")
    return 0


def _lines(history: History) -> Iterator[str]:
    for depth, each in tree(history):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.created))
        here = " <- the sandbox, with changes since" if history.used else " <- the sandbox"
        yield f"{'  ' * depth}{_named(each)}  {when}{here if each.id == history.head else ''}"


def _named(snapshot: Snapshot) -> str:
    return f"{snapshot.id} {shown(snapshot.label)}" if snapshot.label else str(snapshot.id)


def _document(snapshot: Snapshot) -> dict[str, object]:
    fields = ("id", "label", "parent", "created", "automatic")
    return {name: getattr(snapshot, name) for name in fields}


def _print(kind: str, found: Current, content: dict[str, object]) -> None:
    from agent_sandbox.cli.render.json import path_fields, print_document

    print_document(kind, {**path_fields("project", found.project.path), "sandbox": found.state.id, **content})
