"""RouterService on gRPC: messages to values, and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import islice
from typing import Any

from kvrelay import wire
from kvrelay.errors import InvalidRequestError
from kvrelay.inference.v1 import router_service_pb2, router_service_pb2_grpc
from kvrelay.values import ChatMessage, Token
from services.router.admission import Admission
from services.router.fleet import Fleet
from services.router.orchestrator import Completed, GenerateEvent, Orchestrator, Started
from services.router.placement import Mode
from services.router.validation import MAX_MESSAGES, ChatPrompt, GenerateCommand, Prompt, TextPrompt, TokenPrompt
from services.runtime.clock import Clock
from services.runtime.rpc.deadline import remaining_s
from services.runtime.rpc.wire import worker_info_to_proto

SERVICE_NAME = "kvrelay.inference.v1.RouterService"
MAX_PAGE_SIZE = 1000


class RouterServicer(router_service_pb2_grpc.RouterServiceServicer):
    """Thin: everything is decided by the orchestrator and the fleet view."""

    def __init__(
        self, orchestrator: Orchestrator, fleet: Fleet, admission: Admission, mode: Mode, clock: Clock, *, max_timeout_s: float
    ) -> None:
        self._orchestrator = orchestrator
        self._fleet = fleet
        self._admission = admission
        self._mode = mode
        self._clock = clock
        self._max_timeout_s = max_timeout_s

    async def Generate(
        self, request: router_service_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[router_service_pb2.GenerateResponse, None]:
        timeout_s = remaining_s(self._max_timeout_s)
        async with aclosing(self._orchestrator.generate(command_from_proto(request), timeout_s=timeout_s)) as events:
            async for event in events:
                yield event_to_proto(event)

    async def ListModels(self, request: router_service_pb2.ListModelsRequest, context: Any) -> router_service_pb2.ListModelsResponse:
        """Sorted by name; a page token is the last name of the page before."""
        if request.page_size < 0:
            raise InvalidRequestError(f"page_size must be 0 or more, got {request.page_size}", field="page_size")
        now = self._clock.monotonic()
        names = [name for name in self._fleet.models() if name > request.page_token]
        page = names[: min(request.page_size or MAX_PAGE_SIZE, MAX_PAGE_SIZE)]
        return router_service_pb2.ListModelsResponse(
            models=[self._model(name, now) for name in page],
            next_page_token=page[-1] if len(page) < len(names) else "",
        )

    async def GetFleet(self, request: router_service_pb2.GetFleetRequest, context: Any) -> router_service_pb2.GetFleetResponse:
        now = self._clock.monotonic()
        return router_service_pb2.GetFleetResponse(
            workers=[worker_info_to_proto(worker) for worker in self._fleet.workers(now)],
            incompatibilities=[
                router_service_pb2.Incompatibility(
                    prefill_worker=pair.prefill_worker,
                    decode_worker=pair.decode_worker,
                    differences=[
                        router_service_pb2.FieldDifference(field=field, prefill_value=ours, decode_value=theirs)
                        for field, ours, theirs in pair.differences
                    ],
                )
                for pair in self._fleet.incompatibilities()
            ],
            mode=self._mode.value,
            registry_connected=self._fleet.connected,
            view_age=wire.duration_to_proto(self._fleet.view_age_s(now)),
            in_flight=self._admission.in_flight,
        )

    def _model(self, name: str, now: float) -> router_service_pb2.Model:
        state = self._fleet.model_state(name, self._mode)
        return router_service_pb2.Model(
            name=name,
            identity=wire.identity_to_proto(state.identity),
            max_context_tokens=state.max_context_tokens,
            ready=state.decode_workers > 0,
            missing_role=state.missing_role,
            prefill_workers=state.prefill_workers,
            decode_workers=state.decode_workers,
        )


def command_from_proto(message: router_service_pb2.GenerateRequest) -> GenerateCommand:
    """Nothing is checked here, and nothing long is copied: that a request is too long must be cheap to find out."""
    return GenerateCommand(
        prompt=_prompt_from_proto(message),
        model=message.model,
        sampling=wire.sampling_from_proto(message.sampling),
        has_seed=message.sampling.HasField("seed"),
        stop=wire.stop_from_proto(message.stop),
        has_max_tokens=message.stop.HasField("max_tokens"),
        request_id=message.request_id,
        cache_salt=message.cache_salt,
    )


def _prompt_from_proto(message: router_service_pb2.GenerateRequest) -> Prompt | None:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            # One over the limit is enough to be refused for it.
            return ChatPrompt([ChatMessage(turn.role, turn.content) for turn in islice(message.chat.messages, MAX_MESSAGES + 1)])
        case "token_ids":
            return TokenPrompt(message.token_ids.ids)
        case _:
            return None


def event_to_proto(event: GenerateEvent) -> router_service_pb2.GenerateResponse:
    match event:
        case Started(request_id, model, prompt_tokens, trace_id):
            started = router_service_pb2.GenerateStarted(request_id=request_id, model=model, prompt_tokens=prompt_tokens, trace_id=trace_id)
            return router_service_pb2.GenerateResponse(started=started)
        case Token():
            return router_service_pb2.GenerateResponse(token=wire.token_to_proto(event))
        case Completed(completion, decision):
            return router_service_pb2.GenerateResponse(done=wire.completion_to_proto(completion, decision=decision))
