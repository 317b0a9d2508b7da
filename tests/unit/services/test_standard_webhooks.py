from __future__ import annotations

import base64
import time

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib._webhooks import webhook_signature_matches

from penstock.services.standard_webhooks import Signer, checked_url

NAMES = st.from_regex(r"\Aevt_[a-z0-9]{1,40}\Z")
PLAIN = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1).filter(lambda s: s[:6] != "whsec_")
ENCODED = st.binary(min_size=1, max_size=64).map(lambda key: f"whsec_{base64.b64encode(key).decode()}")


def matches(body: str, headers: dict[str, str], secret: str) -> bool:
    is_right: bool = webhook_signature_matches(body, headers, secret=secret, tolerance=300)
    return is_right


@given(NAMES, st.text(), st.lists(PLAIN | ENCODED, min_size=1, max_size=3), PLAIN)
def test_openai_verifies_the_signature_with_each_secret(name: str, body: str, secrets: list[str], other: str) -> None:
    headers = Signer.of(" ".join(secrets)).headers(name, body.encode(), int(time.time()))
    assert all(matches(body, headers, secret) for secret in secrets)
    assert not matches(body + " ", headers, secrets[0])
    assert not matches(body, {**headers, "webhook-id": f"{name}0"}, secrets[0])
    keys = Signer.of(" ".join(secrets)).keys
    assert matches(body, headers, other) is (other.encode() in keys)


def test_old_signature_is_refused() -> None:
    headers = Signer.of("s").headers("evt_1", b"{}", int(time.time()) - 301)
    with pytest.raises(openai.InvalidWebhookSignatureError, match="too old"):
        matches("{}", headers, "s")


@pytest.mark.parametrize("secret", ["", "  ", "whsec_", "whsec_no base64!", "a whsec_%"])
def test_unusable_secret_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match=r"secret of webhooks|base64"):
        Signer.of(secret)


@pytest.mark.parametrize("url", ["", "hooks", "ftp://a.invalid", "https://", "https://user:word@a.invalid"])
def test_url_of_a_receiver_is_checked(url: str) -> None:
    with pytest.raises(ValueError, match="no URL of a receiver"):
        checked_url(url)
