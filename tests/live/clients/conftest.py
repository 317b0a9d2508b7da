"""One real server for all clients, which the command ``--serve`` starts.

``--behind`` may be a command that starts a `vllm serve`, which is then the server's engine.  These tests run in an
environment of their own (`make clients`) without penstock, as the clients of real users do.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import openai
import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing LiteLLM fetches prices from the network


@pytest.fixture(scope="module")
def client(url: str) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
