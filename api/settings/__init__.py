"""The settings of a server, and the places that they come from."""

from penstock.api.settings.settings import Settings

__all__ = ["Settings"]
