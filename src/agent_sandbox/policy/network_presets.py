"""Names for groups of hosts, and the network that a person writes as a list: `packages`, `api.example.com`, `db.example.com:5432`.

Pure data and its reading. The indexes that this machine's package managers are configured with come in by argument
(`agent_sandbox.package_indexes` reads them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent_sandbox._fast.values import dataclass
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.hosts import bracketed, covers, is_local
from agent_sandbox.policy.network import WEB_PORTS, NetworkRules, RequestRule, canonical_entry, network_rules, public_web, split_port

PACKAGES, GIT_HOSTS, LLM_APIS = PRESETS = ("packages", "git-hosts", "llm-apis")
MARKS = ("private", "opaque", "uninspected", "ask")
_READING = ("GET", "HEAD")

# What pip and uv, and what npm, use where nothing else is configured.
PYPI, NPM = ("pypi.org", "files.pythonhosted.org"), ("registry.npmjs.org",)
# The public indexes of the package managers, and the hosts from which they fetch the packages themselves.
_PACKAGES = (
    *(*PYPI, "download.pytorch.org", "conda.anaconda.org", "repo.anaconda.com"),
    *(*NPM, "registry.yarnpkg.com", "nodejs.org", "jsr.io", "npm.jsr.io"),
    *("index.crates.io", "static.crates.io", "crates.io", "static.rust-lang.org"),
    *("proxy.golang.org", "sum.golang.org", "go.dev", "dl.google.com"),
    *("rubygems.org", "index.rubygems.org", "repo.maven.apache.org", "repo1.maven.org", "plugins.gradle.org", "services.gradle.org"),
    *("api.nuget.org", "repo.packagist.org", "packagist.org", "repo.hex.pm", "hex.pm", "hackage.haskell.org", "cran.r-project.org"),
    *("deb.debian.org", "security.debian.org", "ftp.debian.org", "snapshot.debian.org"),
    *("archive.ubuntu.com", "*.archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com"),
    *("dl-cdn.alpinelinux.org", "dl.fedoraproject.org", "mirrors.fedoraproject.org"),
)
_GIT_HOSTS = (
    *("github.com", "codeload.github.com", "raw.githubusercontent.com", "objects.githubusercontent.com", "media.githubusercontent.com"),
    *("release-assets.githubusercontent.com", "github-cloud.githubusercontent.com", "gitlab.com", "bitbucket.org", "codeberg.org"),
    *("git.sr.ht", "git.kernel.org", "git.savannah.gnu.org", "salsa.debian.org"),
)
# What git sends to fetch; to push it sends git-receive-pack.
_FETCHING = ("/**/git-upload-pack", "/**/info/lfs/objects/batch")
_LLM_APIS = (
    *("api.openai.com", "api.anthropic.com", "generativelanguage.googleapis.com", "aiplatform.googleapis.com", "api.mistral.ai"),
    *("api.cohere.com", "api.groq.com", "api.together.xyz", "api.fireworks.ai", "api.deepseek.com", "api.x.ai", "api.perplexity.ai"),
    *("openrouter.ai", "api.cerebras.ai", "router.huggingface.co", "api-inference.huggingface.co"),
)


@dataclass(frozen=True)
class HostList:
    """The hosts that a list opens, as the fields of a `Reach` have them."""

    hosts: tuple[str, ...] = ()
    requests: tuple[RequestRule, ...] = ()
    uninspected: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    def joined(self, other: HostList) -> HostList:
        """Return what both open together."""
        return HostList(
            tuple(dict.fromkeys((*self.hosts, *other.hosts))),
            tuple(dict.fromkeys((*self.requests, *other.requests))),
            tuple(dict.fromkeys((*self.uninspected, *other.uninspected))),
            tuple(dict.fromkeys((*self.opaque, *other.opaque))),
            tuple(dict.fromkeys((*self.private, *other.private))),
            tuple(dict.fromkeys((*self.asked, *other.asked))),
        )


def preset(name: str, indexes: Iterable[str] = ()) -> HostList:
    """Return the hosts of a preset. Raises `PolicyError` for an unknown one.

    `indexes` are the hosts, with or without a port, of the indexes that this machine uses. They belong to `packages`, and may lie on
    private addresses: a company may serve the name of a public index from an address of its own.
    """
    if name == PACKAGES:
        own = tuple(canonical_entry(each) for each in indexes)
        private = tuple(dict.fromkeys(host for host, _ in map(split_port, own)))
        hosts = tuple(dict.fromkeys((*_PACKAGES, *own)))
        return HostList(hosts, tuple(RequestRule(host, _READING) for host in dict.fromkeys((*_PACKAGES, *private))), private=private)
    if name == GIT_HOSTS:
        reading = (RequestRule(host, _READING) for host in _GIT_HOSTS)
        fetching = (RequestRule(host, ("POST",), _FETCHING) for host in _GIT_HOSTS)
        return HostList(_GIT_HOSTS, (*reading, *fetching))
    if name == LLM_APIS:
        return HostList(_LLM_APIS)
    raise PolicyError(f"there is no network preset {name!r}", hint=f"use one of {', '.join(PRESETS)}")


def index_hosts() -> tuple[str, ...]:
    """Return the patterns of the hosts that are public indexes of packages."""
    return _PACKAGES


def network_of(entries: Iterable[str], *, web: bool = False, indexes: Callable[[], Iterable[str]] = tuple) -> NetworkRules:
    """Return the network that a list opens: exactly its hosts. Raises `PolicyError` naming an invalid entry.

    An entry is a preset, or a host as in `Reach.hosts`. Without a port it means 80 and 443. A single host with another port may be sent any
    bytes, because its protocol is rarely HTTP. A host may carry marks: `+private` lets it lie on a private address, `+opaque` lets it be
    sent any bytes, `+uninspected` passes its TLS on unread, and for `+ask` a person is asked first. A host that is also in a preset may be
    sent every request.

    `web` opens every public host at 80 and 443 besides. `indexes` is called if `packages` is in the list.
    """
    entries = tuple(entries)
    if web and not entries:
        return public_web()
    named, opened = HostList(), HostList(("*:80", "*:443") if web else ())
    for entry in entries:
        if entry in PRESETS:
            opened = opened.joined(preset(entry, indexes() if entry == PACKAGES else ()))
        else:
            named = named.joined(_entry(entry))
    patterns = dict.fromkeys(split_port(each)[0] for each in named.hosts)
    limited = [rule.host for rule in opened.requests]
    lifted = tuple(RequestRule(each) for each in patterns if covers(limited, each) or any(covers((each,), host) for host in limited))
    both = opened.joined(named).joined(HostList(requests=lifted))
    return network_rules(
        outbound=True,
        hosts=both.hosts,
        ports=WEB_PORTS,
        requests=both.requests,
        uninspected=both.uninspected,
        opaque=both.opaque,
        private=both.private,
        asked=both.asked,
        localhost=True,
    )


def opaque_of(hosts: Iterable[str], ports: Iterable[int]) -> tuple[str, ...]:
    """Return the single hosts among patterns, each with each port beyond the web's: what may be sent any bytes because both are named."""
    beyond = [port for port in ports if port not in WEB_PORTS]
    single = [canonical_entry(each) for each in hosts]
    return tuple(
        f"{bracketed(host)}:{number}"
        for host, port in map(split_port, single)
        if not host.startswith("*")
        for number in (beyond if port is None else [port] if port not in WEB_PORTS else [])
    )


