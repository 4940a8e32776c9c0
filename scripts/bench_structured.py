"""Times decode steps of requests whose outputs a grammar bounds, and of others.

    python scripts/bench_structured.py --model out/bench107m-gqa --out structured.json

As many requests as run at once get `--output-len` tokens each, sampled at temperature 1: free, with allowed
tokens (which are sent with each step), with an expression that is never done, and with a JSON schema. The
four take turns within a repetition, after one that is not counted.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from jaxllm import LLM, SamplingParams
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

_PROMPT_LEN = 16
_ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
_ITEM |= {"required": ["name", "age"], "additionalProperties": False}
KINDS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "allowed tokens": {"ignore_eos": True, "allowed_token_ids": range(1, 4000)},
    "expression": {"structured_outputs": {"regex": r"(.|\n){9999}"}},
    "schema": {"structured_outputs": {"json": {"type": "array", "items": _ITEM, "minItems": 999}}},
}


def seconds_per_step(llm: LLM, batch: int, output_len: int, options: dict[str, Any]) -> float:
    """Of a batch's decode steps, from the first tokens of all to the last."""
    prompts = [{"prompt_token_ids": [5 + index] * _PROMPT_LEN} for index in range(batch)]
    params = [SamplingParams(seed=index, max_tokens=output_len, **options) for index in range(batch)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if min(lengths) < output_len:
        raise RuntimeError(f"an output ended after {min(lengths)} of {output_len} tokens")
    metrics = [output.metrics for output in outputs]
    first = max(one.first_token_time or 0.0 for one in metrics if one is not None)
    last = max(one.last_token_time or 0.0 for one in metrics if one is not None)
    return (last - first) / (output_len - 1)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(demo_model_path()), help="folder of a checkpoint")
    parser.add_argument("--tokenizer", default=str(demo_model_path()), help="of up to the model's tokens")
    parser.add_argument("--batch", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    if min(args.batch, args.repetitions) < 1 or args.output_len < 2:
        parser.error("--batch and --repetitions must be at least 1, --output-len at least 2")
    llm = LLM(
        args.model,
        args.tokenizer,
        max_num_seqs=args.batch,
        max_model_len=_PROMPT_LEN + args.output_len,
        num_scheduler_steps=1,
    )
    samples: dict[str, list[float]] = {name: [] for name in KINDS}
    for repetition in range(args.repetitions + 1):
        for name, options in KINDS.items():
            seconds = seconds_per_step(llm, args.batch, args.output_len, options)
            if repetition:
                samples[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    values = {
        "command": command_line(["python", "scripts/bench_structured.py", *(argv or sys.argv[1:])]),
        "hardware": describe_hardware(),
        "versions": versions(),
        "vocab_size": llm.model_config.vocab_size,
        "batch": args.batch,
        "seconds_per_step": samples,
        "median_seconds_per_step": medians,
        "over_free": {name: seconds / medians["free"] for name, seconds in medians.items()},
    }
    write_json(args.out, values)
    for name, seconds in medians.items():
        print(f"{name}: {1000 * seconds:.2f} ms a step, {seconds / medians['free']:.3f} of free")


if __name__ == "__main__":
    main()
