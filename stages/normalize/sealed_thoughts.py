"""Sealed contents of items: open the text and the tokens of thoughts, and the summaries of compactions."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import InvalidEncryptedContent, InvalidRequest
from penstock.pipeline.frames import TokenIds
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.items import Compaction, Item, Reasoning, ReasoningText
from penstock.services.sealing import MOST_BYTES, SealedItem, SealedReasoning, SealedSummary, Sealer, Unverified

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 4
"""The bytes of a token id, at most, in a sealed text."""


@dataclass
class ThoughtOpener:
    """Opens the thoughts and the summary of one request, whose sender is ``owner``.

    The thoughts of a request have `MOST_BYTES` together, because one short text may hold a long thought, and a request
    may hold it many times.
    """

    sealer: Sealer | None
    """None if nothing is opened here."""
    owner: str
    forgives: bool = False
    """True if a thought that does not open is left out."""
    tokens: dict[str, TokenIds] = field(default_factory=dict)
    """The tokens that the engine generated for the thoughts and the items before them, by item id."""
    writers: dict[str, str] = field(default_factory=dict)
    """The served names of the models that generated these tokens, by item id; empty if unknown."""
    results: dict[str, str] = field(default_factory=dict)
    """The results of calls before the thoughts, as the model read them, by item id."""
    _left: int = MOST_BYTES
    _foreign: int = 0

    def sent(self, items: Iterable[Item], name: str, referenced: Collection[str]) -> list[Item]:
        """Return the items that a body has under ``name``, with the thoughts in them opened.

        Those with ``referenced`` ids are items of the store.  If another maker has sealed a thought, the model reads
        its plain content or its summary.  Raises `InvalidEncryptedContent` for a thought that was sealed here, but then
        changed, or sealed for another owner, unless it ``forgives``.
        """
        opened: list[Item] = []
        for position, item in enumerate(items):
            try:
                opened.append(self._opened_if_possible(item) if item.id in referenced else self._opened(item))
            except Unverified:
                if not self.forgives:
                    raise InvalidEncryptedContent(f"{name}[{position}]") from None
                opened.append(replace(item, encrypted_content=UNSET))
        if self._left < 0:
            raise InvalidRequest("The thoughts of this request are too long.", param=name)
        if self._foreign:
            logger.info("Left out what another server has encrypted in %s", counted(self._foreign, "reasoning item"))
        return opened

    def stored(self, items: Iterable[Item], known: Collection[str]) -> tuple[Item, ...]:
        """Return items of the store with the thoughts in them opened, except those with ``known`` tokens.

        They were accepted once: what no longer opens stays as it is.
        """
        return tuple(item if item.id in known else self._opened_if_possible(item) for item in items)

    def summary(self, compaction: Compaction) -> str | None:
        """Return the summary that a compaction holds; None if it is changed, or another maker's or owner's."""
        try:
            sealed = self.sealer and self.sealer.open(compaction.encrypted_content, self.owner, SealedSummary)
        except Unverified:
            return None
        return sealed.text if sealed else None

    def _opened_if_possible(self, item: Item) -> Item:
        try:
            return self._opened(item)
        except Unverified:
            return item

    def _opened(self, item: Item) -> Item:
        """Return an item with its thought, if one is sealed in it; raises `Unverified` if that does not open."""
        if type(item) is not Reasoning or item.encrypted_content is UNSET or self.sealer is None or self._left < 0:
            return item
        thought = self.sealer.open(item.encrypted_content, self.owner, SealedReasoning)
        if thought is None:
            self._foreign += 1
            return replace(item, encrypted_content=UNSET)
        for known in (*thought.before, SealedItem(item.id, thought.token_ids)):
            self._keep(known, thought.writer)
        self._left -= len(thought.text)
        return replace(item, content=(ReasoningText(thought.text),)) if thought.text else item

    def _keep(self, known: SealedItem, writer: str) -> None:
        self._left -= _TOKEN_BYTES * len(known.token_ids) + len(known.result or "")
        if known.token_ids:
            self.tokens[known.item_id], self.writers[known.item_id] = known.token_ids, writer
        if known.result is not None:
            self.results[known.item_id] = known.result
