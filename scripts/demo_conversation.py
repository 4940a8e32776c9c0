"""A conversation with the embedded model whose second turn finds what was said before.

python scripts/demo_conversation.py
"""

from __future__ import annotations

from jaxllm import LLM, SamplingParams

FIRST = """def read_lines(path):
    with open(path) as file:
        return [line.rstrip() for line in file]


def count_words(lines):
"""
SECOND = "\n\n\ndef longest_line(lines):\n"


def main() -> None:
    """Two turns, and the first again."""
    llm = LLM(max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=40)
    first = llm.generate(FIRST, params, use_tqdm=False)[0]
    turn = [*first.prompt_token_ids, *first.token_ids]
    assert llm.tokenizer is not None  # the embedded model has one
    turn += llm.tokenizer.encode(SECOND, add_special_tokens=False)
    second = llm.generate([turn], params, use_tqdm=False)[0]
    again = llm.generate(FIRST, params, use_tqdm=False)[0]
    print("\nA conversation: where the KV of each prompt's tokens came from")
    for name, output in (("first turn", first), ("second turn", second), ("first again", again)):
        found = output.cached_tokens_by_tier
        computed = len(output.prompt_token_ids) - output.num_cached_tokens
        metrics = output.metrics
        assert metrics is not None
        assert metrics.first_token_time is not None
        seconds = metrics.first_token_time - metrics.arrival_time
        tiers = ", ".join(f"{count} from blocks on the {tier}" for tier, count in found.items())
        print(f"  {name:12} {computed:3} computed, {tiers}; first token after {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
