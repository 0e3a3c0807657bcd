"""Where things are on this machine for this user: the one place of the SDK and the surfaces that asks the environment.

Everything below takes paths as arguments. Functions, not constants: a test, or a process that changes its user, gets a fresh answer.
"""

from __future__ import annotations

import os
import sys
import time

from agent_sandbox._fast.values import TYPE_CHECKING
from agent_sandbox.errors import PolicyError, RuntimeUnavailable
from agent_sandbox.policy.secrets import Mask, default_masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agent_sandbox.engine.approvals.approvers import Desk
    from agent_sandbox.engine.approvals.inbox import Inbox, Waiting
    from agent_sandbox.engine.approvals.second_factor import SecondFactor
    from agent_sandbox.engine.elevations import Elevations
    from agent_sandbox.engine.grants import Capabilities
    from agent_sandbox.ledger.writer import Ledger
    from agent_sandbox.policy.approval_rules import Word
    from agent_sandbox.policy.model import Policy
    from agent_sandbox.policy.tokens import Token

LEDGER, APPROVALS, CAPABILITIES = "ledger.jsonl", "approvals", "capabilities"
_HOMES = ("/root", "/var/", "/srv/", "/opt/")  # where there are some besides /home


def check_system() -> None:
    """Raise `RuntimeUnavailable` where there is nothing for a sandbox to stand on, not even files with locks as we know them."""
    if sys.platform == "win32":
        hint = "use WSL2, where everything works"
        raise RuntimeUnavailable("there are no sandboxes on Windows itself in this version", missing=("posix",), hint=hint)


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


def cache_dir() -> str:
    """Where what can be made again is kept: `agent-sandbox` in the XDG cache directory. It is not made here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home(), ".cache"), "agent-sandbox")


def keys_dir() -> str:
    """Where the key and the anchor of the ledger are: away from it, or whoever can change the one can change the others.

    `$AGENT_SANDBOX_KEYS`, or `agent-sandbox/keys` in the XDG data directory. A state directory that was chosen by `$AGENT_SANDBOX_STATE`
    has its own keys, beside the ledger unless they are sent elsewhere, too. It is not made here.
    """
    if chosen := os.environ.get("AGENT_SANDBOX_KEYS"):
        return os.path.abspath(chosen)
    if os.environ.get("AGENT_SANDBOX_STATE"):
        return os.path.join(state_dir(), f"{LEDGER}.keys")
    base = os.environ.get("XDG_DATA_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home(), ".local/share"), "agent-sandbox", "keys")


def may_work_in_the_background() -> bool:
    """Whether something may be left to do itself that outlives what we were asked for: not with `$AGENT_SANDBOX_NO_BACKGROUND`."""
    return not os.environ.get("AGENT_SANDBOX_NO_BACKGROUND")


def config_dir() -> str:
    """Where the user's own settings are: `agent-sandbox` in the XDG configuration directory. It is not made here."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home(), ".config"), "agent-sandbox")


def ledger() -> Ledger:
    """The ledger of this user. The file is made with its first entry."""
    return _ledger_in(state_dir(), keys_dir())


def _ledger_in(state: str, keys: str) -> Ledger:
    from agent_sandbox.ledger.writer import Ledger

    return Ledger(os.path.join(state, LEDGER), clock=time.time, keys=keys)


def inbox(
    *,
    policy: Policy | None = None,
    of: str | None = None,
    on_wait: Callable[[Waiting], None] | None = None,
    pause: Callable[[], None] = lambda: time.sleep(0.1),
) -> Inbox:
    """Where questions to this user, or `of` another, wait for an answer. `policy` is that of who asks, and says whose answers count.

    Root may come as a visitor: what it answers is then in its own ledger. Raises `PolicyError` where nobody has ever asked.
    """
    from agent_sandbox.engine.approvals import question  # most runs ask nobody
    from agent_sandbox.engine.approvals.inbox import Inbox
    from agent_sandbox.ledger import keys

    state, private = (state_dir(), keys_dir()) if of is None else _directories_of(of)
    visiting = of is not None or (os.path.exists(state) and os.stat(state).st_uid != os.geteuid())
    try:
        seal = keys.load(private, make=not visiting).derived(question.PURPOSE)
    except (FileNotFoundError, PermissionError) as error:
        if not visiting:
            raise
        raise PolicyError(f"there are no questions to be seen in {state!r}: {error.strerror}", hint="be root, and name who asks") from None
    approvers = policy.asks.approvers if policy is not None else None
    factor = second_factor() if not visiting else _second_factor_in(_own_directories()[1])
    return Inbox(
        os.path.join(state, APPROVALS),
        seal,
        ledger() if not visiting else _ledger_in(*_own_directories()),
        clock=time.time,
        pause=pause,
        approvers=None if approvers is None else _uids(approvers),
        factor=factor.accepts if factor.enrolled else None,
        on_wait=on_wait,
        visiting=visiting,
    )


