"""The generations of a response, by their tokens: what a trainer reads.

Their lists are JSON already, because they may be long, and are written once: for the client, the store and the log.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

IdList: TypeAlias = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "integer"}})]
"""A list of token ids as JSON."""

NumberList: TypeAlias = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "number"}})]
"""A list of numbers as JSON."""


class WeightSpan(msgspec.Struct, frozen=True, gc=False):
    """The tokens of an output that one version of the model's weights wrote."""

    version: str
    """The name of the version, as the engine has it."""
    start: int
    """The index of its first token in the output."""
    end: int
    """The index after its last token."""


class Generation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of the model, with what the request asks for."""

    prompt_token_ids: IdList | UnsetType = UNSET
    """The tokens that the model read."""
    token_ids: IdList | UnsetType = UNSET
    """The tokens that it wrote, those of thoughts, calls and markup included."""
    logprobs: NumberList | UnsetType = UNSET
    """The log probability of each of ``token_ids``, if the request wants log probabilities."""
    weight_versions: tuple[WeightSpan, ...] | UnsetType = UNSET
    """The versions of the weights that wrote them; without it, the engine names none."""
