"""Train for many steps and watch the memory of the ranks: it must not grow.

    python scripts/soak.py --config scripts/quickstart.yaml --steps 200 --prompts-per-step 2 --samples-per-prompt 2
    python scripts/soak.py --ranks 2 --max-growth 0.05 ...

The flags are train.py's; the run itself is train.py, under torchrun where --ranks is over 1. Prints the largest resident memory
of a rank at the end of every step (perf/memory_gib), and at the steps 10, 100, 200, ... in one line. Exit code 1 where the mean
of the last fifth of the steps is over that of the second fifth by more than --max-growth, a share (the first fifth warms up).
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Train, then judge; the exit code."""
    parser = argparse.ArgumentParser("soak.py", epilog="and the flags of train.py", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=1, help="processes")
    parser.add_argument("--max-growth", type=float, default=0.05, help="share by which the memory may grow; default 0.05")
    default = ROOT / "runs" / f"soak-{time.strftime('%Y%m%d-%H%M%S')}"
    parser.add_argument("--run-dir", type=Path, default=default, help="new folder")
    known, flags = parser.parse_known_args(argv)
    if any(flag.startswith("--resume") for flag in flags):
        parser.error("--resume: a soak is a run of its own")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={known.ranks}"] if known.ranks > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "train.py"), *flags, "--run-dir", str(known.run_dir)]
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):  # the run saves and ends; then this does
        signal.signal(number, lambda n, _: child.send_signal(n))
    code = child.wait()
    if code:
        return code if code > 0 else 128 - code
    records = [json.loads(line) for line in (known.run_dir / "metrics.jsonl").read_text().splitlines()]
    memory = {r["step"]: r["perf/memory_gib"] for r in records if "perf/memory_gib" in r}
    print("\n".join(f"step {step}: {gib:.3f} GiB" for step, gib in memory.items()))
    values, fifth = list(memory.values()), max(len(memory) // 5, 1)
    early, late = values[fifth : 2 * fifth] or values[:1], values[-fifth:]
    growth = statistics.mean(late) / statistics.mean(early) - 1
    shown = ", ".join(f"step {s}: {g:.3f}" for s, g in memory.items() if s in (1, 10) or s % 100 == 0)
    print(f"memory of a rank, GiB: {shown}; last fifth against second fifth: {growth:+.2%}")
    if growth > known.max_growth:
        print(f"the memory has grown by more than --max-growth {known.max_growth:g}", file=sys.stderr)
    return int(growth > known.max_growth)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
