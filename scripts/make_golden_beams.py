"""Record what transformers' beam search finds, for tests/data/golden_beams.json; needs the extra `parity`.

    python scripts/make_golden_beams.py OUT

Prompts are the recorded ones of tests/variants.py. What ends a hypothesis is a token of the greedy answer, so
that hypotheses of different lengths compete.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from jaxllm.system.output_files import OutputParser, new_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from variants import golden_checkpoint, golden_data

VARIANTS = ("llama_gqa", "opt_pre_norm")
LENGTH_PENALTIES, EARLY_STOPPING = (1.0, 0.0, -1.0, 2.0), (False, True, "never")
MAX_TOKENS = 12


def record(name: str) -> list[dict[str, Any]]:
    """The searches of a variant."""
    model = AutoModelForCausalLM.from_pretrained(golden_checkpoint(name), dtype=torch.float32).eval()
    data = golden_data(name)
    rows = []
    for place, prompt in enumerate(data["prompts"][:2]):
        ends = sorted({data["greedy"][place][3], data["greedy"][place][7]})
        for width, (penalty, early), count in itertools.product(
            (2, 3), itertools.product(LENGTH_PENALTIES, EARLY_STOPPING), (1, 2)
        ):
            eos = ends[:count]
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=MAX_TOKENS,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=eos,
                pad_token_id=0,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
            sequences = [_output(row[len(prompt) :], eos) for row in found.sequences.tolist()]
            rows.append(
                {
                    "variant": name,
                    "prompt": prompt,
                    "eos_token_ids": eos,
                    "beam_width": width,
                    "length_penalty": penalty,
                    "early_stopping": early,
                    "max_tokens": MAX_TOKENS,
                    "outputs": sequences,
                    "scores": [round(score, 5) for score in found.sequences_scores.tolist()],
                }
            )
    return rows


def _output(tokens: list[int], eos: list[int]) -> list[int]:
    """Without the padding behind a token that ends it."""
    ends = [place for place, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def main() -> None:
    """Write the file."""
    parser = OutputParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=new_file)
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    rows = [json.dumps(row) for name in VARIANTS for row in record(name)]
    args.out.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
