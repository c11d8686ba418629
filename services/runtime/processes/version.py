"""Which release this is."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

SOURCE_TREE = "from a source tree"


def installed(package: str) -> str:
    """The version of an installed package, which is not imported; '' if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def version_text(environ: Mapping[str, str]) -> str:
    """What `--version` says of a process that computes nothing: 'kvrelay 1.2.3, Python 3.11.7'."""
    return f"kvrelay {installed('kvrelay') or SOURCE_TREE}, Python {platform.python_version()}"
