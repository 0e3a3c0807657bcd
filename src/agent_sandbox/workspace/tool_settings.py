"""The settings in a configuration file that name code to run, read from its text. Pure.

Most edits of a `pyproject.toml` or a `setup.cfg` are harmless, so their text decides. For each folded file name, `PARTS` lists the
protected classes that may apply, each with a function that returns the part of the text that matters. A change counts if this part differs.
The functions raise ValueError, AttributeError or RecursionError for a text that they cannot parse; that counts, too, because the program
that obeys it may be able to parse it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.policy.files import document

if TYPE_CHECKING:
    from typing import Any

Part = Callable[[bytes], object]

# Settings of pytest without code in them. All others count: `addopts`, `pythonpath`, `filterwarnings` and plugins' own import modules.
_PLAIN_OF_PYTEST = frozenset(
    {
        *("testpaths", "markers", "minversion", "norecursedirs", "xfail_strict", "junit_family", "console_output_style", "timeout"),
        *("asyncio_mode", "asyncio_default_fixture_loop_scope", "python_functions", "python_classes", "empty_parameter_set_mark"),
        *("log_cli", "log_cli_level", "log_level", "log_format", "log_date_format", "log_file_level", "tmp_path_retention_policy"),
    }
)
_PLAIN_OPTIONS = (
    *(
        "-v",
        "-q",
        "-x",
        "-r",
        "-s",
        "-l",
        "-n",
        "-k",
        "-m",
        "--strict",
        "--tb=",
        "--cov=",
        "--cov-report",
        "--cov-fail-under",
        "--durations",
    ),
    *("--maxfail", "--disable-warnings", "--color", "--doctest-modules", "--showlocals", "--no-header", "--lf", "--ff", "--exitfirst"),
)
_PLUGINS = ("plugins", "load-plugins", "load_plugins", "init-hook", "init_hook", "python_executable")
_HOOKS_OF_SETUP = ("command_packages", "command-packages", "setup_hooks", "setup-hooks", "entry_points")
# Keys that name code in an INI file, in whichever section a reader finds them.
_CODE_KEYS = frozenset({*_PLUGINS, "addopts", "pythonpath", "cmdclass", "local-plugins", "distutils.commands", *_HOOKS_OF_SETUP})


def _scripts(text: bytes) -> Mapping[str, object] | None:
    manifest = json.loads(text)
    hooks = (
        "scripts",
        "husky",
        "lint-staged",
        "simple-git-hooks",
        "pre-commit",
        "gypfile",
        "packageManager",
        "trustedDependencies",
        "pnpm",
        "gitHooks",
        "nano-staged",
        "devEngines",
        "volta",
        "wireit",
    )
    return {name: value for name in hooks if (value := manifest.get(name)) is not None} or None


def _tools_of_package(text: bytes) -> object:
    """Return the settings of linters and test runners in a package.json, because they may name modules to load."""
    manifest = json.loads(text)
    tools = (
        "eslintConfig",
        "prettier",
        "babel",
        "jest",
        "vitest",
        "stylelint",
        "mocha",
        "ava",
        "xo",
        "postcss",
        "nyc",
        "tap",
        "commitlint",
        "nx",
        "tsup",
        "c8",
        "remarkConfig",
        "nodemonConfig",
        "prisma",
    )
    return {name: value for name in (*tools, "release") if (value := manifest.get(name)) is not None} or None


def _composer_scripts(text: bytes) -> object:
    manifest = json.loads(text)
    configured = manifest.get("config") or {}
    code = {"scripts": manifest.get("scripts"), "plugins": configured.get("allow-plugins"), "bin": configured.get("bin-dir")}
    return {name: value for name, value in code.items() if value is not None} or None


def _our_policy(text: bytes) -> object:
    return document.loads(text.decode()).get("tool", {}).get("agent-sandbox")


def _tools_of_pyproject(text: bytes) -> object:
    values = document.loads(text.decode())
    tool, build = values.get("tool", {}), values.get("build-system", {})
    hatch = tool.get("hatch", {})
    code: dict[str, object] = {
        "backend": (build.get("build-backend"), build.get("backend-path")),
        "entry points": values.get("project", {}).get("entry-points"),
        "pytest": _of_pytest({**tool.get("pytest", {}).get("ini_options", {})}),
        "native pytest": _of_pytest({name: value for name, value in tool.get("pytest", {}).items() if name != "ini_options"}),
        "mypy": [*_plugins(tool.get("mypy", {}))],
        "coverage": tool.get("coverage", {}).get("run", {}).get("plugins"),
        "hatch": [hatch.get(name) for name in ("build", "version", "metadata") if _has_code(hatch.get(name))],
        "poetry": tool.get("poetry", {}).get("build"),
        "environments": [*_hooks(hatch.get("envs", {}))],
        "pdm": tool.get("pdm", {}).get("build"),
        "pdm scripts": [*_hooks(tool.get("pdm", {}).get("scripts", {}))],
        "tox": tool.get("tox", {}).get("legacy_tox_ini"),
        "setuptools": tool.get("setuptools", {}).get("cmdclass"),
        "pixi": [*_activations(tool.get("pixi", {}))],
    }
    code["pylint"] = [*_plugins(tool.get("pylint", {}))]
    return {name: value for name, value in code.items() if value not in (None, [], {}, (None, None))} or None


def _has_code(values: Any) -> bool:
    return isinstance(values, dict) and ("hooks" in values or "path" in values or any(_has_code(value) for value in values.values()))


def _hooks(values: Mapping[str, Any]) -> Iterator[object]:
    """Yield the settings that run before or after something else."""
    for name, value in values.items():
        if name.startswith(("pre_", "post_", "pre-", "post-")):
            yield name, value
        elif isinstance(value, dict):
            yield from _hooks(value)


def _activations(values: Mapping[str, Any]) -> Iterator[object]:
    """Yield the scripts and variables that an environment of pixi starts with, at any depth: by feature and by platform."""
    for name, value in values.items():
        if name == "activation":
            yield value
        elif isinstance(value, dict):
            yield from _activations(value)


def _plugins(values: Mapping[str, Any]) -> Iterator[object]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _plugins(value)
        elif name in _PLUGINS:
            yield name, value


def _of_pytest(options: dict[str, Any]) -> dict[str, object]:
    code = {name: value for name, value in options.items() if name not in _PLAIN_OF_PYTEST}
    if "addopts" in code:
        words = code["addopts"] if isinstance(code["addopts"], list) else str(code["addopts"]).split()
        code["addopts"] = [word for word in words if str(word).startswith("-") and not str(word).startswith(_PLAIN_OPTIONS)]
        if not code["addopts"]:
            del code["addopts"]
        elif "-p" in code["addopts"]:
            code["addopts"] = words  # the plugin's name is the next word
    return code


def _of_ini(text: bytes) -> object:
    """Return the settings that name code in an INI file of pytest, flake8, mypy, pylint, coverage or setuptools."""
    from configparser import ConfigParser, Error  # slow to load, and few promotions have such a file

    parser = ConfigParser(interpolation=None, strict=False, allow_no_value=True, delimiters=("=", ":"))
    try:
        parser.read_string(text.decode())
    except Error as error:
        raise ValueError("it is no INI file") from error
    code: dict[str, object] = {}
    code["anywhere"] = [*_code_lines(text.decode())] or None
    for section in parser.sections():
        values = dict(parser.items(section))
        if "pytest" in section:
            code[section] = _of_pytest(values) or None
        elif section in ("flake8:local-plugins", "options.entry_points"):
            code[section] = values
        elif section == "options":
            code[section] = values.get("cmdclass")
        else:
            code[section] = [*_plugins(values)] or None
    return {section: values for section, values in code.items() if values is not None} or None


def _code_lines(text: str) -> Iterator[object]:
    """Yield the settings that name code, read line by line: the readers of INI files do not agree on where a section begins."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        key, _, value = line.replace(":", "=", 1).partition("=")
        if key.strip().lower() not in _CODE_KEYS:
            continue
        words = [value]
        for further in lines[at + 1 :]:
            if not further[:1].isspace():
                break
            words.append(further)
        yield from _of_pytest({key.strip().lower(): " ".join(words)}).items()


