"""From rows to samples: data sets, chat prompts, the two engines, seeds, and the order in which rows are visited.

Public: `load_rows`, `Prompts`, `build_prompts`, `PromptOrder`, `Sample`, `Sampling`, `VLLMEngine`, `HFEngine`, `ENGINES`,
`sample_groups`, `grade`, `Scored`, `judge`, `owners`, `optimizer_batches`, `trained_tokens`, `measure_samples`,
`write_samples`, `seed_for`, `eos_token_ids`.

Token ids from the engine are what is trained on; text exists for graders and logs. An engine is told every sampling
parameter and takes none from the model's generation_config, whose EOS ids are honoured, all of them.
Not here on purpose: reward functions, advantages. Collectives are called by `write_samples` alone.
"""

import dataclasses
import hashlib
import json
import os
import re
import string
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from advantages import has_signal, weighted_sum
from dist_utils import Meter, gather_objects, is_first_rank, printable, run_together
from rewards import Graded, Graders

# ---------------------------------------------------------------------------------------------- rows

KNOWN_DATASETS = {  # hub name -> what its columns are called
    "openai/gsm8k": {"config": "main", "prompt": "question", "answer": "answer"},
}
ALIASES = {"gsm8k": "openai/gsm8k"}
PROMPT_COLUMNS = ("question", "prompt", "problem", "input")
ANSWER_COLUMNS = ("answer", "solution", "target", "output")
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Source:
    """One data set as the command line names it."""

    dataset: str  # hub name, local file or folder, or rg:<task>
    config: str | None = None
    split: str | None = None
    params: str | None = None  # JSON or YAML mapping, for rg:<task>
    prompt_column: str | None = None
    answer_column: str | None = None
    flag: str = "--dataset"  # what an error names


def load_rows(source: Source) -> list[dict]:
    """Every row of a data set as a dict with `question`, `answer`, `scorer` and its own columns.

    Rows with a null or empty prompt stay in, with question None: `build_prompts` counts and skips them.
    Errors: ValueError naming the flag, what was found, and what to change.
    """
    if source.dataset.startswith("rg:"):
        return _reasoning_gym_rows(source)
    if source.params:
        raise ValueError(f"--dataset-params: only rg:<task> takes parameters, not {source.flag} {source.dataset}")
    known = KNOWN_DATASETS.get(ALIASES.get(source.dataset, source.dataset), {})
    table = _load_table(source, known)
    if len(table) == 0:
        raise ValueError(f"{source.flag} {source.dataset}: the data set is empty")
    prompt = _column(table.column_names, source.prompt_column or known.get("prompt"), PROMPT_COLUMNS, "prompt", source)
    answer = _column(table.column_names, source.answer_column or known.get("answer"), ANSWER_COLUMNS, "answer", source)
    return [{**row, "question": row[prompt], "answer": row[answer], "scorer": "number"} for row in table]


def _load_table(source: Source, known: Mapping[str, str]):
    """The `datasets.Dataset` that a hub name, file or folder stands for."""
    import datasets

    datasets.disable_progress_bars()
    name, split = ALIASES.get(source.dataset, source.dataset), source.split or "train"
    path = Path(source.dataset).expanduser()
    looks_local = path.suffix in FILE_FORMATS or source.dataset.startswith((".", "/", "~"))
    if looks_local and not path.exists():
        raise ValueError(f"{source.flag} {source.dataset}: no such file or folder (seen from {Path.cwd()})")
    try:
        if path.is_file():
            if path.suffix not in FILE_FORMATS:
                raise ValueError(f"cannot read {path.suffix or 'a file without an ending'}; use {', '.join(FILE_FORMATS)}")
            if path.stat().st_size == 0:
                raise ValueError("the file is empty")
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=str(path), split="train")
        if path.is_dir():
            files = sorted(f for f in path.iterdir() if f.suffix in FILE_FORMATS and f.stem.split("-")[0] == split)
            if not files:
                found = ", ".join(sorted(f.name for f in path.iterdir())) or "nothing"
                raise ValueError(
                    f"the folder has no file {split}.* or {split}-*.* ending in {', '.join(FILE_FORMATS)}; it holds {found}"
                )
            return datasets.load_dataset(FILE_FORMATS[files[0].suffix], data_files=[str(f) for f in files], split="train")
        return datasets.load_dataset(name, source.config or known.get("config"), split=split)
    except Exception as e:
        remedy = "" if path.exists() else ". Check the name, --dataset-config and --dataset-split, or name a local file"
        reason = e.__cause__ or e  # what `datasets` wraps says more than its wrapping
        said = f"{type(reason).__name__}: {reason}{remedy}"
        raise ValueError(f"{source.flag} {source.dataset} (split {split}): {said}") from e


