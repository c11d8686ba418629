"""Decode by CUDA graphs, without CUDA: what would be recorded runs as it stands, or from a tape of its operators, beside the eager way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from kvrelay.errors import ConfigError, KvTransferError
from services.engine.checks.exactness import probe_model
from services.engine.model import llama as model_module
from services.engine.model.decoder import ForwardEntry
from services.engine.model.graph_decode import LEAST_KEYS, MOST_KEYS, Capture, Compute, CudaCapture, GraphDecoder, graph_shape
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import DTYPES, LlamaModel, ModelOptions, choose_decoder, load_model
from services.engine.model.torch_decoder import TorchDecoder
from services.engine.model.weights import random_weights
from services.engine.settings import EngineSettings
from tests.engine_runs import PagedRun, PagedSequence, random_ids
from tests.tiny_models import FAMILIES, write_tiny_model

EXACT = ModelOptions(torch.float32, torch.float32, kernels="torch")


class Tape(TorchDispatchMode):
    """Notes every operator with the very tensors it had: whatever the host knew at that time is in it for good, as in a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, (args, kwargs or {}), out))
        return out

    def run_again(self, wanted: torch.Tensor) -> torch.Tensor:
        now: dict[int, torch.Tensor] = {}
        for func, inputs, before in self.calls:
            args, kwargs = tree_map(lambda value: now.get(id(value), value), inputs)
            after = func(*args, **kwargs)
            for old, new in zip(tree_flatten(before)[0], tree_flatten(after)[0], strict=True):
                now[id(old)] = new
        return now[id(wanted)]


