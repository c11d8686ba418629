"""Kept client channels: one per peer, traced, with bounded messages and quick reconnection."""

from __future__ import annotations

import asyncio

import grpc

from services.runtime.rpc.interceptors.client import TracedChannel
from services.runtime.telemetry.tracing import Telemetry

DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
"""Both ways. grpc's own receive limit of 4 MiB is below a long prompt with its block hashes."""


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """grpc options of every channel of the suite."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A worker that comes back is found within a second; grpc's default backs off to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A host that vanished without a word is noticed by pings, while calls are open.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # The one that counts: a ping without an answer. grpc's default keeps a request on a frozen peer for over a minute.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Peers are inside; a proxy from the environment would see host names it can't resolve.
        ("grpc.enable_http_proxy", 0),
        # Channels share neither connections nor backoff with others of the process.
        ("grpc.use_local_subchannel_pool", 1),
    ]


class ChannelPool:
    """Channels by address, opened at first use and kept until `close`. Belongs to one event loop."""

    def __init__(self, telemetry: Telemetry, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        self._telemetry = telemetry
        self._options = channel_options(max_message_bytes)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port. Never blocks, never fails: a dead peer shows in the call."""
        assert not self._closed, "a closed pool gives no channels"
        channel = self._channels.get(address)
        if channel is None:
            inner = grpc.aio.insecure_channel(address, options=self._options)
            channel = self._channels[address] = TracedChannel(inner, address, self._telemetry.tracer)
        return channel

    async def close(self) -> None:
        """Closes every channel; open calls are cancelled."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
