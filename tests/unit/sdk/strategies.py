"""Hypothesis strategies for the values that travel."""

from __future__ import annotations

from hypothesis import strategies as st

from kvrelay import values
from kvrelay.handle import HandleState, KvHandle, KvLayout, KvSegment, Lease, ModelIdentity, PeerLocation, StoreLocation

text = st.text(max_size=12)
"""Any Unicode but lone surrogates, as protobuf demands."""
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
seconds = st.integers(0, 10**12).map(lambda ns: ns / 1e9)
"""Whole nanoseconds: what a Duration keeps."""
finite = st.floats(allow_nan=False, allow_infinity=False)
hashes = st.binary(min_size=32, max_size=32)
no_nul = text.map(lambda s: s.replace("\0", ""))

identities = st.builds(
    ModelIdentity, model=text, weights_digest=no_nul, tokenizer_digest=no_nul, dtype=no_nul, kv_dtype=no_nul, rope=no_nul, numerics=no_nul,
    quantization=no_nul, adapter=no_nul,
)  # fmt: skip
layouts = st.builds(
    KvLayout, layers=u32, kv_heads=u32, head_dim=u32, block_size=st.integers(1, 2**32 - 1), dtype=text, axis_order=text,
    tp_rank=u32, tp_size=u32,
)  # fmt: skip
leases = st.builds(Lease, lease_id=text, ttl_s=seconds)
segments = st.builds(KvSegment, first_block=u32, block_count=u32, size_bytes=u64, crc32c=st.none() | u32)
addresses = st.text(min_size=1, max_size=12)
locations = st.builds(PeerLocation, addresses) | st.builds(StoreLocation, addresses)
sampling = st.builds(
    values.SamplingParams, temperature=finite, top_k=st.integers(-(2**63), 2**63 - 1), top_p=finite, min_p=finite, seed=u64,
    repetition_penalty=finite, presence_penalty=finite, frequency_penalty=finite, logit_bias=st.dictionaries(u32, finite, max_size=4),
    min_tokens=st.integers(-(2**63), 2**63 - 1), logprobs=st.none() | st.integers(0, 5),
)  # fmt: skip
stops = st.builds(
    values.StopConditions, max_tokens=st.integers(-(2**63), 2**63 - 1), strings=st.lists(text, max_size=3).map(tuple),
    token_ids=st.lists(u32, max_size=3).map(tuple), ignore_eos=st.booleans(),
)  # fmt: skip
messages = st.lists(st.builds(values.ChatMessage, text, text), max_size=3).map(tuple)
finish_reasons = st.sampled_from(values.FinishReason)
tokens = st.builds(
    values.Token, index=u32, token_id=u32, text=text, logprob=st.none() | finite,
    top_logprobs=st.lists(st.builds(values.TokenLogprob, u32, finite), max_size=3).map(tuple),
)  # fmt: skip
usages = st.builds(values.Usage, u32, u32, u32)
timings = st.builds(values.Timings, *([seconds] * 9))
stats = st.builds(values.TransferStats, u64, u32, seconds, seconds, u64, u32, text)
marks = st.builds(values.WorkerMarks, *([u64] * 7))
completions = st.builds(
    values.Completion, finish_reason=finish_reasons, usage=usages, timings=timings, transfer=st.none() | stats,
    path=st.sampled_from(["", "local", "split", "fallback"]), trace_id=text,
)  # fmt: skip


@st.composite
def handles(draw: st.DrawFn) -> KvHandle:
    start = draw(st.integers(0, 2**32 - 2))
    end = draw(st.integers(start + 1, 2**32 - 1))
    layout = draw(layouts)
    return KvHandle(
        name="kvHandles/" + draw(st.binary(min_size=16, max_size=16)).hex(),
        state=draw(st.sampled_from(HandleState)),
        identity=draw(identities),
        layout=layout,
        token_start=start,
        token_end=end,
        block_hashes=tuple(draw(st.lists(hashes, max_size=min(3, end // layout.block_size)))),
        prompt_digest=draw(hashes),
        segments=tuple(draw(st.lists(segments, max_size=3))),
        lease=draw(leases),
        incarnation=draw(u64),
        locations=tuple(draw(st.lists(locations, max_size=2))),
    )
