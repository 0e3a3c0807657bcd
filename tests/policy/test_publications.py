"""How a port to publish is written."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.publications import MOST, Publication, read_publications


def test_a_port_leads_to_the_same_one_of_the_sandbox_or_to_another() -> None:
    assert read_publications([8000, "9000:80", "65535:1"]) == (Publication(8000, 8000), Publication(9000, 80), Publication(65535, 1))
    assert str(Publication(8000, 3000)) == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "wrong",
    ["", ":", "8000:", ":8000", "8000:3000:1", "0", "8000:0", "65536", "8000:65536", "-8000", "0x1f40", "٨٠٠٠", "web", True, 8000.0, None],
)
def test_what_is_no_port_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(PolicyError, match="not a port to publish"):
        read_publications([wrong])


@pytest.mark.parametrize("low", [1, 80, "443:8443", 1023])
def test_a_port_of_the_machines_services_is_refused(low: object) -> None:
    with pytest.raises(PolicyError, match="below 1024"):
        read_publications([low])
    assert read_publications([1024]), "the control: the first that can be"


def test_one_port_is_published_once_and_there_are_not_too_many() -> None:
    with pytest.raises(PolicyError, match="8000 is published twice"):
        read_publications([8000, "8000:3000"])
    assert len(read_publications(range(8000, 8000 + MOST))) == MOST
    with pytest.raises(PolicyError, match=f"at most {MOST}"):
        read_publications(range(8000, 8001 + MOST))
