"""Reward functions, and the killable processes that run them.

Public: `REWARDS`, `Reward`, `resolve`, `component_names`, `reward_table`,
`parse_weights`, `Graders`, `Graded`, `load_function`, `pass_at_k`,
and the built-in graders with what they read answers by (`final_answer`, `boxed`, `numbers_in`, `gold_number`).

A reward function takes `(response, row)`: the response's text, cut before the end-of-sequence token, and the data set's row,
with `question`, `answer`, `scorer`, `response_tokens` and `finish_reason` besides its own columns. It returns a number, None to
abstain, or, where its `Reward` declares components, a mapping of them. N samples, K components.
Graders' processes import this file and not torch, which is imported where it is needed: they start in a tenth of a second.
Not here on purpose: weighting and normalising (advantages.py), and token ids: text is for graders and logs only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import difflib
import functools
import importlib.util
import inspect
import json
import logging
import math
import numbers
import os
import pickle
import re
import resource
import signal
import socket
import string
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# a minus sign counts unless something stands before it that it subtracts from; commas only between groups of three digits
NUMBER = re.compile(r"(?:(?<![\w).])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


@dataclass(frozen=True)
class Reward:
    """A reward function and what it is."""

    function: Callable  # or async; or a class, made once in each worker with its settings, whose instances are called
    batched: bool = False  # takes (responses, rows) of all samples of a rank, and returns one value for each
    components: tuple[str, ...] = ()  # keys of the mapping that it returns; none: it returns a number
    range: tuple[float, float] | None = None  # smallest and largest value that it may return
    in_process: bool = False  # runs in the training process, without a deadline: for trusted models only
    warm_up: tuple[str, Mapping] | None = None  # an example, called once before workers are forked: what it loads, they have
    place: str | None = None  # path.py:name of a user's own

    def __post_init__(self) -> None:
        """Errors: ValueError for what cannot be a reward."""
        if not callable(self.function):
            raise ValueError(f"Reward({self.function!r:.100}): expected a function or a class")
        names = self.components
        if not isinstance(names, tuple) or len(set(names)) != len(names) or not all(map(str.isidentifier, names)):
            raise ValueError(f"Reward(components={names!r:.200}): expected a tuple of different names of letters, digits and _")
        if self.range is not None and not self.range[0] <= self.range[1]:
            raise ValueError(f"Reward(range={self.range}): expected (smallest, largest)")

    @property
    def is_async(self) -> bool:
        """Whether all samples of a rank are awaited together."""
        call = self.function.__call__ if inspect.isclass(self.function) else self.function
        return not self.batched and inspect.iscoroutinefunction(call)


# ---------------------------------------------------------------------------------------------- reading an answer


def _last_box(text: str) -> tuple[int, str] | None:
    """(where it starts, what it holds) of the last \\boxed{...} with balanced braces."""
    for found in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for end in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return found.start(), text[found.end() : end].strip()
    return None


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} with balanced braces holds, None without one."""
    found = _last_box(text)
    return None if found is None else found[1]


def _after_hash(text: str) -> str | None:
    _, mark, said = text.rpartition("####")
    return said.strip().split("\n")[0] if mark else None


def _tagged(text: str) -> str | None:
    tags = ANSWER_TAG.findall(text)
    return tags[-1].strip() if tags else None


def marked_answers(text: str) -> list[str]:
    """What the text marks as its answer, the likeliest first: the last answer tag alone; else what stands on the line after the
    last `####` and in the last box, the later of them first; [] without a mark."""
    tag, line, box = _tagged(text), _after_hash(text), _last_box(text)
    if tag is not None:
        return [tag]
    found = [(text.rfind("####"), line)] if line is not None else []
    return [said for _, said in sorted(found + ([box] if box else []), reverse=True)]


def final_answer(response: str) -> str:
    """What a response says its answer is: the first of `marked_answers`, else the whole text. The whole response is searched,
    however much follows the answer."""
    return next(iter(marked_answers(response)), response.strip())


def numbers_in(text: str) -> list[float]:
    """Every number in the text, thousands separators allowed."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(text.replace("\u2212", "-"))]


def gold_number(answer: object) -> float | None:
    """The target of a GSM8K answer: the last number after the last `####`; of a bare answer: its only number, else None."""
    _, mark, said = str(answer).rpartition("####")
    found = numbers_in(said)
    return found[-1] if found and (mark or len(found) == 1) else None


def _any_number(response: str) -> str:
    """The likeliest marked answer that holds a number (a `####` may be a heading); a tag alone; without one the whole text."""
    marked = marked_answers(response)
    if _tagged(response) is not None:
        return marked[0]
    return next((said for said in marked if numbers_in(said)), response)


ANSWER_PLACES = {"any": _any_number, "hash": _after_hash, "boxed": boxed, "tag": _tagged, "last": str}


# ---------------------------------------------------------------------------------------------- built-in graders


@functools.cache
def _reasoning_gym_scorer(task: str) -> Callable:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def reasoning_gym(response: str, row: Mapping) -> float | None:
    """The scorer of the row's own reasoning-gym task, in [0, 1], on the final answer; abstains on other rows."""
    kind, _, task = row["scorer"].partition(":")
    return _reasoning_gym_scorer(task)(answer=final_answer(response), entry=row) if kind == "rg" else None


