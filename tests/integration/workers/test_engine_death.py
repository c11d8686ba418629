"""A worker whose engine thread has died ends itself: its supervisor, not its clients, gets the problem."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.errors import InternalError
from services.engine.api import EnginePort, EngineRequest
from services.worker.host import worker_host
from services.worker.settings import WorkerSettings


@pytest.mark.may_block
async def test_the_process_ends_with_its_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = WorkerSettings(model=str(tiny_model), redis_url="redis://127.0.0.1:1/0", kv_cache_mib=4)
    with pytest.raises(ExceptionGroup) as failure:
        async with asyncio.timeout(30), worker_host("decode", settings) as host:
            await host.server.start()

            def broken(*_: object) -> None:
                raise RuntimeError("broken on purpose")

            monkeypatch.setattr("services.engine.scheduling.core.EngineCore.step", broken)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(host.serve())
                tasks.create_task(_one_request(host.engine))
    assert failure.group_contains(InternalError, match="engine thread has died")
    assert '"event": "ready"' in capsys.readouterr().out


async def _one_request(engine: EnginePort) -> None:
    try:
        async with engine.open(EngineRequest("a", [1, 2, 3])) as stream:
            async for _ in stream:
                pass
    except InternalError:
        return
