"""What a request leaves on its spans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from opentelemetry import trace
from opentelemetry.trace import Span

from kvrelay.errors import KvRelayError
from kvrelay.values import Completion
from services.router.placement import Mode, Plan, Split
from services.router.validation import ChatPrompt, GenerateCommand
from services.runtime.ports import Job
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import Attributes, AttributeValue, Telemetry, ending, transfer_attributes

NS_PER_S = 1_000_000_000


@contextmanager
def generate_span(telemetry: Telemetry, command: GenerateCommand, start_ns: int) -> Iterator[Span]:
    """The span of one request. Not made current: its generator is left and entered again at every token.

    Ended here unless the body has: spans that mark a phase end at the very moment that the request's times are made of.
    """
    attributes: Attributes = {
        names.GEN_AI_OPERATION_NAME: "chat" if isinstance(command.prompt, ChatPrompt) else "text_completion",
        names.GEN_AI_PROVIDER_NAME: "kvrelay",
        names.GEN_AI_REQUEST_TEMPERATURE: command.sampling.temperature,
    }
    span = telemetry.tracer.start_span(names.SPAN_GENERATE, attributes=attributes, start_time=start_ns)
    with ending(span):
        yield span


def trace_id(span: Span) -> str:
    """32 hex digits; '' without a trace."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


@contextmanager
def child(telemetry: Telemetry, parent: Span, name: str) -> Iterator[Span]:
    """A span below `parent`; not made current either, and ended here unless the body has."""
    span = telemetry.tracer.start_span(name, context=trace.set_span_in_context(parent))
    with ending(span):
        yield span


def note_request(span: Span, job: Job, model: str) -> None:
    """What is known once the request is admitted."""
    span.set_attributes(
        {
            names.REQUEST_ID: job.request_id,
            names.GEN_AI_REQUEST_MODEL: model,
            names.GEN_AI_REQUEST_MAX_TOKENS: job.stop.max_tokens,
            names.GEN_AI_USAGE_INPUT_TOKENS: len(job.token_ids),
        }
    )


def note_plan(span: Span, plan: Plan, mode: Mode, attempt: int) -> None:
    """On the `route` span of a try."""
    attributes: dict[str, AttributeValue] = {
        names.MODE: mode.value,
        names.DECISION: plan.decision,
        names.PLAN_REASON: plan.reason.value,
        names.ATTEMPT: attempt,
        names.DECODE_WORKER_ID: plan.route.decode.worker_id,
        names.DECODE_CACHED_TOKENS: plan.decode_cached_tokens,
    }
    if isinstance(plan.route, Split):
        attributes[names.PREFILL_WORKER_ID] = plan.route.prefill.worker_id
        attributes[names.PREFILL_CACHED_TOKENS] = plan.prefill_cached_tokens
    span.set_attributes(attributes)


def note_fallback(span: Span, error: KvRelayError, attempt: int) -> None:
    """A try failed and another begins."""
    attributes: Attributes = {names.REASON: error.reason, names.ATTEMPT: attempt, "exception.message": error.message}
    span.add_event(names.EVENT_FALLBACK, attributes)


def note_completion(span: Span, completion: Completion, plan: Plan, attempts: int, sent_ns: Sequence[int]) -> None:
    """Usage, path, phases and inter-token times. `sent_ns`: when each token went out."""
    usage = completion.usage
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
        names.GEN_AI_USAGE_CACHED_TOKENS: usage.cached_tokens,
        names.GEN_AI_RESPONSE_FINISH_REASONS: [completion.finish_reason.value],
        names.PATH: completion.path,
        names.DECISION: plan.decision,
        names.ATTEMPT: attempts,
    }
    for phase in fields(completion.timings):
        attributes[names.TIMING_PREFIX + phase.name] = getattr(completion.timings, phase.name)
    if completion.transfer is not None:
        attributes |= transfer_attributes(completion.transfer)
    gaps = sorted((later - earlier) / NS_PER_S for earlier, later in itertools.pairwise(sent_ns))
    if gaps:
        attributes[names.ITL_MEAN_S] = sum(gaps) / len(gaps)
        attributes[names.ITL_P99_S] = gaps[-(-99 * len(gaps) // 100) - 1]
    span.set_attributes(attributes)
