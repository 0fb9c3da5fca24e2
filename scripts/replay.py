"""Run the update of one saved step again, alone: the same numbers, or those of other settings.

    python scripts/replay.py runs/a --step 51
    python scripts/replay.py runs/a --step 51 --algorithm cispo --clip-high 0.3
    torchrun --nproc-per-node 2 scripts/replay.py runs/a --step 51

A run saves the batches of its first step, of the first step after each checkpoint that it keeps, and of each step with a
skipped update, as batches/. Replayed are forward and backward passes and optimizer steps, on the weights and moments of the
checkpoint before, with the saved advantages, log-probs and values, and the settings of that step; no engine, no data set, no
grader. Further flags are train.py's: those of loss, KL, mismatch and optimizer act, those of rewards and advantages do not.
With as many ranks as the run had the numbers are the same bit for bit, with others to rounding.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dist_utils as du
import losses
import train


def find_batches(run_dir: Path, step: int) -> list[Path]:
    """The files of a step, one a rank of the run. Errors: ValueError naming the steps that there are."""
    for name in (f"step_{step:06d}", f"skipped_{step:06d}"):
        if (run_dir / "batches" / name).is_dir():
            return sorted((run_dir / "batches" / name).glob("rank_*"), key=lambda f: int(f.stem.removeprefix("rank_")))
    there = sorted(int(f.name.split("_")[1]) for f in run_dir.glob("batches/*"))
    raise ValueError(f"--step {step}: {run_dir} has batches of the steps {', '.join(map(str, there)) or 'none'}")


def join_ranks(files: list[Path], ranks: du.Ranks) -> list[tuple]:
    """The batches in `files`, dealt to the ranks that there are now: as many micro-batches on each."""
    parts = [losses.load_batches(file, ranks.device) for file in files]
    joined = []
    for same in zip(*parts, strict=True):  # one optimizer batch, of each rank of the run
        mine = [batch for micro, _ in same[ranks.rank :: ranks.world_size] for batch in micro]
        longest = max(sum(len(m) for m, _ in same[r :: ranks.world_size]) for r in range(ranks.world_size))
        fillers = [filler(same[0][0][0], ranks) for _ in range(longest - len(mine))]
        joined.append((mine + fillers, same[0][1]))
    return joined


def filler(like: losses.Batch, ranks: du.Ranks) -> losses.Batch:
    """A micro-batch without a token, with the fields that `like` has."""
    batch = losses.empty_batch(ranks.device)
    names = ("advantages", "old_logprobs", "ref_logprobs", "old_values", "returns")
    zeros = {n: batch.rollout_logprobs * 0 for n in names if getattr(like, n) is not None}
    return dataclasses.replace(batch, **zeros)


def replay(cfg: train.Config, ranks: du.Ranks, run_dir: Path, step: int) -> dict[str, float]:
    """The metrics of the update of `step`, on the weights before it."""
    batches = join_ranks(du.run_together("finding the batches", find_batches, run_dir, step), ranks)
    policy, critic = train.load_learners(cfg, train.model_folder(cfg), du.compute_dtype(cfg.dtype, ranks.device))
    run = SimpleNamespace(cfg=cfg, ranks=ranks, policy=policy, critic=critic, reference=None)
    checkpoints = du.Checkpoints(run_dir / "checkpoints")
    earlier = [s for s in checkpoints.steps() if s < step]
    if earlier:
        folder = checkpoints.path(earlier[-1])
        run_id = du.run_together("reading the run folder", train.read_identity, run_dir)["run"]
        state, problems = checkpoints.read(earlier[-1], run_id)
        if problems:
            raise du.RankFailure(f"{folder} cannot be used: {'; '.join(problems)}")
        names = du.run_together("reading the checkpoint", du.tensor_sizes, folder)
        du.load_checkpoint(folder, train.Run.tensors(run, sorted(names)))
        train.restore_counters(run, state)
    start = earlier[-1] if earlier else 0
    if ranks.rank == 0:
        note = "" if start == step - 1 else f": warning, step {step} itself began with those of step {step - 1}"
        print(f"step {step} again, on the weights of step {start}{note}", flush=True)
    meter = du.Meter()
    train.update(run, step, batches, meter)
    return meter.reduce()


def main(argv: list[str]) -> None:
    """Replay, and print each metric as the run had it and as it is now."""
    parser = argparse.ArgumentParser("replay.py", epilog="and the flags of train.py", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=int, required=True, help="step whose update is run again")
    known, flags = parser.parse_known_args(argv)
    run_dir, step = known.run.expanduser(), known.step
    try:
        train.settings_file(known.run, "RUN ")
        settings = find_batches(run_dir, step)[0].parent / "config.yaml"
    except ValueError as e:
        parser.error(str(e))
    cfg = train.parse(["--config", str(settings), *flags, "--run-dir", "None"], "replay.py")

    def work(cfg: train.Config, ranks: du.Ranks) -> None:
        metrics = replay(cfg, ranks, run_dir, step)
        if ranks.rank == 0:
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            recorded = next((r for r in map(json.loads, lines) if r["step"] == step), {})
            print(f"{'metric':36} {'run':>14} {'replay':>14}")
            for name, value in metrics.items():
                then = recorded.get(name)
                shown = "-" if then is None else f"{then:.8g}"
                print(f"{name:36} {shown:>14} {value:>14.8g}" + ("  equal" if then == value else ""))

    train.run_process(work, cfg)


if __name__ == "__main__":
    main(sys.argv[1:])
