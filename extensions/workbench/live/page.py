"""``GET /live``: a page on which the operator talks to the model and watches what passes the stages.

The page is the same for every server and client, so it needs no key: its script reads the server with the key that the
operator types.  Its URLs are relative, as the application may be mounted under a prefix.
"""

from __future__ import annotations

from aiohttp import hdrs, web

from penstock.api.http.web_page import PALETTE, filled, part_of, policy_of

SCRIPTS = ("dom.js", "wire.js", "take.js", "flow.js", "slider.js", "beside.js", "talk.js", "live.js")
"""The parts of the script, in order: first the data, then drawing, then interaction."""


def _page() -> tuple[str, str]:
    """Return the HTML of the page, and its policy."""
    style, script = PALETTE + _part("live.css"), "\n".join(map(_part, SCRIPTS))
    policy = policy_of(style, script, "connect-src 'self'", "frame-ancestors 'none'")
    return filled(_part("live.html"), {"style": style, "script": script}), policy


def _part(name: str) -> str:
    return part_of("penstock.extensions.workbench.live", name)


PAGE, POLICY = _page()

HEADERS = {
    "Content-Security-Policy": POLICY,
    hdrs.CACHE_CONTROL: "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def live_page(request: web.Request) -> web.Response:
    """Answer with the page."""
    return web.Response(text=PAGE, content_type="text/html", headers=HEADERS)
