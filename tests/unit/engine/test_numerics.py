"""Numerics tell apart what gives other bits, and the native kernels' bits are those that their version stands for."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.checks.exactness import probe_model
from services.engine.model.graph_decode import GraphDecoder
from services.engine.model.native.build import COMPILERS
from services.engine.model.native.decoder import ARITHMETIC, numerics
from services.engine.model.torch_decoder import TorchDecoder
from services.engine.model.weights import random_weights
from services.runtime.processes.machine import cpu_design
from tests.engine_runs import KERNELS, MODES, options
from tests.tiny_models import write_tiny_model
from tests.unit.engine.test_native_kernels import SIZES, decoder_for, run

ROOT = Path(__file__).parents[3]
BITS = {
    1: {
        "float32": "c2a59b84ef73c5fd",
        "bfloat16": "edaed2cab3c2d839",
        "int8": "22aef082a37e11be",
    },
}
"""By `ARITHMETIC`: the SHA-256 of logits and KV, its beginning. Never change an entry: count `ARITHMETIC` up and add one."""


def write_exact_model(folder: Path, family: str) -> Path:
    """A tiny model whose weights are the same on every machine, which torch's random numbers are not."""
    file = write_tiny_model(folder, family, **SIZES) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        drawn = bytearray(hashlib.shake_256(name.encode()).digest(tensor.numel()))
        values = torch.frombuffer(drawn, dtype=torch.int8).float().view(tensor.shape) / 512
        tensors[name] = values + 1 if tensor.dim() == 1 and "norm" in name else values
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="native kernels need a C++ compiler")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the bits of x86 CPUs")
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_are_those_of_the_arithmetic(tmp_path: Path, mode: str) -> None:
    """Biases and SiLU in one family, norms everywhere and GELU and a window in the other."""
    digest = hashlib.sha256()
    for family in ("qwen2", "gemma3"):
        folder = write_exact_model(tmp_path / family, family)
        logits, pool = run(decoder_for(folder, mode), folder, mode)
        assert torch.isfinite(logits).all() and logits.std() > 0.1
        digest.update(logits.contiguous().numpy().tobytes() + pool.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == BITS[ARITHMETIC][mode], "other bits need another ARITHMETIC, and their digest beside it"


def test_native_kernels_go_by_their_arithmetic_and_by_architectures_nobody_compared() -> None:
    assert numerics("x86_64") == numerics("AMD64") == f"native-{ARITHMETIC}"
    assert numerics("aarch64") == f"native-{ARITHMETIC}-aarch64"


@pytest.mark.parametrize("kernels", KERNELS)
def test_numerics_are_a_word_and_the_same_for_every_model_and_dtype(kernels: str) -> None:
    """What differs in the model has fields of its own in the identity."""
    (found,) = {probe_model(options(mode, kernels), head_dim=size).decoder.numerics for mode in MODES for size in (32, 64)}
    assert re.fullmatch(rf"{kernels}-\S+", found), found


def test_torch_goes_by_version_instruction_set_cpu_and_threads() -> None:
    decoder = probe_model(options("float32", "torch")).decoder
    alone = decoder.numerics
    assert alone == f"torch-{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}/{cpu_design()}/threads-1"
    torch.set_num_threads(2)
    assert decoder.numerics == alone.replace("threads-1", "threads-2")


def test_torch_with_another_instruction_set_is_another() -> None:
    script = "from tests.engine_runs import *; from services.engine.checks.exactness import probe_model; "
    script += "print(probe_model(options('float32', 'torch')).decoder.numerics)"
    environ = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("/")[1] == "DEFAULT"


def test_other_devices_go_by_their_names_and_graphs_are_told_apart() -> None:
    config = probe_model(options("float32", "torch")).config
    eager = TorchDecoder(config, random_weights(config, torch.bfloat16, torch.device("meta"), seed=0))
    assert eager.numerics == f"torch-{torch.__version__}/meta"
    assert GraphDecoder(eager, lambda compute: compute).numerics == f"{eager.numerics}/graphs"


def test_a_cpu_is_named_by_numbers() -> None:
    assert re.fullmatch(r"[\w-]+", cpu_design())
