"""Signing in by the tokens of issuers: what is taken, every known attack, and issuers that fail or lie."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import jwt
import openai
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from penstock.api.cli.command_line import read_settings
from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.resources.resources import ServerParts
from penstock.api.settings import Settings
from penstock.api.start.assembly import keys_of
from penstock.extensions.sign_in import discovery, resource, sign_in
from penstock.extensions.sign_in.claims import owner_of
from penstock.extensions.sign_in.issuers import UnusableSignIn
from penstock.extensions.sign_in.resource import check
from penstock.extensions.sign_in.stored_owners import StoredOwners
from penstock.extensions.sign_in.token_text import LONGEST_TOKEN
from penstock.pipeline.errors import CannotStart, InvalidToken, Unauthorized
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.tools import Toolbox
from tests.support.api_clients import openai_client, wait_until
from tests.support.issuers import (
    AUDIENCE,
    SUBJECT,
    Answer,
    Issuer,
    PrivateKey,
    assembled,
    curve_key,
    edwards_key,
    jwk,
    octets,
    public_pem,
    rsa_key,
    running_issuer,
    running_provider,
)
from tests.support.server import ScriptedServer, running_server, script
from tests.support.socket_client import connected
from tests.support.stores import open_store

KEY = "eyJhbGciOiJub25lIn0.looks-like-a.token"
"""An API key of the form of a token."""

GOLD = "[gold]\nresponses = 9\n[silver]\nresponses = 8\n"

REFUSALS = re.compile(
    r"The bearer token of the request (has (expired|more than \d+ bytes|a signature or a claim that is wrong"
    r"|(header|claims) that (cannot be read|are no JSON object)|the header (crit|b64), which this server does not take"
    r"|no claim \S+( of 1 to 255 characters)?(, or a wrong one, which gives the \w+ at this server)?"
    r"|a claim that this server cannot take: .*|a claim \S+ whose values are no names"
    r"|none of the values of its claim \S+ that this server requires)"
    r"|is (not valid yet|for another audience|encrypted, and this server takes signed ones only"
    r"|of an issuer that this server does not know|of a type that does not sign a client in"
    r"|signed in a way that this server does not take"
    r"|bound to a key of its client \(cnf\), so that it is no bearer token"
    r"|signed with a key that its issuer does not have, or no longer)"
    r"|lacks one of alg, iss, exp and aud, or has one of a wrong type"
    r"|names a key by more than \d+ characters"
    r"|gives what this server cannot serve: .*)\. Sign in again\."
)
"""All texts that a client gets about its token: none is a library's."""


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def settings_of(folder: Path, issuer: Issuer, table: str = "", *arguments: str) -> Settings:
    file = folder / "sign-in.toml"
    file.write_text(f'[issuers."{issuer.url}"]\naudience = "{AUDIENCE}"\n{table}')
    return read_settings(["--sign-in", str(file), *arguments])


@asynccontextmanager
async def signing_in(
    folder: Path, issuer: Issuer, table: str = "", **options: Any
) -> AsyncGenerator[ScriptedServer, None]:
    limits = folder / "limits.toml"
    limits.write_text(GOLD)
    settings = settings_of(folder, issuer, table, "--limits", str(limits)).model_copy(update={"api_keys": (KEY,)})
    admission = Admission(limits)
    keys = keys_of(settings, admission)
    admission.name_of = keys.limits
    options |= {"keys": keys, "settings": settings, "admission": admission}
    async with running_server(ScriptedEngine(script()), folder, resources=("sign_in",), **options) as server:
        yield server


@pytest.fixture
async def issuer() -> AsyncGenerator[Issuer, None]:
    async with running_issuer() as running:
        yield running


@pytest.fixture
async def server(tmp_path: Path, issuer: Issuer) -> AsyncGenerator[ScriptedServer, None]:
    async with signing_in(tmp_path, issuer) as running:
        yield running


async def answered(server: ScriptedServer, token: str) -> tuple[int, Any, str]:
    """Return the status, the body and the challenge that a token gets."""
    async with server.client.get(f"{server.url}/v1/models", headers=bearer(token)) as answer:
        return answer.status, await answer.json(), answer.headers.get("WWW-Authenticate", "")


async def assert_refused(server: ScriptedServer, token: str) -> str:
    status, body, challenge = await answered(server, token)
    assert status == 401, body
    message = str(body["error"]["message"])
    assert REFUSALS.fullmatch(message), message
    assert challenge == f'Bearer error="invalid_token", error_description="{message}"'
    assert token not in json.dumps(body)
    return message


async def assert_taken(server: ScriptedServer, token: str) -> None:
    status, body, _ = await answered(server, token)
    assert status == 200, body


def signed(header: dict[str, Any], claims: dict[str, Any] | bytes, algorithm: str = "ES256", key: Any = None) -> str:
    """A token with these headers, in JSON of any form, which PyJWT would not write, and a right signature."""
    parts = json.dumps({"alg": algorithm, "kid": "one"} | header).encode(), claims
    first, _, _ = assembled(*parts).rpartition(".")
    signer: Any = jwt.get_algorithm_by_name(algorithm)
    return f"{first}.{octets(signer.sign(first.encode(), key or curve_key()))}"


