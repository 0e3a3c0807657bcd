"""The table of all settings of a policy file, and the JSON Schema made from it. The loader and the explanations use the table, too."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.code.patterns import Rule
from agent_sandbox.policy.hosts import canonical_pattern, canonical_port
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.policy.model import EFFECTS, ELEVATABLE, NEEDS, Guarantee, check_command, check_one_of
from agent_sandbox.policy.network import canonical_entry, read_request
from agent_sandbox.policy.network_presets import PRESETS as NETWORKS
from agent_sandbox.policy.paths import parse
from agent_sandbox.policy.programs import check_name
from agent_sandbox.policy.traffic_budgets import read_budget

if TYPE_CHECKING:
    from typing import Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LARGEST = 1 << 40  # largest integer in a file; a terabyte of anything is a typing error
_ANY_HOME = "/home"  # patterns are checked when a file is read; the real home for `~` is known later


class Shape(Enum):
    """The type of a setting's value."""

    BOOL = "true or false"
    COUNT = "a positive whole number"
    NUMBER = "a positive number"
    TEXT = "a text"
    TEXTS = "a list of texts"
    COUNTS = "a list of positive whole numbers"


@dataclass(frozen=True)
class Setting:
    """One setting: its key, type and meaning, an example for messages, and a check that each item of its value must pass."""

    key: str
    shape: Shape
    meaning: str
    example: str
    check: Callable[[Any], object] | None = None
    pattern: str = ""  # the same check as a regular expression, as far as possible; for the schema
    most: int = _LARGEST
    one_of: tuple[str, ...] = ()


def _path(text: str) -> object:
    return parse(text, home=_ANY_HOME)


def _known(text: str) -> object:
    if text not in {guarantee.value for guarantee in Guarantee}:
        raise PolicyError(f"there is no guarantee {text!r}", hint=f"use one of {', '.join(sorted(each.value for each in Guarantee))}")
    return text


def _pattern_of_code(text: str) -> object:
    return Rule(text, "named in a policy")


def _user(text: str) -> object:
    if not text or text != text.strip() or not text.isprintable() or ":" in text:
        raise PolicyError(f"not the name of a user: {text!r}", hint='write approvers = ["alice"]')
    return text


def _any_of(known: tuple[str, ...], name: str) -> Callable[[str], object]:
    return lambda text: check_one_of(text, known, name)


def _time(text: str) -> object:
    from agent_sandbox.policy.intents import seconds_of  # few policies name intents

    return seconds_of(text)


def _rule(text: str) -> object:
    if not text or not set(text) <= _OF_IDS:
        raise PolicyError(f"not the id of a rule: {text!r}", hint='write alert = ["email"]')
    return text


