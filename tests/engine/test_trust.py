"""The trust stores of a run: programs find the authority's certificate there, and no change set ever does."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.engine import trust
from agent_sandbox.engine.gate import Gate
from agent_sandbox.engine.run import Session
from agent_sandbox.engine.runtimes import only
from agent_sandbox.engine.work import Command, Work
from agent_sandbox.kernel.mount_plan import Bind, Directory, MountPlan, Overlay, Symlink, ThrowAway, Tmpfs
from agent_sandbox.ledger.writer import Ledger
from agent_sandbox.policy.model import cloned
from agent_sandbox.policy.network import network_rules
from agent_sandbox.runtime.process.runtime import ProcessRuntime
from agent_sandbox.workspace.store import Store
from tests.egress.world import PUBLIC, World, in_world, kept_rules

pytest.importorskip("cryptography", reason="needs the extra `network`")

PEM = b"".join(f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n".encode() for text in ("AAEC", "AwQ="))
PACKAGES = ".venv/lib/python3.11/site-packages"


def overlay(target: str, **more: object) -> Overlay:
    return Overlay(target, target, target.replace("/", "%2F"), **more)  # type: ignore[arg-type]


def test_a_store_is_covered_in_the_innermost_overlay_that_shows_it(tmp_path: Path) -> None:
    packages = tmp_path / PACKAGES / "certifi"
    packages.mkdir(parents=True)
    (packages / "cacert.pem").write_bytes(PEM)
    plan = MountPlan(ThrowAway(1), (overlay("/"), overlay(str(tmp_path)), Tmpfs("/tmp", 1)))
    outer, inner, _ = trust.trusting(plan, str(tmp_path), {}).steps
    assert isinstance(outer, Overlay) and isinstance(inner, Overlay)
    assert inner.links_over == ((f"{PACKAGES}/certifi/cacert.pem", trust.BUNDLE),)
    assert all(not place.startswith(str(tmp_path).lstrip("/")) for place, _ in outer.links_over)
    hidden = MountPlan(ThrowAway(1), (overlay("/"), Tmpfs(str(tmp_path), 1)))
    outer, _ = trust.trusting(hidden, str(tmp_path), {}).steps
    assert isinstance(outer, Overlay) and not any(str(tmp_path)[1:] in place for place, _ in outer.links_over)


def test_a_store_that_the_view_shows_as_a_file_of_its_own_is_a_link_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_known_stores", lambda *_: {"/etc/ssl/certs/bundle": trust.BUNDLE})
    store, other = Bind("/etc/ssl/certs/bundle", "/etc/ssl/certs/bundle"), Bind("/etc/hosts", "/etc/hosts")
    made = MountPlan(ThrowAway(1), (Directory("/etc/ssl/certs"), store, other))
    assert trust.trusting(made, None, {}).steps == (Directory("/etc/ssl/certs"), Symlink("/etc/ssl/certs/bundle", trust.BUNDLE), other)
    over = MountPlan(ThrowAway(1), (overlay("/etc"), store, other))
    assert trust.trusting(over, None, {}).steps == (overlay("/etc", links_over=(("ssl/certs/bundle", trust.BUNDLE),)), other)


def test_a_java_key_store_holds_every_certificate_and_the_digest_that_java_checks() -> None:
    store = b"".join(trust.key_store(PEM, b""))
    body, digest = store[:-20], store[-20:]
    assert body[:12] == bytes.fromhex("feedfeed 00000002 00000002")
    assert b"\0\0\0\x03\0\x01\x02" in body and body.endswith(b"\0\0\0\x02\x03\x04")
    assert digest == hashlib.sha1("changeit".encode("utf-16-be") + b"Mighty Aphrodite" + body, usedforsecurity=False).digest()


def test_a_new_certifi_is_promoted_without_a_trace_of_the_authority(tmp_path: Path) -> None:
    project, state = tmp_path / "project", tmp_path / "state"
    copied: list[Path] = []
    places = [project / PACKAGES / name for name in ("certifi/cacert.pem", "pip/_vendor/certifi/cacert.pem")]
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_bytes(PEM)
    code = f"""
import os, shutil
first, second = {[str(place) for place in places]!r}
ours = open("{trust.BUNDLE}", "rb").read()
print([open(path, "rb").read() == ours for path in (first, second, "/etc/ssl/certs/ca-certificates.crt") if os.path.exists(path)])
with open(first + ".new", "w") as file:  # as pip does: the new file beside the old one, and then in its place
    file.write("the next version")
os.replace(first + ".new", first)
os.utime(second, (1, 1), follow_symlinks=False)  # touches the link, and so copies it up
shutil.copytree("{project}/.venv", "{project}/copy", symlinks=True)
open("{project}/ordinary", "w").write("kept")
print(ours.decode().count("BEGIN CERTIFICATE"))
"""

    def act(world: World) -> tuple[str, str, bytes]:
        trust.system_roots = lambda: world.trusted
        runtime = ProcessRuntime()
        policy = cloned(masks=(), network=network_rules(outbound=True, hosts=["good.example"]))
        gate = Gate(policy, Ledger(tmp_path / "ledger", clock=lambda: 0.0), clock=lambda: 0.0)
        session = Session(
            gate, only(runtime), project=str(project), state=Store.open(str(state)).sandbox_for(str(project)), provisions=kept_rules()
        )
        done = session.run(Work(Command((sys.executable, "-c", code)), {"PATH": "/usr/bin:/bin"}, cwd=str(project)))
        runtime.close()
        return done.stdout.decode(), done.stderr.decode(), world.trusted

    said, errors, _ = in_world({"good.example": PUBLIC}, act)
    seen, count = said.splitlines()
    assert "False" not in seen and seen.count("True") >= 2 and count == "2", errors
    command = [sys.executable, "-m", "agent_sandbox", "promote", "--yes"]
    env = {**os.environ, "AGENT_SANDBOX_STATE": str(state)}
    promoted = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert (project / "ordinary").read_text() == "kept", (promoted.stdout, promoted.stderr)
    assert places[0].read_text() == "the next version"
    assert places[1].read_bytes() == PEM and not places[1].is_symlink(), "as it was"
    for directory, _, files in os.walk(project):
        copied += [Path(directory, name) for name in files]
    assert copied and not [
        path for path in copied if path.is_symlink() or (b"BEGIN CERTIFICATE" in path.read_bytes() and path != places[1])
    ]
