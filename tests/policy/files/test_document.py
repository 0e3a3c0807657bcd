"""A policy file is understood whole, or refused with the key, the value and the remedy; the schema says the same."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.files.document import LARGEST_FILE, Document, from_mapping, parse_toml
from agent_sandbox.policy.files.presets import PRESETS, TIERS, preset
from agent_sandbox.policy.files.settings import SETTINGS, Shape, json_schema
from tests.architecture.sources import ROOT

WHOLE = """
name = "mine"
extends = "medium"
requires = ["memory-hard"]

[files]
read = true
write = false
allowed = ["~/project", "/data/*", "**/*.md"]
denied = ["/data/secrets"]
allow_hidden = false

[container]
image = "python:3.11-slim"
[processes]
allow = true
shell = false
commands = ["git", "python*"]
denied_commands = ["rm"]
max = 64

[network]
outbound = true
inbound = false
listed = true
hosts = ["*.example.com", "192.0.2.1"]
ask = ["*.example.org"]
budgets = ["api.example.com 10MB 100/min"]
denied_hosts = ["evil.example.com"]
ports = [443]
presets = ["packages"]
requests = ["GET,HEAD *.example.com/v1/*"]
uninspected = ["pinned.example.com"]
opaque = ["db.example.com:5432"]
private = ["db.example.com"]
localhost = true

[dlp]
off = false
rules = ["~/rules.toml"]
alert = ["email"]
redact = ["phone"]
ask = ["iban"]
block = ["card"]

[limits]
timeout_seconds = 1.5
cpu_seconds = 10
memory_mb = 256
disk_mb = 64
output_bytes = 1000
open_files = 100
fuel = 1000000

[code]
validate = true
blocked = ["pickle.loads"]

[approvals]
commands = ["git push **", "npm publish"]
effects = ["destroys", "network"]
tools = ["send_*"]
network = ["api.example.com"]
promotions = true
protected = true
opaque = true
approvers = ["alice"]
high_risk = "second-factor"
elevate = ["programs", "limits"]

[intents."install packages"]
hosts = ["index.example.com"]
presets = ["packages"]
requests = ["GET index.example.com"]
ports = [443]
for = "10m"

