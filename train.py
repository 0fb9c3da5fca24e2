"""Train a language model with reinforcement learning on verifiable rewards: configuration and the loop, in order.

    python train.py                                     one process, the embedded model and task
    torchrun --nproc-per-node 8 train.py --config run.yaml --lr 1e-6

Read `train` first: a step is rollout, grade, advantages, batches, update, push, evaluate, log. A fork edits that function.
Shapes: N samples of this rank, K rewards, T response tokens, [B, T] in a micro-batch. Not here on purpose: estimators
(advantages.py), losses (losses.py), engines and data (rollout.py), graders (rewards.py), collectives (dist_utils.py).
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
import tyro
import yaml
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

import advantages as adv
import dist_utils as du
import losses
import rewards as rw
import rollout as ro

ROOT = Path(__file__).resolve().parent
TRIM_EVERY = 10  # steps; a trim costs about two seconds of page faults on a CPU


@dataclass(frozen=True)
class Config:
    """Reinforcement learning on verifiable rewards. Defaults, then --config, then the command line."""

    config: str | None = None
    """YAML file of these settings, as `name: value`; the command line overrides it."""

    # Model and engine
    model: str = "embedded"
    """Hugging Face folder or hub name; "embedded" is the model that scripts/prepare_model.py converts."""
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
    """Named rewards of the run."""
    reward_weights: tuple[str, ...] = ()
    """Weights by name: correctness=1 format=0.5; a reward that is not named has weight 1."""

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
    clip_low: float | None = None
    """Lower clip of the ratio, 1 - clip_low; default: the algorithm's."""
    clip_high: float | None = None
    """Upper clip of the ratio, 1 + clip_high; default: the algorithm's."""
    aggregation: str | None = None
    """token_mean, sequence_mean or sequence_sum_norm; default: the algorithm's."""
    normalize_advantages: bool = False
    """Whiten advantages over the valid tokens of each optimizer batch."""

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
    """How to answer the held-out prompts: greedy, sampled (at --temperature), or both."""
    eval_dataset: str | None = None
    """Held-out data; default: --dataset, with --eval-split or, for rg:<task>, other seeds."""
    eval_split: str | None = None
    """Split of the held-out data; default test."""
    eval_prompts: int = 200
    """Held-out prompts used, from the first on; 0: all."""

    # Run
    seed: int = 0
    """Seeds data order and every sample."""
    run_dir: str | None = None
    """Folder of the run, new or empty; default runs/<algorithm>-<time>."""
    export: bool = True
    """Write the trained model as a Hugging Face folder at the end."""
    wandb_mode: Literal["online", "offline", "disabled"] = "disabled"
    """Weights & Biases; disabled needs neither key nor network."""
    wandb_project: str = "flatrl"
    """Project name there."""
    list_algorithms: bool = False
    """Print the algorithms with their capabilities, and leave."""
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

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high) in force."""
        low, high = self.clip_low, self.clip_high
        return (self.spec.clip_low if low is None else low, self.spec.clip_high if high is None else high)

    @property
    def weights(self) -> list[float]:
        """One weight a reward."""
        return rw.parse_weights(self.rewards, self.reward_weights)


METRICS = {  # name: (what it is, how it is reduced over samples, tokens and ranks)
    "reward/<name>": ("a reward's value over the samples that it scored", "mean"),
    "reward/total": ("weighted sum of the rewards", "mean"),
    "reward/<name>_abstained": ("samples on which the reward returned None", "sum"),
    "reward/<name>_zero_std": ("groups in which the reward is constant", "mean"),
    "rollout/response_tokens": ("length of a response, EOS included", "mean"),
    "rollout/response_tokens_max": ("length of the longest response", "max"),
    "rollout/prompt_tokens": ("length of a prompt", "mean"),
    "rollout/finished": ("responses that ended with an EOS token", "mean"),
    "rollout/groups_without_signal": ("groups whose scores are all equal as float32", "mean"),
    "rollout/epoch": ("epochs of the data begun or done, as a fraction", "max"),
    "rollout/logprob_diff": ("abs(trainer log-prob - engine log-prob) of the sampled tokens, same weights", "mean"),
    "rollout/logprob_diff_max": ("the largest of these", "max"),
    "rollout/kl_k3": ("k3 of trainer against engine, same weights", "mean"),
    "advantage/abs": ("abs(advantage) over response tokens", "mean"),
    "advantage/max": ("largest abs(advantage)", "max"),
    "loss/policy": ("the aggregated policy loss, averaged over the step's updates", "sum of shares"),
    "policy/entropy": ("entropy of the sampling distribution at response tokens", "mean"),
    "policy/ratio": ("exp(log-prob - old log-prob)", "mean"),
    "policy/clip_fraction_low": ("tokens with A < 0 and ratio < 1 - clip_low", "mean"),
    "policy/clip_fraction_high": ("tokens with A > 0 and ratio > 1 + clip_high", "mean"),
    "optim/grad_norm": ("global L2 norm of the gradient before clipping", "mean"),
    "optim/lr": ("learning rate of the step's last update", "max"),
    "perf/seconds_<phase>": (
        "seconds of sample, grade, advantage, update, push, eval, other; they add up to step",
        "mean",
    ),
    "perf/seconds_step": ("wall time of the step", "mean"),
    "perf/tokens_sampled": ("response tokens", "sum"),
    "perf/tokens_computed": ("packed prompt and response tokens that the trainer read", "sum"),
    "perf/tokens_per_second": ("sampled tokens by the step's wall time, all ranks together", "ratio"),
    "perf/peak_memory_gib": ("largest memory of a rank so far: GPU allocator, or resident set on CPU", "max"),
    "eval/<mode>/<name>": ("a reward over the held-out prompts, greedy or sampled", "mean"),
    "eval/<mode>/response_tokens": ("length of a response to them", "mean"),
}
PHASES = ("sample", "grade", "advantage", "update", "push", "eval", "other")


# ---------------------------------------------------------------------------------------------- configuration


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice (PyYAML keeps the last, silently)."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        twice = sorted({str(k) for k in keys if keys.count(k) > 1})
        if twice:
            raise ValueError(f"given twice: {', '.join(twice)}")
        return super().construct_mapping(node, deep)


def read_config_file(path: str) -> list[str]:
    """A YAML file as command-line arguments, so that both are parsed by the same rules.

    Errors: ValueError listing every unknown key with its nearest match, and every value of a wrong kind.
    """
    try:
        values = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as e:
        raise ValueError(f"--config {path}: {e}") from e
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: expected a mapping of settings, found {type(values).__name__}")
    types = {f.name: f.type for f in dataclasses.fields(Config) if f.name not in ("config", "list_algorithms", "list_metrics")}
    arguments, problems = [], []
    for key, value in values.items():
        name = str(key).replace("-", "_")
        flag = f"--{name.replace('_', '-')}"
        is_tuple, is_bool = str(types.get(name)).startswith("tuple"), types.get(name) is bool
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            problems.append(f"{key}: unknown" + (f", did you mean {near[0]}?" if near else ""))
        elif is_bool:
            if not isinstance(value, bool):
                problems.append(f"{key}: {value!r} is not true or false")
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif is_tuple:
            items = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else value
            if not isinstance(items, list) or any(isinstance(i, list | dict) or i is None for i in items):
                problems.append(f"{key}: {value!r} is not a list of values")
                continue
            arguments += [flag, *map(str, items)]
        elif isinstance(value, dict) and name == "dataset_params":
            arguments.append(f"{flag}={json.dumps(value, default=str)}")
        elif isinstance(value, list | dict):
            problems.append(f"{key}: {value!r} is a {type(value).__name__}, not a single value")
        else:
            arguments.append(f"{flag}={value}")
    if problems:
        raise ValueError(f"--config {path}:\n  - " + "\n  - ".join(problems))
    return arguments


def parse(argv: Sequence[str]) -> Config:
    """Defaults < --config < command line, checked once. Exits with code 2 and one message where something is wrong."""
    quiet = os.environ.get("RANK", "0") != "0"
    try:
        named = [b for a, b in zip(argv, [*argv[1:], ""]) if a == "--config"]
        named += [a.removeprefix("--config=") for a in argv if a.startswith("--config=")]
        from_file = read_config_file(named[-1]) if named else []
        cfg = tyro.cli(Config, args=[*from_file, *argv], prog="train.py", console_outputs=not quiet)
        if not (cfg.list_algorithms or cfg.list_metrics):
            problems = find_problems(cfg)
            if problems:
                raise ValueError("the configuration cannot run:\n  - " + "\n  - ".join(problems))
    except ValueError as e:
        if not quiet:
            print(f"train.py: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    return cfg


def find_problems(cfg: Config) -> list[str]:
    """Everything that can be known to be wrong before a model or a data set is loaded."""
    problems = list(adv.check(cfg))
    for read, value in ((ro.read_few_shot, cfg.few_shot), (ro.read_params, cfg.dataset_params)):
        try:
            if value is not None:
                read(value)
        except ValueError as e:
            problems.append(str(e))
    try:
        if sum(map(abs, cfg.weights)) < 1e-2 and os.environ.get("RANK", "0") == "0":
            warning = "so small that a constant added to a standard deviation (1e-4 in gdpo) shrinks the advantages"
            print(f"warning: the reward weights {cfg.weights} are {warning}", file=sys.stderr)
    except ValueError as e:
        problems.append(str(e))
    counts = ("max_prompt_tokens", "max_response_tokens", "prompts_per_step", "samples_per_prompt", "steps", "kv_cache_gib")
    counts += ("optimizer_steps_per_rollout", "epochs_per_rollout", "micro_batch_tokens")
    from_zero = ("warmup_steps", "eval_every", "eval_prompts", "weight_decay", "seed")
    for name, low in [*((n, 1) for n in counts), *((n, 0) for n in from_zero)]:
        if not low <= getattr(cfg, name) < float("inf"):
            problems.append(f"{_flag(name)} {getattr(cfg, name)}: must be at least {low}")
    for name in ("temperature", "lr", "max_grad_norm", "max_logprob_diff", "clip_low", "clip_high"):
        value = getattr(cfg, name)
        if value is not None and not 0 < value < float("inf"):
            why = "; greedy samples of a group are all alike, so nothing can be learned" if name == "temperature" else ""
            problems.append(f"{_flag(name)} {value}: must be a positive, finite number{why}")
    if cfg.seed >= 2**31:
        problems.append(f"--seed {cfg.seed}: must be below 2147483648")
    if len(set(cfg.eval_modes)) != len(cfg.eval_modes) or (cfg.eval_every and not cfg.eval_modes):
        problems.append(f"--eval-modes {' '.join(cfg.eval_modes)}: name greedy, sampled or both, each once")
    for name in ("adam_beta2", "gpu_memory_utilization"):
        if not 0 < getattr(cfg, name) < 1:
            problems.append(f"{_flag(name)} {getattr(cfg, name)}: must lie between 0 and 1")
    if cfg.aggregation is not None and cfg.aggregation not in losses.AGGREGATIONS:
        problems.append(f"--aggregation {cfg.aggregation}: unknown; there are {', '.join(losses.AGGREGATIONS)}")
    if cfg.prompts_per_step % max(cfg.optimizer_steps_per_rollout, 1):
        problems.append(
            f"--prompts-per-step {cfg.prompts_per_step}: not divisible by --optimizer-steps-per-rollout "
            f"{cfg.optimizer_steps_per_rollout}; each optimizer batch takes the same number of prompts"
        )
    updates = cfg.steps * cfg.updates_per_rollout
    if cfg.warmup_steps >= max(updates, 1):
        problems.append(f"--warmup-steps {cfg.warmup_steps}: the run has {updates} optimizer steps; warm up over fewer")
    run_dir = Path(cfg.run_dir or "").expanduser()
    if cfg.run_dir and run_dir.exists() and not run_dir.is_dir():
        problems.append(f"--run-dir {cfg.run_dir}: is a file; name a new folder")
    elif cfg.run_dir and run_dir.exists() and any(run_dir.iterdir()):
        problems.append(f"--run-dir {cfg.run_dir}: is not empty; name a new folder, so that no run is overwritten")
    if cfg.model == "embedded" and not (embedded_model_path() / "config.json").exists():
        problems.append(f"--model embedded: {embedded_model_path()} is missing; run python scripts/prepare_model.py")
    return problems


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def embedded_model_path() -> Path:
    """Where scripts/prepare_model.py puts the model that needs no hub."""
    return Path(os.environ.get("FLATRL_CACHE", Path.home() / ".cache" / "flatrl")) / "smollm2-135m-instruct"


# ---------------------------------------------------------------------------------------------- set-up


def load_model(cfg: Config, model_path: str) -> torch.nn.Module:
    """The policy on the CPU, with fp32 weights, packed attention and no dropout, not yet sharded."""
    attention = losses.register_attention(AutoConfig.from_pretrained(model_path))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=attention)
    if cfg.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # train() is for checkpointing alone: log-probs must not be noisy
    return model.train()


def lr_factor(step: int, schedule: str, warmup: int, total: int) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0): linear warm-up, then the decay to 0 at `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)  # never a step that learns nothing
    done = (step - warmup) / max(total - warmup, 1)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


def make_optimizer(cfg: Config, model: torch.nn.Module) -> tuple:
    """AdamW on the fp32 shards, and its schedule in optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, cfg.adam_beta2), weight_decay=cfg.weight_decay)
    total = cfg.steps * cfg.updates_per_rollout
    factor = functools.partial(lr_factor, schedule=cfg.lr_schedule, warmup=cfg.warmup_steps, total=total)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_run_dir(cfg: Config, run_dir: Path) -> None:
    """A folder that describes its run: configuration, command line, git revision and diff, package versions."""
    run_dir.mkdir(parents=True, exist_ok=bool(cfg.run_dir))
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(cfg).items()}
    text = yaml.safe_dump(
        {k: v for k, v in plain.items() if k not in ("config", "list_algorithms", "list_metrics")}, sort_keys=False
    )
    (run_dir / "config.yaml").write_text(text)
    (run_dir / "command.txt").write_text(shlex.join(sys.orig_argv) + "\n")
    (run_dir / "git_revision.txt").write_text(git("rev-parse", "HEAD"))
    (run_dir / "git.diff").write_text(git("diff", "HEAD"))
    for name in git("ls-files", "--others", "--exclude-standard", "*.py").splitlines():  # a fork not yet added
        if (ROOT / name).is_file():
            copy = run_dir / "untracked" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    versions = sorted({f"{d.name}=={d.version}" for d in metadata.distributions()})
    (run_dir / "packages.txt").write_text("\n".join(versions) + "\n")
    print(f"run folder: {run_dir}\n{text}", flush=True)


