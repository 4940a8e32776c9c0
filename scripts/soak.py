"""Random traffic for as long as one likes, each preset in turn: nothing may differ, die or stay behind.

    python scripts/soak.py --minutes 30

A round is an engine of the embedded model with too few blocks, in a process of its own, whose prefix cache is
in files that rounds share. Threads send it prompts, conversations that go on, seeds, filters, penalties,
masks and structured outputs, give them priorities and leave some. Every other round with files is killed
(SIGKILL). Of what was answered every `--check-every`-th is compared with a lone run on an engine without a
cache. Where a round ends by itself, no thread but those that all engines share may be left, and its memory
must not have grown by more than `--most-growth` MiB from the second third of its pauses, when caches are
full, to the last.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm import LLM, SamplingParams
from jaxllm.executor import compile_stats
from jaxllm.sched.presets import PRESETS

_SIZES = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}
_NUM_THREADS = 3
_SHARED_THREADS = ("jaxllm-compile", "jaxllm-grammars", "jaxllm-masks", "jaxllm-slow-masks")
_SECONDS_OF_TRAFFIC = 6.0
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 30},
    {"temperature": 0, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0.7, "frequency_penalty": 0.2, "logprobs": 2},
    {"temperature": 0, "bad_words": ["def", "self"]},
    {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ]{5,40}"}},
    {"temperature": 0.8, "structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"temperature": 0, "min_tokens": 5, "logit_bias": {"11": 2.0}},
)


class Client:
    """One thread's requests, and what became of them."""

    def __init__(self, llm: LLM, preset: str, rng: random.Random, report: Report) -> None:
        self._llm, self._preset, self._rng, self._report = llm, preset, rng, report
        self._vocabulary = range(20, 4000)
        self._said: list[int] = []

    def run(self, until: float) -> None:
        """Send requests until then."""
        try:
            while time.monotonic() < until:
                self._call()
        except BaseException as error:
            self._report.add({"error": f"{type(error).__name__}: {error}"})

    def _call(self) -> None:
        rng = self._rng
        prompts = [self._prompt() for _ in range(rng.choice([1, 1, 2, 4]))]
        asked = [self._params() for _ in prompts]
        options: dict[str, Any] = {}
        if self._preset in ("priority", "deadline"):
            options[self._preset] = [rng.randrange(1, 5) for _ in prompts]
        params = [SamplingParams(**one) for one in asked]
        num_taken, leaves = 0, rng.random() < 0.2
        stream = self._llm.stream([{"prompt_token_ids": ids} for ids in prompts], params, **options)
        try:
            for output in stream:
                num_taken += 1
                if leaves and num_taken > rng.randrange(1, 30):
                    return
                if self._preset == "priority" and rng.random() < 0.02:
                    stream.set_priority(rng.randrange(len(prompts)), rng.randrange(5))
                if output.finished:
                    place = int(output.request_id)
                    tokens = list(output.outputs[0].token_ids)
                    self._said = [*prompts[place], *tokens]
                    self._report.add({"prompt": prompts[place], "params": asked[place], "tokens": tokens})
        finally:
            stream.close()

    def _prompt(self) -> list[int]:
        rng = self._rng
        if self._said and rng.random() < 0.4:
            return [*self._said[:120], *rng.choices(self._vocabulary, k=rng.randrange(1, 20))]
        common = [list(self._vocabulary[start : start + 48]) for start in (0, 100, 200)]
        head = rng.choice([[], *common])
        return head + rng.choices(self._vocabulary, k=rng.randrange(1, 60))

    def _params(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.choice(_KINDS)
        most = rng.choice([1, 8, 40, 80])
        common = {"max_tokens": max(most, kind.get("min_tokens", 0)), "seed": rng.randrange(1000)}
        return {**kind, **common, "ignore_eos": "structured_outputs" not in kind and rng.random() < 0.5}


class Report:
    """Lines of JSON that survive a kill."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file, self._lock = path.open("a", encoding="utf-8"), threading.Lock()

    def add(self, values: dict[str, Any]) -> None:
        """Write a line."""
        with self._lock:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def resident_mib() -> float:
    """Memory of this process in MiB, as Linux counts it."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def play(args: argparse.Namespace) -> None:
    """A round: traffic and pauses in turn, until the time is over."""
    report, rng = Report(args.lines), random.Random(args.seed)
    before = {thread.name for thread in threading.enumerate()}
    files = {} if args.folder is None else {"prefix_cache_dir": str(args.folder)}
    llm = LLM(
        scheduler_policy=args.play,
        num_gpu_blocks_override=24,
        num_host_blocks=48,
        prefix_cache_dir_bytes=2**26 if files else None,
        **files,
        **_SIZES,
    )
    clients = [
        Client(llm, args.play, random.Random(rng.random()), report)
        for _ in range(1 if args.play == "paper" else _NUM_THREADS)
    ]
    deadline, memory = time.monotonic() + args.seconds, []
    while time.monotonic() < deadline:
        until = min(deadline, time.monotonic() + _SECONDS_OF_TRAFFIC)
        threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        llm.engine.scheduler.check()
        gc.collect()
        memory.append((resident_mib(), compile_stats.total()[0]))
    llm.close()
    del llm, clients
    gc.collect()
    left = sorted({thread.name for thread in threading.enumerate()} - before)
    left = [name for name in left if not name.startswith(_SHARED_THREADS)]
    report.add({"memory": memory, "threads": left})


def rounds(args: argparse.Namespace) -> Iterator[tuple[int, str, bool, bool]]:
    """Number, preset, whether there are files, and whether it is killed, until the time is over."""
    deadline = time.monotonic() + 60 * args.minutes
    number = 0
    while time.monotonic() < deadline:
        preset = args.presets[number % len(args.presets)]
        has_files = preset not in ("vllm", "vllm_swap", "vllm_swap_both", "paper_strategy") and number % 3 > 0
        yield number, preset, has_files, has_files and number % 2 == 0
        number += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak from the command line; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="of a round")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=sorted(PRESETS))
    parser.add_argument("--check-every", type=int, default=20)
    parser.add_argument("--most-growth", type=float, default=32.0, help="in MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.play:
        play(args)
        return 0
    problems: list[str] = []
    totals = {"rounds": 0, "killed": 0, "answered": 0, "compared": 0}
    lone = LLM(scheduler_policy="vllm_v1", enable_prefix_caching=False, **_SIZES)
    with tempfile.TemporaryDirectory() as folder:
        for number, preset, has_files, is_killed in rounds(args):
            report = pathlib.Path(folder) / f"{number}.jsonl"
            command = [sys.executable, __file__, "--play", preset, "--lines", str(report)]
            command += ["--seconds", str(args.seconds), "--seed", str(args.seed + number)]
            command += ["--folder", str(pathlib.Path(folder) / "files")] if has_files else []
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            try:
                limit = random.Random(number).uniform(0.2, 0.7) * args.seconds + 5 if is_killed else None
                _, errors = process.communicate(timeout=limit or 10 * args.seconds + 300)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                _, errors = process.communicate()
                if not is_killed:
                    problems.append(f"round {number} ({preset}) hung")
                totals["killed"] += is_killed
            if process.returncode not in (0, -signal.SIGKILL):
                problems.append(
                    f"round {number} ({preset}) ended with {process.returncode}: {errors[-2000:]}"
                )
            text = report.read_text(encoding="utf-8") if report.exists() else ""
            lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            found = judge(lone, lines, args, totals)
            problems += [f"round {number} ({preset}): {problem}" for problem in found]
            totals["rounds"] += 1
            what = "killed" if is_killed else "files" if has_files else "no files"
            print(
                f"round {number}, {preset}, {what}: {len(lines)} lines, {len(problems)} problems so far",
                flush=True,
            )
    print(json.dumps({**totals, "problems": problems}, indent=1))
    return bool(problems)


def judge(
    lone: LLM, lines: list[dict[str, Any]], args: argparse.Namespace, totals: dict[str, int]
) -> list[str]:
    """What was wrong with a round."""
    problems = [line["error"] for line in lines if "error" in line]
    answers = [line for line in lines if "tokens" in line]
    totals["answered"] += len(answers)
    for answer in answers[:: args.check_every]:
        totals["compared"] += 1
        prompt = {"prompt_token_ids": answer["prompt"]}
        (output,) = lone.generate(prompt, SamplingParams(**answer["params"]), use_tqdm=False)
        if list(output.token_ids) != answer["tokens"]:
            problems.append(f"{answer} is {list(output.token_ids)} alone")
    for line in lines:
        if line.get("threads"):
            problems.append(f"threads stayed: {line['threads']}")
        seen = line.get("memory", ())
        memory = [mib for mib, num_programs in seen if num_programs == seen[-1][1]]  # once all are compiled
        if len(memory) >= 6:
            third = len(memory) // 3
            growth = statistics.median(memory[-third:]) - statistics.median(memory[third : 2 * third])
            if growth > args.most_growth:
                problems.append(f"memory grew by {growth:.0f} MiB: {memory}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
