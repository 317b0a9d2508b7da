"""Find items and tool call results by item id, in responses and in conversations.

Of several items with one id, the item stored last is returned.  A tool call result is the text that the call gave the
model to read.  It is stored with the response that made the call, the first response with that item.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from penstock.pipeline.protocol.items import Item
from penstock.services.store import rows
from penstock.services.store.database import Row, batches, placeholders
from penstock.services.store.writer import StoreContext

_Found: TypeAlias = dict[str, tuple[float, Item]]
"""Items by id, each with the time at which it was stored."""


async def find_items(context: StoreContext, ids: Sequence[str], owner: str) -> dict[str, Item]:
    """Return the owner's items with these ids, by id."""
    items: dict[str, Item] = {}
    for some in batches(ids):
        responses, conversations = (
            await _in_responses(context, some, owner),
            await _in_conversations(context, some, owner),
        )
        newest = responses | {
            name: item for name, item in conversations.items() if name not in responses or item[0] > responses[name][0]
        }
        items |= {name: item for name, (_, item) in newest.items()}
    return items


async def _in_responses(context: StoreContext, ids: Sequence[str], owner: str) -> _Found:
    holders = f"""
        select response_id, id, stored_at from items
        where owner = $1 and id in ({placeholders(len(ids), 2)}) and stored_at =
            (select max(stored_at) from items as others where others.owner = items.owner and others.id = items.id)
    """
    times_by_response: dict[str, dict[str, float]] = defaultdict(dict)
    for response_id, name, stored_at in await context.read(holders, owner, *ids):
        times_by_response[response_id][name] = stored_at

    def found(row: Row) -> _Found:
        stored = rows.stored_response(row)
        times = times_by_response[stored.response.id]
        return {item.id: (times[item.id], item) for item in stored.items if item.id in times}

    items: _Found = {}
    if times_by_response:
        query = f"select {rows.RESPONSE_COLUMNS} from responses where id in ({placeholders(len(times_by_response))})"
        for some in await rows.decoded(await context.read(query, *times_by_response), found):
            items |= some
    return items


async def _in_conversations(context: StoreContext, ids: Sequence[str], owner: str) -> _Found:
    query = f"""
        select conversation_items.id, stored_at, item
        from conversation_items join conversations on conversations.id = conversation_id
        where owner = $1 and conversation_items.id in ({placeholders(len(ids), 2)}) order by stored_at
    """
    return dict(await rows.decoded(await context.read(query, owner, *ids), _dated))


def _dated(row: Row) -> tuple[str, tuple[float, Item]]:
    name, at, text = row
    return name, (at, rows.item(text))


async def find_results(context: StoreContext, ids: Sequence[str], owner: str) -> dict[str, str]:
    """Return the results of the owner's tool calls with these item ids, by item id."""
    results: dict[str, str] = {}
    for some in batches(ids):
        results |= await _results_in_conversations(context, some, owner)
        results |= await _results_in_responses(context, some, owner)
    return results


async def _results_in_responses(context: StoreContext, ids: Sequence[str], owner: str) -> dict[str, str]:
    query = f"""
        select items.id, results from items join responses on responses.id = response_id
        where items.owner = $1 and items.id in ({placeholders(len(ids), 2)}) and results is not null and stored_at =
            (select min(stored_at) from items as others where others.owner = items.owner and others.id = items.id)
    """
    pairs = [(name, rows.results_in(column)) for name, column in await context.read(query, owner, *ids)]
    return {name: results[name] for name, results in pairs if name in results}


async def _results_in_conversations(context: StoreContext, ids: Sequence[str], owner: str) -> dict[str, str]:
    query = f"""
        select conversation_items.id, result
        from conversation_items join conversations on conversations.id = conversation_id
        where owner = $1 and conversation_items.id in ({placeholders(len(ids), 2)}) and result is not null
    """
    return {name: rows.result(column) for name, column in await context.read(query, owner, *ids)}
