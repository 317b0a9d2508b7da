"""The public keys that an issuer signs with, as its set of keys (JWKS, RFC 7517) has them.

Keys that are private or symmetric, too short, or for encryption, are left out: what such a set holds besides them stays
in use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import jwt
import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

RSA_BITS = range(2048, 8192 + 1)
"""Bits of an RSA key: shorter ones can be broken, and longer ones take long to verify."""

MOST_KEYS = 100
"""Keys of a set that are read."""

OF_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
OF_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}

ALGORITHMS = (*OF_RSA, *OF_CURVES.values(), "EdDSA")
"""The algorithms of signatures: none is symmetric, so that no public key can become a secret that signs."""

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey | Ed448PublicKey

_NAMED = {"RSA": "RS256", "EC": None, "OKP": "EdDSA"}
"""The kinds of keys, each with an algorithm by which PyJWT reads it; that of a curve follows from the curve."""


class _Jwk(msgspec.Struct, frozen=True, omit_defaults=True):
    """One key of a set; its private parts (``d``) and those of a symmetric key (``k``) are only noticed."""

    kty: str
    kid: str | None = None
    alg: str | None = None
    use: str | None = None
    key_ops: list[str] | None = None
    n: str | None = None
    e: str | None = None
    crv: str | None = None
    x: str | None = None
    y: str | None = None
    d: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    k: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def verifies(self) -> bool:
        """True for a key that is meant for signatures, and has no secret part."""
        is_secret = self.d is not msgspec.UNSET or self.k is not msgspec.UNSET
        is_meant = self.use in (None, "sig") and (self.key_ops is None or "verify" in self.key_ops)
        return self.kty in _NAMED and is_meant and not is_secret


class _Jwks(msgspec.Struct, frozen=True):
    keys: list[msgspec.Raw]


@dataclass(frozen=True)
class SigningKey:
    """A public key, with its id and the algorithms that fit it."""

    kid: str | None
    key: PublicKey
    algorithms: frozenset[str]


@dataclass(frozen=True)
class KeySet:
    """The keys of an issuer."""

    keys: tuple[SigningKey, ...]
    left_out: int = 0
    """The number of keys that no signature is verified with."""

    def find(self, kid: str | None, algorithm: str) -> PublicKey | None:
        """Return the key of an id that fits an algorithm; without an id, the only one that fits."""
        found = [key for key in self.keys if algorithm in key.algorithms and kid in (None, key.kid)]
        return found[0].key if len(found) == 1 else None


def read_key_set(data: bytes) -> KeySet:
    """Return the keys of a set; raises `msgspec.DecodeError` if it is none."""
    members = msgspec.json.decode(data, type=_Jwks).keys
    keys = tuple(_signing_keys(members[:MOST_KEYS]))
    return KeySet(keys, len(members) - len(keys))


def _signing_keys(members: Collection[msgspec.Raw]) -> Iterator[SigningKey]:
    for member in members:
        try:
            jwk = msgspec.json.decode(member, type=_Jwk)
            if jwk.verifies and (key := _public_key(jwk)):
                fitting = _fitting(key)
                yield SigningKey(jwk.kid, key, fitting if jwk.alg is None else fitting & {jwk.alg})
        except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, OverflowError):  # it is one of those left out
            continue


def _public_key(jwk: _Jwk) -> PublicKey | None:
    public = {name: value for name in ("kty", "n", "e", "crv", "x", "y") if (value := getattr(jwk, name))}
    key = jwt.PyJWK(public, _NAMED[jwk.kty]).key
    return key if isinstance(key, PublicKey) else None


def _fitting(key: PublicKey) -> frozenset[str]:
    """Return the algorithms that a key is for: none if it is too weak."""
    match key:
        case RSAPublicKey():
            return frozenset(OF_RSA if key.key_size in RSA_BITS else ())
        case EllipticCurvePublicKey():
            return frozenset({OF_CURVES[key.curve.name]} if key.curve.name in OF_CURVES else ())
        case _:
            return frozenset({"EdDSA"})
