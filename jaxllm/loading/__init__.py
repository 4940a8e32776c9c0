"""Weights: Hugging Face safetensors, Orbax checkpoints and random ones, onto the device."""

from jaxllm.loading.convert import convert_checkpoint
from jaxllm.loading.load import LOAD_FORMATS, iter_params, load_params, resolve_dtype

__all__ = ["LOAD_FORMATS", "convert_checkpoint", "iter_params", "load_params", "resolve_dtype"]
