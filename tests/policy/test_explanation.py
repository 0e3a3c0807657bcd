"""Policies in words: what they mean, what they would say, and what is odd about them."""

from __future__ import annotations

import pytest

from agent_sandbox.policy.decide import Allow, Deny
from agent_sandbox.policy.explanation import explain, lint, try_command
from agent_sandbox.policy.files.document import from_mapping
from agent_sandbox.policy.files.layers import Effective, effective
from agent_sandbox.policy.model import Limits, ProgramRules, cloned, locked
from agent_sandbox.policy.network import network_rules, read_request
from agent_sandbox.policy.paths import Beneath, Glob, Tree
from agent_sandbox.policy.secrets import Mask

NO_LIMITS = Limits(wall_seconds=None, memory_bytes=None, processes=None, open_files=None, output_bytes=None, disk_bytes=None)


def said(found: Effective, about: str) -> list[str]:
    return [line for line in explain(found) if line.startswith(about)]


def test_a_locked_policy_is_explained_in_sentences() -> None:
    lines = explain(Effective(locked()))
    assert lines[0].startswith("policy locked (")
    assert "files: none of the machine but the interpreter's own; /tmp is private and empty" in lines
    assert "processes: none can be started; threads can" in lines
    assert (
        "limits: 30 s, 256 MiB of memory, 64 processes and threads, 1024 open files, 100000 bytes of each output, 256 MiB on disk" in lines
    )
    assert "network: none" in lines and "code: not checked before it runs" in lines
    assert any(line.startswith("requires: ") and "no-network" in line for line in lines)


def test_every_part_of_a_policy_has_its_sentence() -> None:
    files = locked(
        read=True,
        write=True,
        allowed=[Tree("/data"), Beneath("/srv"), Glob("/etc", "*.json"), Beneath("/")],
        denied=[Tree("/data/x")],
        masks=[Mask("/data/k", "a key")],
        processes=True,
        programs=ProgramRules((("git", "cat"), ("git", "ls")), ("rm",), shell=False),
        limits=NO_LIMITS,
    )
    found = Effective(files, validate=False, blocked=("pickle",), warnings=("x",))
    assert said(found, "files") == [
        "files: /data, /srv/*, /etc/*.json, /* can be read and changed; changes are captured, never real",
        "files: not there: /data/x",
        "files: secrets that are hidden: 1",
        "files: names that begin with a dot are not shown",
    ]
    assert said(found, "processes") == [
        "processes: only programs of git, cat and of git, ls are there",
        "processes: not there: rm",
        "processes: no shell is there",
        "processes: git runs what it is given: it can do whatever this sandbox permits",
    ]
    assert said(found, "limits") == ["limits: none"]
    assert said(found, "network") == ["network: none"]
    assert said(found, "code") == ["code: checked before it runs for pickle; an early warning; isolation does not depend on it"]


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (locked(read=True, allow_hidden=True), "files: nothing can be read"),
        (locked(write=True, allowed=[Tree("/a")], allow_hidden=True), "files: /a can be written, and are empty"),
        (cloned(masks=()), "processes: every program of the view can be started"),
        (locked(processes=True, programs=ProgramRules(denied=("rm",))), "processes: programs of the view can be started"),
    ],
)
def test_the_rest_of_the_sentences(policy: object, line: str) -> None:
    assert line in explain(Effective(policy))  # type: ignore[arg-type]


