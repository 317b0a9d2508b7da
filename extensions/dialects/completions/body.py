"""The body of ``POST /v1/completions``, as openai-python 3.57 writes it, with vLLM's extras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, Tag

from penstock.extensions.dialects.older_body import OlderBody
from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.common import Refused, Unused, only
from penstock.pipeline.protocol.params.foreign_names import GUIDED, UNBUILT, ForeignNames
from penstock.pipeline.protocol.params.request import LOGPROBS, NOTHING_ASKED, CreateResponse
from penstock.pipeline.protocol.raw_prompt import RawPrompt

MOST_ANSWERS = 1024
"""The most choices of all prompts of a request together."""

DEFAULT_TOKENS = 16
"""The most tokens of a choice if the request does not limit them, as at OpenAI."""

_Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
_Tokens: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, min_length=1)]
_MANY: Any = Field(fail_fast=True, min_length=1, max_length=MOST_ANSWERS)


def _kind_of(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "as_text"
    match prompt[:1]:
        case [str()]:
            return "as_texts"
        case [list()]:
            return "as_token_lists"
        case _:
            return "as_tokens"


Prompts: TypeAlias = Annotated[
    Annotated[_Text, Tag("as_text")]
    | Annotated[list[_Text], _MANY, Tag("as_texts")]
    | Annotated[_Tokens, Tag("as_tokens")]
    | Annotated[list[_Tokens], _MANY, Tag("as_token_lists")],
    Discriminator(_kind_of),
]
"""One prompt or several, each a text or token ids."""


FOREIGN = ForeignNames(
    {
        **GUIDED,
        "input": "prompt",
        "messages": "prompt",
        "instructions": "prompt",
        "system": "prompt",
        "max_output_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "top_logprobs": "logprobs",
        "include": "logprobs",
        "stop_sequences": "stop",
        "text": "structured_outputs",
        "output_config": "structured_outputs",
        "response_format": "structured_outputs",
    },
    (
        *("background", "context_management", "conversation", "function_call", "functions", "max_tool_calls"),
        *("modalities", "previous_response_id", "reasoning", "reasoning_effort", "thinking", "tool_choice", "tools"),
        *("truncation", "verbosity", "web_search_options", *UNBUILT),
    ),
)
"""The parameters of chats, Responses and Messages that a completion does not have."""

PLACES: Mapping[str, str] = {
    "input": "prompt",
    "include": "logprobs",
    "top_logprobs": "logprobs",
    "max_output_tokens": "max_tokens",
}
"""The parameters of a completion by those of the request of the pipeline."""


class CompletionBody(OlderBody):
    """A request for the continuation of prompts."""

    foreign = FOREIGN
    required = "prompt"

    prompt: Prompts
    """One prompt or several, each a text or a list of token ids."""
    best_of: int | None = None
    """Only 1 or ``n``: every answer is returned."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """The most tokens of each answer; 16 by default."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """The number of likeliest tokens at each place whose log probabilities are returned."""
    echo: bool | None = None
    """Put the prompt before the text."""
    add_special_tokens: bool | None = None
    """Put the tokens before and after a text that the vocabulary adds; true by default."""
    suffix: Refused = None

    # of conversations
    store: Refused = None
    chat_template: Refused = None
    chat_template_kwargs: Refused = None
    include_reasoning: Unused = None
    parallel_tool_calls: Unused = None

    # vLLM's extensions that this server does not have
    prompt_embeds: Refused = None
    thinking_token_budget: Annotated[Any, only(-1)] = None
    """Only -1: a completion has no thoughts."""

    @property
    def create_requests(self) -> Sequence[CreateResponse]:
        """The requests of the pipeline: for each prompt, one for each choice."""
        prompts = self._prompts
        self._check(len(prompts))
        requests = self.of_each_choice(self._create_request)
        return [each.continuing(prompt) for prompt in prompts for each in requests]

    @property
    def _create_request(self) -> CreateResponse:
        """The request of one choice, without its prompt."""
        limit = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        values: dict[str, Any] = self.given | {"store": False, "max_output_tokens": limit or 1}
        if self.logprobs is not None:
            values["top_logprobs"], values["include"] = self.logprobs, [LOGPROBS]
        return NOTHING_ASKED.model_copy(update=values)

    @property
    def _prompts(self) -> list[RawPrompt]:
        match self.prompt:
            case str():
                return [self._raw(text=self.prompt)]
            case [str(), *_]:
                return [self._raw(text=text) for text in self.prompt]  # type: ignore[arg-type]
            case [list(), *_]:
                return [self._raw(token_ids=tuple(ids)) for ids in self.prompt]  # type: ignore[arg-type]
            case ids:
                return [self._raw(token_ids=tuple(ids))]  # type: ignore[arg-type]

    def _raw(self, text: str = "", token_ids: tuple[int, ...] = ()) -> RawPrompt:
        return RawPrompt(
            text,
            token_ids,
            adds_special=self.add_special_tokens is not False,
            shows_special=self.skip_special_tokens is False,
            echoes=self.echo is True,
            generates=self.max_tokens != 0,
        )

    def _check(self, prompts: int) -> None:
        if self.best_of not in (None, 1, self.choices):
            raise UnsupportedParameter("Every choice is returned here: best_of should be n.", param="best_of")
        self.check_stream_options()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 needs echo: true.", param="max_tokens", code="invalid_value")
        if prompts * self.choices > MOST_ANSWERS:
            message = f"These are {prompts * self.choices} choices, and a request may have {MOST_ANSWERS}."
            raise InvalidRequest(message, param="n", code="integer_above_max_value")
