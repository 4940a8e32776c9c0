"""What it gains that stages decode at the same time, on devices that wait instead of computing; JSON.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python scripts/bench_stages.py --out stages.json

Devices of a CPU share its cores, so that two stages are no faster together than one after another. Here each
layer waits `--wait-ms` for each of its requests, as one does that reads their KV: that takes no core, and
what is measured is whether the engine keeps all stages busy. The same engine answers the same prompts in
turns, with decodes in parts and with all of them in one; what counts is the median of the ratios. Stages that
are never idle would make it their number.

The JSON also has what measured kernels of GPUs say of both (`SiliconCostModel`): there parts read the output
head once each, and the weights of a stage as often as there are parts.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxllm import LLM, SamplingParams
from jaxllm.executor.stages import StageAttention
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.predictors import pipeline
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research.bench.results import about, write_json
from jaxllm.system.options import sizes
from jaxllm.system.output_files import OutputParser, new_file


def let_layers_wait(seconds: float) -> None:
    """From now on a layer of a stage waits so long for each of its requests."""

    def wait(rows: Any, count: Any) -> Any:
        time.sleep(seconds * int(count))
        return rows

    def waiting(self: StageAttention, layer: int, qkv: jax.Array, *rest: Any) -> jax.Array:
        count = jnp.int32(0) if self._decode is None else jnp.sum(self._decode.lengths > 0)
        like = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype)
        return computed(self, layer, jax.pure_callback(wait, like, qkv, count), *rest)

    computed = StageAttention.__call__
    StageAttention.__call__ = waiting  # type: ignore[method-assign]


def measure(num_stages: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both, in turns, and whether tokens are the same."""
    llm = LLM(
        demo_model_path(),
        pipeline_parallel_size=num_stages,
        max_num_seqs=args.requests,
        max_model_len=256,
        num_gpu_blocks_override=16 * args.requests,
        attention_implementation="reference",
        skip_tokenizer_init=True,
        warm_up="all",
    )
    prompts = [[3 + (7 * number + place) % 300 for place in range(16)] for number in range(args.requests)]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    seconds: dict[str, list[float]] = {"in parts": [], "in one": []}
    answers: list[list[Any]] = []
    with llm:
        for turn in range(args.repeats + 1):
            for name, least in (("in parts", 0), ("in one", sys.maxsize)):
                began = time.perf_counter()
                with mock.patch.object(pipeline, "least_context", return_value=least):
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                if turn:
                    seconds[name].append(time.perf_counter() - began)
                answers.append([output.token_ids for output in outputs])
    ratios = [one / parts for parts, one in zip(*seconds.values(), strict=True)]
    return {
        "stages": num_stages,
        "seconds": seconds,
        "ratio": statistics.median(ratios),
        "same_tokens": all(answer == answers[0] for answer in answers),
    }


def predicted_rows() -> list[dict[str, Any]]:
    """Seconds of steps that decode, in one and in parts, by device, model, stages, requests and context."""
    rows = []
    cases = itertools.product(("h100-sxm", "a100-sxm"), ("llama-3-8b", "llama-3-70b"), (2, 4))
    for device, model, num_stages in cases:
        for batch, context in itertools.product((16, 64, 256), (1024, 4096)):
            in_one, in_parts = (
                SiliconCostModel(
                    model_shape(model, "bfloat16"), device, pipeline_parallel=num_stages, in_parts=parted
                ).step_seconds(batch, batch * context)
                for parted in (False, True)
            )
            case = {"device": device, "model": model, "stages": num_stages, "requests": batch}
            seconds = {"context": context, "seconds_in_one": in_one, "seconds_in_parts": in_parts}
            rows.append({**case, **seconds, "ratio": in_one / in_parts})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, required=True)
    parser.add_argument("--stages", type=sizes, default=[2, 4], help="default: 2,4")
    parser.add_argument("--requests", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32, help="of each output (default: %(default)s)")
    parser.add_argument("--wait-ms", type=float, default=3.0, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args(argv)
    if (most := max(args.stages)) > len(jax.devices()):
        parser.error(
            f"--stages {most}: there are {len(jax.devices())} devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={most}"
        )
    let_layers_wait(args.wait_ms / 1e3)
    rows = []
    for num_stages in args.stages:
        rows.append(measure(num_stages, args))
        parts, one = (statistics.median(found) for found in rows[-1]["seconds"].values())
        print(f"{num_stages} stages: {one:.2f} s in one, {parts:.2f} s in parts: {rows[-1]['ratio']:.2f}")
    command = ["python", "scripts/bench_stages.py", *(sys.argv[1:] if argv is None else argv)]
    write_json(args.out, {**about(command), "rows": rows, "predicted": predicted_rows()})


if __name__ == "__main__":
    main()
