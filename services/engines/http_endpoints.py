"""vLLM's token-in, token-out HTTP endpoints: request bodies and streamed lines.

``/inference/v1/generate`` works on token ids and takes all of vLLM's features, but a server has it only with
``--enable-scale-out``.  ``/v1/completions`` is always there, and returns token ids with ``return_token_ids``.  This
module does no I/O.  Written against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import Prompt, TokenChunk, TokenLogprob
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.pipeline.protocol.sse import EventSplitter, TooLong
from penstock.services.engines.engine import sampling_parameters
from penstock.services.json_size import JsonSize, may_exceed

LONGEST_EVENT = 64 * 2**20
"""Bytes of an event.  It is large because the first event of a stream may repeat the prompt."""

LARGEST_EVENT = JsonSize(containers=50_000, commas=2_000_000)
"""The size of an event: the first may repeat a prompt of two million tokens, and each token may have twenty others."""

_DIALECT = "%llguidance {}\n"
"""A directive that only the guidance backend understands.

Without it, a server that picks its backend automatically may give our grammars to xgrammar.  Xgrammar reads much of
them differently, so that the tokens that end a turn could not be generated."""

FLOOR = -9999.0
"""The log probability that vLLM reports over HTTP in place of minus infinity, which JSON lacks."""

LET_GO = "penstock_let_go"
"""The argument of a prompt with the conversations that are over, for a scheduler that knows it; none of them asks for
that scheduler's word.
"""

_MAX_LOGPROBS = 20
"""vLLM's default limit for ``logprobs`` (``--max-logprobs``)."""

Logprobs = TypeVar("Logprobs")


class RequestRefused(Exception):
    """The server answered with an error instead of tokens."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class _EngineProblem(msgspec.Struct, frozen=True, gc=False):
    message: str = "The engine gave no error message."
    code: int | str | None = None
    param: str | None = None


class _Details(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, Generic[Logprobs], frozen=True, gc=False):
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: tuple[WeightSpan, ...] | None = None
    """The versions that wrote the whole output, at its end.  ``/v1/completions`` has none, nor has an older vLLM."""


class _Line(msgspec.Struct, Generic[Logprobs], frozen=True, gc=False):
    choices: tuple[_Choice[Logprobs], ...] = ()
    usage: _Usage | None = None
    error: _EngineProblem | str | None = None


class _Alternative(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: float


class _Chosen(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    top_logprobs: tuple[_Alternative, ...] = ()


class _Generated(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities as ``/inference/v1/generate`` returns them."""

    content: tuple[_Chosen, ...] | None = None


