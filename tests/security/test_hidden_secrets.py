"""Attacks on what is found and hidden before a run: secrets deep in a project, credentials of unknown tools, files that git tracks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from agent_sandbox.assembly import Assembly, Host
from agent_sandbox.policy.model import cloned
from agent_sandbox.workspace.secret_search import NOT_SEARCHED
from tests.policy.test_secret_content import HEX, pem
from tests.security.conftest import Tell
from tests.security.harness import Box, case, meanwhile, reading

KEY = b"CANARY\n" + pem(b"PRIVATE KEY")


def searched(box: Box) -> Box:
    """The box with the masks that the command line would give it now."""
    state, cache, keys, config = (str(box.project.parent / name) for name in ("state", "cache", "keys", "config"))
    host = Host(str(box.home), state, cache, keys, config, search_path="/usr/bin:/bin")
    return box.with_(policy=cloned(masks=Assembly(host).masks_for(str(box.project)), limits=box.limits))


def put(top: Path, path: str | bytes, content: bytes = b"CANARY") -> Path:
    place = top / os.fsdecode(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    return place


def git(box: Box, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(box.project), *identity, *words], check=True, capture_output=True)


_EVERYWHERE = """
import json, os
found = []
for top in TOPS:
    for directory, below, names in os.walk(top):
        for name in names:
            try:
                with open(os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
                    if b"CANARY" in (file.read(1 << 16) or b""):
                        found.append(os.path.join(directory, name))
            except OSError:
                pass
print(json.dumps(found))
"""


def anywhere(*tops: Path) -> str:
    """A probe that reads every file below some directories, and says which hold a canary."""
    return _EVERYWHERE.replace("TOPS", repr([str(top) for top in tops]))


@case(181)
def test_secrets_are_hidden_at_any_depth_and_under_any_name_that_keys_have(number: int, box: Box, tell: Tell) -> None:
    names = [
        ".env",
        ".env.production.local",
        ".env.bak",
        "prod.env",
        ".npmrc",
        ".netrc",
        "terraform.tfstate",
        "prod.tfvars",
        "secrets.yaml",
    ]
    names += [
        "credentials.json",
        "store.p12",
        "release.jks",
        "kubeconfig",
        ".htpasswd",
        ".vault-pass",
        "master.key",
        ".pypirc",
        ".dev.vars",
    ]
    keys = [
        "tls.pem",
        "tls.key",
        "tls.crt",
        "id_rsa",
        "id_ed25519",
        "deploy",
        "key.asc",
        "client.ovpn",
        "tls.pem.old",
        "service-account.json",
    ]
    for depth in ("", "a/", "a/b/c/d/e/f/"):
        for name in names:
            put(box.project, depth + name)
        for name in keys:
            put(box.project, depth + name, KEY)
    for name in ("config", "cache/token"):
        put(box.project, f"a/.ssh/{name}")
    assert searched(box).probe(anywhere(box.project)) == []
    seen = box.unmasked.probe(anywhere(box.project))
    assert len(seen) == 3 * (len(names) + len(keys)) + 2
    tell(f"none of {len(seen)} is there", control=f"without the masks {len(seen)} are read")


@case(181)
def test_a_secret_stays_hidden_while_the_machine_replaces_it(number: int, box: Box, tell: Tell) -> None:
    secret = put(box.project, "a/b/.env")
    probe = f"""
import sys
print("ready", flush=True)
sys.stdin.read()
for _ in range(2):
    try: print(open({str(secret)!r}).read())
    except OSError as error: print(error.errno)
"""
    for guarded, expected in ((searched(box), b"ready\n2\n2\n"), (box.unmasked, b"ready\nCANARY-2\nCANARY-2\n")):
        with meanwhile(guarded, probe) as ended:
            put(box.project, "a/b/new", b"CANARY-2").rename(secret)
        assert ended[0].stdout == expected
    tell("not found, before and after", control="without the masks the new one is read")


@case(181)
def test_a_secret_that_appears_after_the_clone_is_hidden_from_the_next_run(number: int, box: Box, tell: Tell) -> None:
    put(box.project, "a/b/app.py", b"pass")
    kept = searched(box.kept)
    assert kept.shell("echo mine > a/b/own").exit.code == 0
    secret = put(box.project, "a/b/.env")
    assert searched(kept.with_(policy=None)).probe(reading(secret)) == []
    assert kept.probe(reading(secret)) == ["CANARY"], "the control arm: the masks of the first run do not know it"
    tell("not found in the next run", control="with the masks of the run before, it is read")


@case(182)
def test_credentials_of_unknown_tools_in_a_home_are_hidden(number: int, box: Box, tell: Tell) -> None:
    put(box.home, "shared/newtool/token")
    (box.home / ".linked").symlink_to("shared/newtool")
    names = [".newagent/auth.json", ".newrc", ".config/newcloud/creds", ".config/Code/User/globalStorage/state.vscdb", ".cache/new/session"]
    names += [".local/share/new/db", ".local/state/new/log", ".local/share/jupyter/runtime/x.json", ".jupyter/jupyter_server_config.json"]
    names += [".env", ".pulumi/credentials.json", ".subversion/auth/x", ".gradle/init.d/x.gradle", ".m2/settings.xml", ".local/new/token"]
    for name in names:
        put(box.home, name)
    put(box.home, ".bashrc", b"# CANARY\nexport TOKEN=ghp_" + b"a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8\n")
    put(box.home, ".cargo/registry/crate", b"CANARY: needed for a build")
    assert searched(box).probe(anywhere(box.home)) == [str(box.home / ".cargo/registry/crate")]
    seen = box.unmasked.probe(anywhere(box.home))
    assert len(seen) == len(names) + 3 + 3
    tell(f"none of {len(seen) - 1} is there; the registry of crates is", control="without the masks all are read")


@case(183)
def test_a_guest_cannot_make_a_secret_tracked(number: int, box: Box, tell: Tell) -> None:
    put(box.project, "app.py", b"pass")
    git(box, "init", "-q")
    git(box, "add", "-A")
    git(box, "commit", "-qm", "first")
    secret = put(box.project, "web/.env", b"CANARY=1\n")
    identity = "git -c user.name=a -c user.email=a@b"
    kept = searched(box.kept)
    kept.shell(f"mkdir -p web; echo CANARY=2 > web/.env; {identity} add -f web/.env; {identity} commit -qm x; rm web/.env")
    assert searched(kept.with_(policy=None)).probe(reading(secret)) == []
    git(box, "add", "-f", "web/.env")
    assert searched(box).probe(reading(secret)) == [], "nor does the real index count"
    # The commit of a guest that somebody carried over: the name is tracked, the content is not.
    secret.write_bytes(b"CANARY=2\n")
    git(box, "add", "-f", "web/.env")
    git(box, "commit", "-qm", "of the guest")
    secret.write_bytes(b"CANARY=1\n")
    assert searched(box).probe(reading(secret)) == []
    secret.write_bytes(b"CANARY=2\n")
    assert searched(box).probe(reading(secret)) == ["CANARY=2\n"], "the control arm: it is what HEAD has"
    tell("hidden: by its own index and commit, by the real index, by a commit of other content", control="shown once it is what HEAD has")


@case(183)
def test_a_tracked_key_or_token_stays_hidden_and_it_is_said(number: int, box: Box, tell: Tell) -> None:
    key, token = put(box.project, "tests/tls.key", KEY), put(box.project, ".env.ci", b"#CANARY\nAPI_TOKEN=" + HEX[:40])
    plain = put(box.project, ".env.test", b"CANARY=1\n")
    git(box, "init", "-q")
    git(box, "add", "-fA")
    git(box, "commit", "-qm", "first")
    outcome = searched(box).python(reading(key, token, plain))
    assert json.loads(outcome.stdout) == ["CANARY=1\n"]
    said = [note for note in outcome.notes if note.startswith("hidden: ")]
    assert len(said) == 2 and any(str(key) in note for note in said) and any(str(token) in note for note in said)
    assert len(box.unmasked.probe(reading(key, token, plain))) == 3
    tell("both hidden, with a remark; the third is shown", control="without the masks all are read")


@case(184)
def test_odd_trees_hide_nothing_from_the_search_and_do_not_stop_it(number: int, box: Box, tell: Tell) -> None:
    put(box.project, b"n\new/\xff/.env")
    put(box.project, b"\xe2\x80\xae/tls.key", KEY)
    put(box.project, "--reveal/.env")
    (box.project / "pipes").mkdir()
    for name in (".env", "x.pem", "id_rsa"):
        os.mkfifo(box.project / "pipes" / name)
    (box.project / "loop").symlink_to(".")
    (box.project / "up").symlink_to("../..")
    (box.project / "zero.pem").symlink_to("/dev/zero")
    with open(put(box.project, "huge/tls.pem", KEY), "r+b") as file:
        file.truncate(1 << 40)
    place = os.open(box.project, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=place)
        place, before = os.open("d" * 200, os.O_RDONLY, dir_fd=place), place
        os.close(before)
    with open(os.open(".env", os.O_CREAT | os.O_WRONLY, dir_fd=place), "wb") as file:
        file.write(b"CANARY")
    os.close(place)
    deep = f"""
import json, os
os.chdir({str(box.project)!r})
try:
    for _ in range(30): os.chdir("d" * 200)
    print(json.dumps(open(".env").read()))
except OSError as error:
    print(error.errno)
"""
    guarded = searched(box)
    assert [mask for mask in guarded.rules.masks if mask.why == NOT_SEARCHED]
    assert guarded.probe(anywhere(box.project)) == [] and guarded.probe(deep) == 2
    assert len(box.unmasked.probe(anywhere(box.project))) == 4 and box.unmasked.probe(deep) == "CANARY"
    tell("all hidden, the too deep ones with their directory", control="without the masks all are read")