def raw(**changes: Any) -> Callable[[Issuer], str]:
    """A token with headers that PyJWT would not write."""

    def token(issuer: Issuer) -> str:
        return signed(changes, issuer.claims())

    return token


def unsigned(alg: str) -> Callable[[Issuer], str]:
    return lambda issuer: assembled({"alg": alg, "kid": "one"}, issuer.claims())


def claiming(**changes: Any) -> Callable[[Issuer], str]:
    return lambda issuer: signed({}, issuer.claims(**changes))


def doubled(issuer: Issuer) -> str:
    text = json.dumps(issuer.claims())
    return signed({}, f'{text[:-1]}, "sub": "root"}}'.encode())


NOW = time.time()

ATTACKS: dict[str, tuple[Callable[[Issuer], str], str]] = {
    **{
        f"alg {alg}": (unsigned(alg), "in a way")
        for alg in ("none", "None", "NONE", "nOnE", "", "HS256", "HS512", "es256", "ES256K", "RSA-OAEP", "dir")
    },
    "no signature": (lambda issuer: issuer.token().rpartition(".")[0] + ".", "wrong"),
    "alg is a list": (lambda issuer: assembled({"alg": ["ES256"], "kid": "one"}, issuer.claims()), "wrong type"),
    "no alg": (lambda issuer: assembled({"kid": "one"}, issuer.claims()), "lacks"),
    "HS256 with the public key": (
        lambda issuer: signed({}, issuer.claims(), "HS256", public_pem(curve_key())),
        "in a way",
    ),
    "another alg for the key": (lambda issuer: issuer.token(rsa_key(), "RS256", "one"), "does not have"),
    "alg of another curve": (lambda issuer: issuer.token(curve_key("P-384"), "ES384", "one"), "does not have"),
    "another key": (lambda issuer: issuer.token(curve_key(number=1)), "wrong"),
    "kid is a path": (lambda issuer: issuer.token(kid="../../../../dev/null"), "does not have"),
    "kid is a URL": (lambda issuer: issuer.token(kid=f"{issuer.url}/jwks"), "does not have"),
    "kid is SQL": (lambda issuer: issuer.token(kid="one' or '1'='1"), "does not have"),
    "kid is a number": (raw(kid=1), "wrong type"),
    "kid is long": (lambda issuer: issuer.token(kid="k" * 300), "more than 256"),
    "jwk of the attacker": (
        lambda issuer: jwt.encode(
            issuer.claims(),
            curve_key(number=1),
            "ES256",
            {"kid": "one", "jwk": jwk(curve_key(number=1), "one"), "jku": f"{issuer.url}/evil", "x5u": "http://evil"},
        ),
        "wrong",
    ),
    "x5c of the attacker": (lambda issuer: signed({"x5c": ["MIIB"], "kid": "two"}, issuer.claims()), "does not have"),
    "expired": (claiming(exp=int(NOW) - 3600), "expired"),
    "not valid yet": (claiming(nbf=int(NOW) + 3600), "not valid yet"),
    "from the future": (claiming(iat=int(NOW) + 3600), "not valid yet"),
    "no exp": (claiming(exp=None), "lacks"),
    "exp is a text": (claiming(exp=str(int(NOW) + 600)), "wrong type"),
    "exp is true": (claiming(exp=True), "wrong type"),
    "exp is infinite": (
        lambda issuer: signed({}, json.dumps(issuer.claims(exp=1)).replace(": 1}", ": 1e999}").encode()),
        "wrong",
    ),
    "exp is NaN": (claiming(exp=float("nan")), "cannot be read"),
    "exp is negative": (claiming(exp=-1), "expired"),
    "nbf is an object": (claiming(nbf={}), "wrong type"),
    "wrong audience": (claiming(aud="another"), "another audience"),
    "wrong audiences": (claiming(aud=["another", "penstock2"]), "another audience"),
    "no audience": (claiming(aud=None), "lacks"),
    "empty audience": (claiming(aud=[]), "wrong"),
    "audience of a wrong type": (claiming(aud=["penstock", 1]), "wrong type"),
    "audience is an object": (claiming(aud={"penstock": 1}), "wrong type"),
    "wrong issuer": (claiming(iss="https://evil.example"), "does not know"),
    "nearly the issuer": (lambda issuer: signed({}, issuer.claims(iss=f"{issuer.url}/")), "does not know"),
    "issuer in capitals": (lambda issuer: signed({}, issuer.claims(iss=issuer.url.upper())), "does not know"),
    "issuer is a list": (lambda issuer: signed({}, issuer.claims(iss=[issuer.url])), "wrong type"),
    "no issuer": (claiming(iss=None), "lacks"),
    "no subject": (claiming(sub=None), "no claim sub"),
    "empty subject": (claiming(sub=""), "no claim sub"),
    "long subject": (claiming(sub="s" * 256), "no claim sub"),
    "subject is a number": (claiming(sub=7), "no claim sub"),
    "subject with a zero": (claiming(sub="a\0b"), "no claim sub"),
    "subject with half a surrogate pair": (claiming(sub="a\ud800"), "no claim sub"),
    "double claims": (doubled, "cannot be read"),
    "double headers": (
        lambda issuer: assembled(b'{"alg":"none","alg":"ES256","kid":"one"}', issuer.claims()),
        "cannot be read",
    ),
    "crit": (lambda issuer: assembled({"alg": "ES256", "kid": "one", "crit": ["x"], "x": 1}, issuer.claims()), "crit"),
    "crit of exp": (
        lambda issuer: assembled({"alg": "ES256", "kid": "one", "crit": ["exp"], "exp": 1}, issuer.claims()),
        "crit",
    ),
    "b64": (lambda issuer: assembled({"alg": "ES256", "kid": "one", "b64": False}, issuer.claims()), "b64"),
    "bound to a key": (claiming(cnf={"jkt": "x"}), "cnf"),
    "type of a logout": (raw(typ="logout+jwt"), "of a type"),
    "type of a proof": (raw(typ="dpop+jwt"), "of a type"),
    "claims are a list": (lambda _: signed({}, b'["iss"]'), "no JSON object"),
    "claims are no JSON": (lambda _: signed({}, b"\xff\xfe"), "cannot be read"),
    "claims are deep": (lambda _: signed({}, b'{"a":' + b"[" * 2_800 + b"]" * 2_800 + b"}"), "cannot be read"),
    "claims are a token": (lambda issuer: signed({"cty": "JWT"}, issuer.token().encode()), "cannot be read"),
    "encrypted": (
        lambda _: f"{octets(json.dumps({'alg': 'dir', 'enc': 'A256GCM'}).encode())}..aaaa.bbbb.cccc",
        "encrypted",
    ),
    "huge": (lambda _: "eyJhbGciOiJub25lIn0." + "a" * 6_000 + ".", "cannot be read"),
    "bits after the signature": (lambda issuer: issuer.token() + "A", "wrong"),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_every_attack_is_refused_in_words_of_this_server(
    server: ScriptedServer, issuer: Issuer, attack: str
) -> None:
    """The same token is refused again, and leaves what a valid one gets."""
    make, words = ATTACKS[attack]
    token = make(issuer)
    assert words in await assert_refused(server, token)
    await assert_refused(server, token)
    await assert_taken(server, issuer.token())


async def test_bound_of_bytes_comes_before_any_decoding(server: ScriptedServer) -> None:
    """Over HTTP, a longer header is refused before; a program around this one may hand over any token."""
    tokens = server.api.keys.sign_in
    assert tokens is not None
    for text in ("eyJ" + "a." * LONGEST_TOKEN, "eyJ.b.c" + "a" * 2**22):
        with pytest.raises(InvalidToken, match=f"more than {LONGEST_TOKEN} bytes"):
            await tokens.key_of(text)
    assert await tokens.key_of("a" * 2**22) is None


KINDS: dict[str, Callable[[], PrivateKey]] = {
    **{f"RS{bits}": rsa_key for bits in (256, 384, 512)},
    **{f"PS{bits}": rsa_key for bits in (256, 384, 512)},
    "ES256": curve_key,
    "ES384": lambda: curve_key("P-384"),
    "ES512": lambda: curve_key("P-521"),
    "EdDSA": edwards_key,
}


@pytest.mark.parametrize("algorithm", KINDS)
async def test_each_algorithm_signs_in(tmp_path: Path, issuer: Issuer, algorithm: str) -> None:
    key = KINDS[algorithm]()
    for kid in ("of-a-kind", None):
        issuer.keys = [jwk(key, kid)]
        async with signing_in(tmp_path, issuer) as server:
            for named in {kid, None}:
                await assert_taken(server, issuer.token(key, algorithm, named))
    others = ", ".join(f'"{name}"' for name in KINDS if name != algorithm)
    async with signing_in(tmp_path, issuer, f"algorithms = [{others}]") as server:
        assert "in a way" in await assert_refused(server, issuer.token(key, algorithm, None))


UNUSED: dict[str, tuple[Any, Any, str]] = {
    "an RSA key of 1024 bits": (jwk(rsa_key(1024), "one"), rsa_key(1024), "RS256"),
    "a private key": (jwk(rsa_key(), "one", is_private=True), rsa_key(), "RS256"),
    "a private key of a curve": (jwk(curve_key(), "one", is_private=True), curve_key(), "ES256"),
    "a symmetric key": ({"kty": "oct", "k": octets(b"s" * 64), "kid": "one", "alg": "HS256"}, b"s" * 64, "HS256"),
    "a symmetric key as RSA": (jwk(rsa_key(), "one", k=octets(b"s" * 64)), rsa_key(), "RS256"),
    "for encryption": (jwk(rsa_key(), "one", use="enc"), rsa_key(), "RS256"),
    "only to sign with": (jwk(rsa_key(), "one", key_ops=["sign"]), rsa_key(), "RS256"),
    "of another algorithm": (jwk(rsa_key(), "one", alg="PS256"), rsa_key(), "RS256"),
    "of an algorithm for encryption": (jwk(rsa_key(), "one", alg="RSA-OAEP"), rsa_key(), "RS256"),
    "of an unknown kind": (jwk(rsa_key(), "one") | {"kty": "AKP"}, rsa_key(), "RS256"),
    "of an unknown curve": (jwk(curve_key(), "one") | {"crv": "P-192"}, curve_key(), "ES256"),
    "off its curve": (jwk(curve_key(), "one") | {"y": octets(b"y" * 32)}, curve_key(), "ES256"),
    "of numbers": (jwk(rsa_key(), "one") | {"n": 5}, rsa_key(), "RS256"),
    "of no base64": (jwk(rsa_key(), "one") | {"n": "!"}, rsa_key(), "RS256"),
    "of zero": (jwk(rsa_key(), "one") | {"n": "AA", "e": "AA"}, rsa_key(), "RS256"),
    "of an even exponent": (jwk(rsa_key(), "one") | {"e": "Ag"}, rsa_key(), "RS256"),
    "a text": ("one", rsa_key(), "RS256"),
}


@pytest.mark.parametrize("name", UNUSED)
async def test_keys_that_cannot_verify_are_left_out(tmp_path: Path, issuer: Issuer, name: str) -> None:
    """The other keys of the set stay in use."""
    left_out, key, algorithm = UNUSED[name]
    issuer.keys = [left_out, jwk(curve_key(number=1), "other")]
    async with signing_in(tmp_path, issuer) as server:
        message = await assert_refused(server, signed({}, issuer.claims(), algorithm, key))
        assert ("in a way" if algorithm == "HS256" else "does not have") in message
        await assert_taken(server, issuer.token(curve_key(number=1), kid="other"))


async def test_keys_of_one_issuer_sign_nothing_of_another(tmp_path: Path, issuer: Issuer) -> None:
    async with running_issuer() as other:
        other.keys = [jwk(curve_key(number=1), "one")]
        table = f'[issuers."{other.url}"]\naudience = "{AUDIENCE}"\n'
        async with signing_in(tmp_path, issuer, table) as server:
            await assert_taken(server, issuer.token())
            await assert_taken(server, other.token(curve_key(number=1)))
            assert "wrong" in await assert_refused(server, issuer.token(curve_key(number=1)))
            assert "wrong" in await assert_refused(server, other.token(curve_key()))


async def test_clocks_may_differ_by_a_minute(server: ScriptedServer, issuer: Issuer) -> None:
    now = int(time.time())
    await assert_taken(server, issuer.token(exp=now - 30))
    await assert_taken(server, issuer.token(nbf=now + 30, iat=now + 30))
    await assert_taken(server, issuer.token(exp=10**400))
    assert "expired" in await assert_refused(server, issuer.token(exp=now - 61))


async def test_code_of_an_expired_token_tells_clients_to_renew_it(server: ScriptedServer, issuer: Issuer) -> None:
    async with openai_client(server.url, issuer.token(exp=1)) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            await client.models.list()
    assert error.value.code == "token_expired"
    async with anthropic.AsyncAnthropic(base_url=server.url, auth_token=issuer.token(aud="x"), max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError, match="another audience"):
            await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])


