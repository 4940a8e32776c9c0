"""`jaxllm plan` without compiling: speeds of measured kernels, and where swapping beats recomputing."""

import dataclasses
import json
import re

import pytest

from jaxllm.cli.main import main
from jaxllm.errors import CapacityError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research.plan.crossover import ALONE, BUSY, Busy, crossover, crossovers
from jaxllm.research.plan.speeds import speeds
from jaxllm.research.simulator.gpu import pool_blocks

LLAMA_8B = model_shape("llama-3-8b", "bfloat16")
H100 = SiliconCostModel(LLAMA_8B, "h100")


def test_the_pool_is_what_weights_leave():
    room = 80e9 * 0.9 - 3e9 - 2 * LLAMA_8B.num_parameters
    assert pool_blocks(H100) == int(room / LLAMA_8B.block_bytes(16))
    low = SiliconCostModel(LLAMA_8B, "h100", weights="fp8", kv="fp8")
    assert pool_blocks(low) > 2 * pool_blocks(H100)
    two = SiliconCostModel(LLAMA_8B, "h100", tensor_parallel=2)
    assert 2 * pool_blocks(H100) < pool_blocks(two) < 3 * pool_blocks(H100)
    with pytest.raises(
        CapacityError, match=r"138.0 GB of weights leave no room for KV in 0.9 of the 80 GB of 1 x"
    ):
        pool_blocks(SiliconCostModel(model_shape("llama-2-70b"), "h100"))


def test_speeds_are_those_of_the_steps():
    alone, many = speeds(H100, [(512, 65)], [1, 16])
    step = H100.step_seconds(1, 512 + 32)
    assert alone.seconds_per_token == pytest.approx(step, rel=0.02)
    assert alone.first_token_seconds == pytest.approx(H100.step_seconds(0, 0, 512, 1), rel=0.02)
    # A client thinks for 25 ms on average, in which nothing runs.
    whole = alone.first_token_seconds + 64 * alone.seconds_per_token
    assert 65 / (whole + 0.05) < alone.tokens_per_second < 65 / whole
    assert 8 * alone.tokens_per_second < many.tokens_per_second < 16 * alone.tokens_per_second
    assert many.seconds_per_token > alone.seconds_per_token
    for speed in (alone, many):
        assert sum(speed.sources.values()) == pytest.approx(1.0)
        assert speed.sources["measured"] > 0.2


def test_a_request_without_room_is_refused():
    with pytest.raises(CapacityError, match=r"tokens need \d+ blocks, more than the \d+ of the pool"):
        next(speeds(H100, [(2_000_000, 1)], [1]))


def test_the_crossover_is_where_the_costs_cross():
    # Swapping takes 20 us each way and 10 us a block, a step 400 us and 10 us a token.
    class Costs:
        block_size = 16

        def step_seconds(self, batch, context, prompt_tokens=0, num_prompts=0, prompt_context=0):
            return 4e-4 + 1e-5 * (batch + prompt_tokens) if batch or prompt_tokens else 0.0

        def swap_out_seconds(self, num_blocks):
            return self.latency + 1e-5 * num_blocks

        swap_in_seconds = swap_out_seconds
        latency = 2e-5

    costs = Costs()
    assert crossover(costs, ALONE) == 16  # the first block already
    costs.latency = 2e-3  # 4.0 + 0.02 n / 16 ms = 0.4 + 0.01 n from 412 tokens on
    found = crossover(costs, ALONE)
    assert 412 <= found <= 412 * 1.1
    assert 457 <= crossover(costs, BUSY) <= 457 * 1.1  # without the step that decodes anyway
    costs.latency = 60.0
    assert crossover(costs, ALONE) is None


def test_chunks_of_a_busy_step_add_up():
    busy = Busy(64, 1000)
    whole = busy.recompute_seconds(H100, 4000, 8192)
    decodes = H100.step_seconds(64, 64_000)
    assert whole == pytest.approx(H100.step_seconds(64, 64_000, 4000, 1, 0) - decodes)
    assert busy.recompute_seconds(H100, 4000, 1064) == pytest.approx(whole, rel=0.2)


def test_slower_links_cross_later():
    found = list(crossovers([LLAMA_8B, model_shape("llama-2-70b")], ["H100-SXM", "A100-80GB", "L4"]))
    h100 = [one for one in found if (one.model, one.device) == ("llama-3-8b", "H100-SXM")]
    assert [one.link for one in h100] == [22e9, 50e9]
    assert h100[0].busy >= h100[1].busy
    assert h100[0].swap_ms_of_4096 == pytest.approx(h100[1].swap_ms_of_4096 * 50 / 22, rel=0.02)
    gpus = {one.device: one.gpus for one in found if one.model == "llama-2-70b"}
    assert gpus == {"H100-SXM": 4, "A100-80GB": 4, "L4": 8}


