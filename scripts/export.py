"""Write the policy of a checkpoint as an ordinary Hugging Face folder, as a whole run does at its end.

    python scripts/export.py runs/a --step 50 --out models/a-50
    python scripts/export.py runs/a --out models/a              the last checkpoint that is whole

What it writes is a --model for train.py and scripts/evaluate.py, and a model for any other program.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dist_utils as du
import rollout as ro
import train


def export(cfg: train.Config, ranks: du.Ranks, run_dir: Path, step: int | None, out: Path) -> None:
    """Load the checkpoint into the model of the run's settings, and write it."""
    checkpoints = du.Checkpoints(run_dir / "checkpoints")
    run_id = du.run_together("reading the run folder", train.read_identity, run_dir)["run"]
    steps = du.gather_objects(checkpoints.steps())[0]
    for chosen in reversed(steps) if step is None else [step]:
        _, problems = checkpoints.read(chosen, run_id)
        if not problems:
            break
        if ranks.rank == 0:
            du.say(f"{checkpoints.path(chosen)} cannot be used: {'; '.join(problems)}")
    else:
        there = ", ".join(map(str, steps)) or "none"
        raise du.RankFailure(f"--step {step} of {run_dir}: no such checkpoint is complete; there are those of {there}")
    folder = checkpoints.path(chosen)
    model_path, dtype = train.model_folder(cfg), du.compute_dtype(cfg.dtype, ranks.device)
    tokenizer = du.run_together("loading the tokenizer", ro.load_tokenizer, cfg, model_path)
    policy, _ = train.load_learners(cfg, model_path, dtype)
    du.load_checkpoint(folder, {f"policy.{n}": t for n, t in policy.tensors().items()})
    du.run_together("making the folder", out.parent.mkdir, parents=True, exist_ok=True)
    du.export_model(policy.model, model_path, tokenizer, dtype, out)
    if ranks.rank == 0:
        print(f"the policy after step {chosen}: {out}")


def main(argv: list[str]) -> None:
    """Export, with the settings of the run."""
    parser = argparse.ArgumentParser("export.py", epilog="and the flags of train.py", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default the last")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    known, flags = parser.parse_known_args(argv)
    run_dir, out = known.run.expanduser(), known.out.expanduser()
    if out.exists():
        parser.error(f"--out {out}: exists; name a new folder")
    try:
        settings = train.settings_file(known.run, "RUN ")
    except ValueError as e:
        parser.error(str(e))
    cfg = train.parse(["--config", settings, *flags, "--run-dir", "None"], "export.py")
    train.run_process(lambda cfg, ranks: export(cfg, ranks, run_dir, known.step, out), cfg)


if __name__ == "__main__":
    main(sys.argv[1:])
