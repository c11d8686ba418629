"""Names of spans, attributes and events, one constant each.

OpenTelemetry's RPC (1.45: `rpc.status_code` is the name that was `rpc.response.status_code`) and GenAI conventions where they have
one; `kvrelay.*` otherwise. Defined here because the Python package of conventions lags behind.
"""

from __future__ import annotations

from typing import Final

# Spans, in the order of a request.
SPAN_GENERATE: Final = "kvrelay.generate"
SPAN_ADMISSION: Final = "admission"
SPAN_ROUTE: Final = "route"
SPAN_PREFILL_QUEUE: Final = "prefill.queue"
SPAN_PREFILL_COMPUTE: Final = "prefill.compute"
SPAN_KV_HOLD: Final = "kv.hold"
SPAN_KV_TRANSFER: Final = "kv.transfer"
SPAN_KV_FETCH: Final = "kv.fetch"
SPAN_EXPOSED_TRANSFER: Final = "kv.exposed_transfer"
SPAN_DECODE_QUEUE: Final = "decode.queue"
SPAN_DECODE_COMPUTE: Final = "decode.compute"
SPAN_KV_WRITE_BEHIND: Final = "kv.write_behind"

# Span events.
EVENT_CHUNK: Final = "prefill.chunk"
EVENT_FALLBACK: Final = "fallback"

# RPC conventions.
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS_CODE: Final = "rpc.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

# GenAI conventions.
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"

# Resource.
SERVICE_NAME: Final = "service.name"
SERVICE_NAMESPACE: Final = "service.namespace"
SERVICE_INSTANCE_ID: Final = "service.instance.id"

# Ours.
REASON: Final = "kvrelay.reason"
"""Wire reason of a typed error."""
REQUEST_ID: Final = "kvrelay.request_id"
WORKER_ID: Final = "kvrelay.worker_id"
PATH: Final = "kvrelay.path"
"""'local', 'split' or 'fallback'."""
DECISION: Final = "kvrelay.decision"
MODE: Final = "kvrelay.mode"
PLAN_REASON: Final = "kvrelay.plan.reason"
PREFILL_WORKER_ID: Final = "kvrelay.prefill.worker_id"
DECODE_WORKER_ID: Final = "kvrelay.decode.worker_id"
PREFILL_CACHED_TOKENS: Final = "kvrelay.prefill.cached_tokens"
DECODE_CACHED_TOKENS: Final = "kvrelay.decode.cached_tokens"
ATTEMPT: Final = "kvrelay.attempt"
CACHED_TOKENS: Final = "kvrelay.cached_tokens"
COMPUTED_TOKENS: Final = "kvrelay.computed_tokens"
CHUNK_TOKENS: Final = "kvrelay.chunk.tokens"
CHUNK_S: Final = "kvrelay.chunk.s"
"""Time of the step that computed the chunk."""
KV_BYTES: Final = "kvrelay.kv.bytes"
KV_BLOCKS: Final = "kvrelay.kv.blocks"
KV_EARLY_BYTES: Final = "kvrelay.kv.early_bytes"
"""Bytes that arrived before prefill ended."""
KV_WAIT_S: Final = "kvrelay.kv.wait_s"
KV_TRANSFER_S: Final = "kvrelay.kv.transfer_s"
KV_BANDWIDTH: Final = "kvrelay.kv.bandwidth_bytes_per_s"
KV_END: Final = "kvrelay.kv.end"
"""Why a handle ended: 'released', 'expired' or 'failed'."""
KV_RETRIES: Final = "kvrelay.kv.retries"
KV_TRANSPORT: Final = "kvrelay.kv.transport"
TIMING_PREFIX: Final = "kvrelay."
"""Before the name of each field of `kvrelay.values.Timings`: 'kvrelay.prefill_queue_s'."""
TTFT_S: Final = "kvrelay.ttft_s"
ITL_MEAN_S: Final = "kvrelay.itl.mean_s"
ITL_P99_S: Final = "kvrelay.itl.p99_s"
