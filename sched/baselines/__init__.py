"""Schedulers of published systems that do not fit a `SchedulerPolicy`, as planners of their own."""

from jaxllm.sched.baselines.vllm025 import VLLM025

__all__ = ["VLLM025"]
