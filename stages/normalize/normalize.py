"""Normalize: turn a request body and the history that it continues into one ResolvedRequest.

The ids and the time of a response are chosen here and nowhere else, so that all later stages give the same output for
the same input.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from msgspec import UNSET
from msgspec.structs import asdict

from penstock.pipeline import errors
from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.frames import (
    NO_TEMPLATE_OPTIONS,
    Compacting,
    Origin,
    RequestFacts,
    ResolvedRequest,
    Sampling,
    Scheduling,
    TemplateOptions,
    echo_of,
)
from penstock.pipeline.lifecycle.item_lifecycles import LIFECYCLES
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.items import (
    Compaction,
    ConfigurationUpdate,
    FileReading,
    Item,
    McpApprovalResponse,
    McpCall,
    of_type,
)
from penstock.pipeline.protocol.light import are_light
from penstock.pipeline.protocol.params.items import CompactionTriggerItem, MessageItem
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import (
    LOGPROBS,
    OUTPUTS,
    RESULTS,
    SOURCES,
    WEB_RESULTS,
    CreateResponse,
    ReasoningOptionsParam,
)
from penstock.pipeline.protocol.response import ConversationReference, ReasoningOptions, Response
from penstock.pipeline.protocol.superseded import unsuperseded
from penstock.pipeline.protocol.tools import HOSTED, NO_FILE_SEARCH, NO_OPTIONS, ContainerUse, Toolset
from penstock.pipeline.tasks import MANY, apart, in_thread
from penstock.services.containers import Containers
from penstock.services.file_reading import Files, PlacedFile, open_files
from penstock.services.model_names import resolved_name
from penstock.services.prompts import Applied, Prompts, applied, blamed
from penstock.services.sealing import SealedSummary, Sealer, Unverified
from penstock.services.store.store import Store
from penstock.services.tools import ADVICE, FULL_ACCESS, ToolAccess
from penstock.stages.normalize.containers import ContainerFinder, earlier_containers
from penstock.stages.normalize.input_items import (
    SURPLUS,
    InputReader,
    files_of,
    new_items,
    references,
    said_now,
    unseen_in,
)
from penstock.stages.normalize.pairing import check_answered, check_pairs
from penstock.stages.normalize.previous_messages import MessageReader
from penstock.stages.normalize.sealed_thoughts import ThoughtOpener
from penstock.stages.normalize.tool_types import choice_without_secrets
from penstock.stages.normalize.toolset import ToolsetBuilder

DEFAULT_THRESHOLD = 200_000
"""The ``compact_threshold`` of a request that gives none; a model with a shorter context compacts before it is full."""

INCLUDABLE = frozenset(
    {
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "reasoning.encrypted_content",
        LOGPROBS,
        OUTPUTS,
        RESULTS,
        SOURCES,
        WEB_RESULTS,
    }
)

CONTINUING = ("previous_response_id", "conversation", "previous_input_messages")
"""The parameters that name the history that a request continues; a request may have one of them."""

_RUN_HERE = frozenset(kind for kind, lifecycle in LIFECYCLES.items() if lifecycle.hides_result)
"""The items of calls that this server may have run."""

CONTINUABLE = frozenset({"completed", "incomplete"})
"""The statuses of responses that can be continued; all others have not ended, or have failed or been cancelled."""


def draw_suffix() -> str:
    """Return the random part of a new response's id."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class ModelTraits:
    """Facts about the model that decide how its requests are read."""

    sees_images: bool = False
    has_template: bool = False
    """True if the model has a chat template, and so does not speak Harmony."""
    takes_prompts: bool = True
    """False if prompts are laid out elsewhere, so that no client can lay out one."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """vLLM's sampling defaults for the model, such as ``temperature``, for parameters that a request leaves out.

    They come from its generation config, or from the operator.  ``max_tokens`` also bounds the requests' own.
    """


@dataclass(frozen=True)
class CacheSharing:
    """The requests that share the engine's prefix cache; a ``cache_salt`` divides it further."""

    among_keys: bool = False
    """True if clients with different API keys share it."""
    by_prompt_cache_key: bool = False
    """True if only requests with the same ``prompt_cache_key`` share it, unless they have a ``cache_salt``."""


