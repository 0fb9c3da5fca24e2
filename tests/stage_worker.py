"""Started by torchrun: batch stages through the production call, one case after another.

stage_worker.py OUT     rank 0 writes {case: [what each rank got: [N][T] advantages, or the error's text]}
"""

import json
import sys

import torch

import advantages as adv
import dist_utils as du

FMAX = torch.finfo(torch.float32).max


def split(values: list, ranks: du.Ranks, sizes: tuple[int, ...] | None = None) -> list:
    """This rank's share: contiguous, uneven; `sizes` names the shares of two ranks."""
    if ranks.world_size == 1:
        return values
    if sizes is None:
        sizes = {2: (1, len(values) - 1), 3: (2, 0, len(values) - 2)}[ranks.world_size]
    start = sum(sizes[: ranks.rank])
    return values[start : start + (sizes[ranks.rank] if ranks.rank < len(sizes) else 0)]


def whiten(s: list, sizes=(), mask: list | None = None, name: str = "gdpo", normalize: bool = False) -> list:
    mask = [[1, 1]] * len(s) if mask is None else mask
    mask = torch.tensor(mask, dtype=torch.bool).reshape(len(s), -1 if s else 3)
    sizes = [len(s)] if sizes == () else sizes
    return adv.token_advantages(name, torch.tensor(s, dtype=torch.float64), mask, sizes, normalize).tolist()


def grouped(columns: list, weights: list, groups: list) -> list:
    components = torch.tensor(columns, dtype=torch.float64).T
    return adv.group_scores("gdpo", components, torch.ones_like(components).bool(), weights, torch.tensor(groups)).tolist()


def one_process() -> dict:
    batches = [0.9, 1.1, 0.8, 1.2, -1.2, -0.8, -1.1, -0.9]
    return {
        "two groups": lambda: whiten(grouped([[1, 0, 1, 0], [3, 3, 1, 0]], [1.0, 1.0], [0, 0, 1, 1])),
        "largest floats": lambda: whiten([-FMAX, FMAX]),
        "huge weights": lambda: whiten(grouped([[0, 1, 2], [0, 1, 2]], [3e38, 3e38], [0, 0, 0])),
        "small weights": lambda: whiten(grouped([[1, 1, 0, 0], [1, 0, 1, 0]], [1e-4, 1e-4], [0] * 4)),
        "weights of one": lambda: whiten(grouped([[1, 1, 0, 0], [1, 0, 1, 0]], [1.0, 1.0], [0] * 4)),
        "two batches": lambda: whiten(batches, [4, 4]),
        "merged batches": lambda: whiten(batches, [8]),
    }


def many(ranks: du.Ranks) -> dict:
    s, mask = [0.5, -1.5, 2.0, 0.25, 1.0], [[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]]
    own, own_mask = split(s, ranks), split(mask, ranks)
    last = ranks.rank == ranks.world_size - 1
    return {
        "all equal": lambda: whiten(split([0.1, 0.1, 0.1], ranks)),
        "uneven lengths": lambda: whiten(own, mask=own_mask),
        "uneven lengths, tokens": lambda: whiten(own, mask=own_mask, name="grpo", normalize=True),
        "13|26": lambda: whiten(split([1.0, 3.0, 2.0, 6.0], ranks, (2, 2))),
        "13|": lambda: whiten(split([1.0, 3.0], ranks, (2, 0))),
        "segment counts differ": lambda: whiten([1.0, 2.0], [1, 1] if last else [2]),
        "a list against None": lambda: whiten([1.0, 2.0], None if last else [2]),
        "malformed on one rank": lambda: whiten([1.0, 2.0], [3] if last else [2]),
        "inf on one rank": lambda: whiten([1.0, float("inf") if last else 2.0]),
        "nothing valid anywhere": lambda: whiten([1.0, 2.0], mask=[[0, 0], [0, 0]]),
    }


def main(out: str) -> None:
    ranks = du.start()
    answers = {}
    for case, run in ((one_process() if ranks.world_size == 1 else {}) | many(ranks)).items():
        try:
            mine = run()
        except Exception as e:
            mine = f"{type(e).__name__}: {e}"
        answers[case] = du.gather_objects(mine)
    if ranks.rank == 0:
        with open(out, "w") as f:
            json.dump(answers, f)
    du.leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
