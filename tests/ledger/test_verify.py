"""Whatever is done to a ledger is found, and what is missing is told from what is changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_sandbox.errors import LedgerBroken
from agent_sandbox.ledger import checkpoint, private_files
from agent_sandbox.ledger.chain import closed, files
from agent_sandbox.ledger.event import Gap
from agent_sandbox.ledger.verify import Evidence, Report, evidence, examine
from agent_sandbox.ledger.writer import Ledger
from tests.ledger.mutations import MUTATIONS
from tests.ledger.samples import filled, intent, ledger_at


def report_on(ledger: Ledger) -> Report:
    return examine(ledger.path, evidence(ledger.keys))


def in_small_files(path: Path, count: int, kept: int = 1 << 30) -> Ledger:
    ledger = Ledger(path, clock=lambda: 1.5, segment_bytes=2_000, kept_bytes=kept)
    for number in range(count):
        ledger.record(intent(str(number)))
    return ledger


def test_an_untouched_ledger_is_intact_and_complete(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 10)
    report = report_on(ledger)
    assert (report.intact, report.complete, report.first, report.last, report.entries) == (True, True, 1, 10, 10)


def test_a_copy_elsewhere_is_examined_without_anything_else_and_says_what_that_cannot_tell(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "here" / "ledger", 10)
    copy = shutil.copy(ledger.path, tmp_path / "copy")
    report = examine(str(copy), Evidence())
    assert (report.intact, report.complete, report.last) == (True, None, 10)
    assert "key" in report.untold[0] and "anchor" in report.untold[1]


def _mutated(ledger: Ledger, random: Random) -> tuple[str, Report] | None:
    """The report on a ledger after one change, and the change's name; None when the change left everything as it was."""
    paths = files(ledger.path)
    before = [Path(path).read_bytes() for path in paths]
    after = list(before)
    mutation = random.choice(MUTATIONS)
    mutation(random, after)
    if after == before:
        return None
    gone = len(paths) - len(after)
    changed = [number for number in range(len(paths)) if number < gone or after[number - gone] != before[number]]
    try:
        for number in changed:
            os.unlink(paths[number])  # to write over a file can make the kernel write it to the disk at once
            if number >= gone:
                Path(paths[number]).write_bytes(after[number - gone])
        return mutation.__name__, report_on(ledger)
    finally:
        for number in changed:
            Path(paths[number]).unlink(missing_ok=True)
            Path(paths[number]).write_bytes(before[number])


def _every_mutation_is_found(tmp_path: Path, count: int, seed: int) -> None:
    random = Random(seed)
    ledgers = [filled(tmp_path / "one", 6), in_small_files(tmp_path / "many.jsonl", 12)]
    assert len(files(ledgers[1].path)) > 2
    tried: dict[str, int] = {}
    while sum(tried.values()) < count:
        if (found := _mutated(random.choice(ledgers), random)) is not None:
            name, report = found
            assert not (report.intact and report.complete), f"{name} was not found (seed {seed}, after {tried}): {report}"
            tried[name] = tried.get(name, 0) + 1
    assert len(tried) == len(MUTATIONS)
    assert all(report_on(ledger).complete for ledger in ledgers), "the control: put back, they verify"


def test_two_thousand_random_changes_are_all_found(tmp_path: Path) -> None:
    _every_mutation_is_found(tmp_path, 2_000, seed=7)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_random_changes_are_all_found(tmp_path: Path, seed: int) -> None:
    _every_mutation_is_found(tmp_path, 10_000, seed=1000 + seed)


def test_a_ledger_written_anew_with_right_hashes_is_found_by_its_seals(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "a" / "ledger", 10)
    forged = filled(tmp_path / "b" / "ledger", 12)
    shutil.copy(forged.path, ledger.path)
    assert examine(ledger.path, Evidence()).intact, "the control: by its hashes alone it is a good ledger"
    assert "entry 1 was not written with this key" in report_on(ledger).fault
    with pytest.raises(LedgerBroken, match="not written with this ledger's key"):
        ledger_at(Path(ledger.path)).record(intent())


