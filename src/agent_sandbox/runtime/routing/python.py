"""Read Python source: what it imports and uses, without running or importing any of it.

Text that is too large, not Python for this interpreter, or too intricate is not read at all, and goes where it need not be understood.
"""

from __future__ import annotations

from agent_sandbox.readers.bounds import too_much
from agent_sandbox.readers.python import Names, names_an_encoding, nodes_of, parse
from agent_sandbox.runtime.routing.model import Reading
from agent_sandbox.runtime.routing.walk import Walk

_ROUNDS = 3  # of code in strings in code in strings


def read_python(source: str) -> Reading:
    """What the text shows. Never raises, whatever the text."""
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
