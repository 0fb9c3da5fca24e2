"""Started by torchrun: gradients of one optimizer batch through the production path, however the samples are shared out.

gradient_worker.py MODEL OUT     rank 0 writes OUT.pt {case: {parameter: full gradient}} and OUT.json {case: loss}

A case is "loss/aggregation/share/budget of a micro-batch", every policy loss with KL and entropy terms and mismatch weights,
and "value/token_mean/...", the critic's.
"""

import dataclasses
import json
import sys

import torch
from conftest import make_samples

import advantages as adv
import dist_utils as du
import losses
import train

SHARES = {  # which rank takes each of the four groups, and the budgets
    "even": (lambda group, world: group % world, (1_000_000,)),
    "last": (lambda group, world: world - 1, (1_000_000,)),  # every other rank has none
    "uneven": (lambda group, world: 0 if group == 1 else (group + 1) % world, (1,)),
}
SAMPLES = make_samples([2, 9, 1, 4], words=512)
MASK = torch.arange(9)[None] < torch.tensor([len(s.response_ids) for s in SAMPLES])[:, None]
MASK[3] = False  # a sample that is out of the loss
MASK[5, 1] = False  # a hole


def noise(seed: int, scale: float) -> torch.Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed)) * scale


ADVANTAGES, OLD, REF, ENGINE, VALUES, RETURNS = (noise(i, s) for i, s in enumerate((1.0, 0.1, 0.3, 0.5, 0.3, 1.0)))


def policy_share(cfg, model, batch, rows, total, meter) -> torch.Tensor:
    logprobs, entropy = losses.token_logprobs(model, batch, 1.0)
    base = logprobs.detach()
    old, ref, engine = (torch.where(batch.response_mask, base + batch.pick(x[rows]), 0.0) for x in (OLD, REF, ENGINE))
    filled = {"old_logprobs": old, "ref_logprobs": ref, "rollout_logprobs": engine, "advantages": batch.pick(ADVANTAGES[rows])}
    return train.policy_loss(cfg, dataclasses.replace(batch, **filled), logprobs, entropy, total, meter)


def value_share(cfg, critic, batch, rows, total, meter) -> torch.Tensor:
    batch = dataclasses.replace(batch, old_values=batch.pick(VALUES[rows]), returns=batch.pick(RETURNS[rows]))
    return train.critic_loss(cfg, batch, losses.token_values(critic, batch), total, meter)


def gradients_of(ranks: du.Ranks, cfg, model, share_of, name: str, grads: dict, values: dict) -> None:
    for share, (owner, budgets) in SHARES.items():
        for budget in budgets:
            mine = [i for i, s in enumerate(SAMPLES) if owner(s.group, ranks.world_size) == ranks.rank]
            rows = torch.tensor(mine, dtype=torch.int64)
            own = [SAMPLES[i] for i in mine]
            cfg = dataclasses.replace(cfg, micro_batch_tokens=budget)
            sizes = {0: len(own)}
            ((micro, total),) = train.form_batches(cfg, own, MASK[rows], sizes, ranks.device, du.Meter())
            loss_value = 0.0
            for batch in micro:
                loss = share_of(cfg, model, batch, rows, total, du.Meter())
                (loss * ranks.world_size).backward()
                loss_value += loss.item()
            key = f"{name}/{share}/{budget}"
            values[key] = du.sum_over_ranks(loss_value)
            grads[key] = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}
            model.zero_grad()


def compute(ranks: du.Ranks, model_path: str) -> tuple[dict, dict]:
    """({case: {parameter: full gradient}}, {case: loss})"""
    grads, values = {}, {}
    numbers = {"dual_clip": 2.0, "kl_coef": 0.3, "entropy_coef": 0.2, "mismatch_cap": 1.5, "max_response_tokens": 9}
    cfg = train.Config(algorithm="case", dtype="float32", **numbers)
    model = losses.load_model(model_path)
    model = du.shard_model(model, list(model.get_decoder().layers), torch.float32)
    for loss in losses.POLICY_LOSSES if ranks.world_size < 3 else ["ppo"]:  # three ranks share two cores
        adv.ALGORITHMS["case"] = dataclasses.replace(adv.ALGORITHMS["grpo"], policy_loss=loss)
        for aggregation in losses.AGGREGATIONS:
            case = dataclasses.replace(cfg, aggregation=aggregation)
            gradients_of(ranks, case, model, policy_share, f"{loss}/{aggregation}", grads, values)
    del adv.ALGORITHMS["case"]
    cfg = dataclasses.replace(cfg, algorithm="ppo")
    critic = train.load_critic(cfg, model_path, torch.float32)
    with torch.no_grad():  # a head that is not zero, so that the backbone learns too
        critic.head.weight.add_(0.1)
    gradients_of(ranks, cfg, critic, value_share, "value/token_mean", grads, values)
    return grads, values


def main(model_path: str, out: str) -> None:
    ranks = du.start()
    grads, values = compute(ranks, model_path)
    if ranks.rank == 0:
        torch.save(grads, f"{out}.pt")
        with open(f"{out}.json", "w") as f:
            json.dump(values, f)
    du.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
