"""The usage and costs of an organization, as OpenAI's API has them, for the operator.

A project is a team here, a user is the owner of a key, and an API key has its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal

import msgspec
from aiohttp import web

from penstock.api.http.auth import for_operators
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.query import Choice, Number, Parameter, Several
from penstock.extensions.accounts import reports
from penstock.extensions.accounts.ledger import DAY, Ledger, Sum
from penstock.pipeline.errors import InvalidRequest, StoreFailed

_MISSING = -1

START = Number("start_time", default=_MISSING, least=0, most=10**11, meaning="The time at which the report begins.")
END = Number(
    "end_time", default=_MISSING, least=0, most=10**11, meaning="The time before which it ends; now by default."
)
LIMIT = Number("limit", default=0, least=1, most=180, meaning="The most buckets of a page.")
LIMIT_OF_COSTS = Number("limit", default=7, least=1, most=180, meaning=LIMIT.meaning)

COLUMNS = {
    "project_id": "team",
    "user_id": "owner",
    "api_key_id": "key_name",
    "model": "model",
    "line_item": "model",
    "batch": "is_line",
}
"""The columns of the ledger, by the words of ``group_by``."""

LISTS = {
    "project_ids": "team",
    "user_ids": "owner",
    "api_key_ids": "key_name",
    "models": "model",
    "line_items": "model",
}
"""The columns of the ledger, by the parameters that choose values of them."""

_LISTS = reports.lists_of(LISTS)
_BATCH = Choice("batch", ("", "true", "false"), meaning="`true` for the lines of batches, `false` for all but these.")
_NAMES = ("project_id", "user_id", "api_key_id")
_UNKNOWN = ("service_tier", "api_source")
_GROUPS = Several(
    "group_by", (*_NAMES, "model", "batch", *_UNKNOWN), meaning="What tells the results of a bucket apart."
)
_GROUPS_OF_EMBEDDINGS = Several("group_by", (*_NAMES, "model"), meaning=_GROUPS.meaning)
_GROUPS_OF_COSTS = Several("group_by", (*_NAMES, "line_item", "api_source"), meaning=_GROUPS.meaning)

_CHOSEN: tuple[Parameter, ...] = tuple(_LISTS[name] for name in ("project_ids", "user_ids", "api_key_ids", "models"))
_QUERY = (START, END, reports.WIDTH, LIMIT, reports.PAGE, *_CHOSEN)
_QUERY_OF_COSTS = (
    *(START, END, reports.WIDTH_OF_COSTS, LIMIT_OF_COSTS, reports.PAGE, _GROUPS_OF_COSTS),
    *(_LISTS[name] for name in ("project_ids", "api_key_ids", "line_items")),
)
_REFUSALS = (InvalidRequest, StoreFailed)


class UsageBucket(msgspec.Struct, Generic[reports.Result], frozen=True):
    """The uses of one time, from ``start_time`` until ``end_time``; without a group, there is one result or none."""

    start_time: int
    end_time: int
    results: tuple[reports.Result, ...]
    object: Literal["bucket"] = "bucket"


class UsagePage(msgspec.Struct, Generic[reports.Result], frozen=True):
    """A page of buckets."""

    data: tuple[UsageBucket[reports.Result], ...]
    has_more: bool
    next_page: str | None
    object: Literal["page"] = "page"


class _Grouped(msgspec.Struct, frozen=True, kw_only=True):
    """The group of a result; None for what it is not grouped by."""

    project_id: str | None = None
    """The team."""
    user_id: str | None = None
    """The owner of the key."""
    api_key_id: str | None = None
    """The name of the key."""
    model: str | None = None


class CompletionsUsage(_Grouped, frozen=True, kw_only=True):
    """The use by answers that a model has written."""

    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    num_model_requests: int
    batch: bool | None = None
    service_tier: None = None
    api_source: None = None
    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"


class EmbeddingsUsage(_Grouped, frozen=True, kw_only=True):
    """The use by embeddings."""

    input_tokens: int
    num_model_requests: int
    object: Literal["organization.usage.embeddings.result"] = "organization.usage.embeddings.result"


class Amount(msgspec.Struct, frozen=True):
    """An amount of money."""

    value: float
    currency: str


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The costs by the prices at that time; without those that had no price."""

    amount: Amount
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    line_item: str | None = None
    """The model."""
    api_source: None = None
    quantity: None = None
    quantity_unit: None = None
    object: Literal["organization.costs.result"] = "organization.costs.result"


class CompletionsPage(UsagePage[CompletionsUsage], frozen=True):
    """A page of what answers have used."""


