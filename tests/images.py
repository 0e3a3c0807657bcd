"""Images that tests run in: one from the packages of this machine, made once, and archives written by hand."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.container_images import image_from_machine, list_images

SLIM = "python:3.11-slim"


def slim() -> str:
    """The name of an image with Python, in the state directory of these tests."""
    if shutil.which("dpkg-query") is None:
        pytest.skip("an image is made from the packages of this machine, and dpkg does not manage them here")
    if not any(SLIM in image.names for image in list_images()):
        image_from_machine(SLIM)
    return SLIM


def entry(name: str, content: str | None = None, **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    """An entry of a layer: a file with this content, or whatever the changes say."""
    made = tarfile.TarInfo(name)
    data = (content or "").encode()
    made.size, made.mode = len(data), 0o644
    for key, value in changes.items():
        setattr(made, key, value)
    return made, data


def archive(
    place: Path, *layers: list[tuple[tarfile.TarInfo, bytes]], config: Any = None, manifest: Any = None, raw_config: bytes = b""
) -> str:
    """An archive as `docker save` writes it, with these layers. `raw_config` is the text of its configuration."""
    said = {"architecture": os.uname().machine, "config": {"Env": ["PATH=/bin"]}} if config is None else config
    names = [f"layer{number}.tar" for number in range(len(layers))]
    listed = [{"Config": "config.json", "Layers": names, "RepoTags": ["made:1"]}] if manifest is None else manifest
    path = place / "image.tar"
    with tarfile.open(path, "w") as whole:
        for name, value in (("config.json", said), ("manifest.json", listed)):
            data = raw_config if raw_config and value is said else json.dumps(value).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            whole.addfile(info, io.BytesIO(data))
        for name, entries in zip(names, layers, strict=True):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w:gz") as layer:
                for info, data in entries:
                    layer.addfile(info, io.BytesIO(data))
            info = tarfile.TarInfo(name)
            info.size = len(buffer.getvalue())
            whole.addfile(info, io.BytesIO(buffer.getvalue()))
    return str(path)
