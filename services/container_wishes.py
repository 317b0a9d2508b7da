"""The wish of a tool for a container, as a request gives it."""

from __future__ import annotations

from penstock.pipeline.errors import UnsupportedParameter
from penstock.pipeline.hosted_kinds import ToolOptions
from penstock.services.containers import MemoryLimit


class ContainerWish(ToolOptions, frozen=True, omit_defaults=True, kw_only=True):
    """The container that a tool of a request asks for; ``path`` is the place of the container in the request."""

    id: str | None = None
    """The container that the request names; None if the server chooses it."""
    memory_limit: MemoryLimit | None = None
    file_ids: tuple[str, ...] = ()

    def refuse(self) -> None:
        """Raise `UnsupportedParameter` if a tool without containers would ignore this."""
        wanted = {"": self.id, ".memory_limit": self.memory_limit, ".file_ids": self.file_ids}
        for key, value in wanted.items():
            if value:
                raise UnsupportedParameter("This server has no containers.", param=f"{self.path}{key}")
