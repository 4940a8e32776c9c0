"""Several samples of a prompt, the best of many, log-probabilities, stop strings and beams.

python examples/sampling.py
"""

from jaxllm import LLM, BeamSearchParams, SamplingParams

PROMPT = "def read_lines(path):\n    "


def main() -> None:
    """Samples share the KV of their prompt; a seed makes them the same in every run."""
    with LLM(max_model_len=256, max_num_seqs=4) as llm:
        (output,) = llm.generate(
            PROMPT, SamplingParams(n=3, temperature=0.6, top_p=0.9, seed=1, max_tokens=12), use_tqdm=False
        )
        for sample in output.outputs:
            print(f"sample {sample.index}: {sample.text!r}")

        (output,) = llm.generate(
            PROMPT, SamplingParams(n=1, best_of=4, temperature=0.6, seed=1, max_tokens=12), use_tqdm=False
        )
        print(f"best of 4: {output.text!r}, log-probability {output.cumulative_logprob:.2f}")

        (output,) = llm.generate(
            PROMPT, SamplingParams(temperature=0, logprobs=3, max_tokens=24, stop=["."]), use_tqdm=False
        )
        print(f"greedy up to {output.stop_reason!r}: {output.text!r}; the likeliest first tokens:")
        assert output.logprobs is not None  # they were asked for
        for token_id, entry in output.logprobs[0].items():
            print(f"    {token_id:4} {entry.decoded_token!r} {entry.logprob:.2f}")

        (found,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=12))
        for beam in found.sequences:
            print(f"beam of score {beam.score:.3f}: {beam.text.removeprefix(PROMPT)!r}")


if __name__ == "__main__":
    main()
