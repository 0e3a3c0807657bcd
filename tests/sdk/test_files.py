"""File permissions shape what a run is shown: what is denied is not there, and nothing that is written is real."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agent_sandbox import PolicyError, Sandbox, SandboxConfig, Workspace
from agent_sandbox.workspace.changes import Kind
from tests.policy.test_secret_content import pem

EVERYTHING = {"a.txt", "b.json", "secrets/key.pem", "deep/er/c.txt", ".hidden", ".git/config"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files that may be shown, with a canary in each."""
    for name in EVERYTHING:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(f"canary {name}")
    return tmp_path / "data"


def shown(sandbox: Sandbox, directory: Path) -> set[str]:
    """The files below a directory that a run can read, by their relative names."""
    code = f"""
import os
for top, _, names in os.walk({str(directory)!r}):
    for name in names:
        path = os.path.join(top, name)
        try:
            with open(path) as file:
                assert file.read().startswith("canary")
            print(os.path.relpath(path, {str(directory)!r}))
        except OSError:
            pass
"""
    result = sandbox.execute(code)
    assert result.success, result.stderr
    return set(result.stdout.split())


def test_nothing_is_shown_without_permission_whatever_is_allowed(data: Path) -> None:
    assert shown(Sandbox(allowed_paths=[f"{data}/*"], validate_code=False), data) == set()


def test_allowed_directories_are_shown_and_their_neighbours_are_not(data: Path) -> None:
    (data.parent / "neighbour").mkdir()
    (data.parent / "neighbour" / "n.txt").write_text("canary")
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[data])
    assert shown(sandbox, data.parent) == {f"data/{name}" for name in EVERYTHING}


@pytest.mark.parametrize("spelt", ["{}", "{}/", "{}/*", "{}/**"])
def test_a_directory_may_be_spelt_in_several_ways(data: Path, spelt: str) -> None:
    assert shown(Sandbox(allow_file_read=True, allowed_paths=[spelt.format(data)]), data) == EVERYTHING


def test_reading_without_allowed_paths_shows_the_machine(data: Path) -> None:
    assert shown(Sandbox(allow_file_read=True), data) == EVERYTHING


def test_denied_inside_allowed_is_not_there(data: Path) -> None:
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[f"{data}/*"], denied_paths=[f"{data}/secrets/*", data / "deep"])
    assert shown(sandbox, data) == EVERYTHING - {"secrets/key.pem", "deep/er/c.txt"}


def test_denied_is_not_there_in_a_view_of_the_whole_machine(data: Path) -> None:
    sandbox = Sandbox(allow_file_read=True, denied_paths=[f"{data}/secrets", f"{data}/a.txt"])
    assert shown(sandbox, data) == EVERYTHING - {"secrets/key.pem", "a.txt"}


def test_a_pattern_shows_what_matches_and_hides_the_rest(data: Path) -> None:
    assert shown(Sandbox(allow_file_read=True, allowed_paths=[f"{data}/*.json"]), data) == {"b.json"}
    assert shown(Sandbox(allow_file_read=True, allowed_paths=[data], denied_paths=[f"{data}/*.json"]), data) == EVERYTHING - {"b.json"}


def test_a_link_to_what_is_denied_leads_nowhere(data: Path) -> None:
    (data / "way-in").symlink_to("secrets/key.pem")
    (data / "way-out").symlink_to("/etc/hostname")
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[data], denied_paths=[f"{data}/secrets"])
    assert shown(sandbox, data) == EVERYTHING - {"secrets/key.pem"}


