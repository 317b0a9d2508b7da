"""Completions as OpenAI's client hears them: its chunks, joined as its users join them."""

from __future__ import annotations

from typing import Any

from openai._models import construct_type
from openai.types import Completion

from penstock.api.dialects.named import spoken
from tests.support.chat_streams import chunks_of

(COMPLETIONS,) = (dialect for dialect in spoken() if dialect.name == "completions")

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def heard(stream: bytes) -> dict[str, Any]:
    """The completion that the chunks of a whole stream add up to, with nulls as a body has them."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for data in chunks_of(stream):
        read: Any = construct_type(type_=Completion, value=data)  # as the client does
        chunk = read.model_dump(exclude_unset=True)
        whole |= {key: value for key, value in chunk.items() if key != "usage" or value}
        for choice in chunk["choices"]:
            text, logprobs = choice.pop("text"), choice.pop("logprobs")
            known = choices.setdefault(choice["index"], {"text": "", "logprobs": None})
            known |= {key: value for key, value in choice.items() if value is not None or key not in known}
            known["text"] += text
            if logprobs:
                known["logprobs"] = known["logprobs"] or {name: [] for name in _LISTS}
                for name in _LISTS:
                    known["logprobs"][name] += logprobs[name]
    return whole | {"choices": [choice for _, choice in sorted(choices.items())]}
