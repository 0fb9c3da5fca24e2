"""Algorithms, each declared once: `ALGORITHMS` maps a name to its stages, loss, aggregation and capability flags.

Public: `ALGORITHMS`, `GROUP_STAGES`, `BATCH_STAGES`, `group_scores`, `Rollout`, `token_advantages`, `has_signal`,
`measure`, `measure_shadows`, `check`, `options_of`, `formula_of`, `algorithm_table`.

Shapes: N samples of this rank, K reward components, T tokens of the longest response. Statistics are float64; the cast to
float32 is the last thing that happens. Maths: group stage within one prompt's samples on the rank that sampled them, batch
stage over one optimizer batch across ranks. The first line of a stage's docstring is its formula: a run prints it.
Not here on purpose: rewards, losses, and any comparison of an algorithm's name.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from dist_utils import Meter, agree, correlation, gather_objects, mean_std, run_together

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
    # defaults of the flags of the same names
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    kl_estimator: str = "k3"  # key of losses.KL_ESTIMATORS
    kl_place: str = "loss"  # or "reward"
    kl_coef: float = 0.0  # 0: no KL term, and no reference model
    gamma: float = 1.0
    gae_lambda: float = 0.95
    critic_lr: float = 1e-5
    critic_warmup_steps: int = 0
    value_clip: float = 0.2
    mismatch_low: float = 0.5
    mismatch_cap: float = 2.0
    dynamic_sampling: bool = False  # groups without signal are replaced by further prompts
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
    requires_kl: bool = False  # a KL penalty is part of its return: --kl-coef positive, in the reward


# ---------------------------------------------------------------------------------------------- group stage


def _each_group(groups: torch.Tensor, scored: torch.Tensor) -> list[torch.Tensor]:
    """For each prompt group, the indices of its samples under `scored` [N] bool. Row order does not matter."""
    return [((groups == g) & scored).nonzero()[:, 0] for g in groups.unique()]


def weigh(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """w_k x_ik, 0 where a component abstained: [N, K] float64."""
    return torch.where(scored, components, 0.0) * weights


def weighted_sum(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """r = sum_k w_k x_k over the components that did not abstain. [N, K] float64 -> [N] float64.

    Errors: ValueError where a sum does not fit float32, rather than a group of equal infinities without signal.
    """
    rewards = weigh(components, scored, weights).sum(1)
    if not (rewards.abs() <= FLOAT32_MAX).all():
        worst = int(rewards.abs().nan_to_num(nan=float("inf")).argmax())
        raise ValueError(
            f"the weighted sum of rewards of sample {worst} is {rewards[worst].item():g}, beyond float32; its components "
            f"are {components[worst].tolist()}, the weights {weights.tolist()}. Scale the rewards or --reward-weights down"
        )
    return rewards


def _scalar_stage(formula: Callable, components, scored, weights, groups) -> torch.Tensor:
    """`formula` ([n] float64 -> [n]) on the weighted rewards of each group; exactly 0 for a group that is equal as float32,
    for a group of one, and for a sample with nothing scored, which also stays out of its group's statistics."""
    rewards = weighted_sum(components, scored, weights)
    scores = torch.zeros_like(rewards)
    for index in _each_group(groups, scored.any(1)):
        r = rewards[index]
        if len(r) > 1 and r.float().min() != r.float().max():
            scores[index] = formula(r)
    return scores


