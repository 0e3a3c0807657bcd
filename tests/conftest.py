"""What every test shares: the markers that need something, a project to work in, state kept out of the caller's home, and a check at
the end that nothing was left running, mounted or allocated."""

from __future__ import annotations

import gc
import getpass
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scripts import reachable
from tests import patience
from tests.leftovers import claim, left_since, traces
from tests.security.cases import INAPPLICABLE


def _place_for_temporary_files() -> str:
    """Not below /tmp: a sandbox has a /tmp of its own, so a project there would be invisible in it. Nor where pytest refuses to work: it
    has one directory for each name of a user, and users without an entry in /etc/passwd, or who became another, share one."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = "unknown"
    try:
        mine = os.stat(f"/var/tmp/pytest-of-{user}").st_uid == os.geteuid()
    except FileNotFoundError:
        mine = True
    if mine:
        return "/var/tmp"
    place = f"/var/tmp/tests-of-{os.geteuid()}"
    os.makedirs(place, mode=0o700, exist_ok=True)
    return place


os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _place_for_temporary_files())
os.environ.setdefault("TMPDIR", os.environ["PYTEST_DEBUG_TEMPROOT"])  # for compilers and the like: /tmp may be small, or full

# How long a test takes says how busy the machine is.
# The same samples every time: `make test` tells of a change, `make torture` looks for what nobody has thought of.
settings.register_profile("unhurried", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("torture", parent=settings.get_profile("unhurried"), derandomize=False)
settings.load_profile("unhurried")

IN_THE_OTHER_HALF = "needs an unprivileged user: runs in the second half of `make test`"
TRACES_BEFORE = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(patience, "patience")
    marks = config.getoption("markexpr")
    if "torture" in marks and "not torture" not in marks:
        settings.load_profile("torture")


def pytest_runtest_setup(item: pytest.Item) -> None:
    root = os.geteuid() == 0
    if item.get_closest_marker("needs_root") and not root:
        pytest.skip("needs root")
    if item.get_closest_marker("needs_user") and root:
        pytest.skip(IN_THE_OTHER_HALF)


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sandboxes made by tests are kept apart from those of the person who runs them."""
    claim(tmp_path_factory.getbasetemp())
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("STATE_HOME", "DATA_HOME", "CACHE_HOME", "CONFIG_HOME", "RUNTIME_DIR"):
            patch.setenv(f"XDG_{kind}", str(tmp_path_factory.mktemp(f"xdg-{kind.lower()}")))
        patch.setenv("AGENT_SANDBOX_SHARED_CACHE", str(tmp_path_factory.mktemp("shared-cache")))
        patch.setenv("AGENT_SANDBOX_NO_BACKGROUND", "1")  # what compiles for minutes is not started by the way
        yield


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project directory as a user would have it: marked by `.git`, with a few files."""
    root = tmp_path / "project"
    (root / ".git").mkdir(parents=True)
    (root / "src").mkdir()
    (root / "greeting.txt").write_text("hello\n")
    (root / "src" / "app.py").write_text('print("hello")\n')
    return root


@pytest.fixture(scope="session")
def reachable_checkout() -> Iterator[Path]:
    """A checkout with its virtual environment that other users of this machine can run."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:  # pytest's own directories are closed to others
        os.chmod(place, 0o755)
        yield reachable.checkout(Path(place))


@pytest.fixture(scope="session")
def evaluation_file() -> Callable[[str], Path]:
    """Finds data that is not ours to ship, by its name. A test that needs it is skipped, and says so, where it is not there."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    directory = Path(os.environ.get("AGENT_SANDBOX_EVAL_DATA") or default)

    def find(name: str) -> Path:
        if not os.access(directory / name, os.R_OK):  # not Path.exists, which raises where a directory above cannot be entered
            pytest.skip(f"no evaluation data {name} in {directory}; name its directory in AGENT_SANDBOX_EVAL_DATA")
        return directory / name

    return find


def pytest_sessionstart(session: pytest.Session) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGHUP,
    ):  # a shell ignores them in what it starts in the background
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    session.config.stash[TRACES_BEFORE] = traces()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A suite that passes and leaves something behind has not passed."""
    if (assembly := sys.modules.get("agent_sandbox.assembly")) is not None:
        assembly.here().process().close()  # as the end of this process would: it is for all sandboxes, and the next run starts it again
        for registry in [each for each in gc.get_objects() if type(each) is assembly.Registry]:  # one for each state directory
            registry.close()
    left = left_since(session.config.stash[TRACES_BEFORE])
    if left:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        reporter.line("")
        reporter.section("left behind by the tests", red=True, bold=True)
        for trace in left:
            reporter.line(trace, red=True)
        if exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """No silent skip: an attack case of the highest priority that was not tried is a red line with its reason."""
    missing = []
    for report in terminalreporter.stats.get("skipped", []):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        if "p0" in report.keywords and not any(each in why for each in (IN_THE_OTHER_HALF, INAPPLICABLE)):
            missing.append(f"{report.nodeid}: {why}")
    if missing:
        terminalreporter.section("P0 attack cases that were NOT TRIED", red=True, bold=True)
        for line in missing:
            terminalreporter.line(line, red=True)
