"""Many clients of one server in a process of their own, as cheap as possible: it reads answers without parsing them.

    python -m tests.bench.readers PORT STREAMS BODY [--path PATH] [--read FILE] [--arrivals FILE]

To the FILE of arrivals, it writes one `ARRIVAL` for each block that holds a `MARK`, and to that of ``--read`` how many
of these there were, as a `COUNT`.

It polls its sockets every few milliseconds and sleeps in between.  If it waited for data, each write of the server
would wake it, and in a virtual machine that costs the server more than the write itself.
"""

from __future__ import annotations

import argparse
import os
import select
import struct
import time
from pathlib import Path

from tests.bench.wire import END, RESPONSES, connected, posted

PAUSE = 0.003

ARRIVAL = struct.Struct("=dII")
"""One block: arrival on the monotonic clock, file descriptor of the stream, and number of `MARK` tokens."""

COUNT = struct.Struct("=Q")
"""The number of `MARK` tokens that all streams together have read."""

MARK = b"~"
"""Text of each measured token.  It occurs nowhere else in a stream."""

ACCEPTED = b"HTTP/1.1 200 OK\r\n"


def read_all(port: int, streams: int, request: bytes, read: Path | None = None, arrivals: Path | None = None) -> None:
    """Read ``streams`` answers to their ends; raise `SystemExit` if one is refused or breaks off."""
    noted, counted, count = arrivals and arrivals.open("wb"), read and os.open(read, os.O_WRONLY), 0
    polling, clients = select.epoll(), {}
    tails: dict[int, bytes] = {}
    for _ in range(streams):
        client = connected(port)
        client.sendall(request)
        client.setblocking(False)
        clients[client.fileno()] = client
        polling.register(client, select.EPOLLIN)
    buffer = bytearray(2**20)
    while clients:
        time.sleep(PAUSE)
        if noted:
            noted.flush()
        for descriptor, _ in polling.poll(0, maxevents=streams):
            size = clients[descriptor].recv_into(buffer)
            if descriptor not in tails and not buffer.startswith(ACCEPTED):
                raise SystemExit(f"Refused: {bytes(buffer[:300])!r}")
            tokens = buffer.count(MARK, 0, size)
            count += tokens
            if noted and tokens:
                noted.write(ARRIVAL.pack(time.monotonic(), descriptor, tokens))
            if size:
                tails[descriptor] = bytes(buffer[max(0, size - len(END)) : size])
                continue
            polling.unregister(descriptor)
            clients.pop(descriptor).close()
            if tails[descriptor] != END:
                raise SystemExit(f"A stream broke off behind {tails[descriptor]!r}")
        if counted:
            os.pwrite(counted, COUNT.pack(count), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("streams", type=int)
    parser.add_argument("body", type=str.encode)
    parser.add_argument("--path", default=RESPONSES)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--arrivals", type=Path)
    chosen = parser.parse_args()
    read_all(chosen.port, chosen.streams, posted(chosen.body, "close", chosen.path), chosen.read, chosen.arrivals)