@dataclass(frozen=True)
class _Read:
    """The parts of a request and its history, as they were read."""

    items: tuple[Item, ...]
    """The items of the input that are not in the history."""
    history: tuple[Item, ...]
    toolset: Toolset
    offered: ToolsetBuilder
    raw: MessageReader
    sampling: Sampling
    granted: Collection[str]
    """The ids of the approvals in the input whose calls are not in it: they may have been used by another response."""
    run_here: Sequence[str]
    """The ids of the calls in the input that this server may have run."""
    latest: Compaction | None
    """The latest compaction."""
    files: tuple[Sequence[PlacedFile], Sequence[PlacedFile]]
    """The files that the model reads, and those that are too many."""
    said: tuple[str, ...]
    """The ids of the messages that the client sends now."""
    unseen: Mapping[str, str]
    """The URLs of images that cannot be shown, each with the reason."""
    updates: Mapping[str, Any]
    """The ``effort`` and the ``format`` that items have set."""
    containers: Sequence[str]
    """The containers of earlier calls, the latest first."""


async def _accept(_: ResolvedRequest) -> None:
    """Accept any request."""


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Turn a request for one of ``models`` into a conversation.

    ``draw`` returns the random part of a response's id, and ``clock`` the time in seconds since 1970.
    """

    store: Store
    models: tuple[str, ...]
    """The model names that a request may give; the first is the default."""
    hosted: frozenset[str] = frozenset()
    """The namespaces of the built-in tools that this server can run."""
    labels: frozenset[str] = frozenset()
    """The labels of the operator's MCP servers."""
    traits: ModelTraits = ModelTraits()
    caches: CacheSharing = CacheSharing()
    access: ToolAccess = FULL_ACCESS
    left_out: frozenset[str] = frozenset()
    """The types of tools that are left out of requests (see `LEAVABLE`)."""
    own: frozenset[str] = frozenset()
    """The labels of hosts of the operator's own; they are among the ``labels``."""
    of_unknown: str = ADVICE
    """The end of the error about a label that is not among the ``labels``."""
    sealer: Sealer | None = None
    """Opens what clients carry; None if nothing is sealed here."""
    files: Files = field(default_factory=open_files)
    containers: Containers | None = None
    """The containers of this server; None if it runs no code."""
    prompts: Prompts = field(default_factory=Prompts)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Patterns of other names that a request may give, each with one of the ``models``."""
    check: Callable[[ResolvedRequest], Awaitable[None]] = _accept
    """Raises `InvalidRequest` for what the hosts of tools cannot do."""
    draw: Callable[[], str] = draw_suffix
    clock: Callable[[], float] = time.time

    async def __call__(self, source: AsyncIterator[CreateResponse]) -> AsyncGenerator[ResolvedRequest, None]:
        """Yield one resolved request per request.

        Raises `InvalidRequest` for a request that is invalid, that this server does not support, or that names an
        unknown model, response or conversation; raises `StoreFailed` if the history cannot be read.
        """
        async for request in source:
            whole = applied(self.prompts, request)
            del request
            try:
                resolved = [await self._resolve(whole)]
            except InvalidRequest as error:
                raise blamed(error, whole) from error.__cause__
            del whole  # free it: it may be long, and the response may take long
            yield resolved.pop()

    async def _resolve(self, whole: Applied) -> ResolvedRequest:
        refuse_unsupported(request := whole.request)
        self._refuse_foreign(request)
        (model, served), envelope = self._model(request), request.envelope
        past, given = await self._past(request), request.input_items
        ids = await apart(len(given) > MANY, references, given, "input")
        referenced = await self.store.items(ids, envelope.owner) if ids else {}
        suffix, now = self.draw(), self.clock()
        current_response.set(response_id := f"resp_{suffix}")
        thoughts = ThoughtOpener(self.sealer, envelope.owner, envelope.forgives)
        read = await apart(not _is_light(request, past), self._read, request, past, referenced, suffix, thoughts)
        await self._refuse_used_approvals(request, read.granted)
        files = await self._readings(*read.files, request)
        containers = await self._containers(request, read, suffix)
        summary = await self._summary(request, read.latest, past.results)
        facts = RequestFacts(
            response=_response(whole, read.offered, read.sampling, response_id, int(now), model),
            input=read.items,
            sampling=read.sampling,
            date=datetime.fromtimestamp(now, UTC).date().isoformat(),
            tools=read.toolset,
            scheduling=self._scheduling(request),
            origin=Origin(
                envelope.owner,
                position=past.end,
                recorded=envelope.is_recorded,
                request_id=envelope.request_id,
                opening=past.opening,
                model="" if served == model else served,
                key_name=envelope.key_name,
            ),
            wants_raw_messages=request.enable_response_messages is True,
            include=tuple(request.include or ()),
            template=_template(request),
            hosted=tuple(read.offered.settings.values()),
            web=read.offered.web or NO_OPTIONS,
            containers=containers,
            file_search=read.offered.file_search or NO_FILE_SEARCH,
            compacting=_compacting(request),
            generates=envelope.generates,
            structured=request.structured_outputs.constraint if request.structured_outputs else {},
            hides_reasoning=request.include_reasoning is False,
            updates=read.updates,
            raw=request.raw_prompt,
            results={**read.raw.results, **summary},
        )
        results = {**thoughts.results, **past.results, **await self._results(read.run_here, request), **facts.results}
        tokens = {**past.tokens, **thoughts.tokens, **read.raw.tokens}
        resolved = ResolvedRequest(
            facts, history=read.history, tokens=tokens, results=results, files=files, said=read.said, unseen=read.unseen
        )
        await self.check(resolved)
        return resolved

    async def _containers(self, request: CreateResponse, read: _Read, suffix: str) -> Mapping[str, ContainerUse]:
        """Return the containers of the built-in tools that run in one, by namespace."""
        if self.containers is None:
            for wish in read.offered.containers.values():
                wish.refuse()
        if self.containers is None or not read.offered.containers:
            return {}
        envelope = request.envelope
        finder = ContainerFinder(self.containers, self.store, envelope.owner, envelope.moves)
        return await finder.uses(read.offered.containers, read.containers, f"cntr_{suffix}")

    async def _readings(
        self, files: Sequence[PlacedFile], surplus: Sequence[PlacedFile], request: CreateResponse
    ) -> Mapping[str, tuple[FileReading, ...]]:
        """Return what the model reads of the files, by the ids of their items."""
        readings: dict[str, tuple[FileReading, ...]] = {}
        if not files:
            return readings
        owner = request.envelope.owner
        read = await self.files.read_all(files, owner, self.store, sees_images=self.traits.sees_images)
        for file, reading in zip((*files, *surplus), (*read, *[SURPLUS] * len(surplus)), strict=True):
            readings[file.item_id] = (*readings.get(file.item_id, ()), reading)
        return readings

    async def _refuse_used_approvals(self, request: CreateResponse, granted: Collection[str]) -> None:
        """Raise `InvalidRequest` for an approval whose call another response has made: a client may send it twice."""
        used = await self.store.approvals.used(request.envelope.owner, granted) if granted else {}
        for place, item in enumerate(request.input_items if used else ()):
            approval_id = str(getattr(item, "approval_request_id", ""))
            if approval_id in used:
                message = (
                    f"The approval of {shortened(approval_id)!r} was used already, by the response {used[approval_id]}."
                )
                raise InvalidRequest(message, param=f"input[{place}].approval_request_id")

    def usable(self, owner: str) -> frozenset[str]:
        """Return the namespaces of the built-in tools that an owner may use."""
        return self.hosted - self._denied(owner)

    def _denied(self, owner: str) -> frozenset[str]:
        may_use = self.access.of(owner)
        return frozenset[str]() if may_use is None else frozenset(HOSTED.keys() | self.own) - may_use

    def _read(
        self,
        request: CreateResponse,
        past: History,
        referenced: Mapping[str, Item],
        suffix: str,
        thoughts: ThoughtOpener,
    ) -> _Read:
        """Read all that a request may have thousands of: this runs in a thread."""
        history = thoughts.stored(past.items, past.tokens)
        denied = self._denied(request.envelope.owner)
        # the operator's server in place of a built-in tool is this tool under any other name, too
        builder = ToolsetBuilder(
            hosted=self.hosted - denied,
            labels=self.labels - denied,
            left_out=self.left_out,
            denied=self.hosted & denied,
            of_denied=self.access.of_denied(request.envelope.owner),
            own=self.own,
            sees_images=self.traits.sees_images,
            of_unknown=self.of_unknown,
            takes_agents=request.envelope.body is not None,
        )
        builder.add_all(request.tools or ())
        builder.inherit(history)
        given = request.input_items[:-1] if _ends_with_trigger(request) else request.input_items
        reader = InputReader(
            "input", suffix=suffix, referenced=referenced, toolset=builder, sees_images=self.traits.sees_images
        )
        sent = thoughts.sent(reader.read(given, history), "input", referenced)
        said = said_now(given, sent, "input")
        messages = MessageReader(suffix, request.instructions, builder.tools)
        before = messages.read(request.previous_input_messages or (), sent)
        is_conversation = request.envelope.generates and request.raw_prompt is None
        if is_conversation and not sent and not before and not history:
            raise InvalidRequest(
                "A request that continues nothing needs an input.", param="input", code="missing_required_parameter"
            )
        check_pairs((*history, *before), sent, "input")
        new = new_items(history, sent)
        check_answered((*history, *new))
        items = (*before, *new)
        read = unsuperseded(history, items)
        return _Read(
            items,
            history=history,
            toolset=builder.toolset(request),
            offered=builder,
            raw=messages,
            sampling=_sampling(request, self.traits.sampling),
            granted=_granted(items),
            run_here=[item.id for item in items if type(item) in _RUN_HERE],
            files=files_of(read, said),
            said=tuple(said),
            unseen=unseen_in(read, said) if self.traits.sees_images else {},
            updates=_updates(request, (*history, *items)),
            containers=earlier_containers((*history, *items)) if builder.containers else (),
            latest=next((item for item in reversed((*history, *items)) if type(item) is Compaction), None),
        )

    async def _summary(
        self, request: CreateResponse, latest: Compaction | None, known: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Return the summary of the latest compaction by its id, unless it is known.

        It supersedes all compactions before it, and a short text may hold a long summary: those are not opened.
        """
        if latest is None or latest.id in known:
            return {}
        return {latest.id: await in_thread(self._opened, latest, request)}

    def _opened(self, compaction: Compaction, request: CreateResponse) -> str:
        """Open a compaction.  Raises `InvalidEncryptedContent` if it is changed, or another maker's or owner's."""
        text = compaction.encrypted_content
        try:
            opened = self.sealer and self.sealer.open(text, request.envelope.owner, SealedSummary)
        except Unverified:
            opened = None
        if not opened:
            given = [getattr(item, "encrypted_content", None) for item in request.input_items]
            place = f"input[{given.index(text)}]" if text in given else shortened(compaction.id)
            raise errors.InvalidEncryptedContent(place)
        return opened.text

    def _refuse_foreign(self, request: CreateResponse) -> None:
        """Raise `UnsupportedParameter` for a parameter that only another kind of model has."""
        if request.raw_prompt is not None and not self.traits.takes_prompts:
            raise UnsupportedParameter(
                "This server continues no prompts: its engine takes conversations.", param="prompt"
            )
        if self.traits.has_template and request.previous_input_messages is not None:
            message = "Only models that speak Harmony read previous_input_messages."
            raise UnsupportedParameter(message, param="previous_input_messages")
        if not self.traits.has_template and (template := _template(request)) != NO_TEMPLATE_OPTIONS:
            param = "chat_template" if template.source is not None else "chat_template_kwargs"
            raise UnsupportedParameter("This model speaks Harmony and has no chat template.", param=param)

    def _model(self, request: CreateResponse) -> tuple[str, str]:
        """Return the model's name in the response, and the one that the engine serves."""
        model = self.models[0] if request.model is None else request.model
        return model, resolved_name(model, self.models, self.aliases)

    async def _past(self, request: CreateResponse) -> History:
        """Return the history that the request continues, empty if it continues nothing."""
        if (conversation_id := request.conversation_id) is not None:
            conversation = await self.store.conversations.items(conversation_id, request.envelope.owner)
            if conversation is None:
                keeps = self.store.keeps
                raise errors.no_conversation(shortened(conversation_id), param="conversation", keeps=keeps)
            return conversation
        if (previous := request.previous_response_id) is not None:
            return request.envelope.continued or await self._continued(previous, request.envelope.owner)
        return History((), {})

    async def _continued(self, previous: str, owner: str) -> History:
        chain = await self.store.chain(previous, owner)
        if not chain:
            raise errors.PreviousResponseNotFound(shortened(previous), keeps=self.store.keeps)
        if (status := chain[-1].response.status) not in CONTINUABLE:
            raise errors.PreviousResponseUnfinished(previous, status)
        return await self.store.history(chain)

    async def _results(self, item_ids: Sequence[str], request: CreateResponse) -> Mapping[str, str]:
        """Return the stored results of calls in the input that this server may have run, by item id.

        If the store fails, a request with ``store: false`` goes on without them, because its items also hold some of
        the results.
        """
        try:
            return await self.store.results(item_ids, request.envelope.owner) if item_ids else {}
        except errors.StoreFailed:
            if request.store is not False:
                raise
            return {}

    def _scheduling(self, request: CreateResponse) -> Scheduling:
        salt, envelope = request.cache_salt, request.envelope
        if salt is None and self.caches.by_prompt_cache_key and request.prompt_cache_key:
            salt = quote(request.prompt_cache_key, safe="")  # vLLM rejects slashes and the like in a salt
        if (owner := envelope.owner) and not self.caches.among_keys:
            # else `cached_tokens` and the time to the first token confirm guesses of another key's prompts
            salt = sha256(f"{owner} {salt or ''}".encode()).hexdigest()
        session = request.session_id or envelope.session or UNSET
        return Scheduling(salt, request.priority or 0, envelope.trace_headers, session)