def test_the_command_tells_speeds_of_a_config_and_of_a_published_shape(tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "plan.json"
    options = ["--device", "h100", "--no-compile", "--lengths", "100:20", "--concurrency", "1,4"]
    assert main(["plan", str(tmp_path), *options, "--json", str(out)]) == 0
    of_config = json.loads(out.read_text())["speeds"]
    shown = capsys.readouterr().out
    assert "Simulated from NVIDIA H100 80GB HBM3, vLLM kernels" in shown
    assert "| 100, 20 | 4 |" in shown
    assert re.search(r"\| TP 1 \| 1 \| 15\.0 \| [\d,]+ \|", shown)
    assert main(["plan", "llama-3-8b", *options, "--json", str(out), "--overwrite"]) == 0
    assert json.loads(out.read_text())["speeds"] == of_config
    fast = [
        *options,
        "--quantization",
        "fp8",
        "--kv-cache-dtype",
        "fp8_e4m3",
        "--tensor-parallel",
        "2",
        "--pipeline-parallel",
        "2",
    ]
    assert main(["plan", "llama-3-8b", *fast, "--json", str(out), "--overwrite"]) == 0
    for quick, slow in zip(json.loads(out.read_text())["speeds"], of_config, strict=True):
        assert quick["seconds_per_token"] < slow["seconds_per_token"]


def test_a_quantised_70b_is_told_what_it_takes_and_gives(capsys):
    options = ["--device", "h100", "--no-compile", "--lengths", "100:20", "--concurrency", "4"]
    assert main(["plan", "llama-3-70b", *options]) != 0
    assert "141.1 GB of weights leave no room" in capsys.readouterr().err
    quantised = ["--quantization", "int4_weight", "--kv-cache-dtype", "int8"]
    assert main(["plan", "llama-3-70b", *options, *quantised]) == 0
    ((weights, tokens),) = re.findall(r"\| TP 1 \| 1 \| ([\d.]+) \| ([\d,]+) \|", capsys.readouterr().out)
    assert float(weights) == pytest.approx(36.4, abs=0.2)  # 69.5e9 of 4.25 bits, embeddings of 16
    assert int(tokens.replace(",", "")) > 150_000


def test_the_command_compares_layouts_and_names_the_smallest_within_bounds(tmp_path, capsys):
    out = tmp_path / "plan.json"
    options = ["--no-compile", "--lengths", "512:32", "--concurrency", "1,16", "--json", str(out)]
    command = ["plan", "llama-3-70b", "--device", "h100", *options, "--tensor-parallel", "1,2,4,8"]
    assert main([*command, "--pipeline-parallel", "1,2"]) == 0
    rows = json.loads(out.read_text())["speeds"]
    found = {(one["tensor_parallel"], one["pipeline_parallel"], one["concurrency"]): one for one in rows}
    assert {key[:2] for key in found} == {(2, 2), (4, 1), (4, 2), (8, 1), (8, 2)}  # of 141 GB of weights
    by_gpus = [found[shared, 1, 1] for shared in (4, 8)]
    assert by_gpus[0]["seconds_per_token"] > by_gpus[1]["seconds_per_token"]
    assert by_gpus[0]["weight_bytes"] == 2 * by_gpus[1]["weight_bytes"]
    assert by_gpus[0]["num_blocks"] < by_gpus[1]["num_blocks"]
    assert "leave no room for KV in" in capsys.readouterr().out

    between = 1e3 * (by_gpus[0]["seconds_per_token"] + by_gpus[1]["seconds_per_token"]) / 2
    few = ["--tensor-parallel", "8,4", "--overwrite"]
    assert main([*command, *few, "--within", f"tpot:{between}", "ttft:100000"]) == 0
    shown = capsys.readouterr().out
    assert "| 512, 32 | 1 | TP 8 | 8 |" in shown
    assert main([*command, *few, "--within", "tpot:1000"]) == 0
    assert "| 512, 32 | 16 | TP 4 | 4 |" in capsys.readouterr().out
    assert main([*command, *few, "--within", "tpot:0.001"]) == 0
    assert "| 512, 32 | 16 | none of these |  |" in capsys.readouterr().out


def test_the_command_tells_crossovers(tmp_path, capsys):
    out = tmp_path / "crossover.json"
    assert main(["plan", "llama-3-8b", "--crossover", "--device", "h200", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| llama-3-8b | 1 x H200 | 50 |" in shown
    rows = json.loads(out.read_text())["crossover"]
    expected = [dataclasses.asdict(one) for one in crossovers([LLAMA_8B], ["H200"])]
    assert rows == expected


def test_crossovers_are_drawn(tmp_path):
    out = tmp_path / "crossover.png"
    options = ["plan", "llama-3-8b,llama-2-70b", "--crossover", "--device", "h100"]
    assert main([*options, "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert main([*options, "--plot", str(out)]) == 2  # it is there
    assert main([*options, "--plot", str(tmp_path / "crossover.pgn")]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--plot", "x.png"],
            "--plot does nothing without --crossover",
        ),
        (["llama-3-8b", "--quantize-lm-head"], "--quantize-lm-head does nothing without --quantization"),
        (["--device", "h100"], "name a MODEL and a --device"),
        (["llama-3-8b"], "name a MODEL and a --device"),
        (
            ["--crossover", "--tensor-parallel", "2"],
            "--tensor-parallel means nothing with --crossover; leave it out",
        ),
        (["--crossover", "--concurrency", "2"], "--concurrency means nothing with --crossover"),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--every-bucket"],
            "--every-bucket means nothing",
        ),
        (["llama-3-8b", "--device", "h100"], "llama-3-8b is a published shape; add --no-compile"),
        (["llama-3-8b", "--device", "TPU", "--no-compile"], "device 'TPU' is not in the table"),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--tensor-parallel", "1,x"],
            "--tensor-parallel: 'x' is not a number",
        ),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--within", "e2el:5"],
            "--within 'e2el' is unknown; choose from ttft, tpot",
        ),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--within", "ttft:5", "ttft:6"],
            "--within has two bounds of one name",
        ),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--lengths", "5"],
            "--lengths: '5' is not IN:OUT",
        ),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--lengths", "5:0"],
            "--lengths: '5:0' is not IN:OUT",
        ),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--concurrency", "x"],
            "--concurrency: 'x' is not",
        ),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--kv-cache-dtype", "float32"],
            "--kv-cache-dtype 'float32' was not measured",
        ),
        (
            ["llama-3-8b", "--device", "h100", "--no-compile", "--dtype", "float32"],
            "--dtype 'float32' was not",
        ),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_lengths_are_those_that_the_model_takes(tmp_path, capsys):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024}
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
    }
    config |= {"intermediate_size": 2048, "vocab_size": 1024, "max_position_embeddings": 700}
    config |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["plan", str(tmp_path), "--device", "h100", "--no-compile", "--concurrency", "2"]
    out = tmp_path / "plan.json"

    def sizes(*more):
        assert main([*options, "--json", str(out), "--overwrite", *more]) == 0
        return [(one["input_tokens"], one["output_tokens"]) for one in json.loads(out.read_text())["speeds"]]

    assert sizes() == [(512, 128)]
    assert sizes("--max-model-len", "100") == [(50, 25)]
    assert main([*options, "--lengths", "600:200"]) == 2
    assert "prompt and output are at most 700 tokens together" in capsys.readouterr().err


