"""The engines kvrelay is compared with. Each is a module here, run by the interpreter of its own virtual environment.

Standard library only: the peers' own processes import this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    """How a peer is found and loaded."""

    name: str
    module: str
    models: Mapping[str, str]
    """Class of arithmetic to what the peer reads for it: 'hf:<dtype>' is a Hugging Face folder, 'gguf:<type>' a GGUF file."""
    python: str = ""
    """Interpreter, from the peers' folder; '' is the one that runs the benchmark."""
    binaries: str = ""
    """Folder of its programs, from the peers' folder."""
    whole: bool = False
    """It is measured as a whole engine, with scheduler and sampler, and so compared with kvrelay's whole engine."""

    def missing(self, folder: Path) -> Path | None:
        """What is not there, if the peer is not installed in `folder`."""
        wanted = [folder / part for part in (self.python, self.binaries) if part]
        return next((path for path in wanted if not path.exists()), None)


_OPENVINO = {"float32": "gguf:F16", "bfloat16": "gguf:F16", "int8": "gguf:Q8_0"}

PEERS = (
    Peer("openvino", "bench.peers.openvino", _OPENVINO, python="openvino/bin/python", whole=True),
    Peer("openvino-kv8", "bench.peers.openvino_kv8", _OPENVINO, python="openvino/bin/python", whole=True),
    Peer(
        "llama.cpp",
        "bench.peers.llama_cpp",
        {"float32": "gguf:F32", "bfloat16": "gguf:BF16", "int8": "gguf:Q8_0"},
        binaries="llama.cpp/bin",
    ),
    Peer("vllm", "bench.peers.vllm", {"float32": "hf:float32", "bfloat16": "hf:bfloat16"}, python="vllm/bin/python", whole=True),
    Peer("transformers", "bench.peers.huggingface", {"float32": "hf:float32", "bfloat16": "hf:bfloat16"}),
    Peer("fbgemm", "bench.peers.fbgemm", {"int8": "hf:float32"}),
)