def _entry(text: object) -> HostList:
    if not isinstance(text, str) or not text:
        raise PolicyError(f"the network entry {text!r} names no host", hint=f"write api.example.com, or one of {', '.join(PRESETS)}")
    written, *marks = text.split("+")
    if wrong := [mark for mark in marks if mark not in MARKS]:
        raise PolicyError(
            f"the network entry {text!r} has no mark {wrong[0]!r}", hint=f"marks are {', '.join(f'+{each}' for each in MARKS)}"
        )
    if written in PRESETS:
        raise PolicyError(f"the preset {written!r} takes no mark", hint="give the mark to one host")
    if "." not in written and (meant := _like_a_preset(written)):
        raise PolicyError(
            f"there is no preset {written!r}", hint=f"write {meant}; for a host of this name, write {written}. with a final dot"
        )
    entry = canonical_entry(written)
    host, _ = split_port(entry)
    if is_local(host):
        why = f"{written!r} is the sandbox itself: the loopback of the machine is never reachable from a sandbox"
        raise PolicyError(why, hint="leave it out; a sandbox has a loopback of its own")
    if host == "*" and {*marks} - {"ask"}:
        raise PolicyError(f"{text!r} would lift the inspection of every host", hint="give the mark to one host, or to *.example.com")
    opaque = (entry,) if "opaque" in marks else opaque_of((entry,), ())
    hosts, asked = ((), (entry,)) if "ask" in marks else ((entry,), ())
    return HostList(hosts, (), (host,) if "uninspected" in marks else (), opaque, (host,) if "private" in marks else (), asked)


def _like_a_preset(written: str) -> str:
    from difflib import get_close_matches  # names without a dot are rare

    return next(iter(get_close_matches(written, PRESETS, 1)), "")
