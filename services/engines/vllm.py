"""vLLM in this process: `AsyncLLM`, with token ids in and out.

vLLM's interface changes between releases, and importing it takes seconds and gigabytes.  So few modules import it, and
only inside functions; the import contract in ``pyproject.toml`` lists them.  The parts of it that are not public are
in ``stages.models.vllm_private``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import errors
from penstock.pipeline.distribution import vllm_requirement
from penstock.pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk, TokenLogprob
from penstock.pipeline.hot_path import current
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.readings import TEXT_ONLY
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.engines.affinity import hinted_session
from penstock.services.engines.engine import (
    LONG_TOKENS,
    PARAMETERS,
    CacheHint,
    PauseMode,
    WeightWork,
    sampling_parameters,
)
from penstock.services.engines.vllm_cores import (
    CoreClient,
    Cores,
    StartProcess,
    launched,
    reached,
)
from penstock.services.engines.weights import LatestWeights, spans
from penstock.services.engines.workers import mark_workers, take_steps_whole
from penstock.stages.models.vllm_private import (
    Ready,
    Unread,
    abort_everywhere,
    check_engine_parts,
    copying_tokenizers_late,
    lose,
    pass_tokens_on,
    set_process,
    waits_for_steps,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import CacheConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

ANYTHING = r"start: /(.|\n)*/"
"""A grammar that matches any text."""

MOST_HINTS = 1_000
"""Hints that wait for a prompt; an engine without prompts needs none."""

LINE_STEP = 32
"""The tokens of a line of a batch that are read at once: no client sees them come."""

_TOO_LONG = re.compile(r"prompt \(length (\d+)\)")
"""vLLM's message about a prompt longer than the context.  Nothing else identifies this error."""


class UnknownModel(errors.CannotStart):
    """This server cannot run the model or LoRA adapter."""


class NoVllm(errors.CannotStart):
    """vLLM is not installed."""


class WrongOption(errors.CannotStart):
    """Options are wrong for vLLM; ``unknown`` are those that it does not have, and ``known`` those that it has."""

    def __init__(self, message: str, known: Iterable[str]) -> None:
        super().__init__(message)
        _, is_unknown, arguments = message.partition("unrecognized arguments: ")
        words = arguments.split() if is_unknown else []
        self.unknown = [word.partition("=")[0] for word in words if word.startswith("-")] or words[:1]
        self.known = known


Watch: TypeAlias = Callable[[str, bool], None]
"""Called with vLLM's id of a request, and True when it begins or False when it has ended."""


