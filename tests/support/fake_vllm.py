"""Fake vLLM servers with the two token endpoints of vLLM 0.32 and their faults, and an engine over them.

A fake server answers every prompt with ``tokens``.  A request without ``stream`` comes from an engine that probes its
servers, and gets a fixed answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any, Literal

from aiohttp import web

from penstock.pipeline.core import source_of
from penstock.pipeline.frames import Prompt, RequestFacts, Sampling
from penstock.pipeline.protocol.events import TerminalEvent
from penstock.pipeline.protocol.items import Message
from penstock.pipeline.protocol.params.validation import read_request
from penstock.services.engines.affinity import Ranking
from penstock.services.engines.http_endpoints import LET_GO
from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.event_streams import harmony_pipeline
from tests.support.processes import free_port
from tests.support.stored_responses import facts, pop_fields, response

MARKERS = "<|start|><|channel|><|message|>"
MARKER_IDS = [200006, 200005, 200008]


def arguments_of(body: dict[str, Any]) -> Any:
    """Return the arguments for plug-ins in a request."""
    return body["sampling_params"].get("extra_args") if "sampling_params" in body else body.get("vllm_xargs")


Fault = Literal["", "dies", "ends", "hangs", "garbage", "mute", "error", "abort"]


@dataclass
class FakeVllm:
    """One server; a change of its fields takes effect at once."""

    tokens: Sequence[int] = (11, 12, 13, 14, 15)
    names: tuple[str, ...] = ("tiny", "also-tiny")
    adapters: tuple[str, ...] = ("nonsense",)
    root: str = "/models/tiny"
    make: str = "vllm"
    """The make of the server, as its models name it."""
    context_length: int | None = 8192
    scale_out: bool = True
    tells_ids: bool = True
    markers: list[int] | None = field(default_factory=lambda: list(MARKER_IDS))
    """Token ids of Harmony's markers in the server's tokenizer; None if the server has no tokenizer."""
    tokenizes: bool = True
    """False if requests for tokens are refused, as by a gateway that does not know their path."""
    grammars: Literal["held", "ignored", "refused"] = "held"
    key: str | None = None
    takes_hints: bool = False
    """True if its scheduler is penstock's."""

    chunk_size: int = 1
    latency: float = 0.0
    """Seconds before each chunk."""
    silence: float = 0.0
    """Seconds before the first chunk, in addition."""
    endless: bool = False
    status: int = 200
    """HTTP status of answers to prompts; if it is not 200, ``words`` is the body."""
    words: Any = None
    fault: Fault = ""
    after: int = 0
    """Tokens before the fault."""
    cached_tokens: int | None = None
    weights: Sequence[tuple[str, int, int]] | None = None
    """The versions of the weights, by tokens, that `/inference/v1/generate` names at the end."""
    is_well: bool = True
    is_silent: bool = False
    """True if requests for health, models and tokens get no answer."""

    prompts: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    """Requests of other clients, all at the last rank."""
    ranks: int = 1
    """Data parallel ranks."""
    aborted: int = 0
    generated: int = 0
    """Tokens generated in all."""
    port: int = field(default_factory=free_port)
    _runner: web.AppRunner | None = None
    _at: Counter[int] = field(default_factory=Counter)
    """The running requests of each rank."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        """Stop at once, in the middle of any request."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        await self._wake()
        return web.Response(status=200 if self.is_well else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        await self._wake()
        last = self.ranks - 1
        lines = [
            f'vllm:num_requests_{name}{{engine="{rank}",model_name="tiny"}} {float(number)}'
            for rank in range(self.ranks)
            for name, number in (("running", self._at[rank]), ("waiting", self.waiting if rank == last else 0))
        ]
        return web.Response(text="\n".join(["# TYPE vllm:num_requests_running gauge", *lines, "vllm:other 7.0", ""]))

    async def _sources(self, _: web.Request) -> web.Response:
        await self._wake()
        return web.json_response({rank: {"endpoint": f"tcp://*:{5557 + rank}"} for rank in reversed(range(self.ranks))})

    async def _models(self, request: web.Request) -> web.Response:
        await self._wake()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        cards = [
            {
                "id": name,
                "object": "model",
                "owned_by": self.make,
                "root": self.root,
                "parent": None,
                "max_model_len": self.context_length,
            }
            for name in self.names
        ]
        cards += [
            {"id": name, "object": "model", "root": f"/adapters/{name}", "parent": self.names[0], "max_model_len": None}
            for name in self.adapters
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["prompt"] == MARKERS
        if self.markers is None or not self.tokenizes:
            return _error_answer(400, "There is no tokenizer.")
        return web.json_response({"count": len(self.markers), "max_model_len": 8192, "tokens": self.markers})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return _error_answer(403, "The scale-out endpoints are off.")
        body = await request.json()
        return await self._answer(request, body, body["sampling_params"], _generate_chunk)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body, _completions_chunk)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], sampling: dict[str, Any], spell: Any
    ) -> web.StreamResponse:
        await self._wake()
        is_scored = sampling.get("prompt_logprobs") is not None
        if not (body.get("stream") or is_scored):
            return self._reply(sampling, body)
        rank = int(request.headers.get("X-data-parallel-rank", 0))
        if rank >= self.ranks:
            return _error_answer(400, f"data_parallel_rank {rank} is out of range [0, {self.ranks}).")
        self.prompts.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return web.json_response(self.words, status=self.status)
        self.running += 1
        self._at[rank] += 1
        try:
            if is_scored:
                return await self._score(body, sampling, spell)
            return await self._stream(request, sampling, spell)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1
            self._at[rank] -= 1

    def _reply(self, sampling: dict[str, Any], body: dict[str, Any]) -> web.Response:
        prompt = body.get("prompt")
        if prompt == MARKERS and self.markers is None:
            return _error_answer(400, "There is no tokenizer.")
        ids = [9] * sampling["max_tokens"]
        if sampling.get("structured_outputs"):
            if self.grammars == "refused":
                return _error_answer(400, "Failed to convert the grammar from GBNF to Lark.")
            if self.grammars == "held":
                ids = [5, 6, 7][: sampling["max_tokens"]]
        choice = {"index": 0, "finish_reason": "length", "token_ids": ids if self.tells_ids else None}
        if prompt == MARKERS:
            choice["prompt_token_ids"] = self.markers
        asks = LET_GO in (arguments_of(body) or ())
        transfer = {"kv_transfer_params": {LET_GO: True}} if asks and self.takes_hints else {}
        return web.json_response({"choices": [choice]} | transfer)

    async def _stream(self, request: web.Request, sampling: dict[str, Any], spell: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await asyncio.sleep(self.silence)
        played = _stopped(cycle(self.tokens) if self.endless else self.tokens, sampling["stop_token_ids"])
        tokens = islice(played, sampling["max_tokens"])
        generated = 0
        while chunk := list(islice(tokens, self._room(generated))):
            await asyncio.sleep(self.latency)
            generated += len(chunk)
            self.generated += len(chunk)
            await response.write(spell(self, chunk, sampling["logprobs"], chosen=sampling.get("logprob_token_ids", ())))
            if self.fault and generated >= self.after:
                break
        if self.fault:
            return await self._fail(request, response, spell)
        await response.write(spell(self, [], None, "length" if generated == sampling["max_tokens"] else "stop"))
        await response.write(self._usage(generated) + b"data: [DONE]\n\n")
        return response

    async def _score(self, body: dict[str, Any], sampling: dict[str, Any], spell: Any) -> web.StreamResponse:
        """Answer as a whole, which vLLM does if log probabilities of the prompt are requested."""
        assert not body.get("stream")
        await asyncio.sleep(self.silence + self.latency)
        if self.fault == "garbage":
            return web.Response(body=b'{"choices": [{"token_ids": [1,')
        tokens = list(self.tokens)[: sampling["max_tokens"]]
        answer = json.loads(spell(self, tokens, sampling["logprobs"], "length").removeprefix(b"data: "))
        scores = [None, *(position(token, sampling["prompt_logprobs"]) for token in prompt_of(body)[1:])]
        (answer if "token_ids" in body else answer["choices"][0])["prompt_logprobs"] = scores
        return web.json_response(answer | {"usage": {"prompt_tokens": len(scores)}})

    def _room(self, generated: int) -> int:
        """The size of the next chunk; a fault comes after exactly ``after`` tokens."""
        return min(self.chunk_size, self.after - generated) if self.fault else self.chunk_size

    async def _fail(self, request: web.Request, response: web.StreamResponse, spell: Any) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        match self.fault:
            case "dies":
                transport.abort()
            case "hangs":
                await asyncio.Event().wait()
            case "garbage":
                await response.write(b'data: {"choices": [{"token_ids": [1,\n\n')
            case "mute":
                await response.write(b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n')
            case "error":
                await response.write(_sse_line({"error": self.words}) + b"data: [DONE]\n\n")
            case "abort":
                await response.write(spell(self, [], None, "abort") + b"data: [DONE]\n\n")
            case "" | "ends":
                pass
        return response

    def _usage(self, generated: int) -> bytes:
        details = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        usage = {"prompt_tokens": 77, "completion_tokens": generated, "prompt_tokens_details": details}
        return _sse_line({"request_id": "x", "choices": [], "usage": usage})

    async def _wake(self) -> None:
        while self.is_silent:
            await asyncio.sleep(0.02)


def prompt_of(body: dict[str, Any]) -> list[int]:
    tokens: list[int] = body["token_ids"] if "token_ids" in body else body["prompt"]
    return tokens


def position(token: int, top: int) -> dict[str, Any]:
    """The log probabilities at a token of a prompt: its own first, as with vLLM; its rank is 1, or 60000."""
    rank = 60000 if token % 2 else 1
    others = enumerate(pair for pair in alternatives(token, top) if pair[0] != token)
    return {str(token): {"logprob": own_logprob(token), "rank": rank, "decoded_token": "x"}} | {
        str(other): {"logprob": value, "rank": place + 1, "decoded_token": "y"} for place, (other, value) in others
    }


def _stopped(tokens: Iterable[int], stops: Collection[int]) -> Iterator[int]:
    """Yield the tokens up to the first of ``stops``."""
    for token in tokens:
        yield token
        if token in stops:
            return


@asynccontextmanager
async def running_fakes(*servers: FakeVllm) -> AsyncGenerator[None, None]:
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            server.is_silent = False
            with suppress(ConnectionError):
                await server.stop()


def alternatives(token: int, top: int) -> list[tuple[int, float]]:
    """The ``top`` likeliest tokens at the position of ``token``, which is the first of them if its id is even."""
    ranked = count(1000) if token % 2 else (token, *range(1000, 1000 + top))
    return [(other, -0.5 - rank) for rank, other in enumerate(islice(ranked, top))]


def own_logprob(token: int) -> float:
    """The log probability of a token: the highest of all if its id is even, else the lowest."""
    return -50.0 if token % 2 else -0.5


def _reported(token: int, top: int, chosen: Sequence[int]) -> list[tuple[int, float]]:
    """The alternatives of a completion: the sampled token, and the likeliest tokens or the chosen ones."""
    if chosen:
        return [(each, own_logprob(each)) for each in dict.fromkeys((token, *chosen))]
    return _ranked(token, top)[: top + 1]


def _ranked(token: int, top: int) -> list[tuple[int, float]]:
    """The alternatives in vLLM's order: the sampled token goes first."""
    return [(token, own_logprob(token)), *(pair for pair in alternatives(token, top) if pair[0] != token)]


def _generate_chunk(
    server: FakeVllm, tokens: list[int], top: int | None, reason: str | None = None, chosen: Sequence[int] = ()
) -> bytes:
    logprobs: dict[str, Any] | None = None
    if top is not None:
        content = [
            {
                "token_id": token,
                "logprob": own_logprob(token),
                "rank": 1,
                "top_logprobs": [
                    {"token_id": other, "logprob": value, "rank": 1}
                    for other, value in _reported(token, top, chosen)[: max(top, 1)]
                ],
            }
            for token in tokens
        ]
        logprobs = {"content": content}
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
    }
    named = [{"version": version, "start": start, "end": end} for version, start, end in server.weights or ()]
    choice |= {"sampling_mask": None, "weight_versions": (named or None) if reason else None, "logprobs": logprobs}
    return _sse_line({"request_id": "x", "usage": None, "output_mode": "tokens", "choices": [choice]})


def _completions_chunk(
    _: FakeVllm, tokens: list[int], top: int | None, reason: str | None = None, chosen: Sequence[int] = ()
) -> bytes:
    logprobs: dict[str, Any] | None = None
    if top is not None:
        logprobs = {
            "text_offset": [0] * len(tokens),
            "token_logprobs": [own_logprob(token) for token in tokens],
            "tokens": [f"token_id:{token}" for token in tokens],
            "top_logprobs": [
                {f"token_id:{other}": value for other, value in _reported(token, top, chosen)} for token in tokens
            ],
        }
    choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": reason}
    choice |= {"stop_reason": None, "prompt_token_ids": [1] * 9, "token_ids": tokens}
    return _sse_line({"id": "x", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]})


