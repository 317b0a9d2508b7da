"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``, as anthropic-python 2.13 writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from penstock.extensions.dialects.messages.blocks import TextBlocks, Turn, Turns, UserTurn
from penstock.extensions.dialects.messages.compaction import Summarizing
from penstock.extensions.dialects.messages.errors import THREAD_UNSUPPORTED, not_permitted
from penstock.extensions.dialects.messages.messages import (
    OWN_CONTAINER,
    Conversation,
    check_not_empty,
    instructions,
)
from penstock.extensions.dialects.messages.threads import ContinuedThread, Thread, unheld
from penstock.extensions.dialects.messages.tools import MessageTool, MessageToolChoice, Offer
from penstock.extensions.dialects.messages.writer import Display
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import FAIL_FAST, REFUSED, Body, TextOr, Unused, only
from penstock.pipeline.protocol.params.foreign_names import OF_CHATS, ForeignNames
from penstock.pipeline.protocol.params.request import (
    LOGPROBS,
    NOTHING_ASKED,
    OUTPUTS,
    SOURCES,
    CacheSalt,
    CreateResponse,
    ExtraArguments,
    ReasoningOptionsParam,
    StopText,
    TextOptions,
)
from penstock.pipeline.protocol.response import Effort

_MEANT = {
    "input": "messages",
    "prompt": "messages",
    "instructions": "system",
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "text": "output_config",
    "reasoning": "thinking",
    "reasoning_effort": "output_config",
    "stop": "stop_sequences",
    "top_logprobs": "logprobs",
    "include": "logprobs",
    "functions": "tools",
    "function_call": "tool_choice",
    "parallel_tool_calls": "tool_choice",
    "web_search_options": "tools",
}

_SHARED = frozenset(
    {"context_management", "max_tokens", "messages", "metadata", "model", "service_tier", "stream", "temperature"}
    | {"cache_salt", "logprobs", "return_token_ids", "return_weight_versions", "vllm_xargs", "watermarking"}
    | {"output_config", "stop_sequences", "system", "thinking", "tool_choice", "tools", "top_k", "top_p"}
)
"""The parameters that others have by the same name."""

FOREIGN = ForeignNames(_MEANT, tuple(sorted({*OF_CHATS.names, *CreateResponse.model_fields} - _MEANT.keys() - _SHARED)))
"""The parameters of Responses, Chat Completions and Completions that a message does not have."""

MOST_STOP_SEQUENCES = 64
"""The most stop sequences of a message: the text of each token is searched for all of them."""

_EFFORTS: Mapping[int, Effort] = {10_000: "high", 5_000: "medium", 0: "low"}
"""The effort for a budget of thought in tokens, by the least budget that gets it."""


_PLACES = {"input": "messages", "max_output_tokens": "max_tokens", "text.format": "output_config.format"}
"""The parameters of a message by those of the request of the pipeline."""

_PASSED_ON = (
    *("temperature", "top_p", "top_k", "cache_salt", "vllm_xargs", "watermarking"),
    *("return_token_ids", "return_weight_versions"),
)
"""The parameters that the request of the pipeline has by the same names."""


Extra: TypeAlias = Annotated[Any, REFUSED]
"""A parameter that this server refuses in Anthropic's words, which clients know from servers that lack it."""


def _sent_extras(body: Body) -> list[str]:
    """Return the names of the parameters of an object that are refused, and that ask for something."""
    fields = type(body).model_fields.items()
    return [
        name for name, field in fields if REFUSED in field.metadata and getattr(body, name) not in (None, False, [])
    ]


