"""The interfaces of engines: `Engine` takes and gives token ids, and `TextBackend` conversations and items."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, TypeVar, cast, get_args, runtime_checkable

from msgspec import UNSET, Struct
from msgspec.structs import asdict

from penstock.pipeline import frames
from penstock.pipeline.frames import EngineFrame, ParsedFrame, Prompt, ResolvedRequest

AnyBackend = TypeVar("AnyBackend", bound="Backend")

PARAMETERS = {**frames.PARAMETERS, "input_tokens": "input"}
"""vLLM's parameters with a different name in the API, used in error messages."""


def sampling_parameters(prompt: Prompt) -> dict[str, Any]:
    """Return the sampling parameters by the names of vLLM's ``SamplingParams``, without those that the request lacks.

    Generation stops at the tokens of the request, and at those that end a turn, unless it ignores these.  The texts of
    ``stop`` are not among the parameters: an engine would search for them in thoughts and markup, too, so the parsers
    do it.
    """
    given = {name: value for name, value in asdict(prompt.facts.sampling).items() if value is not UNSET}
    del given["stop"]
    if "logprob_token_ids" in given:
        given["logprobs"] = None  # vLLM would refuse another number than that of the tokens
    ends = () if given.get("ignore_eos") else prompt.stop_token_ids
    given["stop_token_ids"] = (*ends, *given.get("stop_token_ids", ()))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


LONG_TOKENS = 2**17
"""Tokens of a prompt that takes milliseconds to check."""

UNLIMITED = 2**31 - 1
"""The context length, in tokens, of an engine without a model, such as one that answers from recordings."""


def known_length(engine: Backend) -> int | None:
    """Return the context length of an engine for clients; None if it is `UNLIMITED`."""
    return engine.context_length if engine.context_length < UNLIMITED else None


class Backend(Protocol):
    """The part of an engine that starts, cancels and ends generations, whatever they consist of."""

    @property
    def models(self) -> Sequence[str]:
        """Model names that a request may use: the model's own name, then its aliases and LoRA adapters."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and answer together; `UNLIMITED` if there is none."""
        ...

    @property
    def is_alive(self) -> bool:
        """True if the engine can serve requests."""
        ...

    async def cancel(self, response_id: str) -> bool:
        """End the generation for a response at once; return True if there was one.

        Its frames end with the reason ``cancelled``, after all tokens generated so far.
        """
        ...

    async def stop(self) -> None:
        """End all running generations with `EngineFailed`, and accept no more prompts.

        Later prompts, and those being accepted at this moment, are refused with `ServerStopping`.
        """
        ...

    async def close(self) -> None:
        """Release the engine's resources."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """An engine that knows how many prompts it runs at once."""

    @property
    def places(self) -> int:
        """Prompts that run at once; further ones would wait in the engine."""
        ...

    @property
    def most_prompts(self) -> int | None:
        """Prompts that may run or wait; further ones are to be refused.  None if any number may wait."""
        ...


@runtime_checkable
class Prioritizing(Protocol):
    """An engine that knows if it runs prompts by their priority."""

    @property
    def schedules_by_priority(self) -> bool:
        """True if prompts with lower numbers run first; else those with a priority are refused."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """An engine that knows if it can end a thought of the model's."""

    @property
    def bounds_thoughts(self) -> bool:
        """True if a prompt may have a ``thinking_token_budget``."""
        ...


@runtime_checkable
class HoldsGrammars(Protocol):
    """An engine that knows if it can hold output to a grammar; any other one can."""

    @property
    def holds_grammars(self) -> bool:
        """True if a prompt may have a `grammar`."""
        ...


@runtime_checkable
class ScoresPrompts(Protocol):
    """An engine that reports the log probabilities of prompts, if `Sampling.prompt_logprobs` asks for them."""

    @property
    def scores_prompts(self) -> Literal[True]:
        """Always true."""
        ...


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that reports the log probabilities of the tokens that `Sampling.logprob_token_ids` names."""

    @property
    def scores_tokens(self) -> Literal[True]:
        """Always true."""
        ...


@runtime_checkable
class NamesWeights(Protocol):
    """An engine that knows the version of its weights, which `GenerationFinished.weights` of its frames names."""

    @property
    def weight_version(self) -> str:
        """The version in its latest answers; empty if none has named one."""
        ...


class CacheHint(Struct, frozen=True):
    """The future of a conversation, for an engine that decides what its prefix cache keeps."""

    action: Literal["keep", "let_go", "fetch"]
    """``keep``: it waits and will go on; ``let_go``: it will not; ``fetch``: it goes on at any moment."""
    session: str
    """The conversation, as `affinity.hinted_session` names it."""
    response_id: str
    """The response whose prompt and output are meant: those of its latest turn."""
    tokens: int
    """Tokens of both together, about."""
    share: float = 0.0
    """For ``keep``: the probability that the conversation is back in time."""
    seconds: float = 0.0
    """For ``keep``: that time; after it, nothing is known."""


@runtime_checkable
class TakesHints(Protocol):
    """An engine that hears what comes next of conversations."""

    def hint(self, hint: CacheHint) -> bool:
        """Take a hint in, at once; return True if it is of use.  It binds to nothing."""
        ...


PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""The ways of a pause with running generations: it ends them, waits for them, or halts them until it is over."""