def _sse_line(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _error_answer(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def prompt_for_fakes(**fields: Any) -> Prompt:
    """A prompt for the model of the fakes; fields such as ``max_tokens`` set its sampling parameters."""
    sampling: dict[str, Any] = {"max_tokens": 100} | pop_fields(Sampling, fields)
    begun = response(fields.pop("id", "resp_1"), model=fields.pop("model", "tiny"))
    of_request = pop_fields(RequestFacts, fields)
    known: dict[str, Any] = {"token_ids": (1, 2, 3), "stop_token_ids": (200002,)}
    return Prompt(facts(begun, sampling=Sampling(0.0, 1.0, **sampling), **of_request), **(known | fields))


def prompt_at(server: FakeVllm, engine: VllmHttpEngine, **fields: Any) -> Prompt:
    """A prompt of a conversation whose home is this server of the engine."""
    ranking = Ranking([replica.url for replica in engine.replicas.all])
    prompts = (prompt_for_fakes(id=f"resp_{number}", **fields) for number in count())
    return next(prompt for prompt in prompts if next(ranking.of(prompt.facts)) == server.url)


@asynccontextmanager
async def engine_over(*servers: FakeVllm, **options: Any) -> AsyncGenerator[VllmHttpEngine, None]:
    """Run the servers, and an engine over them, for the length of the block."""
    async with running_fakes(*servers):
        engine = await start_vllm_http([server.url for server in servers], **{"interval": 0.05, **options})
        try:
            yield engine
        finally:
            await engine.close()


LIGHT_ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"


async def main() -> None:
    encoding = load_encoding()
    async with engine_over(FakeVllm(encoding.encode_markup(LIGHT_ANSWER))) as engine:
        pipeline = harmony_pipeline(engine)
        request = read_request(json.dumps({"model": "tiny", "input": "Hi"}).encode())
        async with pipeline.open(source_of([request])) as events:
            *_, last = [event async for event in events]
    assert isinstance(last, TerminalEvent)
    message = last.response.output[-1]
    assert isinstance(message, Message)
    sys.stdout.write(json.dumps(message.text))


if __name__ == "__main__":
    asyncio.run(main())
