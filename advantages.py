"""Algorithms, each declared once: `ALGORITHMS` maps a name to its stages, loss, aggregation and capability flags.

Public: `ALGORITHMS`, `GROUP_STAGES`, `BATCH_STAGES`, `group_scores`, `token_advantages`, `has_signal`, `check`,
`algorithm_table`.

Shapes: N samples of this rank, K reward components, T tokens of the longest response. Statistics are float64; the cast to
float32 is the last thing that happens. Maths: group stage within one prompt's samples on the rank that sampled them, batch
stage over one optimizer batch across ranks. Not here on purpose: rewards, losses, and any comparison of an algorithm's name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from dist_utils import Moments, agree, mean_std, run_together

FLOAT32_MAX = torch.finfo(torch.float32).max
GRPO_EPS = 1e-6  # added to a group's std, as in ALGORITHMS' `grpo`
GDPO_EPS = 1e-4  # added to both stds of GDPO
MIN_VARIANCE = 1e-8  # floor of a token-level whitening's variance


@dataclass(frozen=True)
class Algorithm:
    """One algorithm: names of registry entries, default numbers, and what it can and cannot be combined with."""

    group_stage: str  # key of GROUP_STAGES
    batch_stage: str  # key of BATCH_STAGES
    policy_loss: str  # key of losses.POLICY_LOSSES
    aggregation: str  # key of losses.AGGREGATIONS
    paper: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: str | None = None  # default KL term: key of losses.KL_ESTIMATORS and where, "k3 in loss"
    # capabilities
    uses_reward_components: bool = False  # the group stage needs the K components, not their weighted sum
    min_group_size: int = 1  # smallest --samples-per-prompt for which the maths is defined
    needs_critic: bool = False  # a value model is built and trained
    requires_on_policy_updates: bool = False  # no ratio in the objective: one optimizer step a rollout
    supports_fully_async: bool = True  # may train on a slice of a batch or on stale rollouts
    advantage_normalization: str | None = None  # whitening of its own: None, "sequence" or "token_global"
    forbids_normalize_advantages: bool = False  # --normalize-advantages would whiten twice
    requires_rewards_normalization: bool = False  # the group stage may not be switched off
    allows_reward_post_process_hooks: bool = True  # a user's hook may replace the group stage
    forbids_reward_side_kl: bool = False  # the batch stage ignores per-token KL


# ---------------------------------------------------------------------------------------------- group stage


def _each_group(groups: torch.Tensor, scored: torch.Tensor) -> list[torch.Tensor]:
    """For each prompt group, the indices of its samples under `scored` [N] bool. Row order does not matter."""
    return [((groups == g) & scored).nonzero()[:, 0] for g in groups.unique()]


def weighted_sum(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """r = sum_k w_k x_k over the components that did not abstain. [N, K] float64 -> [N] float64.

    Errors: ValueError where a sum does not fit float32, rather than a group of equal infinities without signal.
    """
    rewards = (torch.where(scored, components, 0.0) * weights).sum(1)
    if not (rewards.abs() <= FLOAT32_MAX).all():
        worst = int(rewards.abs().nan_to_num(nan=float("inf")).argmax())
        raise ValueError(
            f"the weighted sum of rewards of sample {worst} is {rewards[worst].item():g}, beyond float32; its components "
            f"are {components[worst].tolist()}, the weights {weights.tolist()}. Scale the rewards or --reward-weights down"
        )
    return rewards


def grpo(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r - mean_g) / (std_g + 1e-6), sample std (GRPO, arXiv 2402.03300). [N, K] float64 -> [N] float64.

    A group whose rewards are all equal as float32 gives exactly 0; so does a sample with nothing scored, which also
    stays out of its group's statistics.
    """
    rewards = weighted_sum(components, scored, weights)
    scores = torch.zeros_like(rewards)
    for index in _each_group(groups, scored.any(1)):
        r = rewards[index]
        if len(r) > 1 and r.float().min() != r.float().max():
            scores[index] = (r - r.mean()) / (r.std() + GRPO_EPS)
    return scores