WeightWork: TypeAlias = Literal[
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reload_weights",
]
"""The methods of vLLM's workers that a trainer calls."""


@runtime_checkable
class ChangesWeights(Protocol):
    """An engine whose weights a trainer changes while it runs.

    Each method may raise `EngineFailed`, after which the weights may be a mixture, or `EngineDead`.
    """

    async def pause(self, mode: PauseMode, *, clears_cache: bool) -> None:
        """Generate nothing until `resume`, and let new prompts wait; return once no generation runs."""
        ...

    async def resume(self) -> None:
        """Go on after a pause."""
        ...

    async def is_paused(self) -> bool:
        """Return True in a pause."""
        ...

    async def present_weights(self) -> str:
        """Return the version of the weights that write the next token."""
        ...

    async def name_weights(self, version: str) -> None:
        """Name the version of the weights that write the next token."""
        ...

    async def in_workers(self, work: WeightWork, **given: Any) -> None:
        """Let all workers of the engine do something."""
        ...

    def workers(self, *, with_replicas: bool) -> int:
        """Return the number of workers of the model, or of all replicas of it."""
        ...


ModelState: TypeAlias = Literal["ready", "asleep", "starting", "stopping", "stopped", "failed"]
MODEL_STATES: tuple[ModelState, ...] = get_args(ModelState)


class ModelStatus(Struct, frozen=True, kw_only=True):
    """The status of one of several models, for the operator."""

    name: str
    names: tuple[str, ...]
    """Its other names for clients, patterns among them."""
    kind: str
    """The kind of its work, such as ``generate``."""
    state: ModelState
    changed_at: float | None
    """The time of the change to its state; None if that is not known."""
    reason: str
    """Why it has failed, as the rest of a sentence; empty if its latest start has not."""
    leases: int
    """The responses and requests that hold it."""
    waiting: int
    """The requests that wait until it is up."""
    urls: tuple[str, ...]
    """The addresses of its servers; none if it runs in this process."""
    is_child: bool
    """True if penstock starts and ends its process."""
    pid: int | None
    """That process, while it runs."""


@runtime_checkable
class SeveralEngines(Protocol):
    """The engines of several models, which stand for one whose `models` are the names of all."""

    def of(self, model: str) -> Backend:
        """Return the engine of one of the ``models``; what it says of itself changes once the model is loaded."""
        ...

    @property
    def kinds(self) -> Mapping[str, str]:
        """The names of all models, each with what the model does: those that do not ``generate`` are passed on."""
        ...

    def state(self, model: str) -> ModelState:
        """Return the state of a model by a name; one that is not ready is loaded when a request asks for it."""
        ...

    def title(self, model: str) -> str:
        """Return the one name for people of a model, given by one of the ``models``."""
        ...

    def statuses(self) -> Sequence[ModelStatus]:
        """Return what is known of each model, also of those whose answers are passed on."""
        ...


def engine_of(engine: AnyBackend, model: str) -> AnyBackend:
    """Return the engine that serves a model, given by one of the names that ``engine`` serves."""
    return cast("AnyBackend", engine.of(model)) if has_several(engine) else engine


_several: dict[type[Backend], bool] = {}


def has_several(engine: Backend) -> TypeGuard[SeveralEngines]:
    """Return True for `SeveralEngines`; a class is looked at once, as that takes long and requests ask often."""
    kind = type(engine)
    if kind not in _several:
        _several[kind] = isinstance(engine, SeveralEngines)
    return _several[kind]


def title_of(engine: Backend, model: str) -> str:
    """Return the one name for people of a model, given by one of its names; an empty one for an engine alone."""
    return engine.title(model) if has_several(engine) else ""


def state_of(engine: Backend, model: str) -> ModelState:
    """Return the state of a model by one of its names; an engine alone is ready."""
    return engine.state(model) if has_several(engine) else "ready"


def reads_tokens(engine: Backend, writer: str, model: str) -> bool:
    """Return True if the ``writer`` of tokens, a served name, is the ``model`` of this name, which is served here.

    All names of one engine are one model.  An unknown writer, an empty name, is that of an engine alone.
    """
    if not writer:
        return not has_several(engine)
    return writer in engine.models and title_of(engine, writer) == title_of(engine, model)


class Engine(Backend, Protocol):
    """An inference engine: it generates tokens for prompts."""

    @property
    def vocabulary_size(self) -> int:
        """Upper bound (exclusive) of the token ids in a prompt.  A higher id may crash the engine."""
        ...

    def open(self, prompt: Prompt) -> AbstractAsyncContextManager[AsyncIterator[EngineFrame]]:
        """Return a context manager that runs one generation.

        Entering it returns once the engine has accepted the prompt, or raises `InvalidPrompt`, `EngineOverloaded`,
        `ServerStopping` or `EngineDead`.  Its frames are ``TokenChunk* . GenerationFinished``; `EngineFailed` and
        `EngineDead` may be raised between them.  Leaving the block early aborts the generation.
        """
        ...


@runtime_checkable
class TextBackend(Backend, Protocol):
    """A model behind an API of texts: it stands for the stages from ``render`` to ``parse``."""

    def answer(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        """Yield the frames of one turn for each conversation: the stage ``parse`` of the pipeline.

        Before the first frame it may raise what `Engine.open` raises.  Closing it aborts the turn.  If `cancel` does
        nothing and returns False, the server closes the stage instead.
        """
        ...