def git(*command: str) -> str:
    """What git says of this repository, or why it says nothing."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        return f"no git here: {e}\n"


@dataclass
class Run:
    """What the set-up made, for the loop."""

    cfg: Config
    ranks: du.Ranks
    run_dir: Path
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    eos: tuple[int, ...]
    prompts: ro.Prompts
    held_out: ro.Prompts | None
    dtype: torch.dtype  # of compute and of the engine
    engine: ro.Engine
    model: torch.nn.Module  # FSDP2, fp32 shards
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    order: ro.PromptOrder
    log: "Log"


def set_up(cfg: Config, ranks: du.Ranks) -> Run:
    """Data, run folder, engine, model, optimizer and log, in this order: cheap things that can be wrong come first."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(cfg.seed)
    model_path = str(embedded_model_path()) if cfg.model == "embedded" else os.path.expanduser(cfg.model)
    default_dir = ROOT / "runs" / f"{cfg.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = du.gather_objects(Path(cfg.run_dir or default_dir).expanduser())[0]
    tokenizer, eos, prompts, held_out = du.run_together("loading the data", ro.load_data, cfg, model_path)
    du.agree("the prompts", [p and p.digest() for p in (prompts, held_out)])
    du.run_together("making the run folder", make_run_dir if ranks.rank == 0 else no_work, cfg, run_dir)
    if ranks.rank == 0:
        ro.describe_data(prompts, held_out)
    dtype = du.compute_dtype(cfg.dtype, ranks.device)
    room = (cfg.max_prompt_tokens + cfg.max_response_tokens, cfg.gpu_memory_utilization, cfg.kv_cache_gib)
    engine = ro.ENGINES[cfg.engine](model_path, dtype, ranks.device, cfg.seed + ranks.rank, *room)
    model = du.run_together("loading the model", load_model, cfg, model_path)
    model = du.shard_model(model, list(model.get_decoder().layers), dtype)
    optimizer, scheduler = make_optimizer(cfg, model)
    order = ro.PromptOrder(len(prompts.rows), cfg.seed)
    log = du.run_together("starting the log", Log, cfg, ranks, run_dir)
    data = (tokenizer, eos, prompts, held_out)
    return Run(cfg, ranks, run_dir, model_path, *data, dtype, engine, model, optimizer, scheduler, order, log)


