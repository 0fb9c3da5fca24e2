"""Answer held-out prompts with a model, grade the answers, and write figures and responses as files.

    python scripts/evaluate.py --model runs/a --config scripts/quickstart.yaml --eval-modes sampled --eval-samples 8
    torchrun --nproc-per-node 8 scripts/evaluate.py --model some/hub-name --eval-datasets gsm8k --eval-prompts 0

It takes the flags of train.py, and reads those of model, engine, data, rewards and evaluation. --model is a run folder (its
exported model), a Hugging Face folder, or a hub name. The folder that it names at the end holds config.yaml, results.json, and
the responses of each data set and mode under eval/.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dist_utils as du
import rollout as ro
import train


def main(cfg: train.Config, ranks: du.Ranks) -> None:
    """Evaluate `cfg.model` on every held-out data set in every mode."""
    model_path, run_dir = train.model_folder(cfg), train.new_run_dir(cfg, "eval")
    tokenizer = du.run_together("loading the tokenizer", ro.load_tokenizer, cfg, model_path)
    held_out = du.run_together("loading the data", ro.load_held_out, cfg, tokenizer)
    du.agree("the prompts", [p.digest() for p in held_out.values()])
    du.run_together("making the run folder", train.make_run_dir if ranks.rank == 0 else train.no_work, cfg, run_dir)
    graders = du.run_together("starting the graders", train.start_graders, cfg, cfg.eval_graders, cfg.eval_response_tokens)
    engine = train.load_engine(cfg, ranks, model_path, du.compute_dtype(cfg.dtype, ranks.device))
    du.run_together("starting the graders", graders.check)
    known = {"tokenizer": tokenizer, "eos": ro.eos_token_ids(model_path, tokenizer), "held_out": held_out}
    run = SimpleNamespace(cfg=cfg, ranks=ranks, run_dir=run_dir, engine=engine, held_out_graders=graders, **known)
    results = train.evaluate(run, 0)

    def write() -> None:
        if ranks.rank == 0:
            (run_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n")
            print("\n".join(f"{name}: {value:.4f}" for name, value in results.items()))
            print(f"figures and responses: {run_dir}")

    du.run_together("writing the results", write)
    graders.close()
    engine.close()


if __name__ == "__main__":
    own_dir = [] if any(a.startswith("--run-dir") for a in sys.argv) else ["--run-dir", "None"]  # not a run's, of its --config
    train.run_process(main, train.parse([*sys.argv[1:], "--eval-every", "1", *own_dir], "evaluate.py"))
