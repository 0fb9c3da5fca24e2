"""Started by torchrun: what each rank sees of the primitives.

dist_worker.py MODEL OUT     rank 0 writes {case: [what each rank got]}
"""

import json
import math
import resource
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dist_utils as du
import losses


def attempt(work) -> object:
    try:
        return work()
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def close_together(ranks: du.Ranks) -> list:
    values = torch.tensor([10000, 10000.001, 10000.002, 10000.003, float("nan")], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False])
    if ranks.world_size == 2:  # three and one
        mask &= torch.tensor([ranks.rank == 0] * 3 + [ranks.rank == 1] * 2)
    m = du.mean_std(values, mask, ddof=1)
    return [m.mean, m.std, m.count, m.min, m.max]


def correlated(ranks: du.Ranks) -> list:
    first = torch.tensor([1.0, 2.0, 3.0, 5.0, float("nan")], dtype=torch.float64)
    second = torch.tensor([2.0, 1.0, 4.0, 3.0, float("inf")], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False])
    if ranks.world_size == 2:
        mask &= torch.tensor([ranks.rank == 0] * 3 + [ranks.rank == 1] * 2)
    return [
        du.correlation(first, second, mask),
        du.correlation(first, torch.ones(5), mask),
        du.correlation(first, first, mask < 0),
    ]


def meter(ranks: du.Ranks) -> dict:
    m = du.Meter()
    m.mean("m", float(ranks.rank), 1 + ranks.rank)
    m.total("t", ranks.rank)
    m.peak("p", ranks.rank)
    return m.reduce()


def optimizer(model_path: str, ranks: du.Ranks) -> list:
    model = losses.load_model(model_path)
    model = du.shard_model(model, list(model.get_decoder().layers), torch.bfloat16)
    learner = du.Learner(model, 1e-6, 1, "constant", 0, 0.999, 0.0)
    before = [p.detach().to_local().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    learner.step(0.0, float("inf"), du.Meter())
    moved = [(p.detach().to_local() != b).float().mean().item() for p, b in zip(model.parameters(), before) if b.numel()]
    state = [str(v.dtype) for s in learner.optimizer.state.values() for k, v in s.items() if k != "step"]
    return [[*state, *(str(p.dtype) for p in model.parameters())], min(moved)]


def learner_of(model_path: str) -> du.Learner:
    """A critic: it has a parameter of one row, of which another rank than the first has nothing."""
    backbone = losses.load_model(model_path).get_decoder()
    model = losses.Critic(backbone, backbone.config.hidden_size)
    model = du.shard_model(model, list(backbone.layers), torch.bfloat16, exact=[model.head])
    return du.Learner(model, 1e-2, 9, "linear", 0, 0.999, 0.1)


def make_step(learner: du.Learner, seed: int, loss: float = 0.0, gradient: float = 1.0) -> bool:
    """One optimizer step on gradients that depend on the seed; `gradient` is an element of it on this rank."""
    generator = torch.Generator().manual_seed(seed)
    for p in learner.model.parameters():
        p.grad = distribute_tensor(torch.randn(p.shape, generator=generator), p.device_mesh, p.placements)
    next(learner.model.parameters()).grad.to_local()[0, 0] = gradient
    return learner.step(loss, 1.0, du.Meter())


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full copies. A collective."""
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in tensors.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def skipped(model_path: str, ranks: du.Ranks) -> list:
    """What a loss or a gradient that is not finite on the last rank alone leaves: steps made, counters, and all as it was."""
    last, found = ranks.rank == ranks.world_size - 1, []
    learner = learner_of(model_path)
    make_step(learner, 0)
    before = whole(learner.tensors())
    bad = {"loss": math.nan}, {"loss": -math.inf}, {"gradient": math.nan}, {"gradient": math.inf}
    for number, poison in enumerate(bad, 1):
        found.append(make_step(learner, number, **(poison if last else {})))
    found += [learner.num_skipped, learner.num_updates, equal(before, whole(learner.tensors()))]
    return [*found, make_step(learner, 9), learner.num_skipped, equal(before, whole(learner.tensors()))]


def saved(model_path: str, ranks: du.Ranks, folder: Path, in_background: bool) -> list:
    """Whether what is loaded is what was there when `save` was called, and goes on as if nothing had been."""
    learner, other = learner_of(model_path), learner_of(model_path)
    checkpoints = du.Checkpoints(folder / str(in_background), 2, in_background)
    make_step(learner, 0)
    checkpoints.save(1, {f"a.{k}": t for k, t in learner.tensors().items()}, {"run": "x", "step": 1})
    before = whole(learner.tensors())
    make_step(learner, 1)
    checkpoints.finish()
    names = [n.removeprefix("a.") for n in du.tensor_sizes(checkpoints.path(1))]
    du.load_checkpoint(checkpoints.path(1), {f"a.{k}": t for k, t in other.tensors(names).items()})
    found = [checkpoints.find("x")["step"], equal(before, whole(other.tensors()))]
    other.num_updates = 1
    make_step(other, 1)
    return [*found, equal(whole(learner.tensors()), whole(other.tensors()))]


def one_cannot_write(ranks: du.Ranks, folder: Path) -> str:
    """A disk that is full for the last rank's share: what it is told, and what is left."""
    checkpoints = du.Checkpoints(folder / "full")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks.world_size,))
    tensors = {"a.b.c": distribute_tensor(torch.arange(40000.0), mesh, [Shard(0)])}
    checkpoints.save(1, tensors, {"run": "x", "step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == ranks.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, before[1]))
    try:
        said = attempt(lambda: checkpoints.save(2, tensors, {"run": "x", "step": 2}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    du.gather_objects(None)  # rank 0 has tidied up
    return f"{said} {sorted(p.name for p in checkpoints.folder.iterdir())}"


def answers_of(ranks: du.Ranks, model_path: str, folder: Path) -> dict:
    last = ranks.rank == 1

    def fails() -> None:
        if last:
            raise ValueError("the ninth row")

    def exits() -> None:
        if last:
            sys.exit(3)

    cases = {
        "close together": lambda: close_together(ranks),
        "one fails": lambda: du.run_together("grading", fails),
        "one exits": lambda: du.run_together("grading", exits),
        "after that": lambda: du.gather_objects(ranks.rank),
        "agree": lambda: du.agree("the rows", 7) or "ok",
        "disagree": lambda: du.agree("the rows", ranks.rank),
        "correlation": lambda: correlated(ranks),
        "meter": lambda: meter(ranks),
        "optimizer": lambda: optimizer(model_path, ranks),
        "skipped": lambda: skipped(model_path, ranks),
        "saved": lambda: saved(model_path, ranks, folder, False),
        "saved in the background": lambda: saved(model_path, ranks, folder, True),
        "one cannot write": lambda: one_cannot_write(ranks, folder),
    }
    return {name: du.gather_objects(attempt(case)) for name, case in cases.items()}


def main(model_path: str, out: str) -> None:
    ranks = du.start()
    answers = answers_of(ranks, model_path, Path(out).parent / "2")
    if ranks.rank == 0:
        with open(out, "w") as f:
            json.dump(answers, f)
    du.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
