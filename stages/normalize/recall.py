"""Recall: load what a request continues, and choose the ids and the time of its response.

They are chosen here and nowhere else, so that all later stages give the same output for the same input.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.pipeline import errors
from penstock.pipeline.logs import current_response
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.model_names import resolved_name, usable_names
from penstock.services.prompts import FilledRequest
from penstock.services.sealing import Sealer
from penstock.services.store.store import Store
from penstock.stages.normalize.frames import ModelTraits, RecalledRequest
from penstock.stages.normalize.input_items import references
from penstock.stages.normalize.parameters import refuse_foreign, refuse_unsupported
from penstock.stages.normalize.sealed_thoughts import ThoughtOpener

CONTINUABLE = frozenset({"completed", "incomplete"})
"""The statuses of responses that can be continued; all others have not ended, or have failed or been cancelled."""


def always(traits: ModelTraits) -> Callable[[str, str], Awaitable[ModelTraits]]:
    """Return a function that gives these traits for any model and owner."""

    async def traits_of(_model: str, _owner: str) -> ModelTraits:
        return traits

    return traits_of


usual_traits = always(ModelTraits())


def all_models(_owner: str) -> None:
    """Allow an owner all models."""


def any_writer(_writer: str, _model: str) -> bool:
    """Let a model read the tokens of all: there is only one."""
    return True


def draw_suffix() -> str:
    """Return the random part of a new response's id."""
    return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Load the history and the referenced items of a request for one of ``models``.

    ``draw`` returns the random part of a response's id, and ``clock`` the time in seconds since 1970.
    """

    store: Store
    models: Sequence[str]
    """The model names that a request may give; the first is the default."""
    traits_of: Callable[[str, str], Awaitable[ModelTraits]] = usual_traits
    """Gives the traits of one of the ``models`` for an owner, after it has loaded it if that is needed."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Patterns of other names that a request may give, each with one of the ``models``."""
    allowed: Callable[[str], Collection[str] | None] = all_models
    """Gives the patterns of the names that an owner may use; None for all."""
    reads: Callable[[str, str], bool] = any_writer
    """Tells if the tokens that the first model has generated are those of the second (see `reads_tokens`)."""
    sealer: Sealer | None = None
    """Opens what clients carry; None if nothing is sealed here."""
    draw: Callable[[], str] = draw_suffix
    clock: Callable[[], float] = time.time

    async def __call__(self, source: AsyncIterator[FilledRequest]) -> AsyncGenerator[RecalledRequest, None]:
        """Yield each request with what it continues.

        Raises `InvalidRequest` for a parameter that this server does not support, or an unknown model, response or
        conversation; raises `StoreFailed` if the history cannot be read.
        """
        async for filled in source:
            yield await self._recalled(filled)

    async def _recalled(self, filled: FilledRequest) -> RecalledRequest:
        request = filled.request
        refuse_unsupported(request)
        usable = usable_names(self.models, self.aliases, self.allowed(request.envelope.owner))
        model = usable[0] if request.model is None else request.model
        served = resolved_name(model, usable, self.aliases)
        traits = await self.traits_of(served, request.envelope.owner)
        refuse_foreign(request, traits)
        past = await self._past(request)
        referenced = await self._referenced(request)
        suffix = self.draw()
        current_response.set(f"resp_{suffix}")
        return RecalledRequest(
            filled=filled,
            model=model,
            served=served,
            traits=traits,
            past=past,
            referenced=referenced,
            thoughts=ThoughtOpener(self.sealer, request.envelope.owner, request.envelope.forgives),
            reads=partial(self._reads, served),
            suffix=suffix,
            now=self.clock(),
        )

    def _reads(self, served: str, writer: str) -> bool:
        return self.reads(writer, served)

    async def _past(self, request: CreateResponse) -> History:
        """Return the history that the request continues, empty if it continues nothing."""
        if (conversation_id := request.conversation_id) is not None:
            conversation = await self.store.conversations.items(conversation_id, request.envelope.owner)
            if conversation is None:
                keeps = self.store.keeps
                raise errors.no_conversation(shortened(conversation_id), param="conversation", keeps=keeps)
            return conversation
        if (previous := request.previous_response_id) is not None:
            return request.envelope.continued or await self._continued(previous, request.envelope.owner)
        return History((), {})

    async def _continued(self, previous: str, owner: str) -> History:
        chain = await self.store.chain(previous, owner)
        if not chain:
            raise errors.PreviousResponseNotFound(shortened(previous), keeps=self.store.keeps)
        if (status := chain[-1].response.status) not in CONTINUABLE:
            raise errors.PreviousResponseUnfinished(previous, status)
        return await self.store.history(chain)

    async def _referenced(self, request: CreateResponse) -> Mapping[str, Item]:
        """Return the stored items that the input refers to, by id."""
        given = request.input_items
        ids = await apart(len(given) > MANY_VALUES, references, given, "input")
        return await self.store.items(ids, request.envelope.owner) if ids else {}
