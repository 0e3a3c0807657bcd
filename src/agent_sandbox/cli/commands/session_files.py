"""`timeline --keep-files`: write the changed files of a held session into the project's sandbox, where `diff` and `promote` find them.

The content comes from the session's program, so it is data: it is written by the project's own sandbox, and nothing of the project changes
before somebody promotes it.
"""

from __future__ import annotations

from agent_sandbox._fast.values import TYPE_CHECKING, dataclass
from agent_sandbox.cli.render.messages import Console, counted, remark, shown
from agent_sandbox.cli.results import PathName, VerbResult
from agent_sandbox.errors import SandboxError
from agent_sandbox.server import client, messages
from agent_sandbox.workspace.changes import is_noise
from agent_sandbox.workspaces import Workspace

if TYPE_CHECKING:
    from agent_sandbox.server.client import HolderLink

MOST_FILES = 1000


@dataclass(frozen=True)
class SessionKeptResult(VerbResult):
    """The files of a session that are in the project's sandbox now, each with "new", "changed" or "gone".

    `left_out` are those that could not be read or written, with the reason.
    """

    kind = "session-kept"

    session: str
    project: PathName
    files: dict[str, str]
    left_out: dict[str, str]

    def text(self, console: Console) -> None:
        for path, kind in self.files.items():
            print(shown(f"{kind:<8}{path}"))
        for path, why in self.left_out.items():
            remark(f"left out: {path}: {why}")
        if not self.files:
            console.note(f"{self.session} has changed no file of {self.project}")
            return
        console.note(
            f"{counted(len(self.files), 'file')} in the project's sandbox, without their modes: agent-sandbox diff · agent-sandbox promote"
        )


def keep_files(taken: client.FoundSession) -> SessionKeptResult:
    """Write the changed files of a session into the sandbox of its project. Raises `SandboxError` if there are too many."""
    kept: dict[str, str] = {}
    left_out: dict[str, str] = {}
    with client.opened(taken.place) as link:
        told = link.ask({"do": "changed", "session": taken.id})
        project = str(told["project"])
        wanted = {
            path: kind for path, kind in sorted(told["files"].items()) if path != project and not is_noise(path.removeprefix(project))
        }
        if len(wanted) > MOST_FILES:
            why = f"{taken.id} has changed {len(wanted):,} files, and at most {MOST_FILES:,} are kept"
            raise SandboxError(why, hint=f"take those that you want: agent-sandbox inspect {taken.id} --file PATH")
        with Workspace.over(project) as workspace:
            for path, kind in wanted.items():
                name = path.removeprefix(f"{project}/")
                try:
                    _write(workspace, link, taken.id, path, kind)
                except OSError as error:
                    left_out[name] = error.strerror or str(error)
                else:
                    kept[name] = kind
    return SessionKeptResult(taken.id, PathName(project), kept, left_out)


def _write(workspace: Workspace, link: HolderLink, session: str, path: str, kind: str) -> None:
    """Write one file, directory or removal. Raises OSError."""
    if kind == "gone":
        if workspace.files.exists(path):
            workspace.files.remove(path, recursive=True)
        return
    told = link.ask({"do": "present-file", "session": session, "path": path})
    if "content" in told:
        workspace.files.write(path, messages.unpacked(told["content"]))
    elif str(told["raised"]).startswith("IsADirectoryError"):
        if not workspace.files.exists(path):
            workspace.files.mkdir(path)
    else:
        raise OSError(str(told["raised"]))
