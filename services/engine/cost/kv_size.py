"""`kvrelay kv-size`: how large a prompt's KV is, how long it travels, and how much of that a client would feel; before anything runs.

python -m services.engine.cost.kv_size --model FOLDER --tokens 4096 --link 12.5
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrelay.errors import ConfigError, KvRelayError
from services.engine.cost.coefficients import Floors, StepCoefficients
from services.engine.cost.profile import read_profile
from services.engine.model.config import ModelConfig
from services.engine.scheduling.step_cost import StepShape
from services.runtime.processes.settings import REQUIRED, load_settings, setting


@dataclass(frozen=True, slots=True)
class KvSizeSettings:
    """Says how large a prompt's KV is, and what moving it costs."""

    model: str = setting(REQUIRED, "model folder (Hugging Face style); only its config.json is read")
    tokens: int = setting(REQUIRED, "prompt", unit="tokens", minimum=1)
    link: float = setting(REQUIRED, "bandwidth between the workers", unit="GB/s", minimum=1e-6)
    kv_dtype: str = setting("bfloat16", "dtype of the KV cache", choices=("bfloat16", "float32"))
    block_size: int = setting(16, "tokens a KV block: whole blocks move", unit="tokens", minimum=1)
    cached_tokens: int = setting(0, "leading tokens that the decode worker has already", unit="tokens", minimum=0)
    max_num_batched_tokens: int = setting(256, "tokens a step computes at most", unit="tokens", minimum=1)
    profile: str = setting("", "file of `kvrelay profile`: then the share of the time to first token is told too")
    json: bool = setting(False, "print JSON")


@dataclass(frozen=True, slots=True)
class KvSize:
    """A prompt's KV and its way."""

    token_bytes: int
    """2 (keys, values) x layers x KV heads x head size x bytes of one number."""
    prompt_bytes: int
    """Of the prompt's tokens."""
    moved_bytes: int
    """Of the blocks that travel: whole ones, without those that are there."""
    moved_blocks: int
    transfer_s: float
    """On the link, alone."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """The transfer beside a prefill in chunks."""

    prefill_s: float
    exposed_s: float
    """From prefill's end to the last byte, when each chunk travels as soon as it is computed: what the second token waits for."""
    share: float
    """Of the time to first token, if the transfer came after prefill and before the token."""


def kv_size(config: ModelConfig, *, tokens: int, link_bytes_per_s: float, kv_dtype: str, block_size: int, cached_tokens: int = 0) -> KvSize:
    """`ConfigError` for more tokens than the model's context, or more cached ones than there are."""
    if tokens > config.max_positions:
        raise ConfigError(f"--tokens: the model's context has {config.max_positions} tokens, got {tokens}", setting="tokens")
    if cached_tokens > tokens:
        raise ConfigError(f"--cached-tokens: at most the prompt's {tokens}, got {cached_tokens}", setting="cached_tokens")
    token_bytes = Floors.of(config, dtype="float32", kv_dtype=kv_dtype, quantization="none").kv_position_bytes
    blocks = -(-tokens // block_size) - cached_tokens // block_size
    moved = blocks * block_size * token_bytes
    return KvSize(token_bytes, tokens * token_bytes, moved, blocks, moved / link_bytes_per_s)


def exposure(size: KvSize, coefficients: StepCoefficients, *, tokens: int, cached_tokens: int, budget: int) -> Exposure:
    """Chunks of `budget` tokens are computed one after the other; each one's share of the bytes follows it on the link."""
    computed = cached_tokens
    clock = link_free = 0.0
    while computed < tokens:
        end = min(tokens, computed + budget)
        clock += coefficients.predict_s(StepShape().with_chunk(computed, end))
        link_free = max(link_free, clock) + size.transfer_s * (end - computed) / max(1, tokens - cached_tokens)
        computed = end
    return Exposure(clock, link_free - clock, size.transfer_s / (clock + size.transfer_s) if size.moved_blocks else 0.0)


def render(size: KvSize, exposed: Exposure | None) -> str:
    """For people."""
    lines = [
        f"KV a token           {size.token_bytes:,} bytes",
        f"KV of the prompt     {size.prompt_bytes / 1e6:,.1f} MB",
        f"to be moved          {size.moved_bytes / 1e6:,.1f} MB in {size.moved_blocks:,} blocks",
        f"transfer             {size.transfer_s * 1e3:,.1f} ms",
    ]
    if exposed is not None:
        lines += [
            f"prefill              {exposed.prefill_s * 1e3:,.1f} ms",
            f"transfer after it    {exposed.share:.1%} of the time to first token",
            f"transfer beside it   {exposed.exposed_s * 1e3:,.1f} ms left when prefill ends",
        ]
    return "\n".join(lines)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exit status 0, 1 after one line on stderr, 2 for a wrong option."""
    settings = load_settings(KvSizeSettings, argv, environ, "kvrelay kv-size")
    try:
        config = ModelConfig.from_folder(Path(settings.model).expanduser())
        size = kv_size(
            config,
            tokens=settings.tokens,
            link_bytes_per_s=settings.link * 1e9,
            kv_dtype=settings.kv_dtype,
            block_size=settings.block_size,
            cached_tokens=settings.cached_tokens,
        )
        exposed = None
        if settings.profile:
            coefficients = read_profile(Path(settings.profile).expanduser()).coefficients
            cached = settings.cached_tokens // settings.block_size * settings.block_size
            exposed = exposure(size, coefficients, tokens=settings.tokens, cached_tokens=cached, budget=settings.max_num_batched_tokens)
    except KvRelayError as error:
        sys.stderr.write(f"error: {error.reason}: {error.message}\n")
        return 1
    found = {**asdict(size), **(asdict(exposed) if exposed is not None else {})}
    sys.stdout.write((json.dumps(found) if settings.json else render(size, exposed)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
