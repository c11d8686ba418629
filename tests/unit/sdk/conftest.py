from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.sdk.scripted_router import ScriptedRouter, serving


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    async with serving(ScriptedRouter()) as running:
        yield running
