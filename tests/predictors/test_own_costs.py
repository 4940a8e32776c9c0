"""A cost model of a user's own, named by an import path: one file and one line."""

import math
import re
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from docs_helpers import DOCS, Page
from engine_helpers import make_llm
from scheduler_helpers import LinearCosts
from variants import golden_checkpoint

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.cli.main import main
from jaxllm.engine.ledgers import read_ledger
from jaxllm.errors import ConfigError, ProfileError, RequestError, UserCodeError
from jaxllm.predictors.base import CheckedCosts
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.own import check_costs, own_costs
from jaxllm.research.simulator.executor import SimulatedExecutor


def test_decisions_are_by_it(tmp_path, monkeypatch):
    text = Page(DOCS / "howto" / "own-predictor.md").python()[0].text
    (tmp_path / "own_costs.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    ledger = tmp_path / "decisions.jsonl"
    llm = make_llm(
        golden_checkpoint("llama_gqa"),
        costs="own_costs:LinkAndWeights",
        num_gpu_blocks_override=30,
        num_host_blocks=30,
        ledger=str(ledger),
        warm_up="background",
    )
    prompts = [{"prompt_token_ids": [5 + place] * 12} for place in range(8)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    llm.close()
    records = read_ledger(ledger).preemptions
    assert records
    for record in records:  # 30 us a block and way, 4 ms a step and 20 us a token, as the page has it
        assert record.swap_seconds == pytest.approx(2 * 3e-5 * record.num_blocks, rel=0.5)
        assert record.recompute_seconds == pytest.approx(4e-3 + 2e-5 * record.num_tokens, rel=0.5)


class Flat:
    """A step takes 10 ms, a block 1 ms."""

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        return 0.01

    def swap_out_seconds(self, num_blocks):
        return 0.001 * num_blocks

    swap_in_seconds = swap_out_seconds


class NoCopies:
    step_seconds = Flat.step_seconds


class FewArguments(Flat):
    def step_seconds(self, batch, context_tokens):
        return 0.01


class Negative(Flat):
    def swap_in_seconds(self, num_blocks):
        return -1.0


class Raises(Flat):
    def swap_out_seconds(self, num_blocks):
        return {}[num_blocks]


def answering(seconds):
    class Answers(Flat):
        def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
            return seconds if prompt_tokens else 0.01

    return Answers()


WRONG = [
    (NoCopies(), "has no swap_out_seconds, swap_in_seconds: a predictor has step_seconds"),
    (FewArguments(), "cannot be asked (0, 0, 512, 1, 0): too many positional arguments; it must take (batch"),
    (Negative(), "swap_in_seconds(1) is -1.0: it must be seconds"),
    (Raises(), "swap_out_seconds(1) raised KeyError: 1"),
    (answering(math.nan), "step_seconds(0, 0, 512, 1, 0) is nan: it must be seconds"),
    (answering(math.inf), "is inf: it must be seconds"),
    (answering("soon"), "is 'soon': it must be seconds"),
    (answering(None), "is None: it must be seconds"),
    (answering(True), "is True: it must be seconds"),
    (Flat, "is the class Flat, and must be an object: give Flat()"),
    (3, "is 3, which has no step_seconds, swap_out_seconds, swap_in_seconds"),
]


@pytest.mark.parametrize(("costs", "message"), WRONG)
def test_what_is_no_predictor_is_refused_when_it_is_given(costs, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(costs=costs)
    with pytest.raises(ConfigError, match=re.escape(message)):
        SimulatedExecutor(costs, num_gpu_blocks=1, block_size=1, overlap_swaps=True)


@pytest.fixture
def module(tmp_path, monkeypatch):
    text = """
class Wrong:
    def step_seconds(self, batch):
        return 0.01

class Fast:
    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        return 0.01 * batch

    def swap_out_seconds(self, num_blocks):
        return 0.001

    swap_in_seconds = swap_out_seconds

class Takes(Fast):
    def __init__(self, speed):
        pass

fast, number = Fast(), 3

def made():
    return Fast()
"""
    name = f"costs_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("attribute", ["fast", "Fast", "made"])
def test_a_path_names_an_object_a_class_or_a_function(module, attribute):
    found = own_costs(f"{module}:{attribute}")
    assert found.source == f"{module}:{attribute}"
    assert found.model.step_seconds(3, 100) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("fasd", "did you mean fast?"),
        ("Wrong", "has no swap_out_seconds, swap_in_seconds"),
        ("Takes", "or be made without arguments: TypeError"),
        ("number", "is 3, which has no step_seconds"),
    ],
)
def test_a_path_that_names_no_predictor_is_refused(module, attribute, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        own_costs(f"{module}:{attribute}")
    assert (
        main(
            [
                "generate",
                "x",
                "--model",
                str(golden_checkpoint("llama_gqa")),
                "--costs",
                f"{module}:{attribute}",
            ]
        )
        == 2
    )


def test_no_work_takes_no_time_whatever_it_says():
    checked = CheckedCosts(Flat())
    assert (checked.step_seconds(0, 0), checked.swap_out_seconds(0), checked.swap_in_seconds(-1)) == (0, 0, 0)
    assert checked.step_seconds(0, 0, 1, 1, 0) == 0.01
    assert type(CheckedCosts(answering(np.float32(0.5))).step_seconds(0, 0, 1, 1, 0)) is float


POOLS = {"num_gpu_blocks_override": 30, "num_host_blocks": 30, "warm_up": "background"}


@pytest.mark.parametrize("policy", [None, "paper"])
def test_an_engine_decides_by_it_and_corrects_it(policy):
    llm = make_llm(golden_checkpoint("llama_gqa"), scheduler_policy=policy, costs=Flat(), **POOLS)
    assert llm.costs_source == f"{Flat.__module__}:Flat"
    assert llm.engine.scheduler.policy.action.costs is llm.costs
    assert llm.costs.step_seconds(4, 100) == 0.01
    llm.costs.observe("decode", 0.01, 0.02)
    assert llm.costs.step_seconds(4, 100) > 0.01
    llm.close()


def test_a_calibration_of_ones_own_is_taken_as_it_is():
    own = OnlineCalibration(Flat(), rate=0.5)
    llm = make_llm(golden_checkpoint("llama_gqa"), costs=own, **POOLS)
    assert llm.costs is own
    assert type(own.model) is Flat
    llm.close()


def test_what_a_calibration_corrects_is_named_where_it_raises():
    class Breaks(Flat):
        def swap_out_seconds(self, num_blocks):
            return {1: 1.0}[num_blocks]

        def swap_in_seconds(self, num_blocks):
            return -1

    own = OnlineCalibration(Breaks())
    assert own.swap_out_seconds(1) == 1.0
    with pytest.raises(UserCodeError, match=r"Breaks.swap_out_seconds\(2\) raised KeyError: 2 .*; mend it"):
        own.swap_out_seconds(2)
    with pytest.raises(ConfigError, match=r"test_own_costs:.*Breaks.* is -1: it must be seconds.*; mend it"):
        own.swap_in_seconds(2)


class Own(OnlineCalibration):
    """Breaks in the methods that it is told to."""

    broken, error = (), KeyError

    def step_seconds(self, *work):
        return self._answer("step_seconds", work)

    def swap_out_seconds(self, *work):
        return self._answer("swap_out_seconds", work)

    def observe_bounds(self, *work):
        return self._answer("observe_bounds", work)

    def report(self):
        return self._answer("report", ())

    def _answer(self, name, work):
        if name in self.broken:
            raise self.error(name)
        return getattr(super(), name)(*work)


def run(llm):
    prompts = [{"prompt_token_ids": [5 + place] * 12} for place in range(8)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("broken", "policy", "error"),
    [
        ("step_seconds", "vllm_v1", KeyError),
        ("observe_bounds", "vllm_v1", KeyError),
        ("observe_bounds", "vllm_v1", ProfileError),  # such as what a stored profile is refused with
        ("swap_out_seconds", "vllm_v1", KeyError),  # asked by the ledger alone
        ("swap_out_seconds", "paper", RequestError),
    ],
)
def test_a_calibration_that_raises_is_named_and_the_engine_goes_on(broken, policy, error, tmp_path):
    own = Own(Flat())
    own.error = error
    sizes = {"num_gpu_blocks_override": 30, "num_host_blocks": 30, "ledger": str(tmp_path / "one.jsonl")}
    llm = make_llm(golden_checkpoint("llama_gqa"), costs=own, scheduler_policy=policy, **sizes)
    assert llm.costs is own
    expected = run(llm)
    own.broken = (broken,)
    with pytest.raises(
        UserCodeError, match=rf"test_own_costs:Own.{broken}\(.*\) raised {error.__name__}"
    ) as raised:
        run(llm)
    assert isinstance(raised.value.__cause__, error)
    own.broken = ()
    assert run(llm) == expected
    own.broken = ("report",)
    llm.close()
    assert read_ledger(tmp_path / "one.jsonl").predictions == {}


def test_what_is_corrected_may_be_exchanged():
    class Fast(Flat):
        def step_seconds(self, *work):
            return 0.001

    own = OnlineCalibration(Flat())
    own.model = Fast()
    assert own.step_seconds(1, 1) == 0.001


def test_padding_counts_in_what_an_engine_predicts():
    class Rows(Flat):
        def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
            return float(batch)

    llm = make_llm(golden_checkpoint("llama_gqa"), costs=Rows(), decode_buckets=[4], **POOLS)
    assert llm.costs.step_seconds(3, 100) == llm.costs.model.step_seconds(3, 100) == 4.0
    llm.close()


NUMBERS = [
    Decimal("0.5"),
    Fraction(1, 2),
    np.float32(0.5),
    np.array(0.5),
    jnp.float32(0.5),
    jnp.bfloat16(0.5),
    np.int64(1),
    jnp.int32(1),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda one: type(one).__name__)
def test_seconds_may_be_any_kind_of_number(number):
    found = CheckedCosts(check_costs(answering(number))).step_seconds(0, 0, 1, 1, 0)
    assert type(found) is float
    assert found == float(number)


@pytest.mark.parametrize("wrong", [np.bool_(True), jnp.array(True), np.ones(1), Decimal("nan"), 10**400, 1j])
def test_what_is_no_one_number_of_seconds_is_refused(wrong):
    with pytest.raises(ConfigError, match="it must be seconds, a finite number of at least 0"):
        check_costs(answering(wrong))


def test_costs_that_are_given_are_not_measured():
    with pytest.raises(ConfigError, match="profile_seconds=1 would measure it: leave one of them out"):
        EngineConfig(costs=Flat(), profile_seconds=1.0)


def test_costs_that_raise_in_mid_run_are_named_and_the_engine_goes_on():
    class Breaks(LinearCosts):
        is_broken = False

        def swap_out_seconds(self, num_blocks):
            if self.is_broken:
                raise LookupError("no such size")
            return super().swap_out_seconds(num_blocks)

    costs = Breaks()
    sizes = {"num_gpu_blocks_override": 30, "num_host_blocks": 30}
    llm = make_llm(golden_checkpoint("llama_gqa"), costs=costs, scheduler_policy="paper", **sizes)
    prompts = [{"prompt_token_ids": [5 + place] * 12} for place in range(8)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = llm.generate(prompts, params, use_tqdm=False)
    costs.is_broken = True
    said = r"Breaks.swap_out_seconds\(\d+\) raised LookupError: no such size .*, line \d+\)"
    asked = ", asked by AdaptiveAction.choose, about request .*; mend it to answer any work with seconds"
    with pytest.raises(UserCodeError, match=said + asked) as raised:
        llm.generate(prompts, params, use_tqdm=False)
    assert isinstance(raised.value.__cause__, LookupError)
    costs.is_broken = False
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
    llm.close()


@pytest.mark.parametrize("preset", ["adaptive", "pensieve", "continuum", "paper"])
def test_costs_may_begin_to_raise_at_any_time(preset):
    """Whoever asks, in planning or while blocks are copied, kept or let go of: calls end, and no engine."""

    class Breaks(LinearCosts):
        left = math.inf

        def _count(self):
            self.left -= 1
            if self.left < 0:
                raise LookupError("out of order")

        def step_seconds(self, *work):
            self._count()
            return super().step_seconds(*work)

        def swap_out_seconds(self, num_blocks):
            self._count()
            return super().swap_out_seconds(num_blocks)

        def swap_in_seconds(self, num_blocks):
            self._count()
            return super().swap_in_seconds(num_blocks)

    costs = Breaks()
    sizes = {"num_gpu_blocks_override": 30, "num_host_blocks": 12, "enable_prefix_caching": True}
    with make_llm(golden_checkpoint("llama_gqa"), costs=costs, scheduler_policy=preset, **sizes) as llm:
        prompts = [{"prompt_token_ids": [5 + place % 5] * 12 + [place]} for place in range(8)]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        expected = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        costs.left = 10**6
        llm.generate(prompts, params, use_tqdm=False)
        num_calls = 10**6 - costs.left
        assert num_calls > 10
        raised = []
        for left in sorted({0, 1, 2, *np.linspace(3, num_calls, 24, dtype=int).tolist()}):
            costs.left = left
            try:
                llm.generate(prompts, params, use_tqdm=False)
            except UserCodeError as error:
                raised.append(str(error))
        assert len(raised) > 10
        assert all("raised LookupError: out of order" in message for message in raised)
        costs.left = math.inf
        assert [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)] == expected
