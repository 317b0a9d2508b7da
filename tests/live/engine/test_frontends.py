"""Several frontends on the cores of one real vLLM."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import Any
from urllib.request import urlopen

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.frontends import frontends_in, states_of
from tests.support.processes import wait_for
from tests.support.serve_command import Command, running

ENDED = re.compile(r"has ended with status -9 and (\d+) running response")
MODEL = "tiny-gpt-oss"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Command, None, None]:
    store = tmp_path_factory.mktemp("frontends") / "store.sqlite3"
    with running(store, "--frontends", "2", "--no-sandbox") as command:
        wait_for(lambda: len(frontends(command)) == 2)
        yield command


def frontends(server: Command) -> dict[int, int]:
    """Return the processes of the frontends by number: the latest of each that has served."""
    return frontends_in(log_of(server))


def log_of(server: Command) -> str:
    return server.store.with_name("serve.log").read_text()


def scraped(server: Command, name: str) -> float:
    """Return the sum of a metric over all its labels."""
    with urlopen(f"{server.url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def new_client(server: Command) -> openai.OpenAI:
    """Return a client with connections of its own."""
    return server.client.copy(http_client=openai.DefaultHttpxClient(), max_retries=0)


def say_hello(server: Command) -> str:
    with new_client(server) as client:
        text: str = client.responses.create(model=MODEL, input="Say hello.").output_text
    return text


def id_of(event: Any) -> str:
    """Return the id of the response, from the first event of its stream."""
    return str(event.response.id)


def test_frontends_share_the_engine_and_its_metrics(served: Command) -> None:
    before = scraped(served, "vllm:request_success_total")
    with ThreadPoolExecutor(4) as clients:
        texts = set(clients.map(say_hello, [served] * 8))
    assert len(texts) == 1
    assert scraped(served, "vllm:request_success_total") == before + 8
    assert scraped(served, "penstock_responses_total") >= 8


def busiest(server: Command) -> int:
    """Return the number of the frontend that has the most connections."""
    pids = frontends(server)
    return max(pids, key=lambda number: len(psutil.Process(pids[number]).net_connections("tcp")))


def test_requests_of_a_killed_frontend_are_aborted_and_it_comes_back(served: Command) -> None:
    with ExitStack() as closing:
        clients = [closing.enter_context(new_client(served)) for _ in range(4)]
        streams = [client.responses.create(model=MODEL, input="Never stop talking.", stream=True) for client in clients]
        ids = [id_of(next(stream)) for stream in streams]
        for stream in streams:
            list(islice(stream, 20))
        assert scraped(served, "vllm:num_requests_running") == 4
        wait_for(lambda: sum(state.running for state in states_of(served.process.pid, 2)) == 4)
        before, victim = frontends(served), busiest(served)
        os.kill(before[victim], signal.SIGKILL)
        wait_for(lambda: ENDED.search(log_of(served)))
        (lost,) = map(int, ENDED.findall(log_of(served)))
        assert 2 <= lost <= 4
        wait_for(lambda: scraped(served, "vllm:num_requests_running") == 4 - lost)
        client = closing.enter_context(new_client(served))

        def states() -> Counter[str]:
            return Counter(str(client.responses.retrieve(each).status) for each in ids)

        wait_for(lambda: states() == Counter(failed=lost, in_progress=4 - lost))
        for each in ids:
            if client.responses.retrieve(each).status == "in_progress":
                client.responses.cancel(each)
    wait_for(lambda: scraped(served, "vllm:num_requests_running") == 0)
    wait_for(lambda: frontends(served)[victim] != before[victim])
    assert {say_hello(served) for _ in range(4)} == {say_hello(served)}  # each frontend answers some


def test_engine_that_dies_ends_the_responses_of_all(served: Command) -> None:
    """It is the last of this file, whose server is of no use after it."""
    with new_client(served) as one, new_client(served) as other:
        streams = [
            client.responses.create(model=MODEL, input="Never stop talking.", stream=True) for client in (one, other)
        ]
        for stream in streams:
            list(islice(stream, 20))
        (core,) = [each for each in psutil.Process(served.process.pid).children() if "EngineCore" in each.name()]
        core.kill()
        assert [list(stream)[-1].type for stream in streams] == ["response.failed"] * 2