# ---------------------------------------------------------------------------------------------- measuring


def measure_rollout(meter: du.Meter, cfg: Config, samples: list[ro.Sample], graded: tuple, scores: torch.Tensor) -> None:
    """Metrics of the samples and their rewards."""
    components, scored = graded  # [N, K]
    groups = torch.tensor([s.group for s in samples], dtype=torch.int64)
    total = (torch.where(scored, components, 0.0) * torch.tensor(cfg.weights, dtype=torch.float64)).sum(1)
    meter.mean("reward/total", total.sum(), len(samples))
    for k, name in enumerate(cfg.rewards):
        meter.mean(f"reward/{name}", components[:, k][scored[:, k]].sum(), scored[:, k].sum())
        meter.total(f"reward/{name}_abstained", (~scored[:, k]).sum())
        for group in groups.unique():
            values = components[(groups == group) & scored[:, k], k]
            meter.mean(f"reward/{name}_zero_std", float(len(values) == 0 or bool(values.min() == values.max())), 1)
    lengths = [len(s.response_ids) for s in samples]
    meter.mean("rollout/response_tokens", sum(lengths), len(samples))
    meter.peak("rollout/response_tokens_max", max(lengths, default=0))
    meter.mean("rollout/prompt_tokens", sum(len(s.prompt_ids) for s in samples), len(samples))
    meter.mean("rollout/finished", *ro.finished_fraction(samples))
    signal = adv.has_signal(scores, groups).values()
    meter.mean("rollout/groups_without_signal", sum(not s for s in signal), len(signal))
    meter.total("perf/tokens_sampled", sum(lengths))


