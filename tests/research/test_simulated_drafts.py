"""Speculative decoding in the simulator: against Leviathan's formula, and against fixed numbers of drafts."""

import numpy as np
import pytest
from scheduler_helpers import LinearCosts

from jaxllm.errors import ConfigError
from jaxllm.research.simulator.drafting import SimulatedDrafts
from jaxllm.research.simulator.run import simulate as play
from jaxllm.research.simulator.study import simulate
from jaxllm.research.workloads import ClosedLoop, UniformLengths, make_trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger


class Flat(LinearCosts):
    """Steps of which each takes as long, whatever is in it."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def step_seconds(self, *work):
        return self.seconds


def trace_of(batch, count, prompt=16, output=240):
    lengths = [UniformLengths(shortest=one, longest=one) for one in (prompt, output)]
    return make_trace(lengths[0], count, output, outputs=lengths[1], arrivals=ClosedLoop(batch), seed=0)


def run(trace, batch, costs=None, draft_costs=None, num_gpu_blocks=4096, ledger=None, **drafts):
    config = SchedulerConfig(
        num_gpu_blocks=num_gpu_blocks,
        block_size=16,
        max_model_len=1024,
        max_num_seqs=batch,
        max_num_batched_tokens=1024,
    )
    return play(
        trace,
        config,
        "vllm_v1",
        costs or Flat(0.01),
        overlap_swaps=True,
        drafts=SimulatedDrafts(**drafts) if drafts else None,
        draft_costs=draft_costs,
        ledger=ledger,
    )


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_gain_is_leviathans_where_more_rows_cost_nothing(acceptance, share):
    """Equation 1 and theorem 3.8, "Fast Inference from Transformers via Speculative Decoding" (2023)."""
    trace, count = trace_of(1, 6, output=1000), 4
    plain = run(trace, 1)
    costs = Flat(0.01 * share) if share else None
    drafts = {"acceptance": acceptance, "num_speculative_tokens": count, "policy": "fixed"}
    drafted = run(trace, 1, draft_costs=costs, **drafts)
    expected = (1 - acceptance ** (count + 1)) / (1 - acceptance) / (count * share + 1)
    gain = drafted.output_tokens_per_second / plain.output_tokens_per_second
    assert gain == pytest.approx(expected, rel=0.04)


def test_the_ledger_and_the_counts_of_steps(tmp_path):
    trace, path = trace_of(4, 8), tmp_path / "ledger.jsonl"
    with path.open("w") as file:
        ledger = Ledger(file)
        found = run(trace, 4, ledger=ledger, acceptance=0.7)
        ledger.close()
    from jaxllm.engine.ledgers import read_ledger

    columns = read_ledger(path).columns("verifications")
    assert columns["num_kept"].sum() > 0
    share = columns["num_kept"].sum() / columns["num_drafted"].sum()
    assert 0.35 < share < 0.75, "of four with 0.7 each"
    assert np.nanmean(columns["measured_gain"]) > 1
    assert found.num_draft_tokens == columns["num_drafted"].sum()
    assert found.num_kept_drafts == columns["num_kept"].sum()
    assert found.draft_gain == pytest.approx(np.nanmean(columns["measured_gain"]), rel=0.2)
    assert found.num_prefill_tokens == int(trace.prompt_lens.sum())
    assert found.mean_decode_batch <= 4


class Counting(Flat):
    """Notes the work of steps that compute prompts."""

    def __init__(self, seconds):
        super().__init__(seconds)
        self.noted = []

    def step_seconds(self, *work):
        self.noted += [work[2:]] if len(work) > 2 else []
        return self.seconds


def test_a_draft_model_computes_what_it_lacks_of_those_who_draft():
    def tokens(batch, count, **settings):
        costs = Counting(0.001)
        found = run(
            trace_of(batch, count, prompt=100),
            batch,
            draft_costs=costs,
            acceptance=1.0,
            policy="fixed",
            **settings,
        )
        return sum(tokens for tokens, *_ in costs.noted), found.num_preemptions

    without, _ = tokens(2, 4, num_speculative_tokens=0)  # what the simulator itself asks for
    assert tokens(2, 4)[0] - without == 400, "prompts, once each"
    found, num_preemptions = tokens(8, 24, num_gpu_blocks=64)
    assert num_preemptions > 0
    assert found - without >= 2400 + 100 * num_preemptions


def test_preempted_requests_end_as_others_do():
    """In a pool that holds half of them at their longest."""
    trace = trace_of(8, 24)
    found = run(trace, 8, num_gpu_blocks=64, acceptance=0.9, policy="fixed", num_speculative_tokens=8)
    assert found.num_preemptions > 0
    assert np.all(found.finish_times > found.first_token_times)


@pytest.mark.parametrize("batch", [1, 16, 128])
@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.9])
def test_by_cost_is_as_good_as_the_best_fixed_number_on_a_gpu(batch, acceptance):
    """What it has to learn in a few hundred steps included."""
    speeds = {}
    for name, count in (("fixed", 0), ("fixed", 3), ("fixed", 5), ("fixed", 8), ("cost", 8)):
        drafts = {"acceptance": acceptance, "num_speculative_tokens": count, "policy": name}
        found = simulate(
            trace_of(batch, max(10, 3 * batch, min(10 * batch, 160)), 64, 192),
            device="h100",
            policy="vllm_v1",
            max_num_seqs=batch,
            speculative_config={**drafts, "model": "llama-3.2-1b"},
        )
        speeds[name, count] = found.figure("vllm_v1", "tokens_per_second").mean
    assert speeds.pop(("cost", 8)) > 0.95 * max(speeds.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 4}, "needs 'acceptance'"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"acceptance": 0.5, "num_speculative_token": 4}, "did you mean num_speculative_tokens"),
        ({"acceptance": 0.5, "policy": "best"}, "policy"),
        ([0.5], "must be a dictionary"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        SimulatedDrafts.of(given)


def test_a_step_that_holds_decodes_alone_is_refused():
    """As the engine refuses it."""
    with pytest.raises(ConfigError, match="max_num_batched_tokens 8 leaves no row"):
        simulate(
            trace_of(2, 2),
            device="h100",
            policy="vllm_v1",
            max_num_seqs=8,
            max_num_batched_tokens=8,
            speculative_config={"acceptance": 0.5, "num_speculative_tokens": 2},
        )
