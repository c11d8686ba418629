"""What a worker tries before it serves: whether this machine keeps the promise of equal bits (exactness.py)."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvrelay.errors import ConfigError
from services.engine.checks.exactness import QUICK_LENGTHS, probe_model, violations
from services.engine.model.llama import LlamaModel
from services.engine.model.torch_decoder import TorchDecoder

log = logging.getLogger(__name__)

EXACTNESS_CHECKS = ("warn", "refuse", "off")


def check_exactness(model: LlamaModel, mode: str) -> None:
    """Tries a small model with the options and the decoder of this one; blocks for a third of a second.

    A violation is logged in mode 'warn' and a `ConfigError` in mode 'refuse'. Only CPUs are promised to be exact: nothing is tried
    elsewhere.
    """
    options = model.options
    if mode == "off" or options.device.type != "cpu":
        return
    kernels = "torch" if model.decoder.name == TorchDecoder.name else "native"
    found = violations(probe_model(replace(options, kernels=kernels), head_dim=model.config.head_dim), lengths=QUICK_LENGTHS)
    if not found:
        return
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    message = f"answers may depend on batch, chunks and cache on this machine ({found[0]}{more}); `kvrelay doctor` tells more"
    if mode == "refuse":
        raise ConfigError(f"{message}; --exactness-check warn serves all the same", setting="exactness_check")
    log.warning(message)