def _column(names: list[str], asked: str | None, usual: Sequence[str], kind: str, source: Source) -> str:
    candidates = [asked] if asked else usual
    for name in candidates:
        if name in names:
            return name
    tried = f"no column {asked!r}" if asked else f"none of the usual {kind} columns ({', '.join(usual)})"
    raise ValueError(f"{source.flag} {source.dataset}: {tried}; it has {', '.join(names)}. Set --{kind}-column")


def _reasoning_gym_rows(source: Source) -> list[dict]:
    """Rows of a reasoning-gym task; the fields of its metadata become columns (`expression` of chain_sum, say)."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task = source.dataset.removeprefix("rg:")
    if task not in DATASETS:
        raise ValueError(f"{source.flag} {source.dataset}: unknown task; there are {', '.join(sorted(DATASETS))}")
    try:
        params = read_params(source.params)
        data = reasoning_gym.create_dataset(task, **{"size": 1000, "seed": 0, **params})
        rows = [data[i] for i in range(len(data))]
    except Exception as e:
        raise ValueError(f"--dataset-params {source.params} for {source.dataset}: {type(e).__name__}: {e}") from e
    return [{**row["metadata"], **row, "scorer": f"rg:{task}"} for row in rows]


# ---------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class PromptFormat:
    """How a row becomes messages."""

    system_prompt: str | None = None
    template: str | None = None  # str.format with the row's columns, e.g. "Compute {expression}."
    few_shot: tuple[dict, ...] = ()  # {"role", "content"} turns before the question


@dataclass(frozen=True)
class Prompts:
    """Rows that can be sampled, and their token ids."""

    rows: list[dict]
    token_ids: list[list[int]]
    row_ids: list[int]  # place of each row in the data set, before any was dropped
    num_null: int  # rows without a prompt, skipped
    num_overlong: int  # rows longer than the limit, dropped
    first_overlong: int | None  # place in the data set of the first of them
    num_held_out: int  # rows left out because they are held out

    def digest(self) -> str:
        """Changes when any token of any prompt does."""
        return hashlib.blake2b("".join(f"{ids};" for ids in self.token_ids).encode(), digest_size=8).hexdigest()


ROLES = ("system", "user", "assistant", "tool")


def check_messages(turns: Any, where: str) -> list[dict]:
    """`turns` where they are chat messages. Errors: ValueError naming `where` and the first that is none."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f'{where}: expected a list of {{"role": ..., "content": ...}}, found {turns!r:.200}')
    for turn in turns:
        ok = isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
        if not ok:
            raise ValueError(f"{where}: {turn!r:.200} is no message: role (one of {', '.join(ROLES)}) and content, both texts")
    return turns


def read_few_shot(path: str) -> tuple[dict, ...]:
    """Messages of a JSON, JSONL or YAML file: a list of {"role": ..., "content": ...}. Errors: ValueError."""
    try:
        text, kind = Path(path).expanduser().read_text(encoding="utf-8-sig"), Path(path).suffix.lower()
        if kind == ".jsonl":
            turns = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            turns = json.loads(text) if kind == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError, RecursionError) as e:
        raise ValueError(f"--few-shot {path} (seen from {Path.cwd()}): {e}") from e
    return tuple(check_messages(turns, f"--few-shot {path}"))


def read_params(text: str | None) -> dict:
    """--dataset-params as a mapping, {} without any. Errors: ValueError."""
    try:
        params = yaml.safe_load(text or "{}")
    except (yaml.YAMLError, RecursionError) as e:
        raise ValueError(f"--dataset-params {text}: {' '.join(str(e).split())}") from e
    if not isinstance(params, dict) or any(not isinstance(params.get(k, 0), int) for k in ("seed", "size")):
        raise ValueError(f"--dataset-params {text}: expected a mapping (seed and size are whole numbers)")
    return params


