"""A server that sends the ids of tokens as vLLM does, if a request wants them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Json = dict[str, Any]

PROMPT = (1, 2, 3)


@dataclass
class TokenUpstream:
    """Answers with chunks of tokens; a token's text is its number."""

    chunks: Sequence[Sequence[int]]
    models: Sequence[Json] = ({"id": "m", "root": "somewhere/model"},)
    models_status: int = 200
    prompt: Sequence[int] = PROMPT
    url: str = ""
    requests: list[tuple[str, Json, dict[str, str]]] = field(default_factory=list)
    """The path, the body and the headers of each request."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat or a completion."""
        data = await request.read()
        if "Content-Encoding" not in request.headers:
            assert len(data) == int(request.headers.get("Content-Length", len(data)))
        body = json.loads(data)
        self.requests.append((request.path, body, dict(request.headers)))
        if body.get("refuse") and "return_token_ids" in body:
            return web.json_response({"error": {"message": "return_token_ids is unknown"}}, status=400)
        events = answers(self.chunks, body, is_chat="messages" in body, prompt=self.prompt)
        if not body.get("stream"):
            return web.json_response(events[-1])
        lines = [f"data: {json.dumps(event)}\n\n" for event in events[:-1]]
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for line in [*lines, "data: [DONE]\n\n"]:
            await stream.write(line.encode())
        return stream

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        """Answer with the list of models."""
        self.requests.append((request.path, {}, dict(request.headers)))
        return web.json_response({"object": "list", "data": self.models}, status=self.models_status)

    @property
    def lists(self) -> list[dict[str, str]]:
        """The headers of the requests for the list of models."""
        return [headers for path, _, headers in self.requests if path.endswith("/models")]


def answers(
    chunks: Sequence[Sequence[int]], body: Json, *, is_chat: bool, prompt: Sequence[int] = PROMPT
) -> list[Json]:
    """Return the events of an answer, and last its whole body."""
    wants, logprobs = bool(body.get("return_token_ids")), bool(body.get("logprobs"))
    tokens = [token for chunk in chunks for token in chunk]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    given: Json = {"prompt_token_ids": list(prompt)} if wants else {}
    name = (lambda token: f"token_id:{token}") if body.get("return_tokens_as_token_ids") else str

    def choice(ids: Sequence[int], kind: str, *, ends: bool) -> Json:
        text = "".join(map(str, ids))
        said: Json = {kind: {"content": text}} if is_chat else {"text": text}
        return {
            "index": 0,
            **said,
            **({"token_ids": list(ids)} if wants else {}),
            **({"logprobs": probable(ids)} if logprobs else {}),
            "finish_reason": "stop" if ends else None,
        }

    def probable(ids: Sequence[int]) -> Json:
        if is_chat:
            others = [{"token": name(token), "logprob": value} for token, value in ((7, -2.0), (8, -1.0))]
            return {"content": [{"token": name(each), "logprob": -2.0, "top_logprobs": others} for each in ids]}
        top = [{name(each): -2.0, name(8): -1.0} for each in ids]
        return {"tokens": list(map(name, ids)), "token_logprobs": [-2.0] * len(ids), "top_logprobs": top}

    whole = {"choices": [choice(tokens, "message", ends=True) | ({} if is_chat else given)], "usage": usage}
    parts = [{"choices": [choice(chunk, "delta", ends=False)]} for chunk in chunks]
    parts.append({"choices": [choice((), "delta", ends=True)]})
    if is_chat:
        parts.insert(0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], **given})
    else:
        parts[0]["choices"][0] |= given
    return [*parts, {"choices": [], "usage": usage}, whole | (given if is_chat else {})]


@asynccontextmanager
async def token_upstream(chunks: Sequence[Sequence[int]], **options: Any) -> AsyncGenerator[TokenUpstream, None]:
    """Serve tokens for the length of the block."""
    upstream = TokenUpstream(chunks, **options)
    app = web.Application()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        app.router.add_post(path, upstream.answer)
    app.router.add_get("/v1/models", upstream.list_models)
    async with TestServer(app) as server:
        upstream.url = f"http://{server.host}:{server.port}"
        yield upstream
