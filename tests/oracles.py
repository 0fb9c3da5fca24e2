"""Independent references in plain Python floats (float64): loops over samples and tokens, written from the formulas.

Nothing of the modules under test is imported. Constants are written out. Lists of lists; a mask is a list of lists of bools.
`frozen` stands for log-probs that a formula takes as constants: the gradient of an oracle is that of its first argument alone.
"""

import math
import struct


def mean(xs):
    return math.fsum(xs) / len(xs)


def std(xs, ddof):
    m = mean(xs)
    return math.sqrt(math.fsum((x - m) ** 2 for x in xs) / (len(xs) - ddof))


def float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


# ---- group stages: components [N][K] with None where a grader abstained, weights [K], groups [N]


def _members(groups):
    return {g: [i for i in range(len(groups)) if groups[i] == g] for g in groups}


def _rewards(components, weights):
    """None where every component is None."""
    return [
        None if all(x is None for x in row) else math.fsum(w * x for w, x in zip(weights, row) if x is not None)
        for row in components
    ]


def none(components, weights, groups):
    return [0.0 if r is None else r for r in _rewards(components, weights)]


def _compared(components, weights, groups, formula):
    rewards, out = _rewards(components, weights), [0.0] * len(groups)
    for members in _members(groups).values():
        scored = [i for i in members if rewards[i] is not None]
        if len({float32(rewards[i]) for i in scored}) > 1:
            for i in scored:
                out[i] = formula(rewards[i], [rewards[j] for j in scored], [rewards[j] for j in scored if j != i])
    return out


def mean_stage(components, weights, groups):
    return _compared(components, weights, groups, lambda r, every, others: r - mean(every))


def grpo(components, weights, groups):
    return _compared(components, weights, groups, lambda r, every, others: (r - mean(every)) / (std(every, 1) + 1e-6))


def rloo(components, weights, groups):
    return _compared(components, weights, groups, lambda r, every, others: r - mean(others))


def gdpo(components, weights, groups):
    out = [0.0] * len(groups)
    for members in _members(groups).values():
        for k, w in enumerate(weights):
            scored = [i for i in members if components[i][k] is not None]
            values = [components[i][k] for i in scored]
            if len(values) < 2 or max(values) == min(values):
                continue
            for i in scored:
                out[i] += w * (components[i][k] - mean(values)) / (std(values, 1) + 1e-4)
    return out


GROUP = {"none": none, "mean": mean_stage, "grpo": grpo, "rloo": rloo, "gdpo": gdpo}


# ---- batch stages: scores [N], mask [N][T], penalty [N][T], values [N][T]; one optimizer batch over all ranks


def broadcast(scores, mask, penalty=None, values=None, gamma=1.0, lam=0.95):
    return [[s if m else 0.0 for m in row] for s, row in zip(scores, mask)]


def whiten_sequence(scores, mask, penalty=None, values=None, gamma=1.0, lam=0.95):
    valid = [s for s, row in zip(scores, mask) if any(row)]
    if max(valid) == min(valid):
        return [[0.0 for _ in row] for row in mask]
    m, d = mean(valid), std(valid, 1) + 1e-4
    return [[(s - m) / d if t else 0.0 for t in row] for s, row in zip(scores, mask)]


def whiten_tokens(advantages, mask):
    valid = [a for arow, mrow in zip(advantages, mask) for a, m in zip(arow, mrow) if m]
    if max(valid) == min(valid):
        return [[0.0 for _ in row] for row in mask]
    m, d = mean(valid), math.sqrt(max(std(valid, 0) ** 2, 1e-8))
    return [[(a - m) / d if t else 0.0 for a, t in zip(arow, mrow)] for arow, mrow in zip(advantages, mask)]


def _token_reward(i, t, scores, mask, penalty):
    last = max((u for u, m in enumerate(mask[i]) if m), default=-1)
    if not mask[i][t]:
        return 0.0
    return (scores[i] if t == last else 0.0) - (penalty[i][t] if penalty is not None else 0.0)


def discounted(scores, mask, penalty, gamma):
    """Sum over every later slot u >= t, holes included in the exponent."""
    slots = range(len(mask[0]))
    return [
        [math.fsum(gamma ** (u - t) * _token_reward(i, u, scores, mask, penalty) for u in slots if u >= t) for t in slots]
        for i in range(len(mask))
    ]