def none(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i = sum_k w_k x_ik

    No comparison within the group (REINFORCE++, PPO: the batch stage has the baseline). [N, K] float64 -> [N] float64.
    """
    return weighted_sum(components, scored, weights)


def mean(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i - mean_g(r)

    The mean includes the sample itself (Dr.GRPO, arXiv 2503.20783). [N, K] float64 -> [N] float64.
    """
    return _scalar_stage(lambda r: r - r.mean(), components, scored, weights, groups)


def grpo(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r_i - mean_g(r)) / (std_g(r) + 1e-6)

    Sample std (GRPO, arXiv 2402.03300). [N, K] float64 -> [N] float64.
    """
    return _scalar_stage(lambda r: (r - r.mean()) / (r.std() + GRPO_EPS), components, scored, weights, groups)


def rloo(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i - mean of the other samples of g

    Leave-one-out baseline (RLOO, arXiv 2402.14740); a sample with nothing scored is no other. [N, K] float64 -> [N] float64.
    """
    return _scalar_stage(lambda r: r - (r.sum() - r) / (len(r) - 1), components, scored, weights, groups)


def gdpo(components: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """sum_k w_k (x_ik - mean_g(x_k)) / (std_g(x_k) + 1e-4)

    Sample std (GDPO, arXiv 2601.05242). [N, K] float64 -> [N] float64. A component that is constant within a group (min ==
    max in float64, never a tolerance) adds exactly 0 there; a component that abstained on a sample stays out of its group's
    statistics and adds 0. Nothing else is done to the sum.

    Known limits: components with a constant sum (x2 = C - x1) cancel for equal weights, up to a rounding residue that grows
    with C (about 2e-4 at 1e8, 2e-3 at 1e9, O(1) at 1e13 where such groups fill a batch alone); one component alone does not
    reduce to GRPO (the batch stage whitens again); with two samples a group magnitudes are lost (always +-0.7071).
    """
    scores = torch.zeros(len(groups), dtype=torch.float64)
    for k, weight in enumerate(weights):
        for index in _each_group(groups, scored[:, k]):
            x = components[index, k]
            if len(x) > 1 and x.min() != x.max():
                scores[index] += weight * (x - x.mean()) / (x.std() + GDPO_EPS)
    return scores


def group_scores(
    name: str,
    components: torch.Tensor,
    scored: torch.Tensor,
    weights: Sequence[float],
    groups: torch.Tensor,
    normalize_rewards: bool = True,
    hook: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The group stage of algorithm `name` on this rank's samples: [N, K] float64 components -> [N] float64 scores.

    scored [N, K] bool: False where a grader abstained; weights: K numbers; groups [N] int64: the prompt of each sample.
    normalize_rewards False: the weighted sum as it is. hook: (weighted sums [N] float64, groups [N]) -> scores [N], in place
    of the group stage; it sees whole groups, but this rank's alone. A sample with nothing scored has score 0 all the same.
    Errors: KeyError for an unknown algorithm; ValueError where shapes do not fit, a sum overflows, or what comes back is not N
    finite numbers.
    """
    if components.shape != scored.shape or components.shape != (len(groups), len(weights)):
        raise ValueError(
            f"components {tuple(components.shape)} and scored {tuple(scored.shape)} must be "
            f"[{len(groups)} samples, {len(weights)} weights]"
        )
    components, weights_tensor = components.double(), torch.tensor(weights, dtype=torch.float64)
    if not len(groups):
        return torch.zeros(0, dtype=torch.float64)  # a rank without samples
    if hook is None:
        source = ALGORITHMS[name].group_stage if normalize_rewards else "none"
        scores = GROUP_STAGES[source](components, scored, weights_tensor, groups)
    else:
        source = "--reward-hook"
        scores = hook(weighted_sum(components, scored, weights_tensor), groups.clone())
    try:
        scores = torch.as_tensor(scores, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{source}: expected {len(groups)} scores, got {type(scores).__name__}: {e}") from e
    if scores.shape != groups.shape or not torch.isfinite(scores).all():
        raise ValueError(
            f"{source}: expected {len(groups)} finite scores, one a sample, got {tuple(scores.shape)}: {scores.tolist()}"
        )
    return torch.where(scored.any(1), scores, 0.0)


def has_signal(scores: torch.Tensor, groups: torch.Tensor, scored: torch.Tensor) -> dict[int, bool]:
    """For each group of this rank: do its scores, as float32, differ at all? [N] float64, [N] int64, [N, K] bool.

    Samples with nothing scored do not count; a group of them has no signal.
    """
    found = {}
    for g in groups.unique():
        own = scores[(groups == g) & scored.any(1)].float()
        found[int(g)] = bool(len(own) and own.min() != own.max())
    return found


# ---------------------------------------------------------------------------------------------- batch stage


def _optimizer_batches(num_samples: int, batch_sizes: Mapping[int, int] | None) -> list[slice]:
    """Slices of this rank's samples, one an optimizer batch, once all ranks agree on which batches there are."""

    def read() -> list[slice]:
        if batch_sizes is None:
            raise ValueError("no segmentation into optimizer batches was given; it is never taken to be one batch")
        sizes = [int(s) for s in batch_sizes.values()]
        if any(s < 0 for s in sizes) or sum(sizes) != num_samples:
            raise ValueError(f"optimizer batches of {sizes} samples do not add up to the {num_samples} of this rank")
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [slice(end - size, end) for size, end in zip(sizes, ends)]

    slices = run_together("segmenting into optimizer batches", read)
    agree("the optimizer batches", list(batch_sizes))
    return slices


@dataclass(frozen=True)
class Rollout:
    """What a batch stage reads: this rank's samples, in order. Slots outside the mask may hold anything."""

    scores: torch.Tensor  # [N] float64, of the group stage
    response_mask: torch.Tensor  # [N, T] bool
    batch_sizes: Mapping[int, int] | None  # number of each optimizer batch -> how many of the samples, in order, belong to it
    penalty: torch.Tensor | None = None  # [N, T] float64, kl_coef x KL of each token; None: no KL in the reward
    values: torch.Tensor | None = None  # [N, T] float64, the critic's before the update

    def token_rewards(self) -> torch.Tensor:
        """-penalty on each valid token, and the score on the last valid one: [N, T] float64."""
        mask = self.response_mask
        rewards = torch.zeros(mask.shape, dtype=torch.float64)
        if self.penalty is not None:
            rewards = rewards - torch.where(mask, self.penalty.double(), 0.0)
        column = torch.arange(mask.shape[1]).expand(mask.shape)
        last = torch.where(mask, column, -1).amax(1, keepdim=True) if mask.shape[1] else column
        return torch.where(mask & (column == last), rewards + self.scores[:, None], rewards)


def broadcast(rollout: Rollout) -> torch.Tensor:
    """A_it = s_i on every response token

    -> [N, T] float64.
    """
    _optimizer_batches(len(rollout.scores), rollout.batch_sizes)
    return torch.where(rollout.response_mask, rollout.scores[:, None], 0.0)


def whiten_sequence(rollout: Rollout) -> torch.Tensor:
    """A_it = (s_i - mean) / (std + 1e-4) over the sequences of one optimizer batch across ranks

    Sample std; -> [N, T] float64. Sequences without a valid token stay out. Each optimizer batch is whitened alone: over the
    merged rollout it would be another objective. All-equal scores give exactly 0.
    """
    scores, mask = rollout.scores, rollout.response_mask
    whitened = torch.zeros_like(scores)
    valid = mask.any(1)
    for part in _optimizer_batches(len(scores), rollout.batch_sizes):
        moments = mean_std(scores[part], valid[part], ddof=1)
        if not moments.collapsed:
            whitened[part] = (scores[part] - moments.mean) / (moments.std + GDPO_EPS)
    return torch.where(mask, whitened[:, None], 0.0)


def whiten_tokens(advantages: torch.Tensor, response_mask: torch.Tensor, batch_sizes: Mapping[int, int] | None) -> torch.Tensor:
    """(A - mean) * rsqrt(max(var, 1e-8)) over the valid tokens of one optimizer batch across ranks, population moments.

    [N, T] float64, [N, T] bool -> [N, T] float64, 0 outside the mask.
    """
    whitened = torch.zeros_like(advantages)
    for part in _optimizer_batches(len(advantages), batch_sizes):
        moments = mean_std(advantages[part], response_mask[part], ddof=0)
        if not moments.collapsed:
            whitened[part] = (advantages[part] - moments.mean) / max(moments.std**2, MIN_VARIANCE) ** 0.5
    return torch.where(response_mask, whitened, 0.0)


def reinforce_plus_plus(rollout: Rollout, *, gamma: float) -> torch.Tensor:
    """A_it = whiten(sum_(u >= t) gamma^(u - t) (s_i at the last token - kl_coef KL_iu)) over the tokens of one optimizer batch

    REINFORCE++ (arXiv 2501.03262): returns backwards, whitened across ranks as in `whiten_tokens`; -> [N, T] float64. A hole in
    the mask has no reward of its own and carries the running return through, discounted.
    """
    rewards = rollout.token_rewards()
    returns, running = torch.zeros_like(rewards), torch.zeros_like(rollout.scores)
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
    return whiten_tokens(returns, rollout.response_mask, rollout.batch_sizes)


def reinforce_plus_plus_baseline(rollout: Rollout) -> torch.Tensor:
    """A_it = whiten(s_i on every token) over the tokens of one optimizer batch

    REINFORCE++-baseline (arXiv 2501.03262): whitened across ranks as in `whiten_tokens`; -> [N, T] float64.
    """
    spread = torch.where(rollout.response_mask, rollout.scores[:, None], 0.0)
    return whiten_tokens(spread, rollout.response_mask, rollout.batch_sizes)


def gae(rollout: Rollout, *, gamma: float, gae_lambda: float) -> torch.Tensor:
    """A_it = sum_(u >= t) (gamma lambda)^(u - t) (r_iu + gamma V_i(u+1) - V_iu), r = s_i at the last token - kl_coef KL_it

    Generalised advantage estimation (arXiv 1506.02438); -> [N, T] float64. The end of a response is terminal, V = 0 there. A
    slot outside the mask is no step: a valid token's successor is the next valid one.
    Errors: ValueError without values.
    """
    _optimizer_batches(len(rollout.scores), rollout.batch_sizes)
    if rollout.values is None:
        raise ValueError("generalised advantage estimation needs the values of a critic")
    mask, rewards, values = rollout.response_mask, rollout.token_rewards(), rollout.values.double()
    advantages = torch.zeros_like(rewards)
    running = next_value = torch.zeros_like(rollout.scores)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * gae_lambda * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], running, 0.0)
    return advantages


def token_advantages(
    name: str, rollout: Rollout, normalize_advantages: bool, **options: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The batch stage of algorithm `name`: (advantages [N, T] float32, returns [N, T] float32 or None). Uses collectives.

    options: those that the batch stage reads (`options_of`). Returns are advantage + value before any whitening, what a
    critic learns; None without values.
    Errors: RankFailure on all ranks for a missing or malformed segmentation, one that differs in length between ranks, or a
    result that is not finite.
    """
    mask = rollout.response_mask
    advantages = BATCH_STAGES[ALGORITHMS[name].batch_stage](rollout, **options)
    returns = None
    if rollout.values is not None:
        returns = torch.where(mask, advantages + rollout.values, 0.0)
    if normalize_advantages:
        advantages = whiten_tokens(advantages, mask, rollout.batch_sizes)

    def cast() -> list[torch.Tensor | None]:
        as_float32 = [x if x is None else x.to(torch.float32) for x in (advantages, returns)]
        for x in as_float32:
            if x is not None and not torch.isfinite(x).all():
                raise ValueError(f"an advantage of {advantages.abs().max().item():g} does not fit float32")
        return as_float32

    return tuple(run_together("advantages", cast))


# ---------------------------------------------------------------------------------------------- measuring


def contributions(
    name: str,
    components: torch.Tensor,
    scored: torch.Tensor,
    weights: Sequence[float],
    groups: torch.Tensor,
    scores: torch.Tensor,
) -> torch.Tensor:
    """What each component puts into the scores [N]: [N, K] float64; the sum over K is the score, where a stage compares.

    With `uses_reward_components` w_k z_ik; otherwise the centred w_k x_ik of a group, times its sum |s| / sum |r - mean|.
    """
    if ALGORITHMS[name].uses_reward_components:
        alone = [[w if k == j else 0.0 for j, w in enumerate(weights)] for k in range(len(weights))]
        return torch.stack([group_scores(name, components, scored, w, groups) for w in alone], 1)
    parts = torch.zeros_like(components)
    weighted = weigh(components, scored, torch.tensor(weights, dtype=torch.float64))
    for index in _each_group(groups, scored.any(1)):
        centred = weighted[index] - weighted[index].mean(0)
        spread = centred.sum(1).abs().sum()
        if spread > 0:
            parts[index] = centred * (scores[index].abs().sum() / spread)
    return parts


def measure(
    meter: Meter,
    names: Sequence[str],
    components: torch.Tensor,
    scored: torch.Tensor,
    weights: Sequence[float],
    groups: torch.Tensor,
    scores: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    """Metrics of a rollout's rewards and scores; names: K, parts [N, K]: `contributions`. Uses collectives, changes nothing."""
    totals = weigh(components, scored, torch.tensor(weights, dtype=torch.float64)).sum(1)
    meter.mean("reward/total", totals.sum(), len(totals))
    for k, name in enumerate(names):
        meter.mean(f"reward/{name}", components[:, k][scored[:, k]].sum(), scored[:, k].sum())
        meter.total(f"reward/{name}/abstained", (~scored[:, k]).sum())
        meter.mean(f"advantage/{name}_share", parts[:, k].abs().sum(), parts.abs().sum())
        for group in groups.unique():
            values = components[(groups == group) & scored[:, k], k]
            if len(values):  # of a group that it did not score nothing is known
                meter.mean(f"reward/{name}/zero_std", float(values.min() == values.max()), 1)
    for (j, first), (k, second) in itertools.combinations(enumerate(names), 2):
        together = correlation(components[:, j], components[:, k], scored[:, j] & scored[:, k])
        if together is not None:
            meter.mean(f"reward/{first}_{second}_correlation", together, 1)
    kept = has_signal(scores, groups, scored).values()
    meter.mean("rollout/groups_without_signal", sum(not s for s in kept), len(kept))
    for group in groups.unique():
        meter.mean("advantage/distinct_per_group", len(scores[groups == group].float().unique()), 1)
    size = parts.abs().sum(1)
    own = (parts.sum(1).abs() / size)[size > 0].tolist()
    ratios = [ratio for rank in gather_objects(own) for ratio in rank]
    if ratios:
        meter.peak("advantage/cancellation_min", min(ratios))
        meter.peak("advantage/cancellation_median", torch.tensor(ratios, dtype=torch.float64).median())


def measure_shadows(
    meter: Meter, shadows: Mapping[str, torch.Tensor], advantages: torch.Tensor, response_mask: torch.Tensor
) -> None:
    """How far other algorithms' advantages ([N, T] each) agree with those trained on, over valid tokens. Uses collectives."""
    for name, other in shadows.items():
        same = (other.sign() == advantages.sign()) & response_mask
        meter.mean(f"advantage/shadow_{name}_sign_agreement", same.sum(), response_mask.sum())
        together = correlation(other, advantages, response_mask)
        if together is not None:
            meter.mean(f"advantage/shadow_{name}_correlation", together, 1)


# ---------------------------------------------------------------------------------------------- the check


class Checked(Protocol):
    """What `check` reads of the final configuration; None: the algorithm's default."""

    algorithm: str
    samples_per_prompt: int
    normalize_advantages: bool
    normalize_rewards: bool
    reward_hook: str | None
    updates_per_rollout: int
    push_every: int
    kl_coef: float | None
    kl_place: str | None
    critic_lr: float | None
    critic_warmup_steps: int | None
    value_clip: float | None
    shadow: tuple[str, ...]


def _rules(cfg: Checked, a: Algorithm) -> list[tuple[bool, str, str]]:
    """What a configuration can ask for and a capability refuses: (refused, asked and capability, why and what instead).

    Every rule, in the same order for every algorithm `a`, so that one can be asked whether it would fit.
    """
    whitens, size, hook, plain = a.advantage_normalization, cfg.samples_per_prompt, cfg.reward_hook, not cfg.normalize_rewards
    kl_coef = a.kl_coef if cfg.kl_coef is None else cfg.kl_coef
    critic = {n: getattr(cfg, n) for n in ("critic_lr", "critic_warmup_steps", "value_clip")}
    critic_flags = " ".join(f"--{n.replace('_', '-')} {v}" for n, v in critic.items() if v is not None)
    forbids, on_policy, parts = a.forbids_normalize_advantages, a.requires_on_policy_updates, a.uses_reward_components
    twice, keep = "it whitens itself already. Use its own whitening: drop the flag", "Use its group stage: drop the flag"
    return [
        (
            size < a.min_group_size,
            f"--samples-per-prompt {size}: min_group_size = {a.min_group_size}",
            f"a smaller group has nothing to compare with. Use --samples-per-prompt {a.min_group_size} or more",
        ),
        (
            cfg.normalize_advantages and forbids,
            "--normalize-advantages: forbids_normalize_advantages",
            twice
            if whitens
            else "it would destroy a scale that is kept on purpose. Use the advantages as they are: drop the flag",
        ),
        (
            cfg.normalize_advantages and whitens is not None and not forbids,
            f"--normalize-advantages: advantage_normalization = {whitens}",
            twice,
        ),
        (
            cfg.updates_per_rollout > 1 and on_policy,
            f"{cfg.updates_per_rollout} optimizer steps a rollout: requires_on_policy_updates",
            "its objective has no ratio for an update in between. Use --optimizer-steps-per-rollout 1 --epochs-per-rollout 1",
        ),
        (
            cfg.push_every > 1 and on_policy,
            f"--push-every {cfg.push_every}: requires_on_policy_updates",
            "its objective has no ratio for samples of older weights. Use --push-every 1",
        ),
        (
            cfg.push_every > 1 and not a.supports_fully_async,
            f"--push-every {cfg.push_every}: supports_fully_async = False",
            "its advantages are statistics of one whole batch from one policy. Use --push-every 1",
        ),
        (
            plain and a.requires_rewards_normalization,
            "--no-normalize-rewards: requires_rewards_normalization",
            f"without its group stage it would be another algorithm. {keep}",
        ),
        (
            plain and GROUP_STAGES[a.group_stage] is none,
            f"--no-normalize-rewards: group_stage = {a.group_stage}",
            "it compares nothing within a group, so there is nothing to leave out. Drop the flag",
        ),
        (
            plain and parts and not a.requires_rewards_normalization,
            "--no-normalize-rewards: uses_reward_components",
            f"the weighted sum that would be left has lost the components. {keep}",
        ),
        (
            hook is not None and not a.allows_reward_post_process_hooks,
            f"--reward-hook {hook}: allows_reward_post_process_hooks = False",
            f"a hook would replace the group stage that defines it. {keep}",
        ),
        (
            hook is not None and parts and a.allows_reward_post_process_hooks,
            f"--reward-hook {hook}: uses_reward_components",
            f"a hook sees the weighted sum, not the components. {keep}",
        ),
        (
            cfg.kl_place == "reward" and a.forbids_reward_side_kl,
            "--kl-place reward: forbids_reward_side_kl",
            "its batch stage reads no KL of single tokens, so the penalty would change nothing. Use --kl-place loss",
        ),
        (
            kl_coef <= 0 and a.requires_kl,
            f"--kl-coef {kl_coef:g}: requires_kl",
            "the KL penalty is part of its return. Use --kl-coef 0.01 or another positive number",
        ),
        (
            cfg.kl_place == "loss" and a.requires_kl,
            "--kl-place loss: requires_kl",
            "the KL penalty is part of its return, which would hold none. Use --kl-place reward",
        ),
        (
            bool(critic_flags) and not a.needs_critic,
            f"{critic_flags}: needs_critic = False",
            "there is no critic that would read it. Use no such flag",
        ),
    ]


def check(cfg: Checked) -> list[str]:
    """Every way in which `cfg` asks for what its algorithm cannot do: one message each, [] when there is none.

    A message says what was asked, which capability refuses it, why, and what to use instead.
    """
    asked = (("--algorithm", cfg.algorithm), *(("--shadow", n) for n in cfg.shadow))
    unknown = [f"{flag} {n}: unknown; there are {', '.join(ALGORITHMS)}" for flag, n in asked if n not in ALGORITHMS]
    if unknown:
        return unknown
    others = {name: _rules(cfg, a) for name, a in ALGORITHMS.items()}
    problems = []
    for number, (refused, asked, why) in enumerate(others[cfg.algorithm]):
        if refused:
            fitting = [name for name, rules in others.items() if not any(rule[0] for rule in rules)]
            fitting = fitting or [name for name, rules in others.items() if not rules[number][0]]
            names = f", or --algorithm {'|'.join(fitting)}" if fitting else ""
            problems.append(f"{asked} of {cfg.algorithm} refuses it; {why}{names}")
    for name in cfg.shadow:
        a = ALGORITHMS[name]
        if a.needs_critic and not ALGORITHMS[cfg.algorithm].needs_critic:
            problems.append(
                f"--shadow {name}: needs_critic of {name} refuses it; {cfg.algorithm} has no values to lend. Drop it"
            )
        if cfg.samples_per_prompt < a.min_group_size:
            problems.append(
                f"--shadow {name}: min_group_size = {a.min_group_size} of {name} refuses it; a smaller group has nothing to "
                f"compare with. Use --samples-per-prompt {a.min_group_size} or more, or drop it"
            )
    return problems


def options_of(function: Callable) -> list[str]:
    """The numbers that a stage or a loss takes: its keyword-only parameters, each a flag and a field of `Algorithm`."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def formula_of(function: Callable) -> str:
    """The formula of a stage, loss or aggregation: the first line of its docstring."""
    return function.__doc__.splitlines()[0]


def algorithm_table(algorithms: Mapping[str, Algorithm], options: Callable[[Algorithm], Sequence[str]]) -> str:
    """The registry as a Markdown table: stages, loss, aggregation, KL, and each capability that is not the default.

    options: of an algorithm, the numbers that its loss and batch stage read.
    """
    defaults = {f.name: f.default for f in fields(Algorithm)}
    capabilities = list(defaults)[list(defaults).index("uses_reward_components") :]
    lines = [
        "| name | group stage | batch stage | loss | aggregation | KL | numbers | capabilities | paper |",
        "|" + " --- |" * 9,
    ]
    for name, a in algorithms.items():
        values = {c: getattr(a, c) for c in capabilities if getattr(a, c) != defaults[c]}
        said = ", ".join(c if v is True else f"{c}={v}" for c, v in values.items()) or "-"
        numbers = ", ".join(f"{n} {getattr(a, n):g}" for n in options(a) if getattr(a, n) is not None) or "-"
        kl = f"{a.kl_estimator} in {a.kl_place}, coef {a.kl_coef:g}"
        cells = (name, a.group_stage, a.batch_stage, a.policy_loss, a.aggregation, kl, numbers, said, a.paper)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


GROUP_STAGES: dict[str, Callable] = {"none": none, "mean": mean, "grpo": grpo, "rloo": rloo, "gdpo": gdpo}
BATCH_STAGES: dict[str, Callable] = {
    "broadcast": broadcast,
    "whiten_sequence": whiten_sequence,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}
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
    "dr_grpo": Algorithm(
        group_stage="mean",
        batch_stage="broadcast",
        policy_loss="ppo",
        aggregation="sequence_sum_norm",
        paper="arXiv 2503.20783",
        min_group_size=2,
        forbids_normalize_advantages=True,
        forbids_reward_side_kl=True,
    ),
    "dapo": Algorithm(
        group_stage="grpo",
        batch_stage="broadcast",
        policy_loss="ppo",
        aggregation="token_mean",
        paper="arXiv 2503.14476",
        clip_high=0.28,
        dynamic_sampling=True,
        min_group_size=2,
        forbids_reward_side_kl=True,
    ),
    "gspo": Algorithm(
        group_stage="grpo",
        batch_stage="broadcast",
        policy_loss="gspo",
        aggregation="sequence_mean",
        paper="arXiv 2507.18071",
        clip_low=3e-4,
        clip_high=4e-4,
        min_group_size=2,
        forbids_reward_side_kl=True,
    ),
    "sapo": Algorithm(
        group_stage="grpo",
        batch_stage="broadcast",
        policy_loss="sapo",
        aggregation="sequence_mean",
        paper="arXiv 2511.20347",
        min_group_size=2,
        forbids_reward_side_kl=True,
    ),
    "cispo": Algorithm(
        group_stage="grpo",
        batch_stage="broadcast",
        policy_loss="cispo",
        aggregation="token_mean",
        paper="arXiv 2506.13585",
        min_group_size=2,
        forbids_reward_side_kl=True,
    ),
    "rloo": Algorithm(
        group_stage="rloo",
        batch_stage="broadcast",
        policy_loss="reinforce",
        aggregation="token_mean",
        paper="arXiv 2402.14740",
        min_group_size=2,
        requires_on_policy_updates=True,
        forbids_normalize_advantages=True,
        requires_rewards_normalization=True,
        forbids_reward_side_kl=True,
    ),
    "reinforce_plus_plus": Algorithm(
        group_stage="none",
        batch_stage="reinforce_plus_plus",
        policy_loss="ppo",
        aggregation="sequence_mean",
        paper="arXiv 2501.03262",
        kl_estimator="k1",
        kl_place="reward",
        kl_coef=0.01,
        advantage_normalization="token_global",
        forbids_normalize_advantages=True,
        requires_kl=True,
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        group_stage="mean",
        batch_stage="reinforce_plus_plus_baseline",
        policy_loss="ppo",
        aggregation="sequence_mean",
        paper="arXiv 2501.03262",
        kl_estimator="k2",
        kl_coef=0.01,
        min_group_size=2,
        advantage_normalization="token_global",
        forbids_normalize_advantages=True,
        requires_rewards_normalization=True,
        allows_reward_post_process_hooks=False,
        forbids_reward_side_kl=True,
    ),
    "ppo": Algorithm(
        group_stage="none",
        batch_stage="gae",
        policy_loss="ppo",
        aggregation="token_mean",
        paper="arXiv 1707.06347",
        kl_estimator="k1",
        kl_place="reward",
        needs_critic=True,
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