@pytest.mark.parametrize("pattern", ["secrets/*", "secrets", "*.pem"])
def test_what_appears_during_the_run_where_it_is_denied_stays_hidden(data: Path, pattern: str) -> None:
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[data], denied_paths=[f"{data}/{pattern}"])
    later = data / "secrets" / "later.pem"
    # It says that it has begun and then goes on asking; by the time it is killed, the file has long been there.
    code = f"import os\nwhile True: print(os.path.exists({str(later)!r}), flush=True)"
    answers: list[str] = []

    def appear(stream: str, text: str) -> None:
        answers.append(text)
        if not later.exists():
            later.write_text("canary")
        elif len(answers) > 50:
            sandbox.kill()

    sandbox.execute(code, on_output=appear)
    assert later.exists()
    assert set("".join(answers).rpartition("\n")[0].split()) == {"False"}, "the last one may have been cut off by the kill"


def test_what_appears_during_the_run_where_it_is_allowed_is_shown(data: Path) -> None:
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[data])
    later = data / "secrets" / "later.pem"
    code = f"import os\nprint('up', flush=True)\nwhile 'later.pem' not in os.listdir({str(later.parent)!r}): pass"
    assert sandbox.execute(code, on_output=lambda *_: later.write_text("canary")).success


@pytest.mark.parametrize("denied", [["/etc/*", "/root/*"], ["/etc/*", "/root/*", "/usr/*", "/home/*", "/opt/*"], ["/etc", "/usr/bin"]])
@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import os, sqlite3; print(int(os.path.exists('/etc/hostname')))"),
        ("javascript", "console.log(Number(require('fs').existsSync('/etc/hostname')))"),
        ("bash", "[ ! -e /etc/hostname ]; echo $?"),
    ],
    ids=["python", "javascript", "bash"],
)
@pytest.mark.parametrize("processes", [False, True], ids=["alone", "with processes"])
def test_the_interpreter_stays_when_the_place_it_lives_in_is_denied(denied: list[str], language: str, code: str, processes: bool) -> None:
    result = Sandbox(allow_file_read=True, denied_paths=denied, allow_subprocess=processes).execute(code, language)
    assert result.stdout == "0\n", result.error
    if os.path.exists("/etc/hostname"):
        assert Sandbox(allow_file_read=True).execute(code, language).stdout == "1\n"


def test_paths_that_do_not_exist_are_no_error(data: Path) -> None:
    sandbox = Sandbox(
        allow_file_read=True, allow_file_write=True, allowed_paths=["/no/such/place", f"{data}/*"], denied_paths=["/nor/this"]
    )
    assert shown(sandbox, data) == EVERYTHING


def test_hidden_names_can_be_left_out(data: Path) -> None:
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[data], allow_hidden=False)
    assert shown(sandbox, data) == EVERYTHING - {".hidden", ".git/config"}


def test_hidden_names_cannot_be_left_out_of_the_whole_machine_and_that_is_said() -> None:
    with pytest.raises(PolicyError, match="whole machine"):
        Sandbox(allow_file_read=True, allow_hidden=False)


def test_a_pattern_over_the_whole_machine_is_refused_and_never_ignored() -> None:
    with pytest.raises(PolicyError, match="whole machine"):
        Sandbox(allow_file_read=True, denied_paths=["**/*.pem"])


def test_a_bytes_path_and_a_pathlib_path_are_paths(data: Path) -> None:
    assert shown(Sandbox(allow_file_read=True, allowed_paths=[os.fsencode(data)]), data) == EVERYTHING
    assert shown(Sandbox(allow_file_read=True, allowed_paths=[data]), data) == EVERYTHING


def test_reading_alone_does_not_let_it_write(data: Path) -> None:
    result = Sandbox(allow_file_read=True, allowed_paths=[data]).execute(f"open({str(data / 'a.txt')!r}, 'w')")
    assert result.error is not None and result.error.startswith(("PermissionError", "OSError: [Errno 30]"))


