"""`python -m services`: a whole suite on this machine, up until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import sys

from services.engine.checks.version import engine_version_text
from services.launcher.serve import serve
from services.launcher.settings import SuiteSettings
from services.runtime.processes.settings import load_settings

if __name__ == "__main__":
    settings = load_settings(SuiteSettings, sys.argv[1:], os.environ, "python -m services", engine_version_text)
    sys.exit(asyncio.run(serve(settings, dict(os.environ), sys.stdout, sys.stderr)))
