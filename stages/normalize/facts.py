"""The facts of a request, made of its parameters and of what was read of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from penstock.pipeline.frames import TO_ANSWER, Compacting, Origin, Purpose, RequestFacts, Sampling, Scheduling, echo_of
from penstock.pipeline.protocol.params.request import LOGPROBS, CreateResponse, ReasoningOptionsParam
from penstock.pipeline.protocol.response import ConversationReference, ReasoningOptions, Response
from penstock.pipeline.protocol.tools import ContainerUse
from penstock.pipeline.secret import plain_json
from penstock.stages.normalize.frames import ReadRequest, RecalledRequest
from penstock.stages.normalize.parameters import template_of
from penstock.stages.normalize.tool_types import choice_without_secrets
from penstock.stages.normalize.toolset import ToolsetBuilder

SESSION_CHARACTERS = 256
"""The most characters of the id of a session; a longer one becomes a digest."""

_PLAIN_TEXT: dict[str, Any] = {"format": {"type": "text"}}

DEFAULT_THRESHOLD_TOKENS = 200_000
"""The ``compact_threshold`` of a request that gives none; a model with a shorter context compacts before it is full."""


def facts_of(
    read: ReadRequest, scheduling: Scheduling, containers: Mapping[str, ContainerUse], results: Mapping[str, str]
) -> RequestFacts:
    """Return the facts of a request; ``results`` are those of calls and compactions that came with it."""
    recalled, request, offered = read.recalled, read.recalled.request, read.offered
    sampling = _sampling(request, recalled.traits.sampling)
    return RequestFacts(
        response=_response(read, sampling),
        input=read.items,
        sampling=sampling,
        date=datetime.fromtimestamp(recalled.now, UTC).date().isoformat(),
        tools=read.toolset,
        scheduling=scheduling,
        origin=_origin(recalled),
        wants_raw_messages=request.enable_response_messages is True,
        wants_token_ids=request.return_token_ids is True,
        wants_weight_versions=request.return_weight_versions is True,
        include=tuple(request.include or ()),
        template=template_of(request),
        options=_options(offered, containers),
        purpose=_purpose(recalled),
        structured=request.structured_outputs.constraint if request.structured_outputs else {},
        hides_reasoning=request.include_reasoning is False,
        updates=read.updates,
        raw=request.raw_prompt,
        results=results,
    )


def _options(offered: ToolsetBuilder, containers: Mapping[str, ContainerUse]) -> dict[str, Mapping[str, Any]]:
    """Return the options of built-in tools, with the containers in place of the wishes for them."""
    given = {name: options.in_json for name, options in offered.options.items() if name not in offered.wishes}
    found = {name: plain_json(use) for name, use in containers.items()}
    return {name: options for name, options in {**given, **found}.items() if options}


def _origin(recalled: RecalledRequest) -> Origin:
    envelope, past = recalled.request.envelope, recalled.past
    return Origin(
        envelope.owner,
        position=past.end,
        recorded=envelope.is_recorded,
        request_id=envelope.request_id,
        opening=past.opening,
        model="" if recalled.served == recalled.model else recalled.served,
        key_name=envelope.key_name,
        team=envelope.team,
        api=envelope.api,
        line=envelope.line,
        session=_session(recalled.request),
    )


def _session(request: CreateResponse) -> str:
    return recorded_session(request.session_id or request.envelope.session or request.envelope.agent_session)


def recorded_session(session: str) -> str:
    """Return the id of a session, or a digest of one that is long, or has characters not to be shown."""
    if len(session) <= SESSION_CHARACTERS and session.isprintable():
        return session
    return blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _purpose(recalled: RecalledRequest) -> Purpose:
    """Return the purpose of the first turn; the common one is omitted in recordings, as the default."""
    compacting, generates = _compacting(recalled), recalled.request.envelope.generates
    return TO_ANSWER if compacting is None and generates else Purpose(compacting, generates)


def _compacting(recalled: RecalledRequest) -> Compacting | None:
    """Return the compaction that a request asks for, at once or from a number of tokens on."""
    if recalled.compacts_at_once:
        return Compacting(at_once=True)
    if not (management := recalled.request.context_management):
        return None
    threshold = management[0].compact_threshold
    return Compacting(threshold=DEFAULT_THRESHOLD_TOKENS if threshold is None else threshold)


def _sampling(request: CreateResponse, recommended: Mapping[str, float]) -> Sampling:
    def number(name: str, default: float) -> float:
        value: float | None = getattr(request, name)
        return recommended.get(name, default) if value is None else value

    stop = request.stop or ()
    limits = [limit for limit in (request.max_output_tokens, recommended.get("max_tokens")) if limit is not None]
    wants_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    logprobs = (request.top_logprobs or 0) if wants_logprobs else None
    echoes = request.raw_prompt is not None and request.raw_prompt.echoes
    return Sampling(
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        max_tokens=int(min(limits)) if limits else None,
        top_k=max(0, int(number("top_k", 0))),  # in vLLM, -1 is an older form of 0
        min_p=number("min_p", 0.0),
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        seed=request.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
        stop_token_ids=tuple(request.stop_token_ids) if request.stop_token_ids else UNSET,
        min_tokens=request.min_tokens or UNSET,
        bad_words=tuple(request.bad_words) if request.bad_words else UNSET,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()} if request.logit_bias else UNSET,
        allowed_token_ids=UNSET if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        watermarking=UNSET if request.watermarking is None else request.watermarking,
        extra_args=request.vllm_xargs or UNSET,
        thinking_token_budget=UNSET if request.thinking_token_budget in (None, -1) else request.thinking_token_budget,
        ignore_eos=request.ignore_eos or UNSET,
        prompt_logprobs=logprobs if echoes and logprobs is not None else UNSET,
        logprob_token_ids=tuple(request.logprob_token_ids) if request.logprob_token_ids else UNSET,
    )


def _response(read: ReadRequest, sampling: Sampling) -> Response:
    recalled, request, echoed = read.recalled, read.recalled.request, read.recalled.filled.echo
    messages = None if request.enable_response_messages else UNSET
    shown: dict[str, Any] = {**echo_of(asdict(sampling)), "max_output_tokens": request.max_output_tokens}
    return Response(
        id=f"resp_{recalled.suffix}",
        created_at=int(recalled.now),
        status="queued" if request.background else "in_progress",
        model=recalled.model,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        tools=tuple(read.offered.echo),
        left_out_tools=tuple(read.offered.ignored) or UNSET,
        tool_choice=_tool_choice(request),
        truncation=request.truncation or "disabled",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=_text(request),
        reasoning=_reasoning(request),
        **shown,
        max_tool_calls=request.max_tool_calls,
        store=request.store is not False,
        background=request.background is True,
        conversation=UNSET if request.conversation_id is None else ConversationReference(request.conversation_id),
        service_tier="default",  # the tier that was used: there is no other
        metadata=request.metadata or {},
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention or UNSET,
        user=UNSET if request.user is None else request.user,
        prompt=UNSET if echoed is None else echoed,
        input_messages=messages,
        output_messages=messages,
    )


def _tool_choice(request: CreateResponse) -> str | dict[str, Any]:
    choice = request.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice_without_secrets(choice.sent)


def _text(request: CreateResponse) -> dict[str, Any]:
    options = request.text.sent if request.text else {}
    given = {key: value for key, value in options.items() if value is not None}
    return _PLAIN_TEXT | given if given else _PLAIN_TEXT


def _reasoning(request: CreateResponse) -> ReasoningOptions:
    options = request.reasoning or ReasoningOptionsParam()
    return ReasoningOptions(options.effort, options.summary or options.generate_summary, options.context or UNSET)
