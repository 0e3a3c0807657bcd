"""Roots of a company: each is for the hosts that the setting beside it is about, and comes from no project."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.company_roots import apt_settings, roots_of

pytest.importorskip("cryptography", reason="needs the extra `network`")
from agent_sandbox.egress.authority import Authority

ROOT, OTHER = (Authority(datetime.datetime.now(datetime.UTC)).certificate.decode() for _ in range(2))
PIP = "[global]\nindex-url = https://pip.corp.example/simple\nextra-index-url = https://two.corp.example:8443/\ncert = {0}/ca.pem\n"
GIT = '[user]\nname = x\n[http "https://git.corp.example/"]\n\tsslCAInfo = ~/ca.pem\n'
Read = Callable[..., tuple[dict[str, str], tuple[str, ...]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write files below a root, with `home` as the home, and return the roots. `{0}` in a text is the root's directory."""
    (tmp_path / "home").mkdir()
    for name in ("ca.pem", "home/ca.pem"):
        (tmp_path / name).write_text(f"subject=x\n{ROOT}")

    def write(name: str, text: str, *, packages: bool = True, project: str | None = None) -> tuple[dict[str, str], tuple[str, ...]]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("{0}", str(tmp_path)))
        home = str(tmp_path / "home")
        return roots_of(home, packages=packages, root=str(tmp_path), project=str(tmp_path / project) if project is not None else None)

    return write


SAID: dict[str, tuple[str, str, set[str]]] = {
    "pip": ("etc/pip.conf", PIP, {"pip.corp.example", "two.corp.example"}),
    "pip, for the public index": ("etc/pip.conf", "[global]\ncert = {0}/ca.pem\n", {"pypi.org", "files.pythonhosted.org"}),
    "npm, a file": ("home/.npmrc", 'registry=https://npm.corp.example/\ncafile="{0}/ca.pem"\n', {"npm.corp.example"}),
    "npm, in the file itself": (
        "home/.npmrc",
        'registry=https://npm.corp.example/\nca="' + ROOT.strip().replace("\n", "\\n") + '"\n',
        {"npm.corp.example"},
    ),
    "npm, for one registry": (
        "home/.npmrc",
        "registry=https://npm.corp.example/\n@x:registry=https://x.corp.example/n/\n//x.corp.example/n/:cafile={0}/ca.pem\n",
        {"x.corp.example"},
    ),
    "npm, for a host that is no registry": (
        "home/.npmrc",
        "registry=https://npm.corp.example/\n//evil.example/:cafile={0}/ca.pem\n",
        set(),
    ),
    "apt": (
        "etc/apt/apt.conf",
        'Acquire::https::Proxy "http://proxy.corp.example:3128";\nAcquire { https { CaInfo "{0}/ca.pem"; }; };\n',
        {"proxy.corp.example"},
    ),
    "git, for one host": ("home/.gitconfig", GIT, {"git.corp.example"}),
    "git, for the hosts that it names": (
        "home/.config/git/config",
        '[http]\nsslCAInfo = "{0}/ca.pem"\n[credential "https://git.corp.example"]\nhelper = x\n[url "https://b.corp.example/x"]\n',
        {"git.corp.example", "b.corp.example"},
    ),
    "git, for every host": ("home/.gitconfig", "[http]\nsslcainfo = {0}/ca.pem\n", set()),
}


@pytest.mark.parametrize(("name", "text", "hosts"), SAID.values(), ids=SAID)
def test_roots_are_for_the_hosts_that_their_setting_is_about(read: Read, name: str, text: str, hosts: set[str]) -> None:
    roots, notes = read(name, text)
    assert set(roots) == hosts and notes == ()
    assert all(each.strip() == ROOT.strip() for each in roots.values())


def test_without_the_preset_no_root_of_a_package_index_counts(read: Read) -> None:
    assert read("etc/pip.conf", PIP, packages=False) == ({}, ())
    assert set(read("home/.gitconfig", GIT, packages=False)[0]) == {"git.corp.example"}


@pytest.mark.parametrize("project", ["", "home"])
def test_neither_settings_nor_certificates_of_the_project_count(read: Read, project: str) -> None:
    assert set(read("home/.gitconfig", GIT, project="work")[0]) == {"git.corp.example"}, "the control"
    assert read("home/.gitconfig", GIT, project=project)[0] == {}


@pytest.mark.parametrize("content", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None])
def test_what_is_no_certificate_is_said_and_changes_nothing(read: Read, tmp_path: Path, content: str | None) -> None:
    (tmp_path / "ca.pem").unlink()
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    roots, (note,) = read("etc/pip.conf", PIP)
    assert roots == {} and "etc/pip.conf names certificates that cannot be read" in note


def test_the_bundle_of_the_system_adds_nothing(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link.pem").symlink_to(tmp_path / "ca.pem")
    monkeypatch.setattr("agent_sandbox.company_roots.SYSTEM", (str(tmp_path / "link.pem"),))
    assert read("etc/pip.conf", PIP) == ({}, ())


def test_of_a_bundle_with_a_broken_certificate_the_others_count(read: Read, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(f"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n{OTHER}")
    assert read("etc/pip.conf", PIP)[0]["pip.corp.example"].strip() == OTHER.strip()


def test_several_roots_of_one_host_count_together(read: Read, tmp_path: Path) -> None:
    read("etc/pip.conf", PIP)
    (tmp_path / "other.pem").write_text(OTHER)
    roots, _ = read("home/.gitconfig", '[http "https://pip.corp.example"]\nsslCAInfo = {0}/other.pem\n')
    assert roots["pip.corp.example"].count("BEGIN CERTIFICATE") == 2 and roots["two.corp.example"].count("BEGIN CERTIFICATE") == 1


def test_settings_of_apt_are_read_in_both_forms() -> None:
    text = '// x "y";\nA::B "1"; # c\nA { B { C "2"; D { "3"; }; }; E "4"; /* F "5"; */ }; #clear G;\nH "6";'
    assert list(apt_settings(text)) == [("a::b", "1"), ("a::b::c", "2"), ("a::e", "4"), ("h", "6")]
