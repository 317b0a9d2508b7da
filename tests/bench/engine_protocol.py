"""vLLM's protocol between an engine core and its frontend, over ZeroMQ: both sides, without vLLM.

The core dials the frontend's handshake address, learns two more, and says what it can do.  Requests come to it as
msgpack arrays, each behind a byte with its kind, and its outputs go back as arrays.  Fields that nobody here needs are
neither read nor written, so that releases of vLLM that append fields are served as well: 0.32 and 0.33 are.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import zmq
import zmq.asyncio

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"

STOP = 0
"""The number of the reason ``stop``."""

RANK = (0).to_bytes(2, "little")
"""The name of the first data parallel rank on each socket."""

SUPPORTED = {"get_supported_tasks": ["generate"], "get_weight_version": ""}
"""The results of the calls of a frontend; other calls return nothing."""

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder[Any]().decode


class _Request(msgspec.Struct, array_like=True):
    request_id: str


class _Output(msgspec.Struct, array_like=True, omit_defaults=True):
    """The tokens of a request in a step, and why it ends, if it does; what is between them is None."""

    request_id: str
    tokens: Sequence[int]
    logprobs: None = None
    prompt_logprobs: None = None
    pooled: None = None
    finish_reason: int | None = None


class _Step(msgspec.Struct, array_like=True):
    rank: int
    outputs: list[_Output]
    statistics: None
    timestamp: float


_read_request = msgspec.msgpack.Decoder(_Request).decode
_read_step = msgspec.msgpack.Decoder(_Step).decode


class Core:
    """An engine core of rank 0, which a frontend has accepted."""

    def __init__(self, handshake: str, context_length: int) -> None:
        self._closing = ExitStack()
        context = self._closing.enter_context(zmq.Context())
        greeting = self._dial(context, zmq.DEALER, handshake)
        greeting.send(_encode({"status": "HELLO", "local": False, "headless": True}))
        addresses = _decode(greeting.recv())["addresses"]
        self.requests = self._dial(context, zmq.DEALER, addresses["inputs"][0])
        self._outputs = self._dial(context, zmq.PUSH, addresses["outputs"][0])
        self.requests.send(_encode(abilities(context_length)))
        greeting.send(_encode({"status": "READY", "local": False, "headless": True}))

    def _dial(self, context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[bytes]:
        dialled: zmq.Socket[bytes] = self._closing.enter_context(context.socket(kind))
        dialled.setsockopt(zmq.IDENTITY, RANK)
        dialled.setsockopt(zmq.SNDHWM, 0)  # as vLLM's: a slow frontend does not stop the engine
        dialled.setsockopt(zmq.LINGER, 0)
        dialled.connect(address)
        return dialled

    def close(self) -> None:
        self._closing.close()

    def read(self, seconds: float = 0.0) -> Iterator[tuple[bytes, list[str]]]:
        """Yield what has come, `ADD` or `ABORT` with the ids of requests, after a wait for something to come."""
        wait = seconds
        while self.requests.poll(int(wait * 1000)):
            kind, data, *_ = self.requests.recv_multipart()
            if kind == ADD:
                yield kind, [_read_request(data).request_id]
            elif kind == ABORT:
                yield kind, _decode(data)
            elif kind == UTILITY:
                self._answer(*_decode(data))
            wait = 0.0

    def _answer(self, client: int, call: int, method: str, _: Any) -> None:
        """Answer a call of the frontend's; it has no type, and no error."""
        result = (None, SUPPORTED.get(method))
        self._outputs.send(_encode((client, (), None, time.monotonic(), (call, None, result))))

    def step(self, request_ids: Iterable[str], tokens: Sequence[int], finish_reason: int | None = None) -> None:
        """Send the tokens of a step, the same to each request."""
        outputs = [_Output(request_id, tokens, finish_reason=finish_reason) for request_id in request_ids]
        self._outputs.send(_encode(_Step(0, outputs, None, time.monotonic())))


def abilities(context_length: int) -> dict[str, Any]:
    sizes = ("world", "data_parallel", "tensor_parallel", "pipeline_parallel", "decode_context_parallel")
    return dict.fromkeys((f"{size}_size" for size in sizes), 1) | {
        "max_model_len": context_length,
        "num_gpu_blocks": 1_000,
        "block_size": 16,
        "dp_stats_address": None,
        "dtype": "bfloat16",
        "vllm_version": "0.33.0",
        "data_parallel_rank": 0,
        "max_num_seqs": 4_096,
        "max_num_batched_tokens": 8_192,
        "instance_id": "stand-in",
        "supports_lora": False,
        "max_loras": 0,
    }


class Frontend:
    """The other side: what a frontend of one engine core does, as little as is possible."""

    def __init__(self, handshake: str) -> None:
        self._closing = ExitStack()
        context: zmq.asyncio.Context = self._closing.enter_context(zmq.asyncio.Context())
        self._greeting = self._bind(context, zmq.ROUTER, handshake)
        self._requests = self._bind(context, zmq.ROUTER, "tcp://127.0.0.1:*")
        self._outputs = self._bind(context, zmq.PULL, "tcp://127.0.0.1:*")

    def _bind(self, context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
        bound: zmq.asyncio.Socket = self._closing.enter_context(context.socket(kind))
        bound.setsockopt(zmq.LINGER, 0)
        bound.bind(address)
        return bound

    def close(self) -> None:
        self._closing.close()

    async def accept(self) -> dict[str, Any]:
        """Wait for the core, and return what it can do."""
        identity, _ = await self._greeting.recv_multipart()
        inputs, outputs = ([_endpoint(each)] for each in (self._requests, self._outputs))
        told = {"addresses": {"inputs": inputs, "outputs": outputs}, "parallel_config": {}}
        await self._greeting.send_multipart((identity, _encode(told)))
        _, abilities = await self._requests.recv_multipart()
        await self._greeting.recv_multipart()
        can: dict[str, Any] = _decode(abilities)
        return can

    async def add(self, request_id: str) -> None:
        await self.send(ADD, (_encode((request_id,)),))

    async def abort(self, *request_ids: str) -> None:
        await self.send(ABORT, (_encode(request_ids),))

    async def call(self, number: int, method: str) -> None:
        await self.send(UTILITY, (_encode((0, number, method, ())),))

    async def send(self, kind: bytes, message: Sequence[Any]) -> None:
        await self._requests.send_multipart((RANK, kind, *message))

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield what the core sends."""
        while True:
            yield await self._outputs.recv()

    async def steps(self) -> AsyncGenerator[list[_Output], None]:
        """Yield the outputs of each step."""
        async for message in self.messages():
            yield _read_step(message).outputs


def _endpoint(bound: zmq.asyncio.Socket) -> str:
    address = bound.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode()
