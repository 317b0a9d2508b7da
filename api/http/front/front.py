"""``GET /``: a page that sends one request and shows its stream, or some lines of text for other clients.

The page is the same for every client, so it needs no key: its script loads the models, with the key that the
user types.  Its URLs are relative, as the application may be mounted under a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import hdrs, web

from penstock.api.http.api_key import LEAST_LENGTH
from penstock.api.http.prefix import prefix_of
from penstock.api.http.web_page import PALETTE, filled, part_of, policy_of
from penstock.pipeline.distribution import own_version

TEXT = """\
penstock {version} serves the APIs Responses, Chat Completions, Completions and Messages.

  POST {prefix}/v1/responses   creates a response
  GET  {prefix}/v1/models      lists the models
  GET  {prefix}/openapi.json   describes all routes
  GET  {prefix}/live           is a page that shows the operator what passes the stages{needs}

In a browser, this URL is a page that sends a request and shows its stream.
"""


LIVE = '<a href="live">live</a> shows its operator what passes the stages.'

NOT_LIVE = (
    "Its operator can see what passes the stages: started with a key of at least"
    f" {LEAST_LENGTH} characters in <code>PENSTOCK_OPERATOR_KEY</code>, it shows them at <code>live</code>."
)
"""The sentence of a server whose operator has no key."""


def _page(live: str) -> tuple[str, str]:
    """Return the HTML of the page with its sentence about the live page, and its policy."""
    style, script, template = (part_of("penstock.api.http.front", f"front.{kind}") for kind in ("css", "js", "html"))
    style = PALETTE + style
    policy = policy_of(style, script, "connect-src 'self'", "frame-ancestors 'none'")
    return filled(template, {"style": style, "version": own_version(), "live": live, "script": script}), policy


PAGE, POLICY = _page(LIVE)
UNWATCHED, _ = _page(NOT_LIVE)

HEADERS = {
    "Content-Security-Policy": POLICY,
    hdrs.VARY: hdrs.ACCEPT,
    hdrs.CACHE_CONTROL: "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Front:
    """The answer to ``GET /``; ``is_watched`` is True if the operator has a key for the live page."""

    is_watched: bool

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a browser with the page, and other clients with text."""
        if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
            page = PAGE if self.is_watched else UNWATCHED
            return web.Response(text=page, content_type="text/html", headers=HEADERS)
        needs = "" if self.is_watched else ", if PENSTOCK_OPERATOR_KEY is set"
        text = TEXT.format(version=own_version(), prefix=prefix_of(request), needs=needs)
        return web.Response(text=text, headers=HEADERS)
