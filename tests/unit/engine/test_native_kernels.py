"""The native kernels' own promises: the same bits on every instruction set and with any number of threads, close to torch's operators."""

from __future__ import annotations

import platform
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.engine.demo.model import default_cache_dir
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import Decoder, ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel, load_model
from services.engine.model.native.build import COMPILERS, NativeKernelsUnavailable, library_path
from services.engine.model.native.decoder import NativeDecoder
from services.engine.model.weights import load_weights, quantize
from services.runtime.processes.machine import this_machine
from tests.engine_runs import MODES, options, random_ids
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="native kernels need a C++ compiler")

SIZES = {"hidden_size": 96, "intermediate_size": 112, "num_key_value_heads": 1, "vocab_size": 333, "sliding_window": 70}
"""Nothing that is a multiple of a panel of columns or of a tile of rows; a window that ends inside a block of keys."""

OTHER_TARGETS = {"avx2": ("-mavx2", "-mfma"), "portable": ()}
"""Compiler flags under which the same sources give other machine code."""
if "avx512bw" in this_machine().instruction_sets:
    OTHER_TARGETS["avx512"] = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")  # without VNNI


def decoder_for(folder: Path, mode: str, *, threads: int = 1, target: tuple[str, ...] | None = None) -> Decoder:
    config = ModelConfig.from_folder(folder)
    chosen = MODES[mode]
    weights = load_weights(folder, config, chosen.dtype, torch.device("cpu"))
    if chosen.quantization == "int8":
        weights = quantize(weights)
    more = {} if target is None else {"target_flags": target}
    return NativeDecoder(config, weights, threads, default_cache_dir(), **more)


def run(decoder: Decoder, folder: Path, mode: str, *, page_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the whole pool after steps of every kind: long and short chunks, decode rows, many rows and one."""
    pool = KvPool(ModelConfig.from_folder(folder), 1024 // page_size, page_size, MODES[mode].kv_dtype)
    pages = list(range(pool.num_pages))
    random.Random(3).shuffle(pages)
    half = len(pages) // 2
    first, second = random_ids(300, 333, seed=1), random_ids(90, 333, seed=2)
    steps = [
        [ForwardEntry(first[:200], 0, pages[:half], True), ForwardEntry(second[:1], 0, pages[half:], True)],
        [ForwardEntry(first[200:213], 200, pages[:half], False), ForwardEntry(second[1:90], 1, pages[half:], True)],
        [ForwardEntry(first[213:214], 213, pages[:half], True), ForwardEntry([7], 90, pages[half:], True)],
        [ForwardEntry(first[214:215], 214, pages[:half], True)],
    ]
    logits = torch.cat([decoder.forward(entries, pool).clone() for entries in steps])
    return logits, pool.data


def assert_same_bits(left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(left[0], right[0]), "logits"
    assert torch.equal(left[1], right[1]), "KV"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86 CPUs")
@pytest.mark.parametrize("name", OTHER_TARGETS)
@pytest.mark.parametrize("mode", MODES)
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path, mode: str, name: str) -> None:
    folder = write_tiny_model(tmp_path, "mistral", **SIZES)
    other = decoder_for(folder, mode, target=OTHER_TARGETS[name])
    assert other.name == f"native {name}"
    assert_same_bits(run(decoder_for(folder, mode), folder, mode), run(other, folder, mode))


@pytest.mark.parametrize("mode", MODES)
def test_threads_change_nothing(tmp_path: Path, mode: str) -> None:
    folder = write_tiny_model(tmp_path, "qwen3", **SIZES)
    expected = run(decoder_for(folder, mode), folder, mode)
    for threads in (2, 3, 5):
        assert_same_bits(expected, run(decoder_for(folder, mode, threads=threads), folder, mode))


@pytest.mark.parametrize("page_size", [1, 8, 64, 512])
def test_the_page_size_changes_no_logits(tmp_path: Path, page_size: int) -> None:
    folder = write_tiny_model(tmp_path, "llama", **SIZES)
    decoder = decoder_for(folder, "bfloat16")
    assert torch.equal(run(decoder, folder, "bfloat16")[0], run(decoder, folder, "bfloat16", page_size=page_size)[0])


@pytest.mark.parametrize(("mode", "far"), [("float32", 2e-5), ("bfloat16", 5e-3), ("int8", 2e-2)])
def test_torch_computes_nearly_the_same(tmp_path: Path, mode: str, far: float) -> None:
    """Not the same bits: sums run in another order, which KV in bf16 and int8 activations amplify by a rounding here and there."""
    folder = write_tiny_model(tmp_path, "qwen2", **SIZES)
    native, torch_model = (load_model(folder, options(mode, kernels)) for kernels in ("native", "torch"))

    def logits(model: LlamaModel) -> torch.Tensor:
        with torch.inference_mode():
            return run(model.decoder, folder, mode)[0]

    expected = logits(torch_model)
    assert ((logits(native) - expected).abs().max() / expected.abs().max()).item() < far


def test_an_earlier_step_leaves_nothing_behind(tmp_path: Path) -> None:
    """Buffers are kept between steps: a large step before a small one changes nothing."""
    folder = write_tiny_model(tmp_path, "llama", **SIZES)
    decoder = decoder_for(folder, "int8")
    fresh = run(decoder_for(folder, "int8"), folder, "int8")
    run(decoder, folder, "int8")
    assert_same_bits(fresh, run(decoder, folder, "int8"))


def test_a_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library_path(tmp_path, ("-O0",))
    made = first.stat().st_mtime_ns
    assert library_path(tmp_path, ("-O0",)) == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in tmp_path.iterdir()] == [first.name], "nothing half-made stays"


@pytest.mark.parametrize("damage", ["cut off", "empty", "another"])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, damage: str) -> None:
    """Loading it would kill the process, or the name would lead to somebody else's code."""
    library = library_path(tmp_path, ("-O0",))
    whole = library.read_bytes()
    library.write_bytes({"cut off": whole[: len(whole) // 2], "empty": b"", "another": whole[:-40] + bytes(40)}[damage])
    assert library_path(tmp_path, ("-O0",)) == library
    assert library.read_bytes()[:4] == whole[:4] and len(library.read_bytes()) == len(whole)
    assert library.stat().st_mode & 0o777 == 0o755, "others that share the cache may read it"


def test_a_compiler_that_fails_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(NativeKernelsUnavailable, match="no-such-cpu"):
        library_path(tmp_path, ("-march=no-such-cpu",))
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeKernelsUnavailable, match="could not be compiled"):
        library_path(tmp_path / "file" / "cache")


def test_options_carry_the_threads(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", **SIZES)
    two = load_model(folder, replace(options("bfloat16", "native"), threads=2))
    one = load_model(folder, options("bfloat16", "native"))
    assert_same_bits(run(one.decoder, folder, "bfloat16"), run(two.decoder, folder, "bfloat16"))
