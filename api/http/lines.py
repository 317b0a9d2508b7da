"""The line of a batch as a request that no client has sent: its id, and its use of another server."""

from __future__ import annotations

from aiohttp import web

from penstock.services.use import Use

LINE: web.RequestKey[str] = web.RequestKey("line", str)
"""The id of the line."""

USE: web.RequestKey[Use] = web.RequestKey("use", Use)
"""The use of the answer of another server to the line."""
