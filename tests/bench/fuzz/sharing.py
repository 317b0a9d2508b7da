"""Have a greedy key hold all that keys share: its uploads stand still, and its receiver of webhooks hangs.

The verdict is what an ordinary key gets meanwhile, and the number of calls that the receiver of the greedy one holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from hypothesis import strategies as st

from penstock.services import webhooks
from tests.bench.fuzz.fire import HANGS, Outcome, complaints
from tests.bench.fuzz.hostile import drawn
from tests.bench.fuzz.limits import GREEDY, ORDINARY, keyed_client
from tests.support.api_clients import ApiClient, wait_until
from tests.support.server_process import serve_with_webhooks, serving_process

DELIVERIES = 2 * webhooks.MOST_AT_ONCE
"""Background responses of the greedy key."""

CALLS = 20
"""Webhooks of the ordinary key, one after another."""

ANSWER = b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n"

_PART = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n'
_FILE = _PART % (b"file", b'; filename="a"')
_fields = st.lists(st.just(_PART % (b"purpose", b"") + b"user_data\r\n"), max_size=1).map(b"".join)
_content = st.sampled_from([0, 1, 1_000, 100_000]).map(bytes)
_heads = st.sampled_from([b"Content-Length: 200000\r\n", b"Content-Length: 9999999\r\n"])
unfinished_uploads = st.tuples(
    st.sampled_from([b"", b"anthropic-version: 2023-06-01\r\n"]),
    _heads,
    st.builds(lambda *p: b"".join(p), _fields, st.just(_FILE), _content),
)
"""A header, the length of a form, and its beginning."""

hanging_answers = st.builds(
    lambda count, cut: b"HTTP/1.1 102 Processing\r\n\r\n" * count + ANSWER[:cut],
    st.integers(0, 3),
    st.integers(0, len(ANSWER) - 1),
)
"""Beginnings of an answer."""


@dataclass
class Receiver:
    """A receiver of webhooks that begins these answers, and ends none, but for one that takes all if there are none."""

    answers: Sequence[bytes] = ()
    url: str = ""
    calls: int = 0
    open: int = 0
    most: int = 0
    """The most calls that were open at once."""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"}")
            self.calls += 1
            self.open += 1
            self.most = max(self.most, self.open)
            writer.write(self.answers[self.calls % len(self.answers)] if self.answers else ANSWER)
            if self.answers:
                await reader.read()
            self.open -= 1
        writer.close()


@asynccontextmanager
async def _receiving(receiver: Receiver) -> AsyncGenerator[Receiver, None]:
    server = await asyncio.start_server(receiver.take, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    try:
        yield receiver
    finally:
        server.close()


def _serve_patient(*arguments: str) -> None:
    """Serve with webhooks whose receivers may be silent for longer than the attack lasts."""
    webhooks.TIMEOUT = 10 * HANGS
    serve_with_webhooks(*arguments)


async def take_all(folder: Path, rounds: int, seed: int) -> dict[str, Outcome]:
    """Run a server with a greedy and an ordinary key; have the greedy one take all uploads, then all deliveries."""
    keys, uploads, calls = folder / "sharing", Outcome(), Outcome()
    hanging = Receiver(drawn(hanging_answers, rounds, seed))
    async with AsyncExitStack() as closing:
        other = await closing.enter_async_context(_receiving(Receiver()))
        await closing.enter_async_context(_receiving(hanging))
        keys.write_text(f"{GREEDY} name=greedy webhook={hanging.url}\n{ORDINARY} name=ordinary webhook={other.url}\n")
        keys.chmod(0o600)
        options = ("quick", "--no-sandbox", "--allow-address", "127.0.0.1", "--api-key-file", str(keys))
        server = await closing.enter_async_context(
            serving_process(_serve_patient, options, str(folder / "sharing.sqlite3"), folder)
        )
        greedy, ordinary = [await closing.enter_async_context(keyed_client(server, key)) for key in (GREEDY, ORDINARY)]
        flood = st.lists(unfinished_uploads, min_size=1, max_size=9)
        for forms in drawn(flood, rounds, seed):
            await _hold_uploads(greedy, ordinary, forms, uploads)
        await _hold_deliveries(greedy, ordinary, hanging, other, calls)
    held = f"webhooks beside a receiver that hangs (at most {hanging.most} calls at once)"
    return {
        "uploads beside those of a greedy key": uploads,
        held: calls,
        "after both": Outcome(faults=complaints(server)),
    }


async def _hold_uploads(
    greedy: ApiClient, ordinary: ApiClient, forms: Sequence[tuple[bytes, bytes, bytes]], outcome: Outcome
) -> None:
    """Leave uploads unfinished until the key gets no place for another one; the other key must get one."""
    url = urlsplit(greedy.url)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {GREEDY}\r\n".encode()
    async with AsyncExitStack() as closing:
        try:
            async with asyncio.timeout(HANGS):
                for api, length, body in cycle(forms):
                    _, writer = await asyncio.open_connection(url.hostname, url.port)
                    closing.callback(writer.close)
                    writer.write(head + api + length + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + body)
                    if await _upload(greedy) == 503:
                        break
        except TimeoutError:
            outcome.fault("the greedy key is never refused", forms)
        status = await _upload(ordinary)
    outcome.statuses[str(status)] += 1
    if status != 200:
        outcome.fault("the ordinary key has no place", forms)


async def _upload(client: ApiClient) -> int:
    form = aiohttp.FormData({"purpose": "user_data"})
    form.add_field("file", b"Hello", filename="a.txt")
    async with client.client.post(f"{client.url}/v1/files", data=form) as answer:
        return answer.status


async def _hold_deliveries(
    greedy: ApiClient, ordinary: ApiClient, hanging: Receiver, other: Receiver, outcome: Outcome
) -> None:
    """End responses of the greedy key, whose receiver hangs, and then of the other one, whose receiver is called."""
    body = {"input": "Hi", "background": True}
    try:
        for _ in range(DELIVERIES):
            await greedy.post(body)
        await wait_until(lambda: hanging.open >= webhooks.MOST_TO_ONE)
        for number in range(1, CALLS + 1):
            await ordinary.post(body)
            await wait_until(lambda: other.calls >= number)  # noqa: B023 - it is called in this round alone
            outcome.statuses["delivered"] += 1
    except TimeoutError:
        outcome.fault("a receiver is not called", other.calls)
    if hanging.most > webhooks.MOST_TO_ONE:
        outcome.fault("a receiver that hangs holds too many places", hanging.most)
