"""The tokens of a recorded answer as a file of the stage ``generate``, which comparisons and replays read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.api.dialects.named import OPTION, named
from penstock.extensions.workbench.wiretap.tokens import Tokens
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import StageError
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import ChatTurn, GenerationStarted, RequestFacts, ResolvedRequest, TokenFrame
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.recordings.format import FILES, Encoding, End, Failure, Header, line
from penstock.pipeline.recordings.redaction import public
from penstock.pipeline.recordings.response_folder import append
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.normalize.frames import ModelTraits
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.recall import Recall, always

TOKENS = FILES["generate"][0]

ASKING = frozenset({"return_token_ids", "return_tokens_as_token_ids"})
"""The parameters by which a request gets the ids of tokens; penstock has other ones."""

UNKNOWN = ("echo", "logits_processors", "prompt_embeds", "use_beam_search")
"""Parameters after which the tokens of the answer do not say what the model chose."""

TEXTUAL = frozenset({"text", "refusal", "thinking"})
"""The types of the parts of a message that are text: for others, a prompt has placeholders."""

CONSTRAINTS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Parameters by which vLLM, or an older one, holds the output to a grammar."""

SHAPING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("vllm_xargs", "thinking_token_budget", "ignore_eos"),
)
"""The sampling parameters that vLLM and penstock spell alike."""

START, MESSAGE = 200006, 200008
"""The tokens of Harmony with which each of its prompts begins, and each of its messages."""


class NoTokens(Exception):
    """The tokens of an answer cannot be recorded; the message continues a sentence."""


@dataclass(frozen=True)
class Asked:
    """A request, as it was recorded, and what it had that was not."""

    body: Mapping[str, Any]
    held_to_grammar: bool
    problem: str
    """Why the tokens of the answer say nothing by themselves; empty if they do."""

    @classmethod
    def of(cls, sent: Mapping[str, Any], kept: Mapping[str, Any]) -> Asked:
        """Return a request of which these fields were kept."""
        return cls(kept, is_held(sent), unfit(sent))


def write_tokens(folder: Path, header: Header, asked: Asked, tokens: Tokens, at: float, end: End) -> None:
    """Write the tokens of an answer to a request, whose recording has this header and this end.

    Raise `NoTokens` if they are not all known, or say nothing.
    """
    if problem := tokens.problem or asked.problem:
        raise NoTokens(problem)
    encoding = encoding_of(header.source or header.model, tokens.prompt)
    described = replace(header, encoding=encoding, path=None, headers={}, left_out=())
    lines = [line(public(frame), time) for time, frame in _frames(described, asked, tokens, at, end)]
    failure = end.failure or (Failure("EngineFailed", tokens.error) if tokens.error else None)
    last = line(End(len(lines), failure, end.abandoned, end.cause))
    append(folder / TOKENS, b"".join([line(described), *lines, last]), os.O_CREAT | os.O_TRUNC)


def _frames(header: Header, asked: Asked, tokens: Tokens, at: float, end: End) -> Iterator[tuple[float, TokenFrame]]:
    facts = asyncio.run(_facts(header, asked.body))
    yield (
        tokens.began,
        GenerationStarted(
            facts,
            tokens.prompt_tokens,
            held_to_grammar=asked.held_to_grammar,
            chat=ChatTurn(facts.template.variables) if header.encoding == "chat" and facts.raw is None else None,
            prompt=tokens.prompt,
        ),
    )
    yield from tokens.chunks
    finished = tokens.finished(at)
    if finished and not (end.failure or end.abandoned or tokens.error):
        yield at, finished


def unfit(sent: Mapping[str, Any]) -> str:
    """Return why the tokens of the answer to a request say nothing by themselves; empty if they do."""
    if names := [name for name in UNKNOWN if sent.get(name)]:
        return f"they depend on {', '.join(names)}"
    if any(kind not in TEXTUAL for kind in _kinds(sent.get("messages"))):
        return "the prompt has more than text"
    return ""


def _kinds(messages: Any) -> Iterator[Any]:
    """Yield the types of all parts of messages."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            yield part.get("type") if isinstance(part, dict) else "text"


def is_held(sent: Mapping[str, Any]) -> bool:
    """True if a request may hold the output to a grammar."""
    response_format, choice = sent.get("response_format"), sent.get("tool_choice")
    tools = sent.get("tools")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return (
        any(sent.get(name) is not None for name in CONSTRAINTS)
        or (isinstance(response_format, dict) and response_format.get("type") != "text")
        or choice == "required"
        or isinstance(choice, dict)
        or (choice != "none" and any(isinstance(each, dict) and each.get("strict") for each in functions))
    )


def encoding_of(model: str, prompt: tuple[int, ...]) -> Encoding:
    """Return the encoding of a model by its config, if that is here, or else by a prompt, or by its name."""
    try:
        config = msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=_Config)
    except (OSError, ValueError):
        speaks_harmony = (prompt[:1] == (START,) and MESSAGE in prompt) or "gpt-oss" in model.lower()
    else:
        speaks_harmony = config.model_type == "gpt_oss"
    return "harmony" if speaks_harmony else "chat"


class _Config(msgspec.Struct):
    model_type: str = ""


async def _facts(header: Header, sent: Mapping[str, Any]) -> RequestFacts:
    """Return the facts of a request; of one that penstock refuses, only those of its sampling.

    Raises `NoTokens` if penstock refuses these, too.
    """
    try:
        return await _resolved(header, request_of(header, sent))
    except StageError:
        shaping = {name: sent[name] for name in SHAPING if sent.get(name) is not None}
    try:
        return await _resolved(header, bare(header, shaping))
    except (StageError, ValueError) as error:
        raise NoTokens(f"penstock cannot read how they were sampled: {named_error(error)}") from error


def request_of(header: Header, sent: Mapping[str, Any]) -> CreateResponse:
    """Return a request of a dialect as penstock reads it, without what asks for tokens.  Raise `StageError`."""
    body = msgspec.json.encode({name: value for name, value in sent.items() if name not in ASKING})
    request: CreateResponse = named(header.dialect or "", OPTION).read(body).request
    return request.replaced({"previous_response_id": None, "conversation": None})


def bare(header: Header, parameters: Mapping[str, Any] = {}) -> CreateResponse:
    """Return a request for the recorded model that has these parameters alone."""
    return CreateResponse.model_validate({"model": header.model, "input": "", **parameters})


async def _resolved(header: Header, request: CreateResponse) -> RequestFacts:
    traits = ModelTraits(has_template=header.encoding == "chat")
    normalize = normalizing(Recall(store=Store(NullDatabase()), models=(header.model,), traits_of=always(traits)))
    async with aclosing(normalize(source_of([request]))) as resolved:
        only: ResolvedRequest = await anext(resolved)
    return only.facts
