"""Isolation backends: one piece of code in, one result out, for callers that bring their own sandbox logic.

A backend runs code in a runtime and does nothing else. It does not check the code first; `CodeExecutor` does. For anything beyond limits
and environment use `Sandbox`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent_sandbox.assembly import here
from agent_sandbox.config import SandboxConfig
from agent_sandbox.errors import PolicyError, RuntimeUnavailable, SandboxError
from agent_sandbox.options import PathLike
from agent_sandbox.policy.image_names import canonical_image
from agent_sandbox.result import SandboxResult
from agent_sandbox.sandbox import Sandbox


@dataclass(frozen=True)
class IsolationConfig:
    """Limits and environment of one execution. Fields mean the same as in `SandboxConfig`.

    `network_disabled=False` is `allow_network=True` there: every public host at the ports 80 and 443, through the egress.
    """

    timeout_seconds: float | None = 30.0
    max_memory_mb: float | None = 256
    max_output_bytes: int | None = 100_000
    network_disabled: bool = True
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)  # values are often secrets
    working_dir: PathLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.network_disabled, bool):
            raise PolicyError(f"network_disabled must be True or False, not {self.network_disabled!r}", hint="say which")
        self.settings()

    def settings(self) -> SandboxConfig:
        """Return these limits and environment as settings of a sandbox. Raises `PolicyError` if they cannot be enforced."""
        return SandboxConfig(
            timeout_seconds=self.timeout_seconds,
            max_memory_mb=self.max_memory_mb,
            max_output_bytes=self.max_output_bytes,
            allow_network=not self.network_disabled,
            env_vars=self.env_vars,
            working_dir=self.working_dir,
            validate_code=False,
        )


class IsolationBackend(ABC):
    """A kind of isolation, such as `ProcessIsolation`."""

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this isolation works on this machine, tested by really using it. Never raises."""

    @abstractmethod
    def execute(self, code: str, language: str = "python", config: IsolationConfig | None = None) -> SandboxResult:
        """Run the code and wait for its end. Results and exceptions as for `Sandbox.execute`."""


class ProcessIsolation(IsolationBackend):
    """A process in namespaces of its own, on a view of its own, behind Landlock and a system-call filter. Safe to use from many threads."""

    def __repr__(self) -> str:
        return "ProcessIsolation()"

    def is_available(self) -> bool:
        """Return whether a confined process can be started on this machine."""
        try:
            return here().process().probe().available
        except RuntimeUnavailable:
            return False

    def execute(self, code: str, language: str = "python", config: IsolationConfig | None = None) -> SandboxResult:
        """Run the code in a new sandbox."""
        with Sandbox((config or IsolationConfig()).settings()) as sandbox:
            return sandbox.execute(code, language)


class ContainerIsolation(IsolationBackend):
    """A container image as the root of the process, behind the same walls as `ProcessIsolation`. Safe to use from many threads.

    The image must be on this machine, or in the storage of podman or docker here; nothing is pulled. See `agent-sandbox image`.
    """

    def __init__(self, image: str = "python:3.11-slim") -> None:
        """Name the image. Raises `PolicyError` for text that is no name of an image."""
        self.image = canonical_image(image)

    def __repr__(self) -> str:
        return f"ContainerIsolation(image={self.image!r})"

    def is_available(self) -> bool:
        """Return whether a program can be started in this image on this machine, tested by really starting one."""
        try:
            return not here().container().trial(self.image)
        except SandboxError:
            return False

    def execute(self, code: str, language: str = "python", config: IsolationConfig | None = None) -> SandboxResult:
        """Run the code in a new sandbox, with the interpreter of the image. Raises `RuntimeUnavailable` if the image is not there."""
        with Sandbox(replace((config or IsolationConfig()).settings(), image=self.image, runtime="container")) as sandbox:
            return sandbox.execute(code, language)
