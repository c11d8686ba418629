"""llama.cpp: its own benchmark programs, once for each run. Prefill by `llama-bench`, decode by `llama-batched-bench`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.subject import NotMeasured, Setup, serve


class LlamaCpp:
    """Programs in a folder and a GGUF file. Each run loads the file; only the work inside is timed, by the program itself."""

    def __init__(self, setup: Setup) -> None:
        self._folder = Path(setup.binaries)
        self._common = ["-m", setup.model, "-t", str(setup.threads)]

    def versions(self) -> Mapping[str, str]:
        record = self._records("llama-bench", "-p", "16", "-n", "0", "-r", "1", "-o", "jsonl")[0]
        build = f"{record['build_number']} ({record['build_commit']})"
        return {"llama.cpp": build, "settings": "F16 KV, one file load a run, not timed"}

    def run(self, cell: Cell) -> float:
        if cell.phase == "prefill":
            arguments = ("-p", str(cell.prompt), "-n", "0", "-r", str(cell.prompts), "-o", "jsonl")
            return float(sum(self._records("llama-bench", *arguments)[0]["samples_ns"])) / 1e9
        if cell.phase == "decode":
            # A shared prompt is computed once and then copied: every sequence has a cache of its own when decoding begins.
            size = cell.batch * (cell.context + cell.steps + 256)
            shape = ("-npp", str(cell.context), "-ntg", str(cell.steps), "-npl", str(cell.batch))
            options = ("-c", str(size), "-pps", *shape, "--output-format", "jsonl")
            return float(self._records("llama-batched-bench", *options)[0]["t_tg"])
        raise NotMeasured("its benchmark programs have no batches of mixed phases")

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        raise NotMeasured("its benchmark programs take no token ids")

    def _records(self, program: str, *arguments: str) -> list[dict[str, Any]]:
        command = [str(self._folder / program), *self._common, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        records = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
        if done.returncode or not records:
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr[-300:]}")
        return records


if __name__ == "__main__":
    serve(LlamaCpp)