async def test_key_of_the_form_of_a_token_is_a_key(server: ScriptedServer, issuer: Issuer) -> None:
    await assert_taken(server, KEY)
    both = {"Authorization": f"Bearer {issuer.token(exp=1)}", "x-api-key": KEY}
    for headers in (both, {"Authorization": f"Bearer {KEY}x", "x-api-key": issuer.token()}):
        async with server.client.get(f"{server.url}/v1/models", headers=headers) as answer:
            assert answer.status == 200
    status, body, challenge = await answered(server, "sk-no-key-0123456789")
    assert (status, body["error"]["code"], challenge) == (401, "invalid_api_key", "Bearer")


async def test_owner_is_a_digest_that_no_key_has(server: ScriptedServer, issuer: Issuer) -> None:
    """The text of which it is the digest cannot be sent, and would be no key."""
    await assert_taken(server, issuer.token())
    owner = owner_of(issuer.url, SUBJECT)
    assert server.api.keys.of(owner) is not None
    with pytest.raises(Unauthorized):
        server.api.keys.owner(f"Bearer {issuer.url}\0{SUBJECT}")
    assert len({owner, owner_of(issuer.url, "bob"), owner_of(f"{issuer.url}/", SUBJECT)}) == 3


async def test_objects_belong_to_the_subject_whatever_the_token(server: ScriptedServer, issuer: Issuer) -> None:
    async with openai_client(server.url, issuer.token(jti="1")) as client:
        created = await client.responses.create(input="Hi")
        for token in (issuer.token(jti="2"), issuer.token(jti="3", aud=["x", AUDIENCE])):
            read = await client.with_options(api_key=token).responses.retrieve(created.id)
            assert read.output_text == "Hello!"
        for other in (issuer.token(sub="bob"), KEY):
            with pytest.raises(openai.NotFoundError):
                await client.with_options(api_key=other).responses.retrieve(created.id)