def reinforce_plus_plus(scores, mask, penalty=None, values=None, gamma=1.0, lam=0.95):
    return whiten_tokens(discounted(scores, mask, penalty, gamma), mask)


def reinforce_plus_plus_baseline(scores, mask, penalty=None, values=None, gamma=1.0, lam=0.95):
    return whiten_tokens(broadcast(scores, mask), mask)


def gae(scores, mask, penalty=None, values=None, gamma=1.0, lam=0.95):
    """Over the valid tokens of a response alone, as if the other slots were not there."""
    out = [[0.0 for _ in row] for row in mask]
    for i, row in enumerate(mask):
        valid = [t for t, m in enumerate(row) if m]
        deltas = []
        for n, t in enumerate(valid):
            following = values[i][valid[n + 1]] if n + 1 < len(valid) else 0.0
            deltas.append(_token_reward(i, t, scores, mask, penalty) + gamma * following - values[i][t])
        for n, t in enumerate(valid):
            out[i][t] = math.fsum((gamma * lam) ** (k - n) * deltas[k] for k in range(n, len(valid)))
    return out


BATCH = {
    "broadcast": broadcast,
    "whiten_sequence": whiten_sequence,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}


# ---- token losses: log-probs, old, advantages, frozen [N][T]; one token at a time


def _bounded_exp(x):
    return math.exp(min(max(x, -20.0), 20.0))


def _clip(x, low, high):
    return min(max(x, low), high)


def _surrogate(ratio, a, clip_low, clip_high):
    return max(-ratio * a, -_clip(ratio, 1 - clip_low, 1 + clip_high) * a)


def ppo(i, t, lp, old, a, mask, frozen, clip_low, clip_high, dual_clip=None):
    loss = _surrogate(_bounded_exp(lp[i][t] - old[i][t]), a[i][t], clip_low, clip_high)
    return min(-dual_clip * a[i][t], loss) if dual_clip is not None and a[i][t] < 0 else loss


def gspo(i, t, lp, old, a, mask, frozen, clip_low, clip_high):
    ratio = _bounded_exp(mean([lp[i][u] - old[i][u] for u, m in enumerate(mask[i]) if m]))
    return _surrogate(ratio, a[i][t], clip_low, clip_high)


def sapo(i, t, lp, old, a, mask, frozen, tau_positive, tau_negative):
    tau = tau_positive if a[i][t] > 0 else tau_negative
    ratio = _bounded_exp(lp[i][t] - old[i][t])
    return -(4 / tau) * (1 / (1 + math.exp(-min(tau * (ratio - 1), 700.0)))) * a[i][t]


def cispo(i, t, lp, old, a, mask, frozen, clip_low, clip_high):
    return -_clip(_bounded_exp(frozen[i][t] - old[i][t]), 1 - clip_low, 1 + clip_high) * a[i][t] * lp[i][t]


def reinforce(i, t, lp, old, a, mask, frozen):
    return -a[i][t] * lp[i][t]


LOSS = {"ppo": ppo, "gspo": gspo, "sapo": sapo, "cispo": cispo, "reinforce": reinforce}


def per_token(mask, value):
    """value(i, t) where the mask is True, else 0."""
    return [[value(i, t) if m else 0.0 for t, m in enumerate(row)] for i, row in enumerate(mask)]


def policy(name, lp, old, a, mask, frozen, **numbers):
    return per_token(mask, lambda i, t: LOSS[name](i, t, lp, old, a, mask, frozen, **numbers))


def mismatch(old, roll, mask, mode, level, low, cap):
    """Weights; roll may hold nan and inf."""

    def known(i, t):
        return mask[i][t] and math.isfinite(roll[i][t])

    def weight(i, t):
        if not known(i, t):
            return 0.0
        if mode == "none":
            return 1.0
        columns = [t] if level == "token" else [u for u in range(len(mask[i])) if known(i, u)]
        ratio = _bounded_exp(math.fsum(old[i][u] - roll[i][u] for u in columns))
        if mode == "truncate":
            return min(ratio, cap)
        return ratio if low <= ratio <= cap else 0.0

    return per_token(mask, weight)


