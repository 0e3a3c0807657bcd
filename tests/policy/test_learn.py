"""From what was seen, the smallest policy: by rules that are said, never more than was asked for, and whatever names there were."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.policy.explanation import lint
from agent_sandbox.policy.files.document import Document, from_mapping, parse_toml
from agent_sandbox.policy.files.layers import effective, widened
from agent_sandbox.policy.files.settings import json_schema
from agent_sandbox.policy.learn import NAMED, Nature, Programs, RunContext, Spent, learn, request_lines
from agent_sandbox.policy.model import CLONED_LIMITS, MIB, cloned
from agent_sandbox.policy.network import network_rules, read_request
from agent_sandbox.policy.network_presets import network_of
from agent_sandbox.policy.paths import Tree, parse
from agent_sandbox.policy.programs import covers, is_pattern
from agent_sandbox.policy.proposal import Asked, Proposal, ProposedSetting, as_toml, name_pattern, pattern_of
from agent_sandbox.policy.secrets import Mask

HOME, PROJECT = "/home/ada", "/home/ada/app"
NONE: Mapping[str, Nature] = {}
GIT, LITTLE = Programs((Asked("git", "started by bash"),)), Spent(processes=1)
HIDDEN = "files.allow_hidden = false, although nothing hidden was used: a view without it is a copy, made at every start"
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


@dataclass(frozen=True)
class Seen:
    """As the observer has it."""

    kind: str
    target: str
    program: str = "/usr/bin/git"
    allowed: bool = True


def propose(*seen: Seen, natures: Mapping[str, Nature] = NONE, programs: Programs = GIT, spent: Spent = LITTLE) -> Proposal:
    """In a project of Ada's, where everything that was named is a file unless `natures` says otherwise."""
    known = {each.target: Nature.FILE for each in seen if each.kind in ("read", "write", "execute")} | dict(natures)
    rules = cloned(masks=[Mask(f"{HOME}/.ssh", "private keys")]).files
    place = RunContext(PROJECT, HOME, (PROJECT,), ("/usr", "/lib", "/tmp", "/dev", "/proc", "/etc/passwd"), rules, CLONED_LIMITS)
    return learn(seen, known, place, programs, spent)


def allowed(proposal: Proposal) -> Sequence[str]:
    found: Sequence[str] = proposal.document().get("files.allowed")
    return found


def test_a_commit_asks_for_the_project_and_a_file_of_the_home_and_each_line_says_why() -> None:
    found = propose(
        Seen("read", f"{PROJECT}/.git/config"),
        Seen("write", f"{PROJECT}/.git/index"),
        Seen("read", f"{HOME}/.gitconfig"),
        Seen("read", "/usr/share/git-core/templates"),
        Seen("write", "/dev/null"),
        spent=Spent(0.31, 0.02, 20 * MIB, 5, 4096),
    )
    assert as_toml(found, heading=("git commit",)) == (
        "# git commit\n"
        "\n"
        "[files]\n"
        "allowed = [\n"
        '  "~/app",  # the project: read and written by git\n'
        '  "~/.gitconfig",  # read by git\n'
        "]\n"
        "\n"
        "[processes]\n"
        "commands = [\n"
        '  "git",  # started by bash\n'
        "]\n"
        "max = 32  # 5 at once were used; 4 times that, rounded up, and at least 32\n"
        "\n"
        "[limits]\n"
        "timeout_seconds = 60  # 0.3 s were used; 10 times that, rounded up, and at least 60\n"
        "cpu_seconds = 60  # 0.0 s were used; 10 times that, rounded up, and at least 60\n"
        "memory_mb = 256  # 20 MiB were used; 4 times that, rounded up, and at least 256\n"
        "disk_mb = 256  # 1 MiB left at the end were used; 4 times that, rounded up, and at least 256\n"
    )
    assert found.left_out == ()
    assert found.remarks == ("git starts other programs, and does with them whatever the sandbox permits",)


def test_who_only_reads_is_not_to_write_and_who_needs_no_file_gets_none() -> None:
    assert propose(Seen("read", f"{PROJECT}/a")).document().get("files.write") is False
    assert propose(Seen("write", f"{PROJECT}/a")).document().get("files.write") is None
    place = RunContext(PROJECT, HOME, ("/tmp",), ("/usr", "/tmp"), cloned(masks=()).files, CLONED_LIMITS)
    nothing = learn((Seen("read", "/usr/lib/x"), Seen("write", "/tmp/y")), {"/usr/lib/x": Nature.FILE}, place, Programs(), Spent())
    assert nothing.document().get("files.read") is False
    assert nothing.document().get("files.allowed") is None


