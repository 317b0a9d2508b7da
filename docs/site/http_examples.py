"""The requests that the pages of the HTTP API show, in the order in which they run.

A request may use what an earlier answer had: ``{response_id}`` in a path, and ``$response_id`` in a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL, EMBEDDER = "tiny-gpt-oss", "tiny-embedder"
CLIENT, ANTHROPIC = "PENSTOCK_API_KEY", "ANTHROPIC_API_KEY"
OPERATOR, METRICS = "PENSTOCK_OPERATOR_KEY", "PENSTOCK_METRICS_KEY"
"""The variables of a shell with the keys that requests need."""


UPLOAD: Mapping[str, Any] = {"bytes": 69, "filename": "tea.md", "mime_type": "text/markdown", "purpose": "user_data"}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A request to a ``route``, such as ``GET /v1/files``, and the ``status`` of its answer.

    ``keeps`` has the names of values of the answer for later requests, each with its place, such as ``data.0.id``.
    With ``until``, the request is repeated until ``status`` of its answer is that: what it asks about takes time.
    """

    route: str
    query: str = ""
    body: Any = None
    form: Mapping[str, str] = field(default_factory=dict)
    keeps: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    until: str = ""
    interrupts: bool = False
    """True if it is sent as soon as the model is busy."""
    title: str = ""
    """Its difference from another example of its route."""
    key: str = CLIENT
    """The variable with the key that it needs; empty for none."""
    accept: str = ""
    """The value of the header."""
    shows: str = ""
    """A text in each line of a long answer that the page shows."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path of the route."""
        return self.route.partition(" ")[2]


@dataclass(frozen=True)
class Group:
    """Routes that share a page: its heading and file, the page about the subject, and the examples."""

    title: str
    file: str
    guide: str
    examples: tuple[Example, ...]


EARLIER = 1_767_225_600
"""The start of 2026: no server of an example has a use of that day."""

LONG = "Count to a million."
"""An input that keeps the model busy."""

HELLO = {"model": MODEL, "input": "Say hello."}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
MESSAGE = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Say hello."}]}
USER = {"role": "user", "content": "Say hello."}

