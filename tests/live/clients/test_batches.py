"""openai-python: batches of requests in files, over a real engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say hello."}]},
    "/v1/responses": {"input": "Say hello."},
    "/v1/completions": {"prompt": "Say", "max_tokens": 5},
}


def over(client: openai.OpenAI, batch_id: str) -> Any:
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.05)
    return batch


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_batch_of_a_file(client: openai.OpenAI, tmp_path: Path, endpoint: Any) -> None:
    body = {"model": "tiny-gpt-oss", "temperature": 0, **ENDPOINTS[endpoint]}
    lines = [{"custom_id": f"request-{number}", "method": "POST", "url": endpoint, "body": body} for number in range(5)]
    path = tmp_path / "batchinput.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with path.open("rb") as opened:
        batch_input_file = client.files.create(file=opened, purpose="batch")
    created = client.batches.create(
        input_file_id=batch_input_file.id,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"description": "nightly eval job"},
    )
    batch = over(client, created.id)
    assert batch.status == "completed", batch
    file_response = client.files.content(batch.output_file_id)
    results = {line["custom_id"]: line["response"] for line in map(json.loads, file_response.text.splitlines())}
    assert results.keys() == {line["custom_id"] for line in lines}
    assert {result["status_code"] for result in results.values()} == {200}
    used = [result["body"]["usage"] for result in results.values()]
    assert batch.usage.total_tokens == sum(each["total_tokens"] for each in used)
    assert batch.id in [each.id for each in client.batches.list(limit=10)]