def check_params(cfg: Any) -> None:
    """Errors: ValueError where --dataset-params is no mapping, or has names that its reasoning-gym task does not know."""
    params = read_params(cfg.dataset_params)
    if params and cfg.dataset.startswith("rg:"):
        from reasoning_gym.factory import DATASETS

        _, settings = DATASETS.get(cfg.dataset.removeprefix("rg:"), (None, None))
        known = [f.name for f in dataclasses.fields(settings)] if settings else params
        unknown = [str(name) for name in params if name not in known]
        if unknown:
            raise ValueError(f"--dataset-params: {cfg.dataset} has no {', '.join(unknown)}; it has {', '.join(known)}")


def check_template(template: str) -> None:
    """Errors: ValueError where --prompt-template cannot be filled in with columns by name."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as e:
        raise ValueError(f"--prompt-template {template!r}: {e}; write a brace that is meant as {{{{ or }}}}") from e
    if any(not name or name[0].isdigit() for name in fields):
        raise ValueError(f"--prompt-template {template!r}: braces hold a column's name, as in {{question}}")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Mapping, fmt: PromptFormat) -> list[int]:
    """Token ids of one row's prompt. The chat template (or, without one, the tokenizer) adds BOS, exactly once."""
    try:
        question = row["question"] if fmt.template is None else fmt.template.format(**row)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as e:
        remedy = "; write {{ and }} for braces that name no column"
        raise ValueError(f"--prompt-template {fmt.template!r}: {e!r}; a row has {', '.join(row)}{remedy}") from e
    system = [{"role": "system", "content": fmt.system_prompt}] if fmt.system_prompt else []
    # a prompt column may hold a conversation already
    is_chat = isinstance(question, list | dict)
    turns = check_messages(question, "the prompt column") if is_chat else [{"role": "user", "content": str(question)}]
    messages = [*system, *fmt.few_shot, *turns]
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(m["content"] for m in messages))["input_ids"]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def build_prompts(
    rows: Sequence[Mapping],
    tokenizer: PreTrainedTokenizerBase,
    fmt: PromptFormat,
    max_tokens: int,
    overlong: str,
    flag: str,
    not_among: "Prompts | None" = None,
) -> Prompts:
    """Tokenise every row once; skip rows without a prompt, drop (or, with overlong="error", refuse) those over `max_tokens`.

    not_among: prompts that must not come up (held-out ones): rows with the same token ids are left out.
    Errors: ValueError naming the row, or when no row is left.
    """
    kept_rows, kept_ids, places, too_long, num_null, num_held_out = [], [], [], [], 0, 0
    held_out = {tuple(ids) for ids in not_among.token_ids} if not_among else set()
    columns = ["question"]  # those that make the prompt
    if fmt.template is not None and rows:
        columns = [c for _, c, _, _ in string.Formatter().parse(fmt.template) if c and c in rows[0]]
        if not columns and "{" not in fmt.template:
            raise ValueError(f"--prompt-template {fmt.template!r}: names no column, so all prompts would be the same")
    for i, row in enumerate(rows):
        used = [row.get(name) for name in columns]
        if any(value is None or value == [] or not str(value).strip() for value in used):
            num_null += 1
            continue
        ids = prompt_ids(tokenizer, row, fmt)
        if len(ids) > max_tokens:
            too_long.append(i)
        elif tuple(ids) in held_out:
            num_held_out += 1
        else:
            kept_rows.append(dict(row))
            kept_ids.append(ids)
            places.append(i)
    if too_long and overlong == "error":
        raise ValueError(
            f"{flag}: {len(too_long)} prompts are longer than --max-prompt-tokens {max_tokens}, the first is row "
            f"{too_long[0]}. Raise the limit, or drop them with --overlong-prompts drop"
        )
    if not kept_rows:
        raise ValueError(
            f"{flag}: no row is left of {len(rows)}: {num_null} without a prompt, {len(too_long)} longer than "
            f"--max-prompt-tokens {max_tokens}, {num_held_out} held out (fewer with a lower --eval-prompts)"
        )
    return Prompts(kept_rows, kept_ids, places, num_null, len(too_long), too_long[0] if too_long else None, num_held_out)


def prompt_format(cfg: Any) -> PromptFormat:
    """How the configuration makes messages of a row."""
    return PromptFormat(cfg.system_prompt, cfg.prompt_template, read_few_shot(cfg.few_shot) if cfg.few_shot else ())


