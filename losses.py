"""From sampled token ids to a loss: one packed batch layout, token log-probs and values, policy and value losses, KL.

Public: `Batch`, `collate`, `micro_batches`, `form_batches`, `empty_batch`, `save_batches`, `load_batches`, `load_model`,
`register_attention`, `token_logprobs`,
`Critic`, `token_values`, `POLICY_LOSSES`, `policy_metrics`, `mismatch_weight`, `engine_gap`, `value_loss`,
`MISMATCH_CORRECTIONS`, `KL_ESTIMATORS`, `kl_to`, `AGGREGATIONS`, `Denominators`.

Shapes: L packed tokens of a micro-batch, P prompts, B responses, T tokens of the longest response, V vocabulary.
Layout: a prompt stands once, followed by all its responses in the micro-batch; the positions of each response go on from
its prompt, and attention lets a response see its prompt and itself. Only `collate` and `packed_attention` know of this:
losses see [B, T], where column t speaks about the t-th sampled token of a response (the shift is done once, in `collate`).

Losses are pure: tensors and numbers in, (token_loss, metrics) out; a metric is a (sum, count) pair of tensors or numbers. The
first line of a loss' docstring is its formula, which a run prints; its keyword-only parameters are flags.
Not here on purpose: configuration, collectives, the optimizer. Denominators are global and come from the caller.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

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
    rows: slice  # its responses among this rank's samples; empty for a filler
    # filled in before the update, each [B, T] fp32
    advantages: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None  # the trainer's before the first update; None: the first forward pass gives them
    ref_logprobs: torch.Tensor | None = None  # the reference model's; None: no KL term
    old_values: torch.Tensor | None = None  # the critic's before the first update; None: no critic
    returns: torch.Tensor | None = None  # what the critic learns

    def validate(self) -> None:
        """Raise AssertionError where the pieces do not fit each other."""
        length = self.input_ids.shape[1]
        assert self.position_ids.shape == (1, length), "position_ids and input_ids differ in shape"
        assert self.targets.shape == self.response_mask.shape == self.logit_index.shape, "targets, mask, logit_index"
        for name in ("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "old_values", "returns"):
            value = getattr(self, name)
            assert value is None or (value.shape, value.dtype) == (self.targets.shape, torch.float32), name
        assert int(self.logit_index.max()) < length, "logit_index points outside the packed row"
        for name in ("advantages", "returns"):
            value = getattr(self, name)
            assert value is None or torch.isfinite(value[self.response_mask]).all(), f"{name} are not finite"

    @property
    def num_tokens(self) -> int:
        """Response tokens trained on."""
        return int(self.response_mask.sum())

    def pick(self, per_sample: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of a [N, >=T] tensor over the rank's samples: [B, T] fp32, on its device; 0 for a filler."""
        part = torch.zeros(self.targets.shape, dtype=torch.float32)
        rows = per_sample[self.rows, : part.shape[1]].to(torch.float32)
        part[: len(rows)] = rows
        return part.to(self.targets.device)

    def put(self, part: torch.Tensor, per_sample: torch.Tensor) -> None:
        """The way back: write [B, T] into the [N, >=T] tensor, where the mask is True."""
        rows = slice(0, self.rows.stop - self.rows.start)
        mask = self.response_mask[rows].cpu()
        target = per_sample[self.rows, : part.shape[1]]
        target[mask] = part[rows].detach().cpu().to(per_sample.dtype)[mask]


def _pad(rows: Sequence[Sequence], value: float, dtype: torch.dtype) -> torch.Tensor:
    """Right-pad rows to the longest: [len(rows), max length]."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype)


def _lengths_mask(lengths: Sequence[int], width: int) -> torch.Tensor:
    """[len(lengths), width] bool, True on the first `lengths[i]` columns of row i."""
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def collate(
    samples: Sequence[SampleLike], response_mask: torch.Tensor, device: torch.device, rows: slice = slice(0, 0)
) -> Batch:
    """Samples to one packed micro-batch; neighbours of the same group share their prompt.

    samples: B of them, each with at least one prompt token and one response token; `rows` among the rank's samples.
    response_mask [B, >=T] bool: rows as in `samples`, columns are response tokens.
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
        rows=rows,
    )
    batch.validate()
    return Batch(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()})


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
    response_mask: torch.Tensor,
    batch_sizes: Sequence[int],
    max_tokens: int,
    device: torch.device,
) -> list[list[Batch]]:
    """This rank's samples, in order, as optimizer batches of `batch_sizes` samples, each cut into micro-batches.

    response_mask [N, >=T] bool. An optimizer batch without a sample has no micro-batch.
    """
    batches, start = [], 0
    for size in batch_sizes:
        splits = micro_batches(samples[start : start + size], max_tokens)
        rows = [slice(start + split[0], start + split[-1] + 1) for split in splits]
        batches.append([collate(samples[r], response_mask[r], device, r) for r in rows])
        start += size
    return batches


