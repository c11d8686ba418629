"""Brings a suite's processes up in order, keeps them up, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.launcher.child import Child, Ready, child_environ, describe_exit, service_argv
from services.launcher.errors import StartError
from services.launcher.plan import ProcessSpec
from services.runtime.addresses import split_address

STOP_ORDER = ("router", "decode", "prefill", "kvstore")
"""Who takes new work stops first; who holds what others still read stops last."""
KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a process that died may be started again. Pure: asked with the times of its restarts."""

    max_restarts: int = 5
    """Within `window_s`; 0: never."""
    window_s: float = 60.0
    first_delay_s: float = 0.25
    max_delay_s: float = 5.0

    def delay_s(self, restarts: Iterable[float], now: float) -> float | None:
        """Seconds to wait before the next start, doubling with each recent one; None: give up."""
        recent = sum(1 for at in restarts if now - at < self.window_s)
        if recent >= self.max_restarts:
            return None
        return min(self.max_delay_s, self.first_delay_s * 2.0**recent)


class Supervisor:
    """The processes of one suite. Use `supervising` to have one."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        environ: Mapping[str, str],
        log_dir: Path,
        *,
        policy: RestartPolicy,
        start_timeout_s: float,
        threads: int,
        report: Callable[[str], None],
        command: Callable[[str, Sequence[str]], list[str]],
    ) -> None:
        self._tasks = tasks
        self._environ = child_environ(environ, threads)
        self.log_dir = log_dir
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._report = report
        self._command = command
        self._children: dict[str, Child] = {}
        self._ready: dict[str, Ready] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        self.failure: asyncio.Future[StartError] = asyncio.get_running_loop().create_future()
        """Its result is why a process was given up; the suite is not whole any more."""

    async def start(self, specs: Sequence[ProcessSpec]) -> list[Ready]:
        """Starts all at once and waits until each serves; raises the first `StartError`. What did start is left to `stop`."""
        for spec in specs:
            self._specs[spec.name] = spec
            await self._spawn(spec)
        waits = [self._tasks.create_task(_caught(self._await_ready(spec)), name=f"start {spec.name}") for spec in specs]
        try:
            for wait in asyncio.as_completed(waits):
                error = await wait
                if error is not None:
                    raise error
        finally:
            for task in waits:
                task.cancel()
        for spec in specs:
            self.keep_up(self._keep(spec), spec.name)
        return [self._ready[spec.name] for spec in specs]

    def ready(self, name: str) -> Ready:
        """What `name` said when it came up last."""
        return self._ready[name]

    def child(self, name: str) -> Child:
        """The present life of `name`."""
        return self._children[name]

    def spec(self, name: str) -> ProcessSpec:
        """How `name` was started."""
        return self._specs[name]

    @property
    def names(self) -> list[str]:
        return list(self._specs)

    def keep_up(self, work: Coroutine[None, None, None], name: str) -> None:
        """Runs `work`, which must not raise, until the suite stops."""
        self._keepers[name] = self._tasks.create_task(work, name=f"keep {name}")

    async def stop_one(self, name: str, grace_s: float, *, kill: bool = False) -> None:
        """Takes one process down for good; `start` brings it back."""
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        await self._end([self._children[name]], 0.0 if kill else grace_s)

    async def stop(self, grace_s: float) -> None:
        """Drains role after role, then kills what is left. Safe to call again, and after a failed `start`."""
        self._stopping = True
        for keeper in self._keepers.values():
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers.values())
        self._keepers.clear()
        deadline = time.monotonic() + grace_s
        for role in STOP_ORDER:
            members = [child for name, child in self._children.items() if self._specs[name].role == role]
            await self._end(members, max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Ends everything at once: the answer to a second Ctrl-C."""
        self._stopping = True
        for child in self._children.values():
            child.kill()

    async def _spawn(self, spec: ProcessSpec) -> None:
        flags = spec.flags_for(split_address(self._ready[spec.name].address)[1] if spec.name in self._ready else None)
        self._children[spec.name] = await Child.spawn(
            spec.name, self._command(spec.role, flags), self._environ, self.log_dir / f"{spec.name}.log"
        )

    async def _await_ready(self, spec: ProcessSpec) -> None:
        self._ready[spec.name] = await self._children[spec.name].ready(self._start_timeout_s)

    async def _keep(self, spec: ProcessSpec) -> None:
        """Watches one process and starts it again when it dies. Never raises: it reports a failure instead."""
        restarts: deque[float] = deque(maxlen=max(1, self._policy.max_restarts))
        while True:
            child = self._children[spec.name]
            code = await child.wait()
            if self._stopping:
                return
            delay_s = self._policy.delay_s(restarts, time.monotonic())
            if delay_s is None:
                return self._give_up(StartError(f"{spec.name} {describe_exit(code)}; giving up", child.tail()))
            self._report(f"{spec.name} {describe_exit(code)}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            restarts.append(time.monotonic())
            try:
                await self._spawn(spec)
                await self._await_ready(spec)
            except StartError as error:
                self._report(error.message)
                self._children[spec.name].kill()
                continue
            except OSError as error:
                return self._give_up(StartError(f"{spec.name} could not be started again: {error}"))
            self._report(f"{spec.name} is back at {self._ready[spec.name].address}")

    def _give_up(self, error: StartError) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    async def _end(self, children: Sequence[Child], grace_s: float) -> None:
        live = [child for child in children if child.returncode is None]
        if not live:
            return
        if grace_s > 0:
            for child in live:
                child.terminate()
            await _all_ended(live, grace_s)
        late = [child for child in live if child.returncode is None]
        for child in late:
            if grace_s > 0:
                self._report(f"{child.name} did not stop within {grace_s:.0f} s; killing it")
            child.kill()
        if late and not await _all_ended(late, KILL_WAIT_S):
            raise StartError(f"processes that SIGKILL did not end: {', '.join(f'{c.name} ({c.pid})' for c in late)}")


@contextlib.asynccontextmanager
async def supervising(
    environ: Mapping[str, str],
    log_dir: Path,
    *,
    policy: RestartPolicy,
    start_timeout_s: float,
    grace_s: float,
    threads: int,
    report: Callable[[str], None],
    command: Callable[[str, Sequence[str]], list[str]] = service_argv,
) -> AsyncIterator[Supervisor]:
    """A supervisor; on leaving, however that happens, every process it started has ended.

    `command` makes a role's command line out of its flags.
    """
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(
            tasks, environ, log_dir, policy=policy, start_timeout_s=start_timeout_s, threads=threads, report=report, command=command
        )
        try:
            yield supervisor
        except BaseException as error:  # noqa: BLE001 - raised again below
            supervisor.kill()
            failure = error
        finally:
            await supervisor.stop(grace_s)
    if failure is not None:
        raise failure  # here rather than inside, so that it arrives as itself and not in an exception group


async def _caught(work: Awaitable[None]) -> StartError | None:
    try:
        await work
    except StartError as error:
        return error
    return None


async def _all_ended(children: Sequence[Child], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(child.wait() for child in children))
    except TimeoutError:
        return False
    return True
