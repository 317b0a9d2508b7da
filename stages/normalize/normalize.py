"""Normalize: a request body and what came before it become one Conversation.

The ids and the time of a response are drawn here and nowhere else, so that everything behind this stage gives the same
output for the same input.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote

from msgspec import UNSET

from pipeline.errors import InvalidRequest, ModelNotFound, PreviousResponseNotFound, UnsupportedParameter
from pipeline.frames import Conversation, Sampling, Scheduling
from pipeline.logs import current_response
from pipeline.protocol.body import Pace, shortened
from pipeline.protocol.items import Item
from pipeline.protocol.request import CreateResponse
from pipeline.protocol.response import ReasoningOptions, Response
from stages.normalize.items import check_calls, read_input
from stages.normalize.raw import RawMessages
from stages.normalize.tools import Offer, read_tools
from stages.persist.store import ResponseStore

Number = TypeVar("Number", int, float)

LOGPROBS = "message.output_text.logprobs"

INCLUDABLE = frozenset(
    {
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
        LOGPROBS,
    }
)


def draw_suffix() -> str:
    """The random part of a new response's id."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Normalize:
    """Understand a request for one of ``models``; ``draw`` and ``clock`` are where ids and time come from."""

    store: ResponseStore
    models: tuple[str, ...]
    """The names that a request may give; the first is what it gets if it names none."""
    draw: Callable[[], str] = draw_suffix
    clock: Callable[[], float] = time.time
    salt_caches: bool = False
    """Whether ``prompt_cache_key`` keeps prefix caches apart where no ``cache_salt`` does."""

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[Conversation, None]:
        """One conversation per request; raises `InvalidRequest` for what this server cannot do."""
        async for request in source:
            yield await self._conversation(request)

    async def _conversation(self, request: CreateResponse) -> Conversation:
        refuse_unsupported(request)
        model, pace = self._model(request), Pace()
        offer = await read_tools(request.tools or (), pace)
        history = await self._history(request.previous_response_id)
        await offer.inherit(history, pace)
        suffix, now = self.draw(), self.clock()
        current_response.set(f"resp_{suffix}")
        items = await read_input(request.input, suffix, history, self.store, offer, pace)
        raw = RawMessages(suffix, request.instructions, offer.tools)
        before = await raw.read(request.previous_input_messages or (), items, pace)
        if not items and not before and not history:
            raise InvalidRequest("A request without previous_response_id needs an input.", param="input")
        await check_calls((*history, *before), items, pace)
        tools, sampling = await offer.toolset(request, pace), _sampling(request)
        return Conversation(
            response=_response(request, offer, sampling, f"resp_{suffix}", int(now), model),
            history=history,
            input=(*before, *items),
            sampling=sampling,
            date=datetime.fromtimestamp(now, UTC).date().isoformat(),
            tools=tools,
            scheduling=self._scheduling(request),
            raw_messages=request.enable_response_messages is True,
        )

    def _model(self, request: CreateResponse) -> str:
        model = self.models[0] if request.model is None else request.model
        if model not in self.models:
            served = ", ".join(map(repr, self.models))
            raise ModelNotFound(f"This server serves {served}, not {shortened(model)!r}.", param="model")
        return model

    async def _history(self, previous: str | None) -> tuple[Item, ...]:
        if previous is None:
            return ()
        chain = await self.store.chain(previous)
        if not chain:
            raise PreviousResponseNotFound(shortened(previous))
        return tuple(item for stored in chain for item in stored.items)

    def _scheduling(self, request: CreateResponse) -> Scheduling:
        salt = request.cache_salt
        if salt is None and self.salt_caches and request.prompt_cache_key:
            salt = quote(request.prompt_cache_key, safe="")  # vLLM takes no slash and the like in a salt
        return Scheduling(salt, request.priority or 0, request.trace_headers)


def refuse_unsupported(request: CreateResponse) -> None:
    """Raise `UnsupportedParameter` for the first parameter that asks for what this server does not do."""
    unsupported = {
        "background": request.background,
        "conversation": request.conversation is not None,
        "prompt": request.prompt is not None,
        "context_management": request.context_management,
        "moderation": request.moderation is not None,
        "access_programs": request.access_programs is not None,
        "image": request.image is not None,
        "prompt_cache_options.prewarm": request.prompt_cache_options and request.prompt_cache_options.prewarm,
        "reasoning.mode": request.reasoning and request.reasoning.mode not in (None, "standard"),
    }
    for param, asked in unsupported.items():
        if asked:
            raise UnsupportedParameter(f"This server does not support this value of {param}.", param=param)
    for position, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"{shortened(name)!r} is nothing that can be included.", param=f"include[{position}]")
    if request.previous_input_messages is not None and request.previous_response_id is not None:
        raise InvalidRequest(
            "previous_input_messages and previous_response_id exclude each other.", param="previous_input_messages"
        )


def _sampling(request: CreateResponse) -> Sampling:
    stop = request.stop or ()
    asks_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    return Sampling(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        max_tokens=request.max_output_tokens,
        top_k=max(0, _or(request.top_k, 0)),  # vLLM's older way to say 0 is -1
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=request.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=_or(request.top_logprobs, 0) if asks_logprobs else None,
    )


def _or(said: Number | None, default: Number) -> Number:
    return default if said is None else said


def _response(
    request: CreateResponse, offer: Offer, sampling: Sampling, response_id: str, created_at: int, model: str
) -> Response:
    tier = request.service_tier
    return Response(
        id=response_id,
        created_at=created_at,
        status="in_progress",
        model=model,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        tools=tuple(offer.echo),
        tool_choice=_tool_choice(request),
        truncation=request.truncation or "disabled",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=_text(request),
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        top_logprobs=request.top_logprobs or 0,
        temperature=sampling.temperature,
        reasoning=_reasoning(request),
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        store=request.store is not False,
        service_tier="default" if tier in (None, "auto") else tier,
        metadata=request.metadata or {},
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        user=UNSET if request.user is None else request.user,
    )


def _tool_choice(request: CreateResponse) -> str | dict[str, Any]:
    choice = request.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.given


def _text(request: CreateResponse) -> dict[str, Any]:
    said = request.text.given if request.text else {}
    return {"format": {"type": "text"}} | {key: value for key, value in said.items() if value is not None}


def _reasoning(request: CreateResponse) -> ReasoningOptions:
    said = request.reasoning
    return (
        ReasoningOptions(said.effort, said.summary or said.generate_summary) if said else ReasoningOptions(None, None)
    )
