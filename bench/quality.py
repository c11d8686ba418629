"""What each class of arithmetic costs in quality against float32: `python -m bench.quality --help`.

Every kind of the same model reads the same text, token by token in lockstep, through the engine's own model and paged pool, as
in decoding; since a row's bits do not depend on how a prompt is cut, prefill gives the same figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench import machine, prose
from bench.report import table
from services.engine.demo.model import DEMO_NAMES, ensure_demo_model, resolve_model
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import KERNELS, LlamaModel, ModelOptions
from services.engine.model.quantization import QUANTIZED, Int8Weight, quantize_rows
from services.engine.model.weights import Matrix, ModelWeights, load_weights

PAGE = 16
REFERENCE = "float32"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One way to compute the model."""

    about: str
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    quantization: str = "none"
    change: Callable[[torch.Tensor], Matrix] | None = None
    """What becomes of each linear's weight, for kinds that only this study has."""


def _naive(weight: torch.Tensor) -> Int8Weight:
    return Int8Weight(*quantize_rows(weight.float(), 1), 1)


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_rows(weight.float(), 1)
    return values * scales[:, None]


KINDS = {
    REFERENCE: Kind("the reference: float32 weights and KV", torch.float32, torch.float32),
    "bfloat16": Kind("bfloat16 weights and KV (the default)"),
    "int8": Kind("--quantization int8: W8A8, rotated, a scale a token and a weight row, bfloat16 KV", quantization="int8"),
    "int8-naive": Kind("the same without the rotation (not served)", change=_naive),
    "int8-weights": Kind("int8 weights, float32 activations (not served)", torch.float32, change=_rounded),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """One kind against the reference, over all positions."""

    kind: str
    about: str
    perplexity: float
    change: float
    """Of perplexity against the reference's, as a share."""
    error: float
    """Standard error of `change`: positions are paired, so the text's own spread is not in it."""
    divergence: float
    """Mean KL(reference || kind), nats a token."""
    agreement: float
    """Share of positions at which both have the same likeliest token."""


class Reader:
    """One kind's model, with pages of its own for every window."""

    def __init__(self, folder: Path, kind: Kind, windows: tuple[int, ...], kernels: str, threads: int) -> None:
        count, length = windows
        options = ModelOptions(kind.dtype, kind.kv_dtype, kind.quantization, kernels=kernels, threads=threads)
        config = ModelConfig.from_folder(folder)
        weights = load_weights(folder, config, options.dtype, options.device)
        if kind.change is not None:
            weights = _changed(weights, kind.change)
        self.model = LlamaModel(config, weights, options)
        pages = -(-length // PAGE)
        self._pool = KvPool(config, count * pages, PAGE, options.kv_dtype)
        self._tables = [list(range(number * pages, (number + 1) * pages)) for number in range(count)]

    def step(self, token_ids: Sequence[int], position: int) -> torch.Tensor:
        """Log-probabilities of what follows one token of each window, float32 `[windows, vocab]`."""
        entries = [ForwardEntry([token], position, pages, True) for token, pages in zip(token_ids, self._tables, strict=True)]
        return self.model.forward(entries, self._pool).log_softmax(-1)


def _changed(weights: ModelWeights, change: Callable[[torch.Tensor], Matrix]) -> ModelWeights:
    def linears(of: Any, names: Iterable[str]) -> Any:
        return dataclasses.replace(of, **{name: change(getattr(of, name)) for name in names})

    layers = tuple(linears(layer, QUANTIZED - {"head"}) for layer in weights.layers)
    changed: ModelWeights = linears(weights, ["head"])
    return dataclasses.replace(changed, layers=layers)


def windows_of(folder: Path, texts: dict[str, str], count: int, length: int) -> torch.Tensor:
    """Token ids `[windows, length]`, windows spread evenly over each text; `ValueError` if the texts are too short."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    windows = []
    for number, text in enumerate(texts.values()):
        share = count // len(texts) + (number < count % len(texts))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) < share * length:
            raise ValueError(f"the text has {len(ids)} tokens, {share} windows of {length} need more")
        windows += [ids[len(ids) // share * index :][:length] for index in range(share)]
    return torch.tensor(windows)


@torch.inference_mode()
def compare(readers: dict[str, Reader], windows: torch.Tensor) -> list[Quality]:
    """Reads all windows with every reader, of which one is the reference."""
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in readers}
    divergences: dict[str, list[torch.Tensor]] = {name: [] for name in readers}
    agreements: dict[str, list[torch.Tensor]] = {name: [] for name in readers}
    for position in range(windows.shape[1] - 1):
        token_ids, following = windows[:, position].tolist(), windows[:, position + 1, None]
        reference = readers[REFERENCE].step(token_ids, position)
        likely = reference.exp()
        for name, reader in readers.items():
            answer = reference if name == REFERENCE else reader.step(token_ids, position)
            losses[name].append(-answer.gather(1, following)[:, 0])
            divergences[name].append((likely * (reference - answer)).sum(-1))
            agreements[name].append(reference.argmax(-1) == answer.argmax(-1))
    expected = torch.cat(losses[REFERENCE]).double()
    results = []
    for name in readers:
        loss = torch.cat(losses[name]).double()
        more = loss - expected
        change = math.expm1(more.mean())
        results.append(
            Quality(
                name,
                KINDS[name].about,
                perplexity=math.exp(loss.mean()),
                change=change,
                error=(1 + change) * float(more.std()) / math.sqrt(len(more)),
                divergence=float(torch.cat(divergences[name]).double().mean()),
                agreement=float(torch.cat(agreements[name]).double().mean()),
            )
        )
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--model", default=DEMO_NAMES[0], help="model folder; the demo model's weights are the exact dequantised ones")
    parser.add_argument("--kinds", default=list(KINDS), choices=list(KINDS), nargs="+", help="what is compared with float32")
    parser.add_argument("--kernels", default="auto", choices=KERNELS, help="what computes")
    parser.add_argument("--threads", type=int, default=1, help="threads of the native kernels")
    parser.add_argument("--windows", type=int, default=8, help="pieces of text, read side by side")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--text", type=Path, help="read this file instead of the documentation that is installed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the report to this file")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    demo = options.model.lower() in DEMO_NAMES
    folder = ensure_demo_model(dtype="float32") if demo else resolve_model(options.model)
    texts = {options.text.name: options.text.read_text(encoding="utf-8")} if options.text else prose.sources()
    windows = windows_of(folder, texts, options.windows, options.length)
    kinds = dict.fromkeys([REFERENCE, *options.kinds])
    readers = {name: Reader(folder, KINDS[name], windows.shape, options.kernels, options.threads) for name in kinds}
    results = compare(readers, windows)
    about = machine.describe() | {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "bench.quality", *sys.argv[1:]]),
        "model": options.model,
        "computed by": f"{readers[REFERENCE].model.decoder.name}, torch {torch.__version__}",
        "text": f"{' and '.join(texts)} ({prose.digest(texts)}, Python {platform.python_version()})",
        "positions": f"{windows.shape[0] * (windows.shape[1] - 1)}, in {windows.shape[0]} windows of {windows.shape[1]}",
    }
    report = markdown(about, results)
    print(report)
    if options.markdown is not None:
        options.markdown.write_text(report, encoding="utf-8")
    if options.json is not None:
        figures = {"about": about, "results": [dataclasses.asdict(each) for each in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def markdown(about: dict[str, str], results: Sequence[Quality]) -> str:
    """The whole report."""
    lines = [f"- **{name}**: {value}" for name, value in about.items()]
    rows = [
        [
            each.kind,
            f"{each.perplexity:.3f}",
            f"{each.change:+.2%} (±{each.error:.2%})",
            f"{each.divergence:.4f}",
            f"{each.agreement:.1%}",
            each.about,
        ]
        for each in results
    ]
    heads = ["kind", "perplexity", "change", "KL", "top-1", "what it is"]
    notes = [
        "Teacher-forced, against float32 at the same positions. *Change*: of perplexity, with its standard error. *KL*: mean",
        "divergence from float32's distribution, nats a token. *Top-1*: positions with the same likeliest token.",
    ]
    return "\n".join(["# Quality: what each kind of arithmetic costs", "", *lines, "", *notes, "", table(heads, rows)]) + "\n"


if __name__ == "__main__":
    main()