class Thinking(Body):
    """The wish for thoughts; ``between_tools`` also turns them off: models here report nothing between calls."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Extra = None

    @property
    def is_off(self) -> bool:
        """True if the model is not to think."""
        return self.type in ("disabled", "between_tools")


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: Extra = None


class Keep(Body):
    type: Literal["all", "thinking_turns"]
    value: Annotated[int, Field(ge=1)] | None = None


class ClearThinking(Body):
    """An edit of the conversation: the model does not read its earlier thoughts."""

    type: Literal["clear_thinking_20251015"]
    keep: TextOr[Literal["all"], Keep] | None = None

    @property
    def thinking_turns(self) -> int | None:
        """The number of messages that keep their thoughts; None for all."""
        if self.keep is None:
            return 1
        return self.keep.value or 1 if isinstance(self.keep, Keep) and self.keep.type == "thinking_turns" else None


class ContextManagement(Body):
    edits: Annotated[list[ClearThinking], FAIL_FAST] | None = None


class GivenContainer(Body):
    """A container by its id."""

    id: str | None = None
    skills: Extra = None


class CountTokens(Body):
    """A request for the number of tokens of a prompt."""

    foreign: ClassVar[ForeignNames] = FOREIGN
    required: ClassVar[str] = "messages"

    model: str
    """A name that is served."""
    messages: Turns
    """The conversation, the oldest message first."""
    system: TextOr[str, TextBlocks] | None = None
    """Instructions for the model, as a text or as blocks of text."""
    tools: Annotated[list[MessageTool], FAIL_FAST] | None = None
    """Functions, which the client runs, and tools of the server."""
    tool_choice: MessageToolChoice | None = None
    """``auto``, ``any``, ``tool`` with a name, or ``none``."""
    thinking: Thinking | None = None
    """The wish for thoughts: the tokens that they may have, and whether they are shown."""
    output_config: OutputConfig | None = None
    """The ``effort`` of thoughts, and the ``format`` of the answer."""
    output_format: JsonFormat | None = None
    """The former name of the format of ``output_config``."""

    billing_policy: Unused = None
    cache_control: Unused = None
    compaction: Summarizing | None = None
    """Answer with a summary of the conversation; Anthropic counts the conversation as it is, too."""
    context_management: ContextManagement | None = None
    """Edits of the conversation: ``clear_thinking_20251015`` leaves out earlier thoughts."""
    mcp_servers: Extra = None
    speed: Unused = None
    thread: Extra = None

    @property
    def create_request(self) -> CreateResponse:
        """The request of the pipeline, which is not stored.

        Raises `InvalidRequest` for what Anthropic's types do not tell.
        """
        if not self._is_continued:
            check_not_empty(self.messages)
        for extra, tag in self._extras():
            raise not_permitted(extra, tag)
        return NOTHING_ASKED.model_copy(update=dict(self._values()))

    def _extras(self) -> Iterator[tuple[str, str | None]]:
        """Yield the places of the parameters that only Anthropic has, and the tag that its words have in them."""
        yield from ((name, None) for name in _sent_extras(self))
        if self.output_config is not None:
            yield from ((f"output_config.{name}", None) for name in _sent_extras(self.output_config))
        if self.thinking is not None:
            yield from ((f"thinking.{name}", self.thinking.type) for name in _sent_extras(self.thinking))

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield "model", self.model
        yield "store", False
        yield "input", self._conversation.items
        if self.system and (text := instructions(self.system)):
            yield "instructions", text
        offer = self._conversation.offer
        if self._tools:
            yield "tools", [offer.param(tool, f"tools[{position}]") for position, tool in self._tools]
        searches = [tool for tool in offer.tools if tool.searches]
        runs = [tool for tool in offer.tools if tool.executes]
        included = [SOURCES] * bool(searches or self._is_continued) + [OUTPUTS] * bool(runs or self._is_continued)
        if included := included + [LOGPROBS] * self._wants_logprobs:
            yield "include", included
        if most := sum(tool.max_uses or 0 for tool in searches):
            yield "max_tool_calls", most
        if self.tool_choice is not None:
            yield "parallel_tool_calls", not self.tool_choice.disable_parallel_tool_use
        if self.tool_choice is not None or offer.withdrawn:
            yield "tool_choice", offer.choice(self.tool_choice.choice if self.tool_choice else "auto")
        if (effort := self._effort) is not None:
            yield "reasoning", ReasoningOptionsParam(effort=effort)
        if self.thinking is not None and self.thinking.type == "enabled":
            yield "thinking_token_budget", self.thinking.budget_tokens
        if (form := (self.output_config and self.output_config.format) or self.output_format) is not None:
            shape = {"type": "json_schema", "name": "answer", "schema": form.schema_, "strict": True}
            yield "text", TextOptions.model_validate({"format": shape})

    @cached_property
    def _conversation(self) -> Conversation:
        kept = [edit.thinking_turns for edit in self._edits if edit.thinking_turns is not None]
        offer = Offer(self.tools or ())
        return Conversation(self._turns, min(kept, default=None), offer, is_continued=self._is_continued)

    @property
    def _turns(self) -> Sequence[Turn]:
        """The messages that the model reads."""
        return self.messages

    @property
    def _wants_logprobs(self) -> bool:
        """True if the answer shall have log probabilities."""
        return False

    @property
    def _edits(self) -> Sequence[ClearThinking]:
        return (self.context_management and self.context_management.edits) or ()

    @property
    def _is_continued(self) -> bool:
        """True if the server holds the messages before these."""
        return False

    @cached_property
    def _tools(self) -> list[tuple[int, MessageTool]]:
        """The tools with their positions, without those that are deferred."""
        return [(position, tool) for position, tool in enumerate(self.tools or ()) if not tool.is_deferred]

    @property
    def _effort(self) -> Effort | None:
        if self.thinking is not None and self.thinking.is_off:
            return "none"
        if self._conversation.effort is not None:
            return self._conversation.effort
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        if self.thinking is None or self.thinking.budget_tokens is None:
            return None
        budget = self.thinking.budget_tokens
        return next(effort for least, effort in _EFFORTS.items() if budget >= least)

    @property
    def display(self) -> Display:
        """The way in which thoughts are shown."""
        if self.thinking is not None and self.thinking.is_off:
            return "none"
        return "omitted" if self.thinking is not None and self.thinking.display == "omitted" else "shown"

    @property
    def place(self) -> Callable[[str], str]:
        """Return the place in this body of a parameter of the request."""
        places, tools = self._conversation.places, [position for position, _ in self._tools]

        def placed(param: str) -> str:
            if item := re.match(r"input\[(\d+)\](?:\.\w+\[(\d+)\])?", param):
                return places.of(int(item[1]), int(item[2]) if item[2] else None)
            if tool := re.match(r"tools\[(\d+)\]", param):
                field = param[tool.end() :].replace(".parameters", ".input_schema")
                return f"tools[{tools[int(tool[1])]}]{field}"
            return _PLACES.get(param, param)

        return placed


class CreateMessage(CountTokens):
    """A request for a message."""

    max_tokens: Annotated[int, Field(ge=0)]
    """The most tokens of the answer. With 0, the prompt is only read into the cache of the engine."""
    stream: bool | None = None
    """Send the answer as events while the model writes it."""
    stop_sequences: Annotated[list[StopText], Field(fail_fast=True, max_length=MOST_STOP_SEQUENCES)] | None = None
    """Texts, each of which ends the answer and is cut off."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """The randomness of the choice of each token: with 0, the likeliest one."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Choose among the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Choose among this many of the likeliest tokens."""

    # vLLM's extensions
    cache_salt: CacheSalt | None = None
    """A text that keeps the cached prefixes of this request apart from those of others."""
    vllm_xargs: ExtraArguments | None = None
    """Arguments for extensions of the engine."""
    watermarking: bool | None = None
    """Mark the output, if the engine can."""
    return_token_ids: bool | None = None
    """Return the ids of the tokens of the prompt and of the answer, as ``generations``."""
    return_weight_versions: bool | None = None
    """Return the versions of the weights that wrote the answer there, if the engine names them."""
    logprobs: bool | None = None
    """Return the log probabilities of the tokens of the answer there; it needs ``return_token_ids``."""

    container: TextOr[str, GivenContainer] | None = None
    """The container of an earlier answer: it changes nothing, as the messages have all that a program needs."""
    diagnostics: Unused = None
    fallback_credit_token: Unused = None
    fallbacks: Unused = None
    inference_geo: Annotated[Any, only("global")] = None
    """Only ``global``."""
    metadata: Unused = None
    service_tier: Unused = None
    thread: Thread | None = None
    """A thread to begin or to continue: the server holds its messages."""
    user_profile_id: Unused = None

    def _extras(self) -> Iterator[tuple[str, str | None]]:
        yield from super()._extras()
        sent = self.container
        given = GivenContainer(id=sent) if isinstance(sent, str) else sent or GivenContainer()
        if given.id is not None and not OWN_CONTAINER.fullmatch(given.id):
            yield "container", None
        yield from ((f"container.{name}", None) for name in _sent_extras(given))

    @property
    def create_request(self) -> CreateResponse:
        """The request of the pipeline, which is stored if it is a turn of a thread."""
        for name in self._unheld() if self.thread is not None else ():
            message = f"A thread cannot have {name} here. Send the whole conversation without `thread`."
            raise InvalidRequest(message, param=name, code=THREAD_UNSUPPORTED)
        if self.logprobs and not self.return_token_ids:
            message = "logprobs needs return_token_ids: true."
            raise InvalidRequest(message, param="logprobs", code="invalid_value")
        for param, is_set in self._unsummarized() if self.compaction is not None else ():
            if is_set:
                message = f"{param} cannot be combined with compaction."
                raise InvalidRequest(message, param=param, code="mutually_exclusive_parameters")
        if self.compaction is not None and self._conversation.offer.has_changed:
            raise not_permitted("compaction")  # the summary does not tell the tools
        if self.compaction is not None and self._conversation.has_open_program:
            raise not_permitted("compaction")  # the program would go on
        return super().create_request

    @property
    def _turns(self) -> Sequence[Turn]:
        return self.messages if self.compaction is None else [*self.messages, UserTurn(content=self.compaction.prompt)]

    def _unsummarized(self) -> Iterator[tuple[str, bool]]:
        """Yield the parameters that are about an answer, and True if they are set."""
        yield "context_management", self.context_management is not None
        yield "max_tokens", self.max_tokens == 0
        yield "output_config.format", self.output_config is not None and self.output_config.format is not None
        yield "stop_sequences", bool(self.stop_sequences)
        yield "tool_choice", self.tool_choice is not None and self.tool_choice.type in ("any", "tool")

    def _unheld(self) -> Iterator[str]:
        """Yield the names of what cannot be in a thread."""
        if any(edit.thinking_turns is not None for edit in self._edits):
            yield "context_management"
        if self.max_tokens == 0:
            yield "max_tokens: 0"
        yield from unheld(self.messages, self._defined)

    @property
    def _is_continued(self) -> bool:
        return isinstance(self.thread, ContinuedThread)

    @property
    def _wants_logprobs(self) -> bool:
        return self.logprobs is True

    @property
    def _defined(self) -> frozenset[str | None] | None:
        """The names of the tools of a turn that continues a thread; None for another request."""
        return frozenset(tool.name for tool in self.tools or ()) if self._is_continued else None

    @property
    def generates(self) -> bool:
        """False if the prompt is only read; raises `InvalidRequest` for a parameter that needs an answer then.

        See https://platform.claude.com/docs/en/build-with-claude/prompt-caching#pre-warming-the-cache.
        """
        if self.max_tokens > 0:
            return True
        needing = {
            "stream": self.stream,
            "thinking": self.thinking is not None and self.thinking.type == "enabled",
            "output_config.format": self.output_config is not None and self.output_config.format,
            "tool_choice": self.tool_choice is not None and self.tool_choice.type in ("any", "tool"),
        }
        for param, is_set in needing.items():
            if is_set:
                raise InvalidRequest(f"{param} needs a max_tokens of 1 or more.", param=param, code="invalid_value")
        return False

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield from super()._values()
        yield "store", self.thread is not None and self.compaction is None
        if isinstance(self.thread, ContinuedThread):
            yield "previous_response_id", self.thread.response_id
        if self.max_tokens:
            yield "max_output_tokens", self.max_tokens
        if self.stop_sequences:
            yield "stop", self.stop_sequences
        for name in _PASSED_ON:
            if (value := getattr(self, name)) is not None:
                yield name, value
        if self.compaction is not None:
            yield "tool_choice", "none"
            yield "truncation", "auto"
            yield "reasoning", ReasoningOptionsParam(effort="none" if super().display == "none" else "low")

    @property
    def display(self) -> Display:
        """The way in which thoughts are shown, or the summary alone."""
        return super().display if self.compaction is None else "summary"
