"""Record the demonstrations of the README and of a guide: really run the commands on a terminal, and draw what it showed as an SVG.

The commands run in a project and a home directory made for them. The picture calls that home `/home/ada`, so that no name of a machine is
in it. With `--check` nothing is written, and the exit code says whether the recordings are still what the programs print.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guides" / "find-a-mistake.md"
HOME = "/home/ada"
COLUMNS = 100
QUESTION = re.compile(rb"\[[yY]/[nN]\]\s*$|\[s\]elect files\s*$|\? *$")
# The digest of changes covers their paths, and the directory has another name each time.
DIGEST, SAMPLE = re.compile(r"\b[0-9a-f]{32}\b"), "3f9a12c07b5e4d6688f0c1a2b3d4e5f6"
LONGEST = 60.0  # seconds of silence after which a step counts as hung

PROGRESS = re.compile(r"\r\x1b\[K(?:[^\r\n]*(?=\r\x1b\[K))?")  # a line that is gone when the next one is written
ESCAPE = re.compile(r"\x1b\[([\d;]*)m|\x1b\[[?!\d;]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")
COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "35": "#d2a8ff", "36": "#76e3ea", "90": "#8b949e"}
CELL, LINE, MARGIN, BAR = 8.43, 20, 18, 34
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
TYPED, PLAIN, DIM, BACK = "#ffffff", "#c9d1d9", "#8b949e", "#0d1117"

Span = tuple[str, str, bool]  # text, colour, bold
Line = tuple[Span, ...]


@dataclass(frozen=True)
class Recording:
    """A picture of a terminal. `make` makes a project in a home directory; each step is what is typed, and the answer to a question."""

    place: Path
    title: str
    make: Callable[[Path], Path]
    steps: tuple[tuple[str, str], ...]


def main() -> int:
    """Record, and write or compare."""
    changed = 0
    for recording in RECORDINGS:
        drawn = draw(recording.title, record(recording))
        if "--check" not in sys.argv[1:]:
            recording.place.write_text(drawn, encoding="utf-8")
        elif recording.place.read_text(encoding="utf-8") != drawn:
            changed = 1
    return changed


def record(recording: Recording) -> list[tuple[str, list[Line]]]:
    """Run every step, and return what was typed and the lines that the terminal then showed."""
    # In the checkout: below /tmp or /var/tmp, changes would count as scratch files.
    (ROOT / "build").mkdir(exist_ok=True)
    top = Path(tempfile.mkdtemp(prefix="demo.", dir=ROOT / "build"))
    try:
        project = recording.make(top)
        shown = [(typed, _run(typed, answer, project, top)) for typed, answer in recording.steps]
        return [(typed, _lines(DIGEST.sub(SAMPLE, output).replace(str(top), HOME))) for typed, output in shown]
    finally:
        for folder, names, _ in os.walk(top):  # the kernel leaves directories of overlays that nobody may enter
            for name in names:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o700)
        shutil.rmtree(top)


def _shop(top: Path) -> Path:
    """A home with photos, a key, and a project."""
    project = top / "shop"
    for folder in (project / ".git", top / "photos", top / ".ssh"):
        folder.mkdir(parents=True)
    (project / "stock.txt").write_text("apples 3\npears 5\n", encoding="utf-8")
    (top / ".ssh" / "id_ed25519").write_text("a private key\n", encoding="utf-8")
    for name in ("beach.jpg", "lake.jpg"):
        (top / "photos" / name).write_bytes(b"\xff\xd8")
    return project


def _analysis(top: Path) -> Path:
    """A project with the program of the guide, and by itself the analysis that it runs."""
    project = top / "orders"
    project.mkdir()
    program = GUIDE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```\n")[0]
    (project / "find.py").write_text(program, encoding="utf-8")
    analysis = program.partition('"""\n')[2].partition('"""')[0].replace("\\\\", "\\")
    (project / "analysis.py").write_text(analysis, encoding="utf-8")
    return project


RECORDINGS = (
    Recording(
        ROOT / "docs" / "demo.svg",
        "A terminal: agent-sandbox run, diff, promote and undo",
        _shop,
        (
            ("cat stock.txt", ""),
            ("""agent-sandbox run "sed -i 's/pears 5/pears 4/' stock.txt; rm -r ~/photos; cat ~/.ssh/id_ed25519" """.strip(), ""),
            ("agent-sandbox diff", ""),
            ("cat stock.txt; ls ~/photos    # the real files", ""),
            ("agent-sandbox promote", "y"),
            ("cat stock.txt", ""),
            ("agent-sandbox undo --yes", ""),
        ),
    ),
    Recording(
        ROOT / "docs" / "find-a-mistake.svg",
        "A terminal: an analysis of ten steps, and three fixes of the seventh",
        _analysis,
        (('grep -n "" analysis.py', ""), ("python find.py    # looks at the state before the error, and tries three fixes from there", "")),
    ),
)


def _run(typed: str, answer: str, project: Path, home: Path) -> str:
    """Run one command on a terminal, and return what it shows."""
    ours, theirs = pty.openpty()
    environment = {
        **{"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home), "TERM": "xterm-256color", "LANG": "C.UTF-8"},
        **{"PAGER": "cat", "COLUMNS": str(COLUMNS), "LINES": "40"},
        **{f"XDG_{kind}_HOME": str(home / ".local" / kind.lower()) for kind in ("STATE", "DATA", "CACHE", "CONFIG")},
    }
    with open(ours, "r+b", buffering=0) as terminal:
        # Safe: the words are those above, and a session of its own makes this terminal the only one they can reach.
        process = subprocess.Popen(
            ["bash", "-c", typed], cwd=project, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        shown, asked = b"", False
        for chunk in _chunks(terminal.fileno()):
            shown += chunk
            if answer and not asked and QUESTION.search(shown):
                asked = True
                os.write(terminal.fileno(), f"{answer}\n".encode())
        process.wait()
    return PROGRESS.sub("", shown.decode())


def _chunks(fd: int) -> Iterator[bytes]:
    while select.select([fd], [], [], LONGEST)[0]:
        try:
            chunk = os.read(fd, 1 << 16)
        except OSError:  # a terminal whose other side is closed
            return
        if not chunk:
            return
        yield chunk
    raise SystemExit("record_demo: a command does not end")


def _lines(shown: str) -> list[Line]:
    """The lines of an output, with the colours that its escape sequences give."""
    colour, bold, lines = PLAIN, False, []
    for raw in shown.rstrip("\r\n").split("\n"):
        spans: list[Span] = []
        end = 0
        for sequence in ESCAPE.finditer(raw):
            spans.append((raw[end : sequence.start()], colour, bold))
            end = sequence.end()
            for code in (sequence[1] or "0").split(";") if sequence[1] is not None else ():
                bold = code == "1" or (bold and code != "0" and code != "22")
                colour = COLOURS.get(code, PLAIN if code in ("", "0", "39") else DIM if code == "2" else colour)
        spans.append((raw[end:], colour, bold))
        lines.append(tuple(span for span in spans if span[0]))
    return lines


def draw(title: str, steps: list[tuple[str, list[Line]]]) -> str:
    """An SVG in which the lines appear one after the other. Where nothing moves, all of them are there."""
    drawn: list[str] = []
    clock, row = 0.4, 0.0
    for typed, lines in steps:
        for number, part in enumerate(_wrapped((("$ ", COLOURS["32"], True), (typed, TYPED, True)))):
            drawn.append(_text(part, row + number, clock))
        row, clock = row + len(_wrapped((("$ ", DIM, True), (typed, TYPED, True)))), clock + 0.9
        for line in lines:
            for part in _wrapped(line):
                drawn.append(_text(part, row, clock))
                row, clock = row + 1, clock + 0.12
        row, clock = row + 0.4, clock + 0.9
    width, height = round(COLUMNS * CELL + 2 * MARGIN), round(BAR + row * LINE + MARGIN)
    dots = "".join(f'<circle cx="{20 + 18 * n}" cy="17" r="5.5" fill="{c}"/>' for n, c in enumerate(("#ff5f57", "#febc2e", "#28c840")))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            f"<title>{title}</title>",
            "<style>",
            f"text {{ font: 14px {FONT}; white-space: pre; }}",
            ".b { font-weight: 600; }",
            "@keyframes appear { from { opacity: 0; } to { opacity: 1; } }",
            "g { animation: appear 0.15s both; }",
            "@media (prefers-reduced-motion: reduce) { g { animation: none; } }",
            "</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{BACK}"/>{dots}',
            *drawn,
            "</svg>\n",
        )
    )


def _wrapped(line: Line) -> list[Line]:
    """A line as a terminal breaks it."""
    rows: list[list[Span]] = [[]]
    room = COLUMNS
    for words, colour, bold in line:
        text = words
        while text:
            if not room:
                rows.append([])
                room = COLUMNS
            rows[-1].append((text[:room], colour, bold))
            text, room = text[room:], room - len(text[:room])
    return [tuple(row) for row in rows]


def _text(line: Line, row: float, at: float) -> str:
    spans, column = [], 0
    for words, colour, bold in line:
        where = f'x="{MARGIN + column * CELL:.1f}" textLength="{len(words) * CELL:.1f}"'
        spans.append(f'<tspan {where} fill="{colour}"{" class=" + chr(34) + "b" + chr(34) if bold else ""}>{escape(words)}</tspan>')
        column += len(words)
    return f'<g style="animation-delay:{at:.2f}s"><text y="{BAR + 18 + row * LINE:.0f}" xml:space="preserve">{"".join(spans)}</text></g>'


if __name__ == "__main__":
    sys.exit(main())
