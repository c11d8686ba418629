"""Keeps the fleet view fed and health told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.router.fleet import Fleet
from services.router.placement import Mode
from services.router.tokenization import Tokenizers
from services.runtime.clock import Clock
from services.runtime.ports import FleetFeedPort

SetServing = Callable[[str, bool], None]


class FleetFollower:
    """Applies every event of a feed; `run` ends only by cancellation."""

    def __init__(self, fleet: Fleet, feed: FleetFeedPort, clock: Clock, mode: Mode, set_serving: SetServing, service_name: str) -> None:
        self._fleet = fleet
        self._feed = feed
        self._clock = clock
        self._mode = mode
        self._set_serving = set_serving
        self._names = ("", "router", service_name)
        self._told: dict[str, bool] = {}

    async def run(self) -> None:
        async for event in self._feed.events():
            self._fleet.apply(event, self._clock.monotonic())
            self.tell_health()

    async def warm(self, tokenizers: Tokenizers, interval_s: float = 1.0) -> None:
        """Has tokenizers ready before the first request for a model; ends only by cancellation."""
        while True:
            await tokenizers.warm(self._fleet.tokenizers())
            await asyncio.sleep(interval_s)

    def tell_health(self) -> None:
        """The process serves once the fleet is known; each model ('model:<name>') while something can decode it."""
        health = dict.fromkeys(self._names, self._fleet.has_snapshot)
        health |= {name: False for name in self._told if name.startswith("model:")}
        health |= {f"model:{name}": self._fleet.model_state(name, self._mode).decode_workers > 0 for name in self._fleet.models()}
        for name, serving in health.items():
            if self._told.get(name) is not serving:
                self._set_serving(name, serving)
        self._told = health
