"""The options and variables of the HTTP server of ``vllm serve`` that have no effect here, and what stands for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OPTIONS: Final[Mapping[str, str]] = {
    "--tool-server": "name MCP servers in --mcp-config; --web-search and --sandbox stand for 'demo'",
    "--enable-log-requests": "use --log-prompts",
    "--enable-log-outputs": "use --log-outputs",
    "--allowed-origins": "use --allow-origin, once for each origin",
    "--allowed-methods": "--allow-origin allows the methods of this API",
    "--allowed-headers": "--allow-origin allows all headers",
    "--allow-credentials": "clients send their key in the header Authorization, which --allow-origin allows",
    "--sse-keep-alive-interval": "use --keep-alive",
    "--config": "write the options into penstock.toml, those of vLLM into its table [vllm]",
    "--uvicorn-log-level": "use --log-level",
    "--disable-access-log-for-endpoints": "use --log-level WARNING, which leaves out all lines of requests",
    "--middleware": "insert a stage by --with, or a middleware into Api.app",
    "--reasoning-effort-map": "set the variables of the template, in chat_template_kwargs of the request",
    "--exclude-tools-when-tool-choice-none": "send no tools, to hide them from the model",
    "--root-path --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh": (
        "end TLS, and remove a prefix, in a proxy before this server (docs/PROXIES.md); --trusted-proxy has "
        "the server read X-Forwarded-Prefix"
    ),
    "--uds": "listen on an address of this machine by --host and --port",
    "--api-server-count -asc": "use --frontends",
    (
        "--headless --data-parallel-supervisor-port --dp-supervisor-probe-interval-s "
        "--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold"
    ): "run several servers with the same --store",
    "--grpc --grpc-port": "use vllm serve: this server speaks HTTP only",
    "--tokens-only --enable-scale-out": "use vllm serve, which can also be the --engine of this server",
    "--response-role": "nothing is needed: answers are always of the assistant",
    "--trust-request-mm-kwargs": "nothing is needed: requests cannot set the processing of images",
    "--enable-per-request-metrics": "nothing is needed: usage and the log have the figures of a request",
    "--enable-server-load-tracking": "nothing is needed: /load always counts",
    "--h11-max-header-count --h11-max-incomplete-event-size": "nothing is needed: the size of headers is bounded",
    (
        "--enable-flash-late-interaction --cohere-format --cohere-is-reasoning-model --enable-tokenizer-info-endpoint"
    ): "use vllm serve: this server has no such API",
    "--fingerprint-mode --fingerprint-value": "nothing is needed: system_fingerprint is always null",
    "--anthropic-disabled-thinking-effort": "nothing is needed: disabled thinking is the reasoning effort none",
    "--return-tokens-as-token-ids": "answers name tokens by their texts only; recordings have their ids",
    "--enable-auto-tool-choice": "nothing is needed: the model may always choose among the tools of a request",
    "--enable-prompt-tokens-details": "nothing is needed: usage is always complete",
    "--enable-force-include-usage": "clients ask for the usage of a streamed chat: include_usage in stream_options",
    "--enable-request-id-headers": "nothing is needed: each answer has an X-Request-Id",
    "--log-error-stack": "nothing is needed: errors of the server are always logged with their traceback",
    "--disable-log-requests": "nothing is needed: prompts are only logged with --log-prompts",
    "--enable-log-deltas": "nothing is needed: outputs are logged item by item",
    "--enable-offline-docs": "nothing is needed: /openapi.json loads nothing from elsewhere",
    "--disable-fastapi-docs": "nothing is needed: there is no page of documentation, only /openapi.json",
    "--disable-uvicorn-access-log": "nothing is needed: there is one log line for each request, at level INFO",
}
"""The advice in place of options, by all the options that it is for."""

INSTEAD: Final[Mapping[str, str]] = {name: advice for names, advice in OPTIONS.items() for name in names.split()}
"""The advice in place of each option."""

API_KEY: Final = "VLLM_API_KEY"
"""The variable that holds the key of ``vllm serve``.  Without keys of its own, penstock does not start beside it."""

_FETCHED = "this server fetches images itself; see --allow-address"
_TEXTS_AND_IMAGES = "requests may have texts and images only"

VARIABLES: Final[Mapping[str, str]] = {
    API_KEY: "use PENSTOCK_API_KEYS or --api-key-file",
    "VLLM_ENABLE_RESPONSES_API_STORE": "responses are stored; --store none stores nothing",
    "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY": "the model always reads why a call failed",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "the server goes on, and /health returns a 503; see --exit-with-engine",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "a connection without requests is closed after 75 seconds",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "use --log-outputs",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "--model-alias '*=NAME' takes every name of a model",
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT": "--reasoning-parser and --tool-call-parser name the parsers",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--lora-modules names the adapters at the start",
    "VLLM_SYSTEM_START_DATE": "the prompt has the date of the request",
    "VLLM_SERVER_DEV_MODE": "the routes of vLLM's developers are not here",
    "VLLM_ENABLE_COHERE_API": "the API of Cohere is not here",
    "VLLM_USE_RUST_FRONTEND": "use --frontends",
    "VLLM_RUST_FRONTEND_PATH": "use --frontends",
    "VLLM_LOG_STATS_INTERVAL": "/metrics has the figures of the engine",
    "VLLM_DISABLE_LOG_LOGO": "no logo is logged",
    "VLLM_MAX_STOP_STRINGS": "docs/LIMITS.md has the limits of a request",
    "VLLM_MAX_COMPLETION_PROMPTS": "docs/LIMITS.md has the limits of a request",
    "VLLM_MEDIA_CONNECTOR": _FETCHED,
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": _FETCHED,
    "VLLM_IMAGE_FETCH_TIMEOUT": _FETCHED,
    "VLLM_AUDIO_FETCH_TIMEOUT": _TEXTS_AND_IMAGES,
    "VLLM_VIDEO_FETCH_TIMEOUT": _TEXTS_AND_IMAGES,
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": _TEXTS_AND_IMAGES,
    "VLLM_MAX_AUDIO_DECODE_BYTES": _TEXTS_AND_IMAGES,
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": _TEXTS_AND_IMAGES,
    "VLLM_MAX_AUDIO_PREPROCESS_WORKERS": _TEXTS_AND_IMAGES,
}
"""Variables that have no effect here, each with what holds instead."""


def instead_of(option: str) -> str | None:
    """Return the advice in place of an option of ``vllm serve``, also for its negation; None if it is none of these."""
    return INSTEAD.get(option) or INSTEAD.get(option.replace("--no-", "--", 1))