def _of_pytest_file(text: bytes) -> object:
    return _of_pytest({**document.loads(text.decode()).get("pytest", {})}) or None


def _of_coverage_file(text: bytes) -> object:
    values = document.loads(text.decode())
    return [*_plugins({"of a file": values.get("run", {}), "of a table": values.get("tool", {})})] or None


def _build_script(text: bytes) -> object:
    """Return what editors build and run when they open the project of a Cargo.toml: its build script, and whether it is a macro."""
    manifest = document.loads(text.decode())
    package, library = manifest.get("package", {}), manifest.get("lib", {})
    named = (package.get("build"), package.get("metabuild"), library.get("proc-macro"), library.get("proc_macro"))
    kinds = [library.get(name) for name in ("crate-type", "crate_type") if "proc-macro" in (library.get(name) or ())]
    return (*named, *kinds) if any(each is not None for each in (*named, *kinds)) else None


def _xml_with(*markers: str, whole: tuple[str, ...] = ()) -> Part:
    """Return a function that returns the elements of an XML text with one of the markers in their tag. Case does not matter.

    If there is an element whose name is in `whole`, the whole text counts, as the element is made of others. An element may span lines.
    A text that could be XML in another way than plain UTF-8 without a document type counts as a whole, too.
    """

    def part(text: bytes) -> object:
        plain = text.decode("utf-8-sig", errors="surrogateescape").lower()
        declared = plain[:200].partition("?>")[0] if plain.lstrip().startswith("<?xml") else ""
        if "\0" in plain or "<!doctype" in plain or ("encoding" in declared and "utf-8" not in declared):
            return text
        elements = [" ".join(each.split()) for each in plain.split("<")[1:]]
        if any(each.split(">")[0].split(" ")[0].rstrip("/").rpartition(":")[2] in whole for each in elements):
            return text
        return [each for each in elements if any(marker in each for marker in markers)] or None

    return part


