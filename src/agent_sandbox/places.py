"""Where things are on this machine for this user: the one place of the SDK and the surfaces that asks the environment.

Everything below takes paths as arguments. Functions, not constants: a test, or a process that changes its user, gets a fresh answer.
"""

from __future__ import annotations

import os
import pwd
import time

from agent_sandbox.ledger.store import Ledger

LEDGER = "ledger.jsonl"


def home() -> str:
    """The user's home, as the shell has it. A user without one gets `/`, where there is nothing of theirs to hide or keep."""
    for candidate in (os.environ.get("HOME", ""), _account_home()):
        if os.path.isabs(candidate):
            return os.path.normpath(candidate)
    return "/"


def state_dir() -> str:
    """Where sandboxes, layers and the ledger are kept: `$AGENT_SANDBOX_STATE`, or `agent-sandbox` in the XDG state directory.

    It is not made here. A relative `$XDG_STATE_HOME` is ignored, as its specification asks.
    """
    if chosen := os.environ.get("AGENT_SANDBOX_STATE"):
        return os.path.abspath(chosen)
    base = os.environ.get("XDG_STATE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home(), ".local/state"), "agent-sandbox")


def ledger() -> Ledger:
    """The ledger of this user. The file is made with its first entry."""
    return Ledger(os.path.join(state_dir(), LEDGER), clock=time.time)


def homes_of_others() -> tuple[str, ...]:
    """Homes that this process could look into and that are not `home()`: for root those in the account file, else only the account's own.

    Only directories that exist and have nothing else for a purpose: service accounts name `/`, `/bin` or `/usr/sbin` as theirs.
    """
    candidates = {account.pw_dir for account in pwd.getpwall()} if os.geteuid() == 0 else {_account_home()}
    found = {os.path.normpath(path) for path in candidates if os.path.isabs(path) and os.path.isdir(path)}
    return tuple(sorted(path for path in found - {home()} if path.split("/")[1] in ("home", "root", "var", "srv", "opt")))


def _account_home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # a container may run as a number without an account
        return ""
