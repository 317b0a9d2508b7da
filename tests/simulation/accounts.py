"""The promises about the ledger: it counts each answer once, with what the answer says that it has used."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.api.http.api_key import digest_of
from tests.simulation.ledger import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

_ENDED = "select id, owner, response from responses where ended_at is not null"

_COLUMNS = "owner, input_tokens, cached_tokens, output_tokens, reasoning_tokens"

_ROWS = f"select id, 1, {_COLUMNS} from ledger where is_line = 0"

_SUMS = f"select '', requests, {_COLUMNS} from ledger_hours where is_line = 0"


class Sum(NamedTuple):
    """What answers have used together."""

    requests: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def plus(self, other: Sum) -> Sum:
        """Return the sum of both."""
        return Sum(*(mine + its for mine, its in zip(self, other, strict=True)))


def used_by(response: Any) -> Sum:
    """Return what a response says that it has used."""
    if (usage := response["usage"]) is None:
        return Sum(1)
    cached, reasoning = (
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
    )
    return Sum(1, usage["input_tokens"], cached, usage["output_tokens"], reasoning)


def check_accounts(world: World) -> None:
    """Check that the ledger has each answer that is stored once, and of others no more than there can be."""
    rows: dict[str, Sum] = {}
    ledger, known = defaultdict[str, Sum](Sum), defaultdict[str, Sum](Sum)
    for name, requests, owner, *tokens in (*world.store.rows(_ROWS), *world.store.rows(_SUMS)):
        noted = Sum(int(requests), *map(int, tokens))
        ledger[owner] = ledger[owner].plus(noted)
        if name:
            rows[name] = noted
    for name, owner, response in world.store.rows(_ENDED):
        used = used_by(json.loads(response))
        known[owner] = known[owner].plus(used)
        if rows.get(name, used) != used:
            raise Violation(f"{name} has used {used}, and the ledger has {rows[name]}")
    for owner, key in world.keys.items():
        noted, used, others = ledger[digest_of(key)], known[digest_of(key)], world.ledger.others[owner]
        is_all = used == noted if not others else noted.requests <= used.requests + others
        if not is_all or any(mine < its for mine, its in zip(noted, used, strict=True)):
            raise Violation(f"{owner} has used {used}, and {others} answers are not known; the ledger has {noted}")
