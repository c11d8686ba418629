"""Many requests, several routers' choices, small pools: nobody waits for somebody who waits for him.

Workers are real engine cores over the fake model whose answers prove their KV; what is between them (handles, pulls, cancellations,
leases, deaths) is modelled here, one small step at a time in an order drawn from a seed. A history ends when no step is left; a request
that is not answered then is a wait cycle.

The order in which pages are taken is the point: a decode worker is asked for pages only when the prompt has its own on the prefill
worker. The same world in which it is asked at once is shown to get stuck, so the search can find what it looks for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvrelay.values import SamplingParams, StopConditions
from services.engine.api import Admitted, EngineEvent, EngineRequest, Finished, PrefillProgress, TokenDrawn
from tests.unit.engine_core.fakes import Bench, expected_answer

BLOCK = 4
POOL_PAGES = (12, 16, 24)
"""The longest request takes 12 pages: one fits, at most two."""


@dataclass
class Client:
    """One request and how far its present try has come."""

    name: str
    request: EngineRequest
    tries: int = 0
    prefill: int = -1
    decode: int = -1
    """Workers of the present try; -1: none."""
    prefill_pages: tuple[int, ...] | None = None
    decode_pages: tuple[int, ...] | None = None
    asked_decode: bool = False
    ready: int = 0
    """Prompt tokens computed on the prefill worker."""
    pulled: int = 0
    """Blocks copied."""
    first: int | None = None
    resumed: bool = False
    tokens: list[int] = field(default_factory=list)
    answered: bool = False
    gone: bool = False
    """Cancelled by its client."""

    @property
    def key(self) -> str:
        return f"{self.name}.{self.tries}"

    @property
    def over(self) -> bool:
        return self.answered or self.gone


class World:
    """Steps are drawn from those that are possible."""

    def __init__(self, seed: int, *, pages_at_prefill_first: bool = True, faults: int = 0) -> None:
        self.draw = random.Random(seed)
        self.pages_at_prefill_first = pages_at_prefill_first
        self.faults = faults
        self.order = self.draw.choice(("fcfs", "shortest"))
        self.pages = self.draw.choice(POOL_PAGES)
        self.workers = {
            role: [self.worker() for _ in range(count)]
            for role, count in (("prefill", self.draw.randint(1, 3)), ("decode", self.draw.randint(1, 3)))
        }
        self.clients = [Client(f"r{n}", self.some_request(n)) for n in range(self.draw.randint(2, 8))]

    def worker(self) -> Bench:
        return Bench(
            num_pages=self.pages,
            block_size=BLOCK,
            max_num_batched_tokens=self.draw.choice((4, 16)),
            max_num_seqs=self.draw.choice((2, 4)),
            max_waiting=64,
            prefill_order=self.order,
        )

    def some_request(self, number: int) -> EngineRequest:
        """Prompts of 6 to 11 pages; some share their first ones."""
        length, shared = self.draw.randint(22, 44), self.draw.choice((0, 0, 8))
        prompt = [7] * shared + [1 + self.draw.randrange(200) for _ in range(length - shared)]
        return EngineRequest(f"r{number}", prompt, SamplingParams(seed=number), StopConditions(max_tokens=self.draw.randint(1, 4)))

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def possible(self) -> Iterator[tuple[str, object]]:
        for client in self.clients:
            if client.over:
                continue
            if client.decode < 0:
                yield "start", client
            elif self.may_ask_decode(client):
                yield "ask decode", client
            elif self.may_pull(client):
                yield "pull", client
        for workers in self.workers.values():
            yield from (("compute", bench) for bench in workers if bench.core.has_work)

    def may_ask_decode(self, client: Client) -> bool:
        return client.prefill >= 0 and not client.asked_decode and (not self.pages_at_prefill_first or client.prefill_pages is not None)

    def may_pull(self, client: Client) -> bool:
        if client.prefill < 0 or client.decode_pages is None or client.resumed:
            return False
        blocks = -(-len(client.request.token_ids) // BLOCK)
        return client.first is not None or min(client.ready // BLOCK, blocks) > client.pulled

    def run(self) -> None:
        """Until nothing is possible any more."""
        for _ in range(20_000):
            steps = list(self.possible())
            if not steps:
                return
            if self.faults and self.draw.random() < 0.03:
                self.faults -= 1
                self.fault()
                continue
            what, whom = self.draw.choice(steps)
            match whom:
                case Client() if what == "start":
                    self.start(whom)
                case Client() if what == "ask decode":
                    self.ask_decode(whom)
                case Client():
                    self.pull(whom)
                case Bench():
                    self.compute(whom)
        raise AssertionError("the world never came to rest")

    def start(self, client: Client) -> None:
        """A router's choice, which knows nothing of other routers': any pair, and after two tries one worker for all of it."""
        client.tries += 1
        client.decode = self.draw.randrange(len(self.workers["decode"]))
        if client.tries > 2:
            self.add("decode", client.decode, client)
            return
        client.prefill = self.draw.randrange(len(self.workers["prefill"]))
        self.add("prefill", client.prefill, client, prefill_only=True)

    def ask_decode(self, client: Client) -> None:
        client.asked_decode = True
        self.add("decode", client.decode, client, hold=True)

    def add(self, role: str, number: int, client: Client, *, prefill_only: bool = False, hold: bool = False) -> None:
        request = client.request
        self.workers[role][number].add(
            EngineRequest(client.key, request.token_ids, request.sampling, request.stop, prefill_only=prefill_only, hold=hold)
        )

    def pull(self, client: Client) -> None:
        """Copies one block that is computed; after the last one the prefill worker is told, and decode goes on."""
        source, target = self.workers["prefill"][client.prefill], self.workers["decode"][client.decode]
        assert client.prefill_pages is not None and client.decode_pages is not None
        assert client.key in source.core._live, "pages were read that nobody holds any more"
        shared = target.core._live[client.key].table.shared
        if client.pulled < len(client.prefill_pages):
            if client.pulled >= shared:
                target.model.cells[client.decode_pages[client.pulled]] = list(source.model.cells[client.prefill_pages[client.pulled]])
            client.pulled += 1
            return
        source.core.release(client.key)
        client.resumed = True
        assert client.first is not None
        client.tokens = [client.first]
        target.resume(client.key, len(client.request.token_ids), client.first)

    def compute(self, bench: Bench) -> None:
        for key, event in bench.step():
            name = key.partition(".")[0]
            client = next(client for client in self.clients if client.name == name)
            if key == client.key:
                self.tell(client, bench, event)

    def tell(self, client: Client, bench: Bench, event: EngineEvent) -> None:
        at_prefill = client.prefill >= 0 and bench is self.workers["prefill"][client.prefill]
        match event:
            case Admitted(pages=pages, cached_tokens=cached) if at_prefill:
                client.prefill_pages, client.ready = tuple(pages), cached
            case Admitted(pages=pages):
                client.decode_pages = tuple(pages)
            case PrefillProgress(computed_tokens=computed) if at_prefill:
                client.ready = computed
            case TokenDrawn(token=token) if at_prefill:
                client.first = token.token_id
            case TokenDrawn(token=token):
                client.tokens.append(token.token_id)
            case Finished() if not at_prefill:
                assert client.tokens == expected_answer(client.request), client.name
                client.answered = True
                bench.core.release(client.key)
            case _:
                pass

    # --- what goes wrong -------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        match self.draw.choice(("cancel", "lease", "death")):
            case "cancel":
                client = self.draw.choice(self.clients)
                if not client.over:
                    self.forget(client)
                    client.gone = True
            case "lease":
                # The taker stood still for too long: the holder frees the pages, and the try is over on both sides.
                client = self.draw.choice(self.clients)
                if not client.over and client.prefill_pages is not None and not client.resumed:
                    self.forget(client)
            case _:
                role = self.draw.choice(("prefill", "decode"))
                number = self.draw.randrange(len(self.workers[role]))
                self.workers[role][number] = self.worker()
                for client in self.clients:
                    if not client.over and self.needs(client, role, number):
                        self.forget(client)

    @staticmethod
    def needs(client: Client, role: str, number: int) -> bool:
        """Whether the present try has something on that worker that it cannot do without."""
        return number == client.decode if role == "decode" else number == client.prefill and not client.resumed

    def forget(self, client: Client) -> None:
        """The try is over: whatever it had anywhere is free at once; it begins anew."""
        if client.prefill >= 0:
            self.workers["prefill"][client.prefill].core.release(client.key)
        if client.decode >= 0:
            self.workers["decode"][client.decode].core.release(client.key)
        client.prefill = client.decode = -1
        client.prefill_pages = client.decode_pages = client.first = None
        client.asked_decode = client.resumed = False
        client.ready = client.pulled = 0
        client.tokens = []

    # --- what must hold --------------------------------------------------------------------------------------------------------

    def stuck(self) -> list[str]:
        return [client.name for client in self.clients if not client.over]

    def check_empty(self) -> None:
        for workers in self.workers.values():
            for bench in workers:
                bench.core.check_integrity()
                assert bench.core.load().held_pages == 0, "pages are held for nobody"


@pytest.mark.parametrize("faults", [0, 6])
def test_every_request_is_answered_whatever_routers_choose(faults: int) -> None:
    for seed in range(150):
        world = World(seed, faults=faults)
        world.run()
        assert not world.stuck(), f"seed {seed}: {world.stuck()} wait for each other ({world.order}, {world.pages} pages)"
        world.check_empty()


def test_the_search_finds_the_wait_cycles_of_the_other_order() -> None:
    found = 0
    for seed in range(150):
        world = World(seed, pages_at_prefill_first=False)
        world.run()
        found += bool(world.stuck())
    assert found
