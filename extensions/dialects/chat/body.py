"""The body of ``POST /v1/chat/completions``, as openai-python 3.57 writes it, with vLLM's extras."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from penstock.extensions.dialects.chat.messages import ChatMessages, Conversation
from penstock.extensions.dialects.chat.tools import Choice, CustomTool, FunctionTool
from penstock.extensions.dialects.older_body import OlderBody
from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.common import FAIL_FAST, REFUSED, Body, Name, Refused, Unused, only, refuse
from penstock.pipeline.protocol.params.foreign_names import GUIDED, UNBUILT, ForeignNames
from penstock.pipeline.protocol.params.refusal import UNSUPPORTED
from penstock.pipeline.protocol.params.request import (
    LOGPROBS,
    NOTHING_ASKED,
    CreateResponse,
    JsonObjectFormat,
    ReasoningOptionsParam,
    TextOptions,
)
from penstock.pipeline.protocol.params.tools import (
    JsonSchemaFormat,
    TextFormat,
    ToolChoice,
    ToolParam,
    UserLocation,
    WebSearchToolParam,
)
from penstock.pipeline.protocol.response import Effort


class JsonSchema(Body):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def format(self) -> JsonSchemaFormat:
        """The format as the Responses API has it; without a schema, any JSON fits."""
        given = {"schema": {}} | self.json_schema.model_dump(by_alias=True, exclude_none=True)
        return JsonSchemaFormat.model_validate({"type": "json_schema", **given})


ResponseFormat: TypeAlias = Annotated[TextFormat | SchemaFormat | JsonObjectFormat, Field(discriminator="type")]


class ChatLocation(Body):
    type: Literal["approximate"]
    approximate: UserLocation


class WebSearchOptions(Body):
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: ChatLocation | None = None


def _as_text(modalities: list[str]) -> list[str]:
    if modalities != ["text"]:
        raise PydanticCustomError(UNSUPPORTED, "Models write text here: this should be ['text']")
    return modalities


FOREIGN = ForeignNames(
    {
        **GUIDED,
        "input": "messages",
        "instructions": "messages",
        "prompt": "messages",
        "system": "messages",
        "max_output_tokens": "max_completion_tokens",
        "text": "response_format",
        "output_config": "response_format",
        "include": "logprobs",
        "reasoning": "reasoning_effort",
        "thinking": "reasoning_effort",
        "stop_sequences": "stop",
    },
    (
        *("background", "best_of", "context_management", "conversation", "max_tool_calls", "previous_response_id"),
        *("enable_response_messages", "previous_input_messages", "suffix", "truncation", *UNBUILT),
    ),
)
"""The parameters of Responses, Completions and Messages that a chat does not have."""


_RENAMED = {
    "input": "messages",
    "include": "logprobs",
    "text.verbosity": "verbosity",
    "reasoning.effort": "reasoning_effort",
}
"""The parameters of a chat by those of the request of the pipeline."""

_RENAMED_FIELDS = {"output": "content", "call_id": "tool_call_id"}
"""The fields of a message by those of an item."""


@dataclass(frozen=True)
class Places:
    """The places in a body of the parameters of its request."""

    messages: Sequence[int]
    """The position of the message that each item is in."""
    tools: Sequence[Literal["function", "custom"]]
    """The type of each tool."""
    limit: str
    """The name of the limit of the answer."""

    def __call__(self, param: str) -> str:
        """Return the place of a parameter."""
        if item := re.fullmatch(r"input\[(\d+)\](?:\.(\w+))?(.*)", param):
            field = item[2] and f".{_RENAMED_FIELDS.get(item[2], item[2])}"
            return f"messages[{self.messages[int(item[1])]}]{field or ''}{item[3]}"
        if tool := re.fullmatch(r"tools\[(\d+)\](.*)", param):
            position = int(tool[1])
            has_it = position < len(self.tools)
            return f"tools[{position}].{self.tools[position]}{tool[2]}" if has_it else "web_search_options"
        if param.startswith("tool_choice.tools"):
            return param.replace(".", ".allowed_tools.", 1)
        if param.startswith("text.format"):
            return param.replace("text.format", "response_format.json_schema", 1)
        return self.limit if param == "max_output_tokens" else _RENAMED.get(param, param)


class ChatBody(OlderBody):
    """A request for a chat completion."""

    foreign = FOREIGN
    required = "messages"

    messages: ChatMessages
    """The conversation, the oldest message first."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of the answer, its reasoning included."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The same by its former name; ``max_completion_tokens`` counts if both are given."""
    tools: Annotated[list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]], FAIL_FAST] | None = None
    """Functions and custom tools, which the client runs."""
    tool_choice: Choice | None = None
    """``auto``, ``none``, ``required``, one tool, or ``allowed_tools``."""
    response_format: ResponseFormat | None = None
    """The form of the answer: text, any JSON object, or JSON of a schema."""
    reasoning_effort: Effort | None = None
    """The amount of thought, from ``none`` to ``max``."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ask for short (``low``) or detailed (``high``) answers."""
    logprobs: bool | None = None
    """Return the log probability of each token of the answer."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """The number of likeliest tokens at each place; it needs ``logprobs``."""
    web_search_options: WebSearchOptions | None = None
    """Give the model this server's web search, if it has one."""
    modalities: Annotated[list[str], AfterValidator(_as_text)] | None = None
    """Only ``["text"]``: models write text here."""
    prediction: Unused = None

    audio: Refused = None
    functions: Annotated[Any, refuse("send tools"), REFUSED] = None
    function_call: Annotated[Any, only("none", "auto", cure="send tools and tool_choice")] = None
    """Only ``none`` or ``auto``: send ``tools`` and ``tool_choice``."""

    # vLLM's extensions
    add_generation_prompt: bool | None = None
    """Begin a new answer, unless the last message is continued; true by default."""
    continue_final_message: bool | None = None
    """Continue the last message, which is the assistant's."""

    # vLLM's extensions that this server does not have
    add_special_tokens: Refused = None
    documents: Refused = None
    echo: Refused = None
    return_prompt_text: Refused = None

    @property
    def create_requests(self) -> Sequence[CreateResponse]:
        """The requests of the pipeline, one for each choice."""
        return self.of_each_choice(self._create_request)

    @property
    def _create_request(self) -> CreateResponse:
        """The request of one choice; it is stored only if the client asks."""
        self._check_options()
        values: dict[str, Any] = self.given
        values["store"] = self.store is True
        values["input"] = self._conversation.items
        if (limit := self.max_completion_tokens or self.max_tokens) is not None:
            values["max_output_tokens"] = limit
        if tools := [*(tool.tool for tool in self.tools or ()), *self._search]:
            values["tools"] = tools
        if (choice := self._choice) is not None:
            values["tool_choice"] = choice
        if (text := self._text) is not None:
            values["text"] = text
        if self.reasoning_effort is not None:
            values["reasoning"] = ReasoningOptionsParam(effort=self.reasoning_effort)
        if self.logprobs:
            values["top_logprobs"], values["include"] = self.top_logprobs or 0, [LOGPROBS]
        return NOTHING_ASKED.model_copy(update=values)

    @property
    def places(self) -> Places:
        """The places in this body of the parameters of the request."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return Places(self._conversation.places, [tool.type for tool in self.tools or ()], limit)

    @cached_property
    def _conversation(self) -> Conversation:
        return Conversation(self.messages, continues=self.continue_final_message is True)

    def _check_options(self) -> None:
        if not self.messages:
            raise InvalidRequest("A chat needs a message.", param="messages", code="empty_array")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs", code="invalid_value")
        self.check_stream_options()
        if self.choices > 1 and self.store:
            raise UnsupportedParameter("A stored completion has one choice.", param="n")
        if self.return_token_ids and self.store:
            raise UnsupportedParameter("A stored completion has no token ids.", param="return_token_ids")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise UnsupportedParameter(
                "The model writes an answer, or continues one with continue_final_message: true.",
                param="add_generation_prompt",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other.",
                param="continue_final_message",
                code="mutually_exclusive_parameters",
            )

    @property
    def _search(self) -> Sequence[ToolParam]:
        if self.web_search_options is None:
            return ()
        options, location = self.web_search_options, self.web_search_options.user_location
        where = location and location.approximate.model_copy(update={"type": "approximate"})
        return (
            WebSearchToolParam.built(
                type="web_search", search_context_size=options.search_context_size, user_location=where
            ),
        )

    @property
    def _choice(self) -> ToolChoice | None:
        return self.tool_choice if isinstance(self.tool_choice, str | None) else self.tool_choice.choice

    @property
    def _text(self) -> TextOptions | None:
        form = self.response_format
        if form is None and self.verbosity is None:
            return None
        shape = form.format if isinstance(form, SchemaFormat) else form
        values = {"format": shape and shape.model_dump(by_alias=True, exclude_unset=True), "verbosity": self.verbosity}
        return TextOptions.model_validate({name: value for name, value in values.items() if value is not None})
