"""Credentials of package indexes: a run sees placeholders in their place, and each is bound to its index alone."""

from __future__ import annotations

import base64
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from agent_sandbox.index_settings import READING, IndexSettings, brokered, netrc_entries, prefix_of

PASSWORD, TOKEN = "pw-9f8e7d6c5b4a3f2e", "npm-tok-1a2b3c4d5e6f7a8b"
NETRC = f"machine pip.corp.example\n  login me password {PASSWORD}\nmachine github.com login me password {TOKEN}\n"


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., IndexSettings]:
    """Write files below a root, with `home` as the user's home, and return what a run is given."""

    def write(files: dict[str, str], *, permits: Callable[[str], bool] = lambda _: True, project: str | None = None) -> IndexSettings:
        numbers = count(1)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return brokered(
            str(tmp_path / "home"),
            permits=permits,
            random=lambda size: next(numbers).to_bytes(size, "big"),
            root=str(tmp_path),
            project=str(tmp_path / project) if project else None,
        )

    return write


def shown(settings: IndexSettings) -> str:
    return "".join(each.content.decode() for each in settings.files)


def index(name: str = "pip") -> str:
    return f"[global]\nindex-url = https://me:{PASSWORD}@{name}.corp.example/team/simple/\ntimeout = 9\n"


FILES: dict[str, tuple[dict[str, str], str, str, tuple[str, ...]]] = {
    "pip, of the system": (
        {"etc/pip.conf": index()},
        "index-url = https://me:{}@pip.corp.example/team/simple/\ntimeout = 9",
        PASSWORD,
        ("/team/",),
    ),
    "pip, of the user": ({"home/.config/pip/pip.conf": index()}, "https://me:{}@pip.corp.example/team/simple/", PASSWORD, ("/team/",)),
    "a token in the place of the user": (
        {"etc/pip.conf": f"[global]\nextra-index-url = https://{TOKEN}@pip.corp.example/simple\n"},
        "https://{}@pip.corp.example/simple",
        TOKEN,
        ("/",),
    ),
    "a token with a word as password": (
        {"etc/pip.conf": f"[global]\nextra-index-url = https://{TOKEN}:x-oauth-basic@pip.corp.example:8443/a/b\n"},
        "https://{}:x-oauth-basic@pip.corp.example:8443/a/b",
        TOKEN,
        ("/a/b/",),
    ),
    "escaped": (
        {"etc/pip.conf": "[global]\nindex-url = https://a%40b:p%40ss%2Fw0rd@pip.corp.example/simple\n"},
        "https://a%40b:{}@pip.corp.example/simple",
        "p@ss/w0rd",
        ("/",),
    ),
    "uv": (
        {"home/.config/uv/uv.toml": f'[[index]]\nname = "x"\nurl = "https://me:{PASSWORD}@uv.corp.example/x/+simple"\n'},
        'url = "https://me:{}@uv.corp.example/x/+simple"',
        PASSWORD,
        ("/x/",),
    ),
    "npm, a token": (
        {"home/.npmrc": f"registry=https://npm.corp.example/n/\n//npm.corp.example/n/:_authToken={TOKEN}\n"},
        "registry=https://npm.corp.example/n/\n//npm.corp.example/n/:_authToken={}\n",
        TOKEN,
        ("/n/",),
    ),
    "npm, of the system, with a port": (
        {"etc/npmrc": f'@x:registry = "https://npm.corp.example:4873/"\n//npm.corp.example:4873/:_authToken = "{TOKEN}"\nfund=false\n'},
        "//npm.corp.example:4873/:_authToken={}\nfund=false\n",
        TOKEN,
        ("/",),
    ),
    "apt, an address": (
        {"etc/apt/sources.list": f"deb [arch=amd64] https://me:{PASSWORD}@apt.corp.example/debian stable main\n"},
        "deb [arch=amd64] https://me:{}@apt.corp.example/debian stable main\n",
        PASSWORD,
        ("/debian/",),
    ),
    "apt, auth.conf": (
        {
            "etc/apt/sources.list.d/a.sources": "Types: deb\nURIs: https://apt.corp.example/debian\nSuites: s\n",
            "etc/apt/auth.conf.d/a.conf": f"machine apt.corp.example/debian login me password {PASSWORD}\n",
        },
        "machine apt.corp.example/debian login me password {}\n",
        PASSWORD,
        ("/debian/",),
    ),
    "netrc": (
        {"etc/pip.conf": "[global]\nindex-url = https://pip.corp.example/t/simple\n", "home/.netrc": NETRC},
        "machine pip.corp.example login me password {}\n",
        PASSWORD,
        ("/t/",),
    ),
}


@pytest.mark.parametrize(("files", "seen", "value", "paths"), FILES.values(), ids=FILES)
def test_a_run_sees_a_placeholder_and_the_egress_has_the_value_for_that_index(
    read: Callable[..., IndexSettings], files: dict[str, str], seen: str, value: str, paths: tuple[str, ...]
) -> None:
    settings = read(files)
    (secret,) = settings.secrets
    assert (secret.value, secret.paths, secret.methods) == (value, paths, READING)
    assert seen.format(secret.placeholder) in shown(settings)
    assert value not in shown(settings) + repr(settings) and TOKEN not in shown(settings)
    assert secret.hosts[0] in next(iter(files.values())) and settings.notes == []


