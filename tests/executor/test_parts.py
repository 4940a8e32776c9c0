"""Iterations in parts that go through stages one behind the other."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.executor import parts as parts_module
from jaxllm.executor.parts import Parts, StepInParts, most_rows
from jaxllm.predictors.pipeline import STAGED_ROWS, least_context, num_prompt_parts
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.silicon import HOP_SECONDS, SiliconCostModel
from jaxllm.sampling.params import SamplingParams
from jaxllm.types import PrefillChunk, Request, SampledTokens, SchedulerOutput, TokenLogprobs

LLAMA_70B = model_shape("llama-3-70b", "bfloat16")
MODEL = types.SimpleNamespace(vocab_size=8, hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=1)
MAX_NUM_SEQS = 64
ENOUGH = 10**6
MOST = 64
"""Drafts of a request."""


def holder(slot):
    request = Request(
        f"r{slot}", [1], SamplingParams(), arrival_time=0.0, arrival_index=slot, max_total_tokens=99
    )
    request.slot = slot
    return request


def iteration(slots, chunks=(), context=ENOUGH):
    """Decodes in some slots, and chunks of so many tokens and drafts in others."""
    prefill = tuple(
        PrefillChunk(holder(slot), 5 * place, length, is_last=place % 2 == 0, drafts=(7,) * num_drafts)
        for place, (slot, length, num_drafts) in enumerate(chunks)
    )
    decode = tuple(holder(slot) for slot in slots)
    return SchedulerOutput(1, decode=decode, prefill=prefill, num_context_tokens=context)


@given(st.integers(1, 8), st.integers(0, 2**14))
def test_parts_of_prompts_are_large(stages, rows):
    count = num_prompt_parts(rows, stages)
    assert count == 1 or rows // count >= STAGED_ROWS
    assert 1 <= count <= (2 * stages if stages > 1 else 1)


@given(
    st.data(),
    st.integers(2, 5),
    st.integers(0, 24),
    st.lists(st.tuples(st.integers(1, 9000), st.booleans()), max_size=24),
)
def test_each_row_is_in_one_part(data, stages, num_decodes, lengths):
    """Decodes once, each chunk's tokens in order, what is sampled last, and no part with too many rows."""
    chunks = [
        (30 + place, min(length, MOST + 1) if drafts else length, min(length - 1, MOST) if drafts else 0)
        for place, (length, drafts) in enumerate(lengths)
    ]
    scheduled = iteration(range(num_decodes), chunks, data.draw(st.sampled_from([0, ENOUGH])))
    found = Parts(MODEL, stages, MAX_NUM_SEQS).split(scheduled)
    places = [place for _, own in found for place in own]
    assert sorted(places) == list(range(num_decodes))
    for part, own in found:
        assert part.decode == tuple(scheduled.decode[place] for place in own)
        assert part.num_drafts == sum(len(chunk.drafts) for chunk in part.prefill)
        assert part.decode or part.prefill
        rows = len(part.decode) + part.num_prefill_tokens
        total = num_decodes + scheduled.num_prefill_tokens
        assert rows <= most_rows(total, stages, num_decodes, MOST)
    pieces = [piece for part, _ in found for piece in part.prefill]
    assert [piece.request for piece in pieces if piece.is_last] == [
        chunk.request for chunk in scheduled.prefill if chunk.is_last
    ]
    for chunk in scheduled.prefill:
        own = [piece for piece in pieces if piece.request is chunk.request]
        assert own[0].start == chunk.start
        assert [piece.start + piece.length for piece in own[:-1]] == [piece.start for piece in own[1:]]
        assert own[-1].start + own[-1].length == chunk.start + chunk.length
        assert [piece.is_first for piece in own] == [True] + [False] * (len(own) - 1)
        assert [piece.is_last for piece in own] == [False] * (len(own) - 1) + [chunk.is_last]
        assert own[-1].drafts == chunk.drafts
        assert not chunk.drafts or len(own) == 1


