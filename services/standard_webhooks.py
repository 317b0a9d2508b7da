"""Standard Webhooks: the signature of a webhook, and the URL of a receiver."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from yarl import URL


@dataclass(frozen=True)
class Signer:
    """Signs with each of its keys, so that a receiver may verify with any of them while the secret changes."""

    keys: Sequence[bytes] = field(repr=False)

    @classmethod
    def of(cls, secrets: str) -> Signer:
        """Read secrets with spaces between them; ``whsec_`` begins one in base64.  Raises `ValueError`."""
        keys = [_key(secret) for secret in secrets.split()]
        if not all(keys) or not keys:
            raise ValueError("the secret of webhooks is empty")
        return cls(tuple(keys))

    def of_owner(self, owner: str) -> Signer:
        """Return the signer for the receiver of an owner, who learns nothing of the secrets of others."""
        return Signer([hmac.digest(key, owner.encode(), sha256) for key in self.keys])

    @property
    def secrets(self) -> str:
        """The secrets as a receiver takes them."""
        return " ".join("whsec_" + base64.b64encode(key).decode() for key in self.keys)

    def headers(self, message_id: str, body: bytes, now: int) -> dict[str, str]:
        """Return the headers by which the receiver verifies a body."""
        signed = f"{message_id}.{now}.".encode() + body
        signatures = (base64.b64encode(hmac.digest(key, signed, sha256)).decode() for key in self.keys)
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(now),
            "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
        }


def _key(secret: str) -> bytes:
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        raise ValueError("behind whsec_, the secret of webhooks is base64") from None


class Receiver(NamedTuple):
    """A URL that gets webhooks, and the signer of what it gets."""

    url: str
    signer: Signer


def checked_url(text: str) -> str:
    """Return the URL of a receiver; raises `ValueError` for anything else."""
    url = URL(text)
    if url.scheme not in {"http", "https"} or not url.host or url.user or url.password:
        raise ValueError(f"{text!r} is no URL of a receiver: expected https://HOST/PATH")
    return text
