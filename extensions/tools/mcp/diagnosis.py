"""Convert exceptions of the SDK and the libraries below it to errors for the client.

Exceptions come in nested groups, and their messages contain URLs.  So most of them get a message of our own.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence

import httpx2
from mcp import MCPError
from pydantic import ValidationError

from penstock.extensions.tools.mcp import failures
from penstock.extensions.tools.mcp.incoming import TooMuch
from penstock.pipeline.foreign_errors import named_error
from penstock.services.mcp_config import SecretMask
from penstock.services.web.ssrf import Blocked


def diagnosed(
    error: BaseException, statuses: Sequence[int], seconds: float, secrets: SecretMask
) -> failures.McpFailure:
    """Return the `McpFailure` for ``error``.

    ``statuses`` are the HTTP error statuses of the requests made, ``seconds`` is the time limit for the message about a
    timeout, and ``secrets`` are masked from the message.
    """
    leaves = tuple(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, failures.McpFailure):
            return leaf
        if isinstance(leaf, httpx2.HTTPStatusError):
            return failures.http_failure(leaf.response.status_code)
    if statuses:
        return failures.http_failure(statuses[-1])
    for leaf in leaves:
        if isinstance(leaf, MCPError):
            return failures.protocol_failure(leaf.code, secrets.mask(leaf.message) or "The server refused.")
    return _plain(leaves[0], seconds)


def _plain(error: BaseException, seconds: float) -> failures.McpFailure:
    reasons = tuple(_reasons(error))
    if any(isinstance(reason, Blocked) for reason in reasons):
        return failures.protocol_failure(
            failures.CONNECTION_CLOSED, "The server's address is neither public nor allowed (--allow-address)."
        )
    for reason in reasons:
        if isinstance(reason, ssl.SSLCertVerificationError):
            return failures.protocol_failure(
                failures.CONNECTION_CLOSED, f"The server's certificate is invalid: {reason.verify_message}"
            )
    if isinstance(error, TimeoutError | httpx2.TimeoutException):
        return failures.too_slow(seconds)
    return failures.protocol_failure(failures.CONNECTION_CLOSED, _message(error))


def _message(error: BaseException) -> str:
    match error:
        case TooMuch():
            return f"The server sent {named_error(error)}."
        case httpx2.ConnectError():
            return "No connection to the server could be made."
        case httpx2.HTTPError() | httpx2.InvalidURL() | httpx2.StreamError():
            return f"The connection to the server failed ({type(error).__name__})."
        case ValidationError():
            return "The server's answer is not valid MCP."
        case OSError():
            return f"The server could not be started ({type(error).__name__})."
        case _:
            return f"The communication with the server failed ({type(error).__name__})."


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
