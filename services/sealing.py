"""Sealed content: what a client carries between requests, and only this server can read or make.

A sealed text is ``pst1.`` and base64url of: 4 bytes that name the key, 24 random bytes, and the content, packed,
compressed and encrypted by AES-256-GCM.  The owner is authenticated with it, so no other owner can use it.  Each text
has a key and a nonce of its own, derived from the random bytes: 24 are enough for them never to repeat.
"""

from __future__ import annotations

import secrets
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.pipeline.frames import TokenIds

PREFIX = "pst1."
"""The beginning of all sealed texts; its digit is the version of the format."""

NAMED = len(PREFIX) + 5
"""The characters of a sealed text that tell, all but for one time in a thousand million, the key that sealed it."""

MOST_CHARACTERS = 2**24
"""The longest sealed text that is opened; a thought of a million tokens is shorter."""

MOST_BYTES = 2**26
"""The most bytes of an opened content."""

_NAME, _SALT, _KEY, _NONCE = 4, 24, 32, 12
"""The lengths in bytes."""


class SealedItem(msgspec.Struct, frozen=True, array_like=True):
    """The hidden side of an item before a thought: its tokens, if they are known, and the result of its call."""

    item_id: str
    token_ids: TokenIds = ()
    result: str | None = None


class SealedReasoning(msgspec.Struct, frozen=True, tag="reasoning", array_like=True):
    """A thought: its text, and the tokens that the model generated, empty if they are not known.

    ``before`` are the items of the response since its previous thought.  ``writer`` is the served name of the model
    that generated all these tokens, empty if an older release sealed them.
    """

    text: str
    token_ids: TokenIds = ()
    before: tuple[SealedItem, ...] = ()
    writer: str = ""


class SealedSummary(msgspec.Struct, frozen=True, tag="summary", array_like=True):
    """The summary that stands for the compacted part of a conversation."""

    text: str


_Content = TypeVar("_Content", SealedReasoning, SealedSummary)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SealedReasoning | SealedSummary).decode


class Unverified(ValueError):
    """A text begins like a sealed one, but it was changed, or sealed for another owner or with an unknown key."""


class Sealer:
    """Seals with the first of ``keys``, and opens with all; a key is any secret of at least 16 bytes.

    Without keys it makes one of its own, which ends with the process.
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        digests = [blake2b(key, digest_size=_KEY).digest() for key in keys or (secrets.token_bytes(_KEY),)]
        self._keys = {_name(key): key for key in digests}
        self._name = _name(digests[0])

    def seal(self, content: SealedReasoning | SealedSummary, owner: str) -> str:
        """Return the sealed text of a content, for one owner."""
        salt = secrets.token_bytes(_SALT)
        cipher, nonce = _cipher(self._keys[self._name], salt)
        sealed = cipher.encrypt(nonce, zlib.compress(_encode(content), 1), _bound_to(owner))
        return PREFIX + urlsafe_b64encode(self._name + salt + sealed).rstrip(b"=").decode()

    def open(self, text: str, owner: str, kind: type[_Content]) -> _Content | None:
        """Return the content of a sealed text; None if it is not sealed by any penstock.

        Raises `Unverified` if it does not open, or if its content is of another kind.
        """
        if not text.startswith(PREFIX):
            return None
        if len(text) > MOST_CHARACTERS:
            raise Unverified("it is too long")
        try:
            sealed = urlsafe_b64decode(text[len(PREFIX) :] + "==")
            name, salt, data = sealed[:_NAME], sealed[_NAME : _NAME + _SALT], sealed[_NAME + _SALT :]
            cipher, nonce = _cipher(self._keys[name], salt)
            content = _decode(_inflated(cipher.decrypt(nonce, data, _bound_to(owner))))
        except (ValueError, KeyError, InvalidTag, zlib.error, msgspec.MsgspecError) as error:
            raise Unverified("it does not open") from error
        if not isinstance(content, kind):
            raise Unverified("it is of another kind")
        return content


def _name(key: bytes) -> bytes:
    return blake2b(key, digest_size=_NAME, person=b"name").digest()


def _cipher(key: bytes, salt: bytes) -> tuple[AESGCM, bytes]:
    derived = blake2b(salt, key=key, digest_size=_KEY + _NONCE).digest()
    return AESGCM(derived[:_KEY]), derived[_KEY:]


def _bound_to(owner: str) -> bytes:
    return f"{PREFIX}{owner}".encode()


def _inflated(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(data, MOST_BYTES)
    if not inflater.eof:
        raise ValueError("it is too large")
    return inflated
