"""Bursts of prompts of which a pool holds about one: several routers, workers and orders, and every request is answered.

Here prefill's pages once waited for a decode worker whose pages waited for the other prefill worker, until the deadline.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import kvrelay
from services.launcher.plan import router_processes
from tests.integration.suite.fault_kit import Wire, at_rest, prompt_of, right_answer
from tests.suite import Suite
from tests.tiny_models import write_tiny_model

BURSTS, REQUESTS = 3, 8
TOKENS = (1050, 1300, 1600, 1900)
POOL_MIB = 1
"""128 pages of 16 tokens of a model of four layers."""


@pytest.mark.parametrize(
    ("routers", "workers", "order"), [(1, 2, "fcfs"), (2, 1, "fcfs"), (1, 1, "shortest")], ids=["2+2 workers", "2 routers", "shortest"]
)
async def test_a_burst_larger_than_every_pool_is_answered(tmp_path: Path, routers: int, workers: int, order: str) -> None:
    model, draw = write_tiny_model(tmp_path / "deep", "llama", num_hidden_layers=4), random.Random(7)
    settings = {"kv_cache_mib": POOL_MIB, "max_num_batched_tokens": 64, "max_num_seqs": 8, "prefill_order": order}
    async with (
        Suite(model, mode="split", store=False, prefill=workers, decode=workers, **settings) as suite,
        Wire() as stubs,
        AsyncExitStack() as stack,
    ):
        clients = [suite.client]
        for number in range(1, routers):
            (spec,) = router_processes(replace(suite.settings, port=0), suite.running.redis_url)
            (ready,) = await suite.supervisor.start([replace(spec, name=f"router-{number}")])
            clients.append(await stack.enter_async_context(kvrelay.AsyncClient(ready.address)))
        for burst in range(BURSTS):
            prompts = [prompt_of(draw.choice(TOKENS), REQUESTS * burst + n) for n in range(REQUESTS)]
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(clients[n % routers].generate(token_ids=prompt, max_tokens=4, ignore_eos=True, timeout=90).collect())
                    for n, prompt in enumerate(prompts)
                ]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert tuple(answer.result().token_ids) == right_answer(model, prompt, 4)
                assert answer.result().completion.path == "split"
        await at_rest(suite, stubs)
