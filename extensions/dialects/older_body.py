"""The shared part of the bodies of OpenAI's older APIs: Chat Completions and Completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import Body, Refused, Unused, only
from penstock.pipeline.protocol.params.request import CreateResponse, Generating

MOST_CHOICES = 128
"""The most choices of one chat, or of one prompt."""


class StreamOptions(Body):
    """The parameters of the chunks of an answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class OlderBody(Generating):
    """A request with several choices, whose answer comes in chunks."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """The number of answers to each prompt."""
    stream_options: StreamOptions | None = None
    """``include_usage``, ``continuous_usage_stats`` and ``include_obfuscation``."""

    # vLLM's extensions that this server does not have
    length_penalty: Annotated[Any, only(1)] = None
    """Only 1: there is no beam search."""
    prompt_logprobs: Refused = None
    return_token_offsets: Refused = None
    return_tokens_as_token_ids: Refused = None
    routed_experts_prompt_start: Annotated[Any, only(0)] = None
    """Only 0: experts are not reported."""
    stream_interval: Unused = None
    truncate_prompt_tokens: Refused = None
    truncation_side: Refused = None
    use_beam_search: Refused = None

    @property
    def choices(self) -> int:
        """The number of choices, of each prompt."""
        return self.n or 1

    def of_each_choice(self, request: CreateResponse) -> list[CreateResponse]:
        """Return the request once for each choice: they differ in their seeds."""
        if self.seed is None:
            return [request] * self.choices
        return [request.model_copy(update={"seed": self.seed + choice}) for choice in range(self.choices)]

    def check_stream_options(self) -> None:
        """Raise `InvalidRequest` for options of a stream if the answer is none."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true.", param="stream_options", code="invalid_value")