def empty_batch(device: torch.device) -> Batch:
    """A micro-batch without a token to train on: what a rank computes while another one still has work."""
    nothing = SimpleNamespace(prompt_ids=[0], response_ids=[0], logprobs=[0.0], group=0)
    return collate([nothing], torch.zeros(1, 1, dtype=torch.bool), device)


def save_batches(path: Path, batches: list[tuple[list[Batch], "Denominators"]]) -> None:
    """This rank's micro-batches of every optimizer batch, with the global denominators, as one safetensors file."""
    tensors, layout = {}, []
    for number, (micro, total) in enumerate(batches):
        layout.append({"total": dataclasses.asdict(total), "rows": [(b.rows.start, b.rows.stop) for b in micro]})
        for i, batch in enumerate(micro):
            fields = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
            tensors |= {f"{number}.{i}.{name}": value.detach().cpu().clone() for name, value in fields.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"layout": json.dumps(layout)})


def load_batches(path: Path, device: torch.device) -> list[tuple[list[Batch], "Denominators"]]:
    """What `save_batches` wrote."""
    with safe_open(path, "pt") as f:
        layout = json.loads(f.metadata()["layout"])
        tensors = {name: f.get_tensor(name).to(device) for name in f.keys()}  # noqa: SIM118 (it is no dict)
    batches = []
    for number, each in enumerate(layout):
        micro = []
        for i, rows in enumerate(each["rows"]):
            start = f"{number}.{i}."
            fields = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            micro.append(Batch(rows=slice(*rows), **fields))
        batches.append((micro, Denominators(**each["total"])))
    return batches


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


def load_model(model_path: str, dtype: torch.dtype = torch.float32, activation_checkpointing: bool = False) -> torch.nn.Module:
    """A causal language model on the CPU, with packed attention and no dropout, not yet sharded."""
    attention = register_attention(AutoConfig.from_pretrained(model_path, trust_remote_code=False))
    how = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(model_path, **how)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # train() is for checkpointing alone: log-probs must not be noisy
    return model.train()


