"""``GET /``: a page that sends one request and shows its stream, or some lines of text for other clients.

The page is the same for every server and client, so it needs no key: its script loads the models, with the key that the
user types.  Its URLs are relative, as the application may be mounted under a prefix.
"""

from __future__ import annotations

from importlib.metadata import version

from aiohttp import hdrs, web

from penstock.api.http.prefix import prefix_of
from penstock.api.web_page import PALETTE, filled, part_of, policy_of

TEXT = """\
penstock {version} serves the APIs Responses, Chat Completions, Completions and Messages.

  POST {prefix}/v1/responses   creates a response
  GET  {prefix}/v1/models      lists the models
  GET  {prefix}/openapi.json   describes all routes
  GET  {prefix}/live           is a page that shows the operator what passes the stages

In a browser, this URL is a page that sends a request and shows its stream.
"""


def _page() -> tuple[str, str]:
    """Return the HTML of the page, and its policy."""
    style, script, template = (part_of("penstock.api.http.front", f"front.{kind}") for kind in ("css", "js", "html"))
    style = PALETTE + style
    policy = policy_of(style, script, "connect-src 'self'", "frame-ancestors 'none'")
    return filled(template, {"style": style, "version": version("penstock"), "script": script}), policy


PAGE, POLICY = _page()

HEADERS = {
    "Content-Security-Policy": POLICY,
    hdrs.VARY: hdrs.ACCEPT,
    hdrs.CACHE_CONTROL: "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def front(request: web.Request) -> web.Response:
    """Answer a browser with the page, and other clients with text."""
    if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
        return web.Response(text=PAGE, content_type="text/html", headers=HEADERS)
    text = TEXT.format(version=version("penstock"), prefix=prefix_of(request))
    return web.Response(text=text, headers=HEADERS)
