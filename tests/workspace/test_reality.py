"""Times prove that a file is unchanged only if every later change must have given it another time."""

from __future__ import annotations

from agent_sandbox._fast.values import replace
from agent_sandbox.workspace.nodes import EntryType, Node
from agent_sandbox.workspace.originals.runs import TICK_NS
from agent_sandbox.workspace.reality import Fingerprint, alike, is_settled

CHANGED = 1_700_000_000_123_456_789


def unread(looked_ns: int, ctime_ns: int = CHANGED) -> Fingerprint:
    return Fingerprint(Node(EntryType.FILE, 0o644, 0, 0, 1 << 30), 1, 2, ctime_ns, ctime_ns, looked_ns)


def test_a_large_file_that_was_written_a_second_before_the_look_is_known_by_its_times() -> None:
    assert alike(unread(CHANGED + 1_000_000_000), unread(CHANGED + 9_000_000_000))


def test_a_rewrite_in_the_same_tick_cannot_pass_for_the_file_that_was_seen() -> None:
    # The file may have been rewritten after the first look and in the same tick: then its size and all its times are the same.
    assert not alike(unread(CHANGED + TICK_NS // 2), unread(CHANGED + 9_000_000_000))
    assert alike(unread(CHANGED + 2 * TICK_NS), unread(CHANGED + 9_000_000_000))  # the control arm: nothing can have been written


def test_a_time_of_a_whole_second_may_be_of_a_filesystem_that_keeps_no_finer_ones() -> None:
    whole = CHANGED - CHANGED % 1_000_000_000
    assert not is_settled(whole, whole + 1_900_000_000) and is_settled(whole, whole + 2_100_000_000)
    assert is_settled(whole + 1, whole + 1_900_000_000)


def test_another_time_or_inode_of_an_unread_file_is_a_change() -> None:
    first, later = unread(CHANGED + 1_000_000_000), unread(CHANGED + 9_000_000_000)
    assert alike(first, later)
    assert not any(
        alike(first, other) for other in (replace(later, ctime_ns=CHANGED + 1), replace(later, inode=3), replace(later, device=3))
    )
