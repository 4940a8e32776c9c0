"""A model of transformers, for its two workers."""

from __future__ import annotations

from typing import Any


def load(job: dict[str, Any]) -> tuple[Any, str]:
    """The job's model, greedy and without limits of its own, and its device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    device = "cuda" if job["device"] == "gpu" else "cpu"
    dtype = getattr(torch, job["dtype"])
    if job["dummy_weights"]:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["model"]), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    model.eval().to(device)
    config = model.generation_config
    config.do_sample, config.pad_token_id = False, 0
    config.temperature = config.top_p = config.top_k = config.max_length = None
    return model, device