def _unwatched(_: str, __: bool) -> None:
    """Watch nothing."""


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """An engine over `AsyncLLM`, with vLLM's workers in child processes."""

    llm: AsyncLLM
    models: tuple[str, ...]
    context_length: int
    vocabulary_size: int
    _adapters: Mapping[str, LoRARequest] = field(default_factory=dict)
    """The LoRA adapters, by the names under which they are served."""

    scores_prompts: Literal[True] = True
    scores_tokens: Literal[True] = True
    places: int = 0
    """Prompts that vLLM runs at once."""
    most_prompts: int | None = None
    """vLLM's option ``--max-num-queued-reqs``."""

    watch: Watch = _unwatched
    _unread: dict[str, Unread] = field(default_factory=dict)
    """Token ids by vLLM's id of a request, if vLLM's output processor passes them on."""

    _takes_hints: bool = False
    """True if vLLM's scheduler knows the hints of `hint`."""
    _hints: deque[CacheHint] = field(default_factory=lambda: deque(maxlen=MOST_HINTS))
    """Hints that wait for the next prompt."""
    _weights: LatestWeights = field(default_factory=lambda: LatestWeights("The engine"))
    _running: set[_Generation] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_alive(self) -> bool:
        return not self.llm.errored

    @property
    def root(self) -> str:
        """The model as given on the command line: a Hugging Face id, or a folder."""
        model: str = self.llm.model_config.model
        return model

    @property
    def bounds_thoughts(self) -> bool:
        bounding = self.llm.vllm_config.reasoning_config
        return bounding is not None and bounding.enabled

    @property
    def weight_version(self) -> str:
        return self._weights.shown

    @property
    def schedules_by_priority(self) -> bool:
        return bool(self.llm.vllm_config.scheduler_config.policy == "priority")

    def open(self, prompt: Prompt) -> AbstractAsyncContextManager[AsyncIterator[EngineFrame]]:
        return _Opened(partial(self._begun, prompt), self._end)

    async def _begun(self, prompt: Prompt) -> _Generation:
        generation = await self._begin(prompt)
        self._running.add(generation)
        self.watch(generation.collector.request_id, True)
        if self._stopping.is_set():  # checked after `_begin`, which awaits: `stop` may have been called
            await self._end(generation)
            raise errors.ServerStopping
        return generation

    async def _end(self, generation: _Generation) -> None:
        self._running.discard(generation)
        self._unread.pop(generation.collector.request_id, None)
        try:
            if not generation.is_finished:
                await self._abort(generation)
        finally:
            self.watch(generation.collector.request_id, False)

    async def cancel(self, response_id: str) -> bool:
        """Abort the request; vLLM then queues a final output after those not yet read."""
        generations = [generation for generation in self._running if generation.is_for(response_id)]
        for generation in generations:
            generation.is_cancelled = True
            await self._abort(generation)
        return bool(generations)

    async def _abort(self, generation: _Generation) -> None:
        if self.is_alive:
            await self.llm.abort(generation.collector.request_id, internal=True)

    async def stop(self) -> None:
        self._stopping.set()
        for generation in self._running:
            generation.collector.put(errors.EngineFailed("The server is stopping."))

    async def close(self) -> None:
        with _quiet():
            self.llm.shutdown()

    async def come_back(self) -> None:
        """Wait for the cores, which connect again to a process that follows one that has died."""
        await reached(self.llm)

    def lose(self) -> None:
        """End all generations, as the supervisor says that the cores have died."""
        lose(self.llm)

    async def abort_lost(self, request_ids: Sequence[str]) -> None:
        """Abort requests of another process that has died, by vLLM's ids."""
        await abort_everywhere(self.llm, request_ids)

    async def pause(self, mode: PauseMode, *, clears_cache: bool) -> None:
        with _changes():
            await self.llm.pause_generation(mode=mode, clear_cache=clears_cache)

    async def resume(self) -> None:
        with _changes():
            await self.llm.resume_generation()

    async def is_paused(self) -> bool:
        with _changes():
            return bool(await self.llm.is_paused())

    async def present_weights(self) -> str:
        with _changes():
            version: str = await self.llm.get_weight_version()
            return version

    async def name_weights(self, version: str) -> None:
        with _changes():
            await self.llm.update_weight_version(version)

    async def in_workers(self, work: WeightWork, **given: Any) -> None:
        if work in ("reload_weights", "start_weight_update") and (kept := kept_weights(self.llm.vllm_config)):
            raise errors.InvalidRequest(f"vLLM keeps the old weights of {kept}. Start the server with the new ones.")
        with _changes():
            await self.llm.collective_rpc(work, kwargs=given)

    def workers(self, *, with_replicas: bool) -> int:
        parallel = self.llm.vllm_config.parallel_config
        return int(parallel.world_size_across_dp if with_replicas else parallel.world_size)

    async def warm_up(self, grammar: str = ANYTHING) -> None:
        """Load the adapters, and run a request with grammar and logprobs: the first such request takes seconds longer.

        Raises `UnknownModel` for an adapter that vLLM cannot load.
        """
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        for adapter in self._adapters.values():
            try:
                await self.llm.add_lora(adapter)
            except Exception as error:  # vLLM raises errors of any type here
                raise UnknownModel(f"The adapter {adapter.lora_name} cannot be loaded: {error}") from error
        constraint = StructuredOutputsParams(grammar=grammar)
        params = SamplingParams(max_tokens=2, logprobs=0, structured_outputs=constraint)
        with _refusals(self.context_length):
            async with aclosing(self.llm.generate({"prompt_token_ids": [0]}, params, "warm-up")) as outputs:
                async for _ in outputs:
                    pass

    async def _begin(self, prompt: Prompt) -> _Generation:
        started = time.monotonic()
        collector = await self._add(prompt)
        collector.ready = Ready(is_set=collector.ready.is_set())
        sampling, unread = prompt.facts.sampling, Unread(LINE_STEP if prompt.facts.origin.line else 1, current())
        prompt_top = None if sampling.prompt_logprobs is UNSET else sampling.prompt_logprobs
        has_alternatives = bool(sampling.logprobs) or sampling.logprob_token_ids is not UNSET
        if not has_alternatives and prompt_top is None:
            self._unread[collector.request_id] = unread
        response_id, has_images = prompt.facts.response_id, bool(prompt.images)
        return _Generation(
            response_id,
            collector=collector,
            started=started,
            has_images=has_images,
            top_logprobs=sampling.most_alternatives,
            prompt_top=prompt_top,
            unread=unread,
            weights=self._weights,
        )

    async def _add(self, prompt: Prompt) -> RequestOutputCollector:
        with _refusals(self.context_length), _placing(prompt):
            self._check_budget(prompt)
            params = sampling_params(prompt)
            read = await self._read(prompt)
            try:
                return await self.llm.add_request(
                    prompt.facts.engine_id,
                    read,
                    params,
                    lora_request=self._adapters.get(prompt.facts.model),
                    trace_headers=prompt.facts.scheduling.trace_headers or None,
                    priority=self._priority(prompt),
                    **(self._hinted(prompt) if self._takes_hints else {}),
                )
            except asyncio.CancelledError:  # vLLM may have queued the request already
                await self.llm.abort(prompt.facts.engine_id)
                raise

    async def _read(self, prompt: Prompt) -> dict[str, Any]:
        """Build vLLM's prompt: token ids with placeholders for images, and the images.

        With a ``type``, it is one that vLLM has nothing to read of, so that it does not wait for a thread.
        """
        read: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if prompt.images:
            read["multi_modal_data"] = {"image": await self._images(prompt.images, prompt.facts.origin.owner)}
        elif len(prompt.token_ids) <= LONG_TOKENS:
            read["type"] = "token"
        if (salt := prompt.facts.scheduling.cache_salt) is not None:
            read["cache_salt"] = salt
        return read

    async def _images(self, urls: Sequence[str], owner: str) -> list[Any]:
        from vllm.multimodal.media.image import ImageMediaIO

        from penstock.services.engines.image_decoding import decoded

        if (multimodal := self.llm.model_config.multimodal_config) is None:
            raise errors.ImagesRefused("This model reads text only, no input_image.", dict.fromkeys(urls, TEXT_ONLY))
        decode = ImageMediaIO(**multimodal.media_io_kwargs.get("image", {})).load_bytes
        return await decoded(urls, decode, owner)

    def hint(self, hint: CacheHint) -> bool:
        """Send a hint with the next prompt, if the scheduler takes some: vLLM takes them in no other way."""
        if self._takes_hints:
            self._hints.append(hint)
        return self._takes_hints

    def _hinted(self, prompt: Prompt) -> dict[str, Any]:
        """Return the name of the conversation for the scheduler, and the hints that wait for a prompt."""
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        actions = [
            KvHintAction(
                action_id=str(number),
                action_type=f"penstock.{hint.action}",
                action_version="1.0",
                payload={"session": hint.session, "share": hint.share, "seconds": hint.seconds},
            )
            for number, hint in enumerate(self._hints)
        ]
        self._hints.clear()
        envelope = KvHintsEnvelope(protocol_version="0.1", message_id=prompt.facts.engine_id, actions=actions)
        return {"session_id": hinted_session(prompt.facts), "kv_hints": envelope}

    def _check_budget(self, prompt: Prompt) -> None:
        if prompt.facts.sampling.thinking_token_budget is not UNSET and not self.bounds_thoughts:
            raise errors.InvalidPrompt(
                "This server cannot bound the thoughts of this model: it knows no marks of them.",
                param="thinking_token_budget",
            )

    def _priority(self, prompt: Prompt) -> int:
        """Return the priority; raise `InvalidPrompt` if the scheduler would silently ignore it."""
        priority = prompt.facts.scheduling.priority
        if priority and not self.schedules_by_priority:
            raise errors.InvalidPrompt(
                "This server does not schedule by priority: its engine runs without --scheduling-policy priority.",
                param="priority",
            )
        return priority


