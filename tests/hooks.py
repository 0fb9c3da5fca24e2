"""A reward hook, and functions that do not fit, for the tests of --reward-hook and --rewards."""

import torch


def best_of_group(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """1 for the best sample of each group, 0 for the others."""
    best = torch.stack([rewards[groups == g].max() for g in groups])
    return (rewards == best).double()


def three(response, row, more):
    """It takes one argument too many."""


def needs(response, row, *, width):
    """A setting that is no flag."""


class Unfit:
    """Its instances take one argument."""

    def __call__(self, response):
        return 1.0


class Mute:
    """Its instances cannot be called."""


class Wants:
    """It is made with an argument that is no setting."""

    def __init__(self, path):
        self.path = path

    def __call__(self, response, row):
        return 1.0