_RULES = r"^[a-z0-9-]+(?![\s\S])"
_OF_IDS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_PATHS = r"^(~$|~/|/|\*\*/)(?!.*(^|/)\.\.(/|$))[^\\\u0000]*$"
_COMMANDS = r"^[^/\u0000\\]+$"
_HOSTS = r"^[^/\s\u0000]+(?![\s\S])"  # a strict end: unlike `$`, not before a final newline
_REQUESTS = r"^\s*(\*|[A-Za-z,]+)\s+[^\s?]+\s*$"
_TIMES = r"^[0-9]{1,6}[smhSMH]?(?![\s\S])"
GUARANTEES = tuple(sorted(guarantee.value for guarantee in Guarantee))

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "name",
        Shape.TEXT,
        "the name of this policy in messages and in the ledger",
        '"my-project"',
        pattern=r"^[^\u0000-\u001f\u007f]{1,80}(?![\s\S])",
    ),
    Setting("extends", Shape.TEXT, "a preset to begin with", '"medium"'),
    Setting("requires", Shape.TEXTS, "guarantees without which nothing runs", '["memory-hard"]', _known, one_of=GUARANTEES),
    Setting("files.read", Shape.BOOL, "whether the files of the machine are shown", "true"),
    Setting("files.write", Shape.BOOL, "whether shown files can be changed; changes are captured, never real", "true"),
    Setting("files.allowed", Shape.TEXTS, "the paths that are shown; no others are", '["~/project", "/data/*"]', _path, _PATHS),
    Setting("files.denied", Shape.TEXTS, "paths that are hidden, whatever is allowed", '["/srv/private", "~/data/*.key"]', _path, _PATHS),
    Setting("files.allow_hidden", Shape.BOOL, "whether names that begin with a dot are shown", "true"),
    Setting(
        "container.image",
        Shape.TEXT,
        "the container image whose files take the place of the machine's",
        '"python:3.11-slim"',
        canonical_image,
        r"^[A-Za-z0-9_][A-Za-z0-9._/:@-]*(?![\s\S])",
    ),
    Setting("processes.allow", Shape.BOOL, "whether programs may be started", "true"),
    Setting("processes.shell", Shape.BOOL, "whether a shell may be started", "false"),
    Setting(
        "processes.commands", Shape.TEXTS, "the programs that may be started; no others may", '["git", "python*"]', check_name, _COMMANDS
    ),
    Setting("processes.denied_commands", Shape.TEXTS, "programs that may not be started", '["curl", "mkfs*"]', check_name, _COMMANDS),
    Setting("processes.max", Shape.COUNT, "processes and threads at once", "64"),
    Setting("network.outbound", Shape.BOOL, "whether connections may be opened; true opens the network in your own policy file", "true"),
    Setting(
        "network.inbound", Shape.BOOL, "whether ports may be published (--publish); false forbids it, and true publishes none", "false"
    ),
    Setting(
        "network.listed",
        Shape.BOOL,
        "whether only hosts that are named may be reached, here or in a file above; without names, none",
        "true",
    ),
    Setting(
        "network.hosts",
        Shape.TEXTS,
        "the hosts that may be reached, with a port if only that is meant; no others may",
        '["*.example.com", "db.example.com:5432"]',
        canonical_entry,
        _HOSTS,
    ),
    Setting(
        "network.presets",
        Shape.TEXTS,
        "groups of hosts that may be reached, besides the listed ones",
        '["packages"]',
        _any_of(NETWORKS, "network preset"),
        one_of=NETWORKS,
    ),
    Setting(
        "network.ask",
        Shape.TEXTS,
        "hosts beyond those that may be reached, for which a person is asked; without a list, only these",
        '["*.example.org"]',
        canonical_entry,
        _HOSTS,
    ),
    Setting("network.denied_hosts", Shape.TEXTS, "hosts that may not be reached", '["*.example.net"]', canonical_pattern, _HOSTS),
    Setting(
        "network.ports",
        Shape.COUNTS,
        "the ports that may be reached at hosts without one of their own; default: 80 and 443",
        "[443]",
        canonical_port,
        most=65535,
    ),
    Setting(
        "network.requests",
        Shape.TEXTS,
        "the requests that a host may be sent; a host that no line names may be sent any",
        '["GET,HEAD api.example.com/v1/*"]',
        read_request,
        _REQUESTS,
    ),
    Setting(
        "network.uninspected",
        Shape.TEXTS,
        "hosts whose TLS is passed on unread, because they pin their certificate",
        '["pinned.example.com"]',
        canonical_pattern,
        _HOSTS,
    ),
    Setting(
        "network.opaque",
        Shape.TEXTS,
        "hosts with a port that may be sent any bytes, such as a database",
        '["db.example.com:5432"]',
        canonical_entry,
        _HOSTS,
    ),
    Setting(
        "network.private",
        Shape.TEXTS,
        "hosts that may lie on a private address; the addresses of metadata services are never reached",
        '["index.example.com"]',
        canonical_pattern,
        _HOSTS,
    ),
    Setting(
        "network.budgets",
        Shape.TEXTS,
        "how much a run may exchange with some hosts: bytes, requests, requests a minute; * is all of them",
        '["api.example.com 10MB 100/min", "* sent:50MB requests:5000"]',
        read_budget,
        r"^\s*[^/\s\u0000]+(\s+(((sent|received):)?[0-9]+[A-Za-z]+|requests:[0-9]+|[0-9]+/min(ute)?))+\s*(?![\s\S])",
    ),
    Setting("network.localhost", Shape.BOOL, "whether the sandbox's own loopback may be used; it always can be", "true"),
    Setting("dlp.off", Shape.BOOL, "whether what leaves is not searched; true counts in your own file alone", "true"),
    Setting("dlp.rules", Shape.TEXTS, "tables of rules of your own; not in a project's file", '["~/rules.toml"]', _path, _PATHS),
    Setting("dlp.alert", Shape.TEXTS, "rules or kinds of rules that are only recorded", '["email"]', _rule, _RULES),
    Setting("dlp.redact", Shape.TEXTS, "rules or kinds of rules whose text is replaced by asterisks", '["personal"]', _rule, _RULES),
    Setting("dlp.ask", Shape.TEXTS, "rules or kinds of rules for which a person is asked", '["email"]', _rule, _RULES),
    Setting("dlp.block", Shape.TEXTS, "rules or kinds of rules that refuse the request", '["secret"]', _rule, _RULES),
    Setting("limits.timeout_seconds", Shape.NUMBER, "wall time of one run", "30.0"),
    Setting("limits.cpu_seconds", Shape.NUMBER, "processor time of one run", "60.0"),
    Setting("limits.memory_mb", Shape.COUNT, "memory of everything a run starts, in MiB", "256"),
    Setting("limits.disk_mb", Shape.COUNT, "disk space that a run may write, in MiB", "256"),
    Setting("limits.output_bytes", Shape.COUNT, "bytes kept of each of stdout and stderr", "100000"),
    Setting("limits.open_files", Shape.COUNT, "open descriptors of each process", "1024"),
    Setting("limits.fuel", Shape.COUNT, "steps of code inside WebAssembly, which alone counts them", "1000000000", most=1 << 60),
    Setting("code.validate", Shape.BOOL, "whether code is checked before it runs; an early warning, never the wall", "true"),
    Setting(
        "code.blocked",
        Shape.TEXTS,
        "patterns of code that are refused, beside the default ones",
        '["pickle.loads"]',
        _pattern_of_code,
        r"\S",
    ),
    Setting("approvals.commands", Shape.TEXTS, "commands that need approval", '["git push **"]', check_command, r"\S"),
    Setting(
        "approvals.effects",
        Shape.TEXTS,
        "kinds of effects that need approval",
        '["destroys", "network"]',
        _any_of(EFFECTS, "effect"),
        one_of=EFFECTS,
    ),
    Setting("approvals.tools", Shape.TEXTS, "host tools that need approval", '["send_*"]', check_name, _COMMANDS),
    Setting(
        "approvals.network",
        Shape.TEXTS,
        "hosts that need approval, although they may be reached",
        '["*.example.com"]',
        canonical_entry,
        _HOSTS,
    ),
    Setting("approvals.promotions", Shape.BOOL, "whether changing real files needs approval", "true"),
    Setting("approvals.protected", Shape.BOOL, "whether changing protected kinds of files needs approval", "true"),
    Setting("approvals.opaque", Shape.BOOL, "whether commands that cannot be fully understood need approval", "true"),
    Setting(
        "approvals.approvers", Shape.TEXTS, "the users whose approval counts; no one else's does", '["alice"]', _user, r"^[^:\u0000]+$"
    ),
    Setting(
        "approvals.high_risk",
        Shape.TEXT,
        "what an approval needs besides: another user, or a second factor",
        '"second-factor"',
        _any_of(NEEDS, "need"),
        one_of=NEEDS,
    ),
    Setting(
        "approvals.elevate",
        Shape.TEXTS,
        "which kinds of rules a person may lift for a time",
        '["programs", "limits"]',
        _any_of(ELEVATABLE, "sort of rule"),
        one_of=ELEVATABLE,
    ),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
