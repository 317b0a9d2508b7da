"""Sampling for recordings: all responses, those whose request carries a header, or a fraction of all.

The fraction is chosen by a hash of the response id instead of at random, so that all callers get the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from penstock.pipeline.frames import Origin


def _everyone(owner: str) -> bool:
    return True


@dataclass(frozen=True)
class Condition:
    """A ``header`` that a request must carry, with this ``value`` unless it is None; without a header, a ``rate``.

    Nothing is recorded of an owner that ``allows`` no recording, be its response run at once, later or elsewhere.
    """

    header: str = ""
    value: str | None = None
    rate: float = 1.0
    allows: Callable[[str], bool] = field(default=_everyone, compare=False)

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse ``0.01``, ``x-record`` or ``x-record=yes``.  Raise `ValueError` for anything else."""
        try:
            rate = float(text)
        except ValueError:
            name, equals, value = text.partition("=")
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise ValueError(f"{text!r} is neither a rate between 0 and 1 nor the name of a header") from None
            return cls(name, value if equals else None)
        if not 0 < rate <= 1:
            raise ValueError(f"{text} is no rate between 0 and 1")
        return cls(rate=rate)

    def is_met_by(self, headers: Mapping[str, str]) -> bool:
        """True if a request with these headers asks to be recorded."""
        value = headers.get(self.header) if self.header else None
        return value is not None and self.value in (None, value)

    def chooses(self, response_id: str, origin: Origin) -> bool:
        """True if a response is to be recorded."""
        is_chosen = origin.recorded if self.header else crc32(response_id.encode()) < self.rate * 2**32
        return is_chosen and self.allows(origin.owner)

    def __str__(self) -> str:
        """Return the condition in words that follow "responses"."""
        if self.header:
            return f"whose request has the header {self.header}" + (f": {self.value}" if self.value is not None else "")
        return "of all requests" if self.rate == 1 else f"of {self.rate:.4g} of all requests"


ALWAYS = Condition()
