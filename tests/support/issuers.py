"""Issuers of tokens: a small one whose every answer a test can change, and one that a package brings along."""

from __future__ import annotations

import json
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Any, TypeAlias

import jwt
from aiohttp import ClientSession, web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from yarl import URL

from tests.support.processes import free_port, running_process

PrivateKey: TypeAlias = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

AUDIENCE = "penstock"
SUBJECT = "alice@corp"


@cache
def rsa_key(bits: int = 2048, number: int = 0) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


@cache
def curve_key(curve: str = "P-256", number: int = 0) -> ec.EllipticCurvePrivateKey:
    curves = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
    return ec.generate_private_key(curves[curve])


@cache
def edwards_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def public_pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def jwk(key: PrivateKey, kid: str | None, *, is_private: bool = False, **fields: Any) -> dict[str, Any]:
    """A key as a set has it."""
    shown: Any = key if is_private else key.public_key()
    match key:
        case rsa.RSAPrivateKey():
            public = RSAAlgorithm.to_jwk(shown, as_dict=True)
        case ec.EllipticCurvePrivateKey():
            public = ECAlgorithm.to_jwk(shown, as_dict=True)
        case _:
            public = OKPAlgorithm.to_jwk(shown, as_dict=True)
    public.pop("key_ops", None)
    return public | ({"kid": kid} if kid else {}) | fields


def octets(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def assembled(header: Mapping[str, Any] | bytes, claims: Mapping[str, Any] | bytes, signature: bytes = b"x") -> str:
    """A token of these parts, which nobody has signed."""
    parts = (part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, claims))
    return ".".join(map(octets, (*parts, signature)))


Answer: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Issuer:
    """An issuer on a loopback address."""

    url: str = ""
    keys: list[dict[str, Any]] = field(default_factory=lambda: [jwk(curve_key(), "one")])
    document: dict[str, Any] = field(default_factory=dict)
    """What its discovery document says otherwise."""
    headers: dict[str, str] = field(default_factory=dict)
    answer: Answer | None = None
    """Answers requests for the keys, in place of those."""
    discoveries: int = 0
    fetches: int = 0

    def claims(self, **changes: Any) -> dict[str, Any]:
        """The claims of a valid token, without those that are changed to None."""
        now = int(time.time())
        valid = {"iss": self.url, "sub": SUBJECT, "aud": AUDIENCE, "iat": now, "exp": now + 600}
        return {name: value for name, value in (valid | changes).items() if value is not None}

    def token(
        self, key: PrivateKey | None = None, algorithm: str = "ES256", kid: str | None = "one", **changes: Any
    ) -> str:
        headers = {"kid": kid} if kid else {}
        return jwt.encode(self.claims(**changes), key or curve_key(), algorithm, headers)

    async def discover(self, _: web.Request) -> web.StreamResponse:
        self.discoveries += 1
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/jwks"} | self.document)

    async def give_keys(self, request: web.Request) -> web.StreamResponse:
        self.fetches += 1
        if self.answer is not None:
            return await self.answer(request)
        return web.json_response({"keys": self.keys}, headers=self.headers)


@asynccontextmanager
async def running_issuer(tls: SSLContext | None = None) -> AsyncGenerator[Issuer, None]:
    issuer = Issuer()
    app = web.Application()
    app.add_routes([web.get("/.well-known/openid-configuration", issuer.discover), web.get("/jwks", issuer.give_keys)])
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        host, port = runner.addresses[0][:2]
        issuer.url = f"{'https' if tls else 'http'}://{host}:{port}"
        yield issuer
    finally:
        await runner.cleanup()


@dataclass
class Provider:
    """A running ``oidc-provider-mock``, with which clients sign in by its code flow."""

    url: str
    client: ClientSession

    async def sign_in(self, user: str, client_id: str = AUDIENCE) -> str:
        """Sign a user in, and return the token of identity."""
        endpoints = await self._json(self.client.get(f"{self.url}/.well-known/openid-configuration"))
        back = "http://127.0.0.1/back"
        asked = {"client_id": client_id, "redirect_uri": back, "response_type": "code", "scope": "openid email"}
        authorize = URL(endpoints["authorization_endpoint"]).with_query(asked | {"state": "s"})
        async with self.client.post(authorize, data={"sub": user}, allow_redirects=False) as answer:
            code = URL(answer.headers["Location"]).query["code"]
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": back}
        form |= {"client_id": client_id, "client_secret": "any"}
        return str((await self._json(self.client.post(endpoints["token_endpoint"], data=form)))["id_token"])

    async def _json(self, request: Any) -> Any:
        async with request as answer:
            body = await answer.json()
            assert answer.status == 200, body
            return body


@asynccontextmanager
async def running_provider(folder: Path, *users: Mapping[str, Any]) -> AsyncGenerator[Provider, None]:
    port = free_port()
    command: list[str | Path] = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port)]
    for user in users:
        command += ["--user-claims", json.dumps(user)]
    url = f"http://127.0.0.1:{port}"
    with running_process(command, f"{url}/.well-known/openid-configuration", folder / "provider.log"):
        async with ClientSession() as client:
            yield Provider(url, client)
