"""Runs with a network: real clients on a small internet, which writes down every byte that reaches it."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.program import PROGRAM
from tests.egress.internet import ADDRESSES, PACKAGE, Visit, run_on_internet

pytestmark = pytest.mark.once

WEB, OTHER = (ADDRESSES[name] for name in ("web.test", "other.test"))
Go = Callable[..., Visit]

HELLO = "echo hello from {0}"
JAVA = """
import java.net.URI;
import java.net.http.*;

class Fetch {
    public static void main(String[] words) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(words[0])).build();
        System.out.println(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
    }
}
"""
GO = """
package main

import ("fmt"; "io"; "net/http"; "os")

func main() {
	answer, err := http.Get(os.Args[1])
	if err != nil { fmt.Fprintln(os.Stderr, err); os.Exit(1) }
	body, _ := io.ReadAll(answer.Body)
	fmt.Println(string(body))
}
"""
PYTHON = shlex.quote(sys.executable)
UV = str(Path(sys.executable).with_name("uv"))  # of the development tools
PIP = f"-q --no-deps --no-cache-dir --retries 0 --disable-pip-version-check -i https://{{0}}/simple/ {PACKAGE}"
# Each reaches one host, and says hello from there only if it did. What it writes, it writes to the project.
CLIENTS = {
    "curl": "curl -sS https://{0}/page",
    "curl without encryption": "curl -sSf http://{0}/page",
    "wget": "wget -qO- https://{0}/page",
    "urllib": "python3 -c \"import urllib.request; print(urllib.request.urlopen('https://{0}/page').read().decode())\"",
    "requests": f"{PYTHON} -c \"import requests; print(requests.get('https://{{0}}/page').text)\"",
    "httpx": f"{PYTHON} -c \"import httpx; print(httpx.get('https://{{0}}/page').text)\"",
    "aiohttp": f"{PYTHON} -c \"import aiohttp, asyncio\nasync def get():\n async with aiohttp.request('GET', 'https://{{0}}/page') as got:"
    '\n  print(await got.text())\nasyncio.run(get())"',
    "node": "node -e \"fetch('https://{0}/page').then(r => r.text()).then(console.log).catch(e => {{console.error(e); process.exit(1)}})\"",
    "java": "java Fetch.java https://{0}/page",
    # Where Go is installed. `make setup` does not install it: the wheel that has it is 75 MB, for this one client.
    "go": "go run fetch.go https://{0}/page",
    "git": f"git clone -q https://{{0}}/git/one clone-{{0}} && cat clone-{{0}}/greeting && {HELLO}",
    "pip": f"python3 -m venv --without-pip env-{{0}} && python3 -m pip --python env-{{0}}/bin/python install {PIP}"
    f" && env-{{0}}/bin/python -c 'import {PACKAGE}' && {HELLO}",
    "uv": f"{shlex.quote(UV)} pip install -q --no-cache --target got-{{0}} --default-index https://{{0}}/simple/ {PACKAGE}"
    f" && PYTHONPATH=got-{{0}} python3 -c 'import {PACKAGE}' && {HELLO}",
    "npm": f"npm install --silent --fetch-retries 0 --cache cache-{{0}} --prefix npm-{{0}} --registry https://{{0}}/npm/ {PACKAGE}"
    f" && node -e \"require('./npm-{{0}}/node_modules/{PACKAGE}')\" && {HELLO}",
}
MODULES = ("requests", "httpx", "aiohttp")


def client(name: str) -> str:
    """Return the command of a client. Skips where there is no such client."""
    (program, *_) = shlex.split(CLIENTS[name])
    if name in MODULES:
        pytest.importorskip(name, reason="it is not installed")
    elif shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    return CLIENTS[name]


@pytest.fixture
def go(project: Path, tmp_path: Path) -> Go:
    """Run a line of a shell on the small internet, in the project; `{sandbox}` in it is the program with a state directory of its own.

    `{place}` is the directory of the internet.
    """

    def visit(line: str, *, name: str = "net") -> Visit:
        place = tmp_path / name
        _publish(place / "git" / "one")
        (project / "Fetch.java").write_text(JAVA)
        (project / "fetch.go").write_text(GO)
        env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.startswith(("PIP_", "npm_"))}
        env |= {"AGENT_SANDBOX_STATE": str(tmp_path / "state"), "PIP_CONFIG_FILE": os.devnull}
        line = line.replace("{sandbox}", shlex.join(PROGRAM)).replace("{place}", str(place))
        return run_on_internet(place, ["sh", "-c", line], env=env, cwd=project)

    return visit


def _publish(repository: Path) -> None:
    """Make a repository with a commit."""
    repository.mkdir(parents=True)
    (repository / "greeting").write_text("good day\n")
    named = ("-c", "user.name=someone", "-c", "user.email=someone@web.test")
    for words in (("init", "-q"), ("add", "."), (*named, "commit", "-q", "-m", "greet")):
        subprocess.run(["git", "-C", repository, *words], check=True)


def _inside(command: str, *flags: str) -> str:
    return f"{{sandbox}} run --throw-away {shlex.join(flags)} -- sh -c {shlex.quote(command)}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.both) if name in ("curl", "urllib", "pip") else name for name in CLIENTS]
)
def test_a_client_reaches_the_host_that_is_allowed_and_no_other(go: Go, name: str) -> None:
    command = client(name)
    visit = go(_inside(f"{command.format('web.test')}; {command.format('other.test')}", "--network", "web.test"))
    assert "hello from web.test" in visit.stdout, visit
    assert "hello from other.test" not in visit.stdout
    assert {where.partition(":")[0] for where in visit.received} == {WEB}
    assert set(visit.asked) == {"web.test"}, "nobody is asked for a name that is not allowed"


@pytest.mark.slow  # and the same whoever runs it: there is no sandbox
@pytest.mark.parametrize("name", CLIENTS)
def test_without_a_sandbox_the_same_client_reaches_both(go: Go, name: str) -> None:
    """The control: what the test above does not see could have been seen."""
    command = client(name)
    named = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
    trusting = " ".join(f"{each}=/etc/ssl/certs/ca-certificates.crt" for each in named)
    java = "JAVA_TOOL_OPTIONS=-Djavax.net.ssl.trustStore={place}/roots.jks"
    visit = go(f"export {trusting} {java}; {command.format('web.test')}; {command.format('other.test')}")
    assert {where.partition(":")[0] for where in visit.received} == {WEB, OTHER}, visit
    assert "hello from web.test" in visit.stdout and "hello from other.test" in visit.stdout, visit


@pytest.mark.both
def test_without_permission_there_is_no_network(go: Go) -> None:
    visit = go(_inside(f"curl -sS -m 5 https://web.test/page; curl -sS -m 5 http://{WEB}/page; cat /proc/net/route"))
    assert visit.received == {} and visit.asked == [] and "hello" not in visit.stdout


@pytest.mark.both
@pytest.mark.parametrize("host", ["inside.test", "meta.test"])
def test_a_name_that_leads_inside_is_refused_although_it_is_allowed(go: Go, host: str) -> None:
    visit = go(_inside(f"curl -sS -m 20 http://{host}/page; curl -sSk -m 20 https://{host}/page", "--network", f"{host},web.test"))
    assert visit.received == {}, visit
    assert "hello" not in visit.stdout


@pytest.mark.both
def test_addresses_that_are_written_down_end_at_the_door(go: Go) -> None:
    lines = [f"curl -sS -m 10 http://{address}/page" for address in (OTHER, "169.254.169.254", "[2001:4860:4860::8888]", WEB)]
    lines += [
        f"curl -sSk -m 10 --resolve other.test:443:{WEB} https://other.test/page",
        f"curl -sS -m 10 -H 'Host: web.test' http://{OTHER}/page",
    ]
    visit = go(_inside("; ".join(lines), "--network", "web.test"))
    assert OTHER not in "".join(visit.received) and "169.254" not in "".join(visit.received), visit
    assert "hello from other.test" not in visit.stdout


def test_the_host_of_a_request_is_that_of_its_connection(go: Go) -> None:
    visit = go(
        _inside(
            "curl -sS -H 'Host: other.test' https://web.test/page; curl -sS -H 'Host: other.test' http://web.test/page",
            "--network",
            "*.web.test,web.test",
        )
    )
    assert visit.received == {}, visit
    assert "refused by the sandbox" in visit.stdout


def test_a_redirect_is_judged_anew(go: Go) -> None:
    visit = go(
        _inside(
            "curl -sSL 'https://web.test/to?https://other.test/page'; curl -sSL 'https://web.test/to?http://inside.test/page'",
            "--network",
            "web.test",
        )
    )
    assert set(visit.received) == {f"{WEB}:443"}, visit


def test_a_false_certificate_is_refused(go: Go) -> None:
    visit = go(_inside("curl -sSk -d secret-canary https://false.test/echo", "--network", "false.test"))
    assert visit.received == {} and "502" not in visit.stderr, visit
    assert "certificate" in visit.stdout


@pytest.mark.both
def test_bytes_of_any_kind_go_to_a_port_that_is_named(go: Go) -> None:
    talk = "import socket; s = socket.create_connection(('db.test', 5432)); s.sendall(bytes(range(256))); print(s.recv(256)[255])"
    visit = go(_inside(f"python3 -c {shlex.quote(talk)}", "--network", "db.test:5432"))
    assert visit.stdout == "255\n", visit
    assert visit.received == {f"{ADDRESSES['db.test']}:5432": bytes(range(256))}


@pytest.mark.skipif(shutil.which("psql") is None, reason="needs psql")
def test_a_client_of_postgresql_reaches_the_host_and_port_that_are_named(go: Go) -> None:
    command = "psql 'host={0} port=5432 user=someone dbname=things sslmode=disable connect_timeout=10' -c 'select 1'"
    visit = go(_inside(f"{command.format('db.test')}; {command.format('other.test')}", "--network", "db.test:5432"))
    (place, sent), *others = visit.received.items()
    assert place == f"{ADDRESSES['db.test']}:5432" and not others and set(visit.asked) == {"db.test"}
    assert sent[4:8] == b"\0\3\0\0" and b"user\0someone\0database\0things\0" in sent, "the first message of version 3 of its protocol"


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="needs redis-cli")
def test_a_client_of_redis_reaches_the_host_and_port_that_are_named(go: Go) -> None:
    command = "redis-cli -h {0} ping canary"
    both = f"{command.format('db.test')}; {command.format('cache.db.test')}"
    visit = go(_inside(both, "--network", "db.test:6379"))
    assert visit.stdout.count("canary") == 1 and set(visit.asked) == {"db.test"}, visit
    assert visit.received == {f"{ADDRESSES['db.test']}:6379": b"*2\r\n$4\r\nping\r\n$6\r\ncanary\r\n"}
    assert go(both, name="control").stdout.count("canary") == 2, "without a sandbox it reaches both"


@pytest.mark.needs_root
@pytest.mark.skipif(shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None, reason="needs apt-get and dpkg-deb")
def test_apt_installs_a_package_from_the_host_that_is_allowed(go: Go, tmp_path: Path) -> None:
    served, content = tmp_path / "net" / "served", tmp_path / "content"
    served.mkdir(parents=True)
    (content / "DEBIAN").mkdir(parents=True)
    (content / "opt").mkdir()
    (content / "opt" / "greeting").write_text("good day\n")
    control = "Package: smalldeb\nVersion: 1.0\nArchitecture: all\nMaintainer: someone <someone@web.test>\nDescription: small\n"
    (content / "DEBIAN" / "control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", content, served / "smalldeb.deb"], check=True, capture_output=True)
    package = (served / "smalldeb.deb").read_bytes()
    (served / "Packages").write_text(
        f"{control}Filename: ./smalldeb.deb\nSize: {len(package)}\nSHA256: {hashlib.sha256(package).hexdigest()}\n"
    )
    apt = "apt-get -q -o Dir::Etc::sourcelist=/etc/one.list -o Dir::Etc::sourceparts=-"
    steps = (
        "echo 'deb [trusted=yes] http://{0}/served ./' > /etc/one.list",
        f"{apt} update",
        f"{apt} install -y smalldeb",
        "cat /opt/greeting",
    )
    command = " && ".join(steps)
    visit = go(_inside(f"({command.format('other.test')}); {command.format('web.test')}", "--system", "--network", "web.test"))
    assert visit.stdout.endswith("good day\n") and visit.stdout.count("good day") == 1, visit
    assert set(visit.received) == {f"{WEB}:80"} and set(visit.asked) == {"web.test"}


@pytest.mark.parametrize(
    ("tier", "flags", "reached"), [("high", "", {WEB, OTHER}), ("medium", "--network web.test", {WEB}), ("medium", "", set())]
)
def test_the_tiers_of_trust_have_a_full_network_and_an_allowlist(go: Go, project: Path, tier: str, flags: str, reached: set[str]) -> None:
    fetch = "git ls-remote -q https://{0}/git/one"
    runs = (f"{{sandbox}} run --throw-away --policy {tier} {flags} -- {fetch.format(host)}" for host in ("web.test", "other.test"))
    visit = go(f"export HOME={project.parent}; {'; '.join(runs)}")
    assert {where.partition(":")[0] for where in visit.received} == reached, visit


def test_a_refusal_names_what_would_allow_it(go: Go) -> None:
    visit = go(_inside(f"curl -sS --resolve other.test:80:{WEB} http://other.test/page", "--network", "web.test"))
    assert "--network other.test" in visit.stdout, visit


def test_what_passed_and_what_was_refused_is_in_the_log(go: Go) -> None:
    visit = go(
        _inside("curl -sS https://web.test/page; curl -sS https://other.test/page", "--network", "web.test")
        + "; {sandbox} log --category network"
    )
    assert "web.test" in visit.stdout and "other.test" in visit.stdout, visit


@pytest.mark.both
def test_the_authority_of_a_run_is_in_no_change_set(go: Go) -> None:
    run = "{sandbox} run --network web.test -- sh -c 'curl -sS https://web.test/page > page.txt'"
    visit = go(f"{run}; {{sandbox}} diff --json")
    assert "page.txt" in visit.stdout and "CERTIFICATE" not in visit.stdout and "ca-certificates" not in visit.stdout, visit


PROXIES = " ".join(f"--env {name}=http://proxy.corp.test:8080" for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY", "npm_config_proxy"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["curl", "curl without encryption", "requests", "git", "pip", "npm"])
def test_variables_that_name_a_proxy_lead_to_the_same_door(go: Go, name: str) -> None:
    command = client(name)
    visit = go(_inside(f"{command.format('web.test')}; {command.format('other.test')}", "--network", "web.test", *PROXIES.split()))
    assert "hello from web.test" in visit.stdout, visit
    assert "hello from other.test" not in visit.stdout
    assert {where.partition(":")[0] for where in visit.received} == {WEB}
    assert set(visit.asked) == {"web.test"}, "and nobody was asked for the proxy of the caller"


CONNECT = """
import socket, ssl
def through(connect, name, path="/page", host=""):
    with socket.create_connection(("198.18.0.1", 3128), 30) as way:
        way.sendall(f"CONNECT {connect} HTTP/1.1\\r\\nHost: {connect}\\r\\n\\r\\n".encode())
        if " 200 " not in (said := way.recv(4096).decode()):
            return said.split("\\r\\n")[0]
        with ssl._create_unverified_context().wrap_socket(way, server_hostname=name) as tls:
            tls.sendall(f"GET {path} HTTP/1.1\\r\\nHost: {host or name}\\r\\nConnection: close\\r\\n\\r\\n".encode())
            return tls.makefile().read()
