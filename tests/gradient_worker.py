"""Started by torchrun: gradients of one optimizer batch through the production path, however the samples are shared out.

gradient_worker.py MODEL OUT     rank 0 writes OUT.pt {case: {parameter: full gradient}} and OUT.json {case: loss}
"""

import dataclasses
import json
import sys

import torch
from conftest import make_samples

import dist_utils as du
import losses
import train

SHARES = {  # which rank takes each of the four groups
    "even": lambda group, world: group % world,
    "last": lambda group, world: world - 1,  # every other rank has none
    "uneven": lambda group, world: 0 if group == 1 else (group + 1) % world,
}


def main(model_path: str, out: str) -> None:
    ranks = du.start()
    samples = make_samples([2, 9, 1, 4])
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(16, 9, generator=generator)
    mask = torch.ones(16, 9, dtype=torch.bool)
    mask[3] = False  # a sample that is out of the loss
    old = torch.randn(16, 9, generator=generator) * 0.1
    grads, values = {}, {}
    cfg = train.Config(dtype="float32", max_response_tokens=9)
    model = train.load_model(cfg, model_path)
    with torch.no_grad():  # smaller activations, so that float32 rounding stays under the tolerance
        for parameter in model.parameters():
            parameter.mul_(1 / 3 if parameter.ndim > 1 else 1)
    model = du.shard_model(model, list(model.get_decoder().layers), torch.float32)
    for aggregation in losses.AGGREGATIONS:
        for share, owner in SHARES.items():
            for budget in (1, 1_000_000):
                cfg = dataclasses.replace(cfg, aggregation=aggregation, micro_batch_tokens=budget)
                mine = [i for i, s in enumerate(samples) if owner(s.group, ranks.world_size) == ranks.rank]
                own = [samples[i] for i in mine]
                local = losses.form_batches(own, advantages[mine], mask[mine], [len(own)], budget, ranks.device)
                ((micro, total),) = train.agreed_batches(local, [len(own)], cfg, ranks.device)
                meter, model_loss, place = du.Meter(), 0.0, 0
                for batch in micro:
                    logprobs, _ = losses.token_logprobs(model, batch, 1.0)
                    width, count = batch.targets.shape[1], batch.targets.shape[0]
                    picked = old[mine[place : place + count]] if place < len(mine) else torch.zeros(1, 9)
                    place += count
                    batch = dataclasses.replace(batch, old_logprobs=logprobs.detach() + picked[:, :width])
                    loss = train.policy_loss(cfg, batch, logprobs, total, meter)
                    (loss * ranks.world_size).backward()
                    model_loss += loss.item()
                key = f"{aggregation}/{share}/{budget}"
                values[key] = du.sum_over_ranks(model_loss)
                grads[key] = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}
                model.zero_grad()
    if ranks.rank == 0:
        torch.save(grads, f"{out}.pt")
        with open(f"{out}.json", "w") as f:
            json.dump(values, f)
    du.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
