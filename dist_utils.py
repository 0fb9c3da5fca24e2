"""Everything that crosses ranks: process groups, failing together, signals, statistics, FSDP2, checkpoints.

Public: `start`, `leave`, `fail`, `say`, `StopRequest`, `run_together`, `agree`, `gather_objects`, `sum_over_ranks`,
`printable`, `max_over_ranks`, `mean_std`, `correlation`, `compute_dtype`, `shard_model`, `free_gathered`, `copy_shards`,
`full_parameters`, `full_state_dict`, `clip_grad_norm`, `empty_model`, `export_model`, `Learner`, `Checkpoints`, `read_state`,
`load_checkpoint`, `tensor_sizes`, `rng_state`, `set_rng_state`, `write_text`, `Meter`, `Ledger`, `METRICS`.

The rule: a rank never leaves the sequence of collectives alone. Work that can fail on one rank runs inside
`run_together`; whatever the ranks must hold alike is compared by `agree` before the first collective that depends on it.
No other file of the project calls a collective. Not here on purpose: anything that knows of rewards, losses or models
beyond their parameters.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
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
    store: dist.Store | None = None  # where the first failure is told to the others


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
    backend, timeout = "cpu:gloo,cuda:nccl" if use_cuda else "gloo", timedelta(minutes=timeout_minutes)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank must not outlive torchrun, which may be killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)  # torchrun's store outlives a restart, with addresses of dead ranks
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Ranks(rank, world_size, device, store)


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


PR_SET_PDEATHSIG = 1  # of prctl(2)
FAILED = "failure"  # key of the store


def fail(ranks: Ranks, error: BaseException) -> None:
    """Print why this rank ends: the traceback of the first rank that fails, and on the others that rank's message.

    A rank that dies inside a collective leaves the others with an error of the network, which says nothing.
    """
    own = first = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # without torchrun, the store goes with rank 0
        first = ranks.store.compare_set(FAILED, "", own).decode() if ranks.store else own
    if isinstance(error, RankFailure):  # the rank that failed has printed its traceback
        say(f"[rank {ranks.rank}] {error}")
    elif first == own:
        say(f"[rank {ranks.rank}]\n{''.join(traceback.format_exception(error))}")
    else:
        say(f"[rank {ranks.rank}] stopped: another rank failed first: {first}")


class Stopped(Exception):
    """A signal has ended the run on all ranks; `number` is the signal's."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number = number


class StopRequest:
    """SIGTERM and SIGINT as a wish that all ranks answer together, between the parts of a step; a context.

    `number` is 0 or the signal's. After `grace` seconds, or at a second signal, this process leaves at once with exit code
    128 + number: a thread of its own sees to that, whatever the main thread waits for. Where another rank has failed, which is
    why torchrun ends this one, it leaves with 1. A signal within `REPEAT` seconds of the first is taken for the same one: a
    scheduler may signal every process, and torchrun passes on its own. `outcome` is what is said then.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    REPEAT = 2.0

    def __init__(self, ranks: Ranks, grace: float):
        self.ranks, self.grace, self.number, self.outcome = ranks, grace, 0, "without saving"

    def __enter__(self) -> "StopRequest":
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.before = [signal.signal(number, lambda *_: None) for number in self.SIGNALS]
        self.wakeup = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in zip(self.SIGNALS, self.before):
            signal.signal(number, handler)
        self.writer.close()  # ends the thread

    def _watch(self) -> None:
        self.number = self._next(None)
        if not self.number:
            return
        threading.Thread(target=self._leave_if_another_failed, daemon=True).start()  # the store may make it wait
        name, began = signal.Signals(self.number).name, time.monotonic()
        said = f"{name}: stopping within {self.grace:g} s; again to leave at once"
        say(f"[rank {self.ranks.rank}] {said}")
        while (left := began + self.grace - time.monotonic()) > 0:
            again = self._next(left)
            if again == 0:
                return
            if again is not None and time.monotonic() - began > self.REPEAT:
                break
        say(f"[rank {self.ranks.rank}] {name}: left {self.outcome}")
        leave(128 + self.number)

    def _leave_if_another_failed(self) -> None:
        with contextlib.suppress(Exception):  # as in `fail`
            if self.ranks.store is not None and self.ranks.store.check([FAILED]):
                fail(self.ranks, RuntimeError("stopped"))
                leave(1)

    def _next(self, timeout: float | None) -> int | None:
        """The next signal of ours; None where none comes in time, 0 where the context has ended."""
        self.reader.settimeout(timeout)
        try:
            while (received := self.reader.recv(1)) and received[0] not in self.SIGNALS:
                pass
        except TimeoutError:
            return None
        return received[0] if received else 0


def is_first_rank() -> bool:
    """Whether this rank is the one that writes."""
    return dist.get_rank() == 0


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
        say(f"[rank {dist.get_rank()}] {phase} failed:\n{''.join(traceback.format_exception(e))}")
    if sum_over_ranks(float(failure is not None)) > 0:
        messages = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        named = "; ".join(f"rank {r}: {m}" for r, m in enumerate(messages) if m is not None)
        raise RankFailure(printable(f"{phase} failed on {named}")) from failure
    return result


def say(text: str) -> None:
    """A message on stderr, printable, in one write: lines of several ranks do not mix."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """`text` with control characters, direction marks and lone surrogates as escapes, so that it cannot rule a terminal."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):04x}", text)


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


