"""The usage and cost reports of an organization, as Anthropic's API has them, for the operator.

A workspace is a team here, an account is the owner of a key, and an API key has its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Generic, Literal

import msgspec
from aiohttp import web

from penstock.api.http.auth import for_operators
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.query import AnyText, AnyTexts, Number, Several
from penstock.extensions.accounts import reports
from penstock.extensions.accounts.ledger import Ledger, Sum
from penstock.pipeline.errors import InvalidRequest, StoreFailed
from penstock.pipeline.protocol.params.json_body import shortened

START = AnyText("starting_at", meaning="The time in whose bucket the report begins, by RFC 3339.")
END = AnyText("ending_at", meaning="The time before which it ends; now by default.")
LIMIT = Number("limit", default=0, least=1, most=168, meaning="The most buckets of a page.")

LATEST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""The latest time of a report, in seconds since 1970: no later day has an end that can be written."""

COLUMNS = {
    "workspace_id": "team",
    "account_id": "owner",
    "api_key_id": "key_name",
    "model": "model",
    "description": "model",
    "service_tier": "is_line",
}
"""The columns of the ledger, by the words of ``group_by``."""

LISTS = {"workspace_ids": "team", "account_ids": "owner", "api_key_ids": "key_name", "models": "model"}
"""The columns of the ledger, by the parameters that choose values of them."""

TIERS = {"standard": 0, "batch": 1}
"""The tiers of service, by ``is_line``."""

_UNKNOWN = ("context_window", "inference_geo", "service_account_id", "speed")
_GROUPS = Several(
    "group_by",
    ("workspace_id", "account_id", "api_key_id", "model", "service_tier", *_UNKNOWN),
    meaning="What tells the results of a bucket apart.",
)
_GROUPS_OF_COSTS = Several("group_by", ("workspace_id", "description"), meaning=_GROUPS.meaning)
_LISTS = reports.lists_of(LISTS)
_TIERS = Several(
    "service_tiers",
    (*TIERS, "priority", "priority_on_demand", "flex", "flex_discount"),
    meaning="The tiers that count.",
)
_REFUSED = tuple(
    AnyTexts(name, meaning="Refused, as uses here have none.")
    for name in ("context_window", "inference_geos", "service_account_ids", "speeds")
)

_REFUSALS = (InvalidRequest, StoreFailed)


class ReportBucket(msgspec.Struct, Generic[reports.Result], frozen=True):
    """The uses of one time; without a group, there is one result or none."""

    starting_at: str
    ending_at: str
    results: tuple[reports.Result, ...]


class ReportPage(msgspec.Struct, Generic[reports.Result], frozen=True):
    """A page of buckets."""

    data: tuple[ReportBucket[reports.Result], ...]
    has_more: bool
    next_page: str | None


class CacheWrites(msgspec.Struct, frozen=True):
    """The tokens that were written into a cache for a price, which there is not here."""

    ephemeral_1h_input_tokens: Literal[0] = 0
    ephemeral_5m_input_tokens: Literal[0] = 0


