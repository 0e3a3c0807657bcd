"""The provisions of a run's egress: secrets with their values, tables of rules, and the settings of package indexes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from agent_sandbox import secret_values
from agent_sandbox.assembly import SEARCHES, Host
from agent_sandbox.engine.provisions import NO_PROVISIONS, Provisions
from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import Secret, check_bound
from agent_sandbox.policy.model import Policy

MOST_RULES = 1 << 20  # bytes of a user's table of rules of the search


def provisions_of(
    host: Host,
    environ: Mapping[str, str],
    policy: Policy,
    secrets: Sequence[Secret],
    *,
    project: str | None,
    handed: Iterable[str],
    packages: bool,
) -> Provisions:
    """Return what the egress is given: see `Assembly.provisions`."""
    if not policy.network.outbound:
        if secrets:
            why = f"the secret {secrets[0].name} is for a run with a network, and this one has none"
            raise PolicyError(why, hint=f"add --network {secrets[0].hosts[0]}")
        return NO_PROVISIONS
    check_bound(secrets, policy.network)
    home, search = host.home, policy.network.search
    tables = []
    for path in search.tables if not search.off else ():
        data = secret_values.read_outside("the table of rules", path, home=home, project=project, most=MOST_RULES)
        tables.append((path, data.decode("utf-8", "replace")))
    if (search.actions or search.floor or tables) and not search.off:
        from agent_sandbox.egress.dlp import rules  # and with it the engine of patterns: few users change the rules

        known = rules.default_rules()
        for path, text in tables:
            known = rules.read_rules(text, path, known)
        search.check_names(frozenset(each.id for each in known))
    values = secret_values.bound(secrets, environ, home=home, project=project)
    own = secret_values.own_values(environ, (*handed, *(each.value for each in values)))
    given = Provisions(values, own, tuple(tables), os.path.join(host.state, SEARCHES))
    config = os.path.dirname(host.config)
    if packages:
        from agent_sandbox.index_settings import with_indexes  # few runs install packages

        given = with_indexes(given, policy, home, config=config, project=project)
    if packages or secret_values.git_names_roots(home):
        from agent_sandbox.company_roots import with_roots  # few machines have such roots

        given = with_roots(given, policy.network, home, packages=packages, config=config, project=project)
    return given