@functools.cache
def _say_world_size() -> None:
    """Once a process: over how many ranks statistics are taken, from the process group itself."""
    say(f"[rank {dist.get_rank()}] statistics are over {dist.get_world_size()} ranks")


def mean_std(values: torch.Tensor, mask: torch.Tensor, ddof: int) -> Moments:
    """Mean and standard deviation over ranks, in two passes of float64.

    The one-pass E[x^2] - E[x]^2 loses all digits on rewards such as 10000 .. 10000.003.

    values: any shape, float; mask: same shape, bool. Ranks may hold different counts, also none.
    Errors: RankFailure on all ranks when the masked values are empty on all of them, or not finite on any.
    """
    kept = values[mask].to(torch.float64)  # [n]

    _say_world_size()

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


def correlation(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor) -> float | None:
    """Pearson correlation of the masked values of all ranks, in two passes of float64; None where one of them is constant.

    All three of one shape. Errors: as `mean_std`, except that no value at all gives None.
    """
    if sum_over_ranks(float(mask.sum())) == 0:
        return None
    a, b = mean_std(first, mask, ddof=0), mean_std(second, mask, ddof=0)
    product = (first[mask].double() - a.mean) * (second[mask].double() - b.mean)
    covariance = sum_over_ranks(product.sum().item()) / a.count
    return None if a.collapsed or b.collapsed else covariance / (a.std * b.std)


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


def shard_model(
    model: torch.nn.Module,
    blocks: list[torch.nn.Module],
    compute_dtype: torch.dtype,
    exact: Sequence[torch.nn.Module] = (),
    offload: bool = False,
) -> torch.nn.Module:
    """Wrap each block and then the root with `fully_shard`: shards in the dtype they have, `compute_dtype` compute, fp32
    reduction. `exact` are modules that compute in fp32; `offload` keeps the shards in CPU memory between uses.

    Every rank must hold the same full parameters. FSDP2 averages gradients over ranks: losses are scaled by
    world_size / global denominator. Returns the same module.
    """
    where = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    for module in exact:
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32), offload_policy=where)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=policy, offload_policy=where)
    return fully_shard(model, mp_policy=policy, offload_policy=where)


def free_gathered(model: torch.nn.Module) -> None:
    """Drop the full parameters that FSDP2 keeps after a forward pass without a backward (at the root: its bf16 copy)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def copy_shards(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give `target` the weights of `source`, shard by shard, in the target's dtype; both were sharded alike."""
    free_gathered(source)
    free_gathered(target)
    for to, of in zip(target.parameters(), source.parameters(), strict=True):
        to.to_local().copy_(of.to_local())


