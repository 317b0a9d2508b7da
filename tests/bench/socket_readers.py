"""Many streams over sockets, for a process of its own: like `tests.bench.readers`, over another transport.

python -m tests.bench.socket_readers PORT SOCKETS LANES BODY
"""

from __future__ import annotations

import json
import select
import sys
import time

from tests.bench.readers import PAUSE
from tests.bench.wire import CLOSE, COMPLETED, framed, upgraded


def read_all(port: int, sockets: int, lanes: int, body: bytes) -> None:
    """Read an answer in each lane of each socket; raise `SystemExit` if a socket closes before their ends."""
    fields = json.loads(body)
    names: list[dict[str, str]] = [{"stream_id": f"lane{lane}"} for lane in range(lanes)] if lanes > 1 else [{}]
    creates = b"".join(framed(json.dumps({"type": "response.create", **name, **fields}).encode()) for name in names)
    polling, clients = select.epoll(), {}
    for _ in range(sockets):
        client = upgraded(port)
        client.sendall(creates)
        clients[client.fileno()] = client
        polling.register(client, select.EPOLLIN)
    complete, tails = dict.fromkeys(clients, 0), dict.fromkeys(clients, b"")
    while clients:
        time.sleep(PAUSE)
        for descriptor, _ in polling.poll(0, maxevents=sockets):
            if block := clients[descriptor].recv(2**20):
                read = tails[descriptor] + block
                complete[descriptor] += read.count(COMPLETED)
                tails[descriptor] = read[1 - len(COMPLETED) :]
                if complete[descriptor] == lanes:
                    clients[descriptor].sendall(CLOSE)
                    complete[descriptor] += 1
                continue
            polling.unregister(descriptor)
            clients.pop(descriptor).close()
            if complete[descriptor] != lanes + 1:
                raise SystemExit(f"A socket closed behind {tails[descriptor]!r}")


if __name__ == "__main__":
    read_all(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode())