# ---------------------------------------------------------------------------------------------- phases of a step


def trained_tokens(samples: list[ro.Sample], scored: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """[N, max_tokens] bool: every sampled token, by length; none of a sample that no reward scored (scored [N, K])."""
    lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64)  # [N]
    return (torch.arange(max_tokens)[None] < lengths[:, None]) & scored.any(1)[:, None]


def agreed_batches(batches: list[list[losses.Batch]], sizes: list[int], cfg: Config, device) -> list[tuple]:
    """Per optimizer batch: (micro-batches, as many on every rank; global denominators). Uses collectives."""
    agreed = []
    for micro, size in zip(batches, sizes, strict=True):
        num_micro = int(du.max_over_ranks(len(micro)))
        num_tokens = int(du.sum_over_ranks(sum(b.num_tokens for b in micro)))
        total = losses.Denominators(int(du.sum_over_ranks(size)), num_tokens, cfg.max_response_tokens)
        agreed.append((micro + [losses.empty_batch(device)] * (num_micro - len(micro)), total))
    return agreed


def add_old_logprobs(cfg: Config, model: torch.nn.Module, batches: list[tuple]) -> list[tuple]:
    """Fill in the log-probs before the rollout's first update, where an update will come between: in all but the first
    optimizer batch. That one's own first forward pass gives them."""
    filled = batches[:1]
    for micro, total in batches[1:]:
        with torch.no_grad():
            known = [dataclasses.replace(b, old_logprobs=losses.token_logprobs(model, b, cfg.temperature)[0]) for b in micro]
        filled.append((known, total))
    return filled


