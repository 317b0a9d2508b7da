"""The promises about webhooks, files and rates that hold at the end of a simulation."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

from penstock.api.http.api_key import digest_of
from tests.simulation.clients import Client
from tests.simulation.files import content_of
from tests.simulation.ledger import KnownFile, Violation
from tests.simulation.servers import ALL_HOOKS, LIMITED, PER_MINUTE

if TYPE_CHECKING:
    from tests.simulation.world import World

_ENDS = "select id, owner, status, response from responses"

_ENDS_OF_BATCHES = "select id, owner, status from batches where api = 'openai'"

_PARTS_OF_FILES = """
    select id, 'is unfinished' from files where server_id is not null
    union select file_id, 'has no row' from file_chunks where not exists (select 1 from files where id = file_id)
"""


_PARTS_OF_BATCHES = """
    select batch_id, 'is left' from batch_lines
    where not exists (select 1 from batches where id = batch_id and api = 'anthropic')
    union select batch_id, 'has no result' from batch_lines where kind is null
"""

_COUNTS_OF_BATCHES = """
    select id, status, total, succeeded, errored, expired, cancelled from batches
    where in_progress_at is not null and total <> succeeded + errored + expired + cancelled
"""


def check_hooks(world: World) -> None:
    """Check that each end of a background response or batch was announced at the URL of its owner, and nowhere else."""
    if world.hooks.forged:
        raise Violation(f"webhooks are not signed: {world.hooks.forged}")
    urls = {digest_of(key): ALL_HOOKS if owner == LIMITED else owner for owner, key in world.keys.items()}
    ends = {
        name: (urls[owner], f"response.{status}")
        for name, owner, status, response in world.store.rows(_ENDS)
        if json.loads(response)["background"]
    }
    for name, owner, status in world.store.rows(_ENDS_OF_BATCHES):
        ends[name] = (urls[owner], f"batch.{status}")
    ids = defaultdict(set)
    for hook in world.hooks.taken:
        ids[hook.response_id].add(hook.id)
        known = world.ledger.responses.get(hook.response_id)
        if known and known.deleting:
            url = urls[digest_of(world.keys[known.owner])]
            ends.setdefault(hook.response_id, (url, hook.kind))
        if ends.get(hook.response_id) != (hook.owner, hook.kind):
            raise Violation(f"{hook} came, and the store has {ends.get(hook.response_id)}")
    if repeated := [names for names in ids.values() if len(names) > 1]:
        raise Violation(f"an end was announced under several ids: {repeated}")
    if missing := ends.keys() - ids.keys():
        raise Violation(f"no webhook came of {missing}")


async def check_file(world: World, client: Client, known: KnownFile) -> None:
    """Check that all servers have a file, or none of them if it was deleted."""
    for server in world.servers:
        content = await content_of(client, f"{server.url}/v1/files/{known.id}/content")
        if content is None if not known.deleting else known.deleted and content is not None:
            raise Violation(f"{known} has the content {str(content)[:50]} at {server.host}")
        if content not in (None, known.data):
            raise Violation(f"{known.id} has other content at {server.host}")


def check_parts_of_files(world: World) -> None:
    """Check that nothing is left of uploads that broke off, and of deleted files."""
    if left := world.store.rows(_PARTS_OF_FILES):
        raise Violation(f"parts of files are left: {left}")


def check_parts_of_batches(world: World) -> None:
    """Check that nothing is left of lines that nobody needs, and that all lines count."""
    for sql in (_PARTS_OF_BATCHES, _COUNTS_OF_BATCHES):
        if left := world.store.rows(sql):
            raise Violation(f"parts of batches are left: {left}")


def check_rate(world: World) -> None:
    """Check that no more requests of the limited key were admitted than it had, at all servers together."""
    if world.plan.has("disk"):  # a server that does not reach its store counts nothing
        return
    admitted = [each for each in world.ledger.admitted if each.owner == LIMITED]
    for first in admitted:
        within = sorted(each.answered for each in admitted if each.sent >= first.sent)
        for count, until in enumerate(within, 1):
            most = PER_MINUTE * (1 + (until - first.sent) / 60)
            if count > most + 1:
                raise Violation(f"{count} requests of a key were admitted between {first.sent} and {until}")