CLAIMS = """
owner = "oid"
team = "department"
limits = "tier"
models = "llm.models"
require = { groups = ["llm-users", "llm-admins"] }
[issuers."{url}".claims.groups.research]
team = "research"
limits = "gold"
models = ["gpt-oss-*", "qwen"]
tools = ["web_search"]
[issuers."{url}".claims.groups.none]
tools = "none"
"""

FULL: dict[str, Any] = {
    "oid": "7",
    "groups": ["llm-users"],
    "department": "sales",
    "tier": "silver",
    "llm": {"models": ["gpt-oss-*"]},
}
USUAL = "team=sales limits=silver models=gpt-oss-*"

GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "claims": ({}, USUAL),
    "name": ({"email": "alice smith@corp.example"}, f"name=alice_smith@corp.example {USUAL}"),
    "name with a word": ({"email": "a limits=gold"}, f"name=a_limits_gold {USUAL}"),
    "name that is not verified": ({"email": "x@y", "email_verified": False}, USUAL),
    "name of another type": ({"email": ["x@y"]}, USUAL),
    "long name": ({"email": "é" * 99}, f"name={'_' * 64} {USUAL}"),
    "group": (
        {"groups": ["llm-users", "none", "research"], "department": None, "tier": None, "llm": None},
        "team=research limits=gold models=gpt-oss-*,qwen tools=web_search",
    ),
    "later group": ({"groups": ["none", "llm-admins"]}, f"tools=none {USUAL}"),
}

UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "no group": ({"groups": None}, "none of the values of its claim groups"),
    "another group": ({"groups": ["llm-userss"]}, "none of the values of its claim groups"),
    "a text for the groups": ({"groups": "llm-users llm-admins"}, "none of the values of its claim groups"),
    "groups of other types": ({"groups": [1, None, ["llm-users"]]}, "none of the values of its claim groups"),
    "no owner": ({"oid": None}, "no claim oid"),
    "no limits": ({"tier": None}, "no claim tier"),
    "limits of no table": ({"tier": "platinum"}, "cannot serve: limits=platinum"),
    "limits with a word": ({"tier": "silver models=*"}, "values are no names"),
    "limits with a line": ({"tier": "silver\nmodels=*"}, "values are no names"),
    "two limits": ({"tier": ["silver", "gold"]}, "no claim tier"),
    "no models": ({"llm": {}}, "no claim llm.models"),
    "empty models": ({"llm": {"models": []}}, "no claim llm.models"),
    "models with a comma": ({"llm": {"models": ["gpt-oss-20b,*"]}}, "values are no names"),
    "a team of no name": ({"department": "sales/emea"}, "cannot take"),
}


def with_claims(claims: dict[str, Any]) -> dict[str, Any]:
    return {"sub": None} | FULL | claims


@pytest.mark.parametrize("name", GIVEN)
async def test_claims_give_what_a_key_has(tmp_path: Path, issuer: Issuer, name: str) -> None:
    claims, words = GIVEN[name]
    async with signing_in(tmp_path, issuer, CLAIMS.replace("{url}", issuer.url)) as server:
        await assert_taken(server, issuer.token(**with_claims(claims)))
        key = server.api.keys.of(owner_of(issuer.url, "7"))
    assert key is not None
    assert key.words == words


@pytest.mark.parametrize("name", UNFIT)
async def test_claims_that_give_nothing_refuse_the_token(tmp_path: Path, issuer: Issuer, name: str) -> None:
    claims, problem = UNFIT[name]
    async with signing_in(tmp_path, issuer, CLAIMS.replace("{url}", issuer.url)) as server:
        assert problem in await assert_refused(server, issuer.token(**with_claims(claims)))


async def test_scopes_are_words_of_a_text(tmp_path: Path, issuer: Issuer) -> None:
    async with signing_in(tmp_path, issuer, 'require = { scope = "llm" }') as server:
        await assert_taken(server, issuer.token(scope="openid llm"))
        await assert_refused(server, issuer.token(scope="openid llms"))


@pytest.mark.parametrize("rule", ['owner = "email"', 'require = { email = "x@y" }'])
@pytest.mark.parametrize("is_verified", [False, "false"])
async def test_address_that_is_not_verified_lets_nobody_in(
    tmp_path: Path, issuer: Issuer, rule: str, is_verified: bool | str
) -> None:
    async with signing_in(tmp_path, issuer, rule) as server:
        await assert_taken(server, issuer.token(email="x@y"))
        assert "claim email" in await assert_refused(server, issuer.token(email="x@y", email_verified=is_verified))


async def test_type_can_be_asked_for(tmp_path: Path, issuer: Issuer) -> None:
    async with signing_in(tmp_path, issuer, 'type = "at+jwt"') as server:
        for kind in ("at+jwt", "application/at+JWT"):
            await assert_taken(server, signed({"typ": kind}, issuer.claims()))
        for other in ("JWT", "id+jwt", None):
            await assert_refused(server, signed({"typ": other}, issuer.claims()))


def stored_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("responses.sqlite3*"))