def test_what_was_not_there_asks_for_nothing_and_what_was_made_asks_for_its_directory() -> None:
    assert allowed(propose(Seen("read", "/data/none"), natures={"/data/none": Nature.MISSING})) == ("~/app",)
    assert allowed(propose(Seen("write", "/nowhere/x"), natures={"/nowhere/x": Nature.MISSING})) == ("~/app",)
    assert allowed(propose(Seen("write", "/data/out/x"), natures={"/data/out/x": Nature.MADE, "/data/out": Nature.MADE})) == (
        "~/app",
        "/data",
    )
    gone = propose(Seen("write", "/data/out/x"), natures={"/data/out/x": Nature.MISSING, "/data/out": Nature.DIRECTORY})
    assert allowed(gone) == ("~/app", "/data/out"), "a scratch file that is gone at the end had to be made first"
    assert allowed(propose(natures={"/data/x": Nature.MADE})) == ("~/app", "/data"), "it is enough that it changed"
    assert allowed(propose(natures={"/usr/local/x": Nature.MADE})) == ("~/app", "/usr/local"), "to be read there is not to be written there"


def test_several_names_of_one_directory_become_the_directory() -> None:
    few = [Seen("read", f"/data/deep/{name}") for name in "abc"]
    assert allowed(propose(*few)) == ("~/app", "/data/deep/a", "/data/deep/b", "/data/deep/c")
    assert allowed(propose(*few, Seen("read", "/data/deep/d"))) == ("~/app", "/data/deep")
    at_the_top = [Seen("read", f"/etc/{number:02}") for number in range(21)]
    assert len(allowed(propose(*at_the_top[:20]))) == 21
    assert allowed(propose(*at_the_top)) == ("~/app", "/etc")
    inside = propose(Seen("read", "/data/a"), Seen("read", "/data"), natures={"/data": Nature.DIRECTORY})
    assert allowed(inside) == ("~/app", "/data")


@pytest.mark.parametrize("path", ["/", "/home", HOME])
def test_a_home_and_what_is_above_it_is_never_proposed_and_that_is_said(path: str) -> None:
    found = propose(Seen("read", path, "/usr/bin/ls"), natures={path: Nature.DIRECTORY})
    assert allowed(found) == ("~/app",)
    assert found.left_out == (f"{path} (ls) would take {path} as a whole, which is never proposed", HIDDEN)
    many = propose(*(Seen("read", f"{HOME}/{number:02}") for number in range(30)))
    assert len(allowed(many)) == 31, "many of its files are still no home"


def test_a_project_that_is_a_home_cannot_be_proposed_either() -> None:
    place = RunContext(HOME, HOME, (HOME,), ("/usr",), cloned(masks=()).files, CLONED_LIMITS)
    found = learn((Seen("read", f"{HOME}/a"),), {f"{HOME}/a": Nature.FILE}, place, GIT, LITTLE)
    assert found.document().get("files.read") is False
    assert f"{HOME}, where it began, would take {HOME} as a whole, which is never proposed" in found.left_out


def test_what_was_only_named_says_so_and_each_part_of_a_line_its_reason() -> None:
    found = propose(Seen("read", "/data/a", NAMED), Seen("read", "/data/b", NAMED), Seen("read", "/data/b"), spent=Spent(processes=1))
    assert [part for line in found.lines for part in line.parts()][:4] == [
        (False, "nothing was written but scratch files"),
        ("~/app", "the project: it began here"),
        ("/data/a", "named on the command line, and without it things end differently"),
        ("/data/b", "read by git"),
    ]
    assert ProposedSetting("network.ports", (80, 443), "80 by curl").parts() == [(80, "80 by curl"), (443, "80 by curl")]
    assert ProposedSetting("processes.commands", (), "none").parts() == [((), "none")]


def test_what_a_link_leads_to_comes_with_it_unless_the_link_comes_with_a_directory() -> None:
    place = RunContext(PROJECT, HOME, (PROJECT,), ("/usr",), cloned(masks=()).files, CLONED_LIMITS)
    leads = {"/data/link": "/srv/real", f"{PROJECT}/link": "/srv/real"}
    for link, expected in ((f"{PROJECT}/link", ("~/app", "/srv/real")), ("/data/link", ("~/app", "/data/link"))):
        seen = (Seen("read", link), Seen("read", "/srv/real"))
        found = learn(seen, {each.target: Nature.FILE for each in seen}, place, GIT, LITTLE, leads)
        assert allowed(found) == expected


