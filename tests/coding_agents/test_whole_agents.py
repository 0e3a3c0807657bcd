"""What a coding agent gets when it runs in the sandbox as a whole: one host, and a binding for one key."""

from __future__ import annotations

import pytest

from agent_sandbox.coding_agents.whole_agents import APIS, provide
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import Secret
from agent_sandbox.policy.network_presets import LLM_APIS, preset


@pytest.mark.parametrize("name", APIS)
def test_each_key_is_bound_to_the_host_of_its_api_and_can_be_read_back(name: str) -> None:
    api = APIS[name]
    assert api.host in preset(LLM_APIS).hosts
    for key, place in api.keys:
        needs = provide([f"/usr/bin/{name}", "-p", "x"], {key: "v", "OTHER_API_KEY": "w"}, networked=False, bound=False)
        (secret,) = map(Secret.read, needs.secrets)
        assert needs.network == (api.host,) and needs.env == ()
        assert (secret.name, secret.hosts, secret.place) == (key, (api.host,), place or "authorization")


def test_the_first_key_that_is_set_counts() -> None:
    both = {"ANTHROPIC_AUTH_TOKEN": "a", "ANTHROPIC_API_KEY": "b"}
    assert provide(["claude"], both, networked=False, bound=False).secrets == ("ANTHROPIC_API_KEY@api.anthropic.com+header:x-api-key",)
    empty = {"ANTHROPIC_AUTH_TOKEN": "a", "ANTHROPIC_API_KEY": ""}
    assert provide(["claude"], empty, networked=False, bound=False).secrets == ("ANTHROPIC_AUTH_TOKEN@api.anthropic.com",)


def test_another_address_of_the_api_takes_the_place_of_its_host() -> None:
    needs = provide(["codex"], {"OPENAI_API_KEY": "v", "OPENAI_BASE_URL": "https://llm.corp.example:8443/v1"}, networked=False, bound=False)
    assert (needs.network, needs.secrets, needs.env) == (
        ("llm.corp.example:8443",),
        ("OPENAI_API_KEY@llm.corp.example",),
        ("OPENAI_BASE_URL",),
    )


def test_what_a_person_names_is_enough() -> None:
    assert provide(["aider"], {}, networked=True, bound=False).network == ()
    assert provide(["claude"], {}, networked=False, bound=True).secrets == ()
    with pytest.raises(PolicyError, match="aider"):
        provide(["aider"], {}, networked=False, bound=True)
    with pytest.raises(PolicyError, match="GEMINI_API_KEY is not set"):
        provide(["gemini"], {}, networked=True, bound=False)