def gdpo(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """sum_k w_k (x_k - mean_gk) / (std_gk + 1e-4), sample std (GDPO, arXiv 2601.05242). [N, K] float64 -> [N] float64.

    A component that is constant within a group (min == max in float64, never a tolerance) adds exactly 0 there; a
    component that abstained on a sample stays out of its group's statistics and adds 0. Nothing else is done to the sum.

    Known limits: components with a constant sum (x2 = C - x1) cancel for equal weights, up to a rounding residue that
    grows with C; one component alone does not reduce to GRPO (the batch stage whitens again); with two samples a group
    magnitudes are lost (always +-0.7071).
    """
    scores = torch.zeros(len(groups), dtype=torch.float64)
    for k, weight in enumerate(weights):
        for index in _each_group(groups, scored[:, k]):
            x = components[index, k]
            if len(x) > 1 and x.min() != x.max():
                scores[index] += weight * (x - x.mean()) / (x.std() + GDPO_EPS)
    return scores


def group_scores(
    name: str, components: torch.Tensor, scored: torch.Tensor, weights: Sequence[float], groups: torch.Tensor
) -> torch.Tensor:
    """The group stage of algorithm `name` on this rank's samples: [N, K] float64 components -> [N] float64 scores.

    scored [N, K] bool: False where a grader abstained; weights: K numbers; groups [N] int64: the prompt of each sample.
    Errors: KeyError for an unknown algorithm; ValueError where shapes do not fit or a sum overflows.
    """
    if components.shape != scored.shape or components.shape != (len(groups), len(weights)):
        raise ValueError(
            f"components {tuple(components.shape)} and scored {tuple(scored.shape)} must be "
            f"[{len(groups)} samples, {len(weights)} weights]"
        )
    stage = GROUP_STAGES[ALGORITHMS[name].group_stage]
    return stage(components.double(), scored, torch.tensor(weights, dtype=torch.float64), groups)


def has_signal(scores: torch.Tensor, groups: torch.Tensor) -> dict[int, bool]:
    """For each group of this rank: do its scores, as float32, differ at all? [N] float64, [N] int64.

    The one predicate for the filter, the metrics and the advantage.
    """
    as_trained = scores.float()
    return {int(g): bool(as_trained[groups == g].min() != as_trained[groups == g].max()) for g in groups.unique()}


# ---------------------------------------------------------------------------------------------- batch stage


def _optimizer_batches(num_samples: int, batch_sizes: Sequence[int] | None) -> list[slice]:
    """Slices of this rank's samples, one an optimizer batch, once all ranks agree on how many there are."""

    def read() -> list[slice]:
        if batch_sizes is None:
            raise ValueError("no segmentation into optimizer batches was given; it is never taken to be one batch")
        sizes = [int(s) for s in batch_sizes]
        if any(s < 0 for s in sizes) or sum(sizes) != num_samples:
            raise ValueError(f"optimizer batches of {sizes} samples do not add up to the {num_samples} of this rank")
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [slice(end - size, end) for size, end in zip(sizes, ends)]

    slices = run_together("segmenting into optimizer batches", read)
    agree("the number of optimizer batches", len(slices))
    return slices


def broadcast(scores: torch.Tensor, response_mask: torch.Tensor, batch_sizes: Sequence[int] | None) -> torch.Tensor:
    """The score on every response token: [N] float64, [N, T] bool -> [N, T] float64."""
    _optimizer_batches(len(scores), batch_sizes)
    return torch.where(response_mask, scores[:, None], 0.0)


def whiten_sequence(scores: torch.Tensor, response_mask: torch.Tensor, batch_sizes: Sequence[int] | None) -> torch.Tensor:
    """(s - mean) / (std + 1e-4) over the sequences of one optimizer batch across ranks, sample std; on every token.

    [N] float64, [N, T] bool -> [N, T] float64. Sequences without a valid token stay out. Each optimizer batch is whitened
    alone: over the merged rollout it would be another objective. All-equal scores give exactly 0.
    """
    whitened = torch.zeros_like(scores)
    valid = response_mask.any(1)
    for part in _optimizer_batches(len(scores), batch_sizes):
        moments = mean_std(scores[part], valid[part], ddof=1)
        if not moments.collapsed:
            whitened[part] = (scores[part] - moments.mean) / (moments.std + GDPO_EPS)
    return torch.where(response_mask, whitened[:, None], 0.0)


def whiten_tokens(advantages: torch.Tensor, response_mask: torch.Tensor, batch_sizes: Sequence[int] | None) -> torch.Tensor:
    """(A - mean) * rsqrt(max(var, 1e-8)) over the valid tokens of one optimizer batch across ranks, population moments.

    [N, T] float64, [N, T] bool -> [N, T] float64, 0 outside the mask.
    """
    whitened = torch.zeros_like(advantages)
    for part in _optimizer_batches(len(advantages), batch_sizes):
        moments: Moments = mean_std(advantages[part], response_mask[part], ddof=0)
        if not moments.collapsed:
            whitened[part] = (advantages[part] - moments.mean) / max(moments.std**2, MIN_VARIANCE) ** 0.5
    return torch.where(response_mask, whitened, 0.0)


def token_advantages(
    name: str,
    scores: torch.Tensor,
    response_mask: torch.Tensor,
    batch_sizes: Sequence[int] | None,
    normalize_advantages: bool,
) -> torch.Tensor:
    """The batch stage of algorithm `name`: [N] float64 scores -> [N, T] float32 advantages. Uses collectives.

    response_mask [N, T] bool; batch_sizes: how many of this rank's samples, in order, belong to each optimizer batch.
    Errors: RankFailure on all ranks for a missing or malformed segmentation, or one that differs in length between ranks.
    """
    advantages = BATCH_STAGES[ALGORITHMS[name].batch_stage](scores, response_mask, batch_sizes)
    if normalize_advantages:
        advantages = whiten_tokens(advantages, response_mask, batch_sizes)

    def cast() -> torch.Tensor:
        as_float32 = advantages.to(torch.float32)
        if not torch.isfinite(as_float32).all():
            raise ValueError(f"an advantage of {advantages.abs().max().item():g} does not fit float32")
        return as_float32

    return run_together("advantages", cast)


# ---------------------------------------------------------------------------------------------- the check


class Checked(Protocol):
    """What `check` reads of the final configuration."""

    algorithm: str
    samples_per_prompt: int
    normalize_advantages: bool
    updates_per_rollout: int


def check(cfg: Checked) -> list[str]:
    """Every way in which `cfg` asks for what its algorithm cannot do: one message each, [] when there is none.

    A message says what was asked, which capability refuses it, why, and what to use instead.
    """
    if cfg.algorithm not in ALGORITHMS:
        return [f"--algorithm {cfg.algorithm}: unknown; there are {', '.join(ALGORITHMS)}"]
    algorithm = ALGORITHMS[cfg.algorithm]
    problems = []
    if cfg.samples_per_prompt < algorithm.min_group_size:
        problems.append(
            f"--samples-per-prompt {cfg.samples_per_prompt}: min_group_size = {algorithm.min_group_size} of "
            f"{cfg.algorithm}; a smaller group has no spread to compare with. Use --samples-per-prompt "
            f"{algorithm.min_group_size} or more{_others('min_group_size', lambda v: v <= cfg.samples_per_prompt)}"
        )
    if cfg.normalize_advantages and algorithm.forbids_normalize_advantages:
        problems.append(
            f"--normalize-advantages: forbids_normalize_advantages of {cfg.algorithm}; it would whiten twice or destroy "
            f"a scale kept on purpose. Drop the flag{_others('forbids_normalize_advantages', lambda v: not v)}"
        )
    if cfg.updates_per_rollout > 1 and algorithm.requires_on_policy_updates:
        problems.append(
            f"{cfg.updates_per_rollout} optimizer steps a rollout: requires_on_policy_updates of {cfg.algorithm}; its "
            "objective has no ratio to correct for an update. Use --optimizer-steps-per-rollout 1 --epochs-per-rollout 1"
            f"{_others('requires_on_policy_updates', lambda v: not v)}"
        )
    return problems


def _others(capability: str, fits: Callable[[object], bool]) -> str:
    names = [n for n, a in ALGORITHMS.items() if fits(getattr(a, capability))]
    return f", or --algorithm {'|'.join(names)}" if names else ""


def algorithm_table(algorithms: Mapping[str, Algorithm]) -> str:
    """The registry as a Markdown table: stages, loss, aggregation, KL, and each capability that is not the default."""
    defaults = {f.name: f.default for f in fields(Algorithm)}
    capabilities = list(defaults)[list(defaults).index("uses_reward_components") :]
    lines = [
        "| name | group stage | batch stage | loss | aggregation | KL | capabilities | paper |",
        "|" + " --- |" * 8,
    ]
    for name, a in algorithms.items():
        values = {c: getattr(a, c) for c in capabilities if getattr(a, c) != defaults[c]}
        said = ", ".join(c if v is True else f"{c}={v}" for c, v in values.items()) or "-"
        loss = f"{a.policy_loss}, clip {a.clip_low:g}/{a.clip_high:g}"
        lines.append(
            f"| {name} | {a.group_stage} | {a.batch_stage} | {loss} | {a.aggregation} | {a.kl or '-'} | {said} | {a.paper} |"
        )
    return "\n".join(lines)


GROUP_STAGES: dict[str, Callable] = {"grpo": grpo, "gdpo": gdpo}
BATCH_STAGES: dict[str, Callable] = {"broadcast": broadcast, "whiten_sequence": whiten_sequence}
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        group_stage="grpo",
        batch_stage="broadcast",
        policy_loss="ppo",
        aggregation="sequence_mean",
        paper="arXiv 2402.03300",
        min_group_size=2,
        forbids_reward_side_kl=True,
    ),
    "gdpo": Algorithm(
        group_stage="gdpo",
        batch_stage="whiten_sequence",
        policy_loss="ppo",
        aggregation="sequence_mean",
        paper="arXiv 2601.05242",
        uses_reward_components=True,
        min_group_size=2,
        supports_fully_async=False,
        advantage_normalization="sequence",
        forbids_normalize_advantages=True,
        requires_rewards_normalization=True,
        allows_reward_post_process_hooks=False,
        forbids_reward_side_kl=True,
    ),
}
