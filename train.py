"""Train a language model with reinforcement learning on verifiable rewards: configuration and the loop, in order.

    python train.py                                     one process, the embedded model and task
    torchrun --nproc-per-node 8 train.py --config run.yaml --lr 1e-6

Read `train` first: a step is rollout, grade, advantages, batches, update, push, evaluate, log. A fork edits that function.
Shapes: N samples of this rank, K rewards, T response tokens, [B, T] in a micro-batch. Not here on purpose: estimators
(advantages.py), losses (losses.py), engines and data (rollout.py), graders (rewards.py), collectives (dist_utils.py).
"""

import contextlib
import dataclasses
import difflib
import fcntl
import inspect
import itertools
import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

import torch
import tyro
import yaml
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils import logging as transformers_logging

import advantages as adv
import dist_utils as du
import losses
import rewards as rw
import rollout as ro

ROOT = Path(__file__).resolve().parent
MAX_CONFIG_BYTES = 2**20
TRIM_EVERY = 10  # steps; a trim costs about two seconds of page faults on a CPU


@dataclass(frozen=True)
class Config:
    """Reinforcement learning on verifiable rewards. Defaults, then --config, then the command line."""

    config: str | None = None
    """YAML file of these settings, as `name: value`; the command line overrides it."""

    # Model and engine
    model: str = "embedded"
    """Hugging Face folder, run folder or hub name; "embedded" is the model that scripts/prepare_model.py converts."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype of trainer and engine; master weights are float32. auto: bfloat16 where the processor has it."""
    engine: Literal["vllm", "hf"] = "vllm"
    """Who samples: vLLM in this process, or transformers' generate as a slow reference."""
    max_prompt_tokens: int = 512
    """Longest prompt."""
    max_response_tokens: int = 256
    """Longest response; sampling is cut there."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory that vLLM may take while sampling."""
    kv_cache_gib: int = 1
    """vLLM's cache on a CPU, GiB."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    # Data
    dataset: str = "rg:chain_sum"
    """Hub name, local file or folder (jsonl, json, csv, parquet), or rg:<task> of reasoning-gym."""
    dataset_config: str | None = None
    """Configuration name of a hub data set."""
    dataset_split: str | None = None
    """Split to train on; default train."""
    dataset_params: str | None = None
    """Parameters of rg:<task>, a JSON or YAML mapping: '{min_terms: 2, size: 1000}'."""
    prompt_column: str | None = None
    """Column of the prompt (a text, or a list of chat messages); default: the first of the usual names."""
    answer_column: str | None = None
    """Column of the target answer; default: the first of the usual names."""
    system_prompt: str | None = None
    """System message before every prompt."""
    prompt_template: str | None = None
    """The user's message, with columns in braces: "Compute {expression}."; default: the prompt column."""
    few_shot: str | None = None
    """File of messages (json, jsonl, yaml) put before every question."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What to do with prompts over --max-prompt-tokens."""

    # Rewards
    rewards: tuple[str, ...] = ("correctness", "format")
    """Rewards of the run: names that the README lists, or a function of yours, as path.py:function."""
    reward_weights: tuple[str, ...] = ()
    """Weights by name: correctness=1 format=0.5; a reward that is not named has weight 1."""
    answer_in: Literal["any", "hash", "boxed", "tag", "last"] = "any"
    """Where correctness and gsm8k find the answer: after ####, in a box, in a tag, last number; any: tag, hash, boxed, last."""
    format_tags: tuple[str, ...] = ("answer",)
    """Tags that format asks for, each once and in this order."""
    overlong_buffer: int | None = None
    """Tokens before --max-response-tokens over which overlong falls to -1; default a fifth of them."""
    repetition_ngram: int = 3
    """Words of the n-grams that repetition counts."""
    reward_model: str | None = None
    """Folder or hub name of the sequence-classification model of the reward reward_model."""
    grader_timeout: float = 10.0
    """Seconds for one call of a grader; a batched one has them for its whole batch."""
    grader_workers: int = 4
    """Processes a rank that run graders."""
    grader_memory_gib: float = 4.0
    """Memory that one of them may allocate, GiB."""
    grader_failure: Literal["abstain", "zero", "stop"] = "abstain"
    """What a grader gives that raises, exits or takes too long: nothing, as None does; 0; or the end of the run."""
    truncated_responses: Literal["keep", "mask", "penalise"] = "keep"
    """Responses cut at --max-response-tokens: like any other; out of the loss; or with a further reward `truncated`, -1."""

    # Algorithm
    algorithm: str = "gdpo"
    """One of --list-algorithms."""
    prompts_per_step: int = 8
    """Prompts a rollout, over all ranks."""
    samples_per_prompt: int = 8
    """Responses to each prompt: the group."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are of logits / temperature too."""
    optimizer_steps_per_rollout: int = 1
    """Optimizer batches that a rollout is cut into, by prompts."""
    epochs_per_rollout: int = 1
    """Times that each optimizer batch is trained on."""
    dynamic_sampling: bool | None = None
    """Replace groups without signal by further prompts (True, False); default: the algorithm's."""
    max_refills: int = 10
    """Rounds of further prompts in a step."""
    refill_exhausted: Literal["continue", "stop"] = "continue"
    """Where groups are still missing then: train on those there are, or stop the run."""
    push_every: int = 1
    """Steps between weight pushes to the engine; over 1, samples are of older weights."""
    normalize_rewards: bool = True
    """Apply the algorithm's group stage; off: the weighted sum of rewards as it is."""
    reward_hook: str | None = None
    """path.py:function in place of the group stage: (rewards [N], groups [N]) -> scores [N], of one rank's whole groups."""
    normalize_advantages: bool = False
    """Whiten advantages over the valid tokens of each optimizer batch."""
    gamma: float | None = None
    """Discount of a return."""
    gae_lambda: float | None = None
    """Lambda of generalised advantage estimation."""
    shadow: tuple[str, ...] = ()
    """Algorithms whose advantages on the same samples, without KL, are compared in the log, and not trained on."""

    # Loss: where nothing is given, the algorithm's number holds
    clip_low: float | None = None
    """Lower clip of the ratio, 1 - clip_low."""
    clip_high: float | None = None
    """Upper clip of the ratio, 1 + clip_high."""
    dual_clip: float | None = None
    """Bound of the loss where A < 0: -dual_clip A; over 1."""
    tau_positive: float | None = None
    """Temperature of a soft gate where A > 0."""
    tau_negative: float | None = None
    """Temperature of a soft gate elsewhere."""
    aggregation: str | None = None
    """token_mean, sequence_mean or sequence_sum_norm."""
    kl_coef: float | None = None
    """Weight of the KL to the reference model; 0: none is built."""
    kl_estimator: str | None = None
    """k1, k2 or k3; where --kl-place is not the algorithm's: k3 in the loss, k1 in the reward."""
    kl_place: Literal["loss", "reward"] | None = None
    """Where the KL goes."""
    reference_update_every: int = 0
    """Steps after which the reference takes the policy's weights; 0: never."""
    offload_reference: bool = False
    """Keep the reference's shards in CPU memory between uses."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    mismatch: Literal["truncate", "mask", "none"] = "truncate"
    """Weight for trainer against engine: min(ratio, cap), the ratio within [low, cap] else 0, or 1."""
    mismatch_level: Literal["token", "sequence"] = "token"
    """Ratio of a token, or the product over a response."""
    mismatch_low: float | None = None
    """Lower end for `mask`; default 0.5."""
    mismatch_cap: float | None = None
    """Upper end; default 2."""
    critic_lr: float | None = None
    """Learning rate of the critic."""
    critic_warmup_steps: int | None = None
    """First steps in which the critic alone is trained."""
    value_clip: float | None = None
    """Values move at most so far from the old ones in the value loss."""

    # Optimisation
    steps: int = 100
    """Rollouts of the run."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, counted in optimizer steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta2: float = 0.999
    """AdamW's second beta."""
    max_grad_norm: float = 1.0
    """Clip the gradient's global L2 norm to this."""
    micro_batch_tokens: int = 4096
    """Most prompt and response tokens of one forward pass; a prompt shared by its responses counts once."""
    max_logprob_diff: float = 0.2
    """Stop when trainer and engine differ by more than this in mean |log-prob| on the step's own samples."""

    # Evaluation
    eval_every: int = 0
    """Evaluate before the first step, every so many steps, and after the last; 0: never."""
    eval_modes: tuple[Literal["greedy", "sampled"], ...] = ("greedy",)
    """How to answer the held-out prompts: greedy, sampled, or both."""
    eval_datasets: tuple[str, ...] = ()
    """Held-out data sets, each a place or name=place; default --dataset, with --eval-split or, for rg:<task>, other seeds."""
    eval_split: str | None = None
    """Split of the held-out data; default test."""
    eval_prompts: int = 200
    """Held-out prompts used of each data set, from the first on; 0: all."""
    eval_samples: int = 1
    """Responses to each prompt in the sampled mode; pass@k is given for k = 1, 2, 4, ... and this."""
    eval_temperature: float | None = None
    """Temperature of the sampled mode; default --temperature."""
    eval_max_response_tokens: int | None = None
    """Longest held-out response; default --max-response-tokens."""
    eval_rewards: tuple[str, ...] = ()
    """Rewards of held-out responses; default --rewards."""

    # Checkpoints
    resume: str | None = None
    """Run folder to go on in, after its last complete checkpoint, with its settings where no others are given."""
    save_every: int = 50
    """Steps between checkpoints, which are made at the next push; 0: only where a signal stops the run."""
    keep_last: int = 2
    """Checkpoints that are kept; older ones are deleted when a newer one is complete; 0: all."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in CPU memory."""
    grace_seconds: float = 25.0
    """Time that SIGTERM and SIGINT leave to finish or abandon a step and save; torchrun kills after 30 seconds."""
    max_skipped: int = 10
    """Optimizer steps in a row that may be skipped, as loss or gradient was not finite; then the run stops."""

    # Run
    seed: int = 0
    """Seeds data order and every sample."""
    run_dir: str | None = None
    """Folder of the run, new or empty; default a new one under runs/."""
    export: bool = True
    """Write the trained model as a Hugging Face folder at the end."""
    wandb_mode: Literal["online", "offline", "disabled"] = "disabled"
    """Weights & Biases; disabled needs neither key nor network."""
    wandb_project: str = "flatrl"
    """Project name there."""
    list_algorithms: bool = False
    """Print the algorithms with their capabilities, and leave."""
    list_rewards: bool = False
    """Print the built-in rewards with the flags that they read, and leave."""
    list_metrics: bool = False
    """Print the metrics with their formulas, and leave."""

    @property
    def spec(self) -> adv.Algorithm:
        """The algorithm's entry in the registry."""
        return adv.ALGORITHMS[self.algorithm]

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps a rollout."""
        return self.optimizer_steps_per_rollout * self.epochs_per_rollout

    def number(self, name: str) -> float | None:
        """The flag `name`, or where it is not given the algorithm's."""
        own = getattr(self, name)
        if own is None and name == "kl_estimator" and self.kl_place not in (None, self.spec.kl_place):
            return {"loss": "k3", "reward": "k1"}[self.kl_place]
        return getattr(self.spec, name) if own is None else own

    def numbers(self, function) -> dict[str, float | None]:
        """The numbers that a loss or a batch stage reads."""
        return {name: self.number(name) for name in adv.options_of(function)}

    @property
    def warmup_rollouts(self) -> int:
        """Steps in which only a critic is trained."""
        return int(self.number("critic_warmup_steps")) if self.spec.needs_critic else 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is a part of the token rewards."""
        return self.number("kl_coef") > 0 and self.number("kl_place") == "reward"

    @property
    def graders(self) -> dict[str, rw.Reward]:
        """The rewards of training, by name."""
        penalty = ("truncated",) if self.truncated_responses == "penalise" and "truncated" not in self.rewards else ()
        return rw.resolve(self.rewards + penalty)

    @property
    def eval_graders(self) -> dict[str, rw.Reward]:
        """The rewards of evaluation, by name."""
        return rw.resolve(self.eval_rewards, "--eval-rewards") if self.eval_rewards else rw.resolve(self.rewards)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the K reward components."""
        return rw.component_names(self.graders)

    @property
    def weights(self) -> list[float]:
        """One weight a component."""
        return rw.parse_weights(self.components, self.reward_weights)

    @property
    def eval_response_tokens(self) -> int:
        """Longest held-out response."""
        return self.eval_max_response_tokens or self.max_response_tokens


