"""Names of parameters of other APIs, which are refused: a client that sends one means something by it.

Ignored, a bound such as ``max_tokens`` or a format would be lost in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ForeignNames:
    """The names of other APIs that an API does not have.

    ``meant`` has the parameter of this API that means the same, by the foreign name.  Nothing here is like those of
    ``only_there``.
    """

    meant: Mapping[str, str]
    only_there: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.meant, *self.only_there)

    def mistaken(self, body: Mapping[str, Any]) -> tuple[str, str | None] | None:
        """Return the first foreign name in a body that asks for something, and the name that is meant, if any."""
        for name in self.names:
            if name in body and _asks(name, body[name]):
                return name, self.meant.get(name)
        return None


GUIDED: Mapping[str, str] = dict.fromkeys(
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"
)
"""The former names of vLLM's constraints."""

UNBUILT = ("detokenize", "logits_processors")
"""Parameters of vLLM's engine that no API has here."""

MEANT: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "function_call": "tool_choice",
    "web_search_options": "tools",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "truncation",
    "truncation_side": "truncation",
    "add_generation_prompt": "chat_template_kwargs",
    "documents": "chat_template_kwargs",
    **GUIDED,
    "system": "instructions",
    "stop_sequences": "stop",
    "thinking": "reasoning",
    "output_config": "text.format",
}

ONLY_THERE = (
    *("n", "best_of", "audio", "modalities", "prediction", "suffix", "prompt_embeds", "prompt_logprobs", "echo"),
    *("use_beam_search", "length_penalty", "continue_final_message"),
    *("add_special_tokens", "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
    *("routed_experts_prompt_start", "stream_interval", *UNBUILT),
)

OF_CHATS = ForeignNames(MEANT, ONLY_THERE)
"""The names of OpenAI's and vLLM's Chat Completions and Completions that a request for a response does not have."""

ON = (
    *("add_generation_prompt", "add_special_tokens", "detokenize", "include_reasoning", "parallel_tool_calls"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
"""The parameters that are true if a request lacks them."""

_AS_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "modalities": (["text"],),
    "length_penalty": (1,),
    **dict.fromkeys(ON, (True,)),
    "routed_experts_prompt_start": (0,),
}
"""The values beside null, false and empty lists with which a parameter does nothing."""


def _asks(name: str, value: Any) -> bool:
    is_off = value is False and name not in ON
    return value is not None and not is_off and value != [] and value not in _AS_WITHOUT.get(name, ())