def test_what_no_file_can_be_called_has_no_pattern() -> None:
    assert pattern_of("/a\0b", HOME) is None and pattern_of("/a/../b", HOME) is None
    assert name_pattern("a/b") is None and name_pattern("") is None


def test_a_secret_that_was_tried_is_said_and_not_proposed() -> None:
    found = propose(Seen("read", f"{HOME}/.ssh/id", "/usr/bin/ssh", allowed=False), Seen("read", "/srv/x", "/usr/bin/cat", allowed=False))
    assert allowed(found) == ("~/app",)
    assert "~/.ssh" not in as_toml(found)
    assert found.left_out == (
        f"{HOME}/.ssh/id, which ssh tried, stays hidden (private keys); a person can show it for one run: --reveal",
        "/srv/x, which cat tried, is not to be had under the policies above",
        HIDDEN,
    )


def test_hosts_are_proposed_with_the_ports_beyond_the_webs() -> None:
    found = propose(
        Seen("resolve", "PyPI.org.", "/usr/bin/pip", allowed=False),
        Seen("connect", "pypi.org:443", "/usr/bin/pip", allowed=False),
        Seen("connect", "[2001:db8::1]:80", "/usr/bin/curl", allowed=False),
        Seen("connect", "127.0.0.1:8000", "/usr/bin/curl"),
        Seen("resolve", "db.example.com", "/usr/bin/psql", allowed=False),
        Seen("connect", "db.example.com:5432", "/usr/bin/psql", allowed=False),
        Seen("connect", "[2001:db8::2]:6379", "/usr/bin/redis-cli", allowed=False),
        Seen("connect", "192.0.2.53:53", "/usr/bin/pip", allowed=False),
        Seen("resolve", 'x"\n[files]', "/usr/bin/pip", allowed=False),
        Seen("listen", "0.0.0.0:80", "/usr/bin/python3"),
        Seen("listen", "127.0.0.1:80", "/usr/bin/python3"),
    )
    document = found.document()
    assert document.get("network.outbound") is True
    assert document.get("network.hosts") == ("2001:db8::1", "[2001:db8::2]:6379", "db.example.com:5432", "pypi.org")
    assert document.get("network.ports") is None
    said = "\n".join(found.left_out)
    assert "run with --network 2001:db8::1,[2001:db8::2]:6379,db.example.com:5432,pypi.org" in said
    assert "no name of a host" in said and "python3 waits for connections" in said
    assert {each.key for each in lint([document])} == {"processes.commands"}
    asked = network_of(document.get("network.hosts"))  # as the line that is told asks for it
    rules = effective(cloned(masks=(), network=asked), [document], home=HOME).policy.network
    tried = [("pypi.org", 443), ("db.example.com", 5432), ("2001:db8::2", 6379), ("db.example.com", 443), ("example.com", 443)]
    assert [not rules.objection(host, port) for host, port in tried] == [True, True, True, False, False]


def test_what_no_list_of_programs_can_say_is_said() -> None:
    found = propose(programs=Programs(unnameable="./configure was executed, and a list of names does not lead to it"))
    assert found.document().get("processes.commands") is None
    assert found.left_out[-1].startswith("a list of programs: ./configure")
    assert propose(programs=Programs()).document().get("processes.commands") == ()


def test_amounts_are_rounded_up_and_never_above_what_there_was() -> None:
    document = propose(spent=Spent(100.2, 7, 3000 * MIB, 9, 0)).document()
    assert document.get("limits.timeout_seconds") == 1920
    assert document.get("limits.cpu_seconds") == 120
    assert document.get("limits.memory_mb") is None, "four times as much is more than there is"
    assert document.get("processes.max") == 64


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=()), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
hostile = st.one_of(
    names, st.sampled_from(['"', "]\n[files]\nread = true", "a\\", "*", "?", "[a-z]", "[", "]", "\u202e", "\udc80", "#", "'"])
)