_EXTENDS = re.compile(rb"""extends['"]?\s*:\s*(\[[^\]]{0,4000}\]|['"][^\n]{0,400})""")


def _language_plugins(text: bytes) -> object:
    """Return the whole text of a tsconfig.json if it names plugins of the language server, else the files that it builds on.

    It is not parsed, as it may have comments. Its readers take names in either quotes, and with escapes.
    """
    if any(marker in text for marker in (b"plugins", b"\\u", b"\\x", b"\0")):
        return text
    bases = [b"".join(each.split()) for each in _EXTENDS.findall(text)]
    return (bases or None) if len(bases) == text.count(b"extends") else text


def _deno_plugins(text: bytes) -> object:
    """Return the whole text of a deno.json if it names plugins of the linter, which editors start."""
    return text if any(marker in text for marker in (b"plugins", b"\\u")) else None


_INI = (("tool-config", _of_ini),)
_MSBUILD = (("editor", _xml_with("import", "analyzer", "task", "sdk", "event>", whole=("target", "usingtask"))),)
_PHPUNIT = (("tool-config", _xml_with("bootstrap", "extension", "listener")),)

PARTS: dict[str, tuple[tuple[str, Part], ...]] = {
    "package.json": (("package-scripts", _scripts), ("tool-config", _tools_of_package)),
    "composer.json": (("package-scripts", _composer_scripts),),
    "pyproject.toml": (("policy", _our_policy), ("tool-config", _tools_of_pyproject)),
    **dict.fromkeys(("setup.cfg", "tox.ini", "pytest.ini", ".pytest.ini", ".flake8", "mypy.ini", ".mypy.ini", ".coveragerc"), _INI),
    ".coveragerc.toml": (("tool-config", _of_coverage_file),),
    **dict.fromkeys(("pytest.toml", ".pytest.toml"), (("tool-config", _of_pytest_file),)),
    "cargo.toml": (("editor", _build_script),),
    "jsconfig.json": (("editor", _language_plugins),),
    **dict.fromkeys(("phpunit.xml", "phpunit.xml.dist", "phpunit.dist.xml"), _PHPUNIT),
    **dict.fromkeys(("deno.json", "deno.jsonc"), (("tool-config", _deno_plugins),)),
}
_PROJECTS = (".csproj", ".fsproj", ".vbproj", ".vcxproj", ".proj", ".csproj.user", ".fsproj.user", ".vbproj.user", ".vcxproj.user")
SUFFIXED = dict.fromkeys((*_PROJECTS, ".props", ".targets"), _MSBUILD)


def parts_of(name: str) -> tuple[tuple[str, Part], ...]:
    """Return the protected classes that a file of this name may have, each with a function that extracts the text that decides.

    `name` is folded.
    """
    if found := PARTS.get(name):
        return found
    if name.startswith("tsconfig") and name.endswith(".json"):
        return (("editor", _language_plugins),)
    return next((parts for suffix, parts in SUFFIXED.items() if name.endswith(suffix)), ())
