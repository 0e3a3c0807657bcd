"""Replay a record, and report where the second run differs.

A record may come from anybody. It holds code, input and a seed, but it grants no permission. The code sees only what the replaying sandbox
shows. If the rules of this sandbox differ from the recorded rules, nothing is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent_sandbox._fast.values import dataclass
from agent_sandbox.engine.records import Departure, Record, departures, digest, read, rules_of, salted
from agent_sandbox.engine.work import Code
from agent_sandbox.errors import RecordError
from agent_sandbox.policy.model import CLONED_LIMITS, MIB, Policy
from agent_sandbox.result import SandboxResult

if TYPE_CHECKING:
    from agent_sandbox.sandbox import Sandbox

# The limits that affect the outcome of a run, and the setting for each. Time limits are left out: they end a run, or have no effect.
SHAPING = {
    "memory_bytes": ("max_memory_mb", MIB),
    "output_bytes": ("max_output_bytes", 1),
    "open_files": ("max_open_files", 1),
    "disk_bytes": ("max_disk_mb", MIB),
    "fuel": ("max_fuel", 1),
}


@dataclass(frozen=True)
class Replay:
    """The second run, and its differences from the first."""

    result: SandboxResult
    departures: tuple[Departure, ...]

    @property
    def same(self) -> bool:
        """Whether the second run was the same as the first."""
        return not self.departures


def replay(
    path: str | os.PathLike[str],
    *,
    sandbox: Sandbox | None = None,
    env_vars: Mapping[str, str] | None = None,
    code: str | None = None,
    stdin: bytes | None = None,
) -> Replay:
    """Run a record again. Without `sandbox`, it runs in a new sandbox that shows no files and has the limits of the record.

    `env_vars` are the environment variables; the record has only digests of their values. A record without its code or input needs `code`
    or `stdin`. Raises `RecordError` if the file is no record, if it was made with another engine or other rules, or if a part is missing.
    """
    record = read(os.fspath(path))
    if sandbox is not None:
        return sandbox.replay(record, env_vars=env_vars, code=code, stdin=stdin)
    from agent_sandbox.sandbox import Sandbox as Fresh  # here, because `sandbox` uses this module

    with Fresh(runtime="wasm", deterministic=True, **_settings(record)) as fresh:
        return fresh.replay(record, env_vars=env_vars, code=code, stdin=stdin)


def _settings(record: Record) -> dict[str, Any]:
    """Return the recorded limits that affect the outcome, as settings of a sandbox."""
    settings: dict[str, Any] = {}
    for name in within_reason(record):
        (setting, unit), value = SHAPING[name], record.limits[name]
        settings[setting] = None if value is None else value / unit if unit > 1 else int(value)
    return settings


def within_reason(record: Record) -> tuple[str, ...]:
    """Return the names of the limits that affect an outcome. Raises `RecordError` if one in the record exceeds the default."""
    for name, (setting, _) in SHAPING.items():
        value, most = record.limits[name], getattr(CLONED_LIMITS, name)
        if most is not None and (value is None or value > most):
            why = f"the record needs {setting} = {value}, more than a replay is given"
            raise RecordError(why, hint="replay it in a sandbox of your own: replay(path, sandbox=Sandbox(...))")
    return tuple(SHAPING)


def what_to_run(record: Record, code: str | None, stdin: bytes | None) -> tuple[Code, bytes]:
    """Return the code and input to run: `code` and `stdin`, or else those of the record.

    Raises `RecordError` if one is missing, or if its digest differs from the recorded digest.
    """
    for name, kept, given in (("code", record.code, code), ("stdin", record.stdin, stdin)):
        if kept is None and given is None:
            raise RecordError(f"the record was made without its {name}", hint=f"give it: {name}=…")
    source = record.code if code is None else code
    given_input = record.stdin if stdin is None else stdin
    assert source is not None and given_input is not None
    for name, content, named in (("code", source.encode(), record.code_digest), ("input", given_input, record.stdin_digest)):
        if digest(content) != named:
            raise RecordError(f"this is not the {name} that was recorded", hint="leave it out, or give the one of the record")
    return Code(record.language, source, record.arguments), given_input


def check(record: Record, policy: Policy, environment: Mapping[str, str], cwd: str, identity: Mapping[str, str]) -> None:
    """Raise `RecordError`, naming the difference, if a run here would not repeat the recorded run.

    `identity` is the identity of the runtime: the versions of engine and interpreter.
    """
    for name in sorted(record.identity.keys() | identity.keys()):
        was, now = record.identity.get(name, "nothing"), identity.get(name, "nothing")
        if was != now:
            why = f"it was recorded with another {name}: {was[:40]!r}, and here is {now[:40]!r}"
            raise RecordError(why, hint="replay it with the versions it was made with, or record it anew")
    if record.rules != rules_of(policy.files):
        raise RecordError(
            "it was recorded with other file rules",
            hint="replay it in a sandbox with the settings that it was recorded with: replay(path, sandbox=Sandbox(...))",
        )
    for name, (setting, _) in SHAPING.items():
        if record.limits[name] != getattr(policy.limits, name):
            why = f"it was recorded with another {setting}: {record.limits[name]}, and here it is {getattr(policy.limits, name)}"
            raise RecordError(why, hint=f"set {setting} as it was")
    if record.cwd != cwd:
        raise RecordError(f"it was recorded in the directory {record.cwd!r}, not {cwd!r}", hint="begin there")
    for name in sorted(record.environment.keys() | environment.keys()):
        if name not in environment or name not in record.environment or salted(record.salt, environment[name]) != record.environment[name]:
            why = f"the environment variable {name!r} is not what it was"
            raise RecordError(why, hint="give it the value it had; the record holds only its digest")


def compared(record: Record, again: Record, result: SandboxResult) -> Replay:
    """Compare the replayed run, `again`, with the first, `record`. Returns its result and the differences."""
    return Replay(result, departures(record, again))
