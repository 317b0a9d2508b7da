"""``GET /live``: a page on which the operator talks to the model and watches what passes the stages.

The page is the same for every server and client, so it needs no key: its script reads the server with the key that the
operator types.  Its URLs are relative, as the application may be mounted under a prefix.
"""

from __future__ import annotations

from aiohttp import web

from penstock.api.http.web_page import SHARED, WebPage

_PACKAGE = "penstock.extensions.workbench.live"

SCRIPTS = ("text.js", "wire.js", "take.js", "flow.js", "slider.js", "beside.js", "talk.js", "models.js", "live.js")
"""The parts of the script, in order: first the data, then drawing, then interaction."""

PAGE = WebPage(
    body=(_PACKAGE, "live.html"),
    styles=((SHARED, "operator.css"), (_PACKAGE, "live.css")),
    scripts=[(SHARED, "operator.js"), *((_PACKAGE, script) for script in SCRIPTS)],
    directives=("connect-src 'self'", "frame-ancestors 'none'"),
)

HTML = PAGE.html("live · penstock")


async def live_page(request: web.Request) -> web.Response:
    """Answer with the page."""
    return web.Response(text=HTML, content_type="text/html", headers=PAGE.headers)
