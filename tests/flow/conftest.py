from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.extensions.rollouts import resource
from penstock.extensions.sign_in import discovery
from penstock.pipeline.recordings import writer
from penstock.services.engines import replicas
from tests.support.api_clients import PATIENCE


@pytest.fixture(scope="session", autouse=True)
def _patient_servers() -> Iterator[None]:
    """Have servers wait longer for what answers in the same process: a busy machine holds both up."""
    waits = (discovery, "PATIENCE"), (resource, "KNOWN_WAIT"), (replicas, "CONNECT_TIMEOUT")
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (*waits, (writer, "LAST_WRITES_SECONDS")):
            patch.setattr(module, name, PATIENCE)
        yield