def _granted(items: Sequence[Item]) -> Collection[str]:
    """Return the ids of the approvals among ``items`` whose calls are not among them.

    The history of a client that keeps it itself has the call, too.
    """
    made = {item.approval_request_id for item in of_type(items, McpCall)}
    return {item.approval_request_id for item in of_type(items, McpApprovalResponse) if item.approve} - made


def _ends_with_trigger(request: CreateResponse) -> bool:
    return bool(request.input_items) and isinstance(request.input_items[-1], CompactionTriggerItem)


def _compacting(request: CreateResponse) -> Compacting | None:
    """Return the compaction that a request asks for, at once or from a number of tokens on."""
    if _ends_with_trigger(request):
        return Compacting(at_once=True)
    if not request.context_management:
        return None
    threshold = request.context_management[0].compact_threshold
    return Compacting(threshold=DEFAULT_THRESHOLD if threshold is None else threshold)


def refuse_unsupported(request: CreateResponse) -> None:
    """Raise `UnsupportedParameter` for the first parameter whose value this server does not support.

    Raises `InvalidRequest` for an unknown ``include``, and for parameters that exclude each other.
    """
    has_markup = request.raw_prompt is None
    unsupported = {
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": has_markup and request.skip_special_tokens is False,
        "spaces_between_special_tokens": request.spaces_between_special_tokens is False,
    }
    for param, is_set in unsupported.items():
        if is_set:
            raise UnsupportedParameter(f"This server does not support this value of {param}.", param=param)
    mode = request.reasoning.mode if request.reasoning else None
    if mode not in (None, "standard"):
        message = f"This server does not support the mode {shortened(mode)!r}, only 'standard'."
        raise UnsupportedParameter(message, param="reasoning.mode")
    for position, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            message = f"{shortened(name)!r} cannot be included, only {', '.join(sorted(INCLUDABLE))}."
            raise InvalidRequest(message, param=f"include[{position}]", code="invalid_value")
    _refuse_contradictions(request)


