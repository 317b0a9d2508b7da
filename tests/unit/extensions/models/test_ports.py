"""The port that penstock keeps for the process of a model."""

from __future__ import annotations

import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from penstock.extensions.models.child import Port

pytestmark = pytest.mark.io

OPTIONS = (
    (socket.SO_REUSEADDR,),  # uvicorn, and with it vLLM
    (socket.SO_REUSEPORT,),  # llama.cpp
    (socket.SO_REUSEADDR, socket.SO_REUSEPORT),
)


@pytest.mark.parametrize("options", OPTIONS)
def test_servers_of_all_kinds_listen_on_it(options: tuple[int, ...]) -> None:
    with closing(Port()) as port, socket.socket() as server:
        assert urlsplit(port.url).port == port.number
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind(("127.0.0.1", port.number))
        server.listen()
        with socket.create_connection(("127.0.0.1", port.number)), server.accept()[0]:
            pass
