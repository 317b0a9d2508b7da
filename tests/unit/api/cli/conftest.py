from tests.support.commands import penstock

__all__ = ["penstock"]
