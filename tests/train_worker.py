"""Started by torchrun: train.main with rewards for untrained models, and with one thing broken on one rank.

    train_worker.py OPTIONS ARGUMENTS OF train.py...
OPTIONS is JSON: {"fail": [module, function, rank], "probe": FILE, "runs": {name: arguments}, "failures":
{phase: fail}, "resumes": [arguments, steps], "dies": [rank, sampling], "slow": FILE}. `probe` writes the trainer's log-probs
of a fixed response (PROBE) before the export; `runs` makes one run after another in one process group, each in a folder of its
name under --run-dir; `resumes`, after them, a whole run and what is left of it after the checkpoint of each of `steps`;
`failures` one run after another, each with something broken; `dies` kills a rank with SIGKILL as it samples for the n-th time,
unless torchrun has restarted it; `slow` makes FILE and sleeps for a minute whenever samples are asked for.
"""

import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from transformers import AutoTokenizer

import dist_utils as du
import losses
import rewards as rw
import rollout as ro
import train

PROBE = SimpleNamespace(prompt_ids=[1, 9690, 198, 28120], response_ids=[520, 9531, 198, 905, 2], logprobs=[0.0] * 5, group=0)
rw.REWARDS["letters"] = rw.Reward(lambda response, row: len(response) / 100)
rw.REWARDS["odd"] = rw.Reward(lambda response, row: len(response) % 2)
rw.REWARDS["picky"] = rw.Reward(lambda response, row: None if len(response) % 3 == 0 else len(response) % 2)
rw.REWARDS["noisy"] = rw.Reward(
    lambda response, row: random.random() + np.random.rand() + torch.rand(()).item(), in_process=True
)
rw.REWARDS["silent"] = rw.Reward(lambda response, row: None)
rw.REWARDS["vowels"] = rw.Reward(
    lambda response, row: None if not response else sum(response.count(v) for v in "aeiou") / len(response)
)


def probe_logprobs(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    batch = losses.collate([PROBE], torch.ones(1, 5, dtype=torch.bool), device)
    with torch.no_grad():
        return losses.token_logprobs(model, batch, 1.0)[0][0]


def many_runs(ranks: du.Ranks, folder: Path, argv: list[str], runs: dict[str, list[str]]) -> None:
    """Each run as `train.main` would make it, but for the process group, the picture at the end, and what all runs read alike:
    the tokenizer and the list of packages."""
    train.sum_up = train.no_work
    train.metadata = SimpleNamespace(distributions=list)
    ro.AutoTokenizer = SimpleNamespace(from_pretrained=functools.cache(AutoTokenizer.from_pretrained))
    for name, more in runs.items():
        train.train(train.parse([*argv, *more, "--run-dir", str(folder / name)]), ranks)


def facts(run: Path) -> tuple:
    """What two equal runs have alike, bit for bit: metrics but for times and memory, responses, and the last checkpoint."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("perf/seconds", "perf/tokens_per_second", "perf/peak_memory", "perf/memory")
    metrics = [{name: value for name, value in r.items() if not name.startswith(measured)} for r in records]
    texts = {str(f.relative_to(run)): f.read_text() for f in (*run.glob("samples/*"), *run.glob("eval/*/*"))}
    checkpoints = du.Checkpoints(run / "checkpoints")
    folder = checkpoints.path(checkpoints.steps()[-1])
    state = {name: v for name, v in du.read_state(folder).items() if name not in ("config", "files", "run", "crc32")}
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file).items():
            tensors[file.name, name] = (tuple(tensor.shape), hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
    return metrics, texts, state, tensors


def resume_from(ranks: du.Ranks, folder: Path, argv: list[str], more: list[str], steps: list[int]) -> None:
    """A whole run in `folder`/straight, and in from_<step> copies of it that lost all checkpoints after `step` and went on."""
    many_runs(ranks, folder, argv, {"straight": [*more, "--save-every", "1", "--keep-last", "0"]})
    for step in steps:
        copy = folder / f"from_{step}"
        if ranks.rank == 0:
            shutil.copytree(folder / "straight", copy)
            for later in du.Checkpoints(copy / "checkpoints").steps()[step:]:
                shutil.rmtree(copy / "checkpoints" / f"step_{later:06d}")
        du.gather_objects(None)  # the copy is whole
        steps_of_run = str(train.parse(["--resume", str(copy)]).steps)
        train.train(train.parse(["--resume", str(copy), "--save-every", steps_of_run]), ranks)


def fail_in(ranks: du.Ranks, folder: Path, argv: list[str], failures: dict[str, list]) -> None:
    """One run after another, each with one thing broken on one rank: what every rank has seen."""
    for number, failure in enumerate(failures.values()):
        *failure, more = failure
        mend = break_on(*failure)
        try:
            train.train(train.parse([*argv, *more, "--run-dir", str(folder / str(number))]), ranks)
        except du.RankFailure as e:
            print(f"rank {ranks.rank} saw: {e}", flush=True)
        mend()


def before_sampling(work: Callable[[], None]) -> None:
    """Do something whenever samples are asked for."""
    sample = ro.sample_groups

    def wrapped(*args):
        work()
        return sample(*args)

    ro.sample_groups = wrapped


def break_on(module: str, name: str, rank: int) -> Callable[[], None]:
    """Make `module.name` raise on one rank; returns what undoes it."""
    classes = {"log": train.Log, "engine": ro.HFEngine, "graders": rw.Graders, "writer": HuggingFaceStorageWriter}
    owner = {"ro": ro, "losses": losses, **classes}[module]
    original = getattr(owner, name)

    def broken(*args, **kwargs):
        if torch.distributed.get_rank() == rank:
            raise ValueError(f"injected into {name}")
        return original(*args, **kwargs)

    setattr(owner, name, broken)
    return lambda: setattr(owner, name, original)


def main(options: dict, argv: list[str]) -> None:
    if "fail" in options:
        break_on(*options["fail"])
    if "probe" in options:
        export = du.export_model

        def export_and_probe(model, *args):
            logprobs = probe_logprobs(model, torch.device("cpu"))
            if torch.distributed.get_rank() == 0:
                torch.save(logprobs, options["probe"])
            export(model, *args)

        du.export_model = export_and_probe
    if "failures" in options:
        fail_in(du.start(), Path(argv[argv.index("--run-dir") + 1]), argv, options["failures"])
        du.leave(0)
    if "runs" in options:
        ranks, folder = du.start(), Path(argv[argv.index("--run-dir") + 1])
        many_runs(ranks, folder, argv, options["runs"])
        if "resumes" in options:
            resume_from(ranks, folder, argv, *options["resumes"])
        du.leave(0)
    if "slow" in options:
        before_sampling(lambda: Path(options["slow"]).touch() or time.sleep(60))
    if "dies" in options and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        me, calls = int(os.environ["RANK"]), itertools.count(1)
        before_sampling(lambda: os.kill(os.getpid(), signal.SIGKILL) if [me, next(calls)] == options["dies"] else None)
    train.main(argv)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
