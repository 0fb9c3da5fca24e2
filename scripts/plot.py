"""Draw rewards, response length and evaluation over steps, for one run or for several runs grouped by a setting.

    python scripts/plot.py RUN                          writes RUN/curves.png
    python scripts/plot.py RUN RUN ... --by algorithm --out compare.png
                                                        one colour a value; a line is the mean, the band min to max

A RUN is a run folder (config.yaml, metrics.jsonl).
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import tyro
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass
class Args:
    """Curves of one or several runs."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders."""
    by: str = "algorithm"
    """Setting that groups several runs."""
    out: str | None = None
    """PNG file; default curves.png in the first run's folder."""


def read(run: Path) -> tuple[dict, list[dict]]:
    """(configuration, one record a step). Errors: SystemExit naming the missing file."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]  # a run may be writing its last line
        return dict(yaml.safe_load((run / "config.yaml").read_text())), whole
    except OSError as e:
        raise SystemExit(f"{run} is no run folder: {e.filename}: {e.strerror}") from None
    except (ValueError, TypeError, yaml.YAMLError) as e:
        raise SystemExit(f"{run}: its config.yaml or metrics.jsonl cannot be read: {e}") from None


def curves(records: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric where it was recorded."""
    points = [(r["step"], r[name]) for r in records if name in r]
    return np.array([p[0] for p in points]), np.array([p[1] for p in points])


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` steps, shorter at the ends."""
    half = window // 2
    return np.array([y[max(0, i - half) : i + half + 1].mean() for i in range(len(y))])


def panel(ax, runs: list[tuple[str, list[dict]]], name: str, title: str, unit: bool) -> None:
    """One metric: every run faint, the mean of each label strong, the band from the lowest to the highest run."""
    labels = list(dict.fromkeys(label for label, _ in runs))
    for colour, label in zip(itertools.cycle(plt.rcParams["axes.prop_cycle"].by_key()["color"]), labels):
        drawn = [curves(records, name) for each, records in runs if each == label]
        drawn = [(x, y) for x, y in drawn if len(x)]
        if not drawn:
            continue
        length = min(len(x) for x, _ in drawn)
        x, ys = drawn[0][0][:length], np.stack([y[:length] for _, y in drawn])
        marker, window = ("o", 1) if length < 12 else (None, max(3, length // 15 * 2 + 1))
        if len(ys) == 1 and window > 1:
            ax.plot(x, ys[0], color=colour, alpha=0.3, lw=1)
        ys = np.stack([smooth(y, window) for y in ys])
        if len(ys) > 1:
            ax.fill_between(x, ys.min(0), ys.max(0), color=colour, alpha=0.18, lw=0)
        ax.plot(x, ys.mean(0), color=colour, lw=2, marker=marker, label=f"{label} ({len(ys)})" if len(runs) > 1 else label)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("step")
    if unit:
        ax.set_ylim(-0.03, 1.03)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        ax.legend(fontsize=8, frameon=False)


def main(args: Args) -> None:
    """Read the runs and write the picture."""
    if not args.runs:
        raise SystemExit("name at least one run folder")
    folders = [Path(r) for r in args.runs]
    read_runs = [read(f) for f in folders]
    if any(args.by not in config for config, _ in read_runs):
        raise SystemExit(f"--by {args.by}: no such setting; there are {', '.join(read_runs[0][0])}")
    runs = [(str(config[args.by]), records) for config, records in read_runs]
    config = read_runs[0][0]
    names = dict.fromkeys(k for _, records in runs for r in records for k in r)
    beside = ("_correlation", "/abstained", "/timeout", "/error", "/zero_std", "reward/total")
    rewards = [n for n in names if n.startswith("reward/") and not n.endswith(beside)]
    panels = [(n, f"sampled reward: {n.removeprefix('reward/')}") for n in rewards]
    panels += [("rollout/response_tokens", "response tokens")]
    counts = ("/response_tokens", "/num_truncated")
    evals = [n for n in names if n.startswith("eval/") and n.count("/") == 3 and not n.endswith(counts)]
    panels += [(n, "held-out " + n.removeprefix("eval/").replace("/", ": ")) for n in evals]
    panels += [("rollout/logprob_diff", "trainer against engine: mean |log-prob gap|")]
    columns = min(4, len(panels)) if len(panels) != 6 else 3
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 2.9 * rows), squeeze=False)
    for ax, (name, title) in zip(axes.flat, panels):
        recorded = [v for _, records in runs for v in curves(records, name)[1]]
        unit = name.startswith(("reward/", "eval/")) and all(0 <= v <= 1 for v in recorded)
        panel(ax, runs, name, title, unit)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    title = f"{config['algorithm']} on {config['dataset']}" if len(runs) == 1 else f"{config['dataset']}, by {args.by}"
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    out = Path(args.out) if args.out else folders[0] / "curves.png"
    figure.savefig(out, dpi=130)
    print(out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