class _TargetLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature) at the targets, and the entropy H, `CHUNK` rows at a time.

    The only [M, V] tensors alive are the logits and, in the backward pass, their gradient, both in the model's dtype; the
    float32 work happens on a chunk. With p = softmax(logits / temperature):
    d logp_m / d logits_mv = (1[v = target] - p_mv) / temperature;  d H_m / d logits_mv = -p_mv (log p_mv + H_m) / temperature.
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
        entropy = torch.cat(entropies)
        ctx.save_for_backward(logits, targets, torch.cat(normalizers), entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # no gradient is None: an unused entropy costs nothing
        return torch.cat(picked), entropy

    @staticmethod
    def backward(ctx, grad_picked: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple:
        logits, targets, normalizers, entropy = ctx.saved_tensors
        grad_picked = torch.zeros_like(normalizers) if grad_picked is None else grad_picked
        grad_entropy = entropy.new_zeros(0) if grad_entropy is None else grad_entropy
        grad = torch.empty_like(logits)
        for start in range(0, len(logits), CHUNK):
            part = slice(start, start + CHUNK)
            scale = grad_picked[part, None] / ctx.temperature  # [m, 1]
            logp = logits[part].float() / ctx.temperature - normalizers[part, None]  # [m, V]
            if len(grad_entropy):
                coefficient = scale + (logp + entropy[part, None]) * (grad_entropy[part, None] / ctx.temperature)
                out = logp.exp_().mul_(-coefficient)
            else:
                out = logp.exp_().mul_(-scale)
            grad[part] = out.scatter_add_(1, targets[part, None], scale)
        return grad, None, None


def _model_inputs(batch: Batch) -> dict:
    """What a model with packed attention reads of a batch."""
    names = ("input_ids", "position_ids", "prompt_index", "response_index", "response_prompt", "visible", "unpack_index")
    return {name: getattr(batch, name) for name in names} | {"use_cache": False}


def token_logprobs(model: torch.nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens, log_softmax(logits / temperature), and the entropy of that distribution.

    Only positions under `response_mask` go through the output head; both results are [B, T] fp32 with gradients, 0 elsewhere.
    """
    mask = batch.response_mask
    logits = model(logits_to_keep=batch.logit_index[mask], **_model_inputs(batch)).logits[0]  # [num_tokens, V]
    picked, entropy = _TargetLogprobs.apply(logits, batch.targets[mask], temperature)
    zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return zeros.masked_scatter(mask, picked), zeros.masked_scatter(mask, entropy)


class Critic(torch.nn.Module):
    """A backbone of its own with a linear head, which starts at 0: the value of the state before each response token."""

    def __init__(self, backbone: torch.nn.Module, hidden_size: int):
        super().__init__()
        self.backbone = backbone
        self.head = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, keep: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """keep [M] int64, packed positions -> [M, 1] values."""
        return self.head(self.backbone(**inputs).last_hidden_state[0, keep])


def token_values(critic: Critic, batch: Batch) -> torch.Tensor:
    """V of the state in which each response token was sampled: [B, T] fp32, 0 outside the mask."""
    mask = batch.response_mask
    values = critic(batch.logit_index[mask], **_model_inputs(batch))[:, 0].float()
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values)


# ---------------------------------------------------------------------------------------------- policy losses


def log_ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs - base_logprobs, bounded to +-MAX_LOG_RATIO before any exp; exactly 0 (no gradient) where masked out."""
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, base_logprobs, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clip_metrics(low: torch.Tensor, high: torch.Tensor, response_mask: torch.Tensor) -> dict:
    """Shares of tokens that the lower and the upper end of the clip range hold, both [B, T] bool."""
    count = response_mask.sum()
    return {
        "policy/clip_fraction_low": ((low & response_mask).sum(), count),
        "policy/clip_fraction_high": ((high & response_mask).sum(), count),
    }


def _clipped_surrogate(ratio, advantages, response_mask, clip_low, clip_high) -> tuple[torch.Tensor, dict]:
    advantages = torch.where(response_mask, advantages, 0.0)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    low = (ratio < 1 - clip_low) & (advantages < 0)  # the surrogate is flat there
    high = (ratio > 1 + clip_high) & (advantages > 0)
    return token_loss, _clip_metrics(low, high, response_mask)


def ppo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, dict]:
    """l_it = max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A), with dual_clip d: min(that, -d A) where A < 0

    ratio = exp(logprobs - old_logprobs). Clipped surrogate of PPO (arXiv 1707.06347), asymmetric as in DAPO (arXiv 2503.14476),
    dual clip of arXiv 1912.09729. All tensors [B, T]; returns (token loss [B, T], metrics). With ratio = 1 the gradient is
    REINFORCE's.
    """
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp()
    token_loss, metrics = _clipped_surrogate(ratio, advantages, response_mask, clip_low, clip_high)
    if dual_clip is not None:
        advantages = torch.where(response_mask, advantages, 0.0)
        bound = -dual_clip * advantages
        beyond = (advantages < 0) & (token_loss > bound)
        token_loss = torch.where(beyond, bound, token_loss)
        metrics["policy/dual_clip_fraction"] = (beyond.sum(), response_mask.sum())
    return token_loss, metrics


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict]:
    """l_it = max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(mean_t(logprobs - old_logprobs)) of i

    Group sequence policy optimisation (arXiv 2507.18071); the gradient goes through the mean. All tensors [B, T]; returns
    (token loss [B, T], metrics). With one token a response it is `ppo`.
    """
    difference = torch.where(response_mask, logprobs, 0.0) - torch.where(response_mask, old_logprobs, 0.0)
    mean = difference.sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand(logprobs.shape)
    return _clipped_surrogate(ratio, advantages, response_mask, clip_low, clip_high)


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> tuple[torch.Tensor, dict]:
    """l_it = -(4 / tau) sigmoid(tau (ratio - 1)) A, tau = tau_positive where A > 0, else tau_negative

    Soft adaptive policy optimisation (arXiv 2511.20347): a gate in place of a clip. All tensors [B, T]; returns (token loss
    [B, T], no metrics). With ratio = 1 the gradient is REINFORCE's.
    """
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp()
    advantages = torch.where(response_mask, advantages, 0.0)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, {}


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict]:
    """l_it = -stopgrad(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprobs

    Clipped importance-sampling weights (CISPO, arXiv 2506.13585): every token keeps a gradient. All tensors [B, T]; returns
    (token loss [B, T], metrics). With ratio = 1 it is `reinforce`.
    """
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp().detach()
    advantages = torch.where(response_mask, advantages, 0.0)
    token_loss = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * torch.where(response_mask, logprobs, 0.0)
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high  # whatever the sign of A
    return token_loss, _clip_metrics(low, high, response_mask)


