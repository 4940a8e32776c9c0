"""The script of the process that leads, and of the engine it is compared with: prints JSON lines."""

import json
import sys
import time

import jax.numpy as jnp

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.errors import JaxllmError
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sched.policies import SchedulerPolicy, SwapIfItFits

PROMPTS = ["def add(a, b):", "class Foo:", "import os\n", "for i in range(10):", "x = ", "return", "# The"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(temperature=0.8, seed=3, max_tokens=48),
    SamplingParams(temperature=0.8, max_tokens=48, logprobs=2, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=40, presence_penalty=1.0, prompt_logprobs=1),
    SamplingParams(
        temperature=0.5,
        seed=9,
        max_tokens=30,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{4,20};"),
    ),
    SamplingParams(temperature=0.7, seed=5, max_tokens=48, n=2),
    SamplingParams(temperature=0, max_tokens=48),
]
LONG = [prompt + " of numbers in a list of lists, sorted by name, and so on" * 3 for prompt in PROMPTS]


def say(**found):
    print(json.dumps(found), flush=True)


def step(llm, what):
    """Do one of the steps that a test writes to the standard input."""
    if what == "answer":
        outputs = llm.generate(LONG, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        say(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            lengths=[len(output.prompt_token_ids) for output in outputs],
            read=sum(output.num_disk_cached_tokens for output in outputs),
            preemptions=sum(output.metrics.num_preemptions for output in outputs),
            swaps=sum(output.metrics.num_swaps for output in outputs),
        )
        llm.reset_prefix_cache()
        return
    if what == "update":
        params = load_params(demo_model_path(), llm.executor.model_config, jnp.float32)
        llm.update_weights({name: weight * 1.05 for name, weight in params.items()})
    elif what == "sleep":
        llm.sleep(1)
        llm.wake_up()
    say(done=what)


def main(settings, then):
    if settings.get("scheduler_policy") == "swap_if_it_fits":
        settings["scheduler_policy"] = SchedulerPolicy(action=SwapIfItFits())
    llm = LLM(**settings)
    say(made=True)
    if then == "idle":
        sys.stdin.readline()
        while not llm.executor.is_lost:  # which a server's health looks at
            time.sleep(0.05)
    try:
        while then == "steps" and (line := sys.stdin.readline()):
            step(llm, line.strip())
        if then == "answer":
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            say(
                tokens=[[list(one.token_ids) for one in output.outputs] for output in outputs],
                logprobs=[one.logprob for step in outputs[2].outputs[0].logprobs for one in step.values()],
                preemptions=sum(output.metrics.num_preemptions for output in outputs),
                swaps=sum(output.metrics.num_swaps for output in outputs),
            )
            if llm.engine.scheduler.speculation is not None:
                say(kept=llm.engine.scheduler.speculation.counts.num_kept)
            llm.sleep(2)
            llm.wake_up()
            say(again=list(llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids))
        while then in ("stream", "idle"):
            for _ in llm.stream(PROMPTS, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)):
                say(token=True)
    except JaxllmError as error:
        say(error=f"{type(error).__name__}: {error}", cause=str(error.__cause__))
    llm.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
