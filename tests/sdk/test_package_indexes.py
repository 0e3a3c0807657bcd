"""The indexes that pip, uv, npm and apt are configured with are read from the machine and the user, never from the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.package_indexes import PackageIndex, configured
from agent_sandbox.policy.network_presets import NPM, PYPI

FILES = {
    "etc/pip.conf": "[global]\nindex-url = https://pip.corp.example/simple\nextra-index-url =\n    https://a.corp.example/simple\n    http://b.corp.example:8080/x\n",
    "home/.config/pip/pip.conf": "[install]\nfind-links = https://links.corp.example/ /opt/files file:///opt/x\n",
    "home/.pip/pip.conf": "[global]\nproxy = http://proxy.corp.example:3128\n",
    "etc/uv/uv.toml": 'index-url = "https://uv.corp.example/simple"\n[pip]\nextra-index-url = ["https://uvp.corp.example/simple"]\n',
    "home/.config/uv/uv.toml": '[[index]]\nname = "x"\nurl = "https://uvi.corp.example/simple"\n',
    "etc/npmrc": "registry=https://npm.corp.example/\n",
    "home/.npmrc": '@team:registry = "https://team.corp.example/npm/"\n//team.corp.example/:_authToken=CANARY\nfund=false\n',
    "etc/apt/sources.list": "# deb https://commented.example/ x y\ndeb [arch=amd64 signed-by=/x] https://apt.corp.example/debian stable\n",
    "etc/apt/sources.list.d/one.list": "deb-src mirror+http://mirror.corp.example/list stable main\ndeb cdrom:[x]/ stable main\n",
    "etc/apt/sources.list.d/two.sources": (
        "Types: deb\nURIs: https://new.corp.example/debian\n https://second.corp.example:8443/debian\nSuites: stable\n\n"
        "Enabled: no\nTypes: deb\nURIs: https://off.corp.example/debian\n"
    ),
    "etc/apt/apt.conf.d/80proxy": 'Acquire::http::Proxy "http://aptproxy.corp.example:3142";\n// Acquire::http::Proxy "http://off2.corp.example:1";\n',
    "etc/apt/apt.conf": 'Acquire { https { Proxy::download.example "http://nested.corp.example:3142/"; }; };\n',
}
HOSTS = {
    *("pip.corp.example", "a.corp.example", "b.corp.example:8080", "links.corp.example", "proxy.corp.example:3128"),
    *("uv.corp.example", "uvp.corp.example", "uvi.corp.example", "npm.corp.example", "team.corp.example", "apt.corp.example"),
    *("mirror.corp.example", "new.corp.example", "second.corp.example:8443", "aptproxy.corp.example:3142", "nested.corp.example:3142"),
}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def found(machine: Path, project: Path | None = None) -> tuple[PackageIndex, ...]:
    return configured(str(machine / "home"), root=str(machine), project=None if project is None else str(project))


def test_every_configured_index_is_found_with_the_file_that_names_it(machine: Path) -> None:
    indexes = found(machine)
    assert {each.host for each in indexes} == HOSTS
    assert {os.path.relpath(each.origin, machine) for each in indexes} == {*FILES}
    assert "CANARY" not in repr(indexes)


DEFAULTS = {*PYPI, *NPM}


@pytest.mark.parametrize(
    ("name", "text", "left"),
    [
        ("etc/pip.conf", "[global]\nindex-url = file:///opt/index\n", {*NPM}),
        ("etc/pip.conf", "[global]\nextra-index-url = https://a.corp.example/\n", DEFAULTS),
        ("etc/uv/uv.toml", 'default-index = "https://a.corp.example/"\n', {*NPM}),
        ("etc/uv/uv.toml", '[[index]]\nurl = "https://a.corp.example/"\ndefault = true\n', {*NPM}),
        ("etc/uv/uv.toml", '[[index]]\nurl = "https://a.corp.example/"\n', DEFAULTS),
        ("home/.npmrc", "registry=https://a.corp.example/\n", DEFAULTS - {*NPM}),
        ("home/.npmrc", "@team:registry=https://a.corp.example/\nproxy=http://b.corp.example/\n", DEFAULTS),
        ("home/work/pip.conf", "[global]\nindex-url = https://a.corp.example/\n", DEFAULTS),
    ],
)
def test_where_no_file_names_another_index_the_public_ones_are_those_of_this_machine(
    tmp_path: Path, name: str, text: str, left: set[str]
) -> None:
    (tmp_path / "home").mkdir()
    assert {each.host for each in found(tmp_path)} == DEFAULTS
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    assert {each.host for each in found(tmp_path, tmp_path / "home/work")} & DEFAULTS == left


def test_a_project_names_no_index_whether_as_a_file_a_link_or_the_home_itself(machine: Path) -> None:
    project = machine / "home" / "work"
    project.mkdir()
    evil = project / "npmrc"
    evil.write_text("registry=https://evil.example/\n")
    (machine / "home" / ".npmrc").unlink()
    (machine / "home" / ".npmrc").symlink_to(evil)
    assert "evil.example" in {each.host for each in found(machine)}, "without a project it is the user's own file"
    assert "evil.example" not in {each.host for each in found(machine, project)}
    assert {each.host for each in found(machine, machine / "home")}.isdisjoint({"uvi.corp.example", "links.corp.example"})
    assert "pip.corp.example" in {each.host for each in found(machine, machine / "home")}


def test_the_environment_names_no_index(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "NPM_CONFIG_REGISTRY", "npm_config_registry"):
        monkeypatch.setenv(name, "https://evil.example/")
    config = machine / "pip-of-the-agent"
    config.write_text("[global]\nindex-url = https://evil.example/\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert {each.host for each in found(machine)} == HOSTS
    assert "evil.example" not in {each.host for each in here().package_indexes(None)}


@pytest.mark.parametrize(
    "address",
    [
        *(
            "http://169.254.169.254/latest",
            "http://[fe80::1]/x",
            "http://[fd00:ec2::254]/x",
            "http://100.100.100.200/x",
            "http://168.63.129.16/",
        ),
        *("http://[::ffff:169.254.169.254]/", "http://2852039166/", "http://0xa9fea9fe/", "http://169.254.43518/"),
        *(
            "http://localhost:3141/",
            "http://127.0.0.1/",
            "ftp://pip.corp.example/",
            "file:///opt/x",
            "https:///x",
            "https://a b/",
            "x" * 5000,
        ),
        *("https://pip.corp.example:99999/", "https://[::1", "https://*/", "http://224.0.0.1/"),
    ],
)
def test_an_address_that_no_sandbox_may_reach_is_no_index(machine: Path, address: str) -> None:
    for name in [*FILES]:
        (machine / name).unlink()
    (machine / "etc/npmrc").write_text(f"registry={address}\n@x:registry=http://10.1.2.3:4873/\n")
    assert [each.host for each in found(machine) if each.origin] == ["10.1.2.3:4873"], "a private one may be one"


def test_a_file_that_cannot_be_read_names_nothing_and_harms_nothing(machine: Path) -> None:
    (machine / "etc/pip.conf").write_text("index-url = https://no.section.example/\n")
    (machine / "etc/uv/uv.toml").write_text("not toml [")
    (machine / "home/.config/uv/uv.toml").write_text("index = 5\npip = 'x'\nindex-url = ['https://good.corp.example/', 5]\n")
    (machine / "etc/npmrc").unlink()
    (machine / "etc/npmrc").mkdir()
    (machine / "home/.npmrc").unlink()
    os.mkfifo(machine / "home/.npmrc")
    (machine / "etc/apt/sources.list").write_bytes(b"deb https://apt.corp.example/\xff x\n" + b"#" * (2 << 20))
    (machine / "etc/apt/sources.list.d/one.list").write_bytes(b"\xff\xfe\ndeb\ndeb https://latin.corp.example/\xe9 x\n")
    hosts = {each.host for each in found(machine)}
    assert {"good.corp.example", "latin.corp.example", "new.corp.example"} <= hosts
    assert hosts.isdisjoint({"no.section.example", "npm.corp.example", "apt.corp.example"})