def update(run: Run, batches: list[tuple], meter: du.Meter) -> None:
    """Train on every optimizer batch, `epochs_per_rollout` times. Errors: RuntimeError where engine and trainer differ."""
    cfg, model = run.cfg, run.model
    batches = add_old_logprobs(cfg, model, batches)
    for epoch in range(cfg.epochs_per_rollout):
        for number, (micro, total) in enumerate(batches):
            first = epoch == number == 0  # the weights are still those that sampled
            seen = du.Meter()
            for i, batch in enumerate(micro):
                logprobs, entropy = losses.token_logprobs(model, batch, cfg.temperature)
                if batch.old_logprobs is None:
                    micro[i] = batch = dataclasses.replace(batch, old_logprobs=logprobs.detach())
                loss = policy_loss(cfg, batch, logprobs, total, meter)
                (loss * run.ranks.world_size).backward()  # FSDP2 averages over ranks, the loss is a share of the sum
                meter.mean("policy/entropy", entropy.sum(), batch.num_tokens)
                if first:
                    measure_mismatch(batch, logprobs.detach(), seen)
            if first:
                check_mismatch(cfg, seen, meter)
            norm = du.clip_grad_norm(model, cfg.max_grad_norm)
            if not norm < float("inf"):
                raise RuntimeError(f"the gradient's norm is {norm}; the weights were left as they were")
            run.optimizer.step()
            meter.peak("optim/lr", run.scheduler.get_last_lr()[0])
            run.scheduler.step()
            run.optimizer.zero_grad(set_to_none=True)
            meter.mean("optim/grad_norm", norm, 1)