async def test_no_log_and_no_store_has_a_token(
    tmp_path: Path, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    taken, refused = issuer.token(), issuer.token(aud="x")
    async with signing_in(tmp_path, issuer) as server, openai_client(server.url, taken) as client:
        await client.responses.create(input="Hi")
        await assert_refused(server, refused)
        await server.store.writer.flushed()
    stored = stored_bytes(tmp_path)
    assert owner_of(issuer.url, SUBJECT).encode() in stored
    for token in (taken, refused):
        for part in token.split(".")[1:]:
            assert part.encode() not in stored
            assert part not in caplog.text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that moves the clock by which tokens are remembered, though not that of their verification."""
    passed = 0.0

    def move(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    now = time.time
    monkeypatch.setattr(sign_in, "time", SimpleNamespace(time=lambda: now() + passed))
    return move


async def test_token_is_verified_once_and_not_beyond_its_time(
    tmp_path: Path, issuer: Issuer, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, decode = list[str](), jwt.decode

    def counting(token: str, *arguments: Any, **named: Any) -> Any:
        verified.append(token)
        return decode(token, *arguments, **named)

    monkeypatch.setattr(jwt, "decode", counting)
    token = issuer.token()
    async with signing_in(tmp_path, issuer) as server:
        for _ in range(5):
            await assert_taken(server, token)
        assert verified == [token]
        clock(10_000)
        await assert_taken(server, token)
        assert verified == [token, token]


async def test_open_socket_ends_with_the_token(tmp_path: Path, issuer: Issuer, clock: Callable[[float], None]) -> None:
    """A new token of the same owner, in any request, keeps it open."""
    async with (
        signing_in(tmp_path, issuer) as server,
        connected(server, headers=bearer(issuer.token())) as client,
    ):
        assert (await client.create(input="Hi")).status == "completed"
        clock(10_000)
        await client.send(input="Hi")
        assert (await client.error())["error"]["code"] == "invalid_api_key"


async def test_what_goes_on_keeps_the_words_of_its_owner(
    tmp_path: Path, issuer: Issuer, clock: Callable[[float], None]
) -> None:
    """They hold after the token has expired, and in the next process, but open nothing there."""
    table = CLAIMS.replace("{url}", issuer.url)
    token, owner = issuer.token(**with_claims({"email": "a@b"})), owner_of(issuer.url, "7")
    async with signing_in(tmp_path, issuer, table) as server:
        await assert_taken(server, token)
        clock(10_000)
        assert_kept(server.api.keys, owner)
    async with signing_in(tmp_path, issuer, table) as server:
        assert_kept(server.api.keys, owner)
        clock(-10_000)
        await assert_taken(server, token)
        server.api.keys.check(owner)


def assert_kept(keys: Keys, owner: str) -> None:
    key = keys.of(owner)
    assert key is not None
    assert (key.limits, key.team, key.models, key.title) == ("silver", "sales", frozenset({"gpt-oss-*"}), "a@b")
    with pytest.raises(Unauthorized):
        keys.check(owner)


async def test_words_of_an_owner_reach_all_servers_of_a_store(store_at: str) -> None:
    async with open_store(store_at) as one, open_store(store_at) as other:
        one.part(StoredOwners).remember("a" * 64, "limits=gold")
        await one.writer.flushed()
        assert other.words_of("a" * 64) is None
        await other.recover_parts()
        assert other.words_of("a" * 64) == "limits=gold"
        one.part(StoredOwners).remember("a" * 64, "limits=silver")
        await one.writer.flushed()
        await other.recover_parts()
        await other.part(StoredOwners).sweep()
        assert other.words_of("a" * 64) == one.words_of("a" * 64) == "limits=silver"


# Issuers that fail, lie, or rotate their keys


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that moves the clock by which keys age, in minutes; it stands still otherwise."""
    now = time.monotonic()

    def move(number: float) -> None:
        nonlocal now
        now += number * 60

    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=lambda: now))
    return move


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def drips(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.05)


