"""Resolve: what follows from a request and its history: files, containers, earlier results, and the facts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from urllib.parse import quote

from msgspec import UNSET

from penstock.pipeline.errors import InvalidEncryptedContent, InvalidRequest, StoreFailed
from penstock.pipeline.frames import ResolvedRequest, Scheduling, TokenIds
from penstock.pipeline.protocol.items import Compaction, FileReading
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import ContainerUse
from penstock.pipeline.tasks import in_thread
from penstock.services.file_reading import Files, open_files
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from penstock.stages.normalize.containers import ContainerFinder
from penstock.stages.normalize.facts import facts_of
from penstock.stages.normalize.frames import ReadRequest, RecalledRequest
from penstock.stages.normalize.input_items import SURPLUS


@dataclass(frozen=True)
class CacheSharing:
    """The requests that share the engine's prefix cache; a ``cache_salt`` divides it further."""

    among_keys: bool = False
    """True if clients with different API keys share it."""
    by_prompt_cache_key: bool = False
    """True if only requests with the same ``prompt_cache_key`` share it, unless they have a ``cache_salt``."""


DEFAULT_SHARING = CacheSharing()


@dataclass(frozen=True, kw_only=True)
class Resolve:
    """Make the conversation that later stages work on; ``toolbox`` has the tools that this server can run."""

    store: Store
    toolbox: Toolbox
    caches: CacheSharing = DEFAULT_SHARING
    files: Files = field(default_factory=open_files)

    async def __call__(self, source: AsyncIterator[ReadRequest]) -> AsyncGenerator[ResolvedRequest, None]:
        """Yield each request with all that the model reads.

        Raises `InvalidRequest` for what cannot be had or opened, or what the hosts of tools cannot do; raises
        `StoreFailed` if the store cannot be read.
        """
        async for read in source:
            yield await self._resolved(read)

    async def _resolved(self, read: ReadRequest) -> ResolvedRequest:
        recalled, past, thoughts = read.recalled, read.recalled.past, read.recalled.thoughts
        whole, earlier = (*read.history, *read.items), len(read.history)
        items, recent = await self.store.recent_calls.restored(whole, recalled.owner, recalled.reads)
        if recent:
            read = replace(read, history=items[:earlier], items=items[earlier:])
        await self._refuse_used_approvals(read)
        files = await self._readings(read)
        containers = await self._containers(read)
        own_results = {**read.results, **await self._summary(read)}
        facts = facts_of(read, self._scheduling(recalled.request), containers, own_results)
        results = {**thoughts.results, **past.results, **await self._results(read), **own_results}
        tokens = {**recent, **_readable(recalled), **read.tokens}
        resolved = ResolvedRequest(
            facts, history=read.history, tokens=tokens, results=results, files=files, said=read.said, unseen=read.unseen
        )
        await self.toolbox.check(resolved)
        return resolved

    async def _refuse_used_approvals(self, read: ReadRequest) -> None:
        """Raise `InvalidRequest` for an approval whose call another response has made: a client may send it twice."""
        used = await self.store.approvals.used(read.recalled.owner, read.approved) if read.approved else {}
        for position, item in enumerate(read.recalled.sent if used else ()):
            approval_id = str(getattr(item, "approval_request_id", ""))
            if approval_id in used:
                message = (
                    f"The approval of {shortened(approval_id)!r} was used already, by the response {used[approval_id]}."
                )
                raise InvalidRequest(message, param=f"input[{position}].approval_request_id")

    async def _readings(self, read: ReadRequest) -> Mapping[str, tuple[FileReading, ...]]:
        """Return what the model reads of the files, by the ids of their items."""
        readings: dict[str, tuple[FileReading, ...]] = {}
        if not read.files:
            return readings
        owner, sees_images = read.recalled.owner, read.recalled.traits.sees_images
        found = await self.files.read_all(read.files, owner, self.store, sees_images=sees_images)
        for file, reading in zip((*read.files, *read.surplus), (*found, *[SURPLUS] * len(read.surplus)), strict=True):
            readings[file.item_id] = (*readings.get(file.item_id, ()), reading)
        return readings

    async def _containers(self, read: ReadRequest) -> Mapping[str, ContainerUse]:
        """Return the containers of the built-in tools that run in one, by namespace."""
        wishes, containers = read.offered.wishes, self.toolbox.containers
        if containers is None:
            for wish in wishes.values():
                wish.refuse()
        if containers is None or not wishes:
            return {}
        recalled = read.recalled
        finder = ContainerFinder(containers, self.store, recalled.owner, recalled.request.envelope.moves)
        return await finder.uses(wishes, read.containers, f"cntr_{recalled.suffix}")

    async def _summary(self, read: ReadRequest) -> Mapping[str, str]:
        """Return the summary of the latest compaction by its id, unless it is known.

        It supersedes all compactions before it, and a short text may hold a long summary: those are not opened.
        """
        if read.latest is None or read.latest.id in read.recalled.past.results:
            return {}
        return {read.latest.id: await in_thread(_summary, read.latest, read.recalled)}

    async def _results(self, read: ReadRequest) -> Mapping[str, str]:
        """Return the stored results of calls in the input that this server may have run, by item id.

        If the store fails, a request with ``store: false`` goes on without them, because its items also hold some of
        the results.
        """
        try:
            return await self.store.results(read.run_here, read.recalled.owner) if read.run_here else {}
        except StoreFailed:
            if read.recalled.request.store is not False:
                raise
            return {}

    def _scheduling(self, request: CreateResponse) -> Scheduling:
        salt, envelope = request.cache_salt, request.envelope
        if salt is None and self.caches.by_prompt_cache_key and request.prompt_cache_key:
            salt = quote(request.prompt_cache_key, safe="")  # vLLM rejects slashes and the like in a salt
        if (owner := envelope.owner) and not self.caches.among_keys:
            # else `cached_tokens` and the time to the first token confirm guesses of another key's prompts
            salt = sha256(f"{owner} {salt or ''}".encode()).hexdigest()
        session = request.session_id or envelope.session or UNSET
        return Scheduling(salt, request.priority or 0, envelope.trace_headers, session)


def _readable(recalled: RecalledRequest) -> Mapping[str, TokenIds]:
    """Return the tokens of earlier items that the model of the request has generated: it cannot read another's."""
    past, thoughts = recalled.past, recalled.thoughts
    tokens, writers = {**past.tokens, **thoughts.tokens}, {**past.writers, **thoughts.writers}
    others = {name for name in {*map(writers.get, tokens)} if not recalled.reads(name or "")}
    return {item: ids for item, ids in tokens.items() if writers.get(item) not in others} if others else tokens


def _summary(compaction: Compaction, recalled: RecalledRequest) -> str:
    """Return the summary of a compaction; raises `InvalidEncryptedContent` if it cannot be opened."""
    summary = recalled.thoughts.summary(compaction)
    if summary is None:
        text = compaction.encrypted_content
        given = [getattr(item, "encrypted_content", None) for item in recalled.sent]
        raise InvalidEncryptedContent(f"input[{given.index(text)}]" if text in given else shortened(compaction.id))
    return summary