def policy_loss(cfg: Config, batch: losses.Batch, logprobs: torch.Tensor, total: losses.Denominators, meter: du.Meter):
    """This micro-batch's share of the optimizer batch's loss: a scalar; shares add up over micro-batches and ranks."""
    loss = losses.POLICY_LOSSES[cfg.spec.policy_loss]
    token_loss, metrics = loss(logprobs, batch.old_logprobs, batch.advantages, batch.response_mask, *cfg.clip)
    for name, (amount, count) in metrics.items():
        meter.mean(name, amount, count)
    share = losses.AGGREGATIONS[cfg.aggregation or cfg.spec.aggregation](token_loss, batch.response_mask, total)
    meter.total("loss/policy", share.detach() / cfg.updates_per_rollout)
    return share


def measure_mismatch(batch: losses.Batch, logprobs: torch.Tensor, seen: du.Meter) -> None:
    """How far the trainer's log-probs are from the engine's, on the samples that the same weights gave."""
    trainer, engine = logprobs[batch.response_mask], batch.rollout_logprobs[batch.response_mask]
    gap = (trainer - engine).abs()
    seen.mean("rollout/logprob_diff", gap.sum(), gap.numel())
    seen.mean("rollout/kl_k3", losses.k3(engine, trainer).sum(), gap.numel())
    seen.peak("rollout/logprob_diff_max", gap.max() if gap.numel() else 0.0)


def check_mismatch(cfg: Config, seen: du.Meter, meter: du.Meter) -> None:
    """Stop on every rank, before the weights change, when trainer and engine are not the same policy. A collective."""
    reduced = seen.reduce()
    gap = reduced.get("rollout/logprob_diff", 0.0)
    if not gap <= cfg.max_logprob_diff:
        raise RuntimeError(
            f"rollout/logprob_diff is {gap:.4f}, over --max-logprob-diff {cfg.max_logprob_diff}: the engine does not hold the "
            "trainer's weights, or computes another distribution. Training on these samples would be off-policy unnoticed"
        )
    for name in ("rollout/logprob_diff", "rollout/kl_k3"):
        meter.mean(name, reduced.get(name, 0.0), 1)
    meter.peak("rollout/logprob_diff_max", reduced["rollout/logprob_diff_max"])