class TapeCapture:
    """Like `CudaCapture`: runs twice to record, then repeats operators into the same output."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, compute: Compute) -> Compute:
        self.recorded += 1
        compute()
        with Tape() as tape:
            out = compute()
        kept = out.clone()
        return lambda: kept.copy_(tape.run_again(out))


def plain(compute: Compute) -> Compute:
    return compute


CAPTURES = [pytest.param(lambda: plain, id="as it stands"), pytest.param(TapeCapture, id="from a tape")]


def graph_model(folder: Path, capture: Capture, options: ModelOptions = EXACT) -> LlamaModel:
    model = load_model(folder, options)
    assert isinstance(model.decoder, TorchDecoder)
    model.decoder = GraphDecoder(model.decoder, capture)
    return model


class SideBySide:
    """The same steps the eager way and by graphs, over pools of the same layout; each decode step is compared."""

    def __init__(self, folder: Path, capture: Capture, **pool: Any) -> None:
        self.eager = PagedRun(load_model(folder, EXACT), **pool)
        self.graphs = PagedRun(graph_model(folder, capture), **pool)

    def prefill(self, length: int, *, room: int) -> tuple[PagedSequence, PagedSequence]:
        ids = random_ids(length + room, 300, seed=length)
        pair = self.eager.begin(ids), self.graphs.begin(ids)
        if length:
            self.eager.step([(pair[0], length)])
            self.graphs.step([(pair[1], length)])
        return pair

    def decode(self, pairs: Sequence[tuple[PagedSequence, PagedSequence]]) -> None:
        pool = self.graphs.pool
        before = pool.data.clone()
        self.eager.step([(eager, 1) for eager, _ in pairs])
        self.graphs.step([(graphs, 1) for _, graphs in pairs])
        written = torch.zeros(pool.num_pages, pool.page_size, dtype=torch.bool)
        for eager, graphs in pairs:
            position = graphs.done - 1
            torch.testing.assert_close(graphs.logits[position], eager.logits[position], rtol=1e-4, atol=1e-4)
            page, slot = divmod(position, pool.page_size)
            written[graphs.pages[page], slot] = True
            if slot == 0:
                before[graphs.pages[page]] = 0
        changed = (pool.data != before).flatten(4).any(-1)
        assert torch.equal(changed, written[:, None, None].expand_as(changed)), "each token's slot is written, and no other"
        torch.testing.assert_close(pool.data, self.eager.pool.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_graphs_compute_what_the_eager_way_does(tmp_path: Path, family: str, capture: Callable[[], Capture]) -> None:
    """Ragged contexts, batches that fill their graph and such that do not, contexts that outgrow pages and tables."""
    both = SideBySide(write_tiny_model(tmp_path, family), capture())
    pairs = [both.prefill(length, room=4) for length in (0, 15, 31, 40, 126, 254)]
    for batch in (pairs, pairs[1:], pairs[::-1][:4], pairs[4:5]):
        both.decode(batch)


@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_graphs_serve_every_page_size(tmp_path: Path, page_size: int) -> None:
    both = SideBySide(write_tiny_model(tmp_path, "mistral"), TapeCapture(), num_pages=2048 // page_size, page_size=page_size)
    pairs = [both.prefill(length, room=3) for length in (3, 127, 255)]
    for _ in range(3):
        both.decode(pairs)


def test_an_earlier_owners_bytes_never_show_even_if_they_are_not_numbers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    clean = PagedRun(load_model(folder, EXACT), num_pages=8)
    dirty = PagedRun(graph_model(folder, TapeCapture()), num_pages=8)
    for seed in range(3):
        dirty.pool.data.fill_(torch.nan)
        ids = random_ids(50, 300, seed)
        expected, found = clean.prefill(ids, (30, 1)), dirty.prefill(ids, (30, 1))
        for position, logits in expected.logits.items():
            torch.testing.assert_close(found.logits[position], logits, rtol=1e-4, atol=1e-4)
        clean.free(expected)
        dirty.free(found)


def test_a_shape_is_recorded_once_and_only_decode_steps_are(tmp_path: Path) -> None:
    capture = TapeCapture()
    run = PagedRun(graph_model(write_tiny_model(tmp_path, "llama"), capture))
    sequences = [run.begin(random_ids(40, 300, seed=seed)) for seed in range(3)]
    run.step([(sequence, 20) for sequence in sequences])
    run.step([(sequences[0], 2), (sequences[1], 1)])
    assert capture.recorded == 0
    for _ in range(3):
        run.step([(sequence, 1) for sequence in sequences])
    assert capture.recorded == 1
    run.step([(sequences[0], 1)])
    assert capture.recorded == 2


def test_another_pool_has_graphs_of_its_own(tmp_path: Path) -> None:
    model = graph_model(write_tiny_model(tmp_path, "llama"), TapeCapture())
    ids = random_ids(30, 300, seed=1)
    runs = [PagedRun(model, seed=1), PagedRun(model, seed=2)]
    sequences = [run.prefill(ids, (29, 1)) for run in runs]
    assert torch.equal(sequences[0].logits[29], sequences[1].logits[29])
    assert runs[0].kv_bytes(sequences[0]) == runs[1].kv_bytes(sequences[1])


def test_logits_come_in_entry_order_for_those_that_sample_and_are_the_callers(tmp_path: Path) -> None:
    run = PagedRun(graph_model(write_tiny_model(tmp_path, "llama"), TapeCapture()))
    pages = [run.begin([token_id], room=3).pages for token_id in range(3)]

    def step(token_ids: Sequence[int], sample: Sequence[bool]) -> torch.Tensor:
        entries = [ForwardEntry([token_id], 0, table, wanted) for token_id, table, wanted in zip(token_ids, pages, sample, strict=True)]
        return run.model.forward(entries, run.pool)

    everything = step([7, 8, 9], [True, True, True])
    kept = everything.clone()
    torch.testing.assert_close(step([7, 8, 9], [True, False, True]), kept[[0, 2]])
    assert step([17, 18, 19], [False, False, False]).shape == (0, 300)
    assert torch.equal(everything, kept)


@pytest.mark.parametrize("kv_dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_shapes_and_dtypes_fit_where_activations_are_of_the_weights_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """On the device that computes nothing, where reading a tensor on the host is an error."""
    model = probe_model(ModelOptions(dtype, kv_dtype, device=torch.device("meta")))
    assert isinstance(model.decoder, TorchDecoder)
    decoder = GraphDecoder(model.decoder, plain)
    pool = KvPool(model.config, 40, 16, kv_dtype, "meta")
    entries = [ForwardEntry([1], 17, [13, 14], False), ForwardEntry([1], 300, range(15, 40), True), ForwardEntry([1], 0, [3], True)]
    logits = decoder.forward(entries, pool)
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, model.config.vocab_size), torch.float32, "meta")


def test_graphs_are_few_and_none_is_huge() -> None:
    edges = [n + off for n in (1 << k for k in range(19)) for off in (-1, 0, 1) if n + off > 0]
    for page_size in (1, 16, 512):
        shapes = set()
        for rows in (n for n in edges if n <= 4100):
            for end in edges:
                shape = graph_shape([ForwardEntry([1], end - 1, (), True)] * rows, page_size)
                if shape is None:
                    assert 4 * rows * max(end, LEAST_KEYS, page_size) > MOST_KEYS
                    continue
                shapes.add(shape)
                assert rows <= shape[0] < 2 * rows and end <= shape[1] * page_size and shape[0] * shape[1] * page_size <= MOST_KEYS
        assert len(shapes) <= 78


@contextmanager
def _entered(log: list[str], name: str) -> Iterator[None]:
    log.append(f"+{name}")
    yield
    log.append(f"-{name}")


def test_a_cuda_graph_is_recorded_after_a_warm_up_on_the_same_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins that have the signatures of torch's own: the order of things, not what CUDA makes of it."""
    log: list[str] = []
    cuda = torch.cuda
    side, main, memory = MagicMock(name="side"), MagicMock(name="main"), (0, 7)
    side.wait_stream.side_effect = lambda other: log.append("side waits")
    main.wait_stream.side_effect = lambda other: log.append("main waits")
    record = create_autospec(cuda.graph, side_effect=lambda *args, **kwargs: _entered(log, "record"))
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: memory)
    monkeypatch.setattr(cuda, "Stream", lambda device: side)
    monkeypatch.setattr(cuda, "device", lambda device: _entered(log, str(device)))
    monkeypatch.setattr(cuda, "stream", lambda stream: _entered(log, "side" if stream is side else "?"))
    monkeypatch.setattr(cuda, "current_stream", lambda: main)
    graphs = [MagicMock(name="first"), MagicMock(name="second")]
    monkeypatch.setattr(cuda, "CUDAGraph", MagicMock(side_effect=graphs))
    monkeypatch.setattr(cuda, "graph", record)
    out = torch.zeros(1)

    def compute() -> torch.Tensor:
        log.append("compute")
        return out

    capture = CudaCapture(torch.device("cuda:1"))
    run = capture(compute)
    assert log == ["+cuda:1", "side waits", "+side", "compute", "-side", "main waits", "+record", "compute", "-record", "-cuda:1"]
    capture(compute)
    assert all(call.kwargs["pool"] is memory and call.kwargs["stream"] is side for call in record.call_args_list)
    log.clear()
    assert run() is out and run() is out
    assert not log and graphs[0].replay.call_count == 2 and not graphs[1].replay.called


@pytest.mark.parametrize(("kernels", "name"), [("auto", GraphDecoder.name), ("torch", TorchDecoder.name)])
def test_on_cuda_graphs_decode_unless_torch_alone_is_asked_for(monkeypatch: pytest.MonkeyPatch, kernels: str, name: str) -> None:
    monkeypatch.setattr(model_module, "CudaCapture", lambda device: plain)
    config = probe_model(EXACT).config
    weights = random_weights(config, torch.bfloat16, torch.device("meta"), seed=0)
    assert choose_decoder(config, weights, ModelOptions(device=torch.device("cuda"), kernels=kernels)).name == name


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda:99"):
        EngineSettings(tmp_path, device="cuda:99").check()


def test_pages_outside_host_memory_cannot_be_sent() -> None:
    pool = KvPool(probe_model(EXACT).config, 2, device="meta")
    with pytest.raises(KvTransferError, match="meta"):
        pool.page_view(0)