@dataclass(eq=False, slots=True)
class _Generation:
    """One running generation.  It does not hold the prompt, which may be large."""

    response_id: str
    collector: RequestOutputCollector
    started: float
    has_images: bool
    top_logprobs: int | None
    prompt_top: int | None
    """The number of alternatives to report for each token of the prompt."""
    unread: Unread
    """Token ids that precede the output in the collector."""
    weights: LatestWeights = field(default_factory=lambda: LatestWeights("The engine"))

    is_finished: bool = False
    is_cancelled: bool = False

    def is_for(self, response_id: str) -> bool:
        return self.response_id == response_id and not self.is_finished

    async def frames(self) -> AsyncGenerator[EngineFrame, None]:
        """Yield all tokens, then the end.  Those that were not read in time come in one chunk."""
        cached_tokens, prompt_tokens, unread, has_begun = 0, None, self.unread, False
        written = 0
        of_prompt: tuple[TokenLogprob, ...] = ()
        with _faults:
            while not self.is_finished:
                token_ids, scores = unread.take()
                logprobs = tuple(map(TokenLogprob, scores))
                output: Any = self.collector.get_nowait()
                if output:
                    self.is_finished = output.finished
                    cached_tokens = output.num_cached_tokens or cached_tokens
                    if self.has_images and output.prompt_token_ids:
                        prompt_tokens = len(output.prompt_token_ids)
                    if output.prompt_logprobs:
                        flat = output.prompt_logprobs  # without those of the first token
                        of_prompt = await apart(len(flat) > MANY_VALUES, _prompt_logprobs, flat, self.prompt_top)
                    completion = output.outputs[0]
                    token_ids += tuple(completion.token_ids)
                    if completion.logprobs:  # without tokens, vLLM gives those of all tokens again
                        logprobs += _logprobs(completion.logprobs, self.top_logprobs)[: len(completion.token_ids)]
                written += len(token_ids)
                if token_ids and has_begun:
                    yield TokenChunk(token_ids, logprobs)
                elif token_ids:
                    yield TokenChunk(
                        token_ids,
                        logprobs,
                        cached_tokens=cached_tokens,
                        prompt_tokens=prompt_tokens,
                        prompt_logprobs=of_prompt,
                    )
                    has_begun = True
                elif not output:
                    completion = None  # it has a copy of its tokens, and the next ones may not come with one
                    self.collector.ready.clear()
                    unread.is_awaited = has_begun
                    await self.collector.ready.wait()
                    unread.is_awaited = False
        reason: Any = "cancelled" if self.is_cancelled else completion.finish_reason
        if reason not in ("stop", "length", "cancelled"):
            raise errors.EngineFailed(f"The engine ended the generation with the reason {reason!r}.")
        weights = spans(completion.weight_versions, written + unread.passed)
        self.weights.note(weights, self.started)
        yield GenerationFinished(
            reason,
            cached_tokens=cached_tokens,
            duration=time.monotonic() - self.started,
            prompt_tokens=prompt_tokens,
            weights=weights,
        )


