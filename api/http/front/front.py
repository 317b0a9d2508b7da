"""``GET /``: a page that sends one request and shows its stream, or some lines of text for other clients.

The page is the same for every client, so it needs no key: its script loads the models, with the key that the
user types.  Its URLs are relative, as the application may be mounted under a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import hdrs, web

from penstock.api.http.api_key import LEAST_LENGTH
from penstock.api.http.prefix import prefix_of
from penstock.api.http.web_page import WebPage
from penstock.pipeline.distribution import own_version

TEXT = """\
penstock {version} serves the APIs Responses, Chat Completions, Completions and Messages.

  POST {prefix}/v1/responses   creates a response
  GET  {prefix}/v1/models      lists the models
  GET  {prefix}/openapi.json   describes all routes
  GET  {prefix}/live           is a page that shows the operator what passes the stages{needs}
  GET  {prefix}/usage          is a page that shows the operator what each key has used{needs}

In a browser, this URL is a page that sends a request and shows its stream.
"""

_PACKAGE = "penstock.api.http.front"

PAGE = WebPage(
    body=(_PACKAGE, "front.html"),
    styles=((_PACKAGE, "front.css"),),
    scripts=((_PACKAGE, "front.js"),),
    directives=("connect-src 'self'", "frame-ancestors 'none'"),
)

LIVE = '<a href="live">live</a>\n    <a href="usage">usage</a>\n    '
"""The links in the bar, of a server whose operator has a key."""

STAGES = '<a id="to-stages" class="second" href="live">See what passed the stages</a>'

NOT_WATCHED = (
    "Its operator can see how the tokens of an answer pass the stages: with <code>--record FOLDER</code>, and with"
    f" <code>--live</code> on this machine, or a key of at least {LEAST_LENGTH} characters in"
    " <code>PENSTOCK_OPERATOR_KEY</code>."
)
"""The sentence of a server whose operator has no key."""


def _page(live: str, stages: str) -> str:
    return PAGE.html("penstock", version=own_version(), live=live, stages=stages)


WATCHED, UNWATCHED = _page(LIVE, STAGES), _page("", NOT_WATCHED)

HEADERS = {**PAGE.headers, hdrs.VARY: hdrs.ACCEPT}


@dataclass(frozen=True)
class Front:
    """The answer to ``GET /``; ``is_watched`` is True if the operator has a key for the live page."""

    is_watched: bool

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a browser with the page, and other clients with text."""
        if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
            page = WATCHED if self.is_watched else UNWATCHED
            return web.Response(text=page, content_type="text/html", headers=HEADERS)
        needs = "" if self.is_watched else ", if PENSTOCK_OPERATOR_KEY is set"
        text = TEXT.format(version=own_version(), prefix=prefix_of(request), needs=needs)
        return web.Response(text=text, headers=HEADERS)