def load_tokenizer(cfg: Any, model_path: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Errors: ValueError where prompts and responses may not fit the model's positions."""
    limit = getattr(
        AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config(), "max_position_embeddings", None
    )
    longest = max(cfg.max_response_tokens, cfg.eval_response_tokens)
    asked = cfg.max_prompt_tokens + longest
    if limit is not None and asked > limit:
        raise ValueError(
            f"--max-prompt-tokens {cfg.max_prompt_tokens} + the longest response {longest} = {asked}: the model has {limit} "
            "positions; lower one of them"
        )
    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)


def _columns(cfg: Any) -> dict[str, str | None]:
    return {"config": cfg.dataset_config, "prompt_column": cfg.prompt_column, "answer_column": cfg.answer_column}


def eval_sets(cfg: Any) -> dict[str, str]:
    """Held-out data sets by label: `label=place`, or the last part of it. Errors: ValueError for unfit or equal labels."""
    found: dict[str, str] = {}
    for text in cfg.eval_datasets or (cfg.dataset,):
        label, given, place = text.partition("=")
        if not given or not re.fullmatch(r"[\w.-]+", label):
            place, label = text, text.removeprefix("rg:") if text.startswith("rg:") else Path(text).expanduser().stem
        if not re.fullmatch(r"\w[\w.-]*", label):
            raise ValueError(f"--eval-datasets {text}: {label!r} is no name for its metrics. Give one: name={text}")
        if label in found:
            raise ValueError(f"--eval-datasets {' '.join(cfg.eval_datasets)}: two are called {label}. Name them: name=place")
        found[label] = place
    return found


def load_held_out(cfg: Any, tokenizer: PreTrainedTokenizerBase, only_tasks: bool = False) -> dict[str, Prompts]:
    """The prompts of each held-out data set; with only_tasks, of those alone that are generated."""
    found, fmt = {}, prompt_format(cfg)
    if not cfg.eval_datasets and not only_tasks and Path(cfg.dataset).expanduser().is_file():
        raise ValueError(f"--dataset {cfg.dataset}: is one file, with no held-out split; name other --eval-datasets")
    for label, name in eval_sets(cfg).items():
        is_task, is_file = name.startswith("rg:"), Path(name).expanduser().is_file()
        if only_tasks and not is_task:
            continue
        split = cfg.eval_split or ("train" if is_file else "test")
        # another hub name has columns of its own; another local file is taken to look like the first
        apply = _columns(cfg) if name == cfg.dataset or Path(name).expanduser().exists() else {}
        params = eval_params(cfg, name) if is_task else None
        rows = load_rows(Source(name, split=split, params=params, flag="--eval-datasets", **apply))
        rows = rows[: cfg.eval_prompts] if cfg.eval_prompts else rows
        limits = (cfg.max_prompt_tokens, cfg.overlong_prompts, "--eval-datasets")
        found[label] = build_prompts(rows, tokenizer, fmt, *limits)
    return found


def load_data(cfg: Any, model_path: str) -> tuple:
    """(tokenizer, EOS ids, training prompts, {label: held-out prompts})."""
    tokenizer = load_tokenizer(cfg, model_path)
    own, split = Path(cfg.dataset).expanduser().resolve(), cfg.dataset_split or "train"
    for place in eval_sets(cfg).values() if cfg.eval_every else ():
        file = Path(place).expanduser().resolve()
        if file.is_file() and (file == own or (file.parent == own and file.stem.split("-")[0] == split)):
            raise ValueError(f"--eval-datasets {place}: is what --dataset {cfg.dataset} trains on; name another file")
    # held-out rows of a task stay out of training also in a run without evaluation
    held_out = load_held_out(cfg, tokenizer, only_tasks=not cfg.eval_every)
    tasks = [held_out[label] for label, name in eval_sets(cfg).items() if name == cfg.dataset and name.startswith("rg:")]
    rows = load_rows(Source(cfg.dataset, split=cfg.dataset_split, params=cfg.dataset_params, **_columns(cfg)))
    limits = (cfg.max_prompt_tokens, cfg.overlong_prompts, "--dataset")
    prompts = build_prompts(rows, tokenizer, prompt_format(cfg), *limits, tasks[0] if tasks else None)
    if len(prompts.rows) < cfg.prompts_per_step:
        raise ValueError(
            f"--dataset {cfg.dataset}: {len(prompts.rows)} prompts are left, fewer than --prompts-per-step "
            f"{cfg.prompts_per_step}; take more data or smaller steps"
        )
    return tokenizer, eos_token_ids(model_path, tokenizer), prompts, held_out


