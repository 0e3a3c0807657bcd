"""A policy is checked when it is made and named by its digest."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.model import EVERYWHERE, OFFLINE, FileRules, Guarantee, Limits, Policy, cloned, locked, with_network
from agent_sandbox.policy.network import network_rules
from agent_sandbox.policy.paths import parse
from agent_sandbox.policy.secrets import Mask, default_masks

BOTH = {Guarantee.FILES_CONFINED, Guarantee.NO_NETWORK, Guarantee.SYSCALLS_FILTERED, Guarantee.NOT_HOST_ROOT}
BOTH |= {Guarantee.MEMORY_WATCHED, Guarantee.DISK_LIMITED}
WEB = network_rules(outbound=True)
MASKS = default_masks(homes=["/home/u"])


def test_locked_shows_nothing_and_starts_nothing() -> None:
    policy = locked()
    assert not policy.files.reaches("/etc/passwd") and not policy.processes and not policy.network.outbound
    assert policy.requires == BOTH | {Guarantee.NO_NEW_PROCESSES}


def test_cloned_shows_everything_but_the_masks() -> None:
    policy = cloned(masks=MASKS)
    assert policy.files.reaches("/etc/passwd") and policy.files.reaches("/home/u/.bashrc")
    assert not policy.files.reaches("/etc/shadow") and not policy.files.reaches("/home/u/.ssh/id_ed25519")
    assert policy.requires == BOTH
    assert policy.limits.wall_seconds is None and policy.limits.output_bytes is None


def test_a_limit_on_cpu_time_requires_its_guarantee() -> None:
    assert Guarantee.CPU_LIMITED in locked(limits=Limits(cpu_seconds=1)).requires


@pytest.mark.parametrize("dropped", [Guarantee.FILES_CONFINED, Guarantee.NO_NETWORK, Guarantee.NO_NEW_PROCESSES, Guarantee.MEMORY_WATCHED])
def test_a_policy_that_promises_more_than_it_requires_is_refused(dropped: Guarantee) -> None:
    with pytest.raises(PolicyError, match=dropped.value):
        replace(locked(), requires=locked().requires - {dropped})


@pytest.mark.parametrize("policy", [locked(network=WEB), cloned(masks=(), network=WEB)])
def test_a_policy_with_a_network_requires_that_all_of_it_passes_the_egress(policy: Policy) -> None:
    assert Guarantee.EGRESS_ONLY in policy.requires and Guarantee.NO_NETWORK not in policy.requires
    with pytest.raises(PolicyError, match="egress-only"):
        replace(policy, requires=policy.requires - {Guarantee.EGRESS_ONLY})
    with pytest.raises(PolicyError, match="requires no-network, and allows the network"):
        replace(policy, requires=policy.requires | {Guarantee.NO_NETWORK})
    assert with_network(with_network(policy, OFFLINE), WEB) == policy
    assert Guarantee.NO_NETWORK in with_network(policy, OFFLINE).requires


def test_published_ports_open_nothing_outward_and_are_in_the_digest() -> None:
    inward = locked(network=network_rules(inbound=True))
    assert Guarantee.NO_NETWORK in inward.requires and Guarantee.EGRESS_ONLY not in inward.requires
    assert inward.digest() != locked().digest()


def test_the_network_is_in_the_digest_and_a_policy_without_one_has_the_digest_that_it_always_had() -> None:
    """Approvals, capabilities and records name policies by their digests, also those of before there was a network."""
    assert locked().digest() == "bc5c3b4e565b4efd8996d84e4985e6fd22497e1bd19bd4bb58b863da5c9abf40"
    assert locked(network=network_rules(denied=["example.com"])).digest() == locked().digest(), "none at all is none"
    digests = {each.digest() for each in (locked(), locked(network=WEB), locked(network=network_rules(outbound=True, hosts=["a.example"])))}
    assert len(digests) == 3


def test_the_system_profile_needs_processes() -> None:
    with pytest.raises(PolicyError, match="package managers"):
        replace(locked(), system=True)


def test_what_is_denied_or_masked_wins_over_what_is_allowed() -> None:
    rules = FileRules(
        read=True, allowed=(parse("/data/*"),), denied=(parse("/data/secrets/*"),), masks=(Mask("/data/.env", "test"),), allow_hidden=True
    )
    assert rules.reaches("/data/x") and rules.reaches("/data/.x")
    assert not any(rules.reaches(path) for path in ("/data/secrets/x", "/data/.env", "/etc/passwd"))


def test_hidden_names_are_there_only_when_allowed_or_spelt_out() -> None:
    rules = FileRules(read=True, allowed=(parse("/data"), parse("/home/u/.config/app/*")))
    assert rules.reaches("/data/x") and rules.reaches("/home/u/.config/app/x")
    assert not any(rules.reaches(path) for path in ("/data/.git", "/data/.git/config", "/home/u/.config/app/.x"))
    assert FileRules(read=True, allowed=EVERYWHERE, allow_hidden=True).reaches("/.x")
    assert not FileRules(read=True, allowed=EVERYWHERE).reaches("/.x")


def test_equal_policies_have_equal_digests_and_others_do_not() -> None:
    base = locked(limits=Limits(wall_seconds=30))
    assert base.digest() == locked(limits=Limits(wall_seconds=30.0)).digest()
    others = [locked(read=True), locked(processes=True), locked(limits=Limits(wall_seconds=31)), cloned(masks=()), cloned(masks=MASKS)]
    others += [locked(allowed=[parse("/a")]), locked(allowed=[parse("/a/*")]), locked(denied=[parse("/a")])]
    assert len({policy.digest() for policy in [base, *others]}) == 9


def test_the_digest_does_not_depend_on_the_process_that_computes_it() -> None:
    script = "from agent_sandbox.policy.model import locked; print(locked().digest(), end='')"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    seeds = [environment | {"PYTHONHASHSEED": seed} for seed in ("1", "2")]
    digests = {subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True, text=True).stdout for env in seeds}
    assert digests == {locked().digest()}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"wall_seconds": "5"}, "wall_seconds must be a number"),
        ({"wall_seconds": True}, "wall_seconds must be a number"),
        ({"memory_bytes": 0}, "memory_bytes must be positive and finite"),
        ({"cpu_seconds": float("inf")}, "cpu_seconds must be positive and finite"),
        ({"open_files": 1.5}, "open_files must be a whole number"),
    ],
)
def test_an_absurd_limit_is_refused_by_name(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        Limits(**limits)


def test_a_limit_may_be_left_out() -> None:
    assert Limits(wall_seconds=None, memory_bytes=None).wall_seconds is None
