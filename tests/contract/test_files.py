"""Files: everything can be changed, nothing real is, and every change is reported."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from agent_sandbox.runtime.process.guest_handle import ProcessGuest
from tests.security.harness import Box, snapshot


def _kinds(outcome_changes: object) -> dict[str, str]:
    return {change.path: change.kind.value for change in outcome_changes}  # type: ignore[attr-defined]


def test_what_is_written_inside_is_in_the_change_set_and_not_on_the_machine(box: Box) -> None:
    before = snapshot(box.project)
    outcome = box.shell(
        "echo new > new.txt; echo more >> greeting.txt; rm src/app.py; mkdir -p a/b; ln -s /etc/passwd link; cat greeting.txt"
    )
    assert outcome.stdout == b"hello\nmore\n"
    assert _kinds(outcome.changes) == {
        f"{box.project}/{name}": kind
        for name, kind in {
            "a": "added", "a/b": "added", "greeting.txt": "modified", "link": "added", "new.txt": "added", "src/app.py": "deleted"
        }.items()
    }  # fmt: skip
    assert snapshot(box.project) == before


def test_modes_names_and_links_behave_as_on_any_filesystem(box: Box) -> None:
    before = snapshot(box.project)
    outcome = box.shell("""
        set -e
        chmod 600 greeting.txt && stat -c %a greeting.txt
        ln greeting.txt twin && stat -c %h greeting.txt
        echo changed > twin && cat greeting.txt
        mv src/app.py src/renamed.py && cat src/renamed.py
        mkdir made && mv made moved && rmdir moved
        mv greeting.txt src/greeting.txt && cat src/greeting.txt
    """)
    assert outcome.exit.code == 0, outcome.stderr
    assert outcome.stdout.decode().splitlines() == ["600", "2", "changed", 'print("hello")', "changed"]
    assert snapshot(box.project) == before


@pytest.mark.needs_root
def test_a_guest_of_root_owns_and_changes_roots_files_in_its_clone(box: Box) -> None:
    outcome = box.shell("echo planted > /etc/agent-sandbox-contract; stat -c '%u %g' /etc/agent-sandbox-contract; rm /etc/hostname")
    assert outcome.stdout == b"0 0\n"
    kinds = _kinds(outcome.changes)
    assert (kinds["/etc/agent-sandbox-contract"], kinds["/etc/hostname"]) == ("added", "deleted")
    planted = next(change for change in outcome.changes if change.path == "/etc/agent-sandbox-contract")
    assert planted.after is not None and (planted.after.uid, planted.after.gid) == (0, 0)
    assert not Path("/etc/agent-sandbox-contract").exists() and Path("/etc/hostname").exists()


@pytest.mark.needs_user
def test_what_belongs_to_root_stays_closed_to_a_guest_without_root(box: Box) -> None:
    outcome = box.shell("echo planted > /etc/agent-sandbox-contract || rm -f /etc/passwd")
    assert outcome.exit.code != 0 and not list(outcome.changes)


def test_giving_files_away_needs_a_power_that_guests_lack(box: Box) -> None:
    outcome = box.shell("chown 12345 greeting.txt")
    assert outcome.exit.code != 0 and not list(outcome.changes)


def _while_running(box: Box, script: str, meanwhile: object) -> bytes:
    """Run a script that says `ready` and waits for its input, do something on the machine, then let it go on."""
    reading, writing = os.pipe()
    ready = threading.Event()
    guests: list[ProcessGuest] = []
    found: list[bytes] = []
    work = {"stdin": reading, "on_start": guests.append, "on_output": lambda *_: ready.set()}
    thread = threading.Thread(target=lambda: found.append(box.shell(f"echo ready; read -r _; {script}", **work).stdout))
    thread.start()
    try:
        assert ready.wait()
        meanwhile()  # type: ignore[operator]
        os.write(writing, b"go\n")
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)
    return found[0]


def test_a_masked_file_stays_hidden_when_the_machine_replaces_or_makes_it_during_the_run(box: Box) -> None:
    secret, later = box.home / ".ssh" / "id_rsa", box.home / ".netrc"
    directory = box.home / ".gnupg"
    visible = box.home / "visible.txt"

    def meanwhile() -> None:
        for path in (secret, later, visible):
            fresh = path.with_name("fresh")
            fresh.write_text(f"CANARY {path.name}")
            fresh.rename(path)
        directory.mkdir()
        (directory / "key").write_text("CANARY key")

    seen = _while_running(box, f"cat {secret} {later} {directory}/key {visible} 2>&1; ls -A {box.home}", meanwhile)
    assert b"CANARY visible.txt" in seen, "the view is live: what is not masked does appear"
    assert seen.count(b"CANARY") == 1
    names = seen.decode().splitlines()
    assert not {".ssh", ".netrc", ".gnupg", ".aws"} & set(names)


def test_setuid_files_give_nothing(box: Box) -> None:
    outcome = box.shell(
        "cp /usr/bin/id mine; chmod 6755 mine; ./mine -u; ./mine -ru; stat -c %a mine; for s in su mount passwd; do :; done"
    )
    effective, real, mode = outcome.stdout.decode().split()
    assert effective == real == str(os.getuid())
    assert mode in ("6755", "755")


def test_a_directory_closed_to_everybody_does_not_stop_the_reading_of_changes(box: Box) -> None:
    outcome = box.shell("mkdir closed; echo x > closed/inner; chmod 000 closed")
    assert f"{box.project}/closed/inner" in _kinds(outcome.changes)
    assert f"{box.project}/closed" in _kinds(outcome.changes)


def test_two_runs_share_no_scratch(box: Box) -> None:
    name = f"scratch-of-{os.getpid()}"
    places = [f"{place}/{name}" for place in ("/tmp", "/dev/shm", "/run")]
    assert box.shell(f"touch {' '.join(places)}; ls /tmp /dev/shm /run | grep -c {name}").stdout == b"3\n"
    assert box.shell(f"ls -A /tmp /dev/shm /run | grep -c {name}").stdout == b"0\n"
    assert not any(map(os.path.exists, places))
