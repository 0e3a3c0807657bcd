"""Write the pages of the documentation that are made from the code. A test compares them with what this makes.

The pages are `docs/reference/` (command line, documents of --json, policy file, Python), `docs/schemas/` and `docs/decisions.md`. For the
Python page sources are parsed, because how an imported default value is printed depends on the version of the interpreter.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import agent_sandbox
from agent_sandbox.cli.grammar import COMMON, OPTIONS, VERBS, Option
from agent_sandbox.cli.manual import MANUAL
from agent_sandbox.policy.files.presets import PRESETS, TIERS
from agent_sandbox.policy.files.settings import INTENT_SETTINGS, SETTINGS, Setting
from agent_sandbox.workspace.protected import CLASSES
from scripts.result_schemas import result_types, schema_of, summary

DOCS = Path(__file__).resolve().parents[1] / "docs"
SOURCE = Path(agent_sandbox.__file__).parent
MADE = "<!-- Made by scripts/write_reference.py from the code: change that, then run `make reference`. -->\n"


def pages() -> dict[Path, str]:
    """Every page that is made, and its text."""
    made = {
        "reference/command-line.md": command_line(),
        "reference/json.md": json_documents(),
        "reference/policy-file.md": policy_file(),
        "reference/python-api.md": python_api(),
        "decisions.md": decisions(),
    }
    texts = {DOCS / name: MADE + "\n" + "\n".join(lines).rstrip() + "\n" for name, lines in made.items()}
    schemas = {kind: json.dumps(schema_of(kind, result), indent=2) + "\n" for kind, result in result_types().items()}
    return texts | {DOCS / "schemas" / f"{kind}.json": text for kind, text in schemas.items()}


def json_documents() -> Iterator[str]:
    """Every kind of document that --json prints."""
    yield from ("# Documents of `--json`", "")
    yield from ("```console", "$ agent-sandbox --json run -- true | jq '.schema, .exit'", '"agent-sandbox/run/1"', "0", "```", "")
    yield "With `--json` every verb prints one JSON document on standard output, in ASCII. Messages stay on standard error."
    yield "Its field `schema` names the kind and the version of the document. The exit code is the same as without `--json`."
    yield "A failure prints a document of the kind `error`."
    yield from ("", "Text that is not UTF-8 is never lost: after a path `NAME` stands `NAME_hex`, after output `NAME_base64`.", "")
    yield from ("Each kind has a JSON Schema (draft 2020-12).", "", "| kind | the document |", "|---|---|")
    yield from (f"| [`{kind}`](../schemas/{kind}.json) | {_cell(summary(result))} |" for kind, result in result_types().items())


def command_line() -> Iterator[str]:
    """Every verb with its options."""
    yield from ("# Command line", "", "Options may stand before or after the verb. `agentbox` is the same program.", "")
    yield from ("| verb | what it does |", "|---|---|")
    yield from (f"| [`{name}`](#{name}) | {_cell(verb.summary)} |" for name, verb in VERBS.items())
    yield from ("", "## Options of every verb", "", *_options(COMMON))
    for name, verb in VERBS.items():
        yield from ("", f"## {name}", "", f"{verb.summary[0].upper()}{verb.summary[1:]}.", "")
        yield from ("```text", f"agent-sandbox {verb.usage}", "```")
        if name in MANUAL:
            yield from ("", "```text", MANUAL[name], "```")
        if verb.options:
            yield from ("", *_options(verb.options, verb.helps))
    yield from (
        "",
        "## Protected kinds",
        "",
        "Names for `--approve`. A change of such a kind is promoted only if its kind was approved.",
        "",
    )
    yield from ("| kind | reason |", "|---|---|")
    yield from (f"| `{name}` | {_cell(reason)} |" for name, reason in CLASSES.items())


def _options(names: tuple[str, ...], helps: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    yield from ("| option | meaning |", "|---|---|")
    for name in names:
        yield f"| {_spelling(OPTIONS[name])} | {_cell(helps.get(name, OPTIONS[name].help))} |"


def _spelling(option: Option) -> str:
    value = f" {option.value}" if option.value else ""
    return ", ".join(f"`{_cell(spelling + value)}`" for spelling in (option.name, *option.short))


def policy_file() -> Iterator[str]:
    """Every setting of a policy file, and the presets."""
    yield from ("# Policy file", "")
    yield from ("```toml", "# agent-sandbox.toml", 'extends = "medium"', "", "[files]", 'denied = ["~/private"]', "", "[limits]")
    yield from ("timeout_seconds = 600", "", "[approvals]", 'commands = ["git push **"]', "```", "")
    yield "A policy file is TOML. A key such as `files.denied` is `denied` in the table `[files]`. Every key is optional."
    yield "An unknown key is an error. [The guide](../guides/policies.md) says where files are looked for;"
    yield "[the JSON Schema](../policy.schema.json) is for editors."
    tables = dict.fromkeys(setting.key.rpartition(".")[0] for setting in SETTINGS)
    for table in tables:
        yield from ("", f"## {table}" if table else "## At the top", "", _SETTINGS_HEAD, "|---|---|---|---|")
        yield from (_setting(setting) for setting in SETTINGS if setting.key.rpartition(".")[0] == table)
    yield from ("", "## intents", "", 'A table `[intents."NAME"]` for each: see [the guide](../guides/network.md#intents).')
    yield from ("", _SETTINGS_HEAD, "|---|---|---|---|", *map(_setting, INTENT_SETTINGS))
    yield from ("", "## Presets", "", "For `extends` and `--policy`.", "")
    yield from (f"- `{name}`{', a tier of trust' if name in TIERS else ''}" for name in PRESETS)


_SETTINGS_HEAD = "| key | value | meaning | example |"


def _setting(setting: Setting) -> str:
    one_of = f": {', '.join(f'`{each}`' for each in setting.one_of)}" if setting.one_of else ""
    return f"| `{setting.key}` | {setting.shape.value}{one_of} | {_cell(setting.meaning)} | `{_cell(setting.example)}` |"


def python_api() -> Iterator[str]:
    """Every public name, as its source defines and explains it."""
    yield from ("# Python", "", "Everything here is imported from `agent_sandbox`.", "", "| name | |", "|---|---|")
    found = {name: _definition(name) for name in agent_sandbox.__all__}
    for name, node in found.items():
        yield f"| [`{name}`](#{_heading(node).lower().replace(' ', '-').replace('(', '').replace(')', '')}) | {_cell(_first_line(node))} |"
    for node in found.values():
        yield from ("", f"## {_heading(node)}", "", "```text", _signature(node), "```")
        if docstring := ast.get_docstring(node):
            yield from ("", "```text", docstring, "```")
        if isinstance(node, ast.ClassDef):
            public = [each for each in node.body if isinstance(each, _FUNCTIONS) and not each.name.startswith("_")]
            if public:
                yield from ("", "| method | |", "|---|---|")
                yield from (f"| `{_cell(_signature(each))}` | {_cell(_first_line(each))} |" for each in public)


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definition(name: str) -> Definition:
    """Where a public name is defined, which may be further down than where it is imported from."""
    file = inspect.getsourcefile(getattr(agent_sandbox, name))
    assert file is not None and Path(file).is_relative_to(SOURCE)
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, Definition) and node.name == name)


def _heading(node: Definition) -> str:
    """Two names that differ only in their first letter have different headings."""
    return node.name if isinstance(node, ast.ClassDef) else f"{node.name} (function)"


def _first_line(node: Definition) -> str:
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign | ast.Assign) and not _target(each).startswith("_")]
        return "\n".join(
            [f"class {node.name}({bases})" if bases else f"class {node.name}", *(f"    {ast.unparse(each)}" for each in fields)]
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
        return f"{node.name}{returns}"
    return f"{prefix}{node.name}({ast.unparse(node.args)}){returns}"


def _target(node: ast.AnnAssign | ast.Assign) -> str:
    return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])


def decisions() -> Iterator[str]:
    """The decision records, by their titles."""
    yield from (
        "# Decisions",
        "",
        "One decision a page: context, choice, and what was given up. A record is never edited, only superseded.",
        "",
    )
    for record in sorted((DOCS / "adr").glob("*.md")):
        number, _, title = record.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        yield f"{number}. [{title}](adr/{record.name})"


def _cell(text: str) -> str:
    """For a cell of a table, in which a bar would begin the next one."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for place, text in pages().items():
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8")
