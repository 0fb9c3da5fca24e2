"""Everything that crosses ranks: process groups, failing together, statistics, FSDP2, weights as full tensors.

Public: `start`, `leave`, `run_together`, `agree`, `gather_objects`, `sum_over_ranks`, `max_over_ranks`, `mean_std`,
`compute_dtype`, `shard_model`, `full_parameters`, `full_state_dict`, `clip_grad_norm`, `export_model`, `Meter`, `Ledger`.

The rule: a rank never leaves the sequence of collectives alone. Work that can fail on one rank runs inside
`run_together`; whatever the ranks must hold alike is compared by `agree` before the first collective that depends on it.
No other file of the project calls a collective. Not here on purpose: anything that knows of rewards, losses or models
beyond their parameters.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

T = TypeVar("T")


class RankFailure(RuntimeError):
    """The same error on every rank: which ranks failed, in which phase, with their original messages."""


@dataclass(frozen=True)
class Ranks:
    """Where this process stands: its number, how many there are, and the device that it owns."""

    rank: int
    world_size: int
    device: torch.device


def start(timeout_minutes: float = 30.0) -> Ranks:
    """Join the process group that torchrun describes, or a group of one when run without torchrun.

    CPU tensors travel over gloo (statistics and objects always do), CUDA tensors over NCCL.

    Errors: RuntimeError from torch when the ranks do not meet within `timeout_minutes`.
    """
    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        os.environ.update({k: str(v) for k, v in alone.items()}, MASTER_ADDR="127.0.0.1")
    local_rank = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: giving it back after each step costs seconds of page faults in the next."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none, and need none
        m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
        if mallopt(m_mmap_threshold, 2**31 - 1):  # an old glibc refuses: then its defaults are better than half of this
            mallopt(m_trim_threshold, 2**31 - 1)
            mallopt(m_top_pad, 2**28)


def trim_memory() -> None:
    """Give memory that glibc holds in pieces back to the kernel: now and then, so that `keep_freed_memory` stays bounded."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def leave(exit_code: int) -> None:
    """End this process at once, without a collective: a rank that fails must not wait for one that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


# ---------------------------------------------------------------------------------------------- failing together


def run_together(phase: str, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run `work` on this rank; return its result if it succeeded on all ranks, raise the same error on all otherwise.

    `work` must contain no collective. The traceback is printed by the rank that failed, before the others learn of it.

    Errors: RankFailure, naming each failed rank, the phase and the original message.
    """
    result, failure = None, None
    try:
        result = work(*args, **kwargs)
    except (Exception, SystemExit) as e:
        failure = e
        rank = dist.get_rank()
        print(f"[rank {rank}] {phase} failed:\n{''.join(traceback.format_exception(e))}", file=sys.stderr, flush=True)
    if sum_over_ranks(float(failure is not None)) > 0:
        messages = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        named = "; ".join(f"rank {r}: {m}" for r, m in enumerate(messages) if m is not None)
        raise RankFailure(f"{phase} failed on {named}") from failure
    return result


def agree(what: str, value: Any) -> None:
    """Raise on every rank unless all of them hold the same `value` (any picklable object with ==).

    Errors: RankFailure, with every rank's value.
    """
    values = gather_objects(value)
    if any(v != values[0] for v in values):
        held = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
        raise RankFailure(f"the ranks do not agree on {what}: {held}")


