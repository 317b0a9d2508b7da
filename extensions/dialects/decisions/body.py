"""The body of ``POST /v1/decisions``, as openai-python 3.52 writes it, with vLLM's ``cache_salt``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field, StringConstraints

from penstock.extensions.dialects.decisions.conversation import DecisionInput, item_of
from penstock.extensions.dialects.decisions.labels import Label, groups_of, tokens_of
from penstock.extensions.dialects.decisions.questions import MOST_QUESTIONS, ChoiceQuestion, Questions, message_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.common import Body, Refused, at_most
from penstock.pipeline.protocol.params.request import (
    LOGPROBS,
    NOTHING_ASKED,
    CacheSalt,
    CreateResponse,
    PromptCacheOptions,
    ReasoningOptionsParam,
)

ONE_TOKEN: dict[str, Any] = {
    "store": False,
    "max_output_tokens": 1,
    "include": [LOGPROBS],
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "reasoning": ReasoningOptionsParam(effort="none"),
}
"""The parameters with which a model answers by one token, whose log probabilities nothing changes."""


class DecisionCacheOptions(PromptCacheOptions):
    model_config = ConfigDict(extra="forbid")


class Asked(NamedTuple):
    """A request about the question at a position; one with many options takes several, each for some ``labels``."""

    question: int
    message: params.InputItem
    allowed: TokenIds
    """The tokens of all options."""
    labels: Sequence[Label]


class DecisionBody(Body):
    """Questions about one input, each with the answers that it may have."""

    model_config = ConfigDict(extra="forbid")
    required: ClassVar[str] = "questions"

    model: str | None = None
    """A name that is served; the first one by default."""
    input: DecisionInput
    """The subject of the questions: a text, or items."""
    questions: Annotated[Questions, at_most(MOST_QUESTIONS, "questions"), Field(min_length=1)]
    """The questions: ``predicate``, ``choice`` or ``score``, each with its options."""
    prompt_cache_key: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Salts the prefix cache, if the operator has it so."""
    prompt_cache_options: DecisionCacheOptions | None = None
    """Accepted: the engine caches prefixes by itself."""
    safety_identifier: Annotated[str, StringConstraints(max_length=128)] | None = None
    """The client's stable name for its user."""

    # vLLM's extensions
    cache_salt: CacheSalt | None = None
    """A text that keeps the cached prefixes of this request apart from those of others."""
    joint: Refused = None

    def asked(self, labels: Sequence[Label]) -> Iterator[Asked]:
        """Yield the requests about all questions, in their order.

        Raises `InvalidRequest` for equal choices, and for more options than there are ``labels``.
        """
        for position, question in enumerate(self.questions):
            path = f"questions[{position}]"
            if isinstance(question, ChoiceQuestion):
                _check_choices(question, path)
            own = labels[: len(question.options)]
            if len(own) < len(question.options):
                param = f"{path}.{question.options_field}" if question.options_field else path
                message = f"The vocabulary of this model has letters for {len(labels)} options (at {param})"
                raise InvalidRequest(message, param=param, code="array_above_max_length")
            asked = Asked(position, message_of(question, own, path), tokens_of(own), own)
            for group in groups_of(own):
                yield asked._replace(labels=group)

    @property
    def request(self) -> CreateResponse:
        """The parameters of all requests."""
        names = ("model", "prompt_cache_key", "safety_identifier", "cache_salt")
        given = {name: getattr(self, name) for name in names}
        return NOTHING_ASKED.model_copy(
            update=ONE_TOKEN | {name: value for name, value in given.items() if value is not None}
        )

    def about(self, asked: Asked, request: CreateResponse) -> CreateResponse:
        """Return the common request about a question."""
        own = {
            "input": [*self._items, asked.message, _BEGINNING],
            "allowed_token_ids": [*asked.allowed],
            "logprob_token_ids": [*tokens_of(asked.labels)],
        }
        return request.model_copy(update=own)

    def place(self, question: int, param: str) -> str:
        """Return the place in this body of a parameter of a request about a question."""
        if inside := re.fullmatch(rf"input\[{len(self._items)}\](?:\.content\[(\d+)\](.*))?", param):
            path = f"questions[{question}].instructions"
            is_text = inside[1] is None or isinstance(self.questions[question].instructions, str)
            return path if is_text else f"{path}[{int(inside[1]) - 1}]{inside[2]}"  # after the words around it
        if param in ("allowed_token_ids", "logprob_token_ids"):
            return f"questions[{question}]"
        return "input" if isinstance(self.input, str) and param.startswith("input[") else param

    @cached_property
    def _items(self) -> Sequence[params.InputItem]:
        if isinstance(self.input, str):
            return [params.message("user", self.input)]
        return [item_of(item, f"input[{position}]") for position, item in enumerate(self.input)]


_BEGINNING = params.message("assistant", "", "incomplete")
"""The beginning of the answer, before its first word: the model does not think first."""


def _check_choices(question: ChoiceQuestion, path: str) -> None:
    """Raise `InvalidRequest` for a choice that is equal to one before it; a text is no truth value."""
    values = set[tuple[type, str | bool]]()
    for position, choice in enumerate(question.choices):
        value = (type(choice.value), choice.value)
        if value in values:
            param = f"{path}.choices[{position}].value"
            raise InvalidRequest(f"Another choice has this value (at {param})", param=param, code="invalid_value")
        values.add(value)