def value(values, old, returns, mask, clip):
    def token(i, t):
        bounded = old[i][t] + _clip(values[i][t] - old[i][t], -clip, clip)
        return max((bounded - returns[i][t]) ** 2, (values[i][t] - returns[i][t]) ** 2) / 2

    return per_token(mask, token)


def kl(name, logprob, base):
    x = logprob - base
    bounded = max(x, -20.0)
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-bounded) - 1 + bounded}[name]


# ---- aggregation over one optimizer batch


def aggregate(name, losses, mask, max_response_tokens):
    per_row = [math.fsum(v for v, m in zip(lrow, mrow) if m) for lrow, mrow in zip(losses, mask)]
    lengths = [sum(row) for row in mask]
    if name == "token_mean":
        return math.fsum(per_row) / sum(lengths)
    if name == "sequence_mean":
        return math.fsum(s / n if n else 0.0 for s, n in zip(per_row, lengths)) / len(mask)
    return math.fsum(per_row) / (len(mask) * max_response_tokens)


# ---- whole algorithms: group stage, batch stage, loss with its numbers, aggregation, KL (estimator, place)

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
ALGORITHMS = {
    "grpo": ("grpo", "broadcast", "ppo", CLIP, "sequence_mean", ("k3", "loss")),
    "dr_grpo": ("mean", "broadcast", "ppo", CLIP, "sequence_sum_norm", ("k3", "loss")),
    "dapo": ("grpo", "broadcast", "ppo", {"clip_low": 0.2, "clip_high": 0.28}, "token_mean", ("k3", "loss")),
    "gspo": ("grpo", "broadcast", "gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, "sequence_mean", ("k3", "loss")),
    "sapo": ("grpo", "broadcast", "sapo", {"tau_positive": 1.0, "tau_negative": 1.05}, "sequence_mean", ("k3", "loss")),
    "cispo": ("grpo", "broadcast", "cispo", CLIP, "token_mean", ("k3", "loss")),
    "rloo": ("rloo", "broadcast", "reinforce", {}, "token_mean", ("k3", "loss")),
    "reinforce_plus_plus": ("none", "reinforce_plus_plus", "ppo", CLIP, "sequence_mean", ("k1", "reward")),
    "reinforce_plus_plus_baseline": ("mean", "reinforce_plus_plus_baseline", "ppo", CLIP, "sequence_mean", ("k2", "loss")),
    "ppo": ("none", "gae", "ppo", CLIP, "token_mean", ("k1", "reward")),
    "gdpo": ("gdpo", "whiten_sequence", "ppo", CLIP, "sequence_mean", ("k3", "loss")),
}


def advantages_of(name, components, weights, groups, mask, old, ref, values, kl_coef):
    group, batch, _, _, _, (estimator, place) = ALGORITHMS[name]
    penalty = per_token(mask, lambda i, t: kl_coef * kl(estimator, old[i][t], ref[i][t])) if place == "reward" else None
    return BATCH[batch](GROUP[group](components, weights, groups), mask, penalty, values)


def objective(name, lp, advantages, mask, old, ref, roll, frozen, kl_coef, entropy, entropy_coef, max_response_tokens):
    """The scalar that is minimised, with default mismatch weights (truncated at 2, a token each)."""
    _, _, loss, numbers, aggregation, (estimator, place) = ALGORITHMS[name]
    token = policy(loss, lp, old, advantages, mask, frozen, **numbers)
    weight = mismatch(old, roll, mask, "truncate", "token", 0.5, 2.0)

    def total(i, t):
        penalty = kl_coef * kl(estimator, lp[i][t], ref[i][t]) if place == "loss" else 0.0
        return token[i][t] * weight[i][t] + penalty - entropy_coef * entropy[i][t]

    return aggregate(aggregation, per_token(mask, total), mask, max_response_tokens)


def gradient(function, point, mask, step=1e-6):
    """Central differences of `function` of a [N][T] list, 0 outside the mask."""

    def slope(i, t):
        moved = []
        for h in (step, -step):
            shifted = [list(row) for row in point]
            shifted[i][t] += h
            moved.append(function(shifted))
        return (moved[0] - moved[1]) / (2 * step)

    return per_token(mask, slope)