def eval_params(cfg: Any, name: str) -> str:
    """Parameters of the held-out rows of rg:<task>: the training parameters with other seeds, as many as are used."""
    params = read_params(cfg.dataset_params) if name == cfg.dataset else {}
    size = {"size": cfg.eval_prompts} if cfg.eval_prompts else {}
    return json.dumps({**params, **size, "seed": params.get("seed", 0) + 1_000_003})


def describe_data(prompts: Mapping[str, Prompts]) -> None:
    """Say what was loaded and what was left out."""
    for name, p in prompts.items():
        longest = max(map(len, p.token_ids))
        dropped = f", {p.num_overlong} over the limit dropped (first: row {p.first_overlong})" if p.num_overlong else ""
        skipped = f", {p.num_null} without a prompt skipped" if p.num_null else ""
        shared = f", {p.num_held_out} that are held out left aside" if p.num_held_out else ""
        print(f"{name} prompts: {len(p.rows)}, longest {longest} tokens{dropped}{skipped}{shared}", flush=True)


class Visit(NamedTuple):
    """One prompt of a step."""

    epoch: int
    index: int  # into the prompts


@dataclass
class PromptOrder:
    """The order in which rows are visited: one seeded permutation an epoch, end to end, whatever the world size.

    `position` counts the prompts taken since the start; it is the whole state.
    """

    num_prompts: int
    seed: int
    position: int = 0

    def take(self, count: int) -> list[Visit]:
        """The next `count` visits; no prompt is repeated or lost within an epoch, a step may cross an epoch's end."""
        taken: list[Visit] = []
        while len(taken) < count:
            epoch, offset = divmod(self.position, self.num_prompts)
            generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
            order = torch.randperm(self.num_prompts, generator=generator).tolist()
            part = order[offset : offset + count - len(taken)]
            taken += [Visit(epoch, index) for index in part]
            self.position += len(part)
        return taken


# ---------------------------------------------------------------------------------------------- samples and seeds


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, as the engine gave it."""

    prompt_ids: list[int]
    response_ids: list[int]  # EOS included where it was sampled
    logprobs: list[float]  # the engine's, of log_softmax(logits / temperature), one a response token
    finish_reason: str  # "stop": ended by an EOS id; "length": cut at the limit
    text: str  # the response without its EOS, for graders and logs
    row: dict
    group: int  # number of its prompt among all prompts of the step, over all ranks


@dataclass(frozen=True)
class Sampling:
    """Everything an engine is told; temperature 0 is greedy."""

    num_samples: int
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """What an engine returns for one sample."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


def seed_for(*parts: int | str) -> int:
    """A 62-bit seed that depends on every part and on nothing else (not on rank, world size or batch order)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def eos_token_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: of generation_config, of the model's config, and of the tokenizer."""
    found = [
        tokenizer.eos_token_id,
        AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config().eos_token_id,
    ]
    try:
        found.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    except OSError:  # a model folder without generation_config.json
        pass
    flat = [i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    if not flat:
        raise ValueError(f"--model {model_path}: neither its configuration nor its tokenizer names an EOS token")
    return tuple(sorted(set(flat)))


class Engine(Protocol):
    """What the training loop needs of an inference engine."""

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Response]]:
        """`num_samples` responses to each prompt; sample i of prompt p draws from seed seeds[p] + i."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights and forget everything computed with the old ones. Uses the iterator to its end."""

    def forget(self) -> None:
        """Drop what is cached of earlier prompts, so that what follows does not depend on them."""

    def sleep(self, keep_weights: bool) -> None:
        """Give accelerator memory back while the trainer works; `keep_weights` where none will be pushed."""

    def wake_up(self, tags: list[str]) -> None:
        """Take memory again: "weights" before `load_weights`, "kv_cache" after it."""

    def close(self) -> None:
        """Free the engine; before the process group is destroyed."""


