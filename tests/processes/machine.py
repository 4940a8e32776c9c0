"""The script of a process that leads: hypothesis decides what its engine of two processes schedules."""

import json
import pathlib
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "engine")]

from engine_helpers import Knowing  # noqa: E402
from test_forced_preemption import (  # noqa: E402
    PARAMS,
    SCHEDULES,
    aborts_of,
    answers_alone,
    answers_of,
    assert_no_copy_is_left,
    assert_same,
    engine_of,
    run,
    scripted,
)

from jaxllm import LLM  # noqa: E402


def main(sizes, num_examples):
    llm, counts = LLM(**sizes), []
    alone = answers_alone(llm, PARAMS)

    @settings(max_examples=num_examples, deadline=None, database=None)
    @given(
        **SCHEDULES,
        aborts=aborts_of(PARAMS),
        drafts=st.none() | st.lists(st.integers(0, 4095), min_size=2, max_size=20),
    )
    def no_token_depends_on_the_schedule(script, mixes, num_host_blocks, async_scheduling, aborts, drafts):
        proposer = None if drafts is None else Knowing(answers_of(alone), drafts)
        asked = {"num_host_blocks": num_host_blocks, "async_scheduling": async_scheduling}
        engine = engine_of(llm, scripted([*script, 7], mixes), proposer=proposer, **asked)
        outputs = run(engine, aborts)
        for place, expected in enumerate(alone):
            assert_same(outputs[place], expected)
        assert_no_copy_is_left(engine, llm)
        counts.append(sum(output.metrics.num_preemptions for output in outputs.values()))

    no_token_depends_on_the_schedule()
    llm.close()
    print(json.dumps({"examples": len(counts), "preemptions": sum(counts)}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