[intents.model]
hosts = ["model.example.com"]
always = true
"""

VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_every_setting_can_be_written_and_is_kept() -> None:
    document = parse_toml(WHOLE, origin="agent-sandbox.toml")
    assert {key for key, _ in document.settings} == {setting.key for setting in SETTINGS}
    assert document.name == "mine"
    assert document.get("processes.commands") == ("git", "python*")
    assert document.get("files.nothing", 5) == 5


def test_a_pyproject_holds_it_in_a_table_of_its_own() -> None:
    text = "[project]\nname = 'x'\n[tool.agent-sandbox.files]\nread = false\n[tool.other]\na = 1\n"
    assert parse_toml(text, origin="a/pyproject.toml").settings == (("files.read", False),)
    assert parse_toml("[project]\nname = 'x'", origin="pyproject.toml") == Document((), "pyproject.toml")
    assert parse_toml("tool = 5", origin="pyproject.toml").settings == ()
    assert parse_toml("", origin="/a/x.toml").name == "x.toml"


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("a = ", "x.toml is not TOML", "line"),
        ("colour = 1", "there is no setting 'colour'", "settings are name"),
        ("[file]\nread = true", "there is no setting 'file'", "did you mean files"),
        ("[files]\nreed = true", "there is no setting 'files.reed'", "did you mean files.read?"),
        ("allow_hidden = true", "there is no setting 'allow_hidden'", "did you mean files.allow_hidden?"),
        ("files = 5", "files is a table, not 5", "write [files]"),
        ("[files]\nread = 1", "files.read must be true or false, not 1", "write read = true under [files]"),
        ("[files]\nread = 'yes'", "files.read must be true or false, not 'yes'", "write read = true"),
        ("[files]\nallowed = '/data'", "files.allowed must be a list of texts, not '/data'", "write allowed = ["),
        ("[files]\nallowed = [1]", "files.allowed must be a list of texts, not [1]", "write allowed = ["),
        ("[files]\nallowed = ['data']", "files.allowed: the path 'data' is not absolute", "write the whole path"),
        ("[files]\ndenied = ['/a/../b']", "files.denied: the path '/a/../b' holds '..'", "without it"),
        ("[processes]\ncommands = ['/bin/git']", "processes.commands: not the name of a command: '/bin/git'", "the name alone"),
        ("[processes]\nmax = 0", "processes.max must be a positive whole number up to", "write max = 64"),
        ("[processes]\nmax = 1.5", "processes.max must be a positive whole number", "write max = 64"),
        ("[processes]\nmax = true", "processes.max must be a positive whole number", "write max = 64"),
        ("[limits]\ntimeout_seconds = -1", "limits.timeout_seconds must be a positive number", "write timeout_seconds = 30.0"),
        ("[limits]\ntimeout_seconds = nan", "limits.timeout_seconds must be a positive number", "write timeout_seconds"),
        ("[limits]\ntimeout_seconds = inf", "limits.timeout_seconds must be a positive number", "write timeout_seconds"),
        ("[network]\nports = [70000]", "network.ports must be a list of positive whole numbers up to 65535", "write ports = [443]"),
        ("[network]\nhosts = ['https://x.example']", "network.hosts: the host 'https://x.example' is an address", "leave the scheme"),
        ("[code]\nblocked = [' ']", "code.blocked: not a pattern of code", "eval("),
        ("requires = ['magic']", "requires: there is no guarantee 'magic'", "use one of"),
        ("name = ''", "name must be a text, not ''", 'write name = "my-project"'),
        ("name = '" + "x" * 100 + "'", "name must be a text", "write name"),
        ('name = "a\\nb"', "name must be a text", "write name"),
        ("x = " + "[" * 5000, "is not TOML", "line"),
        ("#" * (LARGEST_FILE + 1), "at most", "short"),
    ],
)
def test_what_is_wrong_is_said_with_its_key_its_value_and_the_remedy(text: str, what: str, remedy: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_toml(text, origin="x.toml")
    assert caught.value.message.startswith("x.toml")
    assert what in caught.value.message
    assert remedy in caught.value.hint


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(PolicyError, match="a policy is a table"):
        from_mapping([1], origin="x")  # type: ignore[arg-type]


def test_there_is_a_preset_for_each_tier_and_each_is_a_policy_that_the_schema_takes() -> None:
    assert set(TIERS) < set(PRESETS)
    for name in PRESETS:
        assert preset(name).name == name
    with pytest.raises(PolicyError, match="there is no preset 'lowest'"):
        preset("lowest")


def test_the_published_schema_is_the_one_that_the_settings_make() -> None:
    published = json.loads((ROOT / "docs" / "policy.schema.json").read_text(encoding="utf-8"))
    assert published == json_schema(), "run: python -m scripts.write_schema"
    jsonschema.Draft202012Validator.check_schema(published)


def test_the_schema_takes_the_whole_example_and_describes_every_setting() -> None:
    import tomllib

    VALIDATOR.validate(tomllib.loads(WHOLE))
    tables = json_schema()["properties"]
    for setting in SETTINGS:
        section, dot, key = setting.key.rpartition(".")
        described = (tables[section]["properties"] if dot else tables)[key]
        assert described["description"] == setting.meaning


good: dict[Shape, list[Any]] = {
    Shape.BOOL: [True, False],
    Shape.COUNT: [1, 64, 1 << 20],
    Shape.NUMBER: [1, 0.5, 3600.0],
    Shape.TEXT: ["mine"],
    Shape.TEXTS: [[]],
    Shape.COUNTS: [[], [80, 443]],
}
items = {
    "files.allowed": ["/a", "~", "~/x", "**/*.pem", "/a/*", "data", "../x", "/a/../b", ""],
    "files.denied": ["/a", "/a\\b", "x"],
    "processes.commands": ["git", "python*", "/bin/git", ""],
    "processes.denied_commands": ["rm", "a/b"],
    "network.hosts": ["example.com", "*.example.com", "https://x.example", "a b", ""],
    "network.denied_hosts": ["example.com", "x.example/y"],
    "network.presets": ["packages", "everything"],
    "network.requests": ["GET,HEAD example.com/v1/*", "* example.com", "GET", "GET example.com/x?y", " "],
    "network.opaque": ["example.com:5432", "a b"],
    "network.private": ["example.com", "https://x.example"],
    "network.uninspected": ["example.com", "x y"],
    "code.blocked": ["eval(", " ", ""],
    "requires": ["memory-hard", "magic"],
}
bad: list[Any] = [None, "x\n", 0, -1, 1.5, "yes", {}, [5], ["a", 5], [[]], 1 << 50, True, []]


def values_of(setting: Any) -> st.SearchStrategy[Any]:
    if setting.key == "extends":
        return st.sampled_from([*PRESETS, "lowest", 5])
    listed = [st.lists(st.sampled_from(items[setting.key]), max_size=2)] if setting.key in items else []
    return st.one_of(st.sampled_from(good[setting.shape]), st.sampled_from(bad), *listed)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for setting in draw(st.lists(st.sampled_from(SETTINGS), max_size=3, unique=True)):
        section, dot, key = setting.key.rpartition(".")
        (made.setdefault(section, {}) if dot else made)[key] = draw(values_of(setting))
    if draw(st.integers(0, 9)) == 0:
        made[draw(st.sampled_from(["colour", "files"]))] = draw(st.sampled_from([5, {}, {"reed": True}]))
    return made


@settings(max_examples=100, deadline=None)
@given(documents())
def test_the_schema_and_the_loader_take_and_refuse_the_same(document: dict[str, Any]) -> None:
    try:
        loaded = from_mapping(document, origin="x")
        if loaded.get("extends") is not None:
            preset(loaded.get("extends"))
        taken = True
    except PolicyError:
        taken = False
    assert taken == VALIDATOR.is_valid(document), list(VALIDATOR.iter_errors(document))


@pytest.mark.parametrize(
    "intents",
    [
        {},
        {"read the web": {"hosts": ["a.example"], "for": "5m"}},
        {" a  b ": {}},
        {"": {}},
        {"  ": {}},
        {"a\x00": {}},
        {"é": {}},
        {"a": 5},
        {"a": {"hosts": "a.example"}},
        {"a": {"hosts": ["https://x"]}},
        {"a": {"presets": ["all"]}},
        {"a": {"requests": ["GET"]}},
        {"a": {"ports": [70000]}},
        {"a": {"for": "soon"}},
        {"a": {"for": 5}},
        {"a": {"always": 1}},
        {"a": {"what": 1}},
        5,
    ],
)
def test_the_schema_and_the_loader_agree_on_intents(intents: object) -> None:
    try:
        from_mapping({"intents": intents}, origin="x")
        taken = True
    except PolicyError:
        taken = False
    assert taken == VALIDATOR.is_valid({"intents": intents})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a" + ".b" * 300 + " = 1", "more than 256 dots on one line"),
        ("name = " + "[" * 5000, "too many brackets"),
        ("[processes]\nmax = " + "9" * 4000, "processes.max must be"),
    ],
    ids=["dots", "brackets", "digits"],
)
def test_a_file_that_is_made_to_be_slow_is_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        parse_toml(text, origin="x.toml")


def test_a_number_that_python_does_not_spell_out_and_a_list_without_end_are_refused_in_words() -> None:
    with pytest.raises(PolicyError, match="not a number of thousands of digits"):
        from_mapping({"limits": {"memory_mb": 10**5000}}, origin="x")
    with pytest.raises(PolicyError, match=r"processes\.commands has \d+ items; at most"):
        from_mapping({"processes": {"commands": ["git"] * 100_000}}, origin="x")