# Of each table `[intents."NAME"]`.
INTENTS = "intents"
INTENT_SETTINGS: tuple[Setting, ...] = (
    Setting("hosts", Shape.TEXTS, "the hosts that it opens, of those that may be reached", '["api.example.com"]', canonical_entry, _HOSTS),
    Setting(
        "presets",
        Shape.TEXTS,
        "groups of hosts that it opens, of those that may be reached",
        '["packages"]',
        _any_of(NETWORKS, "network preset"),
        one_of=NETWORKS,
    ),
    Setting("requests", Shape.TEXTS, "the requests that a host may then be sent", '["GET *.example.com"]', read_request, _REQUESTS),
    Setting("ports", Shape.COUNTS, "the ports that it opens; default: 80 and 443", "[443]", canonical_port, most=65535),
    Setting("for", Shape.TEXT, "how long a declaration holds, a day at most; default: 10m", '"10m"', _time, _TIMES),
    Setting("always", Shape.BOOL, "whether it is open without a declaration", "true"),
)
SECTIONS = tuple(dict.fromkeys(setting.key.partition(".")[0] for setting in SETTINGS if "." in setting.key))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy file, for editors and policy authors."""
    from agent_sandbox.policy.files.presets import PRESETS  # presets are documents, which are checked with this table

    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    top: dict[str, Any] = {}
    for setting in SETTINGS:
        section, dot, key = setting.key.rpartition(".")
        (tables[section] if dot else top)[key] = _described(setting)
    top["extends"] |= {"enum": list(PRESETS)}
    for section, properties in tables.items():
        top[section] = {"type": "object", "properties": properties, "additionalProperties": False}
    top[INTENTS] = {
        "type": "object",
        "description": "parts of the network that an agent opens by declaring what it is about to do, by their names",
        "propertyNames": {"pattern": r"^[\t-\r -~]*[!-~][\t-\r -~]*(?![\s\S])"},
        "additionalProperties": {
            "type": "object",
            "properties": {setting.key: _described(setting) for setting in INTENT_SETTINGS},
            "additionalProperties": False,
        },
    }
    return {
        "$schema": DIALECT,
        "title": "Policy of Agent Sandbox",
        "description": "agent-sandbox.toml, or the table tool.agent-sandbox of pyproject.toml. Each layer only takes away.",
        "type": "object",
        "properties": top,
        "additionalProperties": False,
    }


def _described(setting: Setting) -> dict[str, Any]:
    return {**_shape(setting), "description": setting.meaning}


def _shape(setting: Setting) -> dict[str, Any]:
    match setting.shape:
        case Shape.BOOL:
            return {"type": "boolean"}
        case Shape.COUNT:
            return {"type": "integer", "minimum": 1, "maximum": setting.most}
        case Shape.NUMBER:
            return {"type": "number", "exclusiveMinimum": 0, "maximum": setting.most}
        case Shape.TEXT:
            if setting.one_of:
                return {"type": "string", "enum": list(setting.one_of)}
            return {"type": "string", "minLength": 1, "maxLength": 80, **({"pattern": setting.pattern} if setting.pattern else {})}
        case Shape.TEXTS:
            limits = {"enum": list(setting.one_of)} if setting.one_of else {"pattern": setting.pattern}
            return {"type": "array", "items": {"type": "string", **limits}}
        case _:
            return {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": setting.most}}
