"""Started by torchrun: what each rank sees of the primitives.

dist_worker.py MODEL OUT     rank 0 writes {case: [what each rank got]}
"""

import json
import sys

import torch

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
    learner.step(float("inf"), du.Meter())
    moved = [(p.detach().to_local() != b).float().mean().item() for p, b in zip(model.parameters(), before) if b.numel()]
    state = [str(v.dtype) for s in learner.optimizer.state.values() for k, v in s.items() if k != "step"]
    return [[*state, *(str(p.dtype) for p in model.parameters())], min(moved)]


def answers_of(ranks: du.Ranks, model_path: str) -> dict:
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
    }
    return {name: du.gather_objects(attempt(case)) for name, case in cases.items()}


def main(model_path: str, out: str) -> None:
    ranks = du.start()
    answers = answers_of(ranks, model_path)
    if ranks.rank == 0:
        with open(out, "w") as f:
            json.dump(answers, f)
    du.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