def test_writes_are_seen_by_the_run_reported_and_never_real(data: Path) -> None:
    sandbox = Sandbox(allow_file_read=True, allow_file_write=True, allowed_paths=[data])
    target, new, gone = data / "a.txt", data / "new.txt", data / "b.json"
    result = sandbox.execute(
        f"import os\nopen({str(target)!r}, 'a').write(' and more')\nopen({str(new)!r}, 'w').write('x')\nos.remove({str(gone)!r})\n"
        f"print(open({str(target)!r}).read(), os.path.exists({str(gone)!r}))"
    )
    assert result.stdout == "canary a.txt and more False\n", result.stderr
    assert {(change.path, change.kind) for change in result.changes} == {
        (str(target), Kind.MODIFIED),
        (str(new), Kind.ADDED),
        (str(gone), Kind.DELETED),
    }
    assert target.read_text() == "canary a.txt" and gone.exists() and not new.exists()
    assert shown(sandbox, data) == EVERYTHING, "the next run starts from what is real"


def test_writing_without_reading_shows_allowed_directories_empty(data: Path) -> None:
    sandbox = Sandbox(allow_file_write=True, allowed_paths=[data])
    result = sandbox.execute(f"import os\nprint(os.listdir({str(data)!r}))\nopen({str(data / 'out')!r}, 'w').write('x')")
    assert result.stdout == "[]\n" and result.success, result.stderr
    assert [(change.path, change.kind) for change in result.changes] == [(str(data / "out"), Kind.ADDED)]
    assert not (data / "out").exists()


def test_a_working_directory_inside_what_is_shown_is_where_runs_begin(data: Path) -> None:
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[data], working_dir=data / "deep")
    assert sandbox.execute("import os; print(os.getcwd(), os.listdir())").stdout == f"{data}/deep ['er']\n"


@pytest.fixture
def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    for name in (".ssh/id_ed25519", ".aws/credentials", "notes.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("canary")
    monkeypatch.setenv("HOME", str(home))
    return home


def test_secrets_are_masked_in_a_view_of_the_machine(a_home: Path) -> None:
    assert shown(Sandbox(allow_file_read=True), a_home) == {"notes.txt"}


def test_secrets_are_masked_in_a_view_of_chosen_directories(a_home: Path) -> None:
    assert shown(Sandbox(allow_file_read=True, allowed_paths=["~"]), a_home) == {"notes.txt"}


def test_a_secret_that_is_revealed_is_shown_and_the_others_are_not(a_home: Path) -> None:
    assert shown(Sandbox(allow_file_read=True, reveal=["~/.ssh"]), a_home) == {"notes.txt", ".ssh/id_ed25519"}


def test_a_masked_path_that_is_allowed_by_name_is_refused_with_the_remedy(a_home: Path) -> None:
    with pytest.raises(PolicyError, match=r"private keys") as refusal:
        SandboxConfig(allow_file_read=True, allowed_paths=["~/.ssh/*"])
    assert f"reveal=['{a_home}/.ssh']" in refusal.value.hint
    assert shown(Sandbox(allow_file_read=True, allowed_paths=["~/.ssh/*"], reveal=["~/.ssh"]), a_home) == {".ssh/id_ed25519"}


def test_environment_files_of_an_allowed_project_are_masked(data: Path) -> None:
    (data / ".env").write_text("canary")
    assert shown(Sandbox(allow_file_read=True, allowed_paths=[data]), data) == EVERYTHING
    assert shown(Sandbox(allow_file_read=True, allowed_paths=[data], reveal=[data / ".env"]), data) == EVERYTHING | {".env"}


def test_secrets_deep_in_an_allowed_directory_are_masked_also_if_they_appear_between_two_runs(data: Path) -> None:
    (data / "web/api").mkdir(parents=True)
    (data / "web/api/.env").write_text("canary")
    (data / "web/tls.key").write_bytes(b"canary\n" + pem(b"PRIVATE KEY"))
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[data])
    assert shown(sandbox, data) == EVERYTHING
    (data / "web/api/.env.local").write_text("canary")
    (data / "web/api/later").write_text("canary: plain")
    assert shown(sandbox, data) == EVERYTHING | {"web/api/later"}
    revealed = Sandbox(allow_file_read=True, allowed_paths=[data], reveal=[data / "web/api/.env"])
    assert shown(revealed, data) == EVERYTHING | {"web/api/later", "web/api/.env"}


