"""Package indexes that ask for credentials: real clients install from them, and the run never has the credential."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.program import PROGRAM
from tests.egress.internet import ADDRESSES, INDEX_SECRET, PACKAGE, Visit, run_on_internet

pytestmark = pytest.mark.once

WEB = ADDRESSES["web.test"]
SETTINGS = {
    "pip": (".config/pip/pip.conf", f"[global]\nindex-url = https://me:{INDEX_SECRET}@web.test/private/simple/\n"),
    "pip, with .netrc": (".netrc", f"machine web.test login me password {INDEX_SECRET}\n"),
    "npm": (".npmrc", f"registry=https://web.test/private/npm/\n//web.test/private/npm/:_authToken={INDEX_SECRET}\n"),
}
PIP = f"python3 -m pip install -q --no-deps --no-cache-dir --retries 0 --disable-pip-version-check --no-input --target got {PACKAGE}"
INSTALL = {
    "pip": f"{PIP} && cat got/{PACKAGE}.py",
    "pip, with .netrc": f"{PIP} -i https://web.test/private/simple/ && cat got/{PACKAGE}.py",
    "npm": f"npm install --silent --fetch-retries 0 --cache cache --prefix got {PACKAGE} && cat got/node_modules/{PACKAGE}/index.js",
}
Go = Callable[..., Visit]


@pytest.fixture
def go(project: Path, tmp_path: Path) -> Go:
    """Run a line of a shell on the small internet, in the project, as a user whose home has the settings of one client."""

    def visit(line: str, name: str, *, place: str = "net", settings: str = "") -> Visit:
        if shutil.which(name.partition(",")[0]) is None:
            pytest.skip(f"needs {name}")
        home = project.parent / "home"
        shutil.rmtree(home, ignore_errors=True)
        path, text = SETTINGS[name]
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(settings or text)
        (home / path).chmod(0o600)
        if name == "pip, with .netrc":  # which holds for the indexes that some file names
            (home / ".config/pip").mkdir(parents=True)
            (home / ".config/pip/pip.conf").write_text("[global]\nextra-index-url = https://web.test/private/simple/\n")
        env = {
            key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.lower().startswith(("pip_", "npm_"))
        }
        env |= {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "HOME": str(home), "XDG_CONFIG_HOME": f"{home}/.config"}
        line = line.replace("{sandbox}", shlex.join(PROGRAM))
        return run_on_internet(tmp_path / place, ["sh", "-c", line], env=env, cwd=project)

    return visit


def _inside(command: str, *flags: str) -> str:
    return f"{{sandbox}} run --throw-away {shlex.join(flags)} -- sh -c {shlex.quote(command)}"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_client_installs_from_an_index_whose_credential_the_run_never_has(go: Go, name: str, tmp_path: Path) -> None:
    look = f"cat ~/{SETTINGS[name][0]}; env; grep -rl {INDEX_SECRET[:9]}'{INDEX_SECRET[9:]}' ~ /etc/pip.conf /run/agent-sandbox 2>/dev/null"
    visit = go(_inside(f"{INSTALL[name]}; {look}", "--network", "packages"), name)
    assert "42" in visit.stdout, visit
    assert visit.received[f"{WEB}:443"].count(b"Authorization: ") >= 2
    assert "agent-sandbox-secret-index-" in visit.stdout and INDEX_SECRET not in visit.stdout + visit.stderr
    found = subprocess.run(["grep", "-rlF", INDEX_SECRET, tmp_path / "state"], capture_output=True, text=True, check=False)
    assert found.stdout == "", "the credential is in no record and no file that the run leaves"


@pytest.mark.slow  # and the same whoever runs it: there is no sandbox
@pytest.mark.parametrize("name", ["pip", "npm"])
def test_without_the_credential_the_index_refuses(go: Go, name: str) -> None:
    """The control: the index above really asks for it."""
    bare = INSTALL[name].replace(
        "install", "install -i https://web.test/private/simple/" if name == "pip" else "install --registry https://web.test/private/npm/"
    )
    trusting = " ".join(f"{each}=/etc/ssl/certs/ca-certificates.crt" for each in ("PIP_CERT", "NODE_EXTRA_CA_CERTS"))
    visit = go(f"export HOME=$PWD/home-of-nobody {trusting}; {bare}", name)
    assert "42" not in visit.stdout and b"GET /private/" in visit.received[f"{WEB}:443"], visit
    visit = go(f"export {trusting}; {INSTALL[name]}", name, place="whole")
    assert "42" in visit.stdout, visit


def test_the_credential_of_an_index_goes_nowhere_else(go: Go) -> None:
    take = 'H=$(sed -n "s#.*https://\\(.*\\)@web.test.*#\\1#p" ~/.config/pip/pip.conf)'
    wrong = {
        "another path": 'curl -sS -u "$H" https://web.test/headers',
        "a path that leads out of it": 'curl -sS --path-as-is -u "$H" https://web.test/private/../headers',
        "another method": 'curl -sS -u "$H" -d x=1 https://web.test/private/simple/',
        "another host": 'curl -sS -u "$H" https://other.test/private/simple/',
        "plain HTTP": 'curl -sS -u "$H" http://web.test/private/simple/',
        "a query": 'curl -sS "https://web.test/private/simple/?q=$H"',
    }
    line = f"{take}; echo ${{#H}}; {'; '.join(f'{each}; echo' for each in wrong.values())}"
    visit = go(_inside(line, "--network", "packages,web.test,other.test"), "pip")
    assert visit.stdout.count("refused by the sandbox") == len(wrong), visit
    assert visit.received == {}, visit
    assert int(visit.stdout.split()[0]) > 40, "there was a placeholder to send"


def test_a_host_that_is_opened_without_the_preset_gets_no_credential(go: Go) -> None:
    visit = go(_inside(f"{INSTALL['pip']}; cat ~/.config/pip/pip.conf", "--network", "web.test"), "pip")
    assert "agent-sandbox-secret" not in visit.stdout and INDEX_SECRET.encode() not in visit.received.get(f"{WEB}:443", b"")


@pytest.mark.parametrize("name", ["pip", "npm"])
def test_an_index_behind_a_root_of_the_company_is_verified_with_it_and_no_other_host_is(go: Go, name: str, tmp_path: Path) -> None:
    _, text = SETTINGS[name]
    named = {"pip": f"cert = {tmp_path}/net/company.pem\n", "npm": f"cafile={tmp_path}/net/company.pem\n"}[name]
    line = _inside(f"{INSTALL[name]}; curl -sS https://a.company.test/page", "--network", "packages,a.company.test")
    visit = go(line, name, settings=text.replace("web.test", "company.test") + named)
    assert "42" in visit.stdout, visit
    assert "the certificate of a.company.test is not valid" in visit.stdout, visit
    visit = go(line, name, settings=text.replace("web.test", "company.test"), place="without")
    assert "42" not in visit.stdout and visit.received == {}, "the control: without that setting nobody trusts the host"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("apt-get") is None, reason="needs root and apt-get")
def test_apt_uses_the_credentials_of_its_auth_conf(project: Path, tmp_path: Path) -> None:
    (tmp_path / "net/served").mkdir(parents=True)
    for name in ("Release", "Packages"):
        (tmp_path / "net/served" / name).write_text("Origin: small\n" if name == "Release" else "")
    look = "cat /etc/apt/auth.conf; apt-get update -o Dir::Etc::sourcelist=/etc/apt/sources.list.d/one.list -o Dir::Etc::sourceparts=- 2>&1"
    lines = [  # on the small internet, whose mounts nobody else sees
        *(f"mount -t tmpfs none /etc/apt/{each}" for each in ("sources.list.d", "auth.conf.d")),
        "echo 'deb [trusted=yes] https://web.test/private/served/ ./' > /etc/apt/sources.list.d/one.list",
        f"echo 'machine web.test/private login me password {INDEX_SECRET}' > /etc/apt/auth.conf.d/one.conf",
        f"{shlex.join(PROGRAM)} run --system --throw-away --network packages -- sh -c {shlex.quote(look)}",
    ]
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()} | {"AGENT_SANDBOX_STATE": str(tmp_path / "state")}
    visit = run_on_internet(tmp_path / "net", ["sh", "-c", "\n".join(lines)], env=env, cwd=project)
    assert "machine web.test/private login me password agent-sandbox-secret-index-" in visit.stdout, visit
    assert "Get:2 https://web.test/private/served ./ Release" in visit.stdout and INDEX_SECRET not in visit.stdout, visit
