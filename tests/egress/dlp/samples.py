"""Samples of secrets and personal data, made when they are needed: no file of the project holds a whole token."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from itertools import pairwise

from agent_sandbox.egress.dlp.own_secrets import OwnSecrets
from agent_sandbox.egress.dlp.rules import default_rules
from agent_sandbox.egress.dlp.scanner import Finding, Scanner, Search

OWN = "correct-Horse/7battery"
KEY = b"k" * 32
LETTERS, HEX, BASE64 = string.ascii_letters + string.digits, "0123456789abcdef", string.ascii_letters + string.digits + "+/"
UPPER = string.ascii_uppercase + "234567"
_random = random.Random(17)

SEARCH = Search.of(default_rules(), OwnSecrets.of([("DEPLOY", OWN)]), KEY)


def find(data: bytes, *, coding: str = "", search: Search = SEARCH, cuts: tuple[int, ...] = ()) -> list[Finding]:
    """Return what a scanner finds in data that arrives cut at these places."""
    scanner = Scanner(search, coding)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found = [finding for start, end in pairwise(places) for finding in scanner.feed(data[start:end])]
    return sorted(found + scanner.finish())


def rules_found(data: bytes, *, coding: str = "", search: Search = SEARCH) -> set[str]:
    """Return the ids of the rules that describe something in data."""
    return {finding.rule for finding in find(data, coding=coding, search=search)}


def some(alphabet: str, length: int) -> str:
    """Return random characters, among them a digit and a letter of each case where there are such."""
    fixed = [next((each for each in alphabet if kind(each)), "") for kind in (str.isdigit, str.isupper, str.islower)]
    return ("".join(fixed) + "".join(_random.choices(alphabet, k=length)))[:length]


# For each rule on tokens: what its service makes, in parts, so that no other scanner takes this file for a leak.
TOKENS: dict[str, Callable[[], str]] = {
    "aws-access-key": lambda: "AK" + "IA" + some(UPPER, 16),
    "github-token": lambda: "gh" + "p_" + some(LETTERS, 36),
    "gitlab-token": lambda: "gl" + "pat-" + some(LETTERS, 20),
    "slack-token": lambda: "xo" + "xb-" + some(string.digits, 12) + "-" + some(LETTERS, 24),
    "slack-webhook": lambda: "https://hooks.sla" + "ck.com/services/T" + some(UPPER, 8) + "/B" + some(UPPER, 8) + "/" + some(LETTERS, 24),
    "stripe-key": lambda: "sk" + "_live_" + some(LETTERS, 24),
    "openai-key": lambda: "sk" + "-proj-" + some(LETTERS, 48),
    "anthropic-key": lambda: "sk" + "-ant-" + "api03-" + some(LETTERS, 93),
    "google-api-key": lambda: "AI" + "za" + some(LETTERS, 35),
    "google-oauth": lambda: "GOC" + "SPX-" + some(LETTERS, 28),
    "npm-token": lambda: "np" + "m_" + some(LETTERS, 36),
    "pypi-token": lambda: "py" + "pi-Ag" + some(LETTERS, 90),
    "rubygems-token": lambda: "ruby" + "gems_" + some(HEX, 48),
    "crates-token": lambda: "ci" + "o" + some(LETTERS, 32),
    "docker-token": lambda: "dckr" + "_pat_" + some(LETTERS, 27),
    "twilio-key": lambda: "S" + "K" + some(HEX, 32),
    "sendgrid-key": lambda: "S" + "G." + some(LETTERS, 22) + "." + some(LETTERS, 43),
    "mailgun-key": lambda: "ke" + "y-" + some(HEX, 32),
    "mailchimp-key": lambda: some(HEX, 32) + "-us" + "12",
    "brevo-key": lambda: "xkey" + "sib-" + some(HEX, 64) + "-" + some(LETTERS, 16),
    "discord-token": lambda: "M" + some(LETTERS, 25) + "." + some(LETTERS, 6) + "." + some(LETTERS, 38),
    "discord-webhook": lambda: "https://disc" + "ord.com/api/webhooks/" + some(string.digits, 18) + "/" + some(LETTERS, 68),
    "telegram-token": lambda: some(string.digits, 10) + ":A" + "A" + some(LETTERS, 33),
    "shopify-token": lambda: "shp" + "at_" + some(HEX, 32),
    "square-token": lambda: "sq0" + "atp-" + some(LETTERS, 22),
    "braintree-token": lambda: "access_token" + "$production$" + some(string.ascii_lowercase, 16) + "$" + some(HEX, 32),
    "digitalocean-token": lambda: "do" + "p_v1_" + some(HEX, 64),
    "heroku-token": lambda: "HR" + "KU-" + some(LETTERS, 60),
    "hugging-face-token": lambda: "h" + "f_" + some(string.ascii_letters, 34),
    "model-service-key": lambda: "gs" + "k_" + some(LETTERS, 52),
    "databricks-token": lambda: "da" + "pi" + some(HEX, 32),
    "atlassian-token": lambda: "ATA" + "TT3" + some(LETTERS, 180),
    "work-tool-token": lambda: "lin" + "_api_" + some(LETTERS, 40),
    "vault-token": lambda: "hv" + "s." + some(LETTERS, 90),
    "age-key": lambda: "AGE-SEC" + "RET-KEY-1" + some("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58),
    "operations-token": lambda: "NR" + "AK-" + some(string.ascii_uppercase + string.digits, 27),
    "private-key": lambda: "-----BEGIN RSA " + "PRIVATE KEY-----\n" + some(BASE64, 64),
    "web-token": lambda: "ey" + "J" + some(LETTERS, 30) + ".ey" + "J" + some(LETTERS, 60) + "." + some(LETTERS, 43),
}
