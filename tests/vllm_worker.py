"""Started by torchrun: the real vLLM engine beside the trainer, in one process a rank.

vllm_worker.py MODEL DTYPE OUT     rank 0 writes {what: [of each rank]}
"""

import json
import sys

import torch
from test_rollout import as_samples, trainer_logprobs
from torch.distributed.tensor import distribute_tensor

import dist_utils as du
import losses
import rollout as ro
import train

# longer than a block of the engine's prefix cache (128 tokens on CPU), so that their blocks are kept from call to call
PROMPTS = [[1, *range(1000 * i + 100, 1000 * i + 400), 198] for i in range(3)]


def gap(model, responses, temperature) -> list[float]:
    """(mean, max) of |trainer - engine| log-prob on the engine's own responses."""
    got, batch = trainer_logprobs(model, as_samples(PROMPTS, responses), temperature)
    difference = (got - batch.rollout_logprobs)[batch.response_mask].abs()
    return [difference.mean().item(), difference.max().item()]


def ids(responses) -> list:
    return [[r.token_ids for r in group] for group in responses]


def main(model_path: str, dtype_name: str, out: str) -> None:
    ranks = du.start()
    dtype = getattr(torch, dtype_name)
    engine = ro.VLLMEngine(model_path, dtype, ranks.device, ranks.rank, 512, 0.5, 1)
    model = losses.load_model(model_path)
    model = du.shard_model(model, list(model.get_decoder().layers), dtype)
    seen: dict = {}
    for temperature in (0.5, 1.5):
        sampling = ro.Sampling(3, temperature, 16, (2, 7))
        seen[f"gap at {temperature}"] = gap(model, engine.generate(PROMPTS, sampling, [1, 2, 3]), temperature)

    sampling = ro.Sampling(3, 1.0, 16, (2, 7))
    seeds = [100 * ranks.rank + i for i in range(3)]
    first = engine.generate(PROMPTS, sampling, seeds)
    seen["ids"] = ids(first)
    seen["ids again"] = ids(engine.generate(PROMPTS, sampling, seeds))
    seen["ids of other seeds"] = ids(engine.generate(PROMPTS, sampling, [s + 1000 for s in seeds]))
    # what was computed for other prompts that begin alike must not change a bit of what follows
    alike = [[*PROMPTS[0][:200], 77, 78, 79], *PROMPTS[1:]]
    engine.forget()
    before = engine.generate(PROMPTS, sampling, seeds)
    engine.forget()
    engine.generate(alike, ro.Sampling(1, 0.0, 5, (2,)), seeds)
    engine.forget()
    seen["repeats after others"] = before == engine.generate(PROMPTS, sampling, seeds)
    greedy = engine.generate(PROMPTS, ro.Sampling(1, 0.0, 4, (2,)), seeds)[0][0].token_ids
    stopped = engine.generate(PROMPTS, ro.Sampling(1, 0.0, 4, (2, greedy[1])), seeds)[0][0]
    seen["stops at any eos"] = [stopped.token_ids == greedy[: greedy.index(greedy[1]) + 1], stopped.finish_reason]

    # the weights change, embeddings (and so the tied head) most of all
    list(du.full_parameters(model, dtype))  # shards again after the forward passes above
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor()
            noise = torch.randn(full.shape, generator=torch.Generator().manual_seed(len(name))) * full.std()
            size = 0.3 if "embed" in name else 0.05
            parameter.add_(distribute_tensor(noise * size, parameter.device_mesh, parameter.placements))
    seen["gap before the push"] = gap(model, engine.generate(PROMPTS, sampling, seeds), 1.0)
    engine.load_weights(du.full_parameters(model, dtype))
    seen["gap after the push"] = gap(model, engine.generate(PROMPTS, sampling, seeds), 1.0)
    gathered = du.gather_objects(seen)
    if ranks.rank == 0:
        with open(out, "w") as f:
            json.dump({k: [g[k] for g in gathered] for k in seen}, f)
    du.run_together("the end", train.no_work)
    engine.close()
    du.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