print(through("web.test:443", "web.test"))
print(through("web.test:443", "other.test", "/canary"), through("web.test:443", "web.test", "/canary", "other.test"))
print(through("other.test:443", "web.test", "/canary"), through("127.0.0.1:443", "web.test", "/canary"))
print(through("%s:443", "web.test", "/canary"), through("web.test:22", "web.test", "/canary"))
"""


def test_connect_names_the_host_of_tls_and_of_the_request(go: Go, project: Path) -> None:
    (project / "connect.py").write_text(CONNECT % OTHER)
    visit = go(_inside("python3 connect.py", "--network", "web.test,other.test:80") + "; {sandbox} log --all --category network")
    assert visit.stdout.count("hello from web.test") == 1, visit
    assert set(visit.received) == {f"{WEB}:443"} and b"canary" not in visit.received[f"{WEB}:443"]
    assert "its TLS asks for other.test" in visit.stdout and "403" in visit.stdout


NAMES_BY_TCP = """
import socket
def ask(name, server):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    question = bytes(4) + b"\\0\\1" + bytes(6) + labels + b"\\0\\0\\1\\0\\1"
    with socket.create_connection((server, 53), 30) as way:
        way.sendall(len(question).to_bytes(2, "big") + question)
        answer = way.makefile("rb").read(int.from_bytes(way.recv(2), "big"))
    return answer[3] & 15, answer[7]