@dataclass(eq=False, slots=True)
class _Opened:
    """The block of a generation: a class, as the frame of a generator would take more memory."""

    begin: Callable[[], Awaitable[_Generation]] | None
    end: Callable[[_Generation], Awaitable[None]]
    _generation: _Generation = field(init=False)
    _frames: AsyncGenerator[EngineFrame, None] = field(init=False)

    async def __aenter__(self) -> AsyncIterator[EngineFrame]:
        begin, self.begin = self.begin, None  # free the prompt, as it may be large and the generation long
        assert begin is not None
        self._generation = await begin()
        self._frames = self._generation.frames()
        return self._frames

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._frames.aclose()
        finally:
            await self.end(self._generation)


def _logprobs(flat: FlatLogprobs, top: int | None) -> tuple[TokenLogprob, ...]:
    """Convert vLLM's log probabilities; ``top`` is the number of alternatives to report for each token."""
    ranges = zip(flat.start_indices, flat.end_indices, strict=True)
    return tuple(_logprob(flat.token_ids[start:end], flat.logprobs[start:end], top) for start, end in ranges)


def _prompt_logprobs(flat: FlatLogprobs, top: int | None) -> tuple[TokenLogprob, ...]:
    """Convert those of a prompt, which has none of its first token."""
    return tuple(
        replace(_logprob(flat.token_ids[start:end], flat.logprobs[start:end], top), rank=flat.ranks[start] or UNSET)
        for start, end in zip(flat.start_indices[1:], flat.end_indices[1:], strict=True)
    )