def reinforce(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, dict]:
    """l_it = -A logprobs

    No ratio (Williams 1992): `old_logprobs` are not read. All tensors [B, T]; returns (token loss [B, T], no metrics).
    """
    return -torch.where(response_mask, advantages, 0.0) * torch.where(response_mask, logprobs, 0.0), {}


def policy_metrics(logprobs: torch.Tensor, old_logprobs: torch.Tensor, response_mask: torch.Tensor) -> dict:
    """The ratio, and how many log-ratios had to be bounded: whatever the loss does with them."""
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp()
    count = response_mask.sum()
    beyond = ((logprobs - old_logprobs).abs() > MAX_LOG_RATIO) & response_mask
    return {
        "policy/ratio": (torch.where(response_mask, ratio, 0.0).sum(), count),
        "policy/bounded_log_ratio": (beyond.sum(), count),
    }


# ---------------------------------------------------------------------------------------------- engine against trainer


def truncate(ratio: torch.Tensor, *, mismatch_cap: float) -> torch.Tensor:
    """min(q, mismatch_cap)

    Truncated importance sampling. Any shape.
    """
    return ratio.clamp(max=mismatch_cap)


def mask_outside(ratio: torch.Tensor, *, mismatch_low: float, mismatch_cap: float) -> torch.Tensor:
    """q where mismatch_low <= q <= mismatch_cap, else 0

    As in IcePop. Any shape.
    """
    return torch.where((ratio >= mismatch_low) & (ratio <= mismatch_cap), ratio, 0.0)


def trust(ratio: torch.Tensor) -> torch.Tensor:
    """1

    The engine's log-probs as good as the trainer's. Any shape.
    """
    return torch.ones_like(ratio)


def mismatch_weight(
    correction: Callable,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    whole_sequence: bool,
    **numbers: float,
) -> tuple[torch.Tensor, dict]:
    """Weight of each token's policy loss for the engine's log-probs not being the trainer's: [B, T], without gradient.

        q = exp(old_logprobs - rollout_logprobs) of a token, or the product over its response

    correction: an entry of MISMATCH_CORRECTIONS, with its numbers. A token whose engine log-prob is not finite has weight 0
    whatever it says, and is no part of its response's product. All [B, T]; also returns metrics.
    """
    known = response_mask & torch.isfinite(rollout_logprobs)
    difference = torch.where(known, old_logprobs, 0.0) - torch.where(known, rollout_logprobs, 0.0)
    if whole_sequence:
        difference = difference.sum(1, keepdim=True).expand(difference.shape)
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    weight = torch.where(known, correction(ratio, **numbers), 0.0)
    count = response_mask.sum()
    metrics = {
        "policy/mismatch_weight": (weight.sum(), count),
        "policy/mismatch_outside": (((weight != ratio) & response_mask).sum(), count),
    }
    return weight, metrics


def engine_gap(logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, response_mask: torch.Tensor) -> tuple[dict, float]:
    """How far the trainer's log-probs are from the engine's on its own samples: (metrics, largest abs difference)."""
    known = response_mask & torch.isfinite(rollout_logprobs)
    both = known & torch.isfinite(logprobs)  # a trainer's that is not gives a loss that is not, and no update
    trainer, engine = logprobs[both], rollout_logprobs[both]
    gap = (trainer - engine).abs()
    metrics = {
        "rollout/logprob_diff": (gap.sum(), gap.numel()),
        "rollout/kl_k3": (k3(engine, trainer).sum(), gap.numel()),
        "rollout/nonfinite_logprobs": ((response_mask & ~known).sum(), response_mask.sum()),
    }
    return metrics, float(gap.max()) if gap.numel() else 0.0


