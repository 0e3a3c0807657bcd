"""Hooks of Schemathesis, loaded by it (`scripts.http_conformance`): requests that it makes up touch only a directory made for them."""

from __future__ import annotations

import os
from typing import Any

import schemathesis  # type: ignore[import-not-found,unused-ignore]  # in an environment of its own

PROJECT = os.environ["HTTP_REQUESTS_PROJECT"]


def moved(value: Any) -> Any:
    """Return the value of an option with its absolute paths below the project."""
    if isinstance(value, list):
        return [moved(each) for each in value]
    return f"{PROJECT}{value.replace('..', '.')}" if isinstance(value, str) and value.startswith("/") else value


@schemathesis.hook  # type: ignore[untyped-decorator,unused-ignore]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Move a request, unless it is one that is refused for its types."""
    attacking = case.path.endswith("/verify")
    if attacking and not isinstance(case.body, dict | list | str | bytes | int | float | None):  # no body at all
        case.body, case.media_type = {}, "application/json"
    if not isinstance(case.body, dict):
        return
    body = dict(case.body)
    if isinstance(options := body.get("options"), dict):
        body["options"] = {name: moved(value) for name, value in options.items()}
    if isinstance(directory := body.get("directory", "/"), str) and directory.startswith("/") and "\0" not in directory:
        body["directory"] = PROJECT
    if attacking and body.get("words", []) == []:
        body["words"] = ["not now"]  # a usage error: it would attack this machine for minutes
    case.body = body