def sample_groups(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    indices: Sequence[int],
    groups: Sequence[int],
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[Sample]:
    """`num_samples` samples of each prompt in `indices`, prompt by prompt; `groups` are their numbers over all ranks.

    The seed of a sample is its prompt's in `seeds` + its number in the group.
    """
    token_ids = [prompts.token_ids[i] for i in indices]
    responses = engine.generate(token_ids, sampling, list(seeds)) if token_ids else []
    samples = []
    for index, group, ids, group_responses in zip(indices, groups, token_ids, responses, strict=True):
        for r in group_responses:
            shown = r.token_ids[:-1] if r.finish_reason == "stop" else r.token_ids
            text = tokenizer.decode(shown, skip_special_tokens=False)
            samples.append(Sample(ids, r.token_ids, r.logprobs, r.finish_reason, text, prompts.rows[index], group))
    return samples


# ---------------------------------------------------------------------------------------------- graded samples


def grade(graders: Graders, names: Sequence[str], samples: Sequence[Sample]) -> Graded:
    """The rewards `names` of each sample. Graders see its text and its row, with its length and how it ended."""
    rows = [{**s.row, "response_tokens": len(s.response_ids), "finish_reason": s.finish_reason} for s in samples]
    return graders.score(names, [s.text for s in samples], rows)


@dataclass(frozen=True)
class Scored:
    """Samples of this rank, and what graders and the group stage said of them."""

    samples: list[Sample]
    components: torch.Tensor  # [N, K] float64
    scored: torch.Tensor  # [N, K] bool
    scores: torch.Tensor  # [N] float64
    response_mask: torch.Tensor  # [N, T] bool: tokens to train on

    @property
    def groups(self) -> torch.Tensor:
        """[N] int64: the number of each sample's prompt."""
        return torch.tensor([s.group for s in self.samples], dtype=torch.int64)

    def pick(self, indices: Sequence[int]) -> "Scored":
        """Some of them, in this order."""
        index = torch.tensor(indices, dtype=torch.int64)
        tensors = (x[index] for x in (self.components, self.scored, self.scores, self.response_mask))
        return Scored([self.samples[i] for i in indices], *tensors)


def join(parts: Sequence[Scored]) -> Scored:
    """Several rounds' samples, one after another."""
    tensors = (torch.cat([getattr(p, n) for p in parts]) for n in ("components", "scored", "scores", "response_mask"))
    return Scored([s for p in parts for s in p.samples], *tensors)


def trained_tokens(samples: list[Sample], scored: torch.Tensor, max_tokens: int, finished_only: bool) -> torch.Tensor:
    """[N, max_tokens] bool: every sampled token, by length; none of a sample that no reward scored (scored [N, K]), nor, with
    finished_only, of one that was cut at the limit."""
    lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64)  # [N]
    trained = scored.any(1)
    if finished_only:
        trained = trained & torch.tensor([s.finish_reason == "stop" for s in samples], dtype=torch.bool)
    return (torch.arange(max_tokens)[None] < lengths[:, None]) & trained[:, None]


class Verdict(NamedTuple):
    """What becomes of a group."""

    dropped: str | None  # the reason, None where it is kept
    num_tokens: int  # to train on


def judge(part: Scored, weights: Sequence[float], filters: bool) -> dict[int, Verdict]:
    """A verdict for each group of this rank. filters False: all are kept.

    Reasons: unreadable_reward, nothing was scored; zero_std_<value>, no signal (advantages.has_signal), where value is the
    weighted reward of its first sample to one decimal; all_truncated, no token to train on.
    """
    rewards = weighted_sum(part.components, part.scored, torch.tensor(weights, dtype=torch.float64))
    found = {}
    for group, signal in has_signal(part.scores, part.groups, part.scored).items():
        own = part.groups == group
        read = rewards[own & part.scored.any(1)]
        tokens, reason = int(part.response_mask[own].sum()), None
        if not len(read):
            reason = "unreadable_reward"
        elif not signal:
            reason = f"zero_std_{round(read[0].item(), 1) + 0.0}"
        elif not tokens:
            reason = "all_truncated"
        found[group] = Verdict(reason if filters else None, tokens)
    return found


def owners(num_kept: Sequence[int], count: int) -> list[int]:
    """Ranks for the next `count` prompts: always the one that has fewest groups, so that ranks stay level."""
    load, chosen = list(num_kept), []
    for _ in range(count):
        chosen.append(load.index(min(load)))
        load[chosen[-1]] += 1
    return chosen


