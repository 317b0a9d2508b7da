"""Reports: the sums of the ledger in buckets of time, as the usage APIs of OpenAI and of Anthropic have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.extensions.accounts.ledger import HOUR, Ledger, Sum
from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.json_body import shortened

DAY = 24 * HOUR
"""Seconds of a day."""

PASSED_ON = frozenset({"embeddings", "embed", "score", "rerank", "classify", "pooling"})
"""The APIs of requests that other servers answer, beside those of audio and images."""

DECISIONS = "decisions"

_PAGE = re.compile(r"page_([0-9]{1,12})")


class Width(NamedTuple):
    """The width of the buckets of a report."""

    word: str
    """The word of the ledger for the time of a bucket."""
    seconds: int
    default: int
    """The buckets of a page, if a request says no number."""
    most: int


WIDTHS = {"1d": Width("day", DAY, 7, 31), "1h": Width("hour", HOUR, 24, 168)}
"""The widths of buckets; the ledger keeps no minutes."""


def width_of(word: str) -> Width:
    """Return the width that a word names; raises `UnsupportedParameter`."""
    if word not in WIDTHS:
        raise UnsupportedParameter("Use is added up by the hour: ask for 1h or 1d.", param="bucket_width")
    return WIDTHS[word]


def is_generated(api: str) -> bool:
    """True for the API of an answer that a model wrote, to a prompt."""
    return api != DECISIONS and api not in PASSED_ON and not api.startswith(("audio/", "images/"))


@dataclass(frozen=True)
class Span:
    """The buckets of one page of a report, from ``start`` until ``end``; those after it are of the next page."""

    start: int
    end: int
    """The end of the last bucket."""
    until: int
    """The time before which uses count."""
    width: Width
    next_page: str | None

    @classmethod
    def of(cls, since: float, until: float, width: Width, limit: int, page: str | None) -> Span:
        """Return the buckets for a request; raises `InvalidRequest`."""
        limit = limit or width.default
        if limit > width.most:
            raise InvalidRequest(
                f"limit is at most {width.most} for this bucket_width, not {limit}.",
                param="limit",
                code="integer_above_max_value",
            )
        start = int(since) // width.seconds * width.seconds
        if page is not None:
            found = _PAGE.fullmatch(page)
            if not found or (at := int(found[1])) % width.seconds or at < start:
                raise InvalidRequest(f"There is no page {shortened(page)!r} of this report.", param="page")
            start = at
        whole = max(start, -int(-until // width.seconds) * width.seconds)
        end = min(whole, start + limit * width.seconds)
        return cls(
            start,
            end=end,
            until=min(end, int(-(-until // 1))),
            width=width,
            next_page=None if end == whole else f"page_{end}",
        )

    @property
    def starts(self) -> Sequence[int]:
        """The starts of the buckets."""
        return range(self.start, self.end, self.width.seconds)


async def report(
    ledger: Ledger,
    span: Span,
    by: Sequence[str],
    where: Mapping[str, Sequence[str | int]],
    counts: Callable[[str], bool],
) -> Iterator[tuple[int, Sequence[Sum]]]:
    """Return the start of each bucket, with the sums of its groups, of the APIs that count; raises `StoreFailed`."""
    found = await ledger.sums(span.start, span.until, (span.width.word, "api", *by), where) if span.starts else ()
    buckets: dict[int, dict[tuple[object, ...], Sum]] = {start: {} for start in span.starts}
    for one in found:
        if counts(one.api):
            groups, key = buckets[one.at], tuple(getattr(one, word) for word in by)
            groups[key] = groups[key] + one if key in groups else one
    return ((start, tuple(groups.values())) for start, groups in buckets.items())
