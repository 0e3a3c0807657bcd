"""The search finds what holds a secret, wherever in a project it lies, and says what it could not search."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from agent_sandbox.workspace.secret_search import NOT_SEARCHED, TOO_MANY, SearchLimits, SearchMemory, SecretFiles, hidden_in_project
from tests.policy.test_secret_content import HEX, pem

PRIVATE, CERTIFICATE = pem(b"PRIVATE KEY"), pem(b"CERTIFICATE")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    top.mkdir()
    return top


def put(top: Path, path: str | bytes, content: bytes = b"A=1") -> Path:
    place = top / os.fsdecode(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    return place


def search(top: Path, memory: Path | None = None, **options: object) -> SecretFiles:
    known = SearchMemory(str(memory or top.parent / "memory"), now_ns=lambda: 1 << 62)
    found = hidden_in_project(str(top), known, **options)  # type: ignore[arg-type]
    known.save()
    return found


def hidden(found: SecretFiles, top: Path) -> set[str]:
    return {os.path.relpath(mask.path, top) for mask in found.masks}


def covers_all(found: SecretFiles, top: Path) -> bool:
    """Whether each .env of a tree is hidden, by itself or with a directory."""
    hidden = {mask.path for mask in found.masks}
    return all(hidden & {str(path), *map(str, path.parents)} for path in top.rglob(".env"))


def git(top: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(top), *identity, *words], check=True, capture_output=True)


def committed(top: Path) -> None:
    git(top, "init", "-q")
    git(top, "add", "-fA")
    git(top, "commit", "-qm", "first")


def test_secrets_are_found_at_any_depth_and_templates_are_not(top: Path) -> None:
    secret = {
        *(".env", "a/.env", "a/b/c/.env.local", "services/api/prod.env", "infra/terraform.tfstate", "infra/x.tfvars", "a/.npmrc"),
        *("certs/server.pem", "certs/tls.key", "certs/chain-and-key.pem", "keys/deploy", "keys/id_ed25519", "app/config/master.key"),
        *("a/.streamlit/secrets.toml", "gcp/service-account.json", ".aws/credentials", "x/.ssh/known_hosts", "config/credentials/prod.key"),
    }
    for path in secret:
        put(top, path, PRIVATE if path.startswith(("certs", "keys", "gcp")) else b"A=1")
    put(top, "certs/chain-and-key.pem", CERTIFICATE * 40 + PRIVATE)
    put(top, "config/credentials/prod.key", HEX[:32])
    public = [".env.example", "a/.env.sample", "certs/ca.pem", "certs/ca.crt", "keys/id_ed25519.pub", "a/Makefile", "src/secrets.py"]
    for path in public:
        put(top, path, CERTIFICATE)
    assert hidden(search(top), top) == secret


def test_files_that_tools_keep_passwords_in_are_found_by_their_names(top: Path) -> None:
    token = b"a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    secret = {
        ".dev.vars.staging": b"A=1",
        "wallet.dat": b"x",
        "net/wg0.conf": b"[Interface]\nPrivateKey = " + token + b"\n",
        "rclone.conf": b"[s3]\nsecret_access_key = " + token + b"\n",
        "api/appsettings.Production.json": b'{"Db": "Server=x;Password=' + token + b'"}',
    }
    public = {".dev.vars.example": b"A=1", "wg0.conf": b"[Peer]\n", "web/appsettings.json": b'{"Logging": {"Level": "Warning"}}'}
    for path, content in {**secret, **public}.items():
        put(top, path, content)
    assert hidden(search(top), top) == secret.keys()


def test_dependencies_and_the_objects_of_git_are_not_searched(top: Path) -> None:
    for directory in ("node_modules/x", ".git/objects", ".venv/lib/python3.11/site-packages/x", "a/.tox/y"):
        put(top, f"{directory}/test.pem", PRIVATE)
    put(top, ".venv/.env")
    assert hidden(search(top), top) == {".venv/.env"}


def test_the_settings_of_a_repository_are_hidden_if_they_hold_a_token(top: Path) -> None:
    put(top, ".git/config", b'[remote "origin"]\n\turl = https://github.com/a/b\n')
    put(top, "sub/.git/config", b"\turl = https://x:ghs_" + b"a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8@github.com/a/b\n")
    (mask,) = search(top).masks
    assert mask.path == str(top / "sub/.git/config") and "it holds a token" in mask.remark


def test_odd_entries_are_no_trouble(top: Path, tmp_path: Path) -> None:
    os.mkfifo(top / "x.pem")
    os.mkfifo(top / ".env")
    (top / "loop").symlink_to(top)
    (top / "self.key").symlink_to("self.key")
    (top / "dangling.pem").symlink_to("nowhere")
    (top / ".env.local").symlink_to("nowhere")
    (top / "zero.pem").symlink_to("/dev/zero")
    put(top, b"a\nb/\xff.env")
    put(top, b"\xe2\x80\xae.pem", PRIVATE)
    with open(put(top, "huge.pem", PRIVATE), "r+b") as file:
        file.truncate(1 << 40)
    with open(put(top, "huge", CERTIFICATE), "r+b") as file:
        file.truncate(1 << 40)
    assert hidden(search(top), top) == {".env.local", os.fsdecode(b"a\nb/\xff.env"), os.fsdecode(b"\xe2\x80\xae.pem"), "huge.pem"}


def test_a_link_is_hidden_for_what_it_leads_to(top: Path, tmp_path: Path) -> None:
    key = put(tmp_path, "elsewhere/blob.bin", PRIVATE)
    (top / "server.pem").symlink_to(key)
    put(top, ".env.example")
    (top / ".env.test").symlink_to(".env.example")
    (top / ".env").symlink_to(put(tmp_path, "elsewhere/values"))
    (top / "sub").mkdir()
    (top / "sub/.env").symlink_to("/usr/bin/env")  # hiding it would hide the program
    assert hidden(search(top), top) == {"server.pem", ".env"}


def test_a_directory_that_is_too_deep_is_hidden_whole(top: Path) -> None:
    place = os.open(top, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=place)
        place, before = os.open("d" * 200, os.O_RDONLY, dir_fd=place), place
        os.close(before)
    os.close(os.open(".env", os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)
    (mask,) = search(top).masks
    assert mask.why == NOT_SEARCHED and "too deep" in mask.remark and len(mask.path) < 3500


@pytest.mark.needs_user  # root can list everything; `e2e/test_secrets` tries it in the unprivileged half
def test_a_directory_that_cannot_be_listed_is_hidden(top: Path) -> None:
    put(top, "closed/.env").parent.chmod(0)
    try:
        (mask,) = search(top).masks
    finally:
        (top / "closed").chmod(0o700)
    assert mask.path == str(top / "closed") and mask.why == NOT_SEARCHED


def test_what_is_beyond_the_limits_is_hidden_and_said_and_the_next_search_goes_on(top: Path) -> None:
    for number in range(20):
        put(top, f"d{number}/e/.env")
        put(top, f"d{number}/e/plain.py")
    found = search(top, limits=SearchLimits(entries=30))
    unsearched = {mask.path for mask in found.masks if mask.why == NOT_SEARCHED}
    assert unsearched and all("too many entries" in mask.remark for mask in found.masks if mask.path in unsearched)
    assert covers_all(found, top), "nothing is shown unsearched"
    ticks = itertools.count(0, 1.0)
    slow = search(top, top.parent / "another", limits=SearchLimits(seconds=3.5), clock=lambda: next(ticks))
    assert covers_all(slow, top) and any(mask.why == NOT_SEARCHED for mask in slow.masks)
    assert hidden(search(top), top) == {f"d{number}/e/.env" for number in range(20)}


def test_a_file_that_there_is_no_time_to_read_is_hidden(top: Path) -> None:
    put(top, "ca.pem", CERTIFICATE)
    ticks = iter([0.0, 100.0])
    (mask,) = search(top, limits=SearchLimits(seconds=20.0), clock=lambda: next(ticks)).masks
    assert mask.path == str(top / "ca.pem") and "could not be examined" in mask.remark
    assert search(top).masks == ()


def test_a_file_that_is_slow_to_judge_by_construction_is_judged(top: Path) -> None:
    for number, part in enumerate((b"PRIVATE KEY-----", b"secret", b"x://a:", b"sk-a-", b"eyJ", b"password  =  ")):
        put(top, f"plain{number}", part * (16384 // len(part)))
        put(top, f"auth{number}.json", part * (16384 // len(part)))
    search(top)


def test_a_directory_with_too_many_entries_is_hidden_and_the_project_itself_never_is(top: Path) -> None:
    for number in range(50):
        put(top, f"many/{number}.py")
    (mask,) = search(top, limits=SearchLimits(entries=20)).masks
    assert mask.path == str(top / "many") and "too many entries" in mask.remark
    for number in range(50):
        put(top, f"{number}.py")
    assert hidden(search(top, limits=SearchLimits(entries=20)), top) == {"many"}
    assert search(top, limits=SearchLimits(entries=200)).masks == ()


def test_very_many_secrets_in_one_directory_are_one_mask(top: Path) -> None:
    for number in range(300):
        put(top, f"keys/{number}.p12")
    (mask,) = search(top).masks
    assert (mask.path, mask.why) == (str(top / "keys"), TOO_MANY) and "300" in mask.remark


def test_what_appears_or_changes_later_is_found_by_the_next_search(top: Path) -> None:
    put(top, "a/b/app.py")
    pem_file = put(top, "a/server.pem", CERTIFICATE)
    assert hidden(search(top), top) == set()
    put(top, "a/b/.env")
    pem_file.write_bytes(PRIVATE)
    assert hidden(search(top), top) == {"a/b/.env", "a/server.pem"}
    pem_file.write_bytes(CERTIFICATE)
    (top / "a/b/.env").unlink()
    put(top, "new/dir/.env")
    assert hidden(search(top), top) == {"new/dir/.env"}


def test_a_recent_listing_is_not_relied_on(top: Path, tmp_path: Path) -> None:
    """Within one tick of the clock a directory can change twice and have the same times."""
    put(top, "app.py")
    memory = SearchMemory(str(tmp_path / "memory"), now_ns=lambda: top.stat().st_ctime_ns)
    hidden_in_project(str(top), memory)
    assert memory.directories == {}
    memory = SearchMemory(str(tmp_path / "memory"), now_ns=lambda: top.stat().st_ctime_ns + 10**10)
    hidden_in_project(str(top), memory)
    assert list(memory.directories) == [""], "the control arm"


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 64, None])
def test_a_damaged_memory_counts_as_none(top: Path, tmp_path: Path, damage: bytes | None) -> None:
    put(top, "a/.env")
    search(top, tmp_path / "memory")
    content = (tmp_path / "memory").read_bytes()
    (tmp_path / "memory").write_bytes(content[:-1] + b"\1" if damage is None else damage)
    assert hidden(search(top, tmp_path / "memory"), top) == {"a/.env"}


def test_the_memory_is_used_and_forgets_what_is_gone(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(top, "a/server.pem", PRIVATE)
    put(top, "b/ca.pem", CERTIFICATE)
    search(top, tmp_path / "memory")
    with monkeypatch.context() as patched:
        patched.setattr("agent_sandbox.workspace.secret_search._read", lambda *_: pytest.fail("a file was read again"))
        patched.setattr("os.scandir", lambda *_: pytest.fail("a directory was listed again"))
        assert hidden(search(top, tmp_path / "memory"), top) == {"a/server.pem"}
    (top / "b/ca.pem").unlink()
    search(top, tmp_path / "memory")
    search(top, tmp_path / "memory")
    assert b"b/ca.pem" not in (tmp_path / "memory").read_bytes()


def test_a_memory_of_somebody_else_is_not_believed(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search(top, tmp_path / "memory")
    put(top, ".env")
    search(top, tmp_path / "memory")
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert SearchMemory(str(tmp_path / "memory")).directories == {}


def test_a_tracked_file_is_shown_unless_it_holds_a_key_or_a_token(top: Path) -> None:
    put(top, "web/.env.development", b"DB_PASSWORD=postgres\nDEBUG=1\n")
    put(top, "web/.env.staging", b"DB_PASSWORD=" + HEX[:32])
    put(top, "tests/server.pem", PRIVATE)
    put(top, "tests/store.p12", b"store")
    committed(top)
    put(top, "web/.env.local", b"DEBUG=2\n")
    found = search(top)
    assert found.shown == {str(top / "web/.env.development")}
    assert hidden(found, top) == {"web/.env.staging", "web/.env.local", "tests/server.pem", "tests/store.p12"}
    remarks = {os.path.basename(mask.path): mask.remark for mask in found.masks}
    assert "a token" in remarks[".env.staging"] and "a private key" in remarks["server.pem"] and "a private key" in remarks["store.p12"]
    assert remarks[".env.local"] == "", "nobody expects to see what is not tracked"


def test_a_tracked_file_that_was_changed_is_hidden(top: Path) -> None:
    """Its content is in no commit: it may be a secret that somebody filled in, or what a filter decrypted."""
    file = put(top, ".env.development", b"DEBUG=1\n")
    committed(top)
    assert search(top).shown
    file.write_bytes(b"DEBUG=2\n")
    (mask,) = search(top).masks
    assert "differs from HEAD" in mask.remark


def test_what_is_only_in_the_index_is_not_tracked(top: Path) -> None:
    put(top, "app.py")
    committed(top)
    put(top, ".env", b"DEBUG=1\n")
    git(top, "add", "-f", ".env")
    assert hidden(search(top), top) == {".env"}
    git(top, "commit", "-qm", "second")
    assert hidden(search(top), top) == set(), "the control arm: HEAD has it now"


def test_where_tracking_is_unknown_files_stay_hidden_with_a_remark(top: Path) -> None:
    put(top, ".env", b"DEBUG=1\n")
    committed(top)
    assert search(top).shown
    (top / ".git/HEAD").write_text("ref: refs/heads/.invalid\n")
    (mask,) = search(top).masks
    assert "not known whether git tracks it" in mask.remark
