"""Writing from a locked sandbox: below /tmp by every common spelling, elsewhere by none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox import Sandbox, SandboxStatus

# Each writes "written" to the path PLACE, as a literal.
SPELLINGS = {
    "open": "open(PLACE, 'w').write('written')",
    "with-open": "with open(PLACE, 'w') as file:\n    file.write('written')",
    "write_text": "from pathlib import Path\nPath(PLACE).write_text('written')",
    "write_bytes": "import pathlib\npathlib.Path(PLACE).write_bytes(b'written')",
    "path-open": "from pathlib import Path\nwith Path(PLACE).open('w') as file:\n    file.write('written')",
    "os-open": "import os\nos.write(os.open(PLACE, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), b'written')",
    "io-open": "import io\nio.open(PLACE, 'w').write('written')",
    "codecs": "import codecs\ncodecs.open(PLACE, 'w', 'utf-8').write('written')",
    "shutil": "import os, shutil, tempfile\nfd, name = tempfile.mkstemp()\nos.write(fd, b'written')\nshutil.copy(name, PLACE)",
    "numpy": "import numpy\nnumpy.savetxt(PLACE, ['written'], fmt='%s')",
    "pandas": "import pandas\npandas.Series(['written']).to_csv(PLACE, index=False, header=False)",
}
TEMPORARY = {
    "directory": "import os, tempfile\nwith tempfile.TemporaryDirectory() as place:\n    open(os.path.join(place, 'x'), 'w').write('x')",
    "path": "import pathlib, tempfile\nwith tempfile.TemporaryDirectory() as place:\n    (pathlib.Path(place) / 'x').write_text('x')",
    "named": "import tempfile\nwith tempfile.NamedTemporaryFile() as file:\n    open(file.name).read()",
    "loop": "for number in range(3):\n    open(f'/tmp/{number}.txt', 'w').close()",
}


def _source(spelling: str, place: object) -> str:
    module = "pandas" if "pandas" in spelling else "numpy" if "numpy" in spelling else ""
    if module:
        pytest.importorskip(module)
    return SPELLINGS[spelling].replace("PLACE", repr(str(place)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_writes_below_tmp(spelling: str) -> None:
    look = "\nprint(open('/tmp/made').read().strip())"
    done = Sandbox().execute(_source(spelling, "/tmp/made") + look)
    assert (done.status, done.stdout) == (SandboxStatus.COMPLETED, "written\n"), (done.error, done.stderr)


@pytest.mark.parametrize("spelling", TEMPORARY)
def test_temporary_files_and_directories_are_below_tmp(spelling: str) -> None:
    done = Sandbox().execute(TEMPORARY[spelling])
    assert done.status is SandboxStatus.COMPLETED, (done.error, done.stderr)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("validate_code", [True, False], ids=["checked", "unchecked"])
def test_no_spelling_writes_elsewhere(spelling: str, validate_code: bool, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    source = _source(spelling, canary)
    done = Sandbox(validate_code=validate_code).execute(source)
    assert done.status is SandboxStatus.FAILED and canary.read_text() == "untouched"
    subprocess.run([sys.executable, "-c", source], check=True)
    assert canary.read_text().strip() == "written", "without a sandbox the same code writes"


@pytest.mark.parametrize(("spelling", "named"), [("write_text", "pathlib.Path.write_text"), ("os-open", "os.open"), ("open", "open(")])
def test_a_refusal_names_what_was_tried(spelling: str, named: str) -> None:
    done = Sandbox().execute(_source(spelling, "/etc/made"))
    assert done.error is not None and f": {named} uses a file" in done.error and "below /tmp" in done.error