@given(st.data(), st.integers(2, 4))
def test_who_stays_is_decoded_in_the_same_part(data, stages):
    """Others come and go; parts stay about as large, and only where they do not is somebody moved."""
    parts, running, before = Parts(MODEL, stages, MAX_NUM_SEQS), set(range(2 * stages)), {}
    for _ in range(6):
        found = parts.split(iteration(sorted(running)))
        assert len(found) == stages
        sizes = [len(own) for _, own in found]
        assert max(sizes) - min(sizes) <= max(1, len(running) // (4 * stages))
        groups = {request.slot: number for number, (part, _) in enumerate(found) for request in part.decode}
        left = [
            [slot for slot in running & before.keys() if before[slot] == group] for group in range(stages)
        ]
        if max(map(len, left)) - min(map(len, left)) <= 1:
            assert all(groups[slot] == before[slot] for slot in running & before.keys())
        before = groups
        running -= set(data.draw(st.lists(st.sampled_from(sorted(running)), max_size=2)))
        running |= set(data.draw(st.lists(st.integers(0, MAX_NUM_SEQS - 1), max_size=2)))
        running |= set(range(stages if len(running) < stages else 0))


def test_a_short_prompt_goes_with_the_fewest_decodes_and_is_decoded_there():
    parts = Parts(MODEL, 2, MAX_NUM_SEQS)
    (_, first), (_, second) = parts.split(iteration([0, 1, 2]))
    assert [len(first), len(second)] == [2, 1]
    found = parts.split(iteration([0, 1, 2], [(9, 20, 0)]))
    assert [[chunk.request.slot for chunk in part.prefill] for part, _ in found] == [[], [9]]
    found = parts.split(iteration([0, 1, 2, 9]))
    assert [request.slot for request in found[1][0].decode][-1] == 9


def test_decodes_are_parted_where_context_has_more_bytes_than_the_head():
    assert least_context(MODEL) == 32
    few, many = (Parts(MODEL, 2, MAX_NUM_SEQS).split(iteration(range(4), (), n)) for n in (63, 64))
    assert [len(few), len(many)] == [1, 2]
    assert len(Parts(MODEL, 2, MAX_NUM_SEQS).split(iteration([3]))) == 1


def test_tokens_come_in_the_order_of_the_iteration():
    """Also scores, where somebody asked for them, and those of a prompt that was cut."""

    def part(tokens, logprobs=None, prompts=None):
        pending = types.SimpleNamespace(
            fetch=lambda: SampledTokens(tokens, logprobs, prompts), is_ready=lambda: True
        )
        sent = parts_module.SentPart(lambda: setattr(sent, "pending", pending))
        return sent

    def score(token):
        return TokenLogprobs(token, -1.0, 1, (), ())

    parts = [
        (part([20, 22, 30], None, {"a": [score(1)], "b": [score(5)]}), [0, 2]),
        (part([21, 31, 32], [None, score(31), None], {"a": [score(2), score(3)]}), [1]),
    ]
    step = StepInParts(parts, 3)
    assert not step.is_ready()
    found = step.fetch()
    assert found.token_ids == [20, 21, 22, 30, 31, 32]
    assert found.logprobs == [None, None, None, None, score(31), None]
    assert found.prompt_logprobs == {"a": [score(1), score(2), score(3)], "b": [score(5)]}
    assert step.is_ready()


@pytest.mark.parametrize(
    ("stages", "prompt", "count"), [(2, 511, 1), (2, 512, 2), (2, 2048, 4), (4, 2048, 8), (8, 8192, 16)]
)
def test_costs_of_prompts_are_those_of_parts(stages, prompt, count):
    """A part's time, as often as the last one comes out of the stages."""
    options = {"pipeline_parallel": stages}
    plain = SiliconCostModel(LLAMA_70B, "h100-sxm", **options)
    parted = SiliconCostModel(LLAMA_70B, "h100-sxm", **options, in_parts=True)
    part = plain.step_seconds(0, 0, prompt // count, 1)
    beside = plain.host_seconds + (stages - 1) * HOP_SECONDS
    ideal = beside + (part - beside) * (stages + count - 1) / stages
    assert 0.9 * ideal < parted.step_seconds(0, 0, prompt, 1) < 1.15 * ideal


@pytest.mark.parametrize("stages", [2, 4])
def test_costs_of_decodes_are_those_of_parts(stages):
    """All stages compute at the same time, but read the head once for each part."""
    options = {"pipeline_parallel": stages}
    plain = SiliconCostModel(LLAMA_70B, "h100-sxm", **options)
    parted = SiliconCostModel(LLAMA_70B, "h100-sxm", **options, in_parts=True)
    few = 64, stages * least_context(LLAMA_70B) - 1
    assert parted.step_seconds(*few) == plain.step_seconds(*few)
    many = 64, 400_000
    found = {part.name: part.seconds for part in parted.parts(*many)}
    whole = {part.name: part.seconds for part in plain.parts(*many)}
    assert found["decode attention"] == pytest.approx(whole["decode attention"] / stages)
    assert found["head"] == pytest.approx(stages * whole["head"], rel=0.1)
    assert parted.step_seconds(*many) < 0.9 * plain.step_seconds(*many)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_parts_of_a_cost_are_all_of_it(stages):
    model = SiliconCostModel(LLAMA_70B, "h100-sxm", pipeline_parallel=stages, in_parts=True)
    for work in ((0, 0, 3000, 2), (64, 400_000), (64, 400_000, 3000, 2), (3, 400_000, 300, 1)):
        total = model.step_seconds(*work)
        assert sum(part.seconds for part in model.parts(*work)) == pytest.approx(total, rel=1e-2)
    assert model.step_seconds(*map(np.int64, (64, 64_000, 2048, 1))) > 0
