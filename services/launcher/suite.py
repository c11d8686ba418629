"""A whole suite as one context: model, Redis, store, workers, router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import kvrelay
from kvrelay.errors import DeadlineExceededError, KvRelayError, UnavailableError
from services.launcher.child import child_environ, describe_exit, end
from services.launcher.errors import StartError
from services.launcher.plan import router_processes, store_processes, worker_processes
from services.launcher.preflight import check_chosen_model, check_settings, check_writable
from services.launcher.settings import SuiteSettings
from services.launcher.supervisor import RestartPolicy, Supervisor, supervising
from services.runtime.addresses import host_port, reachable_here, redis_address
from services.runtime.processes import checks
from services.runtime.registry.embedded_redis import EmbeddedRedis

REDIS_CHECK_S = 1.0
REDIS_RETRY_S = 0.5
PREPARE_GRACE_S = 5.0
"""How long an interrupted preparation may take to remove what it has not finished."""
OWN_VARIABLES = frozenset(f"KVRELAY_{field.name.upper()}" for field in fields(SuiteSettings))
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own name for `--otlp-endpoint`."""


@dataclass(frozen=True, slots=True)
class RunningSuite:
    """A suite that answers."""

    address: str
    """host:port of the router."""
    model_name: str
    redis_url: str
    store_address: str
    """Empty without a store."""
    supervisor: Supervisor
    redis: EmbeddedRedis | None
    """None when Redis is somebody else's."""


@contextlib.asynccontextmanager
async def running_suite(settings: SuiteSettings, environ: Mapping[str, str], report: Callable[[str], None]) -> AsyncIterator[RunningSuite]:
    """Starts everything and waits until the model can be asked; on leaving, everything has stopped.

    A clean leave drains; an exception inside kills at once. Raises `ConfigError`, `ModelLoadError` or `StartError`.
    """
    # What this process was told by environment it tells the services by flags; the same variable may mean something else to them.
    settings = replace(settings, otlp_endpoint=settings.otlp_endpoint or environ.get(OTLP_VARIABLE, ""))
    if settings.otlp_endpoint:
        checks.otlp_endpoint(settings.otlp_endpoint)
    environ = {name: value for name, value in environ.items() if name not in OWN_VARIABLES}
    check_settings(settings, usable_cores())
    with _log_folder(settings.log_dir, report) as log_dir:
        settings = await resolve_model(settings, environ, report)
        check_chosen_model(settings)
        async with _running(settings, environ, log_dir, report) as suite:
            yield suite


@contextlib.asynccontextmanager
async def _running(
    settings: SuiteSettings, environ: Mapping[str, str], log_dir: Path, report: Callable[[str], None]
) -> AsyncIterator[RunningSuite]:
    """The processes of a suite whose `model` is a folder."""
    with _redis(settings.redis_url) as (redis, redis_url):
        if redis is None:
            await wait_for_redis(redis_url, settings.start_timeout_s, report)
        policy = RestartPolicy(max_restarts=settings.max_restarts)
        async with supervising(
            environ,
            log_dir,
            policy=policy,
            start_timeout_s=settings.start_timeout_s,
            grace_s=settings.drain_grace_s,
            threads=max(1, settings.threads),
            report=report,
        ) as supervisor:
            if redis is not None and settings.max_restarts > 0:
                supervisor.keep_up(_keep_redis(redis, report), "redis")
            stores = await supervisor.start(store_processes(settings, redis_url))
            store_address = stores[0].address if stores else ""
            workers = worker_processes(settings, redis_url, store_address, usable_cores())
            for ready in await supervisor.start(workers):
                report(f"{ready.worker_id} serves at {ready.address}")
            (router,) = await supervisor.start(router_processes(settings, redis_url))
            address = reachable_here(router.address)
            model_name = await wait_until_answering(address, settings.start_timeout_s)
            yield RunningSuite(address, model_name, redis_url, store_address, supervisor, redis)


