"""Options and variables of the HTTP server of ``vllm serve``, which a command line that moves from there still has.

Penstock has some of them itself (`Settings`), and vLLM's engine takes its own.  Each of the others stands here, so that
none is silently without effect.
"""

from __future__ import annotations

_USAGE = "usage is always complete"
_OTHER_API = "it concerns other APIs than Responses"
_WITHOUT = f"leave it out, as {_OTHER_API}"

NEEDLESS = {
    "--enable-auto-tool-choice": "the model may always choose among the tools of a request",
    "--enable-prompt-tokens-details": _USAGE,
    "--enable-force-include-usage": _USAGE,
    "--enable-request-id-headers": "each answer has an X-Request-Id",
    "--log-error-stack": "errors of the server are always logged with their traceback",
    "--disable-log-requests": "prompts are only logged with --log-prompts",
    "--enable-log-deltas": "outputs are logged item by item",
    "--return-tokens-as-token-ids": _OTHER_API,
    "--enable-tokenizer-info-endpoint": _OTHER_API,
    "--enable-offline-docs": "/openapi.json loads nothing from elsewhere",
    "--disable-fastapi-docs": "there is no page of documentation, only /openapi.json",
    "--disable-uvicorn-access-log": "there is one log line for each request, at level INFO",
}
"""Switches that need nothing here, each with the reason.  They are left out, and a line says why."""

_PROXY = "end TLS, and rewrite paths, in a proxy before this server"
_SEVERAL = "run several servers with the same --store"

INSTEAD = {
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
    "--tool-parser-plugin": "only vLLM's own parsers can be chosen, by --tool-call-parser",
    "--tool-strict-level": "set strict in the tools of the request",
    "--reasoning-effort-map": "set the variables of the template, in chat_template_kwargs of the request",
    "--response-role": "leave it out, as answers are always of the assistant",
    "--exclude-tools-when-tool-choice-none": "send no tools, to hide them from the model",
    "--trust-request-mm-kwargs": "leave it out, as requests cannot set the processing of images",
    "--enable-per-request-metrics": "leave it out, as usage and the log have the figures of a request",
    "--enable-server-load-tracking": "leave it out, as the log has the figures of a request",
    "--root-path": _PROXY,
    "--ssl-keyfile": _PROXY,
    "--ssl-certfile": _PROXY,
    "--ssl-ca-certs": _PROXY,
    "--ssl-cert-reqs": _PROXY,
    "--ssl-ciphers": _PROXY,
    "--enable-ssl-refresh": _PROXY,
    "--uds": "listen on an address of this machine by --host and --port",
    "--h11-max-header-count": "leave it out, as the size of headers is bounded",
    "--h11-max-incomplete-event-size": "leave it out, as the size of headers is bounded",
    "--api-server-count": _SEVERAL,
    "-asc": _SEVERAL,
    "--headless": _SEVERAL,
    "--data-parallel-supervisor-port": _SEVERAL,
    "--dp-supervisor-probe-interval-s": _SEVERAL,
    "--dp-supervisor-probe-timeout-s": _SEVERAL,
    "--dp-supervisor-probe-failure-threshold": _SEVERAL,
    "--grpc": "use vllm serve: this server speaks HTTP only",
    "--grpc-port": "use vllm serve: this server speaks HTTP only",
    "--tokens-only": "use vllm serve, which can also be the --engine of this server",
    "--enable-scale-out": "use vllm serve, which can also be the --engine of this server",
    "--enable-flash-late-interaction": _WITHOUT,
    "--fingerprint-mode": _WITHOUT,
    "--fingerprint-value": _WITHOUT,
    "--cohere-format": _WITHOUT,
    "--cohere-is-reasoning-model": _WITHOUT,
    "--anthropic-disabled-thinking-effort": _WITHOUT,
}
"""Options that end the start, each with the advice that the operator reads."""


API_KEY = "VLLM_API_KEY"
"""The variable that holds the key of ``vllm serve``.  Without keys of its own, penstock does not start beside it."""

ENVIRONMENT = {
    API_KEY: "use PENSTOCK_API_KEYS or --api-key-file",
    "VLLM_ENABLE_RESPONSES_API_STORE": "responses are stored; --store none stores nothing",
    "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY": "the model always reads why a call failed",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "the server always goes on, and /health is a 503",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "a connection without requests is closed after 75 seconds",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "use --log-outputs",
}
"""Variables of the HTTP server of ``vllm serve`` without effect here, each with what holds instead."""


def needless(option: str) -> str | None:
    """Return why an option needs nothing here; None if it is another one.

    The opposite of any option that is not here (``--no-...``) needs nothing either.
    """
    name = option.replace("--no-", "--", 1)
    if name != option and name in NEEDLESS.keys() | INSTEAD.keys():
        return f"there is no {name} to turn off"
    return NEEDLESS.get(option)


def option_name(argument: str) -> str:
    """Return the name of an option as it is documented: vLLM also takes underscores."""
    name = argument.split("=", maxsplit=1)[0]
    return name.replace("_", "-") if name.startswith("--") else name
