"""Started by torchrun: batch stages through the production call, one case after another.

stage_worker.py OUT     rank 0 writes {case: [what each rank got: [N][T] advantages, or the error's text]}
"""

import json
import sys

import torch

import advantages as adv
import dist_utils as du

FMAX = torch.finfo(torch.float32).max
STAGE_OF = {a.batch_stage: name for name, a in reversed(adv.ALGORITHMS.items())}  # an algorithm for each batch stage
SCORES = [0.5, -1.5, 2.0, 0.25, 1.0]
MASK = [[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]]
PENALTY = [[0.1, 9, 9], [0.2, -0.1, 0.05], [0, 0.3, 9], [9, 9, 9], [0.1, 9, -0.2]]
VALUES = [[0.4, 7, 7], [0.1, 0.2, -0.3], [1.0, 0.5, 7], [7, 7, 7], [0.3, 7, 0.6]]
NUMBERS = {"gamma": 0.9, "gae_lambda": 0.8}


def split(values: list, ranks: du.Ranks, sizes: tuple[int, ...] | None = None) -> list:
    """This rank's share: contiguous, uneven; `sizes` names the shares of two ranks."""
    if ranks.world_size == 1:
        return values
    if sizes is None:
        sizes = {2: (1, len(values) - 1), 3: (2, 0, len(values) - 2)}[ranks.world_size]
    start = sum(sizes[: ranks.rank])
    return values[start : start + (sizes[ranks.rank] if ranks.rank < len(sizes) else 0)]


def sizes_of(s: list, sizes) -> dict | None:
    """() is one optimizer batch of all; a list is numbered from 0."""
    sizes = [len(s)] if sizes == () else sizes
    return dict(enumerate(sizes)) if isinstance(sizes, list) else sizes


def stage(s: list, sizes=(), mask: list | None = None, name: str = "gdpo", penalty=None, values=None, normalize=False) -> list:
    mask = [[1, 1]] * len(s) if mask is None else mask
    mask = torch.tensor(mask, dtype=torch.bool).reshape(len(s), -1 if s else 3)
    tensors = [None if x is None else torch.tensor(x, dtype=torch.float64).reshape(mask.shape) for x in (penalty, values)]
    a = adv.ALGORITHMS[name]
    if a.needs_critic and values is None:
        tensors[1] = torch.zeros(mask.shape, dtype=torch.float64)
    rollout = adv.Rollout(torch.tensor(s, dtype=torch.float64), mask, sizes_of(s, sizes), *tensors)
    numbers = {n: NUMBERS[n] for n in adv.options_of(adv.BATCH_STAGES[a.batch_stage])}
    return adv.token_advantages(name, rollout, normalize, **numbers)[0].tolist()


def grouped(columns: list, weights: list, groups: list) -> list:
    components = torch.tensor(columns, dtype=torch.float64).T
    return adv.group_scores("gdpo", components, torch.ones_like(components).bool(), weights, torch.tensor(groups)).tolist()


def one_process() -> dict:
    batches = [0.9, 1.1, 0.8, 1.2, -1.2, -0.8, -1.1, -0.9]
    return {
        "two groups": lambda: stage(grouped([[1, 0, 1, 0], [3, 3, 1, 0]], [1.0, 1.0], [0, 0, 1, 1])),
        "largest floats": lambda: stage([-FMAX, FMAX]),
        "huge weights": lambda: stage(grouped([[0, 1, 2], [0, 1, 2]], [3e38, 3e38], [0, 0, 0])),
        "small weights": lambda: stage(grouped([[1, 1, 0, 0], [1, 0, 1, 0]], [1e-4, 1e-4], [0] * 4)),
        "weights of one": lambda: stage(grouped([[1, 1, 0, 0], [1, 0, 1, 0]], [1.0, 1.0], [0] * 4)),
        "two batches": lambda: stage(batches, [4, 4]),
        "merged batches": lambda: stage(batches, [8]),
    }


def many(ranks: du.Ranks) -> dict:
    last = ranks.rank == ranks.world_size - 1
    cases = {
        "all equal": lambda: stage(split([0.1, 0.1, 0.1], ranks)),
        "13|26": lambda: stage(split([1.0, 3.0, 2.0, 6.0], ranks, (2, 2))),
        "13|": lambda: stage(split([1.0, 3.0], ranks, (2, 0))),
        "13|26 of two batches": lambda: stage([1.0, 3.0] if ranks.rank == 0 else [2.0, 6.0], [1, 1]),
        "uneven lengths, grpo, normalized": lambda: stage(
            split(SCORES, ranks), mask=split(MASK, ranks), name="grpo", normalize=True
        ),
    }
    for batch_stage, name in STAGE_OF.items():
        share = {"mask": split(MASK, ranks), "penalty": split(PENALTY, ranks), "values": split(VALUES, ranks), "name": name}
        cases |= {
            f"uneven lengths, {batch_stage}": lambda share=share: stage(split(SCORES, ranks), **share),
            f"segment counts differ, {batch_stage}": lambda name=name: stage([1.0, 2.0], [1, 1] if last else [2], name=name),
            f"batches in another order, {batch_stage}": lambda name=name: stage(
                [1.0, 2.0], {1: 1, 0: 1} if last else {0: 1, 1: 1}, name=name
            ),
            f"a list against None, {batch_stage}": lambda name=name: stage([1.0, 2.0], None if last else [2], name=name),
            f"malformed on one rank, {batch_stage}": lambda name=name: stage([1.0, 2.0], [3] if last else [2], name=name),
            f"inf on one rank, {batch_stage}": lambda name=name: stage([1.0, float("inf") if last else 2.0], name=name),
            f"nothing valid anywhere, {batch_stage}": lambda name=name: stage([1.0, 2.0], mask=[[0, 0], [0, 0]], name=name),
        }
    return cases


def answers_of(ranks: du.Ranks) -> dict:
    answers = {}
    for case, run in ((one_process() if ranks.world_size == 1 else {}) | many(ranks)).items():
        try:
            mine = run()
        except Exception as e:
            mine = f"{type(e).__name__}: {e}"
        answers[case] = du.gather_objects(mine)
    return answers


def main(out: str) -> None:
    ranks = du.start()
    answers = answers_of(ranks)
    if ranks.rank == 0:
        with open(out, "w") as f:
            json.dump(answers, f)
    du.leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
