"""Files below /tmp, which a sandbox always has: every common spelling is permitted, and what may lie elsewhere is not."""

from __future__ import annotations

import pytest

from agent_sandbox.policy.code.validate import validate

BELOW = [
    'from pathlib import Path; Path("/tmp/a").write_text("x")',
    'open("/tmp/a","w").write("x")',
    'import os; os.open("/tmp/a",66)',
    'from pathlib import Path; p=Path("/tmp"); (p/"a.txt").write_text("x"); print((p/"a.txt").read_text())',
    'from pathlib import Path; p=Path("/tmp")/"a"; p.mkdir(); q=p/"b"; q.write_bytes(b"x"); isinstance(q, Path)',
    'import pathlib; pathlib.Path("/tmp","a").open("w")',
    'import tempfile, os; d=tempfile.mkdtemp(); open(os.path.join(d,"x"),"w")',
    'import tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n  open(os.path.join(d,"x"),"w"); open(f"{d}/x"); open(d+"/x")',
    "import tempfile; f=tempfile.NamedTemporaryFile(); open(f.name)",
    'import tempfile; fd, n = tempfile.mkstemp(); open(n,"w")',
    'for i in range(3):\n  open(f"/tmp/{i}.txt","w"); open("/tmp/"+str(i),"w"); open("/tmp/%d" % 3)',
    'OUT="/tmp/out.csv"\nwith open(OUT, "w") as f: f.write("x")',
    'import io, codecs; io.open("/tmp/a"); codecs.open("/tmp/a", "r", "utf8")',
    'from tempfile import TemporaryDirectory\nfrom pathlib import Path\nwith TemporaryDirectory() as d:\n  (Path(d)/"x").write_text("1")',
    'open(file="/tmp/a", mode="w")',
    'from pathlib import Path; Path("/tmp/a").rename("/tmp/b")',
    'import tempfile; open(tempfile.gettempdir()+"/a","w")',
]

ELSEWHERE = [
    'from pathlib import Path; Path("/etc/a").write_text("x")',
    'open("/tmp/../etc/passwd")',
    'open("/tmpx")',
    'open("/tmp")+open("/etc/passwd")',
    'open("/tmp" + "x")',
    'open("/tmp/a"); open("/etc/a")',
    'f=open; f("/tmp/a")',
    'f=open; f("/etc/a")',
    "def g(p): open(p)",
    'p="/tmp/a"; p=input(); open(p)',
    'import os; os.open("/tmp/a", 0, dir_fd=3)',
    'open("/tmp/a", opener=lambda p,f: 3)',
    'open(*["/tmp/a"])',
    'open("/tmp/a", **{})',
    'from pathlib import Path; Path("/tmp/a").symlink_to("/etc/passwd")',
    'from pathlib import Path; (Path("/tmp")/"/etc/passwd").read_text()',
    'from pathlib import Path; Path("/tmp","/etc/passwd").read_text()',
    'from pathlib import Path; Path("/tmp").joinpath("..","etc","passwd").read_text()',
    'import os; open(os.path.join("/tmp","/etc/passwd"))',
    'import os; open(os.path.join("/tmp",input()))',
    'open(f"/tmp/{input()}")',
    'import tempfile; d=tempfile.mkdtemp(dir="/etc"); open(d+"/x")',
    'import tempfile; d=tempfile.mkdtemp("","../etc/"); open(d+"/x")',
    'for x in ["../etc"]: open(f"/tmp/{x}")',
    'x=3\nfor i in range(3): pass\ni=input(); open(f"/tmp/{i}")',
    'from pathlib import Path; p=Path; p("/etc/passwd").read_text()',
    'open("x")',
    "open(3)",
    'from pathlib import Path; p=Path("/tmp/a"); p=Path("/etc/a"); p.read_text()',
    'def f(d="/tmp"): open(d+"/x")',
    'with open("/tmp/a") as d: open(d)',
    "import tempfile\nwith tempfile.NamedTemporaryFile() as d: open(d)",
    "open(f\"{'/tmp'}x\")",
    'd="/tmp"; open(f"{d}x"); ',
    'd="/tmp"; i=0\nfor i in range(2): open(d+str(i))',
    "open(f\"/tmp/{'.'}{'.'}/x\")",
]


@pytest.mark.parametrize("source", BELOW)
def test_a_call_that_stays_below_tmp_meets_no_pattern(source: str) -> None:
    assert validate(source).issues == ()
    assert validate(source, more=["open(", "pathlib.Path.write_text", "os.open"]).issues or "open(" not in source, (
        "a pattern set by hand stays"
    )


@pytest.mark.parametrize("source", ELSEWHERE)
def test_a_call_that_may_lead_elsewhere_meets_the_pattern(source: str) -> None:
    assert [issue.pattern for issue in validate(source).issues] == ["open("]


@pytest.mark.parametrize(
    ("source", "tried"),
    [
        ("from pathlib import Path\nPath('/etc/x').write_text('')", "pathlib.Path.write_text"),
        ("import os\nos.open('/etc/x', 1)", "os.open"),
        ("import io\nio.open('/etc/x')", "io.open"),
        ("import subprocess as sp\nsp.run(['ls'])", "subprocess"),
        ("open('/etc/x')", ""),
    ],
)
def test_an_issue_names_what_the_program_tried(source: str, tried: str) -> None:
    assert validate(source).issues[0].tried == tried