def push_weights(engine: ro.Engine, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the engine all of the trainer's weights, before its cache is taken again. A collective for each parameter."""
    engine.wake_up(["weights"])
    engine.load_weights(du.full_parameters(model, dtype))
    engine.wake_up(["kv_cache"])


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Answer every held-out prompt once over all ranks, in each mode; write the responses; return the metrics."""
    cfg, held_out = run.cfg, run.held_out
    results: dict[str, float] = {}
    for mode in cfg.eval_modes:
        sampling = ro.Sampling(1, 0.0 if mode == "greedy" else cfg.temperature, cfg.max_response_tokens, run.eos)
        mine = range(run.ranks.rank, len(held_out.rows), run.ranks.world_size)
        seeds = [ro.seed_for(cfg.seed, mode, held_out.row_ids[i]) for i in mine]
        request = (run.engine, run.tokenizer, held_out, mine, mine, sampling, seeds)
        samples = du.run_together("sampling held-out prompts", ro.sample_groups, *request)
        texts, rows = [s.text for s in samples], [s.row for s in samples]
        components, scored = du.run_together("grading held-out prompts", rw.score, cfg.rewards, texts, rows)
        meter = du.Meter()
        for k, name in enumerate(cfg.rewards):
            meter.mean(f"eval/{mode}/{name}", components[:, k][scored[:, k]].sum(), scored[:, k].sum())
        meter.mean(f"eval/{mode}/response_tokens", sum(len(s.response_ids) for s in samples), len(samples))
        results |= meter.reduce()
        write_samples(run, f"eval/{mode}_{step:06d}.jsonl", samples, components)
    return results


def write_samples(run: Run, name: str, samples: list[ro.Sample], components: torch.Tensor, scores=None) -> None:
    """All ranks' samples as one JSONL file of the run folder, in the order of their prompts. A collective."""
    records = [
        {
            "group": s.group,
            "question": s.row["question"],
            "answer": s.row["answer"],
            "response": s.text,
            "finish_reason": s.finish_reason,
            "response_tokens": len(s.response_ids),
            **{reward: components[i, k].item() for k, reward in enumerate(run.cfg.rewards)},
            **({} if scores is None else {"score": scores[i].item()}),
        }
        for i, s in enumerate(samples)
    ]
    everywhere = [r for part in du.gather_objects(records) for r in part]

    def write() -> None:
        if run.ranks.rank == 0:
            path = run.run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            ordered = sorted(everywhere, key=lambda r: r["group"])
            path.write_text("".join(json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in ordered))

    du.run_together(f"writing {name}", write)


# ---------------------------------------------------------------------------------------------- logging and export


class Log:
    """metrics.jsonl, and its views: one line a step on the console, and Weights & Biases. Writes on rank 0 only."""

    def __init__(self, cfg: Config, ranks: du.Ranks, run_dir: Path):
        self.cfg, self.run_dir, self.writes = cfg, run_dir, ranks.rank == 0
        self.bar = tqdm(total=cfg.steps, unit="step", disable=not self.writes, dynamic_ncols=True)
        self.wandb = None
        if self.writes and cfg.wandb_mode != "disabled":
            import wandb

            config = dataclasses.asdict(cfg)
            self.wandb = wandb.init(
                project=cfg.wandb_project, name=run_dir.name, dir=run_dir, mode=cfg.wandb_mode, config=config
            )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step; the names must be in METRICS."""
        unknown = [n for n in metrics if not known_metric(n)]
        assert not unknown, f"metrics that METRICS does not describe: {unknown}"
        if not self.writes:
            return
        with (self.run_dir / "metrics.jsonl").open("a") as f:
            f.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.wandb:
            self.wandb.log(metrics, step=step)
        tqdm.write(self.line(step, metrics), file=sys.stdout)
        sys.stdout.flush()
        self.bar.update(step - self.bar.n)

    def line(self, step: int, m: dict[str, float]) -> str:
        """The console's view of a step."""
        parts = []
        if "reward/total" in m:
            parts.append(" ".join(f"{n} {m.get(f'reward/{n}', float('nan')):.3f}" for n in self.cfg.rewards))
            parts.append(f"tokens {m['rollout/response_tokens']:.1f}")
            parts.append(f"logprob_diff {m.get('rollout/logprob_diff', float('nan')):.4f}")
            parts.append(f"grad {m['optim/grad_norm']:.3f}")
        evals = {k: v for k, v in m.items() if k.startswith("eval/") and not k.endswith("response_tokens")}
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


def known_metric(name: str) -> bool:
    """Whether METRICS describes `name`, <...> standing for one part of it."""
    for pattern in METRICS:
        before, _, rest = pattern.partition("<")
        if not rest and name == pattern:
            return True
        if rest and name.startswith(before) and name.endswith(rest.rpartition(">")[2]):
            return True
    return False


# ---------------------------------------------------------------------------------------------- the algorithm


def train(cfg: Config, ranks: du.Ranks) -> None:
    """The run, in order."""
    run = set_up(cfg, ranks)
    sampling = ro.Sampling(cfg.samples_per_prompt, cfg.temperature, cfg.max_response_tokens, run.eos)
    if cfg.eval_every:
        du.run_together("logging", run.log.step, 0, evaluate(run, 0))

    for step in range(1, cfg.steps + 1):
        meter, ledger = du.Meter(), du.Ledger(PHASES)

        # ---- rollout: prompt g of the step belongs to rank g % world_size
        with ledger.phase("sample"):
            visits = run.order.take(cfg.prompts_per_step)
            mine = range(ranks.rank, cfg.prompts_per_step, ranks.world_size)
            indices = [visits[g].index for g in mine]
            seeds = [ro.seed_for(cfg.seed, step, visits[g].epoch, run.prompts.row_ids[visits[g].index]) for g in mine]
            request = (run.engine, run.tokenizer, run.prompts, indices, mine, sampling, seeds)
            samples: list[ro.Sample] = du.run_together("sampling", ro.sample_groups, *request)

        # ---- grade: components [N, K] float64, scored [N, K] bool
        with ledger.phase("grade"):
            texts, rows = [s.text for s in samples], [s.row for s in samples]
            components, scored = du.run_together("grading", rw.score, cfg.rewards, texts, rows)

        # ---- advantages: group stage on this rank, batch stage across ranks and per optimizer batch
        with ledger.phase("advantage"):
            groups = torch.tensor([s.group for s in samples], dtype=torch.int64)  # [N]
            graded = (components, scored, cfg.weights, groups)
            scores = du.run_together("the group stage", adv.group_scores, cfg.algorithm, *graded)  # [N] float64
            mask = trained_tokens(samples, scored, cfg.max_response_tokens)  # [N, T] bool
            batch_of = groups // (cfg.prompts_per_step // cfg.optimizer_steps_per_rollout)  # [N]
            sizes = [int((batch_of == b).sum()) for b in range(cfg.optimizer_steps_per_rollout)]
            advantages = adv.token_advantages(cfg.algorithm, scores, mask, sizes, cfg.normalize_advantages)  # [N, T] fp32
            measure_rollout(meter, cfg, samples, (components, scored), scores)
            meter.mean("advantage/abs", advantages[mask].abs().sum(), mask.sum())
            meter.peak("advantage/max", advantages.abs().max() if len(samples) else 0.0)

        # ---- update
        with ledger.phase("update"):
            run.engine.sleep()
            layout = (samples, advantages, mask, sizes, cfg.micro_batch_tokens, ranks.device)
            local = du.run_together("forming batches", losses.form_batches, *layout)
            batches = agreed_batches(local, sizes, cfg, ranks.device)
            meter.total("perf/tokens_computed", sum(b.input_ids.numel() for micro, _ in batches for b in micro))
            update(run, batches, meter)

        # ---- push
        with ledger.phase("push"):
            push_weights(run.engine, run.model, run.dtype)

        # ---- evaluate
        metrics = {}
        if cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
            with ledger.phase("eval"):
                metrics = evaluate(run, step)

        # ---- log
        if step % TRIM_EVERY == 0 and ranks.device.type == "cpu":
            du.trim_memory()
        write_samples(run, f"samples/step_{step:06d}.jsonl", samples, components, scores)
        meter.peak("rollout/epoch", run.order.position / run.order.num_prompts)
        meter.peak("perf/peak_memory_gib", du.peak_memory_gib(ranks.device))
        ledger.close(meter, sum(len(s.response_ids) for s in samples), ranks.world_size)
        du.run_together("logging", run.log.step, step, meter.reduce() | metrics)

    # ---- export
    if cfg.export:
        du.export_model(run.model, run.model_path, run.tokenizer, run.dtype, run.run_dir / "model")
    du.run_together("closing the log", run.log.close)
    du.run_together("summing up", sum_up if ranks.rank == 0 else no_work, run.run_dir)
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
    for name in [k for k in evals[0] if k.startswith("eval/")] if evals else []:
        print(f"{name}: {evals[0][name]:.3f} before, {evals[-1][name]:.3f} after {evals[-1]['step']} steps")
    print(f"run folder: {run_dir}")
    print(f"curves: {picture}" if drawn.returncode == 0 else f"no curves: {drawn.stderr.strip()[-300:]}")


def main(argv: Sequence[str]) -> None:
    """Run `argv`; exit code 0 after a whole run, 2 for a wrong configuration, 1 for any other failure."""
    cfg = parse(argv)
    if cfg.list_algorithms:
        print(adv.algorithm_table(adv.ALGORITHMS))
        return
    if cfg.list_metrics:
        print(metric_table())
        return
    ranks = du.start()
    exit_code = 1
    try:
        train(cfg, ranks)
        exit_code = 0
    except du.RankFailure as e:  # the rank that failed has printed its traceback
        print(f"[rank {ranks.rank}] {e}", file=sys.stderr)
    except BaseException:
        print(f"[rank {ranks.rank}]\n{traceback.format_exc()}", file=sys.stderr)
    du.leave(exit_code)


def metric_table() -> str:
    """METRICS as a Markdown table."""
    lines = ["| metric | what it is | reduction |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| `{name}` | {what} | {how} |" for name, (what, how) in METRICS.items()])


if __name__ == "__main__":
    main(sys.argv[1:])