class EmbeddingsPage(UsagePage[EmbeddingsUsage], frozen=True):
    """A page of what embeddings have used."""


class CostsPage(UsagePage[Costs], frozen=True):
    """A page of costs."""


@dataclass(frozen=True)
class OpenAIUsage:
    """The routes over a ledger."""

    ledger: Ledger
    clock: Callable[[], float] = time.time

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        return (
            web.get(f"{base}/organization/usage/completions", self.completions),
            web.get(f"{base}/organization/usage/decisions", self.decisions),
            web.get(f"{base}/organization/usage/embeddings", self.embeddings),
            web.get(f"{base}/organization/costs", self.costs),
        )

    @for_operators
    @operation(Operation(CompletionsPage, query=(*_QUERY, _GROUPS, _BATCH), refusals=_REFUSALS))
    async def completions(self, request: web.Request) -> web.Response:
        """Report what answers have used that a model has written, by any API but that of decisions."""
        page = await self._page(request, _GROUPS, reports.is_generated, _of_completions)
        return as_json(CompletionsPage(*page))

    @for_operators
    @operation(Operation(CompletionsPage, query=(*_QUERY, _GROUPS, _BATCH), refusals=_REFUSALS))
    async def decisions(self, request: web.Request) -> web.Response:
        """Report what decisions have used."""
        page = await self._page(request, _GROUPS, reports.DECISIONS.__eq__, _of_completions)
        return as_json(CompletionsPage(*page))

    @for_operators
    @operation(Operation(EmbeddingsPage, query=(*_QUERY, _GROUPS_OF_EMBEDDINGS), refusals=_REFUSALS))
    async def embeddings(self, request: web.Request) -> web.Response:
        """Report what embeddings have used."""
        page = await self._page(request, _GROUPS_OF_EMBEDDINGS, "embeddings".__eq__, _of_embeddings)
        return as_json(EmbeddingsPage(*page))

    @for_operators
    @operation(Operation(CostsPage, query=_QUERY_OF_COSTS, refusals=_REFUSALS))
    async def costs(self, request: web.Request) -> web.Response:
        """Report what all requests cost that have a price."""
        currency = self.ledger.currency.lower()
        reports.WIDTH_OF_COSTS.read(request)
        width = reports.Width("day", DAY, default=LIMIT_OF_COSTS.default, most=LIMIT_OF_COSTS.most)
        page = await self._page(request, _GROUPS_OF_COSTS, lambda _: True, partial(_of_costs, currency), width)
        return as_json(CostsPage(*page))

    async def _page(
        self,
        request: web.Request,
        groups: Several,
        counts: Callable[[str], bool],
        result: Callable[[Sum, reports.By], reports.Result | None],
        width: reports.Width | None = None,
    ) -> tuple[tuple[UsageBucket[reports.Result], ...], bool, str | None]:
        """Return the fields of a page of results, which have only what they are grouped by."""
        if width is None:
            width = reports.width_of(reports.WIDTH.read(request))
        if (start := START.read(request)) == START.default:
            raise InvalidRequest(
                "Give the start_time of the report.", param="start_time", code="missing_required_parameter"
            )
        end = END.read(request)
        until = self.clock() if end == END.default else end
        span = reports.Span.of(start, until, width, LIMIT.read(request), reports.PAGE.read(request))
        by, where = reports.known(groups.read(request), COLUMNS), reports.chosen(request, _LISTS, LISTS)
        if batch := _BATCH.read(request):
            where["is_line"] = [int(batch == "true")]
        found = await reports.report(self.ledger, span, by, where, counts, result)
        buckets = tuple(UsageBucket(at, at + width.seconds, results) for at, results in found)
        return buckets, span.next_page is not None, span.next_page


def _of_completions(one: Sum, by: reports.By) -> CompletionsUsage:
    return CompletionsUsage(
        input_tokens=one.input_tokens,
        input_cached_tokens=one.cached_tokens,
        input_uncached_tokens=one.input_tokens - one.cached_tokens,
        output_tokens=one.output_tokens,
        num_model_requests=one.requests,
        **reports.group_of(one, by),
    )


def _of_embeddings(one: Sum, by: reports.By) -> EmbeddingsUsage:
    return EmbeddingsUsage(input_tokens=one.input_tokens, num_model_requests=one.requests, **reports.group_of(one, by))


def _of_costs(currency: str, one: Sum, by: reports.By) -> Costs | None:
    return None if one.cost is None else Costs(amount=Amount(one.cost, currency), **reports.group_of(one, by))
