"""The domains that a request limits its web search to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Domains:
    """The domains whose pages may be read: the ``allowed`` ones, or all if there are none, without the ``blocked``."""

    allowed: Collection[str] = ()
    blocked: Collection[str] = ()

    def permits(self, url: str) -> bool:
        """Return True if the page at ``url`` may be read."""
        return is_within(url, self.allowed) and not (self.blocked and is_within(url, self.blocked))


ALL_DOMAINS = Domains()
