"""Engines over one executor, with and without preemption."""

from jaxllm.engine.engine import Engine
from jaxllm.llm import LLM
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import NO_COPIES

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
}


def make_llm(path, **settings):
    return LLM(path, **{**SMALL, **settings})


class RestlessScheduler(Scheduler):
    """Preempts the latest running request every third iteration, on top of its policy."""

    def schedule(self, now, copies=NO_COPIES, max_decode_steps=1):
        running = self._state.running
        if self._step_id % 3 == 2 and len(running) > 1:
            self._preemption.preempt(running.requests[-1], self._step_id, now)
        return super().schedule(now, copies, max_decode_steps)


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