def _logprob(token_ids: list[int], logprobs: list[float], top: int | None) -> TokenLogprob:
    """Convert one token's log probabilities.

    vLLM lists the generated token first, then the likeliest tokens, which may or may not repeat it.  Tokens that a
    grammar forbids are left out.
    """
    possible = {token: value for token, value in zip(token_ids, logprobs, strict=True) if value > -inf}
    likeliest = sorted(possible.items(), key=itemgetter(1), reverse=True)
    return TokenLogprob(logprobs[0], tuple(likeliest[:top]))


def sampling_params(prompt: Prompt) -> SamplingParams:
    """Return vLLM's sampling parameters for a prompt."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    return SamplingParams(
        **sampling_parameters(prompt),
        flat_logprobs=True,  # saves an object for each alternative of each token
        # A new object for each request, as vLLM modifies it.
        structured_outputs=prompt.grammar and StructuredOutputsParams(grammar=prompt.grammar),
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        skip_special_tokens=False,
        skip_clone=True,  # nothing else has it: a deep copy takes longer than all vLLM checks
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Log no warnings of vLLM's for the length of a block, unless it logs all: at its end it kills what is slow."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR if level == logging.WARNING else level)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _placing(prompt: Prompt) -> Iterator[None]:
    """Turn vLLM's errors about the images of a prompt into `ImagesRefused`."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        if not prompt.images:
            raise
        if isinstance(error, AssertionError):
            reason = "The model's chat template has no place for an image of this conversation."
        else:
            reason = shortened(str(error.__cause__ or error))
        raise errors.ImagesRefused(reason, dict.fromkeys(prompt.images, reason)) from error


@contextmanager
def _refusals(context_length: int) -> Iterator[None]:
    from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError

    try:
        with _faults:
            yield
    except GracefulHTTPError as error:
        raise errors.EngineOverloaded("The engine is overloaded: its queue is full. Try again in a moment.") from error
    except VLLMValidationError as error:
        if too_long := _TOO_LONG.search(error.args[0]):  # only vLLM knows the length with all image tokens
            raise errors.ContextTooLong(int(too_long[1]), context_length) from error
        param = error.parameter and PARAMETERS.get(error.parameter, error.parameter)
        raise errors.InvalidPrompt(error.args[0], param=param) from error
    except (VLLMClientError, ValueError) as error:
        raise errors.InvalidPrompt(str(error)) from error


class _Faults:
    """Turns vLLM's errors about itself into those of penstock: a class, as it is open during each generation."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, EngineDeadError):
            raise errors.EngineDead("The engine has died.") from error
        if isinstance(error, EngineGenerateError):
            cause = error.__cause__ or error
            raise errors.EngineFailed(
                f"The engine gave up on this request ({type(cause).__name__}).", str(cause)
            ) from error


_faults = _Faults()


@contextmanager
def _changes() -> Iterator[None]:
    """Turn the errors of vLLM's workers, which may be of any type, into `EngineFailed`."""
    try:
        with _faults:
            yield
    except (errors.EngineDead, errors.EngineFailed):
        raise
    except Exception as error:
        raise errors.EngineFailed(f"The engine could not do this: {shortened(str(error))}") from error


