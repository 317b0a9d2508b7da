"""The vLLM servers of an HTTP engine: their capabilities, their health, and the choice of a server for a prompt.

A server that fails its health check gets no prompts until it is healthy again.  It is probed anew each time it comes
back, because a different server may be running at its address by then.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from itertools import chain, cycle, islice, repeat
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
from msgspec import UNSET

from penstock.pipeline import metrics
from penstock.pipeline.frames import Prompt, RequestFacts
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.pipeline.urls import host_of
from penstock.services.engines.affinity import (
    FARTHEST,
    NEAREST,
    STRANGERS,
    Ranking,
    is_new,
    read_elsewhere,
    work,
)
from penstock.services.engines.http_endpoints import (
    COMPLETIONS,
    ENDPOINTS,
    LET_GO,
    Endpoint,
    RequestRefused,
    constrained_to,
    read_refusal,
)
from penstock.services.engines.weights import LatestWeights
from penstock.services.foreign import Unreadable, decoded, read_start, read_whole
from penstock.stages.models.harmony.vocabulary import CHANNEL, MESSAGE, START

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
"""Timeout in seconds for connecting to a server, and for its health check."""

LONGEST_REFUSAL = 2**16
"""Bytes of a refusal that are read."""

LARGEST_METRICS = 2**22
"""Bytes of a server's metrics that are read."""

_LOAD = re.compile(
    rb'^vllm:num_requests_(?:running|waiting)\{(?=[^\n]*engine="(\d{1,6})")[^\n]*\} (\d{1,9})', re.MULTILINE
)
"""The gauges of a server's generations, and the ranks of its engine cores."""

MOST_CORES = 256
"""Engine cores of a server that are counted."""

_OF_RANKS = re.compile(r"data.parallel.rank", re.IGNORECASE)
"""A refusal of the rank that a prompt was sent to."""

MOST_HINTS = 1_000
"""Conversations that are over, of which the next prompt of an engine core tells."""

MOST_PLACED = 100_000
"""Conversations of which the engine core is known that has them, if it takes hints."""

PROBE_TIMEOUT = 120.0
"""Timeout in seconds for a probe, long enough for a server to compile its first grammar."""

LONG_PROMPT = 16_000
"""Tokens above which a thread looks a prompt up in `PrefixCaches`."""

MISSED_CHECKS = 3
"""Consecutive health checks without an answer after which the generations on a server count as lost."""

_MARKERS, _MARKER_IDS = "<|start|><|channel|><|message|>", [START, CHANNEL, MESSAGE]
"""Harmony markers and their token ids.  The tokenizer of a model without harmony splits them differently."""

_PROBE = (5, 6, 7)
"""Token ids that no model generates in this order unless a grammar forces it to."""

_OWN = "penstock"
"""The make of a penstock, as its models name it: it tells token ids, but not all that an engine has to."""


Answered = TypeVar("Answered")


