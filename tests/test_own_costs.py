"""A cost model of a user's own, named by an import path: one file and one line."""

import pytest
from docs_helpers import DOCS, Page
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.engine.ledgers import read_ledger


def test_decisions_are_by_it(tmp_path, monkeypatch):
    text = Page(DOCS / "howto" / "own-predictor.md").python()[0].text
    (tmp_path / "own_costs.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    ledger = tmp_path / "decisions.jsonl"
    llm = make_llm(
        golden_checkpoint("llama_gqa"),
        scheduler_policy="own_costs:policy",
        num_gpu_blocks_override=30,
        num_host_blocks=30,
        ledger=str(ledger),
        warm_up="background",
    )
    prompts = [{"prompt_token_ids": [5 + place] * 12} for place in range(8)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    llm.close()
    records = read_ledger(ledger).preemptions
    assert records
    for record in records:  # 30 us a block and way, 4 ms a step and 20 us a token, as the page has it
        assert record.swap_seconds == pytest.approx(2 * 3e-5 * record.num_blocks, rel=0.5)
        assert record.recompute_seconds == pytest.approx(4e-3 + 2e-5 * record.num_tokens, rel=0.5)