async def floods(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    with suppress(ConnectionError):
        for _ in range(100):
            await answer.write(b" " * 2**20)
    return answer


def answering(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(body=data, status=status, headers=headers)

    return answer


SQUEEZED = gzip.compress(b" " * 2**24)

LIES: dict[str, dict[str, Any]] = {
    "hangs": {"answer": hangs},
    "drips": {"answer": drips},
    "sends 100 MB": {"answer": floods},
    "sends a bomb": {"answer": answering(SQUEEZED, headers={"Content-Encoding": "gzip"})},
    "redirects": {"answer": answering(b"", 302, {"Location": "/.well-known/openid-configuration"})},
    "fails": {"answer": answering(b"", 500)},
    "is no JSON": {"answer": answering(b"<html>")},
    "is another JSON": {"answer": answering([1])},
    "is deep": {"answer": answering(b'{"keys":' + b"[" * 100_000)},
    "has no keys": {"answer": answering({"keys": []})},
    "has none that verifies": {"keys": [jwk(rsa_key(1024), "one")]},
    "is another issuer": {"document": {"issuer": "https://evil.example"}},
    "is nearly the issuer": {"document": {"issuer": "http://127.0.0.1"}},
    "has keys in a file": {"document": {"jwks_uri": "file:///etc/passwd"}},
    "has keys without TLS": {"document": {"jwks_uri": "http://keys.example/jwks"}},
    "has keys at no URL": {"document": {"jwks_uri": "http://[::1/jwks"}},
    "has keys at a wrong type": {"document": {"jwks_uri": 5}},
}


@pytest.mark.parametrize("lie", LIES)
async def test_no_request_hangs_if_an_issuer_lies(
    tmp_path: Path, issuer: Issuer, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys go on to sign in, tokens get a 503, and the next request asks the issuer again."""
    monkeypatch.setattr(discovery, "PATIENCE", 0.5)
    honest = replace(issuer)
    for name, value in LIES[lie].items():
        setattr(issuer, name, value)
    settings = settings_of(tmp_path, issuer)
    with pytest.raises(CannotStart, match=re.escape(issuer.url)):
        await check(settings)
    async with signing_in(tmp_path, issuer) as server:
        await assert_taken(server, KEY)
        async with server.client.get(f"{server.url}/v1/models", headers=bearer(issuer.token())) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "issuer_unavailable")
            assert int(answer.headers["Retry-After"]) >= 1
        monkeypatch.setattr(discovery, "RETRY", 0.0)
        issuer.answer, issuer.document, issuer.keys = honest.answer, honest.document, honest.keys
        while (await answered(server, issuer.token()))[0] != 200:
            pass


async def test_check_names_the_keys_of_each_issuer(tmp_path: Path, issuer: Issuer) -> None:
    assert await check(settings_of(tmp_path, issuer)) == f"{issuer.url} (1 key)"
    assert await check(read_settings([])) == "none"


async def test_issuer_without_discovery_has_a_url_of_its_keys(tmp_path: Path, issuer: Issuer) -> None:
    async with signing_in(tmp_path, issuer, f'jwks = "{issuer.url}/jwks"') as server:
        await assert_taken(server, issuer.token())
    assert issuer.discoveries == 0


async def test_one_fetch_serves_all_requests(tmp_path: Path, issuer: Issuer) -> None:
    may_answer = asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return web.json_response({"keys": issuer.keys})

    issuer.answer = wait
    async with signing_in(tmp_path, issuer) as server:
        tokens = server.api.keys.sign_in
        assert tokens is not None
        asking = [asyncio.create_task(tokens.key_of(issuer.token(sub=str(number)))) for number in range(200)]
        await wait_until(lambda: issuer.fetches)
        may_answer.set()
        assert len({key.digest for key in await asyncio.gather(*asking) if key}) == 200
    assert (issuer.discoveries, issuer.fetches) == (1, 1)


async def test_flood_of_unknown_keys_is_one_fetch_a_minute(
    tmp_path: Path, issuer: Issuer, minutes: Callable[[float], None]
) -> None:
    async with signing_in(tmp_path, issuer) as server:
        await assert_taken(server, issuer.token())
        for minute in range(3):
            for number in range(20):
                await assert_refused(server, issuer.token(kid=f"{minute} {number}"))
            assert issuer.fetches == 1 + minute
            minutes(1.01)


async def test_rotated_keys_are_found_and_old_ones_end(
    tmp_path: Path, issuer: Issuer, minutes: Callable[[float], None]
) -> None:
    """A token that was verified with a key that is gone is refused, although it was remembered."""
    old, new = issuer.token(), issuer.token(curve_key(number=1), kid="two")
    async with signing_in(tmp_path, issuer) as server:
        await assert_taken(server, old)
        issuer.keys = [jwk(curve_key(number=1), "two")]
        assert "does not have" in await assert_refused(server, new)
        minutes(1.01)
        await assert_taken(server, new)
        assert "does not have" in await assert_refused(server, old)


async def test_known_keys_last_an_hour_without_their_issuer(
    tmp_path: Path, issuer: Issuer, minutes: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with signing_in(tmp_path, issuer) as server:
        await assert_taken(server, issuer.token())
        issuer.answer = answering(b"", 500)
        for _ in range(6):
            minutes(11)
            await assert_taken(server, issuer.token())
        minutes(11)
        assert (await answered(server, issuer.token(jti="new")))[0] == 503
    assert f"The keys of {issuer.url} were not fetched: its keys: status 500" in caplog.messages


@pytest.mark.parametrize(
    ("header", "minutes_fresh"),
    [("", 10), ("max-age=1", 1), ("public, max-age=3600", 60), ("max-age=999999999", 1440), ("no-store", 1), ("x", 10)],
)
async def test_keys_are_fresh_as_their_issuer_says_within_bounds(
    tmp_path: Path, issuer: Issuer, minutes: Callable[[float], None], header: str, minutes_fresh: float
) -> None:
    issuer.headers = {"Cache-Control": header}
    async with signing_in(tmp_path, issuer) as server:
        await assert_taken(server, issuer.token())
        minutes(minutes_fresh * 0.9)
        await assert_taken(server, issuer.token(jti="2"))
        assert issuer.fetches == 1
        minutes(minutes_fresh * 0.2)
        await assert_taken(server, issuer.token(jti="3"))
        await wait_until(lambda: issuer.fetches == 2)


async def test_file_is_read_again(tmp_path: Path, issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong file leaves the issuers as they were; so do the keys of those that stay."""
    caplog.set_level(logging.INFO)
    settings = settings_of(tmp_path, issuer)
    async with running_server(ScriptedEngine(script()), tmp_path) as server:
        keys = Keys(given=KEY)
        parts = ServerParts(settings, scheduler=server.scheduler, tools=Toolbox(), peers=server.api.peers, keys=keys)
        async with resource.sign_in(parts):
            (read_again,) = parts.at_sighup
            assert keys.sign_in is not None
            assert await keys.sign_in.key_of(issuer.token())
            read_again()
            settings_of(tmp_path, issuer, "audience = 1\n")
            read_again()
            settings_of(tmp_path, issuer, 'require = { groups = "llm" }')
            read_again()
            await asyncio.sleep(0)
            with pytest.raises(InvalidToken, match="claim groups"):
                await keys.sign_in.key_of(issuer.token())
            assert await keys.sign_in.key_of(issuer.token(groups=["llm"]))
        assert keys.sign_in is None
    assert issuer.fetches == 1
    lines = [line for line in caplog.messages if line.startswith("SIGHUP: the")]
    assert lines[0] == "SIGHUP: the issuers were read again, and have not changed"
    assert lines[1].startswith("SIGHUP: the issuers stay as they were: --sign-in ")
    assert lines[2] == "SIGHUP: the issuers were read again"


WRONG: dict[str, tuple[str, str]] = {
    "no table": ("", "issuers: Field required"),
    "no issuer": ("[issuers]", "issuers: Dictionary should have at least 1 item"),
    "no audience": ('[issuers."https://a.example"]', "audience: Field required"),
    "an empty audience": (
        '[issuers."https://a.example"]\naudience = []',
        "audience: Value should have at least 1 item",
    ),
    "no URL": ('[issuers.a]\naudience = "x"', "issuers.a: it must name a host"),
    "http": ('[issuers."http://a.example"]\naudience = "x"', "it must begin with https://"),
    "a user": ('[issuers."https://u:p@a.example"]\naudience = "x"', "without a user"),
    "http for the keys": (
        '[issuers."https://a.example"]\naudience = "x"\njwks = "http://a.example"',
        "jwks: it must begin",
    ),
    "a symmetric algorithm": (
        '[issuers."https://a.example"]\naudience = "x"\nalgorithms = "HS256"',
        "expected some of RS256",
    ),
    "alg none": ('[issuers."https://a.example"]\naudience = "x"\nalgorithms = ["none"]', "expected some of RS256"),
    "a long skew": ('[issuers."https://a.example"]\naudience = "x"\nskew = "1h"', "skew: Input should be less"),
    "an unknown key": ('[issuers."https://a.example"]\naudience = "x"\naudiences = "x"', "did you mean audience?"),
    "an unknown grant": (
        '[issuers."https://a.example"]\naudience = "x"\nclaims.groups.x.tool = "none"',
        "claims.groups.x.tool: there is no such key",
    ),
    "an unknown tool": (
        '[issuers."https://a.example"]\naudience = "x"\nclaims.groups.x.tools = "telepathy"',
        "claims.groups.x: 'telepathy' is not one of",
    ),
    "a limit of two words": (
        '[issuers."https://a.example"]\naudience = "x"\nclaims.groups.x.limits = "a b"',
        "claims.groups.x: 'a b' is no name",
    ),
    "no TOML": ("issuers = [", "--sign-in"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_file_ends_the_start(tmp_path: Path, name: str) -> None:
    text, problem = WRONG[name]
    file = tmp_path / "sign-in.toml"
    file.write_text(text)
    with pytest.raises(UnusableSignIn) as error:
        resource.check_file(read_settings(["--sign-in", str(file)]))
    assert str(error.value).startswith(f"--sign-in {file}: ")
    assert problem in str(error.value)


def test_missing_file_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnusableSignIn, match="No such file"):
        resource.check_file(read_settings(["--sign-in", str(tmp_path / "none")]))


@pytest.mark.slow
async def test_users_of_a_real_provider_call_both_apis_with_their_tokens(tmp_path: Path) -> None:
    """The token of identity of the code flow signs in; after its user, no password or key is needed."""
    alice = {"sub": "alice", "email": "alice@corp.example", "groups": ["research"]}
    async with running_provider(tmp_path, alice, {"sub": "bob"}) as provider:
        table = f'[issuers."{provider.url}".claims.groups.research]\nlimits = "gold"\n'
        async with signing_in(tmp_path, Issuer(provider.url), table) as server:
            token = await provider.sign_in("alice")
            async with openai_client(server.url, token) as client:
                assert (await client.responses.create(input="Hi")).output_text == "Hello!"
                with pytest.raises(openai.AuthenticationError, match="another audience"):
                    other = await provider.sign_in("alice", client_id="another")
                    await client.with_options(api_key=other).models.list()
            bob = await provider.sign_in("bob")
            async with anthropic.AsyncAnthropic(base_url=server.url, auth_token=bob) as messages:
                hi: Any = [{"role": "user", "content": "Hi"}]
                answer: Any = await messages.messages.create(model="tiny", max_tokens=50, messages=hi)
                assert answer.content[-1].text == "Hello!"
            keys = [server.api.keys.of(owner_of(provider.url, user)) for user in ("alice", "bob")]
    assert [(key.title[:5], key.limits) for key in keys if key] == [
        ("alice", "gold"),
        (owner_of(provider.url, "bob")[:5], ""),
    ]


def authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate of an authority that signs for 127.0.0.1, and its key."""
    key, name = curve_key(number=9), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "corp")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    return builder.sign(key, hashes.SHA256()), key


async def test_private_authority_is_that_of_the_standard_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = authority()
    pem, private = tmp_path / "ca.pem", tmp_path / "key.pem"
    pem.write_bytes(certificate.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, private)
    async with running_issuer(context) as issuer:
        settings = settings_of(tmp_path, issuer)
        with pytest.raises(CannotStart, match="CertificateError"):
            await check(settings)
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        assert await check(settings) == f"{issuer.url} (1 key)"
