"""Start, health, deadlines and the bounded drain of a service's server, over real grpc.aio."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay import errors
from kvrelay.wire import error_from_rpc
from services.runtime.rpc.deadline import remaining_s
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry
from tests.integration.runtime.grpc_echo import SERVICE, Served, serve

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def check(served: Served, name: str) -> Any:
    stub = health_pb2_grpc.HealthStub(served.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status


async def failure(call: Any) -> errors.KvRelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def ok(request: bytes, context: Any) -> bytes:
    return b"ok"


async def test_health_knows_the_process_and_each_name_set() -> None:
    async with serve(unary=ok) as served:
        assert await check(served, "") == SERVING
        served.server.set_serving("prefill", True)
        served.server.set_serving("model/smol", False)
        assert (await check(served, "prefill"), await check(served, "model/smol")) == (SERVING, NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(served, "never set")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_see_changes_and_one_that_leaves_does_not_disturb_the_others() -> None:
    async with serve(unary=ok) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest(service="prefill"), timeout=20) for _ in range(2))
        for watch in (leaving, staying):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        leaving.cancel()
        served.server.set_serving("prefill", True)
        assert (await staying.read()).status == SERVING
        drain = asyncio.create_task(served.server.drain())
        assert (await staying.read()).status == NOT_SERVING
        await drain


async def test_reflection_lists_the_services() -> None:
    async with serve(unary=ok) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
        reply = await call.read()
        assert {"grpc.health.v1.Health", SERVICE} <= {service.name for service in reply.list_services_response.service}


async def test_probes_are_neither_traced_nor_given_a_deadline() -> None:
    async with serve(unary=ok, settings={"default_timeout_s": 0.05}) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service="x"))
        await watch.read()
        await asyncio.sleep(0.15)
        served.server.set_serving("x", True)
        assert (await watch.read()).status == SERVING
        watch.cancel()
        assert not [span for span in served.recorder.exporter.get_finished_spans() if span.kind.name == "SERVER"]


async def test_a_taken_port_is_a_config_error() -> None:
    async with serve(unary=ok) as served:
        second = ServiceServer("second", Telemetry.disabled(), port=served.server.port)
        with pytest.raises(errors.ConfigError, match=str(served.server.port)):
            await second.start()


async def test_handlers_know_what_remains_of_the_clients_deadline() -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        async with asyncio.TaskGroup() as group:
            inner = group.create_task(read())
        return b"%f" % inner.result()

    async def read() -> float:
        return remaining_s()

    async with serve(unary=handler, settings={"default_timeout_s": 500}) as served:
        assert 5 < float(await served.call("unary")(b"", timeout=30)) <= 31  # gRPC rounds up
        assert 400 < float(await served.call("unary")(b"")) <= 500
        assert remaining_s() == math.inf


async def test_a_call_without_a_deadline_ends_with_the_services_maximum_as_a_typed_error() -> None:
    cleaned = asyncio.Event()

    async def handler(request: bytes, context: Any) -> Any:
        try:
            yield b"1"
            await asyncio.sleep(100)
        finally:
            cleaned.set()

    async with serve(stream=handler, settings={"default_timeout_s": 0.1}) as served:
        call = served.call("stream")(b"")
        assert await call.read() == b"1"
        error = await failure(call.read())
    assert type(error) is errors.DeadlineExceededError and error.fields["timeout_s"] == "0.100"
    assert cleaned.is_set()


async def test_a_handlers_own_timeout_is_not_mistaken_for_the_deadline() -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(100)
        return b""

    async with serve(unary=handler) as served:
        assert type(await failure(served.call("unary")(b"", timeout=20))) is errors.InternalError


class Slow:
    """A handler that waits until it is let go, and reports what happened to it."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.started, self.release, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stubborn = stubborn

    async def __call__(self, request: bytes, context: Any) -> bytes:
        self.started.set()
        while True:
            try:
                await self.release.wait()
                return b"done"
            except asyncio.CancelledError:
                self.cancelled.set()
                if not self._stubborn:
                    raise


def slow_methods(slow: Slow) -> dict[str, Any]:
    async def unary(request: bytes, context: Any) -> bytes:
        return await slow(request, context)

    return {"unary": unary}


async def test_drain_lets_running_calls_finish_and_refuses_new_ones() -> None:
    slow = Slow()
    async with serve(**slow_methods(slow)) as served:
        running = served.call("unary")(b"", timeout=20)
        await asyncio.wait_for(slow.started.wait(), 5)
        drain = asyncio.create_task(served.server.drain())
        await asyncio.sleep(0)
        assert type(await failure(served.call("unary")(b"", timeout=5))) is errors.DrainingError
        assert await check(served, "") == NOT_SERVING
        slow.release.set()
        assert await running == b"done"
        await asyncio.wait_for(drain, 10)


async def test_services_that_finish_others_work_are_open_while_draining_until_it_is_settled() -> None:
    settle = asyncio.Event()

    async with serve(unary=ok, while_draining=True) as served:
        drain = asyncio.create_task(served.server.drain(settle.wait))
        await asyncio.sleep(0)
        assert await served.call("unary")(b"", timeout=5) == b"ok"
        assert not drain.done()
        settle.set()
        await asyncio.wait_for(drain, 10)


@pytest.mark.parametrize("stubborn", [False, True], ids=["cancellable", "swallows cancellation"])
async def test_drain_does_not_hang_on_a_stuck_handler(stubborn: bool) -> None:
    slow = Slow(stubborn=stubborn)
    async with serve(settings={"drain_grace_s": 0.1}, **slow_methods(slow)) as served:
        call = served.call("unary")(b"", timeout=30)
        await asyncio.wait_for(slow.started.wait(), 5)
        await asyncio.wait_for(served.server.drain(), 10)
        assert slow.cancelled.is_set()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await asyncio.wait_for(call, 5)
        slow.release.set()
        await asyncio.sleep(0)


async def test_drain_is_bounded_when_what_it_waits_for_never_settles() -> None:
    async with serve(unary=ok, settings={"drain_grace_s": 0.1}) as served:
        await asyncio.wait_for(served.server.drain(asyncio.Event().wait), 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await served.call("unary")(b"", timeout=2)


async def test_draining_twice_and_before_a_start_is_harmless() -> None:
    await ServiceServer("idle", Telemetry.disabled()).drain()
    async with serve(unary=ok) as served:
        await served.server.drain()
        await served.server.drain()