print(ask("web.test", "9.9.9.9"), ask("web.test", "2620:fe::fe"), ask("other.test", "9.9.9.9"), ask("canary.other.test", "127.0.0.53"))
"""


@pytest.mark.both
def test_names_are_asked_over_tcp_as_over_udp(go: Go, project: Path) -> None:
    (project / "names.py").write_text(NAMES_BY_TCP)
    visit = go(_inside("python3 names.py", "--network", "web.test") + "; {sandbox} log --all --category network")
    assert visit.stdout.startswith("(0, 1) (0, 1) (3, 0) (3, 0)\n"), visit
    assert visit.asked == [] and "DENIED" in visit.stdout, "nobody beyond is asked, and what was refused is recorded"


def test_a_budget_ends_what_goes_beyond_it(go: Go) -> None:
    curl = "curl -sS https://web.test/page; echo; "
    visit = go(_inside(curl * 3 + curl.replace("web", "other"), "--network", "web.test,other.test", "--budget", "web.test requests:2"))
    assert visit.stdout.count("hello from web.test") == 2 and "hello from other.test" in visit.stdout, visit
    assert "the budget web.test requests:2 is used up: all 2 requests were made" in visit.stdout
    assert visit.received[f"{WEB}:443"].count(b"GET /page") == 2
    visit = go(_inside("echo ran", "--budget", "web.test requests:2"), name="without")
    assert "--budget is for a run with a network" in visit.stderr and "ran" not in visit.stdout