@given(st.lists(hostile, min_size=1, max_size=4), hostile)
def test_no_name_can_add_a_line_or_say_anything_but_itself(parts: list[str], program: str) -> None:
    path = "/data/" + "/".join(parts)
    plain = name_pattern(program)
    programs = Programs((Asked(plain, f"started by {program}"),)) if plain is not None else Programs(unnameable=program)
    found = propose(Seen("read", path, f"/opt/{program}"), programs=programs)
    text = as_toml(found, heading=(program,))
    assert all(line.isprintable() for line in text.splitlines())
    read = tomllib.loads(text)
    assert from_mapping(read, origin="x").settings == found.document().settings
    assert set(read) <= {"files", "processes", "limits"}
    VALIDATOR.validate(read)
    for pattern in read["files"]["allowed"]:
        assert parse(pattern, home=HOME) in (Tree(PROJECT), Tree(path))
    assert len(read["files"]["allowed"]) == 2 or "cannot be written" in " ".join(found.left_out)
    if plain is not None:
        assert covers((plain,), program) and not is_pattern(plain)


@given(names, names)
def test_a_pattern_stands_for_its_own_path_and_for_no_other(one: str, other: str) -> None:
    pattern = pattern_of(f"/data/{one}", HOME)
    if pattern is None:
        return
    tree = parse(pattern, home=HOME)
    assert tree == Tree(f"/data/{one}")
    assert (tree == Tree(f"/data/{other}")) == (one == other)


paths = st.lists(st.sampled_from(["a", "b", ".c", "home", "ada", "app", "data", "usr"]), min_size=0, max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)


@given(st.lists(st.tuples(st.sampled_from(["read", "write"]), paths, st.sampled_from(list(Nature))), max_size=12))
def test_all_that_was_used_is_reached_and_what_was_too_much_is_said(used: list[tuple[str, str, Nature]]) -> None:
    natures = {path: nature for _, path, nature in used}
    seen = [Seen(kind, path) for kind, path, _ in used]
    place = RunContext(PROJECT, HOME, (PROJECT,), ("/usr",), cloned(masks=()).files, CLONED_LIMITS)
    found = learn(seen, natures, place, Programs(), Spent())
    files = effective(cloned(masks=()), [found.document()], home=HOME).policy.files
    said = " ".join(found.left_out)
    for path in ("/", "/home", HOME):
        assert not files.reaches(path)
    for each in seen:
        if natures[each.target] in (Nature.FILE, Nature.DIRECTORY) and not each.target.startswith("/usr"):
            assert files.reaches(each.target) or each.target in said
            assert files.write or each.kind != "write" or each.target in said


def test_a_policy_that_is_there_is_widened_and_keeps_what_it_denies() -> None:
    own = parse_toml(
        'name = "mine"\n[files]\nallowed = ["~/app", "/data"]\nwrite = false\ndenied = ["/data/x"]\n'
        '[processes]\ncommands = ["py*"]\nallow = false\n[limits]\nmemory_mb = 64\ntimeout_seconds = 5000\nopen_files = 100\n'
        "[network]\nports = [22]\n",
        origin="agent-sandbox.toml",
    )
    learnt = propose(
        Seen("write", f"{PROJECT}/a"),
        Seen("read", "/data/b"),
        Seen("read", "/srv/c"),
        Seen("connect", "example.com:443"),
        programs=Programs((Asked("git", "started by make"), Asked("python3", "started by make"))),
    )
    document = widened(own, learnt, home=HOME).document()
    assert dict(document.settings) == {
        "name": "mine",
        "files.allowed": ("~/app", "/data", "/srv/c"),
        "files.denied": ("/data/x",),
        "processes.commands": ("py*", "git"),
        "limits.memory_mb": 256,
        "limits.timeout_seconds": 5000,
        "limits.open_files": 100,
        "network.outbound": True,
        "network.hosts": ("example.com",),
        "network.ports": (22,),
    }
    counted = parse_toml("[processes]\nmax = 40\n", origin="x")
    assert widened(counted, propose(spent=Spent()), home=HOME).document().get("processes.max") == 40, "nobody counted"
    assert widened(counted, propose(spent=Spent(processes=5000)), home=HOME).document().get("processes.max") is None


def test_a_policy_that_shows_no_files_is_widened_by_those_that_are_needed() -> None:
    own = parse_toml("[files]\nread = false\nwrite = false\n", origin="agent-sandbox.toml")
    document = widened(own, propose(Seen("write", f"{PROJECT}/a")), home=HOME).document()
    assert document.get("files.allowed") == ("~/app",)
    assert document.get("files.read") is None and document.get("files.write") is None
    nothing = Proposal((ProposedSetting("files.read", False),))
    assert widened(own, nothing, home=HOME).document().settings == own.settings


