"""``GET /usage``: a page on which the operator sees what each key, team and model has used, and how full budgets are.

The page is the same for every server and client, so it needs no key: its script reads the server with the key that the
operator types.  Its URLs are relative, as the application may be mounted under a prefix.
"""

from __future__ import annotations

from aiohttp import web

from penstock.api.http.web_page import SHARED, WebPage

_PACKAGE = "penstock.extensions.accounts.page"

PAGE = WebPage(
    body=(_PACKAGE, "usage.html"),
    styles=((SHARED, "operator.css"), (_PACKAGE, "usage.css")),
    scripts=((SHARED, "operator.js"), (_PACKAGE, "plot.js"), (_PACKAGE, "usage.js")),
    directives=("connect-src 'self'", "frame-ancestors 'none'"),
)

HTML = PAGE.html("usage · penstock")


async def usage_page(request: web.Request) -> web.Response:
    """Answer with the page."""
    return web.Response(text=HTML, content_type="text/html", headers=PAGE.headers)
