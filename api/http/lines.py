"""What a handler knows of a request that no client has sent: the line of a batch."""

from __future__ import annotations

from aiohttp import web

from penstock.services.use import Use

LINE: web.RequestKey[str] = web.RequestKey("line", str)
"""The id of the line."""

USE: web.RequestKey[Use] = web.RequestKey("use", Use)
"""What the answer of another server to the line has used."""
