"""From sampled token ids to a loss: one packed batch layout, token log-probs, policy losses, KL, aggregation.

Public: `Batch`, `collate`, `micro_batches`, `form_batches`, `empty_batch`, `register_attention`, `token_logprobs`,
`POLICY_LOSSES`, `KL_ESTIMATORS`, `AGGREGATIONS`, `Denominators`.

Shapes: L packed tokens of a micro-batch, P prompts, B responses, T tokens of the longest response, V vocabulary.
Layout: a prompt stands once, followed by all its responses in the micro-batch; the positions of each response go on from
its prompt, and attention lets a response see its prompt and itself. Only `collate` and `packed_attention` know of this:
losses see [B, T], where column t speaks about the t-th sampled token of a response (the shift is done once, in `collate`).

Losses are pure: tensors and numbers in, (token_loss, metrics) out; a metric is a (sum, count) pair of tensors or numbers.
Not here on purpose: configuration, collectives, the optimizer. Denominators are global and come from the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PretrainedConfig

PACKED_ATTENTION = "flatrl_packed"
CHUNK = 512  # rows of [M, V] logits that are held in float32 at a time
MAX_PADDING = 8  # padded tokens in attention for each packed token; eight responses of a prompt reach about half of it
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside every clip range, far inside float32


# ---------------------------------------------------------------------------------------------- the batch


class SampleLike(Protocol):
    """What `collate` reads of a sample."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    group: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch: what the model reads (packed) and what the losses read ([B, T])."""

    input_ids: torch.Tensor  # [1, L] int64, prompts and responses; the last token of a response is never an input
    position_ids: torch.Tensor  # [1, L] int64, a response goes on from the end of its prompt
    prompt_index: torch.Tensor  # [P, Tp] int64, packed position of each prompt token; padding points at 0
    response_index: torch.Tensor  # [B, T-1] int64, packed position of each response token that is an input
    response_prompt: torch.Tensor  # [B] int64, row of `prompt_index` that a response belongs to
    visible: torch.Tensor  # [B, 1, T-1, Tp+T-1] bool, which prompt and response inputs a response input attends to
    unpack_index: torch.Tensor  # [L] int64, where a packed position stands in [prompts flat | responses flat]
    logit_index: torch.Tensor  # [B, T] int64, packed position whose logits predict target t
    targets: torch.Tensor  # [B, T] int64, the sampled tokens
    response_mask: torch.Tensor  # [B, T] bool, True on each sampled token that is trained on, EOS included
    rollout_logprobs: torch.Tensor  # [B, T] fp32, the engine's, when it sampled
    advantages: torch.Tensor  # [B, T] fp32
    old_logprobs: torch.Tensor | None = None  # [B, T] fp32, the trainer's before the first update; None: same weights

    def validate(self) -> None:
        """Raise AssertionError where the pieces do not fit each other."""
        length = self.input_ids.shape[1]
        assert self.position_ids.shape == (1, length), "position_ids and input_ids differ in shape"
        assert self.targets.shape == self.response_mask.shape == self.logit_index.shape, "targets, mask, logit_index"
        for name in ("rollout_logprobs", "advantages", "old_logprobs"):
            value = getattr(self, name)
            assert value is None or (value.shape, value.dtype) == (self.targets.shape, torch.float32), name
        assert int(self.logit_index.max()) < length, "logit_index points outside the packed row"
        assert torch.isfinite(self.advantages[self.response_mask]).all(), "an advantage is not finite"

    @property
    def num_tokens(self) -> int:
        """Response tokens trained on."""
        return int(self.response_mask.sum())