def test_a_password_of_npm_is_shown_as_npm_encodes_it(read: Callable[..., IndexSettings]) -> None:
    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    for line, expected in (
        (f"username=me\n//npm.corp.example/:_password={encoded(PASSWORD)}", "_password={}"),
        (f"//npm.corp.example/:_auth={encoded('me:' + PASSWORD)}", "_auth={}"),
    ):
        settings = read({"home/.npmrc": f"registry=https://npm.corp.example/\n{line}\n"})
        (secret,) = settings.secrets
        user = "" if "_password" in expected else "me:"
        assert expected.format(encoded(user + secret.placeholder)) in shown(settings) and secret.value == PASSWORD


def test_one_credential_of_one_host_is_one_secret_with_every_path(read: Callable[..., IndexSettings]) -> None:
    settings = read({"etc/pip.conf": index(), "home/.config/uv/uv.toml": f'index-url = "https://me:{PASSWORD}@pip.corp.example/other"\n'})
    (secret,) = settings.secrets
    assert secret.paths == ("/team/", "/other/")
    settings = read({"home/.config/uv/uv.toml": f'index-url = "https://me:{TOKEN}@pip.corp.example/other"\n'})
    assert [(each.name, each.paths) for each in settings.secrets] == [
        ("index pip.corp.example", ("/team/",)),
        ("index pip.corp.example 2", ("/other/",)),
    ]


LEFT: dict[str, tuple[dict[str, str], str]] = {
    "plain HTTP": ({"etc/pip.conf": index().replace("https", "http")}, "plain HTTP"),
    "a short one": ({"etc/pip.conf": index().replace(PASSWORD, "short7c")}, "at least 8"),
    "npm without a registry": ({"home/.npmrc": f"_authToken={TOKEN}\n"}, "names no registry"),
    "npm, not base64": ({"home/.npmrc": f"registry=https://npm.corp.example\n//npm.corp.example/:_auth={TOKEN}!\n"}, "base64"),
    "a token that is nobody's": ({"home/.npmrc": "registry=https://npm.corp.example\n# ghp_" + "a1B2" * 9 + "\n"}, "belongs to no index"),
    "the credentials of a proxy": ({"etc/pip.conf": f"[global]\nproxy = http://me:{PASSWORD}@proxy.corp.example:3128\n"}, "plain HTTP"),
}


@pytest.mark.parametrize(("files", "why"), LEFT.values(), ids=LEFT)
def test_what_cannot_be_put_in_is_left_out_of_what_a_run_sees_and_that_is_said(
    read: Callable[..., IndexSettings], files: dict[str, str], why: str
) -> None:
    settings = read(files)
    assert settings.secrets == [] and why in " ".join(settings.notes)
    assert not any(each in shown(settings) + "".join(settings.notes) for each in (PASSWORD, TOKEN, "short7c", "ghp_"))
    assert len(settings.files) == 1


def test_credentials_of_other_hosts_and_of_hosts_that_are_not_open_are_not_shown(read: Callable[..., IndexSettings]) -> None:
    npm = f'registry=https://npm.corp.example\n//other.example/:_authToken={TOKEN}\nkey="-----BEGIN"\ncafile=/x\n'
    npm += "//npm.corp.example/:_authToken=${NPM}\n"
    settings = read({"home/.npmrc": npm, "home/.netrc": NETRC})
    assert settings.secrets == []
    assert shown(settings) == "registry=https://npm.corp.example\n//npm.corp.example/:_authToken=${NPM}\n"
    settings = read({"etc/pip.conf": index()}, permits=lambda host: host != "pip.corp.example")
    assert settings.secrets == [] and "https://pip.corp.example/team/simple/" in shown(settings)


def test_files_of_the_project_have_no_part_in_it(read: Callable[..., IndexSettings]) -> None:
    files = {
        "home/.npmrc": f"registry=https://npm.corp.example\n//npm.corp.example/:_authToken={TOKEN}\n",
        "home/.netrc": NETRC,
        "home/.config/pip/pip.conf": index(),
    }
    assert len(read(files).secrets) == 2, "the control"
    settings = read(files, project="home")
    assert settings.secrets == [] and settings.files == []


def test_what_needs_no_placeholder_is_shown_as_it_is(read: Callable[..., IndexSettings]) -> None:
    settings = read(
        {
            "etc/pip.conf": "[global]\nindex-url = https://pip.corp.example/simple\n",
            "home/.npmrc": "registry=https://npm.corp.example/\nsave-exact=true\n",
        }
    )
    (file,) = settings.files
    assert file.path.endswith("/home/.npmrc") and file.content == b"registry=https://npm.corp.example/\nsave-exact=true\n"


def test_a_certificate_file_of_apt_is_that_of_the_run(read: Callable[..., IndexSettings]) -> None:
    settings = read({"etc/apt/apt.conf.d/80ca": 'Acquire::https::CaInfo "/etc/corp.pem";\n'})
    assert shown(settings) == 'Acquire::https::CaInfo "/run/agent-sandbox/ca.pem";\n'


def test_netrc_is_read_in_every_form() -> None:
    text = '# machine no\nmachine a login "x y" password "p\\"q" machine b\n\tpassword p account z\n'
    text += "machine c login only\ndefault login d password e\nmacdef m\nmachine f password g\n"
    assert list(netrc_entries(text)) == [("a", "x y", 'p"q'), ("b", "", "p")]


def test_the_files_of_a_simple_index_lie_beside_it() -> None:
    assert [prefix_of(path) for path in ("/", "/simple", "/simple/", "/a/+simple/", "/npm", "/a/simple/b")] == [
        "/",
        "/",
        "/",
        "/a/",
        "/npm/",
        "/a/simple/b/",
    ]
