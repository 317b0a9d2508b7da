from __future__ import annotations

import pytest

from tests.support.api_clients import MODES, Mode


@pytest.fixture(params=MODES, ids=str)
def mode(request: pytest.FixtureRequest) -> Mode:
    mode: Mode = request.param
    return mode
