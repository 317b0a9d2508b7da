"""The domains that a request limits its web search to."""

from __future__ import annotations

from collections.abc import Collection

from yarl import URL


def is_within(url: str, domains: Collection[str]) -> bool:
    """Return True if the host of ``url`` is one of ``domains`` or a subdomain of one, or if there are none.

    ``domains`` are in lower case and ASCII, as in `URL.raw_host`.
    """
    if not domains:
        return True
    try:
        host = (URL(url).raw_host or "").removesuffix(".")
    except ValueError:
        return False
    return any(host == domain or host.endswith(f".{domain}") for domain in domains)
