"""The engine beyond one machine, on a Ray cluster (extra `ray`)."""

from jaxllm.cluster.data import GenerateResult, generate

__all__ = ["GenerateResult", "generate"]
