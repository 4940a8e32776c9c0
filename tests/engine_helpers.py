"""Engines over one executor, with and without preemption."""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.executor.programs import PackedStep
from jaxllm.llm import LLM
from jaxllm.models.llama import LlamaConfig
from jaxllm.sched.cache.preview import PoolPreview
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.planner import PolicyPlanner
from jaxllm.sched.policies import PreemptionAction, SchedulerPolicy
from jaxllm.sched.scheduler import Scheduler

needs_late_threads = pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info[:3] < (3, 12, 3),
    reason="Python starts no thread once the main one has ended: python/cpython#113964",
)
SMALL = {
    "skip_tokenizer_init": True,
    "max_model_len": 112,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "decode_buckets": [4],
    "prefill_buckets": [48],
    "block_size": 4,
    "num_gpu_blocks_override": 128,
    "num_scheduler_steps": 1,
    "warm_up": "all",
    "enable_prefix_caching": False,  # several engines use one pool
}


def make_llm(path, **settings):
    return LLM(path, **{**SMALL, **settings})


class Recording(Scheduler):
    """Keeps what it schedules."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scheduled = []

    def schedule(self, *args):
        self.scheduled.append(super().schedule(*args))
        return self.scheduled[-1]

    @property
    def lookups(self):
        return [one for one in self.scheduled if one.num_lookups]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(SchedulerPolicy):
    """Preempts more holders than it must: of three numbers of the script one, divided by 3, is whom."""

    script: Iterator[int]

    def planner(self, state):
        return _ScriptedPlanner(state, self)


class _ScriptedPlanner(PolicyPlanner):
    def plan(self, now):
        plan, state = super().plan(now), self._state
        draw = next(self._policy.script)
        if plan is None or draw % 3:
            return plan
        gone = [victim for victim, _ in plan.victims]
        holders = [one for one in (*state.running, *state.prompts) if one not in gone]
        computing = (*(state.running if plan.decodes else ()), *(chunk[0] for chunk in plan.chunks))
        if len(holders) > 1:
            victim = holders[draw // 3 % len(holders)]
            if any(one not in (victim, *gone) for one in computing):
                plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not victim]
                preview = PoolPreview(state.pool)
                for other, decision in plan.victims:
                    if decision.action is PreemptionAction.SWAP:
                        on_host = state.lookups.held_on_host(other)
                        preview.kept.update(on_host)
                        num_blocks = state.pool.blocks_for(other.num_computed_tokens)
                        preview.num_stored += num_blocks - len(on_host)
                self._give_up(plan, victim, 0.0, state.pools(state.pool.num_free), preview, now)
        return plan


class Knowing:
    """Proposes right tokens, and wrong or any others after them, as a script of numbers says.

    `answers` are the right outputs, by request id. It computes its drafts if `seconds` are given, and is
    prepared to do so by itself now and then.
    """

    def __init__(self, answers, script, vocab_size=4096, seconds=None):
        self.answers, self.script, self.vocab_size = answers, itertools.cycle(script), vocab_size
        self.takes, self.prepared = seconds, set()

    def propose(self, asked):
        return [self._draw(request, num_tokens) for request, num_tokens in asked]

    def seconds(self, num_requests, num_tokens):
        return self.takes

    def prepare(self, asked):
        self.prepared = {request for request, _ in asked} if next(self.script) % 3 else set()
        return bool(self.prepared)

    def kept(self, request):
        self.prepared.discard(request)

    def forget_prefixes(self):
        pass

    def _draw(self, request, num_tokens):
        done = len(request.output_token_ids)
        right = self.answers.get(request.request_id, [])[done : done + num_tokens]
        num_right, draw = next(self.script) % (num_tokens + 1), next(self.script)
        others = [(draw * 7 + place) % self.vocab_size for place in range(num_tokens - num_right)]
        wrong = [(token + 1 + draw) % self.vocab_size for token in right[num_right:]]
        return [*right[:num_right], *(wrong if draw % 2 else others)][: draw % 11 if draw % 3 else num_tokens]

    def forget(self, request):
        pass


class Noting:
    """Passes on to what drafts, and notes what it drafted after which tokens."""

    def __init__(self, part):
        self.part, self.noted = part, []
        self.seconds, self.forget = part.seconds, part.forget

    def propose(self, asked):
        drafts = self.part.propose(asked)
        for (request, count), tokens in zip(asked, drafts, strict=True):
            self.noted.append((request.token_ids(0, request.num_known_tokens), count, tokens))
        return drafts


@contextlib.contextmanager
def noting_chains(executor):
    """Notes drafts of iterations that follow one another: whose, after how many tokens, and these."""
    noted, sent, execute, run = [], [], executor.execute, executor.run

    def executing(scheduled):
        sent.append(scheduled)
        return execute(scheduled)

    def running(key, packed, keeps_logits):
        if key.takes_drafts:
            inputs = PackedStep(key, executor.config.max_num_seqs, executor.block_size)
            inputs.array[:] = packed
            for row, request in enumerate(sent[-1].decode):
                length = int(inputs.decode_lengths[row])
                count = min(inputs.num_drafts[0], inputs.limits[row] - length - 1)
                if length and count > 0:
                    noted.append((request, length, inputs.drafts[:count, row].tolist()))
        return run(key, packed, keeps_logits)

    executor.execute, executor.run = executing, running
    try:
        yield noted
    finally:
        del executor.execute, executor.run


def restless(**parts):
    """Preempts the latest request every third iteration."""
    return Scripted(script=itertools.cycle([1, 1, -3]), **parts)


def make_engine(
    llm,
    *,
    num_gpu_blocks=None,
    num_host_blocks=0,
    policy=None,
    scheduler_class=Scheduler,
    async_scheduling=True,
    num_scheduler_steps=1,
    max_num_seqs=None,
    enable_prefix_caching=False,
):
    """A fresh engine on `llm`'s executor; fewer blocks than the pool has force preemptions."""
    config = llm.engine.scheduler.config
    max_num_seqs = max_num_seqs or config.max_num_seqs
    scheduler = scheduler_class(
        SchedulerConfig(
            num_gpu_blocks=num_gpu_blocks or config.num_gpu_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_seqs=min(config.max_prefill_seqs or max_num_seqs, max_num_seqs),
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
        ),
        policy or SchedulerPolicy(),
    )
    return Engine(
        llm.executor,
        scheduler,
        vocab_size=llm.model_config.vocab_size,
        tokenizer=llm.tokenizer,
        async_scheduling=async_scheduling,
        num_scheduler_steps=num_scheduler_steps,
        has_rotary_positions=isinstance(llm.model_config, LlamaConfig),
    )


def run(engine, prompts, params):
    """Outputs in the order of the prompts; the scheduler's invariants are checked after every step."""
    if not isinstance(params, list):
        params = [params] * len(prompts)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, param)
    outputs = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.finished
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        engine.scheduler.check()
    assert engine.scheduler.num_free_blocks == engine.scheduler.config.num_gpu_blocks
    return [outputs[str(i)] for i in range(len(prompts))]