def _refuse_contradictions(request: CreateResponse) -> None:
    """Raise `InvalidRequest` for parameters that exclude each other."""
    continued = [name for name in CONTINUING if getattr(request, name) is not None]
    if len(continued) > 1:
        raise _exclusive(*continued, param=continued[-1])
    if request.background and request.store is False:
        raise InvalidRequest("Background responses are stored: store cannot be false.", param="background")


def _is_light(request: CreateResponse, past: History) -> bool:
    """Return True if a request is read in less time than a thread takes to begin."""
    texts = request.text, request.structured_outputs, request.previous_input_messages, request.raw_prompt
    return not request.tools and not any(texts) and are_light((*past.items, *request.input_items), request.instructions)


def _updates(request: CreateResponse, items: Sequence[Item]) -> Mapping[str, Any]:
    """Return what the items of a conversation set in place of the request.

    Raises `InvalidRequest` for a format beside what excludes one.
    """
    updates: dict[str, Any] = {}
    for update in of_type(items, ConfigurationUpdate):
        if update.reasoning is not UNSET and "effort" in update.reasoning:
            updates["effort"] = update.reasoning["effort"]
        if update.text is not UNSET:
            updates["format"] = update.text["format"]
    of_request = request.text.format.type if request.text and request.text.format else "text"
    has_format = updates.get("format", {"type": of_request})["type"] != "text"
    if _continues_a_text(request) and (has_format or request.structured_outputs):
        raise InvalidRequest(
            "A text that is continued cannot be held to a format, because its beginning is not.",
            param=("input" if "format" in updates else "text.format") if has_format else "structured_outputs",
            code="mutually_exclusive_parameters",
        )
    if request.structured_outputs and has_format:
        raise _exclusive("text.format", "structured_outputs", param="structured_outputs")
    return updates


