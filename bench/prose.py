"""English text that every installation has: Python's own language reference and the documentation of the pinned torch."""

from __future__ import annotations

import hashlib
import inspect
import pydoc_data.topics

import torch

TOPICS = ("compound", "context-managers", "dynamic-features", "exceptions", "execmodel", "import", "naming", "objects", "types")
MODULES = (torch.optim, torch.nn)


def sources() -> dict[str, str]:
    """Name to text, each of some ten thousand tokens: one of prose, one of documentation with its formulas and lists."""
    topics = pydoc_data.topics.topics
    classes = (getattr(module, name) for module in MODULES for name in sorted(dir(module)))
    docs = [inspect.cleandoc(each.__doc__) for each in classes if inspect.isclass(each) and each.__doc__]
    return {"Python reference": "\n".join(topics[name] for name in TOPICS), "torch docs": "\n\n".join(docs)}


def digest(texts: dict[str, str]) -> str:
    """Tells whether two runs saw the same text."""
    return hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:12]