@dataclass(frozen=True)
class Sent:
    method: str
    name: str
    path: str


def requests(*sent: tuple[str, str], untold: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    left_out: list[str] = []
    lines = request_lines([Sent(method, *_halves(target)) for method, target in sent], untold, left_out)
    return tuple(each.text for line in lines for each in line.value), tuple(left_out)


def _halves(target: str) -> tuple[str, str]:
    host, slash, path = target.partition("/")
    return host, slash + path


@pytest.mark.parametrize(
    ("sent", "lines"),
    [
        ([("GET", "a.test/x"), ("GET", "a.test/x"), ("HEAD", "a.test/x")], ("GET,HEAD a.test/x",)),
        ([("GET", "a.test/"), ("POST", "b.test/y")], ("GET a.test/", "POST b.test/y")),
        ([("GET", "a.test/users/123/posts")], ("GET a.test/users/*",)),
        ([("GET", "a.test/o/5f0c2d9e-77aa-4b1c-9d3e-2f1a0b9c8d7e")], ("GET a.test/o/*",)),
        ([("GET", "a.test/deadbeef/x")], ("GET a.test/deadbeef/x",)),
        ([("GET", "a.test/v1/facade1234")], ("GET a.test/v1/*",)),
        ([("GET", f"a.test/d/{name}") for name in "abcdef"], ("GET a.test/d/*",)),
        ([("GET", f"a.test/d/{name}") for name in "abcde"], tuple(f"GET a.test/d/{name}" for name in "abcde")),
        ([("GET", f"a.test/d/{name}") for name in "abcdef"] + [("POST", "a.test/d/a")], ("GET a.test/d/*", "POST a.test/d/a")),
        ([("GET", "a.test/x/1"), ("GET", "a.test/x/y")], ("GET a.test/x/*",)),
        ([("GET", "a.test/a*b/c")], ("GET a.test/*",)),
    ],
)
def test_requests_are_proposed_by_method_and_path_and_identifiers_become_a_star(
    sent: list[tuple[str, str]], lines: tuple[str, ...]
) -> None:
    found, left_out = requests(*sent)
    assert found == lines and left_out == ()
    rules = network_rules(outbound=True, requests=map(read_request, found))
    assert all(not rules.request_objection(*_halves(target)[:1], method, _halves(target)[1]) for method, target in sent)
    seen = {(_halves(target)[0], method) for method, target in sent}
    for host in ("a.test", "b.test"):
        for method in ("GET", "HEAD", "POST", "DELETE"):
            if any(name == host for name, _ in seen) and (host, method) not in seen:
                assert all(rules.request_objection(host, method, _halves(target)[1]) for _, target in sent), "never another method"


def test_requests_that_cannot_be_told_are_not_proposed_and_that_is_said() -> None:
    found, left_out = requests(("GET", "a.test"), ("GET", "a.test/x"), ("M-SEARCH", "b.test/"), ("GET", "c.test/x"))
    assert found == ("GET c.test/x",) and len(left_out) == 2 and "a.test" in left_out[0] and "M-SEARCH" in left_out[1]
    found, left_out = requests(("GET", "a.test/x"), untold=3)
    assert found == () and "3 more" in left_out[0]


def test_learnt_requests_do_not_narrow_what_a_person_wrote() -> None:
    asked = tuple(Asked(text, "sent") for text in ("GET open.test/x", "GET ruled.test/x", "GET new.test/x"))
    hosts = tuple(Asked(text, "by curl") for text in ("open.test", "ruled.test", "new.test"))
    learnt = Proposal((ProposedSetting("network.hosts", hosts), ProposedSetting("network.requests", asked)))
    own = Document((("network.hosts", ("*.test", "open.test", "ruled.test")), ("network.requests", ("POST ruled.test/y",))), "own")
    assert widened(own, learnt, home=HOME).document().get("network.requests") == ("POST ruled.test/y", "GET ruled.test/x")
    few = Document((("network.hosts", ("open.test",)),), "own")
    assert widened(few, learnt, home=HOME).document().get("network.requests") == ("GET ruled.test/x", "GET new.test/x")
    everything = Document((("network.outbound", True),), "own")
    assert widened(everything, learnt, home=HOME).document().get("network.requests") is None
