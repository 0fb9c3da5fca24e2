"""Independent references in plain Python floats (float64): loops over samples and tokens, written from the formulas.

Nothing of the modules under test is imported. Constants are written out. Lists of lists; a mask is a list of bools.
"""

import math


def mean(xs):
    return math.fsum(xs) / len(xs)


def std(xs, ddof):
    m = mean(xs)
    return math.sqrt(math.fsum((x - m) ** 2 for x in xs) / (len(xs) - ddof))


# ---- group stages: components [N][K] with None where a grader abstained, weights [K], groups [N]


def _members(groups):
    return {g: [i for i in range(len(groups)) if groups[i] == g] for g in groups}


def grpo(components, weights, groups):
    rewards = [
        None if all(x is None for x in row) else math.fsum(w * x for w, x in zip(weights, row) if x is not None)
        for row in components
    ]
    out = [0.0] * len(groups)
    for members in _members(groups).values():
        scored = [i for i in members if rewards[i] is not None]
        values = [rewards[i] for i in scored]
        if len(values) < 2 or max(values) == min(values):
            continue
        for i in scored:
            out[i] = (rewards[i] - mean(values)) / (std(values, 1) + 1e-6)
    return out


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


# ---- batch stages: scores [N], mask [N][T]; one optimizer batch over all ranks


def broadcast(scores, mask):
    return [[s if m else 0.0 for m in row] for s, row in zip(scores, mask)]


def whiten_sequence(scores, mask):
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


# ---- token losses and KL


def ppo(logprobs, old, advantages, mask, clip_low, clip_high):
    out = []
    for i, row in enumerate(mask):
        out.append([])
        for t, m in enumerate(row):
            if not m:
                out[i].append(0.0)
                continue
            ratio = math.exp(min(max(logprobs[i][t] - old[i][t], -20.0), 20.0))
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            out[i].append(max(-ratio * advantages[i][t], -clipped * advantages[i][t]))
    return out


def kl(name, logprob, base):
    x = logprob - base
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(min(-x, 20.0)) - 1 + x}[name]


# ---- aggregation over one optimizer batch


def aggregate(name, losses, mask, max_response_tokens):
    per_row = [math.fsum(v for v, m in zip(lrow, mrow) if m) for lrow, mrow in zip(losses, mask)]
    lengths = [sum(row) for row in mask]
    if name == "token_mean":
        return math.fsum(per_row) / sum(lengths)
    if name == "sequence_mean":
        return math.fsum(s / n if n else 0.0 for s, n in zip(per_row, lengths)) / len(mask)
    return math.fsum(per_row) / (len(mask) * max_response_tokens)
