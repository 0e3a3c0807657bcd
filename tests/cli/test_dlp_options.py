"""A person changes the search for secrets and personal data; the project and the system only make it stricter."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.assembly import here
from agent_sandbox.cli import context
from agent_sandbox.cli.options import PolicyOptions
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.explanation import explain
from agent_sandbox.policy.files.layers import Effective
from agent_sandbox.policy.search_rules import SearchRules
from agent_sandbox.workspace.project import Project
from tests.cli.test_network_options import Machine, machine

__all__ = ["machine"]


def _search(machine: Machine, *, no_dlp: bool = False, files: tuple[str, ...] = ()) -> SearchRules:
    options = PolicyOptions(network=("a.example",), no_dlp=no_dlp, files=files)
    return context.policy_of(options, Project(str(machine.project))).network.search


def test_it_is_on_and_an_option_or_ones_own_file_turns_it_off(machine: Machine) -> None:
    assert _search(machine) == SearchRules()
    assert _search(machine, no_dlp=True).off
    machine.write(user="[dlp]\noff = true\n")
    assert _search(machine).off
    machine.write(user="[network]\noutbound = true\n[dlp]\nalert = ['card']\n")
    assert context.policy_of(PolicyOptions(no_dlp=True), Project(str(machine.project))).network.search.off


def test_a_project_turns_nothing_off_and_only_makes_it_stricter(machine: Machine) -> None:
    machine.write(project="[dlp]\noff = true\nalert = ['card']\nrules = ['/x']\n")
    search = _search(machine)
    assert not search.off and search.action("card", "personal", "block") == "block" and search.tables == ()
    machine.write(user="[dlp]\nalert = ['personal']\n", project="[dlp]\nblock = ['card']\n")
    search = _search(machine)
    assert [search.action(rule, "personal", "block") for rule in ("card", "iban")] == ["block", "alert"]


def test_the_system_keeps_it_on_and_sets_the_mildest_action(machine: Machine) -> None:
    machine.write(system="[dlp]\noff = false\nredact = ['card']\n", user="[dlp]\noff = true\nalert = ['card']\n")
    search = _search(machine, no_dlp=True)
    assert not search.off and search.action("card", "personal", "block") == "redact"
    machine.write(system="[dlp]\nredact = ['card']\n")
    assert _search(machine, no_dlp=True).off, "the control: it has not said off = false"


def test_a_chosen_file_counts_as_a_persons(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "mild.toml").write_text("[dlp]\nalert = ['card']\n")
    assert _search(machine, files=(str(tmp_path / "mild.toml"),)).action("card", "personal", "block") == "alert"


def test_a_rule_or_a_table_that_is_not_there_is_refused_before_the_run(machine: Machine, tmp_path: Path) -> None:
    def provide() -> None:
        policy = context.policy_of(PolicyOptions(network=("a.example",)), Project(str(machine.project)))
        here().provisions(policy, project=str(machine.project))

    table = "[[rule]]\nid = 'badge'\nwhat = 'a badge'\npattern = 'badge-[0-9]{6}'\n"
    (tmp_path / "rules.toml").write_text(table)
    machine.write(user=f"[dlp]\nrules = ['{tmp_path}/rules.toml']\nalert = ['badge']\n")
    provide()
    (machine.project / "rules.toml").write_text(table)
    for wrong, why in (
        ("alert = ['cart']", "cart"),
        (f"rules = ['{tmp_path}/none.toml']", "cannot be read"),
        (f"rules = ['{machine.project}/rules.toml']", "lies in the project"),
        (f"rules = ['{tmp_path}/config/agent-sandbox/policy.toml']", "more than rules"),
    ):
        machine.write(user=f"[dlp]\n{wrong}\n")
        with pytest.raises(PolicyError, match=why):
            provide()


def test_the_explanation_and_a_warning_say_whether_what_leaves_is_searched(machine: Machine) -> None:
    def effective(*, no_dlp: bool = False) -> Effective:
        return context.effective_of(PolicyOptions(network=("a.example",), no_dlp=no_dlp), Project(str(machine.project)))

    machine.write(project="[dlp]\noff = true\n", user="[dlp]\nalert = ['card']\n")
    assert "network: what leaves is searched for secrets and personal data; alert card" in explain(effective())
    assert any("cannot turn that off" in each for each in effective().warnings)
    assert "network: what leaves is not searched for secrets and personal data" in explain(effective(no_dlp=True))
    assert not effective(no_dlp=True).warnings
