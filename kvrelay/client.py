"""The asynchronous client of a kvrelay router."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import grpc

from kvrelay import wire
from kvrelay.errors import CancelledByClientError, RequestTooLargeError
from kvrelay.fleet import FieldDifference, FleetView, Incompatibility, LoadView, ModelView, WorkerView
from kvrelay.inference.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc, worker_pb2
from kvrelay.options import checked
from kvrelay.request import GenerateOptions, GenerationRequest, Prompt, build_request
from kvrelay.retry import RetryPolicy
from kvrelay.stream import GenerationStream, answer_of

DEFAULT_TARGET = "127.0.0.1:50051"
TARGET_ENV = "KVRELAY_TARGET"
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
_MAX_PAGES = 1000


class AsyncClient:
    """Talks to one router; one connection, any number of requests at once. Belongs to the event loop it is first used on.

        async with kvrelay.AsyncClient() as client:
            async for token in client.generate("Once upon a time", max_tokens=64):
                print(token.text, end="")

    Not closing it leaks a connection. Errors are `kvrelay.errors`.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        metadata: Mapping[str, str | bytes] | None = None,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008 - frozen
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`target` is host:port, by default $KVRELAY_TARGET or 127.0.0.1:50051.

        `timeout` is for a whole call in seconds, None or inf for the server's own limit. `retry` None never sends twice; otherwise only a
        request that got no answer at all is sent again. Without `credentials` the connection is not encrypted.
        """
        self.target = target or os.environ.get(TARGET_ENV) or DEFAULT_TARGET
        self._timeout_s: float | None = None if timeout is None else checked("timeout", timeout)
        self._max_message_bytes = max_message_bytes
        self._metadata: dict[str, str | bytes] = {} if metadata is None else checked("metadata", metadata)
        self._retry = retry
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection; running streams end with `CancelledByClientError`. Idempotent."""
        self._closed = True
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    def generate(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generates from text (taken as it is), from a conversation (put through the model's chat template) or from token ids.

        Raises at once, before anything is sent, what can be known here: the `InvalidRequestError`s of prompt, sampling and stop
        conditions, and `RequestTooLargeError`. Everything else comes while the stream is read.
        """
        request = _request_to_proto(build_request(prompt, options))
        size_bytes = request.ByteSize()
        if size_bytes > self._max_message_bytes:
            raise RequestTooLargeError(
                f"the request is {size_bytes} bytes long, over the cap of {self._max_message_bytes}",
                size_bytes=size_bytes,
                limit_bytes=self._max_message_bytes,
            )
        metadata = self._metadata | dict(options.get("metadata") or {}) | _trace_context(options.get("traceparent"))
        return GenerationStream(
            partial(self._open, request, tuple(metadata.items())),
            target=self.target,
            timeout_s=self._timeout_of(options.get("timeout")),
            retry=self._retry,
        )

    async def list_models(self, *, timeout: float | None = None) -> Sequence[ModelView]:
        """Every model of the fleet, ready or not."""
        models: list[ModelView] = []
        page_token = ""
        for _ in range(_MAX_PAGES):
            response = await self._ask("ListModels", router_service_pb2.ListModelsRequest(page_token=page_token), timeout)
            models += [_model_from_proto(model) for model in response.models]
            page_token = response.next_page_token
            if not page_token:
                break
        return models

    async def fleet(self, *, timeout: float | None = None) -> FleetView:
        """The fleet as the router sees it now."""
        return _fleet_from_proto(await self._ask("GetFleet", router_service_pb2.GetFleetRequest(), timeout))

    def _stub(self) -> Any:
        if self._closed:
            raise CancelledByClientError("the client is closed")
        if self._channel is None:
            options = _channel_options(self.target, self._max_message_bytes)
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.target, options)
            else:
                self._channel = grpc.aio.secure_channel(self.target, self._credentials, options)
        return router_service_pb2_grpc.RouterServiceStub(self._channel)

    def _timeout_of(self, timeout: float | None) -> float | None:
        """In seconds; None: no deadline of the client's."""
        seconds: float | None = self._timeout_s if timeout is None else checked("timeout", timeout)
        return seconds

    def _open(
        self, request: router_service_pb2.GenerateRequest, metadata: tuple[tuple[str, str | bytes], ...], timeout_s: float | None
    ) -> grpc.aio.UnaryStreamCall[Any, Any]:
        call: grpc.aio.UnaryStreamCall[Any, Any] = self._stub().Generate(request, timeout=timeout_s, metadata=metadata)
        return call

    async def _ask(self, method: str, request: Any, timeout: float | None) -> Any:
        metadata = tuple((self._metadata | _trace_context(None)).items())
        call = getattr(self._stub(), method)(request, timeout=self._timeout_of(timeout), metadata=metadata)
        return await answer_of(call, call, self.target, reached=False)


def _channel_options(target: str, max_message_bytes: int) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A router that comes back is found within a second, not after minutes of backoff.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A host that vanished without a word is noticed by pings, while calls are open.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients do not inherit one another's broken connections.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if target.startswith(("127.", "localhost", "[::1]", "unix:")):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def _trace_context(traceparent: str | None) -> dict[str, str]:
    """The given context, or that of the caller's current OpenTelemetry span: one can be current only where it was imported."""
    if traceparent is not None:
        return {"traceparent": traceparent}
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}


def _request_to_proto(value: GenerationRequest) -> router_service_pb2.GenerateRequest:
    return router_service_pb2.GenerateRequest(
        model=value.model,
        text=value.text,
        chat=None if value.messages is None else wire.chat_to_proto(value.messages),
        token_ids=None if value.token_ids is None else generation_pb2.TokenIds(ids=value.token_ids),
        sampling=wire.sampling_to_proto(value.sampling, with_seed=value.seed_given),
        stop=wire.stop_to_proto(value.stop, with_max_tokens=value.max_tokens_given),
        request_id=value.request_id,
        cache_salt=value.cache_salt,
    )


def _model_from_proto(message: router_service_pb2.Model) -> ModelView:
    return ModelView(
        name=message.name,
        identity=wire.identity_from_proto(message.identity),
        max_context_tokens=message.max_context_tokens,
        ready=message.ready,
        missing_role=message.missing_role,
        prefill_workers=message.prefill_workers,
        decode_workers=message.decode_workers,
    )


def _worker_from_proto(message: worker_pb2.Worker) -> WorkerView:
    load = message.load
    return WorkerView(
        worker_id=message.worker_id,
        role=message.role,
        address=message.address,
        state=message.state,
        incarnation=message.incarnation,
        identity=wire.identity_from_proto(message.identity) if message.HasField("identity") else None,
        layout=wire.layout_from_proto(message.layout) if message.HasField("layout") else None,
        load=LoadView(
            running=load.running,
            waiting=load.waiting,
            prefill_backlog_tokens=load.prefill_backlog_tokens,
            decode_backlog_tokens=load.decode_backlog_tokens,
            total_pages=load.total_pages,
            available_pages=load.available_pages,
            held_handles=load.held_handles,
        ),
    )


def _fleet_from_proto(message: router_service_pb2.GetFleetResponse) -> FleetView:
    return FleetView(
        workers=tuple(_worker_from_proto(worker) for worker in message.workers),
        incompatibilities=tuple(
            Incompatibility(
                prefill_worker=pair.prefill_worker,
                decode_worker=pair.decode_worker,
                differences=tuple(FieldDifference(d.field, d.prefill_value, d.decode_value) for d in pair.differences),
            )
            for pair in message.incompatibilities
        ),
        mode=message.mode,
        registry_connected=message.registry_connected,
        view_age_s=wire.duration_from_proto(message.view_age),
        in_flight=message.in_flight,
    )
