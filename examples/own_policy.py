"""A scheduling policy of your own: who asks for the fewest tokens is served first.

python examples/own_policy.py
"""

from jaxllm import LLM, SamplingParams
from jaxllm.types import Request


class ShortestOutputFirst:
    """Answers the question "who is urgent?"; a class alone changes that answer of `adaptive`."""

    def score(self, request: Request, now: float) -> float:
        """Higher is more urgent."""
        return -self.group(request)

    def group(self, request: Request) -> int:
        """Requests of one group have equal scores; of these the earlier goes first."""
        return request.max_total_tokens - request.num_prompt_tokens


def main() -> None:
    """Eight requests for four places, the longest ones first, under the policy and without."""
    lengths = [32, 32, 32, 32, 8, 8, 8, 8]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    prompts = [f"def function_{number}(" for number in range(len(lengths))]
    for name, policy in (("first come", "adaptive_throughput"), ("shortest", ShortestOutputFirst)):
        with LLM(max_model_len=256, max_num_seqs=4, scheduler_policy=policy) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        ends = [output.metrics.finished_time for output in outputs if output.metrics is not None]
        order = sorted(range(len(ends)), key=ends.__getitem__)
        print(f"{name:10} ended in the order {[lengths[place] for place in order]}")


if __name__ == "__main__":
    main()
