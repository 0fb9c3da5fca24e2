"""A reward hook for the tests of --reward-hook."""

import torch


def best_of_group(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """1 for the best sample of each group, 0 for the others."""
    best = torch.stack([rewards[groups == g].max() for g in groups])
    return (rewards == best).double()
