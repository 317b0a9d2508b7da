"""Reports: the sums of the ledger in buckets of time, as the usage APIs of OpenAI and of Anthropic have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from aiohttp import web

from penstock.api.http.query import AnyText, AnyTexts, Choice
from penstock.extensions.accounts.ledger import DAY, HOUR, Ledger, Sum
from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.params.json_body import shortened

PASSED_ON = frozenset({"embeddings", "embed", "score", "rerank", "classify", "pooling"})
"""The APIs of requests that other servers answer, beside those of audio and images."""

DECISIONS = "decisions"

WIDTH = Choice("bucket_width", ("1d", "1h", "1m"), meaning="The width of a bucket; 1m is refused.")
WIDTH_OF_COSTS = Choice("bucket_width", ("1d",), meaning="The width of a bucket.")
PAGE = AnyText("page", meaning="`next_page` of the page before.")

Result = TypeVar("Result")

Where: TypeAlias = dict[str, Sequence[str | int]]
"""The values that count, by the columns of the ledger."""

By: TypeAlias = Mapping[str, str]
"""The columns of the ledger that tell results apart, by the words of ``group_by``."""

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


def lists_of(names: Iterable[str]) -> Mapping[str, AnyTexts]:
    """Return the parameters that choose values of a column, by their names."""
    return {name: AnyTexts(name, meaning=f"The {name.replace('_', ' ')} that count.") for name in names}


def chosen(request: web.Request, lists: Mapping[str, AnyTexts], columns: Mapping[str, str]) -> Where:
    """Return the values that a request chooses."""
    return {columns[name]: of for name, each in lists.items() if (of := each.read(request))}


def unknown(param: str, word: str) -> UnsupportedParameter:
    """Return the refusal of a word that nothing here has."""
    return UnsupportedParameter(f"Uses here have no {word}.", param=param)


def known(words: Iterable[str], columns: Mapping[str, str]) -> By:
    """Return the columns of the words of a ``group_by``; raises `UnsupportedParameter`."""
    for word in words:
        if word not in columns:
            raise unknown("group_by", word)
    return {word: columns[word] for word in words}


def group_of(one: Sum, by: By) -> dict[str, Any]:
    """Return what tells a sum apart, by the words of ``group_by``."""
    return {word: getattr(one, column) for word, column in by.items()}


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
    by: By,
    where: Where,
    counts: Callable[[str], bool],
    result: Callable[[Sum, By], Result | None],
) -> Sequence[tuple[int, tuple[Result, ...]]]:
    """Return the start of each bucket, with the results of its groups, of the APIs that count; raises `StoreFailed`."""
    words = (span.width.word, "api", *by.values())
    found = await ledger.sums(span.start, span.until, words, where) if span.starts else ()
    buckets: dict[int, dict[tuple[object, ...], Sum]] = {start: {} for start in span.starts}
    for one in found:
        if counts(one.api):
            groups, key = buckets[one.at], tuple(group_of(one, by).values())
            groups[key] = groups[key] + one if key in groups else one
    return [
        (start, tuple(each for one in groups.values() if (each := result(one, by)) is not None))
        for start, groups in buckets.items()
    ]