def full_parameters(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full detached tensor in `dtype`) of each parameter, one at a time; a collective for each.

    Tied parameters come once, under the name that the model registers first. All ranks must use the iterator to its end.
    """
    free_gathered(model)
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


def empty_model(model_path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model's parameters without their values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path, trust_remote_code=False), dtype=dtype)


def export_model(model: PreTrainedModel, model_path: str, tokenizer: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the full model in the compute dtype, as an ordinary Hugging Face folder with the trainer's log-probs.

    Written beside and committed by a rename. A collective; rank 0 writes.
    """
    state = full_state_dict(model)

    def save() -> None:
        if dist.get_rank() != 0:
            return
        shell = empty_model(model_path, dtype)
        shell.load_state_dict({k: v.to(dtype) for k, v in state.items()}, assign=True)
        shell.tie_weights()
        ids = {k: getattr(model.generation_config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        shell.generation_config = GenerationConfig(**ids)  # transformers refuses to save some that hub models ship
        beside = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(beside, ignore_errors=True)
        shell.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        original = cached_file(model_path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
        if original is not None:
            shutil.copyfile(original, beside / "generation_config.json")
        replace_folder(beside, folder)

    run_together("exporting the model", save)


# ---------------------------------------------------------------------------------------------- optimizers


def lr_factor(step: int, schedule: str, warmup: int, total: int) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0): linear warm-up, then the decay to 0 at `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)  # never a step that learns nothing
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


class Learner:
    """A sharded model with its optimizer: AdamW on the fp32 shards, and a schedule over `updates` optimizer steps.

    `num_updates` are the steps made; `num_skipped` those left out in a row, as loss or gradient was not finite.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float,
        updates: int,
        schedule: str,
        warmup: int,
        beta2: float,
        weight_decay: float,
        prefix: str = "",
    ):
        self.model, self.prefix = model, prefix  # of its metrics
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=weight_decay)
        self.peak, self.num_updates, self.num_skipped = lr, 0, 0
        self.lr_factor = functools.partial(lr_factor, schedule=schedule, warmup=warmup, total=updates)

    def step(self, loss: float, max_norm: float, meter: "Meter") -> bool:
        """One optimizer step on the gradients that are there, clipped; whether it was made. A collective.

        None is made on any rank where the gradient or a rank's share of the loss is not finite: weights and moments stay.
        """
        norm = clip_grad_norm(self.model, max_norm)  # the same on all ranks
        finite = math.isfinite(norm) and max_over_ranks(float(not math.isfinite(loss))) == 0
        meter.mean(f"optim/{self.prefix}skipped", float(not finite), 1)
        if finite:
            lr = self.peak * self.lr_factor(self.num_updates)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_updates += 1
            meter.mean(f"optim/{self.prefix}grad_norm", norm, 1)
            meter.peak(f"optim/{self.prefix}lr", lr)
        self.num_skipped = 0 if finite else self.num_skipped + 1
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def tensors(self, known: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """Weights and AdamW's moments by name, as they are sharded; moments that are `known` and not there yet are made."""
        free_gathered(self.model)  # a forward pass without a backward leaves whole parameters in the compute dtype
        found = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state[parameter]
            if not moments and f"exp_avg.{name}" in known:
                zeros = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
                moments.update(step=torch.zeros(()), **zeros)
            found[f"weights.{name}"] = parameter.detach()
            found |= {f"{key}.{name}": value for key, value in moments.items()}
        return found


# ---------------------------------------------------------------------------------------------- checkpoints


def rng_state(device: torch.device) -> dict:
    """The state of this process's random generators, as plain values."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state().tolist()}
    return state | ({"cuda": torch.cuda.get_rng_state(device).tolist()} if device.type == "cuda" else {})


def set_rng_state(state: dict, device: torch.device) -> None:
    """What `rng_state` gave, also after a way through JSON."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)


def write_text(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, whenever the process or the machine stops."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    beside.rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(new: Path, folder: Path) -> None:
    """Give `new` the name `folder`; what had it is deleted after that."""
    old = folder.with_name(folder.name + ".old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


STATE = "state.json"


class Checkpoints:
    """The checkpoints of one run: folders step_000012 of safetensors files, some a rank, and of state.json, written last.

    Each is written beside, as step_000012.tmp, and renamed when all ranks have finished; state.json holds the size and the
    CRC-32 of every file. No pointer names the last one: it is the highest number. Nothing in them is a pickle.
    """

    def __init__(self, folder: Path, keep_last: int = 0, in_background: bool = False):
        self.folder, self.keep_last = folder, keep_last
        self.group = dist.new_group(backend="gloo") if in_background else None  # a thread's collectives must not meet others
        self.pending: tuple | None = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are committed, in order; whether they are whole is not looked at."""
        names = {p.name for p in self.folder.iterdir()} if self.folder.is_dir() else set()
        steps = (int(name.removeprefix("step_")) for name in names if re.fullmatch(r"step_\d+", name))
        return sorted(step for step in steps if self.path(step).name in names)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step_{step:06d}"

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], state: dict) -> None:
        """Write the checkpoint of `step`: tensors by name, "part.kind.rest", and the plain values of rank 0's `state`.

        In the background, only a copy is made here; it is committed by the next `finish`. A collective.
        Errors: RankFailure; RuntimeError where a tensor is not finite: such a checkpoint is never committed.
        """
        self.finish()
        check_finite(tensors)
        beside = self.path(step).with_suffix(".tmp")

        def make() -> None:
            if is_first_rank():
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)

        run_together("making the checkpoint's folder", make)
        kinds = {name: ".".join(name.split(".")[:2]) for name in tensors}
        number = {kind: i for i, kind in enumerate(sorted(set(kinds.values())), 1)}  # one file each bounds the copies in memory
        files = {name: number[kind] for name, kind in kinds.items()}
        writer = dcp.HuggingFaceStorageWriter(str(beside), fqn_to_index_mapping=files, save_distributed=True)
        if self.group is not None:
            future = dcp.async_save(dict(tensors), storage_writer=writer, process_group=self.group)
            self.pending = (step, beside, state, future)
        else:
            self._commit(step, beside, state, lambda: dcp.save(dict(tensors), storage_writer=writer))

    def finish(self, wait: bool = True) -> None:
        """Commit the checkpoint that is being written in the background, if there is one; without `wait`, where every rank has
        written its part. A collective."""
        if self.pending is not None and (wait or max_over_ranks(float(not self.pending[-1].done())) == 0):
            (step, beside, state, future), self.pending = self.pending, None
            self._commit(step, beside, state, future.result)

    def _commit(self, step: int, beside: Path, state: dict, write: Callable[[], Any]) -> None:
        """`write`, a collective, then name the folder, and delete checkpoints that are too old."""
        failure = None
        try:
            write()
        except CheckpointException as e:  # the same on every rank
            failure = e.failures.get(dist.get_rank())

        def check() -> dict[str, list[int]]:
            if failure is not None:
                say("".join(failure[1].format()))
                if isinstance(failure[0], OSError):
                    remedy = f"Make room at {self.folder}, or delete an older checkpoint there, and go on with --resume"
                    raise OSError(f"{failure[0]}. {remedy}") from failure[0]
                raise failure[0]
            return {name: _size_and_checksum(beside / name) for name in _own_share(p.name for p in beside.iterdir())}

        def commit() -> None:
            if is_first_rank():
                text = json.dumps({**state, "files": files})
                write_text(beside / STATE, json.dumps({"crc32": zlib.crc32(text.encode()), **json.loads(text)}))
                beside.rename(self.path(step))
                _sync_folder(self.folder)
                for old in self.steps()[: -self.keep_last] if self.keep_last else ():
                    condemned = self.path(old).with_suffix(".tmp")  # by a rename, so that no half of one can be taken for it
                    try:
                        self.path(old).rename(condemned)
                        shutil.rmtree(condemned)
                    except OSError as e:
                        say(f"warning: the checkpoint {self.path(old)} could not be deleted: {e}")

        files = {}
        try:
            for part in gather_objects(run_together(f"writing the checkpoint of step {step}", check)):
                files |= part
            run_together(f"committing the checkpoint of step {step}", commit)
        except RankFailure:
            if is_first_rank():  # what is there takes room, and is of no use
                shutil.rmtree(beside, ignore_errors=True)
            raise

    def find(self, run_id: str) -> dict | None:
        """The state of the last checkpoint that is whole, or None; what is not whole is said, and set aside. A collective.

        Errors: RankFailure where one belongs to another run.
        """
        for step in reversed(gather_objects(self.steps())[0]):
            state, problems = self.read(step, run_id)
            if not problems:
                return state
            folder = self.path(step)
            aside = folder.with_suffix(".damaged")

            def set_aside(folder=folder, aside=aside, problems=problems) -> None:
                if is_first_rank():
                    said = f"{'; '.join(problems)}. It is {aside.name} now, and the one before it is tried"
                    say(f"warning: {folder} cannot be used: {said}")
                    shutil.rmtree(aside, ignore_errors=True)
                    folder.rename(aside)

            run_together("setting a checkpoint aside", set_aside)
        return None

    def read(self, step: int, run_id: str) -> tuple[dict, list[str]]:
        """(state, all that is wrong with the files of a step's checkpoint, the same on every rank). A collective.

        Errors: RankFailure where it is another run's.
        """
        state, problem = run_together("reading a checkpoint", self._inspect, self.path(step), run_id)
        return state, [p for p in gather_objects(problem) if p]

    def _inspect(self, folder: Path, run_id: str) -> tuple[dict, str | None]:
        """(state, what is wrong with this rank's share of the files). Errors: ValueError where it is another run's."""
        try:
            state = read_state(folder)
        except OSError as e:
            return {}, f"{Path(e.filename or folder).name}: {e.strerror}"
        except (KeyError, TypeError, ValueError) as e:
            return {}, f"{STATE} is damaged ({type(e).__name__}: {e})"
        if state["run"] != run_id:
            raise ValueError(f"{folder} belongs to another run, {state['run']} and not {run_id}. Move it away")
        try:
            for name in _own_share(state["files"]):
                size, checksum = _size_and_checksum(folder / name)
                if [size, checksum] != state["files"][name]:
                    return state, f"{name} has {size} bytes and CRC-32 {checksum}, not {state['files'][name]}"
        except OSError as e:
            return {}, f"{Path(e.filename or folder).name}: {e.strerror}"
        return state, None


def read_state(folder: Path) -> dict:
    """The plain values of a checkpoint. Errors: OSError, ValueError, TypeError, KeyError where it is none."""
    state = {**json.loads((folder / STATE).read_text())}
    if zlib.crc32(json.dumps({k: v for k, v in state.items() if k != "crc32"}).encode()) != state["crc32"]:
        raise ValueError("its own CRC-32 is another")
    return state


def load_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors`, sharded as they are now, whatever the world size was when they were saved. A collective.

    Errors: RankFailure where a tensor is missing or has another shape.
    """
    failure = None
    try:
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except CheckpointException as e:
        failure = e.failures.get(dist.get_rank())

    def check() -> None:
        if failure is not None:
            raise failure[0]

    run_together(f"loading {folder}", check)


def tensor_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of each tensor in a checkpoint."""
    known = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in known.items()}


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise on all ranks where any element is not finite. A collective."""

    def check() -> None:
        for name, tensor in tensors.items():
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if not torch.isfinite(own).all():
                raise ValueError(f"{name} has elements that are not finite; no checkpoint is made of it")

    run_together("checking the weights", check)


def _own_share(names: Sequence[str]) -> list[str]:
    """Every world_size-th name, from this rank's number on."""
    return sorted(names)[dist.get_rank() :: dist.get_world_size()]


def _size_and_checksum(path: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as f:
        while part := f.read(2**24):
            checksum = zlib.crc32(part, checksum)
    return [path.stat().st_size, checksum]


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

    def means_of(self, metrics: dict[str, tuple]) -> None:
        """Add several (sum, count) pairs."""
        for name, (total, count) in metrics.items():
            self.mean(name, total, count)

    def total(self, name: str, value) -> None:
        """Add to a sum."""
        self.totals[name] = self.totals[name] + value

    def peak(self, name: str, value) -> None:
        """Keep the largest value."""
        self.peaks[name] = max(float(value), self.peaks[name])

    def reduce(self) -> dict[str, float]:
        """One number a name, the same on every rank; means over nothing are left out. A collective."""
        means = {k: (float(s), float(c)) for k, (s, c) in self.means.items()}
        totals = {k: float(v) for k, v in self.totals.items()}
        merged = Meter()
        for other_means, other_totals, peaks in gather_objects((means, totals, dict(self.peaks))):
            for name, (total, count) in other_means.items():
                merged.mean(name, total, count)
            for name, value in other_totals.items():
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


def memory_gib() -> float:
    """Resident memory of this process now."""
    return psutil.Process().memory_info().rss / 2**30


def known_metric(name: str) -> bool:
    """Whether METRICS describes `name`, <...> standing for one part of it."""
    for pattern in METRICS:
        before, _, rest = pattern.partition("<")
        if not rest and name == pattern:
            return True
        if rest and name.startswith(before) and name.endswith(rest.rpartition(">")[2]):
            return True
    return False


def metric_table() -> str:
    """METRICS as a Markdown table."""
    lines = ["| metric | what it is | reduction |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| `{name}` | {what} | {how} |" for name, (what, how) in METRICS.items()])


METRICS = {  # name: (what it is, how it is reduced over samples, tokens and ranks)
    "reward/<name>": ("a reward's value over the samples that it scored", "mean"),
    "reward/total": ("weighted sum of the rewards", "mean"),
    "reward/<name>/abstained": ("samples that the reward did not score: it returned None, or failed and abstains", "sum"),
    "reward/<name>/timeout": ("samples on which it did not return within --grader-timeout", "sum"),
    "reward/<name>/error": ("samples on which it raised, or its process ended", "sum"),
    "reward/<name>/zero_std": ("groups in which the reward is constant, of those that it scored", "mean"),
    "reward/<name>_<other>_correlation": ("Pearson correlation of two rewards over samples that have both", "over ranks"),
    "rollout/response_tokens": ("length of a response, EOS included", "mean"),
    "rollout/response_tokens_max": ("length of the longest response", "max"),
    "rollout/prompt_tokens": ("length of a prompt", "mean"),
    "rollout/finished": ("responses that ended with an EOS token", "mean"),
    "rollout/truncated": ("responses that were cut at --max-response-tokens", "sum"),
    "rollout/prompts_sampled": ("prompts that were sampled, refills included", "max"),
    "rollout/refills": ("rounds of further prompts that dynamic sampling took", "max"),
    "rollout/prompts_missing": ("places of the step that stayed empty after --max-refills", "max"),
    "rollout/dropped/<reason>": (
        "groups that dynamic sampling left out: zero_std_<reward of its first sample>, unreadable_reward (nothing scored), "
        "all_truncated (no token to train on)",
        "sum",
    ),
    "rollout/tokens_dropped": ("response tokens of those groups", "sum"),
    "rollout/groups_without_signal": ("groups whose scores are all equal as float32, of all that were sampled", "mean"),
    "rollout/epoch": ("epochs of the data begun or done, as a fraction", "max"),
    "rollout/logprob_diff": ("abs(trainer log-prob - engine log-prob) of the sampled tokens, before the update", "mean"),
    "rollout/logprob_diff_max": ("the largest of these", "max"),
    "rollout/kl_k3": ("k3 of trainer against engine, before the update", "mean"),
    "rollout/nonfinite_logprobs": ("tokens whose engine log-prob is not finite; they are out of the policy loss", "mean"),
    "advantage/abs": ("abs(advantage) over response tokens", "mean"),
    "advantage/max": ("largest abs(advantage)", "max"),
    "advantage/<name>_share": ("a reward's share of sum abs(contribution to the score)", "mean"),
    "advantage/distinct_per_group": ("different scores in a group", "mean"),
    "advantage/cancellation_min": (
        "abs(sum of contributions) / sum of abs(contributions) of a sample: the smallest",
        "over ranks",
    ),
    "advantage/cancellation_median": ("its median; near 0, the rewards of a sample cancel", "over ranks"),
    "advantage/shadow_<name>_correlation": (
        "correlation with what another algorithm gives without KL, over response tokens",
        "over ranks",
    ),
    "advantage/shadow_<name>_sign_agreement": ("response tokens on which its sign is the same", "mean"),
    "advantage/explained_variance": ("1 - var(return - value) / var(return) before the update, with a critic", "over ranks"),
    "loss/policy": ("the aggregated policy loss with KL and entropy terms, averaged over the step's updates", "sum of shares"),
    "loss/value": ("the aggregated value loss, averaged over the step's updates", "sum of shares"),
    "loss/value_clip_fraction": ("tokens whose value loss is the clipped one", "mean"),
    "loss/empty_batches": ("optimizer batches without a token to train on; they are left out", "max"),
    "policy/entropy": ("entropy of the sampling distribution at response tokens", "mean"),
    "policy/ratio": ("exp(log-prob - old log-prob)", "mean"),
    "policy/bounded_log_ratio": ("tokens whose log-ratio was bounded to +-20 before exp", "mean"),
    "policy/clip_fraction_low": ("tokens with A < 0 and ratio < 1 - clip_low (cispo: whatever A)", "mean"),
    "policy/clip_fraction_high": ("tokens with A > 0 and ratio > 1 + clip_high (cispo: whatever A)", "mean"),
    "policy/dual_clip_fraction": ("tokens whose loss is bounded by the dual clip", "mean"),
    "policy/mismatch_weight": ("weight of a token's loss for engine against trainer", "mean"),
    "policy/mismatch_outside": ("tokens whose weight is not their ratio: truncated, masked, or not corrected at all", "mean"),
    "policy/ref_kl_k1": ("k1 of the policy against the reference", "mean"),
    "policy/ref_kl_k3": ("k3 of the policy against the reference", "mean"),
    "optim/grad_norm": ("global L2 norm of the gradient before clipping", "mean"),
    "optim/lr": ("largest learning rate of the step's updates", "max"),
    "optim/skipped": ("optimizer steps left out, as loss or gradient was not finite", "mean"),
    "optim/critic_grad_norm": ("the critic's gradient norm before clipping", "mean"),
    "optim/critic_lr": ("the critic's, likewise", "max"),
    "optim/critic_skipped": ("the critic's, likewise", "mean"),
    "perf/seconds_<phase>": (
        "seconds of sample, grade, forward (reference, values), advantage, update, push, eval, save (after the step before), "
        "other; they add up to step",
        "mean",
    ),
    "perf/seconds_step": ("wall time since the last step was logged", "mean"),
    "perf/tokens_sampled": ("response tokens", "sum"),
    "perf/tokens_computed": (
        "packed prompt and response tokens of the batches, each counted once whatever passes there are",
        "sum",
    ),
    "perf/tokens_per_second": ("sampled tokens by the step's wall time, all ranks together", "ratio"),
    "perf/peak_memory_gib": ("largest memory of a rank so far: GPU allocator, or resident set on CPU", "max"),
    "perf/memory_gib": ("largest resident memory of a rank at the end of the step", "max"),
    "eval/<set>/<mode>/<name>": ("a reward over the held-out prompts of a data set, greedy or sampled", "mean"),
    "eval/<set>/<mode>/<name>/pass@<k>": (
        "chance that one of k responses has the full reward, at least 1: unbiased, over prompts with k scored responses",
        "mean",
    ),
    "eval/<set>/<mode>/<name>/abstained": ("responses that the reward did not score; likewise /timeout and /error", "sum"),
    "eval/<set>/<mode>/response_tokens": ("length of a response", "mean"),
    "eval/<set>/<mode>/num_truncated": ("responses that were cut at the limit", "sum"),
}
PHASES = ("sample", "grade", "forward", "advantage", "update", "push", "eval", "save", "other")
