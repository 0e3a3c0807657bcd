"""A person names intents and declares one; the files of the project and of the system only narrow them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.policy.intents import Declared
from tests.cli.test_network_options import ALL, ASKS, Machine, machine
from tests.e2e.program import Shell

__all__ = ["machine"]
READ = '[intents."Read A"]\nhosts = ["a.example"]\nfor = "5m"\n'
WRITE = '[intents.write]\nhosts = ["b.example"]\n'


def opened(machine: Machine, intent: str | None, *network: str, files: tuple[str, ...] = (), allow: bool = False) -> set[str]:
    rules = machine.policy(*network, files=files, allow=allow).network
    rules = replace(rules, declared=None if intent is None else Declared(intent))
    return {name for name in ALL if not rules.objection(name, 443)}


def test_the_users_own_file_names_them_whatever_opens_the_network(machine: Machine) -> None:
    machine.write(user=f"{ASKS}{READ}{WRITE}")
    assert opened(machine, None) == set() and opened(machine, "read a") == {"a.example"}
    assert opened(machine, None, allow=True) == set() and opened(machine, "write", allow=True) == {"b.example"}
    assert opened(machine, "read a", "b.example", "c.example") == set(), "an intent opens a part, and nothing more"
    machine.write(user=f"{READ}{WRITE}")
    assert opened(machine, "read a") == set(), "intents open no network"


def test_a_file_that_an_option_names_does_too_and_of_one_name_both_hold(machine: Machine) -> None:
    own = machine.project.parent / "own.toml"
    own.write_text(f'{ASKS}[intents.write]\nhosts = ["b.example", "c.example"]\nfor = "1m"\n')
    assert opened(machine, "write", files=(str(own),)) == {"b.example", "c.example"}
    machine.write(user=f"{READ}{WRITE}")
    assert opened(machine, "write", files=(str(own),)) == {"b.example"}
    seconds = {each.name: each.seconds for each in machine.policy(files=(str(own),)).network.intents}
    assert seconds == {"read a": 300.0, "write": 60.0}


@pytest.mark.parametrize("who", ["project", "system"])
def test_the_projects_file_and_the_systems_narrow_them_and_name_none(machine: Machine, who: str) -> None:
    machine.write(**{"user": f"{ASKS}{READ}{WRITE}", who: '[intents.other]\nhosts = ["c.example"]\n[intents."READ A"]\nhosts = ["*"]\n'})
    assert opened(machine, "other") == set() and opened(machine, "read a") == {"a.example"}
    machine.write(**{"user": f"{ASKS}{READ}{WRITE}", who: '[intents."read a"]\nhosts = []\nalways = true\n'})
    assert opened(machine, "read a") == opened(machine, None) == set() and opened(machine, "write") == {"b.example"}
    machine.write(**{"user": f"{ASKS}{READ}", who: '[intents."read a"]\nhosts = []\n'})
    assert opened(machine, None) == opened(machine, "read a") == set(), "taking the last one away opens nothing"
    machine.write(**{"user": ASKS, who: READ})
    assert opened(machine, None) == ALL, "the control: where no person names any, there are none"


def test_a_project_that_names_one_is_told_that_it_counts_for_nothing(machine: Machine) -> None:
    machine.write(user=f"{ASKS}{READ}", project=WRITE)
    (warning,) = machine.warnings()
    assert (
        warning
        == f"the intent 'write' is left out: a project's file ({machine.project}/agent-sandbox.toml) narrows intents, and names none"
    )


def test_an_intent_that_cannot_be_declared_is_refused_before_anything_runs(project: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(f"{ASKS}{READ}{WRITE}")
    shell = Shell(project, {"AGENT_SANDBOX_STATE": str(tmp_path / "state")})
    for words, why in (
        (("--policy", str(own), "--intent", "erase"), "there is no intent 'erase'; the policy names 'read a', 'write'"),
        (("--network", "a.example", "--intent", "read a"), "there is no intent 'read a': the policy names none"),
        (("--intent", "read a"), "--intent is for a run with a network"),
        (("--policy", str(own), "--intent", "\u00e9"), "not the name of an intent"),
    ):
        done = shell("run", "--throw-away", *words, "--", "touch", str(project / "ran"))
        assert done.returncode == 2 and why in done.stderr.decode(), done
    explained = shell("policy", "explain", "--policy", str(own)).stdout.decode()
    assert "network: intent 'read a' opens a.example, for 300 s" in explained