def _directories_of(user: str) -> tuple[str, str]:
    """Where another user's state and keys are, unless they were put elsewhere."""
    import pwd

    try:
        top = pwd.getpwnam(user).pw_dir
    except KeyError:
        raise PolicyError(f"there is no user {user!r}", hint="name one of this machine") from None
    return os.path.join(top, ".local/state/agent-sandbox"), os.path.join(top, ".local/share/agent-sandbox/keys")


def _own_directories() -> tuple[str, str]:
    """Our own state and keys, whatever was chosen: that is another user's, and not for us to write to."""
    state, data = (os.environ.get(name, "") for name in ("XDG_STATE_HOME", "XDG_DATA_HOME"))
    state = os.path.join(state if os.path.isabs(state) else os.path.join(home(), ".local/state"), "agent-sandbox")
    data = os.path.join(data if os.path.isabs(data) else os.path.join(home(), ".local/share"), "agent-sandbox", "keys")
    return state, data


def elevations_dir() -> str:
    """Where it is kept which sandbox has more than its policy for now. As a rule it is not there."""
    return os.path.join(state_dir(), APPROVALS, "elevations")


def elevations() -> Elevations:
    """What is lifted for sandboxes for now."""
    from agent_sandbox.engine import elevations as kept
    from agent_sandbox.ledger import keys

    def boot() -> str:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()

    seal = keys.load(keys_dir()).derived(kept.PURPOSE)
    return kept.Elevations(
        elevations_dir(), seal, ledger(), clock=time.time, since_boot=lambda: time.clock_gettime(time.CLOCK_BOOTTIME), boot=boot
    )


def second_factor() -> SecondFactor:
    """What this user proves to be themselves by."""
    return _second_factor_in(keys_dir())


def _second_factor_in(keys: str) -> SecondFactor:
    from agent_sandbox.engine.approvals.second_factor import SecondFactor

    return SecondFactor(keys, clock=time.time)


def desk(policy: Policy, inbox: Inbox, *, sandbox: str, tokens: Sequence[Token]) -> Desk:
    """Who answers for one run under a policy that asks."""
    from agent_sandbox.engine.approvals.approvers import Desk

    run = os.urandom(8).hex()
    return Desk(inbox, capabilities(), policy, sandbox=sandbox, run=run, tokens=tokens, clock=time.time, counts=words_that_count(policy))


def words_that_count(policy: Policy) -> Callable[[Word], bool] | None:
    """Whose word is enough for what a policy asks about; None for everybody's."""
    asks = policy.asks
    if asks.approvers is None and not asks.needs:
        return None
    approvers = None if asks.approvers is None else _uids(asks.approvers)
    return lambda word: word.counts(asks.needs, approvers, asker=os.getuid())


def _uids(names: Iterable[str]) -> frozenset[int]:
    """The users with these names. One that there is none of is nobody, whose word never comes."""
    import pwd

    found: set[int] = set()
    for name in names:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    return frozenset(found)


def capabilities() -> Capabilities:
    """What this user has granted to sandboxes."""
    from agent_sandbox.engine import grants as kept
    from agent_sandbox.ledger import keys

    seal = keys.load(keys_dir()).derived(kept.PURPOSE)
    return kept.Capabilities(os.path.join(state_dir(), CAPABILITIES), seal, ledger(), clock=time.time)


def masks_for(project: str) -> tuple[Mask, ...]:
    """What is hidden by default in the sandboxes of a project."""
    state, keys = os.path.realpath(state_dir()), os.path.realpath(keys_dir())
    return default_masks(homes=own_homes(), homes_of_others=homes_of_others(), projects=(project,), state_dir=state, keys_dir=keys)


def own_homes() -> tuple[str, ...]:
    """`home()`, and the one of the account where the environment names another."""
    return tuple(dict.fromkeys((home(), *_homes({_account_home()}))))


def homes_of_others() -> tuple[str, ...]:
    """The homes that the account file names besides our own, for root, who can look into them.

    Not those with another purpose: service accounts name `/`, `/bin` or `/usr/sbin` as theirs. One below `/home` counts before it exists,
    as it may be made while something runs.
    """
    import pwd  # not on every system

    if os.geteuid() != 0:
        return ()
    return tuple(sorted(_homes({account.pw_dir for account in pwd.getpwall()}) - {*own_homes()}))


def _homes(candidates: set[str]) -> set[str]:
    paths = {os.path.normpath(path) for path in candidates if path.startswith("/")}
    return {path for path in paths if path.startswith("/home/") or (path.startswith(_HOMES) and os.path.isdir(path))}


def _account_home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # a container may run as a number without an account
        return ""