# ---------------------------------------------------------------------------------------------- configuration


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice (PyYAML keeps the last, silently) and aliases (few lines of them can be
    gigabytes), and reads numbers as a command line does: 010 is ten and not eight, 1:30 is a text and not ninety."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"line {self.peek_event().start_mark.line + 1}: aliases (*name) are not read; write the value out")
        return super().compose_node(parent, index)

    def construct_number(self, node):
        for number in (int, float, super().construct_yaml_float):  # the last one knows .nan and .inf
            try:
                return number(node if number not in (int, float) else node.value)
            except ValueError:
                if ":" in node.value:
                    break
        return node.value

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        twice = sorted({str(k) for k in keys if keys.count(k) > 1})
        if twice:
            raise ValueError(f"given twice: {', '.join(twice)}")
        return super().construct_mapping(node, deep)


for kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{kind}", _Loader.construct_number)


def read_config_file(path: str) -> list[str]:
    """A YAML file as command-line arguments, so that both are parsed by the same rules.

    Errors: ValueError listing every unknown key with its nearest match, and every value of a wrong kind.
    """
    try:
        with Path(path).expanduser().open("rb") as f:
            text = f.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise ValueError(f"is over {MAX_CONFIG_BYTES} bytes, which no file of settings is")
        values = yaml.load(text.decode("utf-8"), _Loader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as e:
        raise ValueError(f"--config {path}: {e}") from e
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ValueError(f"--config {path}: expected a mapping of settings, found {found}")
    types = {f.name: f.type for f in dataclasses.fields(Config) if f.name not in NOT_SETTINGS}
    arguments, problems, seen = [], [], set()
    for key, value in values.items():
        name = str(key).replace("-", "_")
        problems += [f"{key}: given twice, as - and _ are the same"] if name in seen else []
        seen.add(name)
        flag = f"--{name.replace('_', '-')}"
        is_tuple, is_bool = str(types.get(name)).startswith("tuple"), types.get(name) is bool
        if name in ("config", "resume"):
            problems.append(f"{key}: is given on the command line, not in a file")
        elif name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            problems.append(f"{key}: unknown" + (f", did you mean {near[0]}?" if near else ""))
        elif is_bool:
            if not isinstance(value, bool):
                problems.append(f"{key}: {value!r} is not true or false")
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif is_tuple:
            items = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else value
            wrong = (isinstance(i, list | dict) or i is None or str(i).startswith("--") for i in items or ())
            if not isinstance(items, list) or any(wrong):
                problems.append(f"{key}: {value!r} is not a list of values")
                continue
            arguments += [flag, *map(str, items)]
        elif isinstance(value, dict) and name == "dataset_params":
            arguments.append(f"{flag}={json.dumps(value, default=str)}")
        elif isinstance(value, bool) and bool not in get_args(types[name]):
            problems.append(f"{key}: {str(value).lower()} is no value of this setting; put a text in quotes")
        elif isinstance(value, list | dict):
            problems.append(f"{key}: {value!r} is a {type(value).__name__}, not a single value")
        elif value is None and type(None) not in get_args(types[name]):
            problems.append(f"{key}: null, but it needs a value")
        else:
            arguments.append(f"{flag}={value}")
    if problems:
        raise ValueError(f"--config {path}:\n  - " + "\n  - ".join(problems))
    return arguments


def parse(argv: Sequence[str], prog: str = "train.py") -> Config:
    """Defaults < settings of the run that is resumed < --config < command line, checked once.

    Exits with code 2 and one message where something is wrong.
    """
    quiet = os.environ.get("RANK", "0") != "0"

    def last(flag: str) -> str | None:
        pairs = ((a.partition("="), b) for a, b in zip(argv, [*argv[1:], ""]))
        values = [value if sign else after for (name, sign, value), after in pairs if name == flag]
        return values[-1] if values else None

    try:
        file, run_dir = last("--config"), last("--resume")
        from_run = (
            []
            if not run_dir or run_dir.startswith("--")
            else [*read_config_file(settings_file(run_dir)), f"--run-dir={run_dir}"]
        )
        from_file = [] if file is None else read_config_file(file)
        cfg = tyro.cli(Config, args=[*from_run, *from_file, *argv], prog=prog, console_outputs=not quiet)
        listing = any(getattr(cfg, name) for name in LISTS)
        problems = registry_problems() or ([] if listing else find_problems(cfg))
        if problems:
            raise ValueError("the configuration cannot run:\n  - " + "\n  - ".join(problems))
    except ValueError as e:
        if not quiet:
            du.say(f"{prog}: {e}")
        raise SystemExit(2) from None
    return cfg


def registry_problems() -> list[str]:
    """What is wrong with the registries themselves, as a fork may have left them."""
    functions = {"group_stage": adv.GROUP_STAGES, "batch_stage": adv.BATCH_STAGES, "policy_loss": losses.POLICY_LOSSES}
    functions |= {"aggregation": losses.AGGREGATIONS, "kl_estimator": losses.KL_ESTIMATORS}
    flags = {f.name for f in dataclasses.fields(Config)} & {f.name for f in dataclasses.fields(adv.Algorithm)}
    problems = []
    for field, registry in functions.items():
        for name, function in registry.items():
            if not (function.__doc__ or "").split("\n")[0].strip():
                problems.append(f"{field} {name}: the first line of its docstring must be its formula, which a run prints")
            strange = [n for n in adv.options_of(function) if n not in flags]
            if strange:
                problems.append(
                    f"{field} {name}: keyword-only {', '.join(strange)} must be a field of Config and Algorithm, as a flag is"
                )
    for name, a in adv.ALGORITHMS.items():
        for field, registry in (*functions.items(), ("kl_place", ("loss", "reward"))):
            if getattr(a, field) not in registry:
                problems.append(f"algorithm {name}: {field} {getattr(a, field)} is unknown; there are {', '.join(registry)}")
    return problems


def find_problems(cfg: Config) -> list[str]:
    """Everything that can be known to be wrong before a model or a data set is loaded."""
    problems = unfit_texts(cfg)
    if problems:  # paths that cannot be looked at
        return problems
    problems += adv.check(cfg)
    problems += unread_flags(cfg) if cfg.algorithm in adv.ALGORITHMS else []
    readers = ((ro.read_few_shot, cfg.few_shot), (check_hook, cfg.reward_hook), (ro.check_template, cfg.prompt_template))
    for read, value in (*readers, (ro.check_params, cfg), (ro.eval_sets, cfg)):
        try:
            if value is not None:
                read(value)
        except ValueError as e:
            problems.append(str(e))
    try:
        problems += grader_problems(cfg)
        if sum(map(abs, cfg.weights)) < 1e-2 and os.environ.get("RANK", "0") == "0":
            warning = "so small that a constant added to a standard deviation (1e-4 in gdpo) shrinks the advantages"
            du.say(f"warning: the reward weights {cfg.weights} are {warning}")
    except ValueError as e:
        problems.append(str(e))
    problems += out_of_range(cfg)
    if cfg.seed >= 2**31:
        problems.append(f"--seed {cfg.seed}: must be below 2147483648")
    if len(set(cfg.eval_modes)) != len(cfg.eval_modes) or (cfg.eval_every and not cfg.eval_modes):
        problems.append(f"--eval-modes {' '.join(cfg.eval_modes)}: name greedy, sampled or both, each once")
    if cfg.reference_update_every == 1 and cfg.updates_per_rollout == 1:
        problems.append(
            "--reference-update-every 1 with one optimizer step a rollout: the reference would always be the policy itself, "
            "and the KL 0. Give a larger number"
        )
    if cfg.eval_samples > 1 and "sampled" not in cfg.eval_modes:
        problems.append(f"--eval-samples {cfg.eval_samples}: greedy responses are all alike. Add --eval-modes sampled")
    if cfg.eval_temperature is not None and "sampled" not in cfg.eval_modes:
        problems.append(f"--eval-temperature {cfg.eval_temperature}: greedy answers have none. Add --eval-modes sampled")
    for name in ("eval_datasets", "eval_samples", "eval_temperature", "eval_max_response_tokens", "eval_rewards"):
        value = getattr(cfg, name)
        if value != getattr(Config, name) and not cfg.eval_every:
            said = " ".join(value) if isinstance(value, tuple) else value
            problems.append(
                f"{_flag(name)} {said}: nothing is evaluated, as --eval-every is 0. Give --eval-every, or drop the flag"
            )
    for name, known in (("aggregation", losses.AGGREGATIONS), ("kl_estimator", losses.KL_ESTIMATORS)):
        if getattr(cfg, name) is not None and getattr(cfg, name) not in known:
            problems.append(f"{_flag(name)} {getattr(cfg, name)}: unknown; there are {', '.join(known)}")
    if cfg.reward_hook is not None and not cfg.normalize_rewards:
        problems.append(f"--reward-hook {cfg.reward_hook} and --no-normalize-rewards: both replace the group stage; give one")
    if cfg.eval_every % max(cfg.push_every, 1):
        problems.append(
            f"--eval-every {cfg.eval_every}: not a multiple of --push-every {cfg.push_every}; the engine would be evaluated "
            "with older weights"
        )
    if cfg.prompts_per_step % max(cfg.optimizer_steps_per_rollout, 1):
        problems.append(
            f"--prompts-per-step {cfg.prompts_per_step}: not divisible by --optimizer-steps-per-rollout "
            f"{cfg.optimizer_steps_per_rollout}; each optimizer batch takes the same number of prompts"
        )
    if cfg.algorithm in adv.ALGORITHMS:
        low, cap = cfg.number("mismatch_low"), cfg.number("mismatch_cap")
        if low >= cap and "mismatch_low" in adv.options_of(losses.MISMATCH_CORRECTIONS[cfg.mismatch]):
            problems.append(f"--mismatch-low {low}: must be below --mismatch-cap {cap}")
        filters, refills = (
            cfg.number("dynamic_sampling"),
            {"max_refills": cfg.max_refills, "refill_exhausted": cfg.refill_exhausted},
        )
        if filters and cfg.samples_per_prompt == 1:
            problems.append(
                "--dynamic-sampling True: a group of one sample never has signal. Use --samples-per-prompt 2 or more"
            )
        for name, value in refills.items():
            if not filters and value != getattr(Config, name):
                problems.append(f"{_flag(name)} {value}: there are no refills without --dynamic-sampling True. Drop the flag")
        warmup, updates = cfg.warmup_rollouts, policy_updates(cfg)
        if warmup >= max(cfg.steps, 1):
            problems.append(f"--critic-warmup-steps {warmup}: the run has {cfg.steps} steps; the policy would never learn")
        elif cfg.warmup_steps >= max(updates, 1):
            problems.append(f"--warmup-steps {cfg.warmup_steps}: the run has {updates} optimizer steps; warm up over fewer")
    return problems + folder_problems(cfg)


def folder_problems(cfg: Config) -> list[str]:
    """What is wrong with the run's folder and with models' folders."""
    problems = []
    run_dir = Path(cfg.run_dir or "").expanduser()
    if cfg.run_dir and run_dir.exists() and not run_dir.is_dir():
        problems.append(f"--run-dir {cfg.run_dir}: is a file; name a new folder")
    elif cfg.resume:
        problems += resume_problems(cfg)
    elif cfg.run_dir and run_dir.exists() and any(run_dir.iterdir()) and not goes_on(cfg, run_dir):
        can_go_on = du.Checkpoints(run_dir / "checkpoints").steps()
        other = f"or go on in it with --resume {cfg.run_dir}" if can_go_on else "or delete it: it has no checkpoint"
        problems.append(f"--run-dir {cfg.run_dir}: is not empty; name a new folder, so that no run is overwritten, {other}")
    for name in ("model", "reward_model"):
        value = getattr(cfg, name) or ""
        folder = Path(model_folder(cfg) if name == "model" else value).expanduser()
        is_local = value.startswith((".", "/", "~")) or (value not in ("", "embedded") and folder.is_dir())
        if is_local and not (folder / "config.json").exists():
            said = "no model there, which has a config.json. A run exports one, unless --no-export"
            problems.append(f"{_flag(name)} {value}: {said}")
    if cfg.model == "embedded" and not Path(model_folder(cfg), "config.json").exists():
        problems.append(f"--model embedded: {embedded_model_path()} is missing; run python scripts/prepare_model.py")
    return problems


def unfit_texts(cfg: Config) -> list[str]:
    """Texts that are empty where they name something, or that hold what no name and no prompt does."""
    problems = []
    for field in dataclasses.fields(Config):
        value, prompts = getattr(cfg, field.name), field.name in ("system_prompt", "prompt_template", "dataset_params")
        for text in value if isinstance(value, tuple) else (value,):
            if not isinstance(text, str):
                continue
            strange = re.search("[\\0\ud800-\udfff]", text) if prompts else du.printable(text) != text or "\n" in text
            if strange:
                said = "holds a NUL or a part of a character" if prompts else "holds characters that cannot be shown"
                problems.append(f"{_flag(field.name)} {text!r}: {said}")
            elif not text.strip() and not prompts:
                problems.append(f"{_flag(field.name)} {text!r}: is empty. Drop it, or name something")
    return problems


def out_of_range(cfg: Config) -> list[str]:
    """Numbers that lie where they make no sense; a flag that was not given cannot."""
    at_least_1 = "max_prompt_tokens max_response_tokens prompts_per_step samples_per_prompt steps kv_cache_gib push_every "
    at_least_1 += "optimizer_steps_per_rollout epochs_per_rollout micro_batch_tokens grader_workers eval_samples "
    at_least_1 += "eval_max_response_tokens overlong_buffer repetition_ngram max_skipped"
    at_least_0 = "warmup_steps eval_every eval_prompts weight_decay seed reference_update_every kl_coef entropy_coef "
    at_least_0 += "critic_warmup_steps mismatch_low max_refills save_every keep_last"
    positive = "lr max_grad_norm max_logprob_diff clip_high mismatch_cap tau_positive tau_negative critic_lr value_clip "
    positive += "eval_temperature grace_seconds"
    greedy = "a positive, finite number; greedy samples of a group are all alike, so nothing can be learned"
    ranges = (
        ("at least 1", lambda v: 1 <= v < math.inf, at_least_1),
        ("at least 0, and finite", lambda v: 0 <= v < math.inf, at_least_0),
        ("a positive, finite number", lambda v: 0 < v < math.inf, positive),
        (greedy, lambda v: 0 < v < math.inf, "temperature"),
        ("over 1, and finite; usual is 3", lambda v: 1 < v < math.inf, "dual_clip"),
        ("over 0 and at most 86400, a day", lambda v: 0 < v <= 86400, "grader_timeout"),
        ("over 0 and at most 16384", lambda v: 0 < v <= 16384, "grader_memory_gib"),
        ("over 0 and under 1", lambda v: 0 < v < 1, "adam_beta2 gpu_memory_utilization"),
        ("from 0 to 1", lambda v: 0 <= v <= 1, "gamma gae_lambda"),
        ("over 0 and at most 1, where no ratio is clipped below", lambda v: 0 < v <= 1, "clip_low"),
    )
    values = [(name, getattr(cfg, name), what, fits) for what, fits, names in ranges for name in names.split()]
    return [f"{_flag(n)} {v}: must be {what}" for n, v, what, fits in values if v is not None and not fits(v)]


def unread_flags(cfg: Config) -> list[str]:
    """Flags that were given and that nothing in this run would read."""
    spec, problems = cfg.spec, []
    registries = {  # what reads flags: all there is, what this run takes of it, and the algorithms that take another
        "loss": (losses.POLICY_LOSSES, spec.policy_loss, "policy_loss"),
        "batch stage": (adv.BATCH_STAGES, spec.batch_stage, "batch_stage"),
        "--mismatch": (losses.MISMATCH_CORRECTIONS, cfg.mismatch, None),
    }
    for kind, (registry, taken, field) in registries.items():
        for name in dict.fromkeys(n for function in registry.values() for n in adv.options_of(function)):
            if getattr(cfg, name) is not None and name not in adv.options_of(registry[taken]):
                having = [n for n, f in registry.items() if name in adv.options_of(f)]
                if field:
                    having = [n for n, a in adv.ALGORITHMS.items() if getattr(a, field) in having]
                problems.append(
                    f"{_flag(name)} {getattr(cfg, name)}: the {kind} {taken} of {cfg.algorithm} does not read it. Drop the "
                    f"flag, or use {'--algorithm' if field else kind} {'|'.join(having)}"
                )
    if cfg.mismatch_level != "token" and not adv.options_of(losses.MISMATCH_CORRECTIONS[cfg.mismatch]):
        problems.append(f"--mismatch-level {cfg.mismatch_level}: --mismatch {cfg.mismatch} does not read it. Drop the flag")
    given = {"kl_estimator": cfg.kl_estimator, "kl_place": cfg.kl_place}
    given |= {n: getattr(cfg, n) or None for n in ("reference_update_every", "offload_reference")}
    for name, value in given.items():
        if value is not None and not cfg.number("kl_coef"):
            problems.append(f"{_flag(name)} {value}: there is no KL term, as --kl-coef is 0. Give --kl-coef, or drop the flag")
    return problems


def grader_problems(cfg: Config) -> list[str]:
    """What is wrong with the rewards' functions and settings. Errors: ValueError where a reward is not found at all."""
    problems, read = [], set()
    for name, reward in (*cfg.graders.items(), *cfg.eval_graders.items()):
        options = inspect.signature(reward.function).parameters.values()
        settings = settings_of(cfg, reward, cfg.max_response_tokens)
        read |= set(settings)
        missing = [p.name for p in options if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in settings]
        problems += [
            f"reward {name}: keyword-only {n} must have a default, as it is none of {', '.join(REWARD_FLAGS)}" for n in missing
        ]
        if "reward_model" in settings and cfg.reward_model is None:
            problems.append(f"reward {name}: needs --reward-model")
        wants = ("responses", "rows") if reward.batched else ("response", "row")
        is_class = inspect.isclass(reward.function)
        called = reward.function.__call__ if is_class else reward.function
        try:
            if is_class:
                inspect.signature(reward.function).bind(**dict.fromkeys(adv.options_of(reward.function)))
                if not any("__call__" in vars(parent) for parent in reward.function.__mro__):
                    raise TypeError("its class has no __call__")
            itself = ("self",) if is_class else ()
            inspect.signature(called).bind(*itself, *wants, **dict.fromkeys(adv.options_of(called)))
        except TypeError as e:
            problems.append(f"reward {name}: is called with ({', '.join(wants)}): {e}")
    for name, value in ((n, getattr(cfg, n)) for n in REWARD_FLAGS):
        if value != getattr(Config, name) and name not in read:
            readers = [n for n, r in rw.REWARDS.items() if name in adv.options_of(r.function)]
            problems.append(
                f"{_flag(name)} {value}: no reward of this run reads it. Drop the flag, or add --rewards {'|'.join(readers)}"
            )
    return problems


REWARD_FLAGS = ("answer_in", "format_tags", "overlong_buffer", "repetition_ngram", "reward_model")


def settings_of(cfg: Config, reward: rw.Reward, longest: int) -> dict:
    """A reward's keyword-only parameters that are flags of rewards; `longest` is the limit of the responses that it grades."""
    known = {name: getattr(cfg, name) for name in REWARD_FLAGS} | {"max_response_tokens": longest}
    return {name: known[name] for name in adv.options_of(reward.function) if name in known}


def check_hook(place: str) -> None:
    """Load a reward hook. Errors: ValueError where it is not there, or does not take rewards and groups."""
    try:
        inspect.signature(rw.load_function(place)).bind("rewards", "groups")
    except TypeError as e:
        raise ValueError(f"--reward-hook {place}: is called with (rewards, groups): {e}") from e


def policy_updates(cfg: Config) -> int:
    """Optimizer steps of the policy in the run."""
    return (cfg.steps - cfg.warmup_rollouts) * cfg.updates_per_rollout


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def embedded_model_path() -> Path:
    """Where scripts/prepare_model.py puts the model that needs no hub."""
    return Path(os.environ.get("FLATRL_CACHE", Path.home() / ".cache" / "flatrl")) / "smollm2-135m-instruct"


def model_folder(cfg: Config) -> str:
    """What --model stands for: the embedded model, what a run has exported, a folder, or a hub name."""
    folder = embedded_model_path() if cfg.model == "embedded" else Path(cfg.model).expanduser()
    exported = folder / "model"
    return str(exported if (exported / "config.json").exists() else folder)


def new_run_dir(cfg: Config, name: str) -> Path:
    """The run's folder, by default a new one of this name under runs/, or the one that this launch has made before torchrun
    restarted it; the same on every rank. A collective."""
    default = ROOT / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    made = [f.parent for f in (ROOT / "runs").glob("*/run.json") if not cfg.run_dir and goes_on(cfg, f.parent)]
    return du.gather_objects(Path(cfg.run_dir or next(iter(made), default)).expanduser())[0]


# ---------------------------------------------------------------------------------------------- going on in a run


def launch() -> list[int]:
    """The process that stands for this launch, torchrun, which outlives restarts, or this one: its number, and its start in
    clock ticks since boot, which no setting of the clock moves (field 22 of /proc/<pid>/stat)."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return [pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])]


def take_run_dir(cfg: Config, run_dir: Path, held: contextlib.ExitStack) -> None:
    """Make the folder, and keep it for this process until `held` is closed or the process ends.

    Errors: ValueError while another process has it.
    """
    run_dir.mkdir(parents=True, exist_ok=bool(cfg.run_dir) or goes_on(cfg, run_dir))
    lock = held.enter_context((run_dir / "lock").open("a+"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise ValueError(f"{run_dir}: process {lock.read()} is at work there. Wait for its end, or stop it") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def read_identity(run_dir: Path) -> dict:
    """Which run a folder belongs to, and which launch works in it. Errors: ValueError where it is no run folder."""
    try:
        return {**json.loads((run_dir / "run.json").read_text())}
    except (OSError, ValueError, TypeError) as e:
        raise ValueError(f"{run_dir}: is no run folder, which has a run.json ({e})") from e


def goes_on(cfg: Config, run_dir: Path) -> bool:
    """Whether the run in this folder is continued: as asked for, or as torchrun has restarted the launch that made it."""
    if cfg.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return bool(cfg.resume)
    try:
        return read_identity(run_dir).get("launch") == launch()
    except ValueError:  # the first attempt has not come so far
        return False


def settings_file(run_dir: str, flag: str = "--resume ") -> str:
    """The settings of the run that a flag names. Errors: ValueError."""
    folder = Path(run_dir).expanduser()
    file = folder / "config.yaml"
    if not file.is_file():
        said = "no such folder" if not folder.exists() else "is no run folder, which has a config.yaml"
        raise ValueError(f"{flag}{run_dir}: {said}. Name the folder of a run, as --run-dir did")
    return str(file)


def config_of(values: dict) -> Config:
    """The configuration that a checkpoint keeps; settings that no longer exist are left out."""
    names = {f.name for f in dataclasses.fields(Config)}
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names})


def resume_problems(cfg: Config) -> list[str]:
    """What forbids to go on in the run folder --resume with this configuration."""
    folder, said = Path(cfg.resume).expanduser(), f"--resume {cfg.resume}: "
    if Path(cfg.run_dir).expanduser() != folder:
        return [
            f"--run-dir {cfg.run_dir} with --resume {cfg.resume}: a run goes on in its own folder. Drop --run-dir, or copy it"
        ]
    try:
        read_identity(folder)
    except ValueError as e:
        return [f"{said}{e}"]
    checkpoints = du.Checkpoints(folder / "checkpoints")
    for step in reversed(checkpoints.steps()):
        try:
            state = du.read_state(checkpoints.path(step))
            return [said + p for p in unlike(cfg, config_of(state["config"]), state)]
        except (OSError, ValueError, TypeError, KeyError):  # damaged: said, and set aside, when the ranks look for one
            continue
    return [f"{said}there is no complete checkpoint in {checkpoints.folder}. Start again in a new folder, or delete this one"]


def unlike(cfg: Config, old: Config, state: dict) -> list[str]:
    """What cannot change in a run whose checkpoint is `state`, of the configuration `old`."""
    problems, step, made = [], state["step"], state["learners"]["policy"][0]
    if cfg.seed != old.seed:
        problems.append(f"--seed {cfg.seed}: was {old.seed}; the order of the data and every sample follow from it")
    if cfg.algorithm in adv.ALGORITHMS and cfg.spec.needs_critic != old.spec.needs_critic:
        having = ("has no critic", "has one")[:: 1 if cfg.spec.needs_critic else -1]
        problems.append(
            f"--algorithm {cfg.algorithm}: the checkpoint of {old.algorithm} {having[0]}, and {cfg.algorithm} {having[1]}"
        )
    if cfg.algorithm in adv.ALGORITHMS and bool(cfg.number("kl_coef")) != bool(old.number("kl_coef")):
        problems.append(
            f"--kl-coef {cfg.number('kl_coef'):g}: was {old.number('kl_coef'):g}; the reference model is a part of the "
            "checkpoint, and can neither appear nor vanish"
        )
    if cfg.steps < step:
        problems.append(f"--steps {cfg.steps}: the run has done {step}")
    elif cfg.algorithm in adv.ALGORITHMS and policy_updates(cfg) < made:
        problems.append(
            f"--steps {cfg.steps} of {cfg.updates_per_rollout} optimizer steps: the run has made {made} already, more than the "
            f"{policy_updates(cfg)} over which the learning rate is scheduled"
        )
    return problems


def changes(cfg: Config, old: Config) -> list[str]:
    """Every setting that differs."""
    names = [f.name for f in dataclasses.fields(Config) if f.name not in (*NOT_SETTINGS, "run_dir")]
    pairs = ((n, getattr(old, n), getattr(cfg, n)) for n in names)
    return [f"{_flag(n)} {after}, was {before}" for n, before, after in pairs if before != after]


def keep_records(run_dir: Path, step: int, aside: Path) -> None:
    """Take what comes after `step` out of a run folder, as it will come again, and what a killed process has left half written.

    Lines of metrics go to the file `aside`.
    """
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_text().splitlines(keepends=True)
        steps = []
        for number, line in enumerate(lines, 1):
            try:
                steps += [json.loads(line)["step"]] if line.endswith("\n") else []  # the last one may be torn
            except (ValueError, TypeError, KeyError) as e:
                raise ValueError(f"{metrics}, line {number}: is damaged ({e}). Mend or delete that line") from e
        kept = [line for line, number in zip(lines, steps) if number <= step]
        if kept != lines:
            print(f"{metrics}: {len(lines) - len(kept)} lines after step {step} are in {aside} now", flush=True)
            with aside.open("a") as f:
                f.writelines(lines[len(kept) :])
            du.write_text(metrics, "".join(kept))
    missing = max(step, 0) - (len({n for n in steps if 0 < n <= step}) if metrics.exists() else 0)
    if missing:
        du.say(f"warning: {metrics} lacks {missing} of the {step} steps that the checkpoint has done")
    for file in (p for pattern in ("samples/*", "eval/*/*", "batches/*") for p in run_dir.glob(pattern)):
        number = re.search(r"_(\d+)(\.jsonl)?$", file.name)
        if number and int(number[1]) > step:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    for beside in (run_dir / "checkpoints").glob("*.tmp"):
        shutil.rmtree(beside)


# ---------------------------------------------------------------------------------------------- set-up


def load_critic(cfg: Config, model_path: str, dtype: torch.dtype) -> torch.nn.Module:
    """A critic on a copy of the policy's backbone, sharded; its head computes in float32."""
    how = (torch.float32, cfg.activation_checkpointing)
    backbone = du.run_together("loading the critic", losses.load_model, model_path, *how).get_decoder()
    critic = losses.Critic(backbone, backbone.config.hidden_size)
    return du.shard_model(critic, list(backbone.layers), dtype, exact=[critic.head])


def load_reference(cfg: Config, model_path: str, dtype: torch.dtype) -> torch.nn.Module:
    """The policy as it begins, sharded, in the compute dtype and without gradients: KL to it starts at exactly 0."""
    model = du.run_together("loading the reference", losses.load_model, model_path, dtype).requires_grad_(False)
    return du.shard_model(model, list(model.get_decoder().layers), dtype, offload=cfg.offload_reference)


def make_run_dir(cfg: Config, run_dir: Path, resumed: int | None = None) -> None:
    """A folder that describes its run: configuration, command line, git revision and diff, package versions.

    resumed: the step after which the run goes on; then that is in a folder of its own there, and config.yaml is the new one.
    """
    again = goes_on(cfg, run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    run = read_identity(run_dir)["run"] if again else secrets.token_hex(8)
    du.write_text(run_dir / "run.json", json.dumps({"run": run, "launch": launch()}) + "\n")
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(cfg).items()}
    text = yaml.safe_dump({k: v for k, v in plain.items() if k not in NOT_SETTINGS}, sort_keys=False)
    folder = run_dir if resumed is None else run_dir / f"resumed_{resumed:06d}"
    if resumed is not None:
        times = len(list(run_dir.glob(f"{folder.name}*")))
        folder = folder.with_name(folder.name + (f"_{times + 1}" if times else ""))
        folder.mkdir()
        shutil.copy(run_dir / "config.yaml", folder / "config_before.yaml")
    if again:
        keep_records(run_dir, -1 if resumed is None else resumed, folder / "metrics_taken_out.jsonl")
    for place in {run_dir, folder}:
        du.write_text(place / "config.yaml", text)
    (folder / "command.txt").write_text(shlex.join(sys.orig_argv) + "\n")
    (folder / "git_revision.txt").write_text(git("rev-parse", "HEAD"))
    (folder / "git.diff").write_text(git("diff", "HEAD"))
    for name in git("ls-files", "--others", "--exclude-standard", "*.py").splitlines():  # a fork not yet added
        if (ROOT / name).is_file():
            copy = folder / "untracked" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    versions = sorted({f"{d.name}=={d.version}" for d in metadata.distributions()})
    (folder / "packages.txt").write_text("\n".join(versions) + "\n")
    print(f"run folder: {run_dir}\n{text}", flush=True)


def git(*command: str) -> str:
    """What git says of this repository, or why it says nothing."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        return f"no git here: {e}\n"


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a whole step."""

    step: int
    position: int  # prompts taken
    rng: dict  # of this rank


@dataclass
class Run:
    """What the set-up made, for the loop."""

    cfg: Config
    ranks: du.Ranks
    run_dir: Path
    run_id: str
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    eos: tuple[int, ...]
    prompts: ro.Prompts
    held_out: dict[str, ro.Prompts]  # by data set
    graders: rw.Graders
    held_out_graders: rw.Graders
    dtype: torch.dtype  # of compute and of the engine
    engine: ro.Engine
    policy: du.Learner
    critic: du.Learner | None
    reference: torch.nn.Module | None  # FSDP2, shards in the compute dtype
    order: ro.PromptOrder
    log: "Log"
    stop: du.StopRequest
    checkpoints: du.Checkpoints
    done: Progress
    last_saved: int = 0  # step of the last checkpoint that was begun

    def tensors(self, known: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, by name, as it is sharded; `known` are the names in the one that is to be loaded."""
        found = {}
        for part, learner in (("policy", self.policy), ("critic", self.critic)):
            if learner is not None:
                own = [n.removeprefix(f"{part}.") for n in known if n.startswith(f"{part}.")]
                found |= {f"{part}.{name}": tensor for name, tensor in learner.tensors(own).items()}
        if self.reference is not None:
            found |= {f"reference.weights.{name}": p.detach() for name, p in self.reference.named_parameters()}
        return found


def set_up(cfg: Config, ranks: du.Ranks, stop: du.StopRequest, held: contextlib.ExitStack) -> Run:
    """Data, run folder, engine, model, optimizer and log, in this order: cheap things that can be wrong come first."""
    set_seed(cfg.seed)
    model_path, run_dir = model_folder(cfg), new_run_dir(cfg, cfg.algorithm)
    tokenizer, eos, prompts, held_out = du.run_together("loading the data", ro.load_data, cfg, model_path)
    du.agree("the prompts", [p.digest() for p in (prompts, *held_out.values())])
    du.run_together("making the run folder", take_run_dir if ranks.rank == 0 else no_work, cfg, run_dir, held)
    checkpoints = du.Checkpoints(run_dir / "checkpoints", cfg.keep_last, cfg.async_save)
    state = None
    if du.gather_objects(goes_on(cfg, run_dir))[0]:
        there = checkpoints.steps()
        state = checkpoints.find(du.run_together("reading the run folder", read_identity, run_dir)["run"])
        if state is None and (there or cfg.resume):
            raise du.RankFailure(f"{run_dir}: no checkpoint is complete. Start again in a new folder")
        if state is not None:
            known = du.run_together("reading the checkpoint", du.tensor_sizes, checkpoints.path(state["step"]))
            du.run_together("comparing with the checkpoint", compare, cfg, ranks, prompts, model_path, state, known)
    resumed = None if state is None else state["step"]
    du.run_together("making the run folder", make_run_dir if ranks.rank == 0 else no_work, cfg, run_dir, resumed)
    run_id = du.run_together("reading the run folder", read_identity, run_dir)["run"]
    du.run_together("describing the run", describe if ranks.rank == 0 else no_work, cfg, ranks, model_path, prompts, held_out)
    graders = du.run_together("starting the graders", start_graders, cfg, cfg.graders, cfg.max_response_tokens)
    held_out_graders = graders
    if cfg.eval_every and (cfg.eval_rewards or cfg.eval_response_tokens != cfg.max_response_tokens):
        request = (start_graders, cfg, cfg.eval_graders, cfg.eval_response_tokens)
        held_out_graders = du.run_together("starting the graders of held-out responses", *request)
    dtype = du.compute_dtype(cfg.dtype, ranks.device)
    engine = load_engine(cfg, ranks, model_path, dtype)
    policy, critic = load_learners(cfg, model_path, dtype)
    reference = load_reference(cfg, model_path, dtype) if cfg.number("kl_coef") else None
    order = ro.PromptOrder(len(prompts.rows), cfg.seed)
    log = du.run_together("starting the log", Log, cfg, ranks, run_dir, run_id, resumed or 0)
    for started in (graders, held_out_graders):
        du.run_together("starting the graders", started.check)
    data = (tokenizer, eos, prompts, held_out, graders, held_out_graders)
    done = Progress(0, 0, du.rng_state(ranks.device))
    models = (dtype, engine, policy, critic, reference)
    run = Run(cfg, ranks, run_dir, run_id, model_path, *data, *models, order, log, stop, checkpoints, done)
    if state is not None:
        restore(run, state, known)
    return run


def load_learners(cfg: Config, model_path: str, dtype: torch.dtype) -> tuple[du.Learner, du.Learner | None]:
    """Policy and critic with their optimizers, sharded."""
    how = (torch.float32, cfg.activation_checkpointing)
    model = du.run_together("loading the model", losses.load_model, model_path, *how)
    model = du.shard_model(model, list(model.get_decoder().layers), dtype)
    adamw = (cfg.lr_schedule, cfg.warmup_steps, cfg.adam_beta2, cfg.weight_decay)
    policy = du.Learner(model, cfg.lr, policy_updates(cfg), *adamw)
    if not cfg.spec.needs_critic:
        return policy, None
    critic = load_critic(cfg, model_path, dtype)
    return policy, du.Learner(critic, cfg.number("critic_lr"), cfg.steps * cfg.updates_per_rollout, *adamw, "critic_")


def compare(cfg: Config, ranks: du.Ranks, prompts: ro.Prompts, model_path: str, state: dict, known: dict[str, tuple]) -> None:
    """Say what has changed since the checkpoint, with `known` tensors. Errors: ValueError for what cannot change."""
    old = config_of(state["config"])
    problems = unlike(cfg, old, state)
    shapes = {f"policy.weights.{name}": tuple(p.shape) for name, p in du.empty_model(model_path).named_parameters()}
    if shapes != {name: shape for name, shape in known.items() if name.startswith("policy.weights.")}:
        problems.append(f"--model {cfg.model}: has other parameters than the model of the run, {old.model}")
    if prompts.digest() != state["prompts"]:
        problems.append(
            "the training prompts are others than the run has trained on: another file, template, tokenizer or limit"
        )
    if problems:
        raise ValueError("the run cannot go on:\n  - " + "\n  - ".join(problems))
    if ranks.rank == 0:
        print(f"going on after step {state['step']}", flush=True)
        for change in changes(cfg, old):
            print(f"changed: {change}", flush=True)
        if len(state["rng"]) != ranks.world_size:
            said = f"{ranks.world_size} ranks, was {len(state['rng'])}: numbers will agree to rounding, not bit for bit"
            print(f"changed: {said}", flush=True)


def restore(run: Run, state: dict, known: dict[str, tuple]) -> None:
    """Take up the checkpoint of `state`: its `known` tensors, counters, place in the data, generators, the engine's weights."""
    folder, rank = run.checkpoints.path(state["step"]), run.ranks.rank
    tensors = run.tensors(list(known))
    others = sorted(set(known) ^ set(tensors))
    if others:
        raise du.RankFailure(f"{folder} and the models of this run differ in {len(others)} tensors: {', '.join(others[:5])}")
    du.load_checkpoint(folder, tensors)
    restore_counters(run, state)
    run.order.position = state["position"]
    if rank < len(state["rng"]):
        du.set_rng_state(state["rng"][rank], run.ranks.device)
    run.done = Progress(state["step"], state["position"], du.rng_state(run.ranks.device))
    run.last_saved = state["step"]
    run.engine.load_weights(du.full_parameters(run.policy.model, run.dtype))


def restore_counters(run: Run, state: dict) -> None:
    """Optimizer steps made, and those skipped in a row."""
    for name, learner in (("policy", run.policy), ("critic", run.critic)):
        if learner is not None:
            learner.num_updates, learner.num_skipped = state["learners"][name]


def save(run: Run) -> None:
    """A checkpoint of the last whole step. A collective."""
    learners = {"policy": run.policy} | ({"critic": run.critic} if run.critic is not None else {})
    state = {
        "run": run.run_id,
        "step": run.done.step,
        "position": run.done.position,
        "rng": du.gather_objects(run.done.rng),
        "learners": {name: (learner.num_updates, learner.num_skipped) for name, learner in learners.items()},
        "prompts": run.prompts.digest(),
        "config": dataclasses.asdict(run.cfg),
    }
    run.checkpoints.save(run.done.step, run.tensors(), state)
    run.last_saved = run.done.step
    run.stop.outcome = f"after the checkpoint of step {run.done.step}, if that is complete"

    def prune() -> None:
        """Batches whose checkpoint is gone cannot be replayed."""
        kept = {f"step_{step + 1:06d}" for step in (0, *run.checkpoints.steps())}
        for batches in (run.run_dir / "batches").glob("step_*") if run.ranks.rank == 0 else ():
            if batches.name not in kept:
                shutil.rmtree(batches)

    du.run_together("deleting old batches", prune)


def stop_if_asked(run: Run) -> None:
    """After a signal to any rank, save the last whole step and end the run on all. A collective; between the parts of a step.

    Only where the engine has the weights of that step: a checkpoint holds no others. With --push-every over 1 the run goes on
    until then, as long as --grace-seconds allow.
    Errors: Stopped.
    """
    number = int(du.max_over_ranks(run.stop.number))
    if not number or run.done.step % run.cfg.push_every:
        return
    run.checkpoints.finish()
    if run.done.step > run.last_saved:
        save(run)
        run.checkpoints.finish()
    said = f"{signal.Signals(number).name}: stopped after step {run.done.step} of {run.cfg.steps}"
    how = f"go on with --resume {run.run_dir}" if run.done.step else "nothing was done yet"
    close(run)
    raise du.Stopped(number, f"{said}; {how}")


def start_graders(cfg: Config, rewards: dict[str, rw.Reward], longest: int) -> rw.Graders:
    """The processes of some rewards, for responses of at most `longest` tokens; they load while the models do."""
    settings = {name: settings_of(cfg, reward, longest) for name, reward in rewards.items()}
    limits = (cfg.grader_timeout, cfg.grader_workers, cfg.grader_memory_gib, cfg.grader_failure)
    return rw.Graders(rewards, settings, *limits)


def load_engine(cfg: Config, ranks: du.Ranks, model_path: str, dtype: torch.dtype) -> ro.Engine:
    """The engine of this rank, with room for the longest prompt and response."""
    longest = cfg.max_prompt_tokens + max(cfg.max_response_tokens, cfg.eval_response_tokens if cfg.eval_every else 0)
    room = (longest, cfg.gpu_memory_utilization, cfg.kv_cache_gib)
    return ro.ENGINES[cfg.engine](model_path, dtype, ranks.device, cfg.seed + ranks.rank, *room)


def describe(cfg: Config, ranks: du.Ranks, model_path: str, prompts: ro.Prompts, held_out: dict[str, ro.Prompts]) -> None:
    """Say what will be trained on what."""
    ro.describe_data({"training": prompts} | {f"held-out {label}": p for label, p in held_out.items()})
    print(equation(cfg) + plan(cfg, ranks, model_path), flush=True)


def equation(cfg: Config) -> str:
    """What this configuration trains on, as formulas: the first lines of the docstrings of what it looked up."""
    spec, formula = cfg.spec, adv.formula_of
    stage, loss = adv.BATCH_STAGES[spec.batch_stage], losses.POLICY_LOSSES[spec.policy_loss]
    group = adv.GROUP_STAGES[spec.group_stage if cfg.normalize_rewards else "none"]
    correction = losses.MISMATCH_CORRECTIONS[cfg.mismatch]
    numbers = cfg.numbers(loss) | cfg.numbers(stage) | cfg.numbers(correction)
    estimator, place, coef = (cfg.number(n) for n in ("kl_estimator", "kl_place", "kl_coef"))
    terms = "c l" + (f" + {coef:g} KL" if coef and place == "loss" else "")
    terms += f" - {cfg.entropy_coef:g} H" if cfg.entropy_coef else ""
    score = f"s_i = {formula(group)}" if cfg.reward_hook is None else f"s = {cfg.reward_hook}(r, groups)"
    score += "" if spec.uses_reward_components or group is adv.none else ", r_i = sum_k w_k x_ik"
    weights = ", ".join(f"{n} {w:g}" for n, w in zip(cfg.components, cfg.weights))
    aggregation = formula(losses.AGGREGATIONS[cfg.aggregation or spec.aggregation])
    lines = [
        f"{cfg.algorithm}: L = {aggregation.replace('m l', f'm ({terms})')}",
        f"  sums over one optimizer batch, all micro-batches and ranks: N = {batch_sequences(cfg)} sequences; "
        f"max_response_tokens {cfg.max_response_tokens}",
        f"  {formula(loss)}",
        f"  {formula(stage)}" + (", then whitened over its tokens" if cfg.normalize_advantages else ""),
        f"  {score}; reward weights w: {weights}"
        + (f"; groups with equal s are replaced, {cfg.max_refills} times a step" if cfg.number("dynamic_sampling") else ""),
        f"  c = {formula(correction)}"
        + (f", q = exp(old_logprobs - rollout_logprobs) of a {cfg.mismatch_level}" if cfg.numbers(correction) else ""),
    ]
    if coef:
        of = "logprobs" if place == "loss" else "old_logprobs"
        kl = formula(losses.KL_ESTIMATORS[estimator]).replace("x = logprobs - base_logprobs", f"x = {of} - ref_logprobs")
        lines.append(f"  KL = {kl.removeprefix('x = ')} in the {place} alone, kl_coef {coef:g}")
        if cfg.reference_update_every:
            lines[-1] += f"; the reference takes the policy's weights every {cfg.reference_update_every} steps"
        if losses.KL_ESTIMATORS[estimator] is losses.k1 and place == "loss":
            lines[-1] += "; warning: its expected gradient is 0, k2 and k3 pull the policy back"
    else:
        lines.append("  no KL: kl_coef 0")
    if spec.needs_critic:
        lines.append(f"  critic: mean over tokens of {formula(losses.value_loss)}, R = A + V before any whitening")
        numbers |= {n: cfg.number(n) for n in ("value_clip", "critic_lr", "critic_warmup_steps")}
    lines += ["  " + ", ".join(f"{n} {'off' if v is None else f'{v:g}'}" for n, v in numbers.items())] if numbers else []
    return "\n".join(lines) + "\n"


def batch_sequences(cfg: Config) -> int:
    """Samples of an optimizer batch over all ranks."""
    return cfg.prompts_per_step // cfg.optimizer_steps_per_rollout * cfg.samples_per_prompt


def plan(cfg: Config, ranks: du.Ranks, model_path: str) -> str:
    """Tokens of a step and memory of a rank, as far as they are known before a model is loaded."""
    model = du.empty_model(model_path)
    count = sum(p.numel() for p in model.parameters())
    bytes_of, world_size = du.compute_dtype(cfg.dtype, ranks.device).itemsize, ranks.world_size
    num_samples = cfg.prompts_per_step * cfg.samples_per_prompt
    gib = {"policy, fp32 with gradients and moments": 16 * count / world_size, "engine's weights": bytes_of * count}
    gib |= {"critic": 16 * count / world_size} if cfg.spec.needs_critic else {}
    gib |= {"reference": bytes_of * count / world_size} if cfg.number("kl_coef") else {}
    rows = min(cfg.micro_batch_tokens, num_samples * cfg.max_response_tokens)
    gib["logits and their gradient, at most"] = 2 * bytes_of * rows * model.config.get_text_config().vocab_size
    parts = ", ".join(f"{name} {amount / 2**30:.1f}" for name, amount in gib.items())
    return (
        f"plan: a step samples {cfg.prompts_per_step} x {cfg.samples_per_prompt} = {num_samples} responses, at most "
        f"{num_samples * cfg.max_response_tokens:,} tokens after {cfg.prompts_per_step * cfg.max_prompt_tokens:,} of prompts, "
        f"and makes {cfg.updates_per_rollout} optimizer steps; {world_size} ranks\n"
        f"plan: {count:,} parameters; GiB a rank: {parts}; and the engine's cache\n"
    )


# ---------------------------------------------------------------------------------------------- measuring


def measure_scores(cfg: Config, everything: ro.Scored, meter: du.Meter) -> None:
    """Metrics of the rewards and scores of all that was sampled. Uses collectives."""
    graded, scores = (everything.components, everything.scored, cfg.weights, everything.groups), everything.scores
    parts = du.run_together("measuring scores", adv.contributions, cfg.algorithm, *graded, scores)
    adv.measure(meter, cfg.components, *graded, scores, parts)


def measure_failures(meter: du.Meter, graded: rw.Graded, before: str) -> None:
    """How many samples each reward failed on."""
    for name, counts in graded.failures.items():
        for kind in ("timeout", "error"):
            meter.total(f"{before}{name}/{kind}", counts[kind])


def measure_advantages(cfg: Config, graded: tuple, rollout: adv.Rollout, advantages, returns, meter: du.Meter) -> None:
    """Metrics of advantages [N, T] and returns [N, T], and the shadows' on the same samples. Uses collectives."""
    mask = rollout.response_mask
    meter.mean("advantage/abs", advantages[mask].abs().sum(), mask.sum())
    meter.peak("advantage/max", advantages.abs().max() if len(advantages) else 0.0)
    if du.sum_over_ranks(float(mask.sum())) == 0:
        return  # nothing to take statistics of
    shadows = {}
    for name in cfg.shadow:
        other = adv.ALGORITHMS[name]
        numbers = {n: getattr(other, n) for n in adv.options_of(adv.BATCH_STAGES[other.batch_stage])}
        try:
            scores = du.run_together("a shadow's group stage", adv.group_scores, name, *graded)
            own = dataclasses.replace(rollout, scores=scores, penalty=None)
            shadows[name], _ = adv.token_advantages(name, own, False, **numbers)
        except du.RankFailure:  # the same on every rank; what cannot be said is left out
            continue
    adv.measure_shadows(meter, shadows, advantages, mask)
    if returns is not None:
        error, spread = (du.mean_std(x, mask, ddof=0) for x in (returns - rollout.values, returns))
        if not spread.collapsed:
            meter.mean("advantage/explained_variance", 1 - (error.std / spread.std) ** 2, 1)


# ---------------------------------------------------------------------------------------------- phases of a step


def collect(run: Run, step: int, hook, ledger: du.Ledger, meter: du.Meter) -> tuple:
    """Sample, grade and score until every place of the step is taken by a group; with dynamic sampling, by one with signal.

    Every decision is taken from verdicts that all ranks hold, so that none can go on alone. Returns all samples of this rank;
    those to train on, in the order of their optimizer batches; how many belong to each; and the verdicts on this rank's groups.
    Errors: RuntimeError where places stay empty after --max-refills and --refill-exhausted is stop.
    """
    cfg, ranks, filters = run.cfg, run.ranks, bool(run.cfg.number("dynamic_sampling"))
    sampling = ro.Sampling(cfg.samples_per_prompt, cfg.temperature, cfg.max_response_tokens, run.eos)
    limits = (cfg.max_response_tokens, cfg.truncated_responses == "mask")
    parts, verdicts = [], {}
    num_kept, missing, num_rounds = [0] * ranks.world_size, cfg.prompts_per_step, 0
    while missing and num_rounds <= (cfg.max_refills if filters else 0):
        stop_if_asked(run)
        with ledger.phase("sample"):
            visits = run.order.take(missing)
            places = [p for p, rank in enumerate(ro.owners(num_kept, missing)) if rank == ranks.rank]
            numbers = [len(verdicts) + p for p in places]
            indices = [visits[p].index for p in places]
            seeds = [ro.seed_for(cfg.seed, step, visits[p].epoch, run.prompts.row_ids[visits[p].index]) for p in places]
            request = (run.engine, run.tokenizer, run.prompts, indices, numbers, sampling, seeds)
            samples: list[ro.Sample] = du.run_together("sampling", ro.sample_groups, *request)
        with ledger.phase("grade"):
            graded = du.run_together("grading", ro.grade, run.graders, tuple(cfg.graders), samples)
            measure_failures(meter, graded, "reward/")
        with ledger.phase("advantage"):
            groups = torch.tensor([s.group for s in samples], dtype=torch.int64)  # [N]
            estimator = (cfg.algorithm, graded.components, graded.scored, cfg.weights, groups, cfg.normalize_rewards, hook)
            scores = du.run_together("the group stage", adv.group_scores, *estimator)
            mask = ro.trained_tokens(samples, graded.scored, *limits)
            part = ro.Scored(samples, graded.components, graded.scored, scores, mask)
            judged = du.run_together("judging groups", ro.judge, part, cfg.weights, filters)
            for rank, theirs in enumerate(du.gather_objects(judged)):
                verdicts |= theirs
                num_kept[rank] += sum(v.dropped is None for v in theirs.values())
        parts.append(part)
        missing, num_rounds = cfg.prompts_per_step - sum(num_kept), num_rounds + 1
    if missing:
        said = f"{missing} of {cfg.prompts_per_step} places have no group with signal after {len(verdicts)} prompts"
        said += f" (--max-refills {cfg.max_refills})"
        if cfg.refill_exhausted == "stop":
            write_step(run, step, ro.join(parts), verdicts)
            raise RuntimeError(f"step {step}: {said}. Take easier or harder prompts, or --refill-exhausted continue")
        if ranks.rank == 0:
            du.say(f"step {step}: {said}; training on the others")
    with ledger.phase("advantage"):
        everything = ro.join(parts)
        batch_of, num_empty = ro.optimizer_batches(verdicts, cfg.optimizer_steps_per_rollout)
        trained = [i for i, s in enumerate(everything.samples) if s.group in batch_of]
        chosen = everything.pick(sorted(trained, key=lambda i: everything.samples[i].group))
        sizes = {b: sum(batch_of[s.group] == b for s in chosen.samples) for b in sorted(set(batch_of.values()))}
        own = {s.group: verdicts[s.group] for s in everything.samples}
        ro.measure_samples(meter, everything.samples, own)
        counts = {"prompts_sampled": len(verdicts), "refills": num_rounds - 1, "prompts_missing": missing}
        for name, count in counts.items():
            meter.peak(f"rollout/{name}", count)
        meter.peak("loss/empty_batches", num_empty)
        measure_scores(cfg, everything, meter)
    return everything, chosen, sizes, own


def form_batches(
    cfg: Config, samples: list[ro.Sample], mask: torch.Tensor, sizes: dict[int, int], device: torch.device, meter: du.Meter
) -> list[tuple]:
    """Per optimizer batch: (micro-batches, as many on every rank; global denominators). Uses collectives.

    mask [N, T] bool; sizes: samples of this rank, in order, in each optimizer batch.
    """
    layout = (samples, mask, list(sizes.values()), cfg.micro_batch_tokens, device)
    formed = []
    for micro, size in zip(du.run_together("forming batches", losses.form_batches, *layout), sizes.values(), strict=True):
        num_micro = int(du.max_over_ranks(len(micro)))
        num_tokens = int(du.sum_over_ranks(sum(b.num_tokens for b in micro)))
        total = losses.Denominators(int(du.sum_over_ranks(size)), num_tokens, cfg.max_response_tokens)
        formed.append((micro + [losses.empty_batch(device)] * (num_micro - len(micro)), total))
        meter.total("perf/tokens_computed", sum(b.input_ids.numel() for b in micro))
    return formed


def write_step(run: Run, step: int, everything: ro.Scored, verdicts: dict[int, ro.Verdict]) -> None:
    """All samples of a step as a file. Uses collectives."""
    seen = (everything.components, everything.scored, everything.scores, verdicts)
    ro.write_samples(run.run_dir / f"samples/step_{step:06d}.jsonl", everything.samples, run.cfg.components, *seen)


@torch.no_grad()
def look_ahead(run: Run, batches: list[tuple], every: bool) -> list[tuple]:
    """Forward passes that come before any update: the reference's log-probs, the critic's values, and the policy's old
    log-probs of all optimizer batches but the first, whose own first forward pass gives them, or of `every` one."""
    cfg, filled = run.cfg, []
    for number, (micro, total) in enumerate(batches):
        known = []
        for batch in micro:
            if number > 0 or every:
                logprobs, _ = losses.token_logprobs(run.policy.model, batch, cfg.temperature)
                batch = dataclasses.replace(batch, old_logprobs=logprobs)
            if run.reference is not None:
                logprobs, _ = losses.token_logprobs(run.reference, batch, cfg.temperature)
                batch = dataclasses.replace(batch, ref_logprobs=logprobs)
            if run.critic is not None:
                batch = dataclasses.replace(batch, old_values=losses.token_values(run.critic.model, batch))
            known.append(batch)
        filled.append((known, total))
    for model in (run.reference, run.critic and run.critic.model):
        if model is not None:
            du.free_gathered(model)
    return filled


def rollout_of(cfg: Config, batches: list[tuple], chosen: ro.Scored, sizes: dict[int, int]) -> adv.Rollout:
    """What the batch stage reads: scores [N], and from the forward passes KL penalty and values [N, T] where there are any."""
    every, mask = [batch for micro, _ in batches for batch in micro], chosen.response_mask
    empty = torch.zeros(mask.shape, dtype=torch.float64)
    penalty = empty.clone() if cfg.kl_in_reward else None
    values = empty.clone() if cfg.spec.needs_critic else None
    for batch in every:
        if penalty is not None:
            kl = losses.kl_to(cfg.number("kl_estimator"), batch.old_logprobs, batch.ref_logprobs, batch.response_mask)
            batch.put(cfg.number("kl_coef") * kl, penalty)
        if values is not None:
            batch.put(batch.old_values, values)
    return adv.Rollout(chosen.scores, mask, sizes, penalty, values)


def with_advantages(batches: list[tuple], advantages: torch.Tensor, returns: torch.Tensor | None) -> list[tuple]:
    """The batches with each one's part of the [N, T] advantages, and returns where there is a critic."""
    filled = []
    for micro, total in batches:
        known = []
        for batch in micro:
            part = None if returns is None else batch.pick(returns)
            known.append(dataclasses.replace(batch, advantages=batch.pick(advantages), returns=part))
            known[-1].validate()
        filled.append((known, total))
    return filled


def update(run: Run, step: int, batches: list[tuple], meter: du.Meter) -> int:
    """The optimizer steps of one rollout; how many were skipped, as loss or gradient was not finite.

    Errors: RuntimeError where engine and trainer differ.
    """
    cfg, num_skipped = run.cfg, 0
    fresh = (step - 1) % cfg.push_every == 0  # the engine sampled with the trainer's weights
    if step <= cfg.warmup_rollouts:
        check_mismatch(cfg, batches, fresh, meter)
    else:
        num_skipped += update_policy(run, batches, fresh, meter)
    if run.critic is not None:
        num_skipped += update_critic(run, batches, meter)
    return num_skipped


def keep_batches(run: Run, step: int, batches: list[tuple], num_skipped: int) -> None:
    """Write the batches of a step that scripts/replay.py can need: of the first after a checkpoint, or with a skipped update.

    A collective. Errors: RankFailure after --max-skipped skipped updates in a row.
    """
    folder, follows = run.run_dir / "batches", run.last_saved == step - 1
    if num_skipped or follows:
        name = f"{'skipped' if num_skipped else 'step'}_{step:06d}"

        def write() -> None:
            losses.save_batches(folder / name / f"rank_{run.ranks.rank}.safetensors", batches)
            if run.ranks.rank == 0:
                shutil.copy(run.run_dir / "config.yaml", folder / name)  # a run that goes on may have others later

        du.run_together("saving the batches", write)
    in_a_row = max(learner.num_skipped for learner in (run.policy, run.critic) if learner is not None)
    if in_a_row >= run.cfg.max_skipped:
        said = f"loss or gradient was not finite in {in_a_row} optimizer steps in a row (--max-skipped {run.cfg.max_skipped})"
        saved = f"the last checkpoint is of step {run.last_saved}" if run.last_saved else "there is no checkpoint"
        raise du.RankFailure(f"step {step}: {said}; the weights were left as they were. See {folder}; {saved}")


def update_policy(run: Run, batches: list[tuple], fresh: bool, meter: du.Meter) -> int:
    """Train on every optimizer batch, `epochs_per_rollout` times. fresh: the engine sampled with these weights."""
    cfg, model, num_skipped = run.cfg, run.policy.model, 0
    for epoch in range(cfg.epochs_per_rollout):
        for number, (micro, total) in enumerate(batches):
            share = torch.zeros(())
            for i, batch in enumerate(micro):
                logprobs, entropy = losses.token_logprobs(model, batch, cfg.temperature)
                if batch.old_logprobs is None:
                    micro[i] = batch = dataclasses.replace(batch, old_logprobs=logprobs.detach())
                loss = policy_loss(cfg, batch, logprobs, entropy, total, meter)
                meter.total("loss/policy", loss.detach() / (len(batches) * cfg.epochs_per_rollout))
                share = share + loss.detach().cpu()
                (loss * run.ranks.world_size).backward()  # FSDP2 averages over ranks, the loss is a share of the sum
            if epoch == number == 0:  # no weight has changed yet, and every batch has its old log-probs by now
                check_mismatch(cfg, batches, fresh, meter)
            num_skipped += not run.policy.step(float(share), cfg.max_grad_norm, meter)
    return num_skipped


def update_critic(run: Run, batches: list[tuple], meter: du.Meter) -> int:
    """Train the critic on every optimizer batch, `epochs_per_rollout` times."""
    cfg, num_skipped = run.cfg, 0
    for _ in range(cfg.epochs_per_rollout):
        for micro, total in batches:
            share = torch.zeros(())
            for batch in micro:
                loss = critic_loss(cfg, batch, losses.token_values(run.critic.model, batch), total, meter)
                meter.total("loss/value", loss.detach() / (len(batches) * cfg.epochs_per_rollout))
                share = share + loss.detach().cpu()
                (loss * run.ranks.world_size).backward()
            num_skipped += not run.critic.step(float(share), cfg.max_grad_norm, meter)
    return num_skipped


def policy_loss(
    cfg: Config, batch: losses.Batch, logprobs: torch.Tensor, entropy: torch.Tensor, total: losses.Denominators, meter: du.Meter
) -> torch.Tensor:
    """This micro-batch's share of the optimizer batch's loss: a scalar; shares add up over micro-batches and ranks."""
    mask, old_logprobs = batch.response_mask, batch.old_logprobs
    loss = losses.POLICY_LOSSES[cfg.spec.policy_loss]
    token_loss, metrics = loss(logprobs, old_logprobs, batch.advantages, mask, **cfg.numbers(loss))
    if token_loss.shape != mask.shape:
        shapes = f"{tuple(token_loss.shape)}, not a loss for each token, {tuple(mask.shape)}"
        raise ValueError(f"the loss {cfg.spec.policy_loss} returned {shapes}")
    correction = losses.MISMATCH_CORRECTIONS[cfg.mismatch]
    seen = (old_logprobs, batch.rollout_logprobs, mask, cfg.mismatch_level == "sequence")
    weight, weight_metrics = losses.mismatch_weight(correction, *seen, **cfg.numbers(correction))
    metrics |= weight_metrics | losses.policy_metrics(logprobs.detach(), old_logprobs, mask)
    token_loss = token_loss * weight
    if batch.ref_logprobs is not None:
        for name in ("k1", "k3"):
            kl = losses.kl_to(name, logprobs.detach(), batch.ref_logprobs, mask)
            metrics[f"policy/ref_kl_{name}"] = (kl.sum(), mask.sum())
        if cfg.number("kl_place") == "loss":
            kl = losses.kl_to(cfg.number("kl_estimator"), logprobs, batch.ref_logprobs, mask)
            token_loss = token_loss + cfg.number("kl_coef") * kl
    if cfg.entropy_coef:
        token_loss = token_loss - cfg.entropy_coef * entropy
    metrics["policy/entropy"] = (entropy.detach().sum(), mask.sum())
    meter.means_of(metrics)
    share = losses.AGGREGATIONS[cfg.aggregation or cfg.spec.aggregation](token_loss, mask, total)
    return share


def critic_loss(
    cfg: Config, batch: losses.Batch, values: torch.Tensor, total: losses.Denominators, meter: du.Meter
) -> torch.Tensor:
    """This micro-batch's share of the critic's loss, a mean over the tokens of the optimizer batch: a scalar."""
    mask = batch.response_mask
    token_loss, metrics = losses.value_loss(values, batch.old_values, batch.returns, mask, cfg.number("value_clip"))
    meter.means_of(metrics)
    share = losses.token_mean(token_loss, mask, total)
    return share


def check_mismatch(cfg: Config, batches: list[tuple], fresh: bool, meter: du.Meter) -> None:
    """Stop on every rank, before any weight changes, when trainer and engine are not the same policy. A collective.

    fresh False: the engine has older weights on purpose, so the gap is only recorded.
    """
    if not batches:
        return
    seen = du.Meter()
    for batch in (batch for micro, _ in batches for batch in micro):
        metrics, largest = losses.engine_gap(batch.old_logprobs, batch.rollout_logprobs, batch.response_mask)
        seen.means_of(metrics)
        seen.peak("rollout/logprob_diff_max", largest)
    found = seen.reduce()
    unknown = found.get("rollout/nonfinite_logprobs", 0.0)
    gap = found.get("rollout/logprob_diff", math.nan if unknown else 0.0)
    if unknown == 1 or (fresh and not gap <= cfg.max_logprob_diff):
        raise RuntimeError(
            f"rollout/logprob_diff is {gap:.4f}, over --max-logprob-diff {cfg.max_logprob_diff}: the engine does not hold the "
            "trainer's weights, or computes another distribution. Training on these samples would be off-policy unnoticed"
        )
    meter.means_of({name: (found[name], 1) for name in metrics if name in found})
    meter.peak("rollout/logprob_diff_max", found["rollout/logprob_diff_max"])


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Answer every held-out prompt over all ranks, in each mode, none left out; write the responses; return the metrics."""
    cfg, results = run.cfg, {}
    rewards = cfg.eval_graders
    names = tuple(rewards)
    for (label, held_out), mode in itertools.product(run.held_out.items(), cfg.eval_modes):
        count, temperature = (1, 0.0) if mode == "greedy" else (cfg.eval_samples, cfg.eval_temperature or cfg.temperature)
        sampling = ro.Sampling(count, temperature, cfg.eval_response_tokens, run.eos)
        mine = range(run.ranks.rank, len(held_out.rows), run.ranks.world_size)
        seeds = [ro.seed_for(cfg.seed, mode, held_out.row_ids[i]) for i in mine]
        if run.ranks.rank == 0:
            print(f"answering {len(held_out.rows)} held-out prompts of {label}, {mode}", flush=True)
        request = (run.engine, run.tokenizer, held_out, mine, mine, sampling, seeds)
        samples = du.run_together("sampling held-out prompts", ro.sample_groups, *request)
        graded = du.run_together("grading held-out prompts", ro.grade, run.held_out_graders, names, samples)
        meter, before = du.Meter(), f"eval/{label}/{mode}/"
        measure_failures(meter, graded, before)
        for k, name in enumerate(graded.names):
            values, scored = graded.components[:, k], graded.scored[:, k]
            meter.mean(f"{before}{name}", values[scored].sum(), scored.sum())
            meter.total(f"{before}{name}/abstained", (~scored).sum())
            bounds = rewards[name.partition(".")[0]].range
            passes = bounds is None or bounds[1] >= 1  # a penalty has no full mark
            for i in range(0, len(samples) if passes else 0, count):  # a prompt's samples stand together
                num_scored, num_passed = (int(x[i : i + count].sum()) for x in (scored, scored & (values >= 1)))
                for num_drawn in {*(2**p for p in range(count.bit_length())), count}:
                    if num_drawn <= num_scored:
                        chance = rw.pass_at_k(num_scored, num_passed, num_drawn)
                        meter.mean(f"{before}{name}/pass@{num_drawn}", chance, 1)
        meter.mean(f"{before}response_tokens", sum(len(s.response_ids) for s in samples), len(samples))
        meter.total(f"{before}num_truncated", sum(s.finish_reason == "length" for s in samples))
        results |= meter.reduce()
        path = run.run_dir / f"eval/{label}/{mode}_{step:06d}.jsonl"
        ro.write_samples(path, samples, graded.names, graded.components, graded.scored)
    run.engine.forget()  # what follows is the same as without an evaluation
    return results


def is_headline(metric: str) -> bool:
    """Whether a metric is a held-out reward, and not a count beside it."""
    return metric.startswith("eval/") and metric.count("/") == 3 and not metric.endswith(("/response_tokens", "/num_truncated"))


# ---------------------------------------------------------------------------------------------- logging and export


class Log:
    """metrics.jsonl, and its views: one line a step on the console, and Weights & Biases. Writes on rank 0 only."""

    def __init__(self, cfg: Config, ranks: du.Ranks, run_dir: Path, run_id: str, done: int):
        self.cfg, self.run_dir, self.writes = cfg, run_dir, ranks.rank == 0
        self.bar = tqdm(total=cfg.steps, initial=done, unit="step", disable=not self.writes, dynamic_ncols=True)
        self.wandb = None
        if self.writes and cfg.wandb_mode != "disabled":
            import wandb

            known = {"project": cfg.wandb_project, "name": run_dir.name, "id": run_id, "config": dataclasses.asdict(cfg)}
            self.wandb = wandb.init(dir=run_dir, mode=cfg.wandb_mode, resume="allow", **known)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step; the names must be in dist_utils.METRICS. What is not finite is said, and left out."""
        unknown = [n for n in metrics if not du.known_metric(n)]
        assert not unknown, f"metrics that METRICS does not describe: {unknown}"
        if not self.writes:
            return
        endless = [n for n, value in metrics.items() if not math.isfinite(value)]
        if endless:
            du.say(f"step {step}: not finite, and not in the log: {', '.join(endless)}")
        metrics = {n: value for n, value in metrics.items() if n not in endless}
        with (self.run_dir / "metrics.jsonl").open("a") as f:
            f.write(json.dumps({"step": step, **metrics}) + "\n")
            f.flush()
            os.fsync(f.fileno())  # a checkpoint of this step must not outlive its line
        if self.wandb:
            self.wandb.log(metrics, step=step)
        tqdm.write(self.line(step, metrics), file=sys.stdout)
        sys.stdout.flush()
        self.bar.update(step - self.bar.n)

    def line(self, step: int, m: dict[str, float]) -> str:
        """The console's view of a step."""
        parts = []
        if "reward/total" in m:
            parts.append(" ".join(f"{n} {m.get(f'reward/{n}', float('nan')):.3f}" for n in self.cfg.components))
            if m["rollout/refills"]:
                kept = self.cfg.prompts_per_step - m["rollout/prompts_missing"]
                parts.append(f"{kept:.0f} of {m['rollout/prompts_sampled']:.0f} prompts kept")
            parts.append(f"tokens {m['rollout/response_tokens']:.1f}")
            parts.append(f"logprob_diff {m.get('rollout/logprob_diff', float('nan')):.4f}")
            parts += [f"grad {m['optim/grad_norm']:.3f}"] if "optim/grad_norm" in m else []
            parts += [f"value {m['loss/value']:.4f}"] if "loss/value" in m else []
        evals = {k: v for k, v in m.items() if is_headline(k)}
        if evals:
            parts.append(" ".join(f"{k} {v:.3f}" for k, v in evals.items()))
        if "perf/seconds_step" in m:
            parts.append(f"{m['perf/seconds_step']:.1f} s")
        return f"step {step}/{self.cfg.steps} | " + " | ".join(parts)

    def close(self) -> None:
        """End the views of a whole run."""
        self.bar.close()
        if self.wandb:
            self.wandb.finish()


# ---------------------------------------------------------------------------------------------- the algorithm


def train(cfg: Config, ranks: du.Ranks) -> None:
    """A whole run, or the rest of one."""
    with du.StopRequest(ranks, cfg.grace_seconds) as stop, contextlib.ExitStack() as held:
        run = set_up(cfg, ranks, stop, held)
        try:
            take_steps(run)
        except du.RankFailure:  # of every rank: what the background has written by now is kept
            run.checkpoints.finish(wait=False)
            raise
        finish(run)


def take_steps(run: Run) -> None:
    """The steps that are left, in order."""
    cfg, ranks = run.cfg, run.ranks
    hook = du.run_together("loading the hook", rw.load_function, cfg.reward_hook) if cfg.reward_hook else None
    if cfg.eval_every and not run.done.step:
        du.run_together("logging", run.log.step, 0, evaluate(run, 0))

    ledger = du.Ledger(du.PHASES)
    for step in range(run.done.step + 1, cfg.steps + 1):
        meter = du.Meter()

        # ---- rollout, graded and scored: all samples, and those to train on, in the order of their optimizer batches
        everything, chosen, sizes, verdicts = collect(run, step, hook, ledger, meter)
        stop_if_asked(run)  # nothing has been learned of it yet
        write_step(run, step, everything, verdicts)

        # ---- batches, and what has to be known before the update: reference log-probs, old log-probs, values
        with ledger.phase("forward"):
            pushes = step % cfg.push_every == 0 or step == cfg.steps
            run.engine.sleep(keep_weights=not pushes)
            warming_up = step <= cfg.warmup_rollouts
            batches = form_batches(cfg, chosen.samples, chosen.response_mask, sizes, ranks.device, meter)
            batches = look_ahead(run, batches, every=cfg.kl_in_reward or warming_up)

        # ---- batch stage, across ranks and per optimizer batch: scores [N] -> advantages [N, T] fp32
        with ledger.phase("advantage"):
            rollout = rollout_of(cfg, batches, chosen, sizes)
            numbers = cfg.numbers(adv.BATCH_STAGES[cfg.spec.batch_stage])
            advantages, returns = adv.token_advantages(cfg.algorithm, rollout, cfg.normalize_advantages, **numbers)
            parts = (chosen.components, chosen.scored, cfg.weights, chosen.groups)
            measure_advantages(cfg, parts, rollout, advantages, returns, meter)
            batches = du.run_together("attaching advantages", with_advantages, batches, advantages, returns)

        # ---- update
        with ledger.phase("update"):
            num_skipped = update(run, step, batches, meter)
            keep_batches(run, step, batches, num_skipped)
            if cfg.reference_update_every and step % cfg.reference_update_every == 0:
                du.copy_shards(run.policy.model, run.reference)

        # ---- push
        with ledger.phase("push"):
            run.engine.wake_up(["weights"])
            if pushes:
                run.engine.load_weights(du.full_parameters(run.policy.model, run.dtype))
            run.engine.wake_up(["kv_cache"])

        # ---- evaluate
        metrics = {}
        if cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
            with ledger.phase("eval"):
                metrics = evaluate(run, step)

        # ---- log
        if step % TRIM_EVERY == 0 and ranks.device.type == "cpu":
            du.trim_memory()
        meter.peak("rollout/epoch", run.order.position / run.order.num_prompts)
        meter.peak("perf/peak_memory_gib", du.peak_memory_gib(ranks.device))
        meter.peak("perf/memory_gib", du.memory_gib())
        ledger.close(meter, sum(len(s.response_ids) for s in everything.samples), ranks.world_size)
        du.run_together("logging", run.log.step, step, meter.reduce() | metrics)

        # ---- save: the step is whole
        run.done = Progress(step, run.order.position, du.rng_state(ranks.device))
        ledger = du.Ledger(du.PHASES)
        with ledger.phase("save"):
            run.checkpoints.finish(wait=False)
            due = cfg.save_every and step // cfg.save_every > run.last_saved // cfg.save_every
            if due and step % cfg.push_every == 0:  # a checkpoint holds no older weights for the engine
                save(run)


def finish(run: Run) -> None:
    """Commit a checkpoint that is being written, export the policy, sum up, and close everything."""
    stop_if_asked(run)
    run.checkpoints.finish()
    if run.cfg.export:
        du.export_model(run.policy.model, run.model_path, run.tokenizer, run.dtype, run.run_dir / "model")
    du.run_together("summing up", sum_up if run.ranks.rank == 0 else no_work, run.run_dir)
    close(run)


def close(run: Run) -> None:
    """End the log, the graders and the engine, after which nothing collective may follow."""
    du.run_together("closing the log", run.log.close)
    for graders in {run.graders, run.held_out_graders}:
        graders.close()
    run.engine.close()


def no_work(*_: object) -> None:
    """What the other ranks do while rank 0 writes."""


def sum_up(run_dir: Path) -> None:
    """Draw the run's curves, and say where they and the numbers before and after are."""
    picture = run_dir / "curves.png"
    command = [sys.executable, str(ROOT / "scripts" / "plot.py"), str(run_dir), "--out", str(picture)]
    drawn = subprocess.run(command, capture_output=True, text=True)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [r for r in records if any(k.startswith("eval/") for k in r)]
    for name in filter(is_headline, evals[0]) if evals else []:
        print(f"{name}: {evals[0][name]:.3f} before, {evals[-1][name]:.3f} after {evals[-1]['step']} steps")
    print(f"run folder: {run_dir}")
    print(f"curves: {picture}" if drawn.returncode == 0 else f"no curves: {drawn.stderr.strip()[-300:]}")


def main(argv: Sequence[str]) -> None:
    """Run `argv`; exit code 0 after a whole run, 2 for a wrong configuration, 128 + its number after a signal, 1 for any other
    failure."""
    cfg = parse(argv)
    for name, table in LISTS.items():
        if getattr(cfg, name):
            print(table())
            return
    run_process(train, cfg)


def run_process(work: Callable[[Config, du.Ranks], None], cfg: Config) -> None:
    """Join the ranks, do `work`, and end this process with its exit code, not 0 after a message. Never returns."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    ranks = du.start()
    exit_code = 1
    try:
        work(cfg, ranks)
        exit_code = 0
    except du.Stopped as e:
        exit_code = 128 + e.number
        du.say(f"[rank {ranks.rank}] {e}")
    except BaseException as e:
        du.fail(ranks, e)
    du.leave(exit_code)


def numbers_of(algorithm: adv.Algorithm) -> list[str]:
    """The numbers that an algorithm reads, each a flag."""
    critic = ["critic_lr", "critic_warmup_steps", "value_clip"] if algorithm.needs_critic else []
    stages = (losses.POLICY_LOSSES[algorithm.policy_loss], adv.BATCH_STAGES[algorithm.batch_stage])
    sampling = ["dynamic_sampling"] if algorithm.dynamic_sampling else []
    return [n for function in stages for n in adv.options_of(function)] + critic + sampling


NOT_SETTINGS = ("config", "resume", "list_algorithms", "list_rewards", "list_metrics")  # of the command line alone
LISTS = {  # flags that print a table
    "list_algorithms": lambda: adv.algorithm_table(adv.ALGORITHMS, numbers_of),
    "list_rewards": rw.reward_table,
    "list_metrics": du.metric_table,
}

if __name__ == "__main__":
    main(sys.argv[1:])
