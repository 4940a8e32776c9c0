"""A conversation with the embedded model whose later turns find what was said before, wherever it is by then.

python scripts/demo_conversation.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from jaxllm import LLM, SamplingParams

FIRST = """def read_lines(path):
    with open(path) as file:
        return [line.rstrip() for line in file]


def count_words(lines):
"""
LATER = ("\n\n\ndef longest_line(lines):\n", "\n\n\ndef is_empty(path):\n", "\n\n\ndef write_lines(path):\n")
PARAMS = SamplingParams(temperature=0, max_tokens=24)
NUM_BLOCKS = 20
"""Of 16 tokens, on the device: for one long conversation, or for others."""


def main(argv: Sequence[str] | None = None) -> None:
    """Turns of a conversation: at once, after others took the device, and with nothing left but files."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            max_num_seqs=4,
            max_model_len=16 * NUM_BLOCKS,
            num_gpu_blocks_override=NUM_BLOCKS,
            num_host_blocks=4 * NUM_BLOCKS,
            prefix_cache_dir=folder,
            warm_up="all",
        )
        assert llm.tokenizer is not None  # the embedded model has one
        later = [llm.tokenizer.encode(text, add_special_tokens=False) for text in LATER]
        print("\nA conversation: where the KV of each prompt's tokens came from")
        said = turn(llm, "first turn", llm.tokenizer.encode(FIRST))
        said = turn(llm, "second turn", [*said, *later[0]])
        others = [[3 + index] * 8 * NUM_BLOCKS for index in range(4)]
        llm.generate(others, PARAMS, use_tqdm=False)
        said = turn(llm, "after others", [*said, *later[1]])
        llm.reset_prefix_cache()
        turn(llm, "after a reset", [*said, *later[2]])
        llm.executor.flush_files()


def turn(llm: LLM, name: str, prompt: Sequence[int]) -> list[int]:
    """Answer a prompt, and say where what; returns both, one after another."""
    output = llm.generate([list(prompt)], PARAMS, use_tqdm=False)[0]
    tiers = {tier: count for tier, count in output.cached_tokens_by_tier.items() if count}
    found = ", ".join(f"{count} found on the {tier}" for tier, count in tiers.items()) or "nothing found"
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    seconds = metrics.first_token_time - metrics.arrival_time
    num_computed = len(output.prompt_token_ids) - output.num_cached_tokens
    print(f"  {name:13} {num_computed:3} computed, {found}; first token after {1e3 * seconds:.1f} ms")
    return [*output.prompt_token_ids, *output.token_ids]


if __name__ == "__main__":
    main()