def test_a_network_is_described_by_what_it_opens() -> None:
    everything = Effective(locked(network=network_rules(outbound=True, ports=[80, 443], denied=["evil.example"])))
    assert said(everything, "network") == [
        "network: every public host can be reached through the egress, at the ports 80 and 443",
        "network: not reached: evil.example",
        "network: what leaves is searched for secrets and personal data",
    ]
    rules = network_rules(
        outbound=True,
        hosts=["a.example", "db.example:5432"],
        ports=[443],
        requests=[read_request("GET a.example/v1/*")],
        uninspected=["pinned.example"],
        opaque=["db.example:5432"],
        private=["db.example"],
    )
    assert said(Effective(locked(network=rules)), "network") == [
        "network: a.example, db.example:5432 can be reached through the egress, at the ports 443, if it names no other",
        "network: what leaves is searched for secrets and personal data",
        "network: requests only as: GET a.example/v1/*",
        "network: TLS passed on unread: pinned.example",
        "network: any bytes: db.example:5432",
        "network: may lie on a private address: db.example",
    ]


def test_a_command_is_tried_without_being_run() -> None:
    policy = locked(processes=True, programs=ProgramRules((("git", "bash"),)))
    refused = try_command(policy, "git log && npm install")
    assert isinstance(refused.verdict, Deny) and "'npm'" in refused.verdict.because.why
    assert refused.understood.tools == ("git", "npm")
    assert isinstance(try_command(policy, "git log").verdict, Allow)
    assert isinstance(try_command(policy, ["git", "log"]).verdict, Allow)
    assert isinstance(try_command(policy, ["npm", "i"]).verdict, Deny)
    assert isinstance(try_command(locked(), "ls").verdict, Deny)


def remarks(table: dict[str, object]) -> list[tuple[str, str]]:
    layer = from_mapping(table, origin="x")
    return [(remark.key, remark.what) for remark in lint([layer])]


@pytest.mark.parametrize(
    ("table", "key", "what"),
    [
        ({"files": {"read": False, "allowed": ["/a"]}}, "files.allowed", "has no effect: files.read is false"),
        ({"processes": {"allow": False, "commands": ["cat"]}}, "processes.commands", "has no effect: processes.allow is false"),
        ({"network": {"hosts": ["example.com"]}}, "network.hosts", "opens nothing by itself"),
        ({"network": {"outbound": False, "presets": ["packages"]}}, "network.presets", "has no effect: network.outbound is false"),
        ({"network": {"inbound": True}}, "network.inbound", "publishes no port: only the option --publish does"),
        ({"network": {"localhost": False}}, "network.localhost", "has no effect: the programs of a sandbox always reach one another"),
        ({"processes": {"commands": ["cat", "rm"], "denied_commands": ["r*"]}}, "processes.commands", "'rm' is denied as well"),
        ({"processes": {"commands": ["bash"]}}, "processes.commands", "'bash' runs what it is given"),
        ({"processes": {"commands": ["python3"]}}, "processes.commands", "'python3' runs what it is given"),
        ({"processes": {"commands": ["gti"]}}, "processes.commands", "'gti' is no tool that is known here"),
        ({"files": {"read": True}}, "files.read", "is set to its default"),
    ],
)
def test_what_is_odd_about_a_file_is_remarked_on(table: dict[str, object], key: str, what: str) -> None:
    found = remarks(table)
    assert any(where == key and words.startswith(what) for where, words in found), found


def test_an_ordinary_file_gives_no_reason_for_a_remark() -> None:
    assert (
        remarks(
            {"files": {"write": False, "allowed": ["~/x"]}, "processes": {"commands": ["cat", "l*", "echo"]}, "code": {"validate": True}}
        )
        == []
    )


def test_layers_that_leave_nothing_are_remarked_on() -> None:
    layers = [from_mapping({"files": {"allowed": [path]}, "processes": {"commands": []}}, origin="x") for path in ("/a", "/b")]
    found = effective(cloned(masks=()), layers, home="/home/u")
    assert [remark.key for remark in lint(layers, found)] == ["files.allowed", "processes.commands"]
    assert lint([], Effective(cloned(masks=()))) == ()


def test_what_code_is_looked_at_for_is_said() -> None:
    both = Effective(locked(), validate=True, blocked=("pickle",))
    assert said(both, "code") == [
        "code: checked before it runs for the default patterns, pickle; an early warning; isolation does not depend on it"
    ]
