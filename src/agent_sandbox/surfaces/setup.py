"""`setup`: what a new user does once. Makes the state directory, checks the machine, compiles, and says what to do next."""

from __future__ import annotations

from agent_sandbox import places
from agent_sandbox.surfaces.arguments import Request
from agent_sandbox.surfaces.compiling import compile_wasm
from agent_sandbox.surfaces.doctor import examine
from agent_sandbox.surfaces.remedies import Situation
from agent_sandbox.surfaces.rows import report
from agent_sandbox.workspace.store import Store

_NEXT = """
Next:
  cd YOUR-PROJECT
  agent-sandbox run "echo 'new content' > file.txt"
  agent-sandbox diff

Completion for your shell:
  bash   agent-sandbox completion bash > ~/.local/share/bash-completion/completions/agent-sandbox
  zsh    agent-sandbox completion zsh > a directory of your $fpath, as _agent-sandbox"""


def setup(request: Request) -> int:
    """The verb `setup`. Exits with 1 when nothing can run on this machine."""
    store = Store.open(places.state_dir())
    here = Situation.look()
    rows = [row for row in examine(here) if row.required or row.status != "ok"]
    broken = any(row.fatal for row in rows)
    wasm, said = ("skipped", "") if broken else compile_wasm()
    if request.has("--json"):
        from agent_sandbox.surfaces.documents import path_fields, print_document

        problems = [{"name": row.name, "found": row.found, "remedy": row.remedy} for row in rows if row.fatal]
        print_document("setup", {**path_fields("state_dir", store.path), "usable": not broken, "problems": problems, "wasm": wasm})
        return 1 if broken else 0
    report(rows, here.name)
    print(f"State is kept in {store.path}.")
    if not broken:
        print(said)
        print(_NEXT)
    return 1 if broken else 0
