"""`python -m services.kvstore` as a process: serves, evicts, registers, survives its clients, and forgets with its life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrelay import hashing
from kvrelay.errors import KvTransferError, StaleIncarnationError
from kvrelay.kv.v1 import kv_store_service_pb2 as pb
from kvrelay.kv.v1 import kv_store_service_pb2_grpc
from services.relay.store_client import BlockStoreClient
from services.relay.transports.grpc import GrpcStore
from services.runtime.ports import FleetSnapshot, WorkerGone, WorkerInfo, WorkerSeen
from services.runtime.registry.feed import RedisFleetFeed
from services.runtime.rpc.channels import ChannelPool
from services.runtime.telemetry.tracing import Telemetry
from tests.unit.relay.relay_kit import IDENTITY, WIDE_LAYOUT, FakePages, tokens

ROOT = Path(__file__).resolve().parents[3]
SIZE = WIDE_LAYOUT.block_bytes


def hashes_of(count: int, seed: int = 0) -> list[bytes]:
    return hashing.block_hashes(hashing.root_hash(IDENTITY.fingerprint), tokens(4 * count, seed), 4)


@dataclass
class StoreProcess:
    process: asyncio.subprocess.Process
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    async def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def store_process(*flags: str) -> AsyncIterator[StoreProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.kvstore", "--drain-grace-s=1", "--debug", *flags,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            ready = json.loads(await process.stdout.readline())
        yield StoreProcess(process, ready)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def channel_pool() -> AsyncIterator[ChannelPool]:
    pool = ChannelPool(Telemetry.disabled())
    try:
        yield pool
    finally:
        await pool.close()


async def info_of(channels: ChannelPool, address: str) -> pb.GetStoreInfoResponse:
    stub = kv_store_service_pb2_grpc.KvStoreServiceStub(channels.get(address))
    return await stub.GetStoreInfo(pb.GetStoreInfoRequest(), timeout=10, wait_for_ready=True)


async def test_a_store_serves_evicts_and_fences_its_former_life() -> None:
    async with channel_pool() as channels:
        source, target = FakePages(4, WIDE_LAYOUT, seed=1), FakePages(4, WIDE_LAYOUT)
        async with store_process("--redis-url=", "--limit-mib=4", "--lease-ttl-s=1") as first:
            assert first.ready["event"] == "ready" and first.ready["role"] == "kvstore"
            port = GrpcStore(channels, first.address)
            writer, reader = (
                BlockStoreClient(port, IDENTITY, WIDE_LAYOUT, pages, idle_timeout_s=20, cooldown_s=0) for pages in (source, target)
            )
            assert await writer.store(hashes_of(3), [0, 1, 2], timeout_s=20) == 3
            assert await reader.fetch_prefix(hashes_of(3), [2, 1, 0], 0, timeout_s=20) == 3
            assert [target.bytes_of(p) for p in (2, 1, 0)] == [source.bytes_of(p) for p in (0, 1, 2)]
            assert await writer.store(hashes_of(2, seed=1), [3, 3], timeout_s=20) == 2
            info = await info_of(channels, first.address)
            assert (info.blocks, info.used_bytes, info.evicted, info.leases) == (4, 4 * SIZE, 1, 0)
            assert await reader.fetch_prefix(hashes_of(3), [2, 1, 0], 0, timeout_s=20) == 2, "the tail went first"
            old = await port.lookup(IDENTITY, WIDE_LAYOUT, hashes_of(2, seed=1), timeout_s=20)
            assert old is not None
            assert await first.stop(signal.SIGKILL) == -signal.SIGKILL
            assert await reader.fetch_prefix(hashes_of(3), [2, 1, 0], 0, timeout_s=5) == 0
            assert await writer.store(hashes_of(3), [0, 1, 2], timeout_s=5) == 0
        port_number = first.address.rpartition(":")[2]
        async with store_process("--redis-url=", "--limit-mib=4", f"--port={port_number}") as second:
            info = await info_of(channels, second.address)
            assert second.address == first.address and info.incarnation > old.incarnation and info.blocks == 0
            with pytest.raises(StaleIncarnationError):
                await anext(port.read(old, 0, timeout_s=20))
            assert await writer.store(hashes_of(3), [0, 1, 2], timeout_s=20) == 3
            assert await second.stop() == 0
            with pytest.raises(KvTransferError):
                await port.lookup(IDENTITY, WIDE_LAYOUT, hashes_of(1), timeout_s=2)


async def test_a_lease_left_behind_by_a_client_that_died_runs_out() -> None:
    async with channel_pool() as channels, store_process("--redis-url=", "--limit-mib=2", "--lease-ttl-s=0.5") as store:
        port = GrpcStore(channels, store.address)
        await port.create(IDENTITY, WIDE_LAYOUT, hashes_of(2), timeout_s=20)
        async with asyncio.timeout(20):
            while (await info_of(channels, store.address)).leases:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await store.stop() == 0


async def test_a_store_is_in_the_registry_from_ready_to_stop(redis_server: Any) -> None:
    async def seen_until(feed: RedisFleetFeed, gone: bool) -> WorkerInfo | None:
        async with asyncio.timeout(30):
            async for event in feed.events():
                match event:
                    case FleetSnapshot(workers=workers) if bool(workers) != gone:
                        return workers[0] if workers else None
                    case WorkerSeen(worker=worker) if not gone:
                        return worker
                    case WorkerGone() if gone:
                        return None
        raise AssertionError("the feed ended")

    feed = RedisFleetFeed(redis_server.url, "kvrelay")
    async with store_process(f"--redis-url={redis_server.url}", "--worker-id=kvstore-7", "--heartbeat-s=0.2") as store:
        worker = await seen_until(feed, gone=False)
        assert worker is not None
        assert (worker.role, worker.worker_id, worker.address) == ("kvstore", "kvstore-7", store.address)
        assert worker.identity is None and worker.layout is None
        assert await store.stop() == 0
        assert await seen_until(feed, gone=True) is None