def gather_objects(value: Any) -> list[Any]:
    """One picklable object from each rank, in rank order, on every rank. Uses a collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---------------------------------------------------------------------------------------------- statistics


def _reduce(values: list[float], op: dist.ReduceOp) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


def sum_over_ranks(value: float) -> float:
    """The float64 sum of one number over ranks."""
    return _reduce([value], dist.ReduceOp.SUM)[0]


def max_over_ranks(value: float) -> float:
    """The float64 maximum of one number over ranks."""
    return _reduce([value], dist.ReduceOp.MAX)[0]


@dataclass(frozen=True)
class Moments:
    """Statistics of the masked values of all ranks, in float64. `std` is NaN where count <= ddof."""

    mean: float
    std: float
    count: int
    min: float
    max: float

    @property
    def collapsed(self) -> bool:
        """All values are exactly equal (never a tolerance)."""
        return self.min == self.max


def mean_std(values: torch.Tensor, mask: torch.Tensor, ddof: int) -> Moments:
    """Mean and standard deviation over ranks, in two passes of float64.

    The one-pass E[x^2] - E[x]^2 loses all digits on rewards such as 10000 .. 10000.003.

    values: any shape, float; mask: same shape, bool. Ranks may hold different counts, also none.
    Errors: RankFailure on all ranks when the masked values are empty on all of them, or not finite on any.
    """
    kept = values[mask].to(torch.float64)  # [n]

    def check() -> None:
        if not torch.isfinite(kept).all():
            raise ValueError(f"{int((~torch.isfinite(kept)).sum())} of {kept.numel()} values are not finite")

    run_together("statistics over ranks", check)
    total, count = _reduce([kept.sum().item(), float(kept.numel())], dist.ReduceOp.SUM)
    if count == 0:
        raise RankFailure("statistics over ranks: no valid value on any rank")
    low = kept.min().item() if kept.numel() else float("inf")
    high = kept.max().item() if kept.numel() else float("-inf")
    negative_low, high = _reduce([-low, high], dist.ReduceOp.MAX)
    mean = total / count
    (squares,) = _reduce([((kept - mean) ** 2).sum().item()], dist.ReduceOp.SUM)
    std = (squares / (count - ddof)) ** 0.5 if count > ddof else float("nan")
    return Moments(mean, std, int(count), -negative_low, high)


# ---------------------------------------------------------------------------------------------- FSDP2


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; for "auto" bfloat16 on devices with bf16 instructions, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if fast else torch.float32


def shard_model(model: torch.nn.Module, blocks: list[torch.nn.Module], compute_dtype: torch.dtype) -> torch.nn.Module:
    """Wrap each block and then the root with `fully_shard`: fp32 master shards, `compute_dtype` compute, fp32 reduction.

    Every rank must hold the same full fp32 parameters. FSDP2 averages gradients over ranks: losses are scaled by
    world_size / global denominator. Returns the same module.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def full_parameters(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full detached tensor in `dtype`) of each parameter, one at a time; a collective for each.

    Tied parameters come once, under the name that the model registers first. All ranks must use the iterator to its end.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass alone, the root still shows its gathered bf16 copy
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(dtype)


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole model's state on rank 0's CPU (empty on the other ranks). A collective."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def clip_grad_norm(model: torch.nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their global L2 norm is at most `max_norm`; return the norm before. A collective."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def export_model(model: PreTrainedModel, model_path: str, tokenizer: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the full model in the compute dtype, as an ordinary Hugging Face folder with the trainer's log-probs.

    Written beside and committed by a rename. A collective; rank 0 writes.
    """
    state = full_state_dict(model)

    def save() -> None:
        if dist.get_rank() != 0:
            return
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path), dtype=dtype)
        shell.load_state_dict({k: v.to(dtype) for k, v in state.items()}, assign=True)
        shell.tie_weights()
        ids = {k: getattr(model.generation_config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        shell.generation_config = GenerationConfig(**ids)  # transformers refuses to save some that hub models ship
        beside = folder.with_name(folder.name + ".tmp")
        shell.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        original = cached_file(model_path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
        if original is not None:
            shutil.copyfile(original, beside / "generation_config.json")
        beside.rename(folder)

    run_together("exporting the model", save)


# ---------------------------------------------------------------------------------------------- measuring


class Meter:
    """What is measured in a step: means as (sum, count), totals and maxima; reduced over ranks once."""

    def __init__(self) -> None:
        self.means: dict[str, tuple] = defaultdict(lambda: (0.0, 0.0))
        self.totals: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = defaultdict(lambda: float("-inf"))

    def mean(self, name: str, total, count) -> None:
        """Add to the sum and the count of a mean."""
        self.means[name] = (self.means[name][0] + total, self.means[name][1] + count)

    def total(self, name: str, value) -> None:
        """Add to a sum."""
        self.totals[name] += float(value)

    def peak(self, name: str, value) -> None:
        """Keep the largest value."""
        self.peaks[name] = max(float(value), self.peaks[name])

    def reduce(self) -> dict[str, float]:
        """One number a name, the same on every rank; means over nothing are left out. A collective."""
        means = {k: (float(s), float(c)) for k, (s, c) in self.means.items()}
        merged = Meter()
        for other_means, totals, peaks in gather_objects((means, dict(self.totals), dict(self.peaks))):
            for name, (total, count) in other_means.items():
                merged.mean(name, total, count)
            for name, value in totals.items():
                merged.total(name, value)
            for name, value in peaks.items():
                merged.peak(name, value)
        return {k: s / c for k, (s, c) in merged.means.items() if c} | merged.totals | merged.peaks


class Ledger:
    """Seconds of each phase of a step; what no phase claims is `other`."""

    def __init__(self, phases: Sequence[str]) -> None:
        self.start = time.perf_counter()
        self.seconds = dict.fromkeys(phases, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def close(self, meter: Meter, tokens_sampled: int, world_size: int) -> None:
        """Write the step's seconds to the meter."""
        step = time.perf_counter() - self.start
        self.seconds["other"] = step - sum(self.seconds.values())
        for name, seconds in self.seconds.items():
            meter.mean(f"perf/seconds_{name}", seconds, 1)
        meter.mean("perf/seconds_step", step, 1)
        meter.mean("perf/tokens_per_second", tokens_sampled, step / world_size)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process ever held: the GPU allocator's, or the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
