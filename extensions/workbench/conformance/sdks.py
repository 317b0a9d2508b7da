"""Checks with the SDKs of OpenAI and Anthropic, which are no part of penstock: without them they are skipped."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from penstock.extensions.workbench.conformance.check import Doubt, Lacking, Limited, Speech, Violation, check, must
from penstock.extensions.workbench.conformance.client import ADVICE, Talk

PACKAGES: dict[Speech, str] = {
    "responses": "openai",
    "chat": "openai",
    "messages": "anthropic",
    "decisions": "openai",
}
FINAL: dict[Speech, str] = {
    "responses": "get_final_response",
    "chat": "get_final_completion",
    "messages": "get_final_message",
}
"""The method of a stream that returns the whole answer."""
SOURCE = "the types of openai-python and anthropic-python"


@asynccontextmanager
async def _client(talk: Talk) -> AsyncGenerator[Any, None]:
    """Yield the client of an SDK, and raise `Violation`, or `Limited`, for an error that it raises in the block."""
    name = PACKAGES[talk.speech]
    try:
        sdk = import_module(name)
    except ImportError:
        raise Lacking(f"the package {name} is not installed") from None
    base = talk.server.base.removesuffix("/v1") if name == "anthropic" else talk.server.base
    kind = sdk.AsyncAnthropic if name == "anthropic" else sdk.AsyncOpenAI
    try:
        async with kind(
            base_url=base, api_key=talk.server.key or "none", max_retries=0, timeout=talk.server.timeout
        ) as client:
            yield client
    except Lacking:
        raise
    except Exception as error:  # of the helpers, too, which assert what they rely on
        if getattr(error, "status_code", None) == HTTPStatus.TOO_MANY_REQUESTS:
            raise Limited(ADVICE) from error
        raise Violation(f"{name} raises {type(error).__name__}: {error}") from error


def _route(talk: Talk, client: Any) -> Any:
    if not hasattr(client, talk.speech):
        raise Lacking(f"this release of {PACKAGES[talk.speech]} has no {talk.speech}")
    return client.chat.completions if talk.speech == "chat" else getattr(client, talk.speech)


@check("responses", "chat", "messages", "decisions", area="sdk", source=SOURCE)
async def sdk_answer(talk: Talk) -> None:
    """The SDK reads an answer, which is of its types."""
    async with _client(talk) as client:
        found = await _route(talk, client).create(**talk.body(temperature=None))
    try:
        type(found).model_validate(found.to_dict(warnings=False))
    except ValidationError as error:
        first = error.errors()[0]
        raise Doubt(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@check("responses", "chat", "messages", area="sdk", source=SOURCE)
async def sdk_stream(talk: Talk) -> None:
    """The SDK's helper of streams reads a stream to its end."""
    async with _client(talk) as client:
        route = _route(talk, client)
        async with route.stream(**talk.body(temperature=None)) as stream:
            kinds = [event.type async for event in stream]
            final = await getattr(stream, FINAL[talk.speech])()
    must(kinds, "there are no events")
    must(final.id, "the answer has no id")