def test_a_workspace_hides_secrets_that_appear_between_two_runs(data: Path) -> None:
    (data / "web").mkdir()
    (data / "web/plain").write_text("canary: plain")
    workspace = Workspace.over(data)
    assert workspace.run(["ls", "-A", "web"]).stdout == "plain\n"
    (data / "web/.env").write_text("canary")
    assert workspace.run(["ls", "-A", "web"]).stdout == "plain\n"
    assert workspace.run(["sh", "-c", "echo mine > web/.env"]).exit_code == 0
    assert "canary" not in workspace.diff()


def test_a_directory_of_keys_that_is_revealed_is_shown_with_its_keys(a_home: Path) -> None:
    (a_home / ".ssh/id_rsa").write_bytes(b"canary\n" + pem(b"PRIVATE KEY"))
    sandbox = Sandbox(allow_file_read=True, allowed_paths=["~/.ssh/*"], reveal=["~/.ssh"])
    assert shown(sandbox, a_home) == {".ssh/id_ed25519", ".ssh/id_rsa"}


def test_dot_files_that_are_not_listed_are_hidden_and_shown_when_they_are_allowed_by_name(a_home: Path) -> None:
    (a_home / ".newtool").mkdir()
    (a_home / ".newtool/token").write_text("canary")
    assert shown(Sandbox(allow_file_read=True), a_home) == {"notes.txt"}
    assert shown(Sandbox(allow_file_read=True, allowed_paths=["~/.newtool/*"]), a_home) == {".newtool/token"}
    assert shown(Sandbox(allow_file_read=True, reveal=["~/.newtool"]), a_home) == {"notes.txt", ".newtool/token"}


def test_the_record_and_the_state_of_the_product_are_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_STATE", str(tmp_path / "state"))
    (tmp_path / "seen").write_text("canary")
    sandbox = Sandbox(allow_file_read=True, allowed_paths=[tmp_path])
    sandbox.execute("print(1)")
    assert (tmp_path / "state" / "ledger.jsonl").exists()
    assert shown(sandbox, tmp_path) == {"seen"}


@pytest.mark.parametrize("allowed", [["/etc/hosts"], ["/etc/host*"]], ids=["a file", "a pattern"])
def test_a_file_allowed_among_those_we_make_ourselves_is_the_machines_own(allowed: list[str]) -> None:
    with Sandbox(allow_file_read=True, allowed_paths=allowed) as sandbox:
        result = sandbox.execute("import pwd, os; print(open('/etc/hosts').read() + pwd.getpwuid(os.getuid()).pw_name)")
    assert result.stdout.startswith(Path("/etc/hosts").read_text()), result.stderr
    assert result.stdout.strip().endswith(("root", "sandbox")), "what an interpreter needs of /etc is still made"


def test_an_environment_file_beside_the_packages_is_hidden() -> None:
    """A virtual environment made in the top directory of a project shows that project with the interpreter."""
    masks = {mask.path for mask in SandboxConfig().policy().files.masks}
    assert f"{sys.prefix}/.env" in masks


@pytest.mark.slow
def test_a_tree_too_deep_to_be_listed_does_not_hide_how_the_run_ended() -> None:
    place = "os.chdir(tempfile.mkdtemp(dir='/var/tmp'))"
    code = f"import os, tempfile\n{place}\nfor _ in range(20_000):\n    os.mkdir('d')\n    os.chdir('d')\nprint('done')"
    result = Sandbox(allow_file_read=True, allow_file_write=True).execute(code)
    assert (result.stdout, result.exit_code, len(result.changes)) == ("done\n", 0, 0), result
    assert any("cannot be listed" in note for note in result.notes)
