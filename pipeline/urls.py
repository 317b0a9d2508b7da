"""URLs as penstock shows them: in the log, in errors, in recordings, and in the labels of metrics."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

HIDDEN = "<redacted>"
"""The text in place of a part that may hold a secret."""

_HOST = re.compile(r"""(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\\\[\]"'<>]*)(:\d{1,5})?""")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def shown_url(url: str, *, with_path: bool = False) -> str:
    """Return a URL without user, password, query and fragment, any of which may hold a secret.

    Its path is hidden, too, unless ``with_path``.  What is no URL is hidden as a whole.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket of an IPv6 address stays open
        return HIDDEN
    host = host_of(url)
    if host is None or not _SCHEME.fullmatch(parts.scheme) or "://" not in url:
        return HIDDEN
    if with_path:
        return f"{parts.scheme}://{host}{parts.path}"
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment
    return f"{parts.scheme}://{host}/{HIDDEN if has_more else ''}"


def host_of(url: str) -> str | None:
    """Return the host of a URL, with its port but without a user; None if it has a wrong one."""
    try:
        host = urlsplit(url).netloc.rpartition("@")[2]
    except ValueError:
        return None
    return host if _HOST.fullmatch(host) else None
