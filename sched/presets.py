"""Named combinations of policies: published systems, and the engine's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from jaxllm.errors import ConfigError, did_you_mean, is_outside, shown
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.lengths import RankPredictor
from jaxllm.predictors.own import checked
from jaxllm.sched.baselines import VLLM025
from jaxllm.sched.policies import (
    AdaptiveAction,
    AheadOfTime,
    CostOverIdleTime,
    EarliestDeadline,
    ExpectedGrowth,
    FairPriority,
    FairTurns,
    FCFSPriority,
    HoldIfLost,
    LatestArrivalVictim,
    LeastLostVictim,
    LeastRecentlyUsed,
    LeastUrgentVictim,
    LeastWorkLeft,
    LongestCachedPrefix,
    MoreUrgentFirst,
    MultiLevelFeedback,
    NoHold,
    OffloadIfCheaper,
    OutrankedVictim,
    OverlapAwareResume,
    OvertakerVictim,
    PacedIterations,
    PriorityClasses,
    PriorityPolicy,
    ProgramFCFS,
    ResumeFirst,
    SchedulerPolicy,
    SchedulingPolicy,
    SeparateIterations,
    ShortestJob,
    SwapIfItFits,
    TimeToLive,
    WatermarkAdmission,
    WriteThrough,
    is_policy,
)
from jaxllm.sched.policies.user import check_names, describe, import_policy, own_policy
from jaxllm.system.import_path import imported


def vllm(costs: CostModel | None = None) -> SchedulingPolicy:
    """vLLM 0.2.5: FCFS, the latest arrival is dropped and prefilled again; several samples are swapped."""
    return VLLM025()


def vllm_swap(costs: CostModel | None = None) -> SchedulingPolicy:
    """vLLM 0.2.5 that always swaps (AdaptiveLLM's vLLM_s), with batches that fit the host pool."""
    return VLLM025("host")


def vllm_swap_both(costs: CostModel | None = None) -> SchedulingPolicy:
    """vLLM_s by its second rule: batches that fit device and host pool together less the largest request."""
    return VLLM025("both")


def vllm_v1(costs: CostModel | None = None) -> SchedulerPolicy:
    """Today's vLLM (V1 engine, 0.32): mixed iterations, FCFS, the latest arrival is dropped."""
    return SchedulerPolicy(patience=None)


def paper_strategy(costs: CostModel | None = None) -> SchedulingPolicy:
    """AdaptiveLLM's memory strategy alone (Section 4.3): vLLM 0.2.5 with Algorithm 1's choice of action.

    Raises:
        ConfigError: `costs` is missing.
    """
    return VLLM025(action=AdaptiveAction(_required("paper_strategy", costs)))


def paper(costs: CostModel | None = None) -> SchedulerPolicy:
    """AdaptiveLLM: Algorithm 1 (preempt the least urgent, cheaper action) and Algorithm 2 (start).

    As published it may starve: a request that others pass over forever waits forever.

    Raises:
        ConfigError: `costs` is missing.
    """
    return SchedulerPolicy(
        priority=FairPriority(),
        admission=WatermarkAdmission(0.0),
        iterations=SeparateIterations(),
        victim=LeastUrgentVictim(FairPriority()),
        action=AdaptiveAction(_required("paper", costs)),
        restore=MoreUrgentFirst(FairPriority()),
        patience=None,
    )


def adaptive(costs: CostModel | None = None) -> SchedulerPolicy:
    """Ours: the paper's fairness and choice of action, in mixed iterations.

    Against `paper` prompts ride beside decodes, at a pace that does not slow these down more than needed; it
    copies back beside the steps; as many are under way as are expected to fit device and host, by how long
    outputs get, and who loses its blocks is chosen by what that costs; what the prefix cache has no room for
    goes to the host ahead of need where that pays, and what costs most to compute again stays there; turns of
    conversations are the more urgent the more they find, and are held on the device where others were lost;
    nobody is passed over for ever, and those who come much later do not go first.
    docs/results.md says what each is worth, and how it was chosen.

    Raises:
        ConfigError: `costs` is missing.
    """
    costs = _required("adaptive", costs)
    return SchedulerPolicy(
        priority=FairTurns(),
        admission=ExpectedGrowth(),
        iterations=PacedIterations(costs),
        victim=LeastLostVictim(costs),
        action=AdaptiveAction(costs),
        resume=OverlapAwareResume(costs),
        restore=MoreUrgentFirst(FairTurns()),
        offload=OffloadIfCheaper(costs),
        retention=CostOverIdleTime(costs),
        hold=HoldIfLost(costs),
        patience=128,
        max_extra_wait=0.05,
    )


def _ordered(priority: PriorityPolicy, costs: CostModel, margin: float | None) -> SchedulerPolicy:
    """`adaptive` in another order; with a margin queued requests take the room of less urgent ones."""
    return dataclasses.replace(
        adaptive(costs),
        priority=priority,
        admission=WatermarkAdmission(0.0),
        victim=LatestArrivalVictim() if margin is None else OutrankedVictim(priority, margin),
        restore=MoreUrgentFirst(priority),
        hold=NoHold(),
        patience=1024,
        max_extra_wait=None,
    )


def adaptive_throughput(costs: CostModel | None = None) -> SchedulerPolicy:
    """`adaptive`, first come first served: the most tokens/s where all the work is there at once."""
    return _ordered(FCFSPriority(), _required("adaptive_throughput", costs), None)


def priority(costs: CostModel | None = None) -> SchedulerPolicy:
    """The user's classes (`generate(..., priority=...)`), more urgent ones taking the room of others."""
    return _ordered(PriorityClasses(), _required("priority", costs), 0.0)


def deadline(costs: CostModel | None = None) -> SchedulerPolicy:
    """Earliest deadline first (`generate(..., deadline=...)`), AdaptiveLLM's future work."""
    return _ordered(EarliestDeadline(), _required("deadline", costs), 0.0)


def shortest(costs: CostModel | None = None) -> SchedulerPolicy:
    """The shortest predicted output first, by learning to rank."""
    policy = _ordered(ShortestJob(), _required("shortest", costs), None)
    return dataclasses.replace(policy, length=RankPredictor())


def least_work(costs: CostModel | None = None) -> SchedulerPolicy:
    """The least predicted output left first, by learning to rank; takes the room of those with more left."""
    policy = _ordered(LeastWorkLeft(), _required("least_work", costs), 32.0)
    return dataclasses.replace(policy, length=RankPredictor())


def fastserve(costs: CostModel | None = None) -> SchedulerPolicy:
    """FastServe: skip-join multi-level feedback queue; who is outranked is swapped out.

    FastServe copies out ahead of need, so that nobody waits for that, and back ahead of a request's turn.
    Here a victim's blocks are free at once, its KV being copied from staging memory beside the steps, and
    copies back run beside them, too (`OverlapAwareResume`).
    """
    costs = _required("fastserve", costs)
    policy = _ordered(MultiLevelFeedback(costs), costs, 0.0)
    return dataclasses.replace(policy, action=SwapIfItFits(costs), restore=ResumeFirst())


def pensieve(costs: CostModel | None = None) -> SchedulerPolicy:
    """Pensieve's cache under vLLM V1's order: copied to the host ahead of need; victims are dropped."""
    retention = CostOverIdleTime(_required("pensieve", costs))
    return SchedulerPolicy(offload=AheadOfTime(), retention=retention, patience=None)


def hicache(costs: CostModel | None = None) -> SchedulerPolicy:
    """SGLang HiCache's write-through under vLLM V1's order: every full block is copied to the host."""
    return SchedulerPolicy(offload=WriteThrough(), patience=None)


def cached_attention(costs: CostModel | None = None) -> SchedulerPolicy:
    """CachedAttention's cache under vLLM V1's order: blocks are saved when full; what is queued for stays."""
    retention = LeastRecentlyUsed(looks_ahead=True)
    return SchedulerPolicy(offload=WriteThrough(), retention=retention, patience=None)


def continuum(costs: CostModel | None = None) -> SchedulerPolicy:
    """Continuum: a turn's KV stays on the device for a time to live; conversations first come first served.

    As with its offloading to host memory, every full block is copied there.

    Raises:
        ConfigError: `costs` is missing.
    """
    priority = ProgramFCFS()
    return SchedulerPolicy(
        priority=priority,
        restore=MoreUrgentFirst(priority),
        hold=TimeToLive(_required("continuum", costs)),
        offload=WriteThrough(),
    )


def flashgen(costs: CostModel | None = None) -> SchedulerPolicy:
    """FlashGen: full blocks are copied out at once; short requests go past a long one, and give way to it."""
    restore, victim = ResumeFirst(skips=True), OvertakerVictim()
    return SchedulerPolicy(restore=restore, victim=victim, offload=WriteThrough())


def sglang(costs: CostModel | None = None) -> SchedulerPolicy:
    """SGLang's order, the longest cached prefix first, with HiCache's write-through; nobody is left out."""
    priority = LongestCachedPrefix()
    return SchedulerPolicy(priority=priority, restore=MoreUrgentFirst(priority), offload=WriteThrough())


PRESETS: Mapping[str, Callable[[CostModel | None], SchedulingPolicy]] = {
    "adaptive": adaptive,
    "paper": paper,
    "paper_strategy": paper_strategy,
    "vllm": vllm,
    "vllm_swap": vllm_swap,
    "vllm_swap_both": vllm_swap_both,
    "vllm_v1": vllm_v1,
    "adaptive_throughput": adaptive_throughput,
    "priority": priority,
    "deadline": deadline,
    "shortest": shortest,
    "least_work": least_work,
    "fastserve": fastserve,
    "pensieve": pensieve,
    "hicache": hicache,
    "sglang": sglang,
    "cached_attention": cached_attention,
    "flashgen": flashgen,
    "continuum": continuum,
}
DEFAULT_PRESET = "adaptive"
NEEDS_COSTS = frozenset(PRESETS) - {
    *("vllm", "vllm_swap", "vllm_swap_both", "vllm_v1"),
    *("hicache", "sglang", "cached_attention", "flashgen"),
}
"""Presets that compare predicted costs; the others take any, and never ask."""


def as_policy(choice: object, costs: CostModel | None = None) -> SchedulingPolicy:
    """The policy that a word or an object stands for: whatever takes a policy takes these.

    Args:
        choice: the name of one of `PRESETS`; "module:attribute" (`jaxllm.sched.policies.user`); a
            `SchedulerPolicy` or a baseline, which is taken as it is; a class or an object that answers one
            question, which changes that of `adaptive`; or a function of the costs that returns one of these.
        costs: predicted seconds, for policies that weigh actions.

    Raises:
        ConfigError: it stands for none, needs `costs`, or has a part under a name that nobody asks for.
    """
    if is_policy(choice):
        check_names(describe(choice), choice)
        return choice
    if isinstance(choice, str):
        return make_preset(choice, costs)
    return own_policy(choice, describe(choice), functools.partial(adaptive, costs), costs)


def weighs_costs(choice: object) -> bool:
    """Whether what `as_policy` makes of a word or an object may compare predicted costs that it is given."""
    if isinstance(choice, str):
        return choice in NEEDS_COSTS or ":" in choice
    return not is_policy(choice)


def check_word(word: str) -> None:
    """Verify that a word names a preset, or something that can be imported, without making a policy of it.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(word, str):
        raise ConfigError(
            f"{shown(word)} is no policy's name: pass one of {', '.join(sorted(PRESETS))}, or "
            "'module:attribute'"
        )
    if ":" in word:
        imported(word, "the policy")
    elif word not in PRESETS:
        raise ConfigError(
            f"there is no preset {word!r}; {did_you_mean(word, PRESETS)}presets: "
            f"{', '.join(sorted(PRESETS))}; your own policy is named as 'module:attribute'"
        )


def make_preset(name: str, costs: CostModel | None = None) -> SchedulingPolicy:
    """The policies of a preset, or of the user's own module; `as_policy` takes objects, too.

    Args:
        name: one of `PRESETS`, or "module:attribute" (`jaxllm.sched.policies.user.import_policy`); a class
            that answers one question changes that of `adaptive`.
        costs: predicted seconds, for policies that weigh actions.

    Raises:
        ConfigError: there is no such preset or attribute, or it needs `costs`.
    """
    check_word(name)
    if ":" in name:
        return import_policy(name, functools.partial(adaptive, costs), costs)
    return PRESETS[name](costs)


def _required(name: str, costs: CostModel | None) -> CostModel:
    """The costs; those from outside the package are named where they raise, or answer with no seconds."""
    if costs is None:
        raise ConfigError(f"preset {name!r} weighs swapping against recomputing: pass costs=...")
    return checked(costs) if is_outside(costs) else costs
