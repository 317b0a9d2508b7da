"""The places in a body that the items of a conversation came from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeAlias

Block: TypeAlias = tuple[int, int | None]
"""The position of a block in its message, and that of a block within it, which only a result has."""


class Places:
    """The messages and blocks that items came from, as numbers: a request may have many, and frees them all at once."""

    def __init__(self) -> None:
        self._messages = array("I")
        self._begins = array("I")
        """The index in ``_blocks`` at which each item begins."""
        self._blocks = array("i")
        """Both positions of each block; -1 stands for None."""

    def add(self, message: int, blocks: Iterable[Block]) -> None:
        """Add an item, with the blocks of its parts."""
        self._messages.append(message)
        self._begins.append(len(self._blocks))
        for block, inner in blocks:
            self._blocks.extend((block, -1 if inner is None else inner))

    def of(self, item: int, part: int | None) -> str:
        """Return the place of an item, or of one of its parts, in the body."""
        message = f"messages[{self._messages[item]}]"
        end = self._begins[item + 1] if item + 1 < len(self._begins) else len(self._blocks)
        if part is None or (at := self._begins[item] + 2 * part) >= end:
            return message
        block, inner = self._blocks[at : at + 2]
        return f"{message}.content[{block}]" + (f".content[{inner}]" if inner >= 0 else "")
