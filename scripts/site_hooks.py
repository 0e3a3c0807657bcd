"""Hooks of the site: add the documents at the top of the checkout as pages, and turn their links into links of the site.

The documents are written for readers of the repository. A link to another document becomes one to its page; a link to a source file or a
test has no page, and its text stays, with the name of the test to be seen when one points at it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AT_THE_TOP = ("THREATS.md", "SPECIFICATION.md", "CHANGELOG.md", "CONTRIBUTING.md")
PAGES = {"README.md": "index.md", "docs/adr": "decisions.md", **{name: name for name in AT_THE_TOP}}

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\n)*?)\]\((?!\w+:|#)([^)\s]+)(?: \"([^\"]*)\")?\)")
REFERENCE = re.compile(r"\[([^\[\]]+)\]\[([\w.]+)\]")
DEFINITION = re.compile(r"^\[([\w.]+)\]: (\S+) \"(\w+)\"\n", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the documents at the top."""
    from mkdocs.structure.files import File  # only there when a site is built

    for name in AT_THE_TOP:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the links those of the site."""
    return for_the_site(markdown, page.file.src_uri)


def for_the_site(markdown: str, page: str) -> str:
    """The text of a page of the site, by its place below `docs/`, with links that lead to pages only."""
    tests = {name: f"{path}::{test}" for name, path, test in DEFINITION.findall(markdown)}
    text = DEFINITION.sub("", markdown)
    text = REFERENCE.sub(lambda found: _named(found[1], tests[found[2]]) if found[2] in tests else found[0], text)
    return _outside_code(text, lambda prose: LINK.sub(lambda found: _link(found, page), prose))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change links, whose text may be code, and leave blocks of code alone."""
    blocks = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in blocks.split(text))


def _link(found: re.Match[str], page: str) -> str:
    words, link, title = found[1], found[2], found[3]
    path, _, fragment = link.partition("#")
    here = posixpath.dirname(page if page in AT_THE_TOP else f"docs/{page}")
    there = posixpath.normpath(posixpath.join(here, path))
    target = PAGES.get(there) or (there.removeprefix("docs/") if there.startswith("docs/") else None)
    if target is None:
        return _named(words, f"{there}::{title}" if title else there)
    relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
    return f"[{words}]({relative}{'#' + fragment if fragment else ''})"


def _named(words: str, name: str) -> str:
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", words)
    return f'<span title="{name}">{shown}</span>'
