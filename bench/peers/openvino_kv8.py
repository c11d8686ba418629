"""OpenVINO GenAI as it comes: like `bench.peers.openvino`, with keys and values in 8 bits."""

from __future__ import annotations

from functools import partial

from bench.peers.openvino import OpenVino
from bench.subject import serve

if __name__ == "__main__":
    serve(partial(OpenVino, kv_precision="u8"))
