"""The second factor: the digits of RFC 6238, each good once, and few guesses."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from agent_sandbox.engine.approvals.second_factor import MOST_WRONG, PERIOD, STEP, SecondFactor, digits
from agent_sandbox.errors import PolicyError

SECRET = b"12345678901234567890"  # of the RFC's own examples


class Phone:
    """An authenticator that was enrolled, beside the machine whose clock it shares."""

    def __init__(self, keys: Path) -> None:
        self.now = 1_000_000.0
        self.keys = keys
        self.factor = SecondFactor(str(keys), clock=lambda: self.now)
        self.uri = self.factor.enroll("alice smith")

    def code(self, away: int = 0) -> str:
        return digits((self.keys / "second-factor").read_bytes(), int(self.now // STEP) + away)


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    return Phone(tmp_path / "keys")


@pytest.mark.parametrize(
    ("moment", "expected"),
    [(59, "287082"), (1111111109, "081804"), (1111111111, "050471"), (1234567890, "005924"), (2000000000, "279037")],
)
def test_the_digits_are_those_of_the_standard(moment: int, expected: str) -> None:
    assert digits(SECRET, moment // STEP) == expected


def test_a_code_is_good_once_and_near_its_time(phone: Phone) -> None:
    first = phone.code()
    assert phone.factor.accepts(f" {first}\n")
    assert not phone.factor.accepts(first), "it was used"
    phone.now += STEP
    assert not phone.factor.accepts(phone.code(-1)), "it was used, and is the one of the moment before"
    assert phone.factor.accepts(phone.code(+1)), "their clock may be ahead"
    phone.now -= 20 * STEP
    assert not phone.factor.accepts(phone.code()), "a clock that is set back brings no code back"
    phone.now += 40 * STEP
    assert not phone.factor.accepts(phone.code(-5)) and phone.factor.accepts(phone.code())


def test_who_guesses_has_to_wait(phone: Phone) -> None:
    wrong = "000000" if phone.code() != "000000" else "000001"
    for _ in range(MOST_WRONG):
        assert not phone.factor.accepts(wrong)
    with pytest.raises(PolicyError, match="too many wrong codes"):
        phone.factor.accepts(phone.code())
    again = SecondFactor(str(phone.keys), clock=lambda: phone.now)
    with pytest.raises(PolicyError, match="too many"):
        again.accepts(phone.code())
    phone.now += PERIOD
    assert again.accepts(phone.code())


def test_right_codes_are_no_guesses(phone: Phone) -> None:
    for _ in range(MOST_WRONG + 1):
        phone.now += STEP
        assert phone.factor.accepts(phone.code())


def test_it_is_enrolled_once_and_kept_for_its_owner_alone(phone: Phone) -> None:
    (secret,) = parse_qs(urlsplit(phone.uri).query)["secret"]
    assert len(secret) == 32 and "alice%20smith" in phone.uri
    assert (phone.keys / "second-factor").stat().st_mode & 0o777 == 0o600
    with pytest.raises(PolicyError, match="set up already"):
        phone.factor.enroll("mallory")
    os.chmod(phone.keys / "second-factor", 0o644)
    with pytest.raises(PermissionError):
        phone.factor.accepts(phone.code())