@dataclass(frozen=True)
class VllmPlan:
    """A parsed vLLM command line.  Of the model, only the config is loaded yet."""

    config: VllmConfig
    _arguments: AsyncEngineArgs
    _modules: Sequence[Any]
    """The LoRA adapters."""

    @property
    def speaks_harmony(self) -> bool:
        """True if the model is a gpt-oss, which uses the harmony format."""
        return speaks_harmony(self.config)

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the model and its adapters."""
        served = self._arguments.served_model_name or self._arguments.model
        names = [served] if isinstance(served, str) else served
        return (*names, *(module.name for module in self._modules))

    def bound_thoughts(self, marks: tuple[str, str] | None) -> None:
        """Let requests bound the thoughts of the model, which stand between two marks.

        The operator's ``--reasoning-config`` comes first, as it may end a thought with a sentence.
        """
        from vllm.config import ReasoningConfig

        if marks and self.config.reasoning_config is None:
            begin, end = marks
            bounding = ReasoningConfig(reasoning_start_str=begin, reasoning_end_str=end)
            bounding.initialize_token_ids(self.config.model_config)
            self.config.reasoning_config = bounding

    def launch(self, count: int, start: StartProcess) -> AbstractContextManager[Cores]:
        """Load the model for ``count`` processes, which ``start`` starts, for the length of a block.

        Raises `WrongOption` if there is too little memory.
        """
        check_memory(self.config.cache_config)
        return launched(self.config, count, start, counts_statistics=not self._arguments.disable_log_stats)

    def start(self, client: CoreClient | None = None, watch: Watch = _unwatched) -> VllmEngine:
        """Load the model, which takes ten seconds to minutes.  Call it in a running event loop, which it blocks.

        A ``client`` uses cores that have the model already.  ``watch`` learns of vLLM's requests.  Raises `WrongOption`
        if there is too little memory.
        """
        from vllm.envs import enable_envs_cache
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.async_llm import AsyncLLM

        mark_workers()
        take_steps_whole()
        quiet = self._arguments.disable_log_stats
        reached = {}
        if client is None:
            check_memory(self.config.cache_config)
        else:
            reached = {
                "client_addresses": dict(client.addresses),
                "client_count": client.count,
                "client_index": client.index,
            }
        with copying_tokenizers_late():
            llm = AsyncLLM.from_vllm_config(self.config, disable_log_stats=quiet, **reached)
        enable_envs_cache()  # vLLM's statistics read an environment variable at each token
        adapters = {
            module.name: LoRARequest(module.name, number, module.path, is_3d_lora_weight=module.is_3d_lora_weight)
            for number, module in enumerate(self._modules, start=1)
        }
        model = llm.model_config
        unread = dict[str, Unread]()
        scheduling = self.config.scheduler_config
        if scheduling.stream_interval == 1:
            pass_tokens_on(llm.output_processor, unread, waits_for_steps(llm))
        return VllmEngine(
            llm=llm,
            models=self.models,
            context_length=model.max_model_len,
            vocabulary_size=model.get_vocab_size(),
            _adapters=adapters,
            places=scheduling.max_num_seqs * self.config.parallel_config.data_parallel_size,
            most_prompts=scheduling.max_num_queued_reqs,
            watch=watch,
            _unread=unread,
            _takes_hints=bool(scheduling.scheduler_cls)
            and getattr(scheduling.get_scheduler_cls(), "takes_hints", False),
        )


def speaks_harmony(config: VllmConfig) -> bool:
    """Return True if the model is a gpt-oss.  All other models use a chat template."""
    return bool(config.model_config.hf_config.model_type == "gpt_oss")


def kept_weights(config: VllmConfig) -> str:
    """Return the part of the weights that an update of vLLM 0.32 leaves as it was; empty if there is none.

    Its loader copies such experts into parameters that it then drops, and on a CPU it packs an output layer once.
    """
    from vllm.platforms import current_platform

    model = config.model_config
    if speaks_harmony(config) and model.quantization is None:
        return "the experts of a gpt-oss that is not quantized"
    if current_platform.is_cpu() and getattr(model.hf_text_config, "tie_word_embeddings", False):
        return "an output layer that is tied to the embeddings, on a CPU"
    return ""


def default_sampling(config: VllmConfig) -> Mapping[str, float]:
    """Return the sampling defaults of the model, by vLLM's names, from its generation config or the operator's."""
    defaults: dict[str, float] = config.model_config.get_diff_sampling_param()
    return defaults


def option_names() -> frozenset[str]:
    """Return the options of vLLM's engine, or none without vLLM.

    They are read from its source, as an import takes seconds.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    return frozenset({"--lora-modules", *re.findall(r'"(--[a-z][a-z0-9-]+)"', source.read_text("utf-8"))})