def _continues_a_text(request: CreateResponse) -> bool:
    """Return True if the input ends with a message of the assistant that is not whole."""
    last = request.input_items[-1] if request.input_items else None
    return isinstance(last, MessageItem) and last.role == "assistant" and last.status == "incomplete"


def _exclusive(*names: str, param: str) -> InvalidRequest:
    message = f"{' and '.join(names)} exclude each other."
    return InvalidRequest(message, param=param, code="mutually_exclusive_parameters")


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
    )


def _template(request: CreateResponse) -> TemplateOptions:
    if request.chat_template is None and not request.chat_template_kwargs:
        return NO_TEMPLATE_OPTIONS
    return TemplateOptions(request.chat_template, request.chat_template_kwargs or {})


def _response(
    whole: Applied,
    offered: ToolsetBuilder,
    sampling: Sampling,
    response_id: str,
    created_at: int,
    model: str,
) -> Response:
    request, echoed = whole.request, whole.echo
    messages = None if request.enable_response_messages else UNSET
    shown: dict[str, Any] = {**echo_of(asdict(sampling)), "max_output_tokens": request.max_output_tokens}
    return Response(
        id=response_id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        model=model,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        tools=tuple(offered.echo),
        left_out_tools=tuple(offered.ignored) or UNSET,
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
    return {"format": {"type": "text"}} | {key: value for key, value in options.items() if value is not None}


def _reasoning(request: CreateResponse) -> ReasoningOptions:
    options = request.reasoning or ReasoningOptionsParam()
    return ReasoningOptions(options.effort, options.summary or options.generate_summary, options.context or UNSET)
