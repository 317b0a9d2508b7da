"""The promises about the ledger: it counts each answer once, with what the answer says that it has used."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.api.http.api_key import digest_of
from tests.simulation.ledger import Sum, Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

_ENDED = "select id, owner, response from responses where ended_at is not null"

_TOKENS = "input_tokens, cached_tokens, output_tokens, reasoning_tokens"

_ROWS = f"select id, is_line, owner, 1, {_TOKENS} from ledger"

_SUMS = f"select '', is_line, owner, requests, {_TOKENS} from ledger_hours"

_BATCHES = f"select owner, succeeded, {_TOKENS} from batches"


def check_accounts(world: World) -> None:
    """Check that the ledger has each answer that is stored once, and of others no more than there can be."""
    rows: dict[str, Sum] = {}
    ledger, lines = defaultdict[str, Sum](Sum), defaultdict[str, Sum](Sum)
    for name, is_line, owner, *counts in (*world.store.rows(_ROWS), *world.store.rows(_SUMS)):
        noted, sums = Sum(*map(int, counts)), lines if is_line else ledger
        sums[owner] = sums[owner].plus(noted)
        if name:
            rows[name] = noted
    known = defaultdict[str, Sum](Sum)
    for name, owner, text in world.store.rows(_ENDED):
        response = json.loads(text)
        if "line" in response["metadata"]:  # it counts with the line
            continue
        used = Sum.of_response(response)
        known[owner] = known[owner].plus(used)
        if rows.get(name, used) != used:
            raise Violation(f"{name} has used {used}, and the ledger has {rows[name]}")
    for owner, key in world.keys.items():
        noted, used, others = ledger[digest_of(key)], known[digest_of(key)], world.ledger.others[owner]
        is_all = used == noted if not others else noted.requests <= used.requests + others
        if not is_all or any(mine < its for mine, its in zip(noted, used, strict=True)):
            raise Violation(f"{owner} has used {used}, and {others} answers are not known; the ledger has {noted}")
    _check_lines(world, lines)


def _check_lines(world: World, ledger: defaultdict[str, Sum]) -> None:
    """Check that the ledger has each line of a batch once: no other answer can be unknown."""
    known = defaultdict[str, Sum](Sum)
    for owner, *counts in world.store.rows(_BATCHES):
        known[owner] = known[owner].plus(Sum(*map(int, counts)))
    deleted = [batch for batch in world.ledger.batches.values() if batch.deleted]
    for batch in deleted:
        owner = digest_of(world.keys[batch.owner])
        known[owner] = known[owner].plus(batch.used)
    for owner in known | ledger:
        noted, used = ledger[owner], known[owner]
        if deleted:  # the results of messages do not say which tokens were thoughts
            noted, used = noted._replace(reasoning=0), used._replace(reasoning=0)
        if noted != used:
            raise Violation(f"the lines of {owner} have used {used}, and the ledger has {noted}")