class Searches(msgspec.Struct, frozen=True):
    """The searches of the web and of files."""

    web_search_requests: int


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The use by answers that a model has written; those of no group are None."""

    uncached_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    server_tool_use: Searches
    cache_creation: CacheWrites = CacheWrites()
    workspace_id: str | None = None
    """The team."""
    account_id: str | None = None
    """The owner of the key."""
    api_key_id: str | None = None
    """The name of the key."""
    model: str | None = None
    service_tier: Literal["standard", "batch"] | None = None
    context_window: None = None
    inference_geo: None = None
    service_account_id: None = None


class CostItem(msgspec.Struct, frozen=True, kw_only=True):
    """The costs by the prices at that time; without those that had no price."""

    amount: str
    """Hundredths of the currency, as a decimal number."""
    currency: str
    workspace_id: str | None = None
    description: str | None = None
    """The model."""
    model: str | None = None
    cost_type: None = None
    token_type: None = None
    context_window: None = None
    inference_geo: None = None
    service_tier: None = None


class UsageReport(ReportPage[MessagesUsage], frozen=True):
    """A page of what answers have used."""


class CostReport(ReportPage[CostItem], frozen=True):
    """A page of costs."""


@dataclass(frozen=True)
class AnthropicUsage:
    """The routes over a ledger."""

    ledger: Ledger
    clock: Callable[[], float] = time.time

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        return (
            web.get(f"{base}/organizations/usage_report/messages", self.messages),
            web.get(f"{base}/organizations/cost_report", self.costs),
        )

    @for_operators
    @operation(
        Operation(
            UsageReport,
            query=(START, END, reports.WIDTH, LIMIT, reports.PAGE, _GROUPS, *_LISTS.values(), _TIERS, *_REFUSED),
            refusals=_REFUSALS,
        )
    )
    async def messages(self, request: web.Request) -> web.Response:
        """Report what answers have used that a model has written, by any API but that of decisions."""
        for parameter in _REFUSED:
            if parameter.read(request):
                raise reports.unknown(parameter.name, parameter.name)
        where = reports.chosen(request, _LISTS, LISTS)
        if tiers := _TIERS.read(request):
            where["is_line"] = [TIERS[tier] for tier in tiers if tier in TIERS]
        return as_json(UsageReport(*await self._page(request, _GROUPS, where, reports.is_generated, _of_messages)))

    @for_operators
    @operation(
        Operation(
            CostReport,
            query=(START, END, reports.WIDTH_OF_COSTS, LIMIT, reports.PAGE, _GROUPS_OF_COSTS),
            refusals=_REFUSALS,
        )
    )
    async def costs(self, request: web.Request) -> web.Response:
        """Report what all requests cost that have a price."""
        result = partial(_of_costs, self.ledger.currency)
        reports.WIDTH_OF_COSTS.read(request)
        return as_json(CostReport(*await self._page(request, _GROUPS_OF_COSTS, {}, lambda _: True, result)))

    async def _page(
        self,
        request: web.Request,
        groups: Several,
        where: reports.Where,
        counts: Callable[[str], bool],
        result: Callable[[Sum, reports.By], reports.Result | None],
    ) -> tuple[tuple[ReportBucket[reports.Result], ...], bool, str | None]:
        """Return the fields of a page of results, which have only what they are grouped by."""
        width = reports.width_of(reports.WIDTH.read(request))
        if (since := _moment(START, request)) is None:
            raise InvalidRequest("Give the starting_at of the report.", param="starting_at")
        until = _moment(END, request)
        span = reports.Span.of(
            since, self.clock() if until is None else until, width, LIMIT.read(request), reports.PAGE.read(request)
        )
        found = await reports.report(
            self.ledger, span, reports.known(groups.read(request), COLUMNS), where, counts, result
        )
        buckets = tuple(ReportBucket(_iso(at), _iso(at + width.seconds), results) for at, results in found)
        return buckets, span.next_page is not None, span.next_page


def _moment(parameter: AnyText, request: web.Request) -> float | None:
    """Return the time of a parameter, in seconds since 1970; None if it is absent."""
    if (text := parameter.read(request)) is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return min(max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()), LATEST)
    except (ValueError, OverflowError):
        name = parameter.name
        raise InvalidRequest(f"{name} is a time by RFC 3339, not {shortened(text)!r}.", param=name) from None


def _iso(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _of_messages(one: Sum, by: reports.By) -> MessagesUsage:
    group = reports.group_of(one, by)
    if "service_tier" in group:
        group["service_tier"] = "batch" if one.is_line else "standard"
    return MessagesUsage(
        uncached_input_tokens=one.input_tokens - one.cached_tokens,
        cache_read_input_tokens=one.cached_tokens,
        output_tokens=one.output_tokens,
        server_tool_use=Searches(one.searches),
        **group,
    )


def _of_costs(currency: str, one: Sum, by: reports.By) -> CostItem | None:
    if one.cost is None:
        return None
    named = reports.group_of(one, by)
    model = named.get("description")
    return CostItem(amount=f"{Decimal(repr(one.cost)) * 100:f}", currency=currency, model=model, **named)
