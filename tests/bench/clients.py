"""Clients of the measured server, in a process of their own, so that their CPU time is not counted.

    python -m tests.bench.clients PORT COUNT BODY

The module imports little, so that it starts quickly, and reads streams without parsing them.
"""

from __future__ import annotations

import asyncio
import sys

END = b"data: [DONE]\n\n"


async def read(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


async def read_all(port: int, count: int, body: bytes) -> None:
    """Read ``count`` streams at once, each to its end; exit with an error if one breaks off."""
    answers = await asyncio.gather(*(read(port, body) for _ in range(count)))
    if broken := [answer for answer in answers if END not in answer[-100:]]:
        sys.exit(f"{len(broken)} streams broke off, as this one: {broken[0][-300:]!r}")


if __name__ == "__main__":
    asyncio.run(read_all(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()))
