"""Attacks by an earlier run: what it left in its layers must not make the next launch, or anybody, act on the real machine."""

from __future__ import annotations

import os
import stat
import subprocess

import pytest

from agent_sandbox.errors import LaunchFailed
from agent_sandbox.kernel import ids
from tests.security.conftest import Tell
from tests.security.harness import Box, case, snapshot

LEAVINGS = """
cd /
for place in /tmp /dev /proc /run /sys; do rm -rf $place; rmdir $place; mv $place /moved; ln -sfn {victim} $place; done
mv -T {project} {project}.away; ln -sfn {victim} {project}
for d in /mnt /media /srv /opt; do rm -rf $d; ln -sfn {victim} $d; done
ln -sfn {victim}/file /etc/ld.so.preload; ln -sfn {victim}/file /etc/resolv.conf
ls -ld /tmp /dev /proc /run /sys
"""


@case(133)
def test_links_left_at_mount_points_do_not_lead_the_next_launch_outside(number: int, box: Box, tell: Tell) -> None:
    victim = box.project.parent / "victim"
    victim.mkdir()
    (victim / "file").write_text("keep")
    before = snapshot(victim)
    kept = box.kept
    first = kept.shell(LEAVINGS.format(victim=victim, project=box.project) + " 2>/dev/null")
    mounted = 4 if box.runtime.traits.images else 5  # /sys of an image is a directory like any other
    assert first.stdout.decode().count("drwx") + first.stdout.decode().count("dr-x") == mounted, "mount points cannot be moved away"
    try:
        again = kept.shell("ls -ld /tmp /dev /proc; touch /tmp/x /dev/shm/y /run/z")
        happened = f"the next run starts, exit {again.exit.code}"
    except LaunchFailed as error:
        happened = f"the next launch is refused: {error.message}"
    assert snapshot(victim) == before
    with kept.layers() as layers:
        links = [path for path in layers.rglob("*") if path.is_symlink() and os.readlink(path) == str(victim)]
        assert links and (links[0] / "file").read_text() == "keep", "the control arm"
    tell(happened + "; nothing was mounted or written there", control=f"{len(links)} links in its layers; who follows one gets there")


@case(46)
@pytest.mark.needs_root
def test_a_setuid_file_left_on_disk_is_nobodys(number: int, box: Box, tell: Tell) -> None:
    kept = box.kept
    kept.shell("cp /bin/sh planted; chmod 6755 planted")
    with kept.layers() as layers:
        (planted,) = layers.rglob("planted")
        status = planted.stat()
        assert status.st_uid == ids.FIRST_ID, "executed by anybody, it gives the rights of an id that nothing belongs to"
        above = [directory for directory in planted.parents if directory.is_relative_to(layers)]
        assert any(stat.S_IMODE(directory.stat().st_mode) & 0o077 == 0 for directory in above), "and only root comes near it"
    tell(f"owned by {status.st_uid}, below a directory of mode 700", control=f"the setuid bit is there: {oct(status.st_mode)}")


@case(10)
def test_a_mask_holds_over_layers_made_without_it(number: int, box: Box, tell: Tell) -> None:
    """An earlier run cannot prepare a directory that lets the real one show through."""
    kept = box.kept
    secret = box.home / ".ssh"
    assert kept.shell(f"mkdir -p {secret}; echo own > {secret}/config; ls -A {secret}").stdout == b"config\n"
    assert kept.shell(f"ls -A {secret}; cat {secret}/id_rsa; rm -rf {secret}; mkdir {secret}").stdout == b"config\n"
    assert kept.shell(f"ls -A {secret}; cat {secret}/id_rsa").stdout == b""
    assert b"CANARY" in box.unmasked.shell(f"cat {secret}/id_rsa").stdout
    tell("the guest's own directory lies over the mask; the real one stays hidden", control="without the mask it is read")


@case(2)
def test_what_was_deleted_stays_deleted_and_the_real_one_stays(number: int, box: Box, tell: Tell) -> None:
    kept = box.kept
    script = "rm greeting.txt; rm -rf src; mkdir src; ln -s ../../../../../../etc/passwd greeting.txt"
    kept.shell(script)
    assert kept.shell("ls -A src; readlink greeting.txt").stdout == b"../../../../../../etc/passwd\n"
    assert (box.project / "greeting.txt").read_text() == "hello\n" and os.listdir(box.project / "src") == ["app.py"]
    subprocess.run(["bash", "-c", script], cwd=box.project, check=True)
    assert os.readlink(box.project / "greeting.txt") == "../../../../../../etc/passwd" and os.listdir(box.project / "src") == []
    tell("the second run sees what the first left, the machine does not change", control="outside the same line changes the real files")