class _Card(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str = ""


class _Cards(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...]


class _GeneratedToken(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_GeneratedToken, ...]


class _Hearing(msgspec.Struct, frozen=True):
    kv_transfer_params: dict[str, Any] | None = None


class _Tokenized(msgspec.Struct, frozen=True):
    tokens: list[int]


class UnusableServer(ConnectionError):
    """The server does not answer, or lacks a required capability."""


class ForeignServer(UnusableServer):
    """A server is of another make, such as Ollama, llama.cpp or penstock; ``sign`` says how that was seen."""

    def __init__(self, sign: str) -> None:
        super().__init__(
            f"{sign} A server of another make is used through its chat completions: copy"
            " tests/examples/chat_endpoint.py, and start with --engine chat_endpoint.py:engine"
            ' (docs/ENGINES.md, "Texts").'
        )
        self.sign = sign


class PrefixCaches(Protocol):
    """The known contents of the servers' prefix caches."""

    def cached(self, prompt: Prompt, adapter: str | None) -> Mapping[str, int] | None:
        """Return how many tokens of a prompt each engine core holds, by `Core.name`; None if that is not known."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Return the number of blocks that each core is known to hold, by `Core.name`; silent cores are left out."""
        ...

    def follow(self, url: str, sources: Sequence[EventSource]) -> None:
        """Take in where a server says that its cores publish their events, in the order of their ranks."""
        ...

    def forget(self, url: str, unless_cleared_after: float | None = None) -> None:
        """Forget the cache of a server, which may have started again, or has other weights than before.

        The cache stays known if an event after a time of `time.monotonic` says that it was cleared.
        """
        ...


class EventSource(msgspec.Struct, frozen=True):
    """The addresses of the events of an engine core's prefix cache, and of the last ones once more."""

    endpoint: str
    replay_endpoint: str | None = None


class Broken(Protocol):
    """A generation that is running on a server."""

    def lose(self) -> None:
        """Give the generation up: its server no longer answers."""
        ...


def core_name(url: str, number: int) -> str:
    """Return the name of an engine core: the URL of its server, with a number for others than the first."""
    return f"{url}#{number}" if number else url


@dataclass(eq=False)
class Core:
    """An engine core of a server, with a prefix cache of its own: the only one, or that of a data parallel rank."""

    replica: Replica
    number: int = 0
    """The number of its rank among those of its server, as vLLM's header of ranks counts them."""
    running: set[Broken] = field(default_factory=set)
    others: int = 0
    """Generations of other clients, when the server last reported its load."""
    over: deque[str] | None = None
    """Conversations that its cache may forget, for its next prompt to tell; None for none."""

    def __post_init__(self) -> None:
        self.name = core_name(self.replica.url, self.number)

    def let_go(self, session: str) -> None:
        """Have the next prompt tell that a conversation does not go on here."""
        self.over = self.over or deque(maxlen=MOST_HINTS)
        self.over.append(session)

    @property
    def load(self) -> int:
        """The generations on the core, as far as they are known."""
        return len(self.running) + self.others


@dataclass(frozen=True)
class ServedModel:
    """The properties that all servers of an engine share."""

    models: tuple[str, ...]
    context_length: int
    speaks_harmony: bool | None
    """None if the server tokenizes no text, as one without a tokenizer."""


@dataclass(eq=False)
class Replica:
    """One server, with the results of its last probe."""

    url: str
    session: aiohttp.ClientSession
    endpoints: tuple[Endpoint[Any], ...] = ENDPOINTS
    """The endpoints to try, best first."""
    endpoint: Endpoint[Any] = ENDPOINTS[-1]
    grammar_fault: str | None = None
    """Why the server cannot constrain output to a grammar; None if it can."""
    root: str = ""
    """The model as given on the server's command line: a Hugging Face id, or a folder on the server's machine."""
    adapters: tuple[str, ...] = ()
    """The served names of its LoRA adapters."""
    is_asked_for_hints: bool = False
    """True if a probe asks whether its scheduler takes hints."""
    takes_hints: bool = False
    is_healthy: bool = False
    _missed: int = 0
    _complaint: str = ""
    _knows_sources: bool = False

    def __post_init__(self) -> None:
        self.weights = LatestWeights(f"The engine at {self.url}")
        self.cores: tuple[Core, ...] = (Core(self),)
        """Its engine cores: one, unless it reports several."""
        self._ever: tuple[Core, ...] = self.cores
        """All that it has had: one that it no longer reports may have generations, and may come back."""

    @property
    def address(self) -> str:
        """The host and port of the server."""
        return host_of(self.url) or self.url

    @property
    def running(self) -> Sequence[Broken]:
        """The generations of this process on the server."""
        return [generation for core in self._ever for generation in core.running]

    def endpoint_for(self, prompt: Prompt) -> Endpoint[Any]:
        """Return the endpoint that takes a prompt: the best one counts chosen tokens as likely ones, which are few."""
        is_chosen = prompt.facts.sampling.logprob_token_ids is not UNSET
        return COMPLETIONS if is_chosen and not prompt.images else self.endpoint

    async def post(
        self, endpoint: Endpoint[Any], body: dict[str, Any], headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a generation request; raise `RequestRefused` if the answer is not a stream of tokens."""
        response = await self.session.post(
            self.url + endpoint.path,
            data=msgspec.json.encode(body),
            headers=headers,
            allow_redirects=False,  # clients' prompts must not reach another server
        )
        if response.status == 200:
            return response
        async with response:
            raise await _refusal(response)

    async def probe(self, model: str | None) -> ServedModel:
        """Probe the server: its models, endpoint, grammars and tokenizer.

        Raises `UnusableServer` if the server lacks something required, and `RequestRefused` or `aiohttp.ClientError` if
        a probe fails.
        """
        cards = (await self._ask("/v1/models", _Cards)).data
        base = next((card for card in cards if (card.id == model if model else not card.parent)), None)
        if base is None:
            raise UnusableServer(f"The server at {self.url} does not serve {model or 'any model'}.")
        if base.owned_by == _OWN:
            raise self._foreign("it is a penstock")
        if base.max_model_len is None:
            raise self._foreign("/v1/models does not report the context length of its model")
        names = [card.id for card in cards if card.root == base.root and not card.parent]
        self.adapters = tuple(card.id for card in cards if card.parent in names)
        self.root = base.root or base.id
        self.endpoint = await self._find_endpoint(base)
        self.grammar_fault = await self._find_grammar_fault(base.id)
        if self.is_asked_for_hints:
            await self.ask_for_hints(base.id)
        models = tuple(dict.fromkeys((base.id, *names, *self.adapters)))
        return ServedModel(models, base.max_model_len, await self._speaks_harmony(base.id))

    async def check(self) -> bool:
        """Return True if the server reports that it is healthy.

        After `MISSED_CHECKS` checks in a row without an answer, the generations on the server are given up.
        """
        with suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(CONNECT_TIMEOUT)
            async with self.session.get(f"{self.url}/health", timeout=timeout, allow_redirects=False) as answer:
                self._missed = 0
                return answer.status == 200
        self._missed += 1
        if self._missed >= MISSED_CHECKS:
            for generation in self.running:
                generation.lose()
        return False

    async def poll_load(self) -> bool:
        """Read the generations of other clients from the server's metrics; return True if it has other cores now.

        Without an answer there are no others, and the cores are those of before.
        """
        own, loads = [len(core.running) for core in self.cores], Counter[int]()
        with suppress(aiohttp.ClientError, TimeoutError):
            for rank, load in _LOAD.findall(await self._read_start("/metrics", LARGEST_METRICS)):
                loads[int(rank)] += int(load)
        cores = min(len(loads), MOST_CORES)
        is_other = 0 < cores != len(self.cores)
        if is_other:
            self._ever += tuple(Core(self, number) for number in range(len(self._ever), cores))
            self.cores = self._ever[:cores]
            self._knows_sources = False
        found = chain((loads[rank] for rank in sorted(loads)), repeat(0))
        for core, load, began in zip(self.cores, found, chain(own, repeat(0)), strict=False):
            core.others = max(0, load - max(began, len(core.running)))
        return is_other

    async def new_sources(self) -> Sequence[EventSource] | None:
        """Return where the server says that its cores publish events; None if that is known, or there is no answer.

        A server that does not say it publishes them where the operator says.
        """
        if self._knows_sources:
            return None
        try:
            answer = await self._read_start("/kv_event_sources", LONGEST_REFUSAL)
            sources = msgspec.json.decode(answer or b"{}", type=dict[int, EventSource])
        except (aiohttp.ClientError, TimeoutError):
            return None
        except NO_JSON:
            sources = {}
        self._knows_sources = True
        return [sources[rank] for rank in sorted(sources)][:MOST_CORES]

    async def _read_start(self, path: str, most: int) -> bytes:
        """Return the start of what is at a path; nothing if the server refuses it."""
        timeout = aiohttp.ClientTimeout(CONNECT_TIMEOUT)
        async with self.session.get(self.url + path, timeout=timeout, allow_redirects=False) as answer:
            return await read_start(answer.content.iter_any(), most) if answer.status == 200 else b""

    def refuses_rank(self, refusal: RequestRefused) -> bool:
        """Take in a refusal of a rank that the server no longer has; return False for any other refusal."""
        if len(self.cores) == 1 or not _OF_RANKS.search(str(refusal)):
            return False
        self.cores = self.cores[:1]
        return True

    def exclude(self, reason: str) -> None:
        """Send the server no prompts until `include`.  A repeated reason is logged once."""
        self.is_healthy = False
        if reason != self._complaint:
            self._complaint = reason
            logger.warning("%s It gets no prompts.", reason)

    def include(self) -> None:
        if self._complaint:
            logger.info("The engine at %s is back", self.url)
        if self.grammar_fault:
            logger.warning("At %s structured output is refused: %s", self.url, self.grammar_fault)
        self.is_healthy, self._complaint, self._knows_sources = True, "", False

    async def _find_endpoint(self, card: _Card) -> Endpoint[Any]:
        for endpoint in self.endpoints:
            with suppress(RequestRefused):  # without --enable-scale-out, a server lacks the best endpoint
                if await self._generate(endpoint, card.id, [0], max_tokens=1):
                    return endpoint
        if card.owned_by != "vllm":
            raise self._foreign("it returns no token ids")
        raise UnusableServer(
            f"The server at {self.url} returns no token ids: it needs --enable-scale-out, or vLLM 0.10.2 or later."
        )

    async def _find_grammar_fault(self, name: str) -> str | None:
        grammar = "start: " + " ".join(f"<[{token}]>" for token in _PROBE)
        try:
            token_ids = await self._generate(self.endpoint, name, [0], max_tokens=len(_PROBE), grammar=grammar)
        except RequestRefused as error:
            return f"The engine refuses grammars ({error}): it needs --structured-outputs-config.backend guidance."
        if tuple(token_ids[: len(_PROBE)]) == _PROBE:
            return None
        return (
            "The engine applies a grammar only to a part of the answer: with --reasoning-parser it needs"
            " --enable-scale-out, or --structured-outputs-config.enable_in_reasoning true."
        )

    async def ask_for_hints(self, name: str) -> None:
        """Ask the scheduler of the server whether it takes hints; without an answer it does not."""
        self.is_asked_for_hints, self.takes_hints = True, False
        body = self.endpoint.probe_body(name, [0], {"temperature": 0.0, "max_tokens": 1})
        self.endpoint.add_arguments(body, {LET_GO: []})
        with suppress(RequestRefused, aiohttp.ClientError, TimeoutError):
            answer = await self._ask(self.endpoint.path, _Hearing, body)
            self.takes_hints = LET_GO in (answer.kv_transfer_params or ())

    async def _generate(
        self, endpoint: Endpoint[Any], name: str, token_ids: list[int], *, max_tokens: int, grammar: str | None = None
    ) -> list[int]:
        """Return a few generated tokens for a probe; raise `RequestRefused` if the server refuses."""
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}
        if grammar:
            sampling |= constrained_to(grammar)
        answer = await self._ask(endpoint.path, _Completion, endpoint.probe_body(name, token_ids, sampling))
        return answer.choices[0].token_ids or [] if answer.choices else []

    async def _speaks_harmony(self, name: str) -> bool | None:
        """Compare the token ids of Harmony's markers.

        A gateway may refuse ``/tokenize``, as it picks servers by prompts; ``/v1/completions`` then returns the ids.
        """
        body: dict[str, Any] = {"model": name, "prompt": _MARKERS, "add_special_tokens": False}
        with suppress(RequestRefused):
            return (await self._ask("/tokenize", _Tokenized, body)).tokens == _MARKER_IDS
        with suppress(RequestRefused):
            body |= {"return_token_ids": True, "max_tokens": 1}
            choices = (await self._ask(COMPLETIONS.path, _Completion, body)).choices
            if choices and choices[0].prompt_token_ids:
                return choices[0].prompt_token_ids == _MARKER_IDS
        return None

    async def _ask(self, path: str, kind: type[Answered], request_body: dict[str, Any] | None = None) -> Answered:
        """Return the decoded JSON; raise `RequestRefused` or, for unexpected JSON, `UnusableServer`."""
        async with self.session.request(
            "GET" if request_body is None else "POST",
            self.url + path,
            data=None if request_body is None else msgspec.json.encode(request_body),
            timeout=aiohttp.ClientTimeout(PROBE_TIMEOUT, sock_connect=CONNECT_TIMEOUT),
            allow_redirects=False,
        ) as answer:
            if answer.status != 200:
                raise await _refusal(answer)
            try:
                return await decoded(await read_whole(answer.content.iter_any()), msgspec.json.Decoder(kind).decode)
            except Unreadable as error:
                raise self._foreign(f"its answer to {path} is {error}") from error

    def _foreign(self, sign: str) -> ForeignServer:
        return ForeignServer(f"The server at {self.url} is not `vllm serve`: {sign}.")


async def _refusal(answer: aiohttp.ClientResponse) -> RequestRefused:
    return read_refusal(answer.status, await read_start(answer.content.iter_any(), LONGEST_REFUSAL))


@dataclass(eq=False)
class Replicas:
    """All servers of an engine."""

    all: tuple[Replica, ...]
    caches: PrefixCaches | None = None
    """The known contents of their prefix caches; None if nothing is known."""

    _at: OrderedDict[str, Core] = field(default_factory=OrderedDict)
    """The cores that take hints, by the conversations that they had last."""

    @property
    def healthy(self) -> Iterable[Replica]:
        """The servers that passed their last health check and probe."""
        return (replica for replica in self.all if replica.is_healthy)

    @property
    def has_choice(self) -> bool:
        """True if there are several engine cores."""
        return len(self._cores) > 1

    async def poll(self, replica: Replica) -> None:
        """Read the load of a server, which cores it has, and where they publish events."""
        if await replica.poll_load():
            self.rank_anew()
        if self.caches and replica.is_healthy and (sources := await replica.new_sources()) is not None:
            self.caches.follow(replica.url, sources)

    def rank_anew(self) -> None:
        """Rank the cores anew, as a server has others now."""
        for name in ("_cores", "_ranking", "_by_turns"):
            self.__dict__.pop(name, None)

    def name(self, replica: Replica) -> str:
        """Return the name of a server for clients, which need not know its address."""
        return "The engine" if len(self.all) == 1 else f"Engine {self.all.index(replica) + 1} of {len(self.all)}"

    async def cached(self, prompt: Prompt) -> Mapping[str, int] | None:
        """Return how many tokens of a prompt each core holds, by `Core.name`; None if that is not known."""
        if self.caches is None or not self.has_choice:
            return None
        reported = self.caches.sizes()
        if any(core.name not in reported for replica in self.healthy for core in replica.cores):
            return None
        model = prompt.facts.model
        adapter = model if any(model in replica.adapters for replica in self.healthy) else None
        if len(prompt.token_ids) > LONG_PROMPT:
            return await asyncio.to_thread(self.caches.cached, prompt, adapter)
        return self.caches.cached(prompt, adapter)

    def place(self, session: str, core: Core) -> Sequence[str]:
        """Note that a core has a conversation now, and no other any more; return those that its cache may forget."""
        before = self._at.pop(session, core)
        if before is not core:
            before.let_go(session)
            if core.over and session in core.over:  # it has come back, and reads there what it left
                core.over.remove(session)
        self._at[session] = core
        if len(self._at) > MOST_PLACED:
            self._at.popitem(last=False)
        over, core.over = core.over or (), None
        return list(over)

    def let_go(self, session: str) -> bool:
        """Note that a conversation is over; return True if a core that takes hints has it."""
        if core := self._at.pop(session, None):
            core.let_go(session)
        return core is not None

    def hear(self, replica: Replica, weights: Sequence[WeightSpan], began: float) -> None:
        """Take in the weights that a generation of a server names; what its cache has of older ones is no use."""
        last = replica.weights.note(weights, began)
        if last is not None and self.caches:
            self.caches.forget(replica.url, unless_cleared_after=last)

    def choose(
        self,
        facts: RequestFacts,
        prompt_tokens: int,
        without: Collection[Replica],
        rather_not: Collection[Replica],
        cached: Mapping[str, int] | None = None,
    ) -> Core | None:
        """Return the engine core for a turn, or None if there is none outside ``without``.

        Of the first in the ranking of its conversation, those that hold most of the prompt, and a few with few turns,
        it is the one with the least work (see `affinity`).  ``cached`` are the tokens of the prompt that each core
        holds; if that is not known, the first healthy one in the ranking is taken to hold them.  Servers in
        ``rather_not`` are a last resort.
        """

        def is_able(core: Core) -> bool:
            return core.replica.is_healthy and core.replica not in without

        every = self._cores
        ranks = islice(self._ranking.of(facts), FARTHEST)
        able = list(islice(filter(is_able, chain((every[name] for name in ranks), every.values())), NEAREST))
        if len(every) > NEAREST:
            able += filter(is_able, chain(islice(self._by_turns, STRANGERS), self._holders(cached or {})))
        if len(every) == 1 or not able:
            return able[0] if able else None
        read = read_elsewhere(facts, prompt_tokens)

        def drawbacks(core: Core) -> tuple[bool, float]:
            if cached is not None:
                return core.replica in rather_not, work(core.load, prompt_tokens - cached.get(core.name, 0))
            return core.replica in rather_not, work(core.load, 0 if core is able[0] else read)

        chosen = min(able, key=drawbacks)
        home = next(self._ranking.of(facts))
        choice = "new" if is_new(facts) else "affine" if chosen.name == home else "moved"
        metrics.ENGINE_CHOICES.labels(chosen.replica.address, choice).inc()
        return chosen

    def _holders(self, cached: Mapping[str, int]) -> Iterable[Core]:
        """Return the cores that hold most of a prompt."""
        able = (name for name in cached if name in self._cores and self._cores[name].replica.is_healthy)
        return (self._cores[name] for name in nlargest(NEAREST, able, cached.__getitem__))

    @cached_property
    def _cores(self) -> dict[str, Core]:
        return {core.name: core for replica in self.all for core in replica.cores}

    @cached_property
    def _ranking(self) -> Ranking:
        return Ranking(self._cores)

    @cached_property
    def _by_turns(self) -> Iterator[Core]:
        return cycle(self._cores.values())


def connector() -> aiohttp.TCPConnector:
    """Return a connector that opens a new connection for each request.

    An address may be a load balancer, which sends all requests of a reused connection to the same server.
    """
    return aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_lively_socket)


def _lively_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket with TCP keepalive, which detects a lost peer in 30 seconds even while a stream is silent."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
