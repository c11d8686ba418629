"""Client SDK of kvrelay, the serving suite for split (prefill/decode) LLM inference.

Names are imported when they are first used, so that `import kvrelay` costs nothing and the services can share the values
without the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from kvrelay.client import AsyncClient
    from kvrelay.errors import KvRelayError
    from kvrelay.fleet import FleetView, ModelView
    from kvrelay.retry import RetryPolicy
    from kvrelay.stream import Answer, GenerationStream
    from kvrelay.sync import Client, SyncGenerationStream
    from kvrelay.values import ChatMessage, Completion, FinishReason, SamplingParams, StopConditions, Timings, Token, TransferStats, Usage

_HOMES = {
    "kvrelay.client": ("AsyncClient",),
    "kvrelay.sync": ("Client", "SyncGenerationStream"),
    "kvrelay.stream": ("Answer", "GenerationStream"),
    "kvrelay.retry": ("RetryPolicy",),
    "kvrelay.fleet": ("FleetView", "ModelView"),
    "kvrelay.errors": ("KvRelayError",),
    "kvrelay.values": (
        "ChatMessage", "Completion", "FinishReason", "SamplingParams", "StopConditions", "Timings", "Token", "TransferStats", "Usage",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "AsyncClient",
    "ChatMessage",
    "Client",
    "Completion",
    "FinishReason",
    "FleetView",
    "GenerationStream",
    "KvRelayError",
    "ModelView",
    "RetryPolicy",
    "SamplingParams",
    "StopConditions",
    "SyncGenerationStream",
    "Timings",
    "Token",
    "TransferStats",
    "Usage",
    "__version__",
    "errors",
    "values",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in ("errors", "values"):
        return importlib.import_module(f"kvrelay.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvrelay' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _version() -> str:
    """Of the installed distribution; '0+source' in a source tree that is not installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version("kvrelay"))
    except metadata.PackageNotFoundError:
        return "0+source"
