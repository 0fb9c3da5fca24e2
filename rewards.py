"""Reward functions and the matrix of reward components that they fill.

Public: `REWARDS`, `score`, `parse_weights`, `final_answer`, `numbers_in`, `gold_number`,
`load_function`.

A reward function takes `(response, row)`: the response's text, cut before the end-of-sequence token, and the data set's row
with `question`, `answer` and `scorer` besides its own columns; it returns a number, or None to abstain. N samples, K rewards.
Not here on purpose: weighting and normalising (advantages.py), and token ids: text is for graders and logs only.
"""

import difflib
import functools
import importlib.util
import math
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

FLOAT32_MAX = torch.finfo(torch.float32).max
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# a minus sign counts unless something stands before it that it subtracts from; commas only between groups of three digits
NUMBER = re.compile(r"(?:(?<![\w).])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


# ---------------------------------------------------------------------------------------------- reading an answer


def final_answer(response: str) -> str:
    """What a response says its answer is: the last answer tag, else what follows the last `####`, else the last
    \\boxed{...}, else the whole text. The whole response is searched, however much follows the answer."""
    tags = ANSWER_TAG.findall(response)
    if tags:
        return tags[-1].strip()
    if "####" in response:
        return response.rpartition("####")[2].strip().split("\n")[0]
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", response)
    return boxed[-1].strip() if boxed else response.strip()


def numbers_in(text: str) -> list[float]:
    """Every number in the text, thousands separators allowed."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(text.replace("\u2212", "-"))]


def gold_number(answer: object) -> float | None:
    """The target of a GSM8K answer: the last number after the last `####`; of a bare answer: its only number, else None."""
    _, mark, said = str(answer).rpartition("####")
    found = numbers_in(said)
    return found[-1] if found and (mark or len(found) == 1) else None


# ---------------------------------------------------------------------------------------------- reward functions


_warned: set[str] = set()  # tasks whose scorer has failed on an answer


@functools.cache
def _reasoning_gym_scorer(task: str) -> Callable:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def correctness(response: str, row: Mapping) -> float | None:
    """The data set's own score of the final answer, named by the row's `scorer`.

    `rg:<task>`: reasoning-gym's scorer of that task, in [0, 1], on the answer tag's content (or the whole response without
    one); an answer that this scorer cannot read scores 0, which is said once a task. `number`: 1 where the last number of
    the final answer equals the target, else 0; abstains where the data set's answer is no single number.
    """
    kind, _, task = row["scorer"].partition(":")
    answer = final_answer(response)
    if kind == "rg":
        try:
            return _reasoning_gym_scorer(task)(answer=answer, entry=row)
        except Exception as e:
            if task not in _warned:
                _warned.add(task)
                print(f"reward correctness: rg:{task} cannot read {answer[:80]!r} ({e!r}): 0; said once", file=sys.stderr)
            return 0.0
    gold, said = gold_number(row["answer"]), numbers_in(answer)
    if gold is None:
        return None
    return float(bool(said) and math.isclose(said[-1], gold, rel_tol=0, abs_tol=1e-6))


def format_tag(response: str, row: Mapping) -> float:
    """1 where the response holds exactly one <answer>...</answer> that is not empty and no stray tag, else 0."""
    tags = ANSWER_TAG.findall(response)
    whole = response.count("<answer>") == 1 and response.count("</answer>") == 1
    return float(whole and len(tags) == 1 and bool(tags[0].strip()))


# ---------------------------------------------------------------------------------------------- the matrix


def _component(name: str, value: object) -> tuple[float, bool]:
    """(value as float64, whether it was scored), checked. Errors: ValueError naming the function and what it returned."""
    if value is None:
        return 0.0, False
    if not isinstance(value, numbers.Real) and type(value).__name__ not in ("bool_", "bool"):
        raise ValueError(f"reward {name!r} returned {value!r} of type {type(value).__name__}; expected a number or None")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"reward {name!r} returned {number}, which is not finite")
    if abs(number) > FLOAT32_MAX:
        raise ValueError(f"reward {name!r} returned {number:g}, beyond float32")
    return number, True


def score(names: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every reward function on every sample: components [N, K] float64 and scored [N, K] bool (False: it abstained).

    Errors: ValueError for a result that is no finite number within float32; whatever a reward function raises.
    """
    components = torch.zeros(len(responses), len(names), dtype=torch.float64)
    scored = torch.zeros(len(responses), len(names), dtype=torch.bool)
    for k, name in enumerate(names):
        for i, (response, row) in enumerate(zip(responses, rows, strict=True)):
            value, counts = _component(name, REWARDS[name](response, row))
            components[i, k], scored[i, k] = value, counts
    return components, scored


def load_function(place: str, flag: str = "--reward-hook") -> Callable:
    """The function at `path.py:name`; the file is run. Errors: ValueError naming `flag`, the file and what is wrong."""
    path, _, name = place.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"{flag} {place}: expected path.py:function")
    try:
        spec = importlib.util.spec_from_file_location(f"user_{Path(path).stem}", Path(path).expanduser())
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise ValueError(f"{flag} {place}: running {path} (seen from {Path.cwd()}) gave {type(e).__name__}: {e}") from e
    found = getattr(module, name, None)
    if not callable(found):
        functions = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise ValueError(f"{flag} {place}: {path} has no function {name}; it has {', '.join(functions) or 'none'}")
    return found


def parse_weights(names: Sequence[str], weights: Sequence[str]) -> list[float]:
    """`name=weight` texts to one weight a reward, in the order of `names`; a reward that is not named has weight 1.

    Errors: ValueError for an unknown reward, an unreadable, non-finite or too large weight, or when all are zero as float32.
    """
    unknown = [n for n in names if n not in REWARDS]
    if unknown:
        near = [m for n in unknown for m in difflib.get_close_matches(n, REWARDS, n=1)]
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        raise ValueError(f"--rewards {' '.join(unknown)}: unknown{hint}; there are {', '.join(REWARDS)}")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"--rewards {' '.join(names)}: name at least one reward, each once")
    parsed = dict.fromkeys(names, 1.0)
    for text in weights:
        name, equals, number = text.partition("=")
        if not equals or name not in parsed:
            raise ValueError(f"--reward-weights {text}: expected name=number with a name out of {', '.join(names)}")
        try:
            parsed[name] = float(number)
        except ValueError:
            raise ValueError(f"--reward-weights {text}: {number!r} is not a number") from None
        if not abs(parsed[name]) <= FLOAT32_MAX:
            raise ValueError(f"--reward-weights {text}: the weight must be finite and fit float32")
    if not torch.tensor(list(parsed.values()), dtype=torch.float32).any():
        raise ValueError(f"--reward-weights {' '.join(weights)}: all weights are zero as float32, so nothing is rewarded")
    return list(parsed.values())


REWARDS: dict[str, Callable[[str, Mapping], float | None]] = {"correctness": correctness, "format": format_tag}