def optimizer_batches(verdicts: Mapping[int, Verdict], num_batches: int) -> tuple[dict[int, int], int]:
    """({kept group: number of its optimizer batch}, batches left out), the same on every rank.

    Groups go in order of their numbers, as evenly as they divide; where there are fewer than batches, there are fewer batches.
    A batch without a token to train on is left out.
    """
    kept = sorted(group for group, v in verdicts.items() if v.dropped is None)
    batch_of = {group: place * num_batches // len(kept) for place, group in enumerate(kept)}
    tokens = dict.fromkeys(range(num_batches), 0)
    for group, batch in batch_of.items():
        tokens[batch] += verdicts[group].num_tokens
    return {g: b for g, b in batch_of.items() if tokens[b]}, num_batches - sum(t > 0 for t in tokens.values())


def measure_samples(meter: Meter, samples: list[Sample], verdicts: Mapping[int, Verdict]) -> None:
    """Metrics of the samples alone, refills included; verdicts: of this rank's groups."""
    lengths = [len(s.response_ids) for s in samples]
    meter.mean("rollout/response_tokens", sum(lengths), len(samples))
    meter.peak("rollout/response_tokens_max", max(lengths, default=0))
    meter.mean("rollout/prompt_tokens", sum(len(s.prompt_ids) for s in samples), len(samples))
    finished = sum(s.finish_reason == "stop" for s in samples)
    meter.mean("rollout/finished", finished, len(samples))
    meter.total("rollout/truncated", len(samples) - finished)
    meter.total("perf/tokens_sampled", sum(lengths))
    for verdict in verdicts.values():
        if verdict.dropped:
            meter.total(f"rollout/dropped/{verdict.dropped}", 1)
    dropped = {group for group, verdict in verdicts.items() if verdict.dropped}
    meter.total("rollout/tokens_dropped", sum(n for n, s in zip(lengths, samples) if s.group in dropped))


def write_samples(
    path: Path,
    samples: list[Sample],
    names: Sequence[str],
    components: torch.Tensor,
    scored: torch.Tensor,
    scores: torch.Tensor | None = None,
    verdicts: Mapping[int, Verdict] | None = None,
) -> None:
    """All ranks' samples as one JSONL file, in the order of their prompts; rank 0 writes. Uses collectives.

    components and scored [N, K], with K names; scores [N]. A component that was not scored is null;
    `dropped` says why a group was not trained on.
    """
    records = [
        {
            "group": s.group,
            "question": s.row["question"],
            "answer": s.row["answer"],
            "response": s.text,
            "finish_reason": s.finish_reason,
            "response_tokens": len(s.response_ids),
            **{n: components[i, k].item() if scored[i, k] else None for k, n in enumerate(names)},
            **({} if scores is None else {"score": scores[i].item()}),
            **({} if verdicts is None or not verdicts[s.group].dropped else {"dropped": verdicts[s.group].dropped}),
        }
        for i, s in enumerate(samples)
    ]
    ranks = gather_objects(records)

    def write() -> None:
        if is_first_rank():
            path.parent.mkdir(parents=True, exist_ok=True)
            ordered = sorted((r for part in ranks for r in part), key=lambda r: r["group"])
            lines = (printable(json.dumps(r, ensure_ascii=False, default=str)) for r in ordered)  # valid JSON still
            path.write_text("".join(line + "\n" for line in lines))

    run_together(f"writing {path.name}", write)


# ---------------------------------------------------------------------------------------------- engines


class VLLMEngine:
    """vLLM in this process: the torchrun rank is its only worker (external_launcher, no engine process)."""

    def __init__(
        self,
        model_path: str,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        max_model_len: int,
        gpu_memory_utilization: float,
        kv_cache_gib: int,
    ):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # its own, on every import
        from vllm import LLM

        self.on_gpu = device.type == "cuda"
        # per-request seeds crash the CPU sampler on a chunked prefill, so there a prompt must fit one scheduler step
        cpu_args = {"enforce_eager": True, "enable_chunked_prefill": False}
        self.llm = LLM(
            model=model_path,
            dtype=str(dtype).removeprefix("torch."),
            distributed_executor_backend="external_launcher",
            seed=seed,
            generation_config="vllm",  # sampling parameters never come from the model's generation_config
            logprobs_mode="processed_logprobs",  # of logits / temperature, as the trainer computes them
            max_model_len=max_model_len,
            max_num_batched_tokens=max(8192, max_model_len),
            enable_prefix_caching=True,
            use_tqdm_on_load=False,
            skip_tokenizer_init=True,  # ids in, ids out
            trust_remote_code=False,
            disable_log_stats=True,
            **({"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True} if self.on_gpu else cpu_args),
        )

    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Response]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                n=sampling.num_samples,
                temperature=sampling.temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=seed,
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[self._response(o) for o in sorted(output.outputs, key=lambda o: o.index)] for output in outputs]

    @staticmethod
    def _response(output: Any) -> Response:
        ids = list(output.token_ids)
        logprobs = [step[i].logprob for step, i in zip(output.logprobs, ids, strict=True)]
        return Response(ids, logprobs, "stop" if output.finish_reason == "stop" else "length")

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.apply_model(_pack_output_head)
        self.forget()

    def forget(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: a request is still running")

    def sleep(self, keep_weights: bool) -> None:
        if self.on_gpu:
            self.llm.sleep(level=1 if keep_weights else 2)  # 1 keeps the weights in CPU memory

    def wake_up(self, tags: list[str]) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()  # what the trainer has cached, so that the engine finds room
            self.llm.wake_up(tags=tags)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def _pack_output_head(model: torch.nn.Module) -> None:
    """With tied embeddings on CPU, vLLM's head keeps its own packed copy of the old weights: pack it again."""
    head = getattr(model, "lm_head", None)
    if getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)


class HFEngine:
    """transformers' generate: a plain reference, slow, for tests and for machines without vLLM."""

    def __init__(self, model_path: str, dtype: torch.dtype, device: torch.device, *unused: Any):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, trust_remote_code=False)
        self.model = model.to(device).eval()
        self.model.generation_config = GenerationConfig()  # generate() fills in whatever the model's own one names

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]) -> list[list[Response]]:
        rows = [ids for ids in prompts for _ in range(sampling.num_samples)]
        generators = [torch.Generator().manual_seed(s + i) for s in seeds for i in range(sampling.num_samples)]
        width, device = max(map(len, rows)), self.model.device
        input_ids = torch.tensor([[0] * (width - len(r)) + r for r in rows], device=device)  # left-padded
        attention_mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
        temperature = sampling.temperature or 1.0

        def add_gumbel(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """argmax(logits / temperature + Gumbel noise) is a sample of the softmax, from each sample's own seed."""
            if sampling.temperature == 0:
                return logits
            noise = torch.stack([torch.empty(logits.shape[1]).exponential_(generator=g) for g in generators])
            return logits.float() / temperature - noise.log().to(device)

        out = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=list(sampling.stop_token_ids),
                pad_token_id=sampling.stop_token_ids[0],
                output_logits=True,
                return_dict_in_generate=True,
            ),
            logits_processor=[add_gumbel],
        )
        new_ids = out.sequences[:, width:]  # [rows, steps]
        logprobs = torch.stack(
            [
                torch.log_softmax(logits.float() / temperature, -1).gather(1, ids[:, None])[:, 0]
                for logits, ids in zip(out.logits, new_ids.T)
            ],
            dim=1,
        )
        flat = [self._response(i.tolist(), lp.tolist(), sampling) for i, lp in zip(new_ids, logprobs)]
        return [flat[i : i + sampling.num_samples] for i in range(0, len(flat), sampling.num_samples)]

    @staticmethod
    def _response(ids: list[int], logprobs: list[float], sampling: Sampling) -> Response:
        ends = [t for t, token in enumerate(ids) if token in sampling.stop_token_ids]
        length = ends[0] + 1 if ends else len(ids)
        return Response(ids[:length], logprobs[:length], "stop" if ends else "length")

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        missing = set(own)
        for name, tensor in weights:
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"weight push left {len(missing)} parameters of the engine as they were: {sorted(missing)[:5]}")

    def forget(self) -> None:
        """Nothing is cached."""

    def sleep(self, keep_weights: bool) -> None:
        """Nothing to give back: the reference engine is for small models."""

    def wake_up(self, tags: list[str]) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        del self.model


ENGINES = {"vllm": VLLMEngine, "hf": HFEngine}