def has_plugins() -> bool:
    """Return True if a package is installed that may give vLLM more options than its source has."""
    points = (*entry_points(group="vllm.general_plugins"), *entry_points(group="vllm.platform_plugins"))
    return not all(point.value.startswith(("penstock.", "vllm.")) for point in points)


def plan_vllm(model: str, arguments: Sequence[str], *, processes: int = 1, process: int = 0) -> VllmPlan:
    """Parse ``arguments`` with vLLM's own parser, and load the config of ``model``.

    ``process`` is the number of this one among the ``processes`` that share the engine, or -1 if it only starts them.

    Raises `WrongOption` for arguments that vLLM does not take, `NoVllm` if vLLM is not installed, and `UnknownVllm` if
    it is not a release that penstock knows.
    """
    if find_spec("vllm") is None:
        raise no_vllm()
    from vllm.usage.usage_lib import UsageContext

    check_engine_parts()
    engine_args, modules = _read_arguments(["--model", model, *arguments])
    set_process(engine_args, processes, process)
    return VllmPlan(engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT), engine_args, modules)


def no_vllm() -> NoVllm:
    """Return the error of a server that needs vLLM, which is not installed."""
    return NoVllm(
        f"vLLM is not installed here: pip install '{vllm_requirement()}', "
        "or name an engine elsewhere with --engine URL. Without an engine, `penstock demo` shows recorded answers."
    )


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise `WrongOption` for arguments that vLLM's parser does not take."""
    _read_arguments([*arguments])


def memory_nodes() -> int:
    """Return the number of NUMA nodes of this machine."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def check_memory(cache: CacheConfig) -> None:
    """Raise `WrongOption` if vLLM would not start on this CPU, minutes later, because too little memory is free."""
    import psutil
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or cache.kv_cache_memory_bytes is not None:
        return
    memory = psutil.virtual_memory()
    wanted = memory.total * cache.gpu_memory_utilization
    if memory_nodes() == 1 and memory.available < wanted:  # with more, vLLM looks at one of them
        sizes = [f"{size / 2**30:.1f} GiB" for size in (wanted, memory.total, memory.available)]
        raise WrongOption(
            "vLLM takes {} of the {} of this machine, and {} are free: give it less with --kv-cache-memory-bytes, for "
            "example 4294967296 for a cache of 4 GiB".format(*sizes),
            (),
        )


def _read_arguments(arguments: Sequence[str]) -> tuple[AsyncEngineArgs, list[Any]]:
    """Parse the engine arguments and the LoRA modules, which vLLM reads in its server rather than its engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import LoRAParserAction
    except ModuleNotFoundError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import LoRAParserAction

    def refuse(message: str) -> NoReturn:
        names = vars(parser.parse_known_args([])[0])
        raise WrongOption(message, [f"--{name.replace('_', '-')}" for name in names])

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="penstock serve"))
    parser.error = refuse  # its own prints all of vLLM's options
    parser.add_argument("--lora-modules", nargs="+", action=LoRAParserAction, default=[], metavar="NAME=PATH")
    namespace: Namespace = parser.parse_args(arguments)
    if namespace.lora_modules and not namespace.enable_lora:
        raise WrongOption("--lora-modules needs --enable-lora", ())
    engine_args = AsyncEngineArgs.from_cli_args(namespace)
    structured = engine_args.structured_outputs_config
    if structured.backend not in {"auto", "guidance"}:
        reason = f"structured output needs the backend guidance, not {structured.backend}"
        raise WrongOption(f"--structured-outputs-config: {reason}", ())
    structured.backend = "guidance"  # our grammars use its dialect
    return engine_args, namespace.lora_modules
