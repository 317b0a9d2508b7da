"""The frames between the stages inside ``normalize``: a request, and what is known of it so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.items import Compaction, Item
from penstock.pipeline.protocol.light import are_light
from penstock.pipeline.protocol.params.items import CompactionTriggerItem, InputItem
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import Toolset
from penstock.services.file_reading import PlacedFile
from penstock.services.prompts import FilledRequest
from penstock.stages.normalize.sealed_thoughts import ThoughtOpener
from penstock.stages.normalize.toolset import ToolsetBuilder


@dataclass(frozen=True)
class ModelTraits:
    """Facts about the model that decide how its requests are read."""

    sees_images: bool = False
    has_template: bool = False
    """True if the model has a chat template, and so does not speak Harmony."""
    takes_prompts: bool = True
    """False if prompts are laid out elsewhere, so that no client can lay out one."""
    tools: frozenset[str] | None = None
    """The built-in tools, by namespace, and those of the operator's own that the model may use; None for all."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """vLLM's sampling defaults for the model, such as ``temperature``, for parameters that a request leaves out.

    They come from its generation config, or from the operator.  ``max_tokens`` also bounds the requests' own.
    """


@dataclass(frozen=True, kw_only=True)
class RecalledRequest:
    """A request, what it continues, and the ids and the time of its response."""

    filled: FilledRequest
    model: str
    """The name of the model in the response."""
    served: str
    """The name by which the engine serves it."""
    traits: ModelTraits
    past: History
    """The history that the request continues; empty if it continues nothing."""
    referenced: Mapping[str, Item]
    """The stored items that the input refers to, by id; an unknown id is missing."""
    thoughts: ThoughtOpener
    reads: Callable[[str], bool]
    """Tells if the model can read the tokens that the model of a served name has generated."""
    suffix: str
    """The random part of the ids."""
    now: float
    """The time in seconds since 1970."""

    @property
    def request(self) -> CreateResponse:
        """The parameters."""
        return self.filled.request

    @property
    def owner(self) -> str:
        """The owner of the request."""
        return self.request.envelope.owner

    @cached_property
    def sent(self) -> Sequence[InputItem]:
        """The items of the input."""
        return self.request.input_items

    @property
    def compacts_at_once(self) -> bool:
        """True if the input ends with a wish to have the conversation compacted now."""
        return bool(self.sent) and isinstance(self.sent[-1], CompactionTriggerItem)

    @property
    def given(self) -> Sequence[InputItem]:
        """The items of the input, without that wish."""
        return self.sent[:-1] if self.compacts_at_once else self.sent

    @property
    def is_light(self) -> bool:
        """True if the request is read in less time than a thread takes to begin."""
        request = self.request
        texts = request.text, request.structured_outputs, request.previous_input_messages
        is_plain = not request.tools and not any(texts)
        return is_plain and are_light((*self.past.items, *self.sent), request.instructions)


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """A request whose items and tools are read, and joined to those that it continues."""

    recalled: RecalledRequest
    history: tuple[Item, ...]
    items: tuple[Item, ...]
    """The items of the input that are not in the history."""
    toolset: Toolset
    offered: ToolsetBuilder
    said: tuple[str, ...]
    """The ids of the messages that the client sends now."""
    tokens: Mapping[str, TokenIds]
    """The tokens of the calls in raw messages, by item id."""
    results: Mapping[str, str]
    """The results of these calls, by item id."""
    approved: Collection[str]
    """The ids of the approvals in the input whose calls are not in it: they may have been used by another response."""
    run_here: Sequence[str]
    """The ids of the calls in the input that this server may have run."""
    latest: Compaction | None
    """The latest compaction."""
    files: Sequence[PlacedFile]
    """The files that the model reads."""
    surplus: Sequence[PlacedFile]
    """Files beyond the number that a conversation may have."""
    unseen: Mapping[str, str]
    """The URLs of images that cannot be shown, each with the reason."""
    updates: Mapping[str, Any]
    """The ``effort`` and the ``format`` that items have set."""
    containers: Sequence[str]
    """The containers of earlier calls, the latest first."""