def _pad(rows: Sequence[Sequence], value: float, dtype: torch.dtype) -> torch.Tensor:
    """Right-pad rows to the longest: [len(rows), max length]."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype)


def _lengths_mask(lengths: Sequence[int], width: int) -> torch.Tensor:
    """[len(lengths), width] bool, True on the first `lengths[i]` columns of row i."""
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def collate(
    samples: Sequence[SampleLike], advantages: torch.Tensor, response_mask: torch.Tensor, device: torch.device
) -> Batch:
    """Samples to one packed micro-batch; neighbours of the same group share their prompt.

    samples: B of them, each with at least one prompt token and one response token.
    advantages [B, >=T] fp32 and response_mask [B, >=T] bool: rows as in `samples`, columns are response tokens.
    """
    input_ids, positions, prompts, responses, response_prompt, logit_index = [], [], [], [], [], []
    group = None
    for sample in samples:
        if sample.group != group:
            group = sample.group
            prompts.append(range(len(input_ids), len(input_ids) + len(sample.prompt_ids)))
            input_ids += sample.prompt_ids
            positions += range(len(sample.prompt_ids))
        inputs = sample.response_ids[:-1]  # nothing follows the last token
        responses.append(range(len(input_ids), len(input_ids) + len(inputs)))
        response_prompt.append(len(prompts) - 1)
        logit_index.append([prompts[-1][-1], *responses[-1]])
        input_ids += inputs
        positions += range(len(sample.prompt_ids), len(sample.prompt_ids) + len(inputs))

    prompt_index, response_index = _pad(prompts, 0, torch.int64), _pad(responses, 0, torch.int64)
    prompt_mask = _lengths_mask([len(p) for p in prompts], prompt_index.shape[1])  # [P, Tp]
    input_mask = _lengths_mask([len(r) for r in responses], response_index.shape[1])  # [B, T-1]
    parent = torch.tensor(response_prompt)  # [B]
    width = response_index.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()[None].expand(len(samples), -1, -1)
    seen_prompt = prompt_mask[parent][:, None, :].expand(-1, width, -1)
    unpack_index = torch.empty(len(input_ids), dtype=torch.int64)
    flat = torch.arange(prompt_mask.numel() + input_mask.numel())
    unpack_index[torch.cat([prompt_index[prompt_mask], response_index[input_mask]])] = flat[
        torch.cat([prompt_mask.flatten(), input_mask.flatten()])
    ]
    targets = _pad([s.response_ids for s in samples], 0, torch.int64)
    columns = targets.shape[1]
    batch = Batch(
        input_ids=torch.tensor(input_ids)[None],
        position_ids=torch.tensor(positions)[None],
        prompt_index=prompt_index,
        response_index=response_index,
        response_prompt=parent,
        visible=torch.cat([seen_prompt, causal], dim=2)[:, None],
        unpack_index=unpack_index,
        logit_index=_pad(logit_index, 0, torch.int64),
        targets=targets,
        response_mask=response_mask[:, :columns] & _lengths_mask([len(s.response_ids) for s in samples], columns),
        rollout_logprobs=_pad([s.logprobs for s in samples], 0.0, torch.float32),
        advantages=advantages[:, :columns].to(torch.float32),
    )
    batch.validate()
    return Batch(**{k: v if v is None else v.to(device) for k, v in vars(batch).items()})


def micro_batches(samples: Sequence[SampleLike], max_tokens: int) -> list[list[int]]:
    """Split samples (neighbours of a group share their prompt) into index lists of at most `max_tokens` packed tokens.

    Attention pads to the longest prompt and response, so a micro-batch also holds at most MAX_PADDING x `max_tokens`
    padded tokens: one long response among many short ones starts another. A single sample always has its place.
    """
    splits: list[list[int]] = []
    used, longest, group = 0, 0, None
    for i, sample in enumerate(samples):
        length = len(sample.prompt_ids) + len(sample.response_ids)
        cost = len(sample.response_ids) if sample.group == group else length
        longest = max(longest, length)
        if not splits or used + cost > max_tokens or (len(splits[-1]) + 1) * longest > MAX_PADDING * max_tokens:
            splits.append([])
            used, cost, longest = 0, length, length
        splits[-1].append(i)
        used, group = used + cost, sample.group
    return splits


def form_batches(
    samples: Sequence[SampleLike],
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    batch_sizes: Sequence[int],
    max_tokens: int,
    device: torch.device,
) -> list[list[Batch]]:
    """This rank's samples, in order, as optimizer batches of `batch_sizes` samples, each cut into micro-batches.

    advantages [N, >=T] fp32, response_mask [N, >=T] bool. An optimizer batch without a sample has no micro-batch.
    """
    batches, start = [], 0
    for size in batch_sizes:
        splits = micro_batches(samples[start : start + size], max_tokens)
        rows = [[start + i for i in split] for split in splits]
        batches.append([collate([samples[i] for i in r], advantages[r], response_mask[r], device) for r in rows])
        start += size
    return batches


def empty_batch(device: torch.device) -> Batch:
    """A micro-batch without a token to train on: what a rank computes while another one still has work."""
    nothing = SimpleNamespace(prompt_ids=[0], response_ids=[0], logprobs=[0.0], group=0)
    return collate([nothing], torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool), device)


# ---------------------------------------------------------------------------------------------- token log-probs


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    prompt_index: torch.Tensor,
    response_index: torch.Tensor,
    response_prompt: torch.Tensor,
    visible: torch.Tensor,
    unpack_index: torch.Tensor,
    **unused,
) -> tuple[torch.Tensor, None]:
    """Exact attention over a packed row, in two calls: prompts (causal), then responses over their prompt and themselves.

    query [1, H, L, D], key and value [1, Hkv, L, D]; the other tensors as in `Batch`. Returns ([1, L, H, D], None).
    """

    def rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # [1, h, L, D] -> [rows, h, columns, D]
        picked = x[0].index_select(1, index.flatten())
        return picked.unflatten(1, index.shape).transpose(0, 1)

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    prompt_key, prompt_value = rows(key, prompt_index), rows(value, prompt_index)
    outputs = [
        F.scaled_dot_product_attention(rows(query, prompt_index), prompt_key, prompt_value, is_causal=True, scale=scaling)
    ]
    if response_index.numel():
        keys = torch.cat([prompt_key.index_select(0, response_prompt), rows(key, response_index)], dim=2)
        values = torch.cat([prompt_value.index_select(0, response_prompt), rows(value, response_index)], dim=2)
        outputs.append(
            F.scaled_dot_product_attention(rows(query, response_index), keys, values, attn_mask=visible, scale=scaling)
        )
    flat = torch.cat([o.transpose(1, 2).flatten(0, 1) for o in outputs])  # [P*Tp + B*(T-1), H, D]
    return flat.index_select(0, unpack_index)[None], None


def register_attention(config: PretrainedConfig) -> str:
    """Make `packed_attention` known to transformers and return its name for `attn_implementation`.

    Errors: ValueError for models whose attention is not plain causal attention, which packing would change silently.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    softcap = getattr(text, "attn_logit_softcapping", None)
    odd = [f"layer types {sorted(kinds)}"] if kinds != {"full_attention"} else []
    odd += [f"a sliding window of {window}"] if window else []
    odd += [f"attention soft-capping {softcap}"] if softcap else []
    if odd:
        raise ValueError(
            f"--model: {text.model_type} uses {' and '.join(odd)}; training packs prompts and responses into one row, "
            "which is exact for plain causal attention only. Use a model with full attention in every layer "
            "(Llama, Qwen2.5, Qwen3, SmolLM2, ...)"
        )
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


