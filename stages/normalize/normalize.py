"""Normalize: a request body and what came before it become one Conversation.

The ids and the time of a response are drawn here and nowhere else, so that everything behind this stage gives the same
output for the same input.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from pipeline.errors import InvalidRequest, ModelNotFound, PreviousResponseNotFound, UnsupportedParameter
from pipeline.frames import Conversation, Sampling
from pipeline.protocol import request as bodies
from pipeline.protocol.body import Pace, shortened
from pipeline.protocol.items import Item
from pipeline.protocol.request import CreateResponse, OtherTool
from pipeline.protocol.response import ReasoningOptions, Response
from pipeline.protocol.tools import FunctionTool, Toolset
from stages.normalize.items import check_calls, read_input
from stages.persist.store import ResponseStore

logger = logging.getLogger(__name__)

HOSTED_TOOLS = frozenset({"file_search", "code_interpreter", "image_generation"})
"""Tools that OpenAI runs; beside them web_search and computer in all their versions."""

INCLUDABLE = frozenset(
    {
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
        "message.output_text.logprobs",
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

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[Conversation, None]:
        """One conversation per request; raises `InvalidRequest` for what this server cannot do."""
        async for request in source:
            refuse_unsupported(request)
            model = self.models[0] if request.model is None else request.model
            if model not in self.models:
                served = ", ".join(map(repr, self.models))
                raise ModelNotFound(f"This server serves {served}, not {shortened(model)!r}.", param="model")
            pace = Pace()
            tools = await _tools(request, pace)
            choice: Any = request.tool_choice or "auto"
            history = await self._history(request.previous_response_id)
            suffix, now = self.draw(), self.clock()
            items = await read_input(request.input, suffix, pace)
            if not items and not history:
                raise InvalidRequest("A request without previous_response_id needs an input.", param="input")
            await check_calls(history, items, pace)
            yield Conversation(
                response=_response(request, tools, f"resp_{suffix}", int(now), model),
                history=history,
                input=items,
                sampling=_sampling(request),
                date=datetime.fromtimestamp(now, UTC).date().isoformat(),
                tools=Toolset(tuple(msgspec.convert(tool, FunctionTool) for tool in tools), choice),
            )

    async def _history(self, previous: str | None) -> tuple[Item, ...]:
        if previous is None:
            return ()
        chain = await self.store.chain(previous)
        if not chain:
            raise PreviousResponseNotFound(shortened(previous))
        return tuple(item for stored in chain for item in (*stored.input, *stored.response.output))


def refuse_unsupported(request: CreateResponse) -> None:
    """Raise `UnsupportedParameter` for the first parameter that asks for what this server does not do."""
    wants_format = request.text is not None and request.text.format is not None and request.text.format.type != "text"
    unsupported = {
        "background": request.background,
        "conversation": request.conversation is not None,
        "prompt": request.prompt is not None,
        "context_management": request.context_management,
        "truncation": request.truncation == "auto",
        "top_logprobs": request.top_logprobs,
        "tool_choice": request.tool_choice not in (None, "auto", "none"),
        "text.format": wants_format,
    }
    for param, asked in unsupported.items():
        if asked:
            raise UnsupportedParameter(f"This server does not support this value of {param}.", param=param)
    for position, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"{shortened(name)!r} is nothing that can be included.", param=f"include[{position}]")


def _sampling(request: CreateResponse) -> Sampling:
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        max_tokens=request.max_output_tokens,
    )


def _response(
    request: CreateResponse, tools: tuple[dict[str, Any], ...], response_id: str, created_at: int, model: str
) -> Response:
    sampling = _sampling(request)
    reasoning = request.reasoning
    return Response(
        id=response_id,
        created_at=created_at,
        status="in_progress",
        model=model,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        tools=tools,
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=_text(request),
        top_p=sampling.top_p,
        temperature=sampling.temperature,
        reasoning=ReasoningOptions(reasoning.effort, reasoning.summary) if reasoning else ReasoningOptions(None, None),
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        store=request.store is not False,
        metadata=request.metadata or {},
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
    )


def _text(request: CreateResponse) -> dict[str, Any]:
    text: dict[str, Any] = {"format": {"type": "text"}}
    if request.text and request.text.verbosity:
        text["verbosity"] = request.text.verbosity
    return text


async def _tools(request: CreateResponse, pace: Pace) -> tuple[dict[str, Any], ...]:
    functions: dict[str, dict[str, Any]] = {}
    hosted: dict[str, None] = {}
    for position, tool in enumerate(request.tools or ()):
        await pace()
        match tool:
            case bodies.FunctionTool(name=name) if name in functions:
                raise InvalidRequest(f"There are two functions named {name!r}.", param=f"tools[{position}].name")
            case bodies.FunctionTool(name=name):
                functions[name] = dict(tool)
            case OtherTool(type=kind) if kind in HOSTED_TOOLS or kind.startswith(("web_search", "computer")):
                hosted[kind] = None
            case OtherTool(type=kind):
                raise UnsupportedParameter(
                    f"This server does not support tools of type {shortened(kind)!r}.", param=f"tools[{position}].type"
                )
    if hosted:
        kinds = shortened(", ".join(hosted))
        logger.info("Ignored the hosted tools %s: this server has no means to run them", kinds)
    return tuple(functions.values())