def test_a_ledger_put_back_to_what_it_was_earlier_is_incomplete(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 5)
    earlier = Path(ledger.path).read_bytes()
    ledger.record(intent("what somebody wants to hide"))
    Path(ledger.path).write_bytes(earlier)
    report = report_on(ledger)
    assert report.intact and report.complete is False and report.missing[0].startswith("entries 6 to 6")
    with pytest.raises(LedgerBroken, match="lost its end: 1 entries"):
        ledger_at(Path(ledger.path)).record(intent())


def test_another_ledger_of_the_same_key_does_not_pass_for_this_one(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    one = Ledger(tmp_path / "one", clock=lambda: 1.5, keys=keys)
    for number in range(5):
        one.record(intent(str(number)))
    shutil.copytree(keys, tmp_path / "other-keys")
    (tmp_path / "other-keys" / private_files.ANCHOR).unlink()
    other = Ledger(tmp_path / "other", clock=lambda: 1.5, keys=str(tmp_path / "other-keys"))
    for number in range(9):
        other.record(intent(f"other {number}"))
    shutil.copy(other.path, one.path)
    assert "is not the one that the anchor" in report_on(one).fault
    with pytest.raises(LedgerBroken, match="is another one than before"):
        Ledger(one.path, clock=lambda: 1.5, keys=keys).record(intent())


def test_an_anchor_that_is_gone_stops_the_ledger(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    Path(ledger.keys, private_files.ANCHOR).unlink()
    assert report_on(ledger).complete is None
    with pytest.raises(LedgerBroken, match=r"its anchor .* is gone"):
        ledger_at(Path(ledger.path)).record(intent())


def test_an_anchor_made_up_without_the_key_is_found(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    private_files.write_anchor(ledger.keys, 2, "0" * 64, "0" * 32, 10, "boot")
    assert "anchor was not written with this key" in report_on(ledger).fault
    with pytest.raises(LedgerBroken, match="was not written with its key"):
        ledger_at(Path(ledger.path)).record(intent())


@pytest.mark.parametrize("content", [b"", b"\0" * 512, b"\0" * 1024])
def test_an_anchor_that_was_emptied_is_not_taken_for_a_new_one(tmp_path: Path, content: bytes) -> None:
    ledger = filled(tmp_path / "ledger", 5)
    Path(ledger.path).write_bytes(b"".join(Path(ledger.path).read_bytes().splitlines(keepends=True)[:2]))
    Path(ledger.keys, private_files.ANCHOR).write_bytes(content)
    with pytest.raises(LedgerBroken, match="emptied"):
        report_on(ledger)
    with pytest.raises(LedgerBroken, match="emptied"):
        ledger_at(Path(ledger.path)).record(intent())


def test_a_process_that_dies_with_its_first_entry_written_and_the_anchor_not_leaves_nothing_to_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_at(tmp_path / "ledger")
    put, puts = private_files.put_anchor, list[int]()

    def dies(descriptor: int, sequence: int, *rest: Any, **more: Any) -> None:
        puts.append(sequence)
        if sequence:
            raise KeyboardInterrupt
        put(descriptor, sequence, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(private_files, "put_anchor", dies)
        with pytest.raises(KeyboardInterrupt):
            ledger.record(intent())
    assert puts == [0, 1]
    assert report_on(ledger).complete
    assert ledger_at(Path(ledger.path)).record(intent()).sequence == 2


def _with_another_anchor(ledger: Ledger, content: bytes) -> Report | None:
    """The report with this as its anchor; None when that is found to be damaged before anything is examined."""
    place = Path(ledger.keys, private_files.ANCHOR)
    before = place.read_bytes()
    try:
        place.unlink()
        place.write_bytes(content)
        place.chmod(0o600)
        return report_on(ledger)
    except LedgerBroken:
        return None
    finally:
        place.write_bytes(before)


def test_a_change_of_the_anchor_alone_is_found_or_takes_nothing_away(tmp_path: Path) -> None:
    """What it says of numbers and hashes cannot be changed; put back to an earlier one, it still vouches for no ledger that is shorter."""
    random, ledger = Random(12), filled(tmp_path / "ledger", 3)
    earlier = Path(ledger.keys, private_files.ANCHOR).read_bytes()
    for _ in range(3):
        ledger.record(intent(), lasting=True)
    content, found = Path(ledger.keys, private_files.ANCHOR).read_bytes(), 0
    named = len(" ".join(content.decode().split()[:3]))  # the number, the hash and the seal; behind them only remarks for who repairs
    for _ in range(300):
        changed = bytearray(content)
        changed[random.randrange(named) + random.choice((0, 512))] ^= random.randrange(1, 256)
        report = _with_another_anchor(ledger, bytes(changed))
        found += report is None or not (report.intact and report.complete)
    assert found == 300
    rolled_back = _with_another_anchor(ledger, earlier)
    assert rolled_back is not None and rolled_back.last == 6


@pytest.mark.parametrize("content", [b"x" * 1024, b"1 2 3\n", b"\xff" * 512])
def test_a_damaged_anchor_is_said_to_be_damaged(tmp_path: Path, content: bytes) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    Path(ledger.keys, private_files.ANCHOR).write_bytes(content)
    with pytest.raises(LedgerBroken, match="anchor"):
        report_on(ledger)
    with pytest.raises(LedgerBroken, match="anchor"):
        ledger_at(Path(ledger.path)).record(intent())


def _after_a_power_cut(ledger: Ledger, lost: int, boot: str) -> None:
    """The ledger without its last entries, and an anchor from another boot that had seen them."""
    lines = Path(ledger.path).read_bytes().splitlines(keepends=True)
    Path(ledger.path).write_bytes(b"".join(lines[:-lost]))
    place = Path(ledger.keys, private_files.ANCHOR)
    place.write_bytes(place.read_bytes().replace(private_files.boot_id().encode(), boot.encode()))


@pytest.mark.parametrize("torn", [b"", b'{"seq":4,"ti'])
def test_entries_lost_in_a_power_cut_are_named_and_the_ledger_goes_on(tmp_path: Path, torn: bytes) -> None:
    ledger = filled(tmp_path / "ledger", 5)
    _after_a_power_cut(ledger, 2, "00000000-0000-0000-0000-000000000000")
    with Path(ledger.path).open("ab") as file:
        file.write(torn)
    again = ledger_at(Path(ledger.path))
    assert again.record(intent("after")).sequence == 7
    report = report_on(again)
    assert report.intact and report.complete is False
    assert report.missing == ("entries 4 to 5: the machine has started again since",)
    assert (report.torn, report.unsealed) == (len(torn) > 0, 0)


def test_no_power_cut_explains_the_loss_of_what_was_forced_to_the_disk(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    ledger.record(intent("a promotion"), lasting=True)
    ledger.record(intent("later"))
    _after_a_power_cut(ledger, 2, "00000000-0000-0000-0000-000000000000")
    with pytest.raises(LedgerBroken, match="lost its end"):
        ledger_at(Path(ledger.path)).record(intent())


def test_a_ledger_that_was_taken_away_is_begun_anew_and_stays_incomplete(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    os.unlink(ledger.path)
    again = ledger_at(Path(ledger.path))
    again.record(intent())
    again.record(intent())
    report = report_on(again)
    assert (report.intact, report.complete, report.first, report.last) == (True, False, 4, 6)
    assert report.missing == ("entries 1 to 3: the file was not there",)


def test_a_large_file_is_closed_and_the_chain_goes_on(tmp_path: Path) -> None:
    ledger = in_small_files(tmp_path / "ledger.jsonl", 40)
    assert len(closed(ledger.path)) > 5
    report = report_on(ledger)
    assert report.intact and report.complete and report.entries == report.last == 40 + len(closed(ledger.path))


def test_old_files_are_removed_and_the_chain_says_so(tmp_path: Path) -> None:
    ledger = in_small_files(tmp_path / "ledger.jsonl", 100, kept=6_000)
    report = report_on(ledger)
    assert report.intact and report.complete and report.first == report.removed_before > 1
    assert sum(Path(path).stat().st_size for path in files(ledger.path)) < 6_000 + 2 * 2_600
    os.unlink(files(ledger.path)[0])
    lacking = report_on(ledger)
    assert lacking.intact and lacking.complete is False, "one more than the chain says is missing"


def test_one_closed_file_by_itself_is_intact_and_says_what_is_elsewhere(tmp_path: Path) -> None:
    ledger = in_small_files(tmp_path / "ledger.jsonl", 40)
    copy = shutil.copy(closed(ledger.path)[3].path, tmp_path / "copy.jsonl")
    known = evidence(ledger.keys)
    report = examine(str(copy), known)
    assert report.intact and report.complete is False
    assert len(report.missing) == 2, "what came before, and what came behind"


@pytest.mark.parametrize("moment", ["named twice", "with a new file half-made"])
def test_a_process_that_dies_while_it_closes_a_file_leaves_nothing_to_repair(tmp_path: Path, moment: str) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=lambda: 1.5, segment_bytes=2_000)
    ledger.record(intent())
    while os.path.getsize(ledger.path) < 2_000:
        ledger.record(intent())
    os.mkdir(tmp_path / "ledger.closed", 0o700)
    os.link(ledger.path, tmp_path / "ledger.closed" / "000000000001.jsonl")
    if moment == "with a new file half-made":
        (tmp_path / "ledger.jsonl.new").write_bytes(b'{"seq":')
    assert report_on(ledger).complete
    Ledger(ledger.path, clock=lambda: 1.5, segment_bytes=2_000).record(intent("after"))
    report = report_on(ledger)
    assert report.intact and report.complete and len(files(ledger.path)) == 2


def test_a_checkpoint_is_checked_with_the_public_key_alone(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 5)
    signed = ledger.checkpoint()
    assert (signed.sequence, report_on(ledger).checkpoints) == (5, (5,))
    ledger.record(intent("after"))
    public = checkpoint.sign(ledger.keys, 1, "0" * 64).public_key
    note = checkpoint.read_note(checkpoint.note(signed))
    report = examine(ledger.path, Evidence(notes=(note,), public_key=public))
    assert report.intact and report.checkpoints == (5, 5)


def test_a_ledger_rewritten_behind_a_checkpoint_does_not_fit_it(tmp_path: Path) -> None:
    """Also by who has the key: the note was given away before."""
    ledger = filled(tmp_path / "ledger", 5)
    signed = ledger.checkpoint()
    os.unlink(ledger.path)
    os.unlink(Path(ledger.keys, private_files.ANCHOR))
    for number in range(8):
        ledger.record(intent(f"another past {number}"))
    assert report_on(ledger).complete, "the control: nothing on this machine tells"
    report = examine(ledger.path, evidence(ledger.keys, notes=(signed,)))
    assert "entry 5 is not the one" in report.fault


def test_a_checkpoint_of_another_key_or_with_another_number_is_no_evidence(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 5)
    signed = ledger.checkpoint()
    other = checkpoint.sign(str(tmp_path / "other"), signed.sequence, signed.hash)
    trusted = checkpoint.sign(ledger.keys, 1, "0" * 64).public_key
    assert "signature" in examine(ledger.path, Evidence(notes=(other,), public_key=trusted)).fault
    moved = checkpoint.read_note(checkpoint.note(signed).replace("\n5 ", "\n4 "))
    assert "signature" in examine(ledger.path, Evidence(notes=(moved,))).fault


@pytest.mark.parametrize("text", ["", "hello", "agent-sandbox ledger checkpoint 1\n٣ x\n\n\n", "\x1b[2J"])
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(LedgerBroken, match="no checkpoint"):
        checkpoint.read_note(text)


def test_a_gap_that_names_another_entry_than_there_was_is_found(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger", 3)
    os.unlink(ledger.path)
    ledger_at(Path(ledger.path)).record(Gap(9, "0" * 64, "a writer of ours that is wrong"))
    assert not report_on(ledger).intact
