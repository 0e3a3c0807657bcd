"""The mixed tree that most tests here promote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workspace.promotion.trees import Edited, edit_mixed, make_mixed


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Edited]:
    edited = Edited(tmp_path, make_mixed, edit_mixed)
    yield edited
    edited.close()
