from __future__ import annotations

from tests.support.commands import penstock

__all__ = ["penstock"]