class _Completed(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities as ``/v1/completions`` returns them."""

    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


@dataclass(frozen=True)
class Endpoint(Generic[Logprobs]):
    """An endpoint: its path, its request bodies, and the decoding of its lines."""

    path: str
    body: Callable[[Prompt], dict[str, Any]]
    probe_body: Callable[[str, list[int], dict[str, Any]], dict[str, Any]]
    """Build a body for a probe from model name, token ids and sampling parameters; its answer is not streamed."""
    decoder: msgspec.json.Decoder[_Line[Logprobs]]
    logprobs: Callable[[Logprobs, int | None], tuple[TokenLogprob, ...]]
    takes_images: bool
    add_arguments: Callable[[dict[str, Any], Mapping[str, Any]], None]
    """Add arguments for plug-ins of the engine to a body."""


class Answer(Generic[Logprobs]):
    """Decode the bytes of a stream, cut anywhere; ``top`` is the number of alternatives to report for each token."""

    def __init__(self, endpoint: Endpoint[Logprobs], top: int | None) -> None:
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        """Tokens of the prompt as the engine counted them; None until it reports them."""
        self.cached_tokens = 0
        self.tokens = 0
        """Tokens of the output."""
        self.weights: tuple[WeightSpan, ...] = ()
        self.is_complete = False
        self.fault: RequestRefused | EngineFailed | None = None
        """The error that ended the stream, after all tokens before it: reported by the server, or unreadable data."""
        self._decode, self._logprobs, self._top = endpoint.decoder.decode, endpoint.logprobs, top
        self._blocks = EventSplitter(LONGEST_EVENT)

    def feed(self, data: bytes) -> TokenChunk | None:
        """Return all tokens in ``data`` as one chunk, or None if it completes none; an error goes to ``fault``."""
        chunk = None
        try:
            for block in self._blocks.feed(data):
                if block.data is not None and (more := self._read(block.data)):
                    chunk = more if chunk is None else _merged(chunk, more)
        except (RequestRefused, EngineFailed) as error:
            self.fault = error
        except TooLong:
            self.fault = EngineFailed("The engine's answer has an event without an end.")
        return chunk

    def _read(self, data: bytes) -> TokenChunk | None:
        if data == b"[DONE]":
            self.is_complete = True
            return None
        if may_exceed(data, LARGEST_EVENT):
            raise EngineFailed("The engine's answer has too many values in an event.")
        try:
            return self.read(data)
        except NO_JSON as error:
            raise EngineFailed("The engine's answer cannot be read.") from error

    def read(self, data: bytes) -> TokenChunk | None:
        """Return the tokens of a line, or of an answer that is not streamed, if there are any."""
        line = self._decode(data)
        if line.error is not None:
            raise refusal(line.error)
        if line.usage:
            self.prompt_tokens = line.usage.prompt_tokens
            details = line.usage.prompt_tokens_details
            self.cached_tokens = (details and details.cached_tokens) or 0
        return self._tokens(line.choices[0]) if line.choices else None

    def _tokens(self, choice: _Choice[Logprobs]) -> TokenChunk | None:
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.weights = choice.weight_versions or ()
        if choice.token_ids is None:
            raise EngineFailed("The engine sent no token ids.")
        if not choice.token_ids:
            return None
        self.tokens += len(choice.token_ids)
        logprobs = self._logprobs(choice.logprobs, self._top) if choice.logprobs else ()
        return TokenChunk(choice.token_ids, logprobs)


def refusal(problem: _EngineProblem | str, status: int = 500) -> RequestRefused:
    """Convert vLLM's error object; its own code, if it has one, takes precedence over ``status``."""
    if isinstance(problem, str):
        return RequestRefused(status, problem)
    code = problem.code if isinstance(problem.code, int) else status
    return RequestRefused(code, problem.message.partition(" (parameter=")[0], problem.param)


def read_refusal(status: int, body: bytes) -> RequestRefused:
    """Convert the body of an answer with a status other than 200 to `RequestRefused`."""
    try:
        problem = msgspec.json.decode(body, type=_Line[None]).error
    except NO_JSON:  # a proxy in between may have answered, with a page
        problem = None
    if problem is None:
        return RequestRefused(status, f"The engine answers {status}.")
    refused = refusal(problem, status)
    return RequestRefused(status, str(refused), refused.param)


def _merged(first: TokenChunk, second: TokenChunk) -> TokenChunk:
    return TokenChunk(first.token_ids + second.token_ids, first.logprobs + second.logprobs)


def _sampling(prompt: Prompt, logprobs: int | None) -> dict[str, Any]:
    params = sampling_parameters(prompt) | {"logprobs": logprobs, "skip_special_tokens": False}
    return params if prompt.grammar is None else params | constrained_to(prompt.grammar)


def constrained_to(grammar: str) -> dict[str, Any]:
    """Sampling parameters that constrain the answer to the grammar."""
    return {"structured_outputs": {"grammar": _DIALECT + grammar}}


def _request(prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": prompt.facts.model,
        "request_id": prompt.facts.engine_id,
        "priority": prompt.facts.scheduling.priority,
    }
    if prompt.facts.sampling.prompt_logprobs is UNSET:  # vLLM streams no log probabilities of prompts
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    salt = prompt.facts.scheduling.cache_salt
    return body if salt is None else body | {"cache_salt": salt}


def _generate_body(prompt: Prompt) -> dict[str, Any]:
    """Build the body for a prompt.

    This endpoint reports the generated token as the first alternative, dropping the last one.  So one more is
    requested.  ``reasoning_ended`` is for servers with a reasoning parser, which would apply the grammar only after the
    reasoning: our grammars begin at the first generated token.
    """
    top = prompt.facts.sampling.logprobs
    sampling = _sampling(prompt, top and max(top, min(top + 1, _MAX_LOGPROBS)))
    sampling["detokenize"] = False
    if chosen := sampling.get("logprob_token_ids"):
        sampling |= {"logprobs": len(chosen) + 1, "logprob_token_ids": [*chosen, chosen[-1]]}
    body = _request(prompt) | {"token_ids": prompt.token_ids, "sampling_params": sampling}
    if prompt.grammar is not None:
        body["reasoning_ended"] = True
    if prompt.images:
        body["content_parts"] = [{"type": "image_url", "url": url} for url in prompt.images]
    return body


def _generate_question(model: str, token_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "token_ids": token_ids, "sampling_params": sampling, "reasoning_ended": True}


def _completions_question(model: str, token_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "prompt": token_ids, "return_token_ids": True, **sampling}


def _completions_body(prompt: Prompt) -> dict[str, Any]:
    fields = {"prompt": prompt.token_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
    sampling = _sampling(prompt, prompt.facts.sampling.logprobs)
    if "extra_args" in sampling:
        sampling["vllm_xargs"] = sampling.pop("extra_args")
    return _request(prompt) | sampling | fields


def _add_to_generate(body: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    sampling = body["sampling_params"]
    body["sampling_params"] = sampling | {"extra_args": {**sampling.get("extra_args", {}), **arguments}}


def _add_to_completions(body: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    body["vllm_xargs"] = {**body.get("vllm_xargs", {}), **arguments}


def _generated_logprobs(logprobs: _Generated, top: int | None) -> tuple[TokenLogprob, ...]:
    return tuple(
        _logprob(chosen.logprob, {other.token_id: other.logprob for other in chosen.top_logprobs}, top)
        for chosen in logprobs.content or ()
    )


def _completed_logprobs(logprobs: _Completed, top: int | None) -> tuple[TokenLogprob, ...]:
    others = logprobs.top_logprobs or (None,) * len(logprobs.token_logprobs)
    return tuple(
        _logprob(
            FLOOR if value is None else value,
            {int(name.removeprefix("token_id:")): other for name, other in (names or {}).items()},
            top,
        )
        for value, names in zip(logprobs.token_logprobs, others, strict=True)
    )


def _logprob(value: float, others: dict[int, float], top: int | None) -> TokenLogprob:
    """Sort the alternatives by likelihood, without the tokens that a grammar forbids."""
    possible = [(token, other) for token, other in others.items() if other > FLOOR]
    return TokenLogprob(value, tuple(sorted(possible, key=itemgetter(1), reverse=True)[:top]))


GENERATE = Endpoint(
    "/inference/v1/generate",
    body=_generate_body,
    probe_body=_generate_question,
    decoder=msgspec.json.Decoder(_Line[_Generated]),
    logprobs=_generated_logprobs,
    takes_images=True,
    add_arguments=_add_to_generate,
)
COMPLETIONS = Endpoint(
    "/v1/completions",
    body=_completions_body,
    probe_body=_completions_question,
    decoder=msgspec.json.Decoder(_Line[_Completed]),
    logprobs=_completed_logprobs,
    takes_images=False,
    add_arguments=_add_to_completions,
)
ENDPOINTS: tuple[Endpoint[Any], ...] = (GENERATE, COMPLETIONS)
"""Both endpoints, the preferred one first."""
