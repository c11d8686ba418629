"""The demo model's GGUF file in another weight type, for peers that read GGUF: `python -m bench.gguf_file --type F16 OUT.gguf`.

Every matrix is dequantised and written in the wanted type; norms stay float32; tokenizer and settings are copied as they are.
All kinds thus hold the same weights, up to the rounding of their own type.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from services.engine.demo.model import default_cache_dir, find_gguf

TYPES = {
    "F32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "BF16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_HEADER = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Entries that the writer makes by itself, or that change."""


def write(source: Path, target: Path, type_name: str) -> None:
    """Writes `source` with all its matrices in `type_name`, one of `TYPES`."""
    kind, file_type = TYPES[type_name]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith(_HEADER):
            value_type, *element_type = field.types
            writer.add_key_value(name, field.contents(), value_type, element_type[0] if element_type else None)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ensure_gguf(type_name: str) -> Path:
    """The demo model in this type, made on first use beside the other converted models. `ModelLoadError` without the package."""
    target = default_cache_dir() / f"smollm2-135m-instruct-{type_name}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        write(find_gguf(), made, type_name)
        made.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=sorted(TYPES), required=True)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    write(find_gguf(), arguments.target, arguments.type)
    print(arguments.target)


if __name__ == "__main__":
    main()