# ---------------------------------------------------------------------------------------------- value loss


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    value_clip: float,
) -> tuple[torch.Tensor, dict]:
    """l_it = max((V_clip - R)^2, (V - R)^2) / 2, V_clip = V_old + clip(V - V_old, -value_clip, value_clip)

    Clipped value loss of PPO. All tensors [B, T]; returns (token loss [B, T], metrics).
    """
    values, old_values, returns = (torch.where(response_mask, x, 0.0) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain, bounded = (values - returns).square(), (clipped - returns).square()
    metrics = {"loss/value_clip_fraction": (((bounded > plain) & response_mask).sum(), response_mask.sum())}
    return torch.maximum(plain, bounded) / 2, metrics


# ---------------------------------------------------------------------------------------------- KL


def k1(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """x = logprobs - base_logprobs

    Any shape (http://joschu.net/blog/kl-approx.html). In a loss its expected gradient is 0.
    """
    return logprobs - base_logprobs


def k2(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """x^2 / 2, x = logprobs - base_logprobs"""
    return (logprobs - base_logprobs).square() / 2


def k3(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(-x) - 1 + x, x = logprobs - base_logprobs

    x is bounded from below before exp, so that value and gradient stay finite; below the bound the gradient is 0.
    """
    x = (logprobs - base_logprobs).clamp(min=-MAX_LOG_RATIO)
    return (-x).exp() - 1 + x


def kl_to(estimator: str, logprobs: torch.Tensor, base_logprobs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """The estimate for each token, 0 outside the mask whatever stands there: [B, T]."""
    inside = (torch.where(response_mask, x, 0.0) for x in (logprobs, base_logprobs))
    return torch.where(response_mask, KL_ESTIMATORS[estimator](*inside), 0.0)


# ---------------------------------------------------------------------------------------------- aggregation


@dataclass(frozen=True)
class Denominators:
    """Sizes of one optimizer batch over all micro-batches and ranks, so that no split changes the gradient."""

    num_sequences: int
    num_tokens: int
    max_response_tokens: int  # a constant of the run, not of the batch


def token_mean(token_loss: torch.Tensor, response_mask: torch.Tensor, total: Denominators) -> torch.Tensor:
    """sum_it m l / sum_it m

    This micro-batch's share ([B, T] -> scalar); shares add up over micro-batches and ranks. No token anywhere: 0.
    """
    return torch.where(response_mask, token_loss, 0.0).sum() / max(total.num_tokens, 1)


def sequence_mean(token_loss: torch.Tensor, response_mask: torch.Tensor, total: Denominators) -> torch.Tensor:
    """(1 / N) sum_i (sum_t m l / T_i)

    The share of this micro-batch. An empty response adds 0 and still counts in N.
    """
    lengths = response_mask.sum(1).clamp(min=1)
    return (torch.where(response_mask, token_loss, 0.0).sum(1) / lengths).sum() / total.num_sequences


def sequence_sum_norm(token_loss: torch.Tensor, response_mask: torch.Tensor, total: Denominators) -> torch.Tensor:
    """sum_it m l / (N max_response_tokens)

    Dr.GRPO (arXiv 2503.20783): the share of this micro-batch.
    """
    summed = torch.where(response_mask, token_loss, 0.0).sum()
    return summed / (total.num_sequences * total.max_response_tokens)


POLICY_LOSSES: dict[str, Callable] = {"ppo": ppo, "gspo": gspo, "sapo": sapo, "cispo": cispo, "reinforce": reinforce}
MISMATCH_CORRECTIONS: dict[str, Callable] = {"truncate": truncate, "mask": mask_outside, "none": trust}
KL_ESTIMATORS: dict[str, Callable] = {"k1": k1, "k2": k2, "k3": k3}
AGGREGATIONS: dict[str, Callable] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum_norm": sequence_sum_norm,
}