def test_limits_of_the_engine_are_those_of_the_speeds():
    free, bound = (next(speeds(H100, [(512, 65)], [16], max_num_seqs=most)) for most in (None, 4))
    assert bound.tokens_per_second < 0.5 * free.tokens_per_second
    tight = next(speeds(H100, [(512, 65)], [16], num_blocks=100))
    assert tight.tokens_per_second < 0.5 * free.tokens_per_second


def test_speeds_that_cannot_be_told_lose_nothing_of_what_was_compiled(tmp_path, capsys, monkeypatch):
    config = json.loads((demo_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("jaxllm.research.commands.plan._compiled", lambda args, config: {"num_blocks": 3})
    out = tmp_path / "plan.json"
    command = ["plan", str(tmp_path), "--device", "l40", "--json", str(out)]
    assert main(command) == 0
    assert json.loads(out.read_text()) == {"num_blocks": 3, "speeds": []}
    assert "No speeds: device 'l40' is not in the table" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--within", "ttft:nan"], "invalid NAME:MILLISECONDS value"),
        (["--within", "ttft:-1"], "invalid NAME:MILLISECONDS value"),
        (["--concurrency", "999999999"], "999999999 clients are more than 65536"),
        (["--lengths", ""], "'' is not IN:OUT"),
    ],
)
def test_numbers_of_no_plan_are_refused(option, message, capsys):
    assert main(["plan", "llama-3-8b", "--device", "h100", "--no-compile", *option]) == 2
    assert message in capsys.readouterr().err
