"""Complete a batch of prompts, each with sampling parameters of its own.

python examples/offline_batch.py
"""

from jaxllm import LLM, SamplingParams

PROMPTS = ["def add(a, b):\n    ", "import os\n", "class Stack:\n", "for line in file:\n"]


def main() -> None:
    """One call for all prompts; outputs come in their order."""
    params = [SamplingParams(temperature=0, max_tokens=12 + 4 * place) for place in range(len(PROMPTS))]
    # LLM("path/to/checkpoint") takes a model of yours. Small limits have few programs to compile.
    with LLM(max_model_len=256, max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            print(f"{prompt!r} -> {output.text!r}")
            print(f"    {len(output.token_ids)} tokens, ended by {output.finish_reason!r}")


if __name__ == "__main__":
    main()
