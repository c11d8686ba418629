"""What an interactive user sees of `kvrelay`."""

from __future__ import annotations

from importlib import metadata

import kvrelay


def test_the_module_shows_its_names_and_nothing_of_its_workings() -> None:
    shown = {name for name in dir(kvrelay) if not name.startswith("__")}
    assert shown == set(kvrelay.__all__) - {"__version__"}
    assert all(getattr(kvrelay, name) is not None for name in kvrelay.__all__)


def test_the_version_is_the_distributions() -> None:
    assert kvrelay.__version__ == metadata.version("kvrelay")
