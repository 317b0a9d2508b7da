"""One real server for all clients, which the command ``--serve`` starts.

``--behind`` may be a command that starts a `vllm serve`, which is then the server's engine.  These tests run in an
environment of their own (`make clients`) without penstock, as the clients of real users do.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import openai
import pytest

from tests.support.starting import Starting, starting_server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing LiteLLM fetches prices from the network


@pytest.fixture(scope="module")
def client(url: str) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def starting(penstock: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Starting, None, None]:
    with starting_server(penstock, tmp_path_factory.mktemp("starting")) as server:
        yield server
