"""Personal data: found by its form and its check digits; the same digits with a wrong check are not."""

from __future__ import annotations

import pytest

from tests.egress.dlp.samples import find, rules_found

# Numbers that the networks and registries publish for tests, with one digit changed in the second column.
CARDS = [
    ("4111 1111 1111 1111", "4111 1111 1111 1112"),
    ("378282246310005", "378282246310006"),
    ("5555-5555-5555-4444", "5555-5555-5555-4445"),
]
IBANS = [
    ("DE89 3704 0044 0532 0130 00", "DE88 3704 0044 0532 0130 00"),
    ("GB29NWBK60161331926819", "GB29NWBK60161331926818"),
    ("FR1420041010050500013M02606", "FR1420041010050500013M02607"),
]
NATIONAL = [
    ("PESEL: 44051401359", "PESEL: 44051401358"),
    ("CPF 529.982.247-25", "CPF 529.982.247-24"),
    ("BSN: 111222333", "BSN: 111222334"),
    ("DNI: 12345678Z", "DNI: 12345678A"),
    ("NHS number: 943 476 5919", "NHS number: 943 476 5918"),
    ("codice fiscale: RSSMRA85T10A562S", "codice fiscale: RSSMRA85T10A562T"),
    ("personnummer: 811228-9874", "personnummer: 811228-9873"),
    ("numéro de sécurité sociale: 2 55 08 14 168 025 38", "numéro de sécurité sociale: 2 55 08 14 168 025 39"),
    ("Steuer-ID: 86095742719", "Steuer-ID: 86095742718"),
    ("hetu: 131052-308T", "hetu: 131052-308U"),
]


@pytest.mark.parametrize(("right", "wrong"), CARDS)
def test_a_card_is_known_by_its_check_digit(right: str, wrong: str) -> None:
    assert "card" in rules_found(f"paid with {right}.".encode())
    assert "card" not in rules_found(f"paid with {wrong}.".encode())


@pytest.mark.parametrize(
    "text",
    [
        '{"span_id": "%s", "n": 1}',
        '{"traceId":"%s"}',
        "x-b3-parentid: %s\r\n",
        "dd.trace_id=%s dd.span_id=1",
        '{\\"parent_id\\": \\"%s\\"}',
    ],
)
def test_a_number_of_a_trace_is_no_card_though_its_digits_agree(text: str) -> None:
    """They are drawn at random, in hex; one of two thousand has digits alone, and one of forty of these agrees."""
    number = "4290726703159195"
    assert "card" not in rules_found((text % number).encode())
    assert "card" in rules_found((text % "4290 7267 0315 9195").encode()), "nobody writes the number of a trace so"
    other = text.replace("span", "order").replace("trace", "order").replace("parent", "order")
    assert "card" in rules_found((other % number).encode()), "the control: the name alone makes the difference"


@pytest.mark.parametrize(
    "text",
    ["Phone: 0490 75 40 81", "tel. 467 3395", '"mobile": "9472 7916"', "Telefon: (08) 8747 6301", "please call me on 01.84.17.61.18?"],
)
def test_a_telephone_number_of_any_country_is_known_behind_the_word_for_it(text: str) -> None:
    assert "phone-in-context" in rules_found(text.encode())
    assert {finding.action for finding in find(text.encode()) if finding.rule == "phone-in-context"} == {"alert"}
    without = (
        text.replace("Phone", "Row").replace("tel.", "row").replace("mobile", "row").replace("Telefon", "Row").replace("call me", "sat")
    )
    assert not any(rule.startswith("phone") for rule in rules_found(without.encode())), "the control: the word tells"


@pytest.mark.parametrize("text", ["phone: 3.1.2", "tel = 1234", "mobile: 1111111", "intel: 4673395", "phone_1 = 20261117T1000"])
def test_other_numbers_behind_such_a_word_are_none(text: str) -> None:
    assert "phone-in-context" not in rules_found(text.encode())


@pytest.mark.parametrize(("right", "wrong"), IBANS)
def test_an_iban_is_known_by_its_remainder(right: str, wrong: str) -> None:
    assert "iban" in rules_found(f"to {right}, thanks".encode())
    assert "iban" not in rules_found(f"to {wrong}, thanks".encode())


@pytest.mark.parametrize(("right", "wrong"), NATIONAL)
def test_a_national_number_is_known_by_its_check_and_its_name(right: str, wrong: str) -> None:
    assert "national-number" in rules_found(f"{right} as given".encode())
    assert "national-number" not in rules_found(f"{wrong} as given".encode())
    bare = right.partition(":")[2] or right.partition(" ")[2]
    assert "national-number" not in rules_found(f"order{bare} as given".encode())


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ("us-ssn", "his number 536-22-8726", "his number 000-22-8726"),
        ("us-ssn", "his number 536-22-8726", "his number 078-05-1120"),
        ("us-ssn-in-context", "SSN: 536228726", "order: 536228726"),
        ("email", "write to ada@example.org today", "decorated @dataclass.field and icon@2x.png"),
        ("phone", "call +49 30 901820 now", "version 4.9.30 build 901820"),
        ("phone", "call (212) 555-0147 now", "range 212-555"),
        ("ip-address", "from 203.0.113.9 today", "from 127.0.0.1 and 0.0.0.0 today"),
        ("ip-address", "from 2001:db8::17 today", "from ::1 at 12:30:45 with std::move"),
        ("date-of-birth", "date of birth: 1984-03-12", "date of order: 1984-03-12"),
        ("date-of-birth", '"dob": "12/03/1984"', '"due": "12/03/1984"'),
    ],
)
def test_personal_data_is_told_from_what_looks_like_it(rule: str, right: str, wrong: str) -> None:
    assert rule in rules_found(right.encode())
    assert rule not in rules_found(wrong.encode())