GROUPS = (
    Group(
        "Responses",
        "HTTP_RESPONSES.md",
        "ROUTES.md",
        (
            Example(route="POST /v1/responses", body=HELLO, keeps={"response_id": "id"}),
            Example(route="POST /v1/responses", body=HELLO | {"stream": True}, title="As a stream"),
            Example(route="GET /v1/responses", body={"type": "response.create", **HELLO}, status=101),
            Example(route="GET /v1/responses/{response_id}"),
            Example(
                route="GET /v1/responses/{response_id}",
                query="stream=true&starting_after=9",
                title="The rest of its stream",
            ),
            Example(route="GET /v1/responses/{response_id}/input_items", query="limit=10"),
            Example(route="POST /v1/responses/input_tokens", body=HELLO),
            Example(
                route="POST /v1/responses/compact",
                body={"model": MODEL, "previous_response_id": "$response_id"},
            ),
            Example(
                route="POST /v1/responses",
                body={"model": MODEL, "input": LONG, "background": True},
                keeps={"response_id": "id"},
                title="In the background",
            ),
            Example(route="POST /v1/responses/{response_id}/cancel", interrupts=True),
            Example(route="DELETE /v1/responses/{response_id}"),
        ),
    ),
    Group(
        "Conversations",
        "HTTP_CONVERSATIONS.md",
        "ROUTES.md",
        (
            Example(
                route="POST /v1/conversations",
                body={"items": [USER], "metadata": {"topic": "greetings"}},
                keeps={"conversation_id": "id"},
            ),
            Example(route="GET /v1/conversations/{conversation_id}"),
            Example(route="POST /v1/conversations/{conversation_id}", body={"metadata": {"topic": "farewells"}}),
            Example(
                route="POST /v1/conversations/{conversation_id}/items",
                body={"items": [{"role": "user", "content": "Say goodbye."}]},
                keeps={"item_id": "data.0.id"},
            ),
            Example(route="GET /v1/conversations/{conversation_id}/items", query="order=asc"),
            Example(route="GET /v1/conversations/{conversation_id}/items/{item_id}"),
            Example(route="DELETE /v1/conversations/{conversation_id}/items/{item_id}"),
            Example(route="DELETE /v1/conversations/{conversation_id}"),
        ),
    ),
    Group(
        "Chat Completions",
        "HTTP_CHAT.md",
        "CHAT_COMPLETIONS.md",
        (
            Example(route="POST /v1/chat/completions", body=CHAT | {"store": True}, keeps={"completion_id": "id"}),
            Example(route="POST /v1/chat/completions", body=CHAT | {"stream": True}, title="As a stream"),
            Example(route="GET /v1/chat/completions", query="limit=10"),
            Example(route="GET /v1/chat/completions/{completion_id}"),
            Example(route="GET /v1/chat/completions/{completion_id}/messages"),
            Example(route="POST /v1/chat/completions/{completion_id}", body={"metadata": {"topic": "greetings"}}),
            Example(route="DELETE /v1/chat/completions/{completion_id}"),
        ),
    ),
    Group(
        "Completions",
        "HTTP_COMPLETIONS.md",
        "COMPLETIONS.md",
        (
            Example(
                route="POST /v1/completions", body={"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32}
            ),
            Example(
                route="POST /v1/completions",
                body={"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32, "stream": True},
                title="As a stream",
            ),
        ),
    ),
    Group(
        "Messages",
        "HTTP_MESSAGES.md",
        "MESSAGES.md",
        (
            Example(route="POST /v1/messages", body=MESSAGE, key=ANTHROPIC),
            Example(route="POST /v1/messages", body=MESSAGE | {"stream": True}, title="As a stream", key=ANTHROPIC),
            Example(
                route="POST /v1/messages/count_tokens",
                body={name: MESSAGE[name] for name in ("model", "messages")},
                key=ANTHROPIC,
            ),
        ),
    ),
    Group(
        "Decisions",
        "HTTP_DECISIONS.md",
        "DECISIONS.md",
        (
            Example(
                route="POST /v1/decisions",
                body={
                    "model": MODEL,
                    "input": "I was charged twice.",
                    "questions": [
                        {"type": "predicate", "instructions": "The customer complains."},
                        {
                            "type": "choice",
                            "instructions": "Which team?",
                            "choices": [{"value": "billing"}, {"value": "technical"}],
                        },
                        {
                            "type": "score",
                            "instructions": "How urgent?",
                            "levels": [{"label": "low"}, {"label": "high"}],
                        },
                    ],
                },
            ),
        ),
    ),
    Group(
        "Files",
        "HTTP_FILES.md",
        "FILES.md",
        (
            Example(
                route="POST /v1/files",
                form={"purpose": "user_data", "file": "@tea.md"},
                keeps={"file_id": "id"},
            ),
            Example(route="GET /v1/files", query="limit=10"),
            Example(route="GET /v1/files/{file_id}"),
            Example(route="GET /v1/files/{file_id}/content"),
            Example(route="DELETE /v1/files/{file_id}"),
            Example(route="POST /v1/uploads", body=UPLOAD, keeps={"upload_id": "id"}),
            Example(route="POST /v1/uploads/{upload_id}/parts", form={"data": "@tea.md"}, keeps={"part_id": "id"}),
            Example(route="POST /v1/uploads/{upload_id}/complete", body={"part_ids": ["$part_id"]}),
            Example(route="POST /v1/uploads", body=UPLOAD, keeps={"upload_id": "id"}, title="An upload to cancel"),
            Example(route="POST /v1/uploads/{upload_id}/cancel"),
        ),
    ),
    Group(
        "Batches",
        "HTTP_BATCHES.md",
        "BATCHES.md",
        (
            Example(
                route="POST /v1/files",
                form={"purpose": "batch", "file": "@lines.jsonl"},
                keeps={"file_id": "id"},
                title="A file of requests, one a line",
            ),
            Example(
                route="POST /v1/batches",
                body={"input_file_id": "$file_id", "endpoint": "/v1/responses", "completion_window": "24h"},
                keeps={"batch_id": "id"},
            ),
            Example(route="GET /v1/batches/{batch_id}", until="completed", keeps={"file_id": "output_file_id"}),
            Example(route="GET /v1/files/{file_id}/content", title="The results"),
            Example(route="GET /v1/batches", query="limit=10"),
            Example(route="POST /v1/batches/{batch_id}/cancel", status=409),
            Example(
                route="POST /v1/messages/batches",
                body={"requests": [{"custom_id": "first", "params": MESSAGE}]},
                keeps={"message_batch_id": "id"},
                key=ANTHROPIC,
            ),
            Example(route="GET /v1/messages/batches/{message_batch_id}", until="ended", key=ANTHROPIC),
            Example(route="GET /v1/messages/batches/{message_batch_id}/results", key=ANTHROPIC),
            Example(route="GET /v1/messages/batches", query="limit=10", key=ANTHROPIC),
            Example(route="POST /v1/messages/batches/{message_batch_id}/cancel", status=400, key=ANTHROPIC),
            Example(route="DELETE /v1/messages/batches/{message_batch_id}", key=ANTHROPIC),
        ),
    ),
    Group(
        "Vector stores",
        "HTTP_VECTOR_STORES.md",
        "SEARCH.md",
        (
            Example(route="POST /v1/vector_stores", body={"name": "drinks"}, keeps={"vector_store_id": "id"}),
            Example(route="GET /v1/vector_stores", query="limit=10"),
            Example(route="GET /v1/vector_stores/{vector_store_id}"),
            Example(route="POST /v1/vector_stores/{vector_store_id}", body={"metadata": {"topic": "tea"}}),
            Example(
                route="POST /v1/files",
                form={"purpose": "user_data", "file": "@tea.md"},
                keeps={"file_id": "id"},
                title="A file to put in",
            ),
            Example(
                route="POST /v1/vector_stores/{vector_store_id}/files",
                body={"file_id": "$file_id", "attributes": {"language": "en"}},
            ),
            Example(route="GET /v1/vector_stores/{vector_store_id}/files/{file_id}", until="completed"),
            Example(route="GET /v1/vector_stores/{vector_store_id}/files"),
            Example(
                route="POST /v1/vector_stores/{vector_store_id}/files/{file_id}",
                body={"attributes": {"language": "en", "year": 2026}},
            ),
            Example(route="GET /v1/vector_stores/{vector_store_id}/files/{file_id}/content"),
            Example(
                route="POST /v1/vector_stores/{vector_store_id}/search",
                body={"query": "How long is green tea steeped?", "max_num_results": 3},
            ),
            Example(route="DELETE /v1/vector_stores/{vector_store_id}/files/{file_id}"),
            Example(
                route="POST /v1/vector_stores/{vector_store_id}/file_batches",
                body={"file_ids": ["$file_id"]},
                keeps={"batch_id": "id"},
            ),
            Example(route="GET /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}", until="completed"),
            Example(route="GET /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}/files"),
            Example(route="POST /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}/cancel"),
            Example(route="DELETE /v1/vector_stores/{vector_store_id}"),
        ),
    ),
    Group(
        "Containers",
        "HTTP_CONTAINERS.md",
        "CONTAINERS.md",
        (
            Example(route="POST /v1/containers", body={"name": "sums"}, keeps={"container_id": "id"}),
            Example(route="GET /v1/containers", query="limit=10"),
            Example(route="GET /v1/containers/{container_id}"),
            Example(
                route="POST /v1/containers/{container_id}/files", form={"file": "@tea.md"}, keeps={"file_id": "id"}
            ),
            Example(route="GET /v1/containers/{container_id}/files"),
            Example(route="GET /v1/containers/{container_id}/files/{file_id}"),
            Example(route="GET /v1/containers/{container_id}/files/{file_id}/content"),
            Example(route="DELETE /v1/containers/{container_id}/files/{file_id}"),
            Example(route="DELETE /v1/containers/{container_id}"),
        ),
    ),
    Group(
        "Models, tokens and embeddings",
        "HTTP_MODELS.md",
        "ROUTES.md",
        (
            Example(route="GET /v1/models"),
            Example(route="GET /v1/models/{model}"),
            Example(route="POST /tokenize", body={"prompt": "Say hello.", "return_token_strs": True}),
            Example(route="POST /detokenize", body={"tokens": [62316, 40617, 13]}),
            Example(route="POST /v1/embeddings", body={"model": EMBEDDER, "input": "Say hello."}),
            *(
                Example(
                    route=f"POST {path}",
                    body={"model": "tiny-reranker", "query": "tea", "documents": ["Green tea", "The moon"]},
                )
                for path in ("/v1/rerank", "/v2/rerank", "/rerank")
            ),
            *(
                Example(
                    route=f"POST {path}",
                    body={"model": "tiny-reranker", "text_1": "tea", "text_2": ["Green tea", "The moon"]},
                )
                for path in ("/v1/score", "/score")
            ),
            Example(route="POST /classify", body={"model": "tiny-classifier", "input": "Say hello."}),
            Example(route="POST /pooling", body={"model": EMBEDDER, "input": "Say hello."}),
            Example(
                route="POST /v2/embed",
                body={"model": EMBEDDER, "texts": ["Say hello."], "embedding_types": ["float"]},
            ),
            Example(
                route="POST /v1/audio/speech",
                body={"model": "tiny-speaker", "voice": "alloy", "input": "Say hello.", "response_format": "wav"},
            ),
            *(
                Example(route=f"POST /v1/audio/{task}", form={"file": "@hello.wav", "model": "tiny-speaker"})
                for task in ("transcriptions", "translations")
            ),
            Example(route="POST /v1/images/generations", body={"model": "tiny-painter", "prompt": "A pipe."}),
            Example(
                route="POST /v1/images/edits",
                form={"image": "@pipe.png", "prompt": "Longer.", "model": "tiny-painter"},
            ),
            Example(route="GET /v1/prompts"),
            Example(route="GET /v1/prompts/{prompt_id}", query="version=1"),
        ),
    ),
    Group(
        "The operator's",
        "HTTP_OPERATOR.md",
        "LIVE.md",
        (
            Example(route="GET /health", key=""),
            Example(route="GET /ready", key=""),
            Example(route="GET /ping", key=""),
            Example(route="POST /ping", key=""),
            Example(route="GET /version", key=""),
            Example(route="GET /load", key=""),
            Example(route="GET /metrics", key=METRICS, shows="# HELP penstock_"),
            Example(route="GET /openapi.json", key=""),
            Example(route="GET /", key=""),
            Example(
                route="GET /v1/organization/usage/completions",
                query=f"start_time={EARLIER}&limit=1&group_by[]=project_id",
                key=OPERATOR,
            ),
            Example(route="GET /v1/organization/usage/decisions", query=f"start_time={EARLIER}&limit=1", key=OPERATOR),
            Example(route="GET /v1/organization/usage/embeddings", query=f"start_time={EARLIER}&limit=1", key=OPERATOR),
            Example(route="GET /v1/organization/costs", query=f"start_time={EARLIER}&limit=1", key=OPERATOR),
            Example(
                route="GET /v1/organizations/usage_report/messages",
                query="starting_at=2026-01-01T00:00:00Z&limit=1",
                key=OPERATOR,
            ),
            Example(
                route="GET /v1/organizations/cost_report",
                query="starting_at=2026-01-01T00:00:00Z&limit=1",
                key=OPERATOR,
            ),
            Example(route="GET /usage", key="", accept="text/html"),
            Example(route="GET /usage/data", query="days=1&by=model", key=OPERATOR),
            Example(route="GET /live", key="", accept="text/html"),
            Example(route="GET /live/server", key=OPERATOR),
            Example(route="GET /live/models", key=OPERATOR),
            Example(route="POST /live/watch", body=HELLO, key=OPERATOR),
            Example(route="GET /v1/rollouts", query="limit=1", key=OPERATOR, keeps={"session": "data.0.session"}),
            Example(route="POST /v1/rollouts/{session}/reward", body={"reward": 0.5, "done": True}, key=OPERATOR),
            Example(route="GET /v1/rollouts/{session}", key=OPERATOR),
            Example(route="GET /live/recordings", key=OPERATOR, keeps={"name": "data.0.id"}),
            Example(route="GET /live/recordings/{name}", key=OPERATOR),
        ),
    ),
)
"""The groups of all routes, each on a page."""