def gsm8k(response: str, row: Mapping, *, answer_in: str = "any") -> float | None:
    """1 where the last number of the answer equals the row's, within 1e-6, else 0; abstains where the row's is no one number.

    answer_in: where the answer stands. hash: the line after the last `####`; boxed: the last \\boxed{}; tag: the last
    <answer></answer>; last: the whole text, so its last number; any: tag, else the later of hash and boxed that holds a number,
    else last. It counts however much text follows.
    """
    gold, said = gold_number(row["answer"]), ANSWER_PLACES[answer_in](response)
    if gold is None:
        return None
    found = numbers_in(said or "")
    return float(bool(found) and math.isclose(found[-1], gold, rel_tol=0, abs_tol=1e-6))


def correctness(response: str, row: Mapping, *, answer_in: str = "any") -> float | None:
    """The data set's own score: `rg` for rows of a reasoning-gym task, else `gsm8k`."""
    if row["scorer"].startswith("rg:"):
        return reasoning_gym(response, row)
    return gsm8k(response, row, answer_in=answer_in)


def math_answer(response: str, row: Mapping) -> float | None:
    """1 where math-verify finds the answer equal to the row's, as LaTeX or as an expression, else 0.

    The answer is an answer tag's, else a box's, else the line after `####`, else what math-verify extracts of the whole text.
    Abstains where the row has no answer. math-verify's own time limits are off: they do not work in threads and do
    not stop long arithmetic; the grader's deadline does.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits that are off, at every call

    def read(text: str) -> list:
        said = _tagged(text)
        if said is None and boxed(text) is None:
            said = _after_hash(text)
        return parse(text if said is None else f"\\boxed{{{said}}}", parsing_timeout=None)

    answer = _text(row["answer"])
    gold = answer and read(answer if marked_answers(answer) or "$" in answer else f"<answer>{answer}</answer>")
    return float(verify(gold, read(response), timeout_seconds=None)) if gold else None


def multiple_choice(response: str, row: Mapping) -> float | None:
    """1 where the chosen label is the row's, else 0; abstains where the row's answer is none of its choices.

    Choices are the row's `choices` or `options`: a list, labelled A, B, ...; {"text": [...], "label": [...]}; or {label: text}.
    The response's label is what `marked_answers` finds (or the text of a choice there), or stands after the last "answer is"
    or "answer:", or is all that the response says; text may follow it behind a bracket, full stop or colon; "option",
    Markdown, \\( \\) and \\text{} around it are left aside. Lower case counts where an answer is marked.
    """
    choices, labels = row.get("choices", row.get("options")) or [], list(string.ascii_uppercase)
    if isinstance(choices, Mapping):
        labels, choices = (choices["label"], choices["text"]) if "label" in choices else (choices.keys(), choices.values())
    texts = list(choices)
    labels = [str(label) for label in labels][: len(texts) or None]
    answer, gold = row["answer"], None
    answer = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(labels) and texts:
        gold = labels[answer]
    elif str(answer).strip(" ().:") in labels:
        gold = str(answer).strip(" ().:")
    elif answer in texts and texts.index(answer) < len(labels):
        gold = labels[texts.index(answer)]
    if gold is None:
        return None
    plain = re.sub(r"\\text\w*\{([^{}]*)\}|[*_$]|\\[()]", r"\1", response)
    label = rf"(?i:(?:option|choice)\s+)?\(?({'|'.join(map(re.escape, labels))})"
    rest, marked = r"\s*(?:[).:].*)?", marked_answers(plain)
    named = re.findall(rf"(?i:answer\s*(?:is\s*:?|:))\s*{label}(?!\w)(?!\s+\w)", plain)
    if marked and marked[0] in texts:
        return float(labels[texts.index(marked[0])] == gold)
    if marked:
        match = re.fullmatch(label + rest, marked[0], re.DOTALL | re.IGNORECASE)
    else:
        match = re.fullmatch(label + rest, named[-1] if named else plain.strip(), re.DOTALL)
    return float(match is not None and match[1].upper() == gold.upper())


def _text(answer: object) -> str:
    """A row's answer as text: "" for none; a whole number that a column of floats holds as it was written, 20 for 20.0."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return "" if answer is None or answer != answer else str(answer).strip()


def exact_match(response: str, row: Mapping) -> float | None:
    """1 where the final answers of response and row are the same text, white space apart, else 0; abstains without one."""
    said, gold = (" ".join(final_answer(text).split()) for text in (response, _text(row["answer"])))
    return float(said == gold) if gold else None