class _TargetLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature) at the targets, and the entropy, `CHUNK` rows at a time.

    The only [M, V] tensors alive are the logits and, in the backward pass, their gradient, both in the model's dtype; the
    float32 work happens on a chunk. d logp_m / d logits_mv = (1[v = target] - softmax_mv) / temperature.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        normalizers, picked, entropies = [], [], []
        for part, target in zip(logits.split(CHUNK), targets.split(CHUNK)):
            scaled = part.float() / temperature  # [m, V]
            normalizer = torch.logsumexp(scaled, dim=-1)
            picked.append(scaled.gather(1, target[:, None])[:, 0] - normalizer)
            entropies.append(normalizer - (torch.softmax(scaled, dim=-1) * scaled).sum(-1))
            normalizers.append(normalizer)
        ctx.save_for_backward(logits, targets, torch.cat(normalizers))
        ctx.temperature = temperature
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(picked), entropy

    @staticmethod
    def backward(ctx, grad_picked: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, normalizers = ctx.saved_tensors
        grad = torch.empty_like(logits)
        parts = (t.split(CHUNK) for t in (logits, targets, normalizers, grad_picked, grad))
        for part, target, normalizer, scale, out in zip(*parts):
            scale = scale[:, None] / ctx.temperature  # [m, 1]
            softmax = (part.float() / ctx.temperature - normalizer[:, None]).exp_()
            softmax.mul_(-scale).scatter_add_(1, target[:, None], scale)
            out.copy_(softmax)
        return grad, None, None


def token_logprobs(model: torch.nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens, log_softmax(logits / temperature), and the entropy of that distribution.

    Only positions under `response_mask` go through the output head; both results are [B, T] fp32 and 0 elsewhere.
    The entropy carries no gradient.
    """
    mask = batch.response_mask
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        logits_to_keep=batch.logit_index[mask],
        use_cache=False,
        prompt_index=batch.prompt_index,
        response_index=batch.response_index,
        response_prompt=batch.response_prompt,
        visible=batch.visible,
        unpack_index=batch.unpack_index,
    ).logits[0]  # [num_tokens, V]
    picked, entropy = _TargetLogprobs.apply(logits, batch.targets[mask], temperature)
    zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return zeros.masked_scatter(mask, picked), zeros.masked_scatter(mask, entropy)


# ---------------------------------------------------------------------------------------------- policy losses


def log_ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs - base_logprobs, bounded to +-MAX_LOG_RATIO before any exp; exactly 0 (no gradient) where masked out."""
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, base_logprobs, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict]:
    """Clipped surrogate of PPO (arXiv 1707.06347), asymmetric as in DAPO (arXiv 2503.14476).

        ratio = exp(logprobs - old_logprobs);  loss = max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A)

    All tensors [B, T]; returns (token loss [B, T], metrics). With ratio = 1 the gradient is REINFORCE's.
    """
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp()
    advantages = torch.where(response_mask, advantages, 0.0)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    count = response_mask.sum()
    with torch.no_grad():
        low = (ratio < 1 - clip_low) & (advantages < 0) & response_mask
        high = (ratio > 1 + clip_high) & (advantages > 0) & response_mask
        metrics = {
            "policy/ratio": (torch.where(response_mask, ratio, 0.0).sum(), count),
            "policy/clip_fraction_low": (low.sum(), count),
            "policy/clip_fraction_high": (high.sum(), count),
        }
    return token_loss, metrics


# ---------------------------------------------------------------------------------------------- KL


def k1(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """x = logprobs - base_logprobs (http://joschu.net/blog/kl-approx.html). Any shape."""
    return logprobs - base_logprobs


def k2(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """x^2 / 2, x as in `k1`."""
    return (logprobs - base_logprobs).square() / 2


def k3(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(-x) - 1 + x, x as in `k1`; -x is bounded before exp, so that value and gradient stay finite."""
    x = logprobs - base_logprobs
    return (-x).clamp(max=MAX_LOG_RATIO).exp() - 1 + x


# ---------------------------------------------------------------------------------------------- aggregation


@dataclass(frozen=True)
class Denominators:
    """Sizes of one optimizer batch over all micro-batches and ranks, so that no split changes the gradient."""

    num_sequences: int
    num_tokens: int
    max_response_tokens: int  # a constant of the run, not of the batch


def token_mean(token_loss: torch.Tensor, response_mask: torch.Tensor, total: Denominators) -> torch.Tensor:
    """sum m l / sum m: this micro-batch's share ([B, T] -> scalar); shares add up over micro-batches and ranks."""
    return torch.where(response_mask, token_loss, 0.0).sum() / max(total.num_tokens, 1)


def sequence_mean(token_loss: torch.Tensor, response_mask: torch.Tensor, total: Denominators) -> torch.Tensor:
    """(1/N) sum_i mean_t: the share of this micro-batch. An empty response adds 0 and still counts in N."""
    lengths = response_mask.sum(1).clamp(min=1)
    return (torch.where(response_mask, token_loss, 0.0).sum(1) / lengths).sum() / total.num_sequences


def sequence_sum_norm(token_loss: torch.Tensor, response_mask: torch.Tensor, total: Denominators) -> torch.Tensor:
    """sum m l / (N * max_response_tokens) (Dr.GRPO, arXiv 2503.20783): the share of this micro-batch."""
    summed = torch.where(response_mask, token_loss, 0.0).sum()
    return summed / (total.num_sequences * total.max_response_tokens)


POLICY_LOSSES: dict[str, Callable] = {"ppo": ppo}
KL_ESTIMATORS: dict[str, Callable] = {"k1": k1, "k2": k2, "k3": k3}
AGGREGATIONS: dict[str, Callable] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum_norm": sequence_sum_norm,
}