async def wait_for_redis(url: str, timeout_s: float, report: Callable[[str], None]) -> None:
    """Returns once a Redis that is not ours answers; says so when it does not at once. Raises `StartError`, at once where it refuses us."""
    # Imported here: redis-py takes longer to import than all else, and the embedded server needs none of it.
    from services.runtime.registry.workers import RedisRegistry

    registry, told, place = RedisRegistry(url), False, host_port(*redis_address(url))
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await registry.ping()
                except UnavailableError as error:
                    if error.fields.get("refused"):
                        raise StartError(f"{place}: {error.message} (--redis-url)") from None
                    if not told:
                        report(f"{place}: {error.message}; trying on for {timeout_s:g} s (--start-timeout-s)")
                    told = True
                    missing = error.message
                await asyncio.sleep(REDIS_RETRY_S)
    except TimeoutError:
        raise StartError(f"no Redis answered at {place} within {timeout_s:g} s: {missing} (--redis-url)") from None
    finally:
        with contextlib.suppress(UnavailableError):
            await registry.close()


async def wait_until_answering(address: str, timeout_s: float) -> str:
    """Waits until the router reports a model that can be asked for, and returns its name."""
    missing = "no worker has registered"
    try:
        async with asyncio.timeout(timeout_s), kvrelay.AsyncClient(address) as client:
            while True:
                with contextlib.suppress(UnavailableError, DeadlineExceededError):
                    for model in await client.list_models(timeout=5.0):
                        if model.ready:
                            return model.name
                        missing = f"{model.name} lacks a {model.missing_role} worker"
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise StartError(f"the router at {address} had no model to offer within {timeout_s:g} s: {missing}") from None


async def resolve_model(settings: SuiteSettings, environ: Mapping[str, str], report: Callable[[str], None]) -> SuiteSettings:
    """The settings with `model` an absolute folder. A name is converted or downloaded first, by a process of its own."""
    folder = local_folder(settings.model)
    if folder is not None:
        return replace(settings, model=str(folder))
    report(f"preparing the model {settings.model} and the kernels for this CPU (the first time takes some seconds)")
    kernels = settings.kernels if settings.device == "cpu" else "torch"
    argv = [sys.executable, "-m", "services.launcher.prepare_model", settings.model, settings.cache_dir, settings.dtype, kernels]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=child_environ(environ), start_new_session=True
    )
    try:
        output, errors = await process.communicate()
    except BaseException:
        await end(process, PREPARE_GRACE_S)
        raise
    try:
        answer = json.loads(output)
    except ValueError:
        raise StartError(f"preparing the model {settings.model} {describe_exit(process.returncode or 0)}", errors.decode()) from None
    if "error" in answer:
        raise StartError(answer["error"])
    return replace(settings, model=answer["path"], model_name=settings.model_name or answer["name"])


def local_folder(model: str) -> Path | None:
    """The absolute folder, if `model` names one; None for a name that has to be looked up."""
    folder = Path(model).expanduser()
    return folder.resolve() if folder.is_dir() else None


def usable_cores() -> list[int]:
    """Cores this process may run on; empty where the system cannot pin."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


async def _keep_redis(redis: EmbeddedRedis, report: Callable[[str], None]) -> None:
    """Starts the embedded Redis again, on its port and empty, when it dies: workers register anew."""
    while True:
        await asyncio.sleep(REDIS_CHECK_S)
        if redis.died:
            report("the embedded Redis died; starting it again")
            try:
                # It dies with the thread that starts it: those of the loop's executor live as long as the loop.
                await asyncio.to_thread(redis.restart)
            except (OSError, KvRelayError) as error:
                report(f"the embedded Redis did not come back: {error}")


@contextlib.contextmanager
def _redis(url: str) -> Iterator[tuple[EmbeddedRedis | None, str]]:
    if url:
        yield None, url
        return
    with EmbeddedRedis(die_with_parent=True) as redis:
        yield redis, redis.url


@contextlib.contextmanager
def _log_folder(folder: str, report: Callable[[str], None]) -> Iterator[Path]:
    """The named folder; or a temporary one that is kept, and named, only when something went wrong that logs can tell of."""
    if folder:
        check_writable("--log-dir", folder)
        yield Path(folder)
        return
    made, keep = Path(tempfile.mkdtemp(prefix="kvrelay-logs-")), False
    try:
        yield made
    except Exception:
        keep = any(made.iterdir())
        if keep:
            report(f"logs are kept in {made}")
        raise
    finally:
        if not keep:
            shutil.rmtree(made, ignore_errors=True)