def tag_format(response: str, row: Mapping, *, format_tags: Sequence[str] = ("answer",)) -> float:
    """1 where each tag opens and closes exactly once, in the order given, around something, else 0."""
    position = 0
    for tag in format_tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        start = response.find(opening, position)
        end = response.find(closing, start)
        once = response.count(opening) == response.count(closing) == 1
        if not once or start < 0 or end < 0 or not response[start + len(opening) : end].strip():
            return 0.0
        position = end + len(closing)
    return 1.0


def length(response: str, row: Mapping, *, max_response_tokens: int) -> float:
    """1 - response tokens / --max-response-tokens: the shorter, the better."""
    return 1 - row["response_tokens"] / max_response_tokens


def overlong(response: str, row: Mapping, *, max_response_tokens: int, overlong_buffer: int | None = None) -> float:
    """DAPO's soft penalty (arXiv 2503.14476, eq. 13): 0 up to max - buffer tokens, then linear down to -1 at max.

    overlong_buffer: tokens; by default a fifth of --max-response-tokens.
    """
    buffer = overlong_buffer or max(max_response_tokens // 5, 1)
    return min(0.0, (max_response_tokens - buffer - row["response_tokens"]) / buffer)


def repetition(response: str, row: Mapping, *, repetition_ngram: int = 3) -> float:
    """Distinct / all n-grams of words - 1: 0 where nothing repeats, towards -1; 0 for texts shorter than one n-gram."""
    words = response.split()
    grams = [tuple(words[i : i + repetition_ngram]) for i in range(len(words) - repetition_ngram + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0


def truncated(response: str, row: Mapping) -> float:
    """-1 for a response that was cut at the limit, else 0."""
    return -float(row["finish_reason"] == "length")


class RewardModel:
    """The score of a sequence-classification model of transformers with one label, on the device of the rank.

    It reads the question and the response through its own chat template, or as two paragraphs where it has none. Abstains
    on texts beyond its positions. Errors: ValueError where the model does not have exactly one label.
    """

    batch = 16  # texts of a forward pass

    def __init__(self, *, reward_model: str):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.torch = torch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(reward_model, trust_remote_code=False)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            reward_model, dtype="auto", output_loading_info=True, trust_remote_code=False
        )
        if model.config.num_labels != 1 or loading["missing_keys"]:
            said = f"{model.config.num_labels} labels and untrained {sorted(loading['missing_keys'])}"
            raise ValueError(f"--reward-model {reward_model}: has {said}; expected a trained head with one label")
        self.model = model.to(self.device).eval()
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        self.limit = min(positions, self.tokenizer.model_max_length)  # some models keep positions for padding

    def ids(self, response: str, row: Mapping) -> list[int]:
        """Token ids of one text."""
        question = row["question"]
        turns = question if isinstance(question, list) else [{"role": "user", "content": str(question)}]
        turns = [*turns, {"role": "assistant", "content": response}]
        if self.tokenizer.chat_template is None:
            return self.tokenizer("\n\n".join(t["content"] for t in turns))["input_ids"]
        return self.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)

    def __call__(self, responses: Sequence[str], rows: Sequence[Mapping]) -> list[float | None]:
        """The model's score of each response; None where the text is longer than its positions."""
        torch, scores = self.torch, [None] * len(responses)
        texts = [self.ids(response, row) for response, row in zip(responses, rows, strict=True)]
        fits = [i for i, ids in enumerate(texts) if len(ids) <= self.limit]
        fits.sort(key=lambda i: len(texts[i]))  # texts of one length together: little padding
        pad = self.model.config.get_text_config().pad_token_id
        for part in (fits[i : i + self.batch] for i in range(0, len(fits), self.batch)):
            if pad is None:  # the head finds a text's end by its padding
                groups = [[i] for i in part]
            else:
                groups = [part]
            for group in groups:
                width = max(len(texts[i]) for i in group)
                ids = torch.tensor([texts[i] + [pad or 0] * (width - len(texts[i])) for i in group], device=self.device)
                mask = torch.tensor([[1] * len(texts[i]) + [0] * (width - len(texts[i])) for i in group], device=self.device)
                with torch.no_grad():
                    found = self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
                for i, value in zip(group, found, strict=True):
                    scores[i] = value
        return scores


# ---------------------------------------------------------------------------------------------- a run's rewards


@functools.cache
def _run_file(path: Path) -> ModuleType:
    """The module that a user's file makes; it is run once, and sees the modules beside it."""
    spec = importlib.util.spec_from_file_location(f"user_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def load_function(place: str, flag: str = "--reward-hook") -> Callable | Reward:
    """The function, class or Reward at `path.py:name`; the file is run, once. Errors: ValueError naming `flag` and the file."""
    path, _, name = place.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"{flag} {place}: expected path.py:function")
    try:
        module = _run_file(Path(path).expanduser().resolve())
    except (Exception, SystemExit) as e:
        raise ValueError(f"{flag} {place}: running {path} (seen from {Path.cwd()}) gave {type(e).__name__}: {e}") from e
    found = getattr(module, name, None)
    if not callable(found) and not isinstance(found, Reward):
        functions = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise ValueError(f"{flag} {place}: {path} has no function {name}; it has {', '.join(functions) or 'none'}")
    return found


TAKEN = ("total", "group", "question", "answer", "response", "finish_reason", "response_tokens", "score", "dropped")
TAKEN += ("num_truncated",)  # beside the rewards, in metrics and in files of samples


def resolve(asked: Sequence[str], flag: str = "--rewards") -> dict[str, Reward]:
    """Names of REWARDS and places `path.py:function` to rewards by name; a user's own is called as its function is.

    Errors: ValueError for an unknown name (with the known ones), an unreadable file, or two of one name.
    """
    found: dict[str, Reward] = {}
    for text in asked:
        if ":" in text:
            own = load_function(text, flag)
            own = own if isinstance(own, Reward) else Reward(own)
            name, reward = text.rpartition(":")[2], Reward(**{**vars(own), "place": text})
        elif text in REWARDS:
            name, reward = text, REWARDS[text]
        else:
            near = difflib.get_close_matches(text, REWARDS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{flag} {text}: unknown{hint}; there are {', '.join(REWARDS)}, or path.py:function")
        if name in found:
            raise ValueError(f"{flag} {' '.join(asked)}: two are called {name}; name each once")
        if name in TAKEN:
            raise ValueError(
                f"{flag} {text}: {name} is what a metric or a column of the samples is called; rename the function"
            )
        found[name] = reward
    if not found:
        raise ValueError(f"{flag}: name at least one reward")
    return found


def component_names(rewards: Mapping[str, Reward]) -> tuple[str, ...]:
    """K names, as they are logged and weighed: the reward's own, or reward.component where it declares components."""
    return tuple(n for name, r in rewards.items() for n in ([f"{name}.{c}" for c in r.components] or [name]))


def reward_table() -> str:
    """REWARDS as a Markdown table: what each is (the first paragraph of its docstring), its range, and its flags."""
    lines = ["| reward | what it is | range | flags |", "| --- | --- | --- | --- |"]
    for name, r in REWARDS.items():
        what = " ".join((inspect.getdoc(r.function) or "-").split("\n\n")[0].split()).removesuffix(".").replace("|", "\\|")
        flags = [p.name for p in inspect.signature(r.function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        said = " ".join(f"`--{f.replace('_', '-')}`" for f in flags) or "-"
        bounds = "any" if r.range is None else f"{r.range[0]:g} to {r.range[1]:g}"
        lines.append(f"| {name} | {what} | {bounds} | {said} |")
    return "\n".join(lines)


def parse_weights(names: Sequence[str], weights: Sequence[str]) -> list[float]:
    """`name=weight` texts to one weight a component, in the order of `names`; one that is not named has weight 1.

    Errors: ValueError for an unknown name, an unreadable, non-finite or too large weight, or when all are zero as float32.
    """
    parsed = dict.fromkeys(names, 1.0)
    for text in weights:
        name, equals, number = text.partition("=")
        if not equals or name not in parsed:
            raise ValueError(f"--reward-weights {text}: expected name=number with a name out of {', '.join(names)}")
        if [w.partition("=")[0] for w in weights].count(name) > 1:
            raise ValueError(f"--reward-weights {' '.join(weights)}: {name} is given twice")
        try:
            parsed[name] = float(number)
        except ValueError:
            raise ValueError(f"--reward-weights {text}: {number!r} is not a number") from None
        if not abs(parsed[name]) <= FLOAT32_MAX:
            raise ValueError(f"--reward-weights {text}: the weight must be finite and fit float32")
    if not any(struct.unpack("f", struct.pack("f", w))[0] for w in parsed.values()):
        raise ValueError(f"--reward-weights {' '.join(weights)}: all weights are zero as float32, so nothing is rewarded")
    return list(parsed.values())


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that one of k draws, without replacement, of n samples passes where c do.

    Unbiased (Chen et al., arXiv 2107.03374, eq. 1). Errors: ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples with {num_passed} that pass: expected 1 <= k <= n, 0 <= c <= n")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


# ---------------------------------------------------------------------------------------------- checked calls


class BadValue(ValueError):
    """A reward function returned something that is no reward: a fault of the function, not of the response."""


def _number(name: str, value: object, bounds: tuple[float, float] | None) -> float | None:
    """A checked float64, None where it abstained. Errors: BadValue naming the function and what it returned."""
    if getattr(value, "shape", None) == ():  # a tensor or array of one number
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise BadValue(f"reward {name} returned {value!r:.200} of type {type(value).__name__}; expected a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf * (1 if value > 0 else -1)
    if math.isnan(number) or (math.isinf(number) and isinstance(value, float)):
        raise BadValue(f"reward {name} returned {number}, which is not finite; expected a finite number or None")
    if abs(number) > FLOAT32_MAX:
        raise BadValue(f"reward {name} returned {number:g}, beyond float32; expected at most {FLOAT32_MAX:g}")
    if bounds is not None and not bounds[0] <= number <= bounds[1]:
        raise BadValue(f"reward {name} returned {number:g}, outside the range {bounds[0]:g} to {bounds[1]:g} that it declares")
    return number


def read_value(name: str, reward: Reward, returned: object) -> list[float | None]:
    """One sample's components out of what a reward function returned. Errors: BadValue."""
    if not reward.components:
        if isinstance(returned, Mapping):
            said = f"declare Reward(function, components={tuple(returned)!r:.100})"
            raise BadValue(f"reward {name} returned a mapping, and declares no components: {said}")
        return [_number(name, returned, reward.range)]
    if returned is None:
        return [None] * len(reward.components)
    if not isinstance(returned, Mapping) or set(returned) != set(reward.components):
        got = f"{list(returned)!r:.200}" if isinstance(returned, Mapping) else f"{returned!r:.200}"
        raise BadValue(f"reward {name} returned {got}; expected a mapping of {', '.join(reward.components)}")
    return [_number(f"{name}.{c}", returned[c], reward.range) for c in reward.components]


def read_batch(name: str, reward: Reward, returned: object, count: int) -> list[list[float | None]]:
    """`count` samples' components out of a batched function's list, tuple, array or tensor (N,). Errors: BadValue."""
    shape = getattr(returned, "shape", None)
    if shape is not None:
        if tuple(shape) != (count,):
            raise BadValue(
                f"reward {name} returned an array of shape {tuple(shape)}; expected ({count},), one value a response"
            )
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        got = f"{returned!r:.200} of type {type(returned).__name__}"
        raise BadValue(f"reward {name} returned {got}; expected a list of {count} values, one a response")
    if len(returned) != count:
        raise BadValue(f"reward {name} returned {len(returned)} values; expected {count}, one a response")
    return [read_value(name, reward, value) for value in returned]


def _call(name: str, reward: Reward, function: Callable, responses: list, rows: list, timeout: float) -> list[dict]:
    """Outcomes of one call, a sample each: {"values": [...]}, or {"timeout": text}, or {"error": text}. Errors: BadValue."""

    def said(e: BaseException) -> dict:
        try:
            return {"error": f"{type(e).__name__}: {e}"[:500]}
        except Exception:
            return {"error": f"{type(e).__name__}, which cannot be printed"}

    async def one(response: str, row: Mapping) -> dict:
        try:
            async with asyncio.timeout(timeout) as limit:
                return {"returned": await function(response, row)}
        except BaseException as e:
            return {"timeout": f"no value within {timeout:g} s"} if limit.expired() else said(e)

    async def together() -> list[dict]:
        return await asyncio.gather(*map(one, responses, rows))

    if reward.is_async:
        found = asyncio.run(together())
        return [{"values": read_value(name, reward, f["returned"])} if "returned" in f else f for f in found]
    try:
        returned = function(responses, rows) if reward.batched else function(responses[0], rows[0])
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
    except BaseException as e:
        if reward.in_process:
            raise
        return [said(e)] * len(responses)
    values = read_batch(name, reward, returned, len(rows)) if reward.batched else [read_value(name, reward, returned)]
    return [{"values": v} for v in values]


def _bind(reward: Reward, settings: Mapping[str, Any]) -> Callable:
    """What is called: the function with its settings, or the instance that a class makes of them."""
    return reward.function(**settings) if inspect.isclass(reward.function) else functools.partial(reward.function, **settings)


# ---------------------------------------------------------------------------------------------- the graders' processes

# A host process, started clean (no torch, no threads), loads the reward functions and forks workers: a worker costs a few
# milliseconds and shares the host's imports. Each has a socket of its own to the training process, so none can break another's.
# Whatever a grader starts becomes the host's child when its parent ends, and the host ends it.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _children() -> set[int]:
    import psutil

    return {p.pid for p in psutil.Process().children()}


def _end_orphans(known: set[int]) -> None:
    """In the host: kill every child that is not `known`, and whatever comes up from below it."""
    while orphans := _children() - known:
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _end_worker(pid: int) -> int:
    """In the host: kill a worker; how it ended: an exit code, or minus a signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve(control_fd: int) -> None:
    """The host: read what to load from stdin, then start and end workers as the training process says, until it is gone."""
    import psutil

    setup = pickle.load(sys.stdin.buffer)
    sys.path[:] = setup["path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # while it loads, it does not see the training process end
    control, workers = socket.socket(fileno=control_fd), set()
    try:
        calls = {}
        for name, (place, packed, settings) in setup["rewards"].items():
            reward = resolve([place])[name] if place else pickle.loads(packed)
            calls[name] = (reward, settings)
            if reward.warm_up is not None:
                _bind(reward, settings)(*reward.warm_up)
    except BaseException as e:
        control.send(json.dumps(f"reward {name}: {type(e).__name__}: {e}"[:2000]).encode())
        return
    libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)  # from here on it does, and ends what is left
    memory = setup["memory"] + psutil.Process().memory_info().data  # what is loaded is not the grader's
    control.send(b"null")
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 64, 1)
        if descriptors:
            pid = os.fork()
            if pid == 0:
                control.close()
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                _work(descriptors[0], calls, setup["timeout"], memory)
            os.close(descriptors[0])
            workers.add(pid)
            control.send(str(pid).encode())
        elif message == b"sweep":
            _end_orphans(workers)
            control.send(b"0")
        elif message:
            workers.discard(int(message))
            how = _end_worker(int(message))
            _end_orphans(workers)
            control.send(str(how).encode())
        else:
            break  # the training process is gone
    _end_orphans(set())  # workers, and what they started


def _work(descriptor: int, calls: Mapping, timeout: float, memory: int) -> None:
    """A worker: make what is a class, say so, then one call after another until the socket closes. What a grader prints goes
    nowhere. Never returns."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # where memory runs out all the same, a grader goes first
            Path("/proc/self/oom_score_adj").write_text("1000")
        channel, functions = Connection(descriptor), {}
        for name, (reward, settings) in calls.items():
            try:
                functions[name] = _bind(reward, settings)
            except BaseException as e:
                channel.send_bytes(json.dumps(f"reward {name}: {type(e).__name__}: {e}"[:2000]).encode())
                return
        channel.send_bytes(b"null")
        # what it starts for itself may stay, what a call leaves behind spoils it
        me, here, threads, helpers = os.getpid(), os.getcwd(), threading.active_count(), _children()
        while True:
            name, responses, rows = channel.recv()
            try:
                outcomes = _call(name, calls[name][0], functions[name], responses, rows, timeout)
            except BadValue as e:
                outcomes = str(e)
            if os.getpid() != me:
                os._exit(0)  # a grader forked, and both of them came back
            spoiled = (
                (_children() != helpers if helpers else _has_children())
                or threading.active_count() > threads
                or os.getcwd() != here
            )
            channel.send_bytes(json.dumps([outcomes, spoiled]).encode())
    except EOFError:
        os._exit(0)
    finally:
        os._exit(1)


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


# ---------------------------------------------------------------------------------------------- grading


@dataclass(frozen=True)
class Graded:
    """Every component of every sample."""

    names: tuple[str, ...]  # K
    components: torch.Tensor  # [N, K] float64, 0 where nothing was scored
    scored: torch.Tensor  # [N, K] bool; False: it abstained, or failed and abstains therefore
    failures: dict[str, Counter]  # reward -> how many samples: "timeout", "error"


@dataclass
class _Worker:
    pid: int
    channel: Connection
    task: tuple[str, list[int]] | None = None
    deadline: float = math.inf


FAILURES = ("abstain", "zero", "stop")
GIVE_UP = 4  # timeouts in a row for each worker, after which a reward's other calls of the batch are not tried
LOAD_SECONDS, ANSWER_SECONDS = 600, 60  # that the host may take to load, and to start or end a worker


class Graders:
    """Reward functions, each call in a killable process with a deadline.

    Isolation is from accidents: a grader that hangs, forks, prints, exits, eats memory or raises costs its own call. It is no
    sandbox: graders run as the user does and see the user's files.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float = 10.0,
        workers: int = 4,
        memory_gib: float = 4.0,
        failure: str = "abstain",
    ):
        """settings: keyword arguments by reward; timeout: seconds of a call; failure: what a failed call gives, FAILURES.

        Errors: what the class of an in-process reward raises.
        """
        self.rewards, self.settings, self.timeout, self.failure = dict(rewards), settings or {}, timeout, failure
        self.num_workers, self.memory = workers, int(memory_gib * 2**30)
        self.workers: list[_Worker] = []
        self.host: subprocess.Popen | None = None
        self.own = {n: _bind(r, self.settings.get(n, {})) for n, r in self.rewards.items() if r.in_process}
        self.is_ready = len(self.own) == len(self.rewards)
        if not self.is_ready:
            self._start_host()

    def __enter__(self) -> Graders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_host(self) -> None:
        import cloudpickle  # functions of a fork's own script, which no other process can import

        packed = {}
        for name, reward in self.rewards.items():
            if not reward.in_process:
                packed[name] = (reward.place, None if reward.place else cloudpickle.dumps(reward), self.settings.get(name, {}))
        setup = {"path": sys.path, "rewards": packed, "timeout": self.timeout, "memory": self.memory}
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        run = "import sys; sys.path.insert(0, sys.argv[1]); import rewards; rewards.serve(int(sys.argv[2]))"
        command = [sys.executable, "-c", run, str(Path(__file__).resolve().parent), str(theirs.fileno())]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.host = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True, env={**os.environ, **one_thread}
        )
        theirs.close()
        self.is_ready = False
        with contextlib.suppress(BrokenPipeError):
            self.host.stdin.write(cloudpickle.dumps(setup))
            self.host.stdin.close()

    def check(self) -> None:
        """Wait until a worker can grade. Errors: RuntimeError naming the reward that does not load, or cannot be made."""
        if self.host is not None and not self.workers and self._start_worker() is None:
            raise RuntimeError("the graders did not start: their host was killed")

    def _wait_for_host(self) -> None:
        if not self.is_ready:
            self.control.settimeout(LOAD_SECONDS)
            try:
                answer = self.control.recv(4096)
            except TimeoutError:
                raise RuntimeError(f"the graders did not start: loading took more than {LOAD_SECONDS} s") from None
            problem = json.loads(answer) if answer else f"their host ended with {self.host.wait()}"
            if problem is not None:
                raise RuntimeError(f"the graders did not start: {problem}")
            self.is_ready = True

    def close(self) -> None:
        """End every worker and the host."""
        if self.host is not None:
            for worker in self.workers:
                worker.channel.close()
            self.control.close()
            self.host.wait()
            self.workers, self.host = [], None

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> int | None:
        """The host's answer to one message; None where the host is gone (a grader may have killed it)."""
        try:
            self.control.settimeout(ANSWER_SECONDS)
            socket.send_fds(self.control, [message], descriptors)
            answer = self.control.recv(64)
        except OSError:
            answer = b""
        if not answer:
            self.host.kill()  # one that answers too late would answer the wrong question
            self.host.wait()
            return None
        return int(answer)

    def _start_worker(self) -> _Worker | None:
        """Another worker, ready to grade; None where the host is gone. Errors: RuntimeError, as `check`."""
        self._wait_for_host()
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # half a message, or one that is not read, ends in an error
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 2, 0))
        pid = self._ask(b"start", [theirs.fileno()])
        theirs.close()
        if pid is None:
            ours.close()
            return None
        worker = _Worker(pid, Connection(ours.detach()))
        self.workers.append(worker)
        if not worker.channel.poll(LOAD_SECONDS):
            raise RuntimeError(f"a grader did not start: its classes took more than {LOAD_SECONDS} s")
        try:
            problem = json.loads(worker.channel.recv_bytes(2**16))
        except (EOFError, OSError, ValueError):
            problem = self._retire(worker)
            if not problem:  # it went with the host
                return None
        if problem is not None:
            raise RuntimeError(f"a grader did not start: {problem}")
        return worker

    def _idle(self) -> _Worker | None:
        """A worker without a task; one that has ended meanwhile (memory is taken from graders first) is retired."""
        for worker in [w for w in self.workers if w.task is None]:
            if not worker.channel.poll():
                return worker
            self._retire(worker)
        return None

    def _retire(self, worker: _Worker) -> str:
        """End a worker; how it had ended, in words."""
        self.workers.remove(worker)
        worker.channel.close()
        how = self._ask(str(worker.pid).encode())
        return "" if how is None else f"signal {-how}" if how < 0 else f"exit code {how}"

    def _answer(self, worker: _Worker) -> list[dict] | str | None:
        """What a worker sends, None where it has died."""
        try:
            outcomes, spoiled = json.loads(worker.channel.recv_bytes(2**26))
        except (EOFError, OSError, ValueError, TypeError):
            return None
        worker.task, worker.deadline = None, math.inf
        if spoiled:
            self._retire(worker)
        return outcomes

    def _run(self, tasks: deque, found: dict[str, list], responses: Sequence[str], rows: Sequence[Mapping]) -> None:
        """Every (reward, indices of samples) of `tasks` in some worker; fills in found[reward][index]."""

        def fill(task: tuple[str, list[int]], outcomes: list[dict]) -> None:
            for i, outcome in zip(task[1], outcomes, strict=True):
                found[task[0]][i] = outcome

        in_a_row: Counter = Counter()  # timeouts of a reward since it last answered

        def lost(task: tuple[str, list[int]], outcome: dict) -> None:
            name, indices = task
            if len(indices) > 1 and not self.rewards[name].batched:  # one of them is at fault: each alone
                tasks.extend((name, [i]) for i in indices)
            else:
                fill(task, [outcome] * len(indices))

        while tasks or any(w.task for w in self.workers):
            if self.host.poll() is not None:  # killed, and its workers with it
                for worker in [w for w in self.workers if w.task]:
                    lost(worker.task, {"error": "its process ended with the graders' host"})
                self.close()
                self._start_host()
            while tasks and ((worker := self._idle()) or len(self.workers) < self.num_workers):
                if in_a_row[tasks[0][0]] >= GIVE_UP * self.num_workers:
                    fill(task := tasks.popleft(), [{"timeout": "not tried, after many timeouts in a row"}] * len(task[1]))
                    continue
                worker = worker or self._start_worker()
                if worker is None:
                    break
                worker.task = task = tasks.popleft()
                grace = 2.0 if self.rewards[task[0]].is_async else 0.0  # it keeps a sample's deadline itself
                worker.deadline = time.monotonic() + self.timeout + grace
                try:
                    worker.channel.send((task[0], [responses[i] for i in task[1]], [rows[i] for i in task[1]]))
                except OSError:
                    pass  # it has died: seen below as the end of its channel
            busy = [w for w in self.workers if w.task]
            if not busy:
                continue
            patience = max(0.0, min(w.deadline for w in busy) - time.monotonic())  # seconds
            for channel in wait([w.channel for w in busy], timeout=patience):
                worker = next(w for w in busy if w.channel is channel)
                task, answer = worker.task, self._answer(worker)
                if isinstance(answer, str):
                    raise BadValue(answer)
                if answer is None:
                    lost(task, {"error": f"its process ended ({self._retire(worker) or 'with the host'})"})
                else:
                    fill(task, answer)
                    in_a_row[task[0]] = 0
            now = time.monotonic()  # an answer that has come while this process waited elsewhere is in time
            for worker in [w for w in self.workers if w.deadline <= now and not w.channel.poll()]:
                in_a_row[worker.task[0]] += 1
                lost(worker.task, {"timeout": f"no value within {self.timeout:g} s"})
                self._retire(worker)

    def score(self, names: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping]) -> Graded:
        """Every component of the rewards `names` on every sample.

        Errors: BadValue (a ValueError) for a value of the wrong count, type or size; RuntimeError where a grader failed and
        failures stop the run.
        """
        import torch

        count, tasks = len(responses), deque()
        found: dict[str, list] = {name: [None] * count for name in names}
        for name in names if count else ():
            reward = self.rewards[name]
            if reward.in_process:
                parts = [range(count)] if reward.batched else [[i] for i in range(count)]
                call = (name, reward, self.own[name])
                found[name] = [
                    outcome
                    for part in parts
                    for outcome in _call(*call, [responses[i] for i in part], [rows[i] for i in part], self.timeout)
                ]
            elif reward.batched or reward.is_async:
                tasks.append((name, list(range(count))))
            else:
                tasks.extend((name, [i]) for i in range(count))
        try:
            if tasks:
                self._run(tasks, found, responses, rows)
        finally:
            for worker in [w for w in self.workers if w.task]:
                self._retire(worker)  # a call that nobody waits for
            if self.workers:
                self._ask(b"sweep")
        failures = {name: self._failures(name, found[name]) for name in names}
        spare = 0.0 if self.failure == "zero" else None
        width = {name: len(self.rewards[name].components) or 1 for name in names}
        values = [[v for n in names for v in found[n][i].get("values", [spare] * width[n])] for i in range(count)]
        columns = component_names({n: self.rewards[n] for n in names})
        scored = torch.tensor([[v is not None for v in row] for row in values], dtype=torch.bool)
        components = torch.tensor([[v or 0.0 for v in row] for row in values], dtype=torch.float64)
        shape = (count, len(columns))
        return Graded(columns, components.reshape(shape), scored.reshape(shape), failures)

    def _failures(self, name: str, outcomes: list[dict]) -> Counter:
        """How many samples of one reward failed, and how; said, and by --grader-failure stop an error."""
        failed = [(i, kind, o[kind]) for i, o in enumerate(outcomes) for kind in ("timeout", "error") if kind in o]
        if failed:
            i, _, first = failed[0]
            said = f"reward {name} failed on {len(failed)} of {len(outcomes)} samples; the first, sample {i}: {first!r:.400}"
            if self.failure == "stop":
                raise RuntimeError(said)
            print(said, file=sys.stderr, flush=True)
        return Counter(kind for _, kind, _ in failed)


RG_ROW = {"scorer": "rg:chain_sum", "answer": "1", "metadata": {}}
REWARDS: dict[str, Reward] = {
    "correctness": Reward(correctness, range=(0, 1), warm_up=("1", RG_ROW)),
    "gsm8k": Reward(gsm8k, range=(0, 1)),
    "rg": Reward(reasoning_gym, range=(0, 1), warm_up=("1", RG_ROW)),
    "math": Reward(math_answer, range=(0, 1), warm_up=("so $x = 1$ and \\boxed{\\frac12}", {"answer": "x + 1"})),
    "multiple_choice": Reward(multiple_choice, range=(0, 1)),
    "exact_match": Reward(exact_match, range=(0, 1)),
    "format": Reward(tag_format, range=(0, 1)),
    "length": Reward(length, range=(0, 1)),
    "overlong": Reward(overlong, range=(-1, 0)),
    "repetition": Reward(repetition, range=(-1, 0)),
    "truncated": Reward(truncated, range=(-1, 0)),
    "reward_model": Reward(RewardModel, batched=True, in_process=True),
}
