"""The README's commands, with the real engine and the real model, cut to a few steps."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, launch

import train

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def test_quickstart_shows_progress_learns_a_policy_and_says_where_everything_is(quickstart):
    result, run_dir = quickstart
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()
    assert [line.split(" |")[0] for line in lines if line.startswith("step ")] == ["step 0/2", "step 1/2", "step 2/2"]
    for mode in ("greedy", "sampled"):
        for reward in ("correctness", "format"):
            (line,) = [x for x in lines if x.startswith(f"eval/chain_sum/{mode}/{reward}: ")]
            assert re.fullmatch(r".*: [\d.]+ before, [\d.]+ after 2 steps", line)
    assert f"run folder: {run_dir}" in lines and f"curves: {run_dir / 'curves.png'}" in lines
    assert (run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG" and (run_dir / "model" / "config.json").exists()
    assert "100%" in result.stderr  # the bar


def test_quickstart_pushes_what_it_trains(quickstart):
    """Trainer and engine agree at step 2, after a push, as closely as at step 1, before any."""
    _, run_dir = quickstart
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    assert all(0 < s["rollout/logprob_diff"] < 0.06 and s["optim/grad_norm"] > 0 for s in steps)
    assert all(s["perf/tokens_sampled"] > 64 for s in steps)


@pytest.mark.skipif(not GSM8K.exists(), reason="the shared GSM8K files are not here")
def test_gsm8k_on_two_ranks(tmp_path):
    """The file as it is, on the first rows of the data and with short answers."""
    for split in ("train", "test"):
        first = (GSM8K / f"{split}.jsonl").read_text().splitlines(keepends=True)[:200]
        (tmp_path / f"{split}.jsonl").write_text("".join(first))
    argv = ["--config", "scripts/gsm8k.yaml", "--dataset", tmp_path, "--eval-every", "1", "--eval-prompts", "3", "--steps", "1"]
    argv += ["--no-export"]
    argv += [
        "--prompts-per-step",
        "3",
        "--samples-per-prompt",
        "3",
        "--max-response-tokens",
        "32",
        "--run-dir",
        tmp_path / "run",
    ]
    result = launch(2, "train.py", *argv, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    assert re.search(r"training prompts: (200|1\d\d)\b", result.stdout)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/logprob_diff"] < 0.1 and f"eval/{tmp_path.name}/greedy/correctness" in last
    assert len((tmp_path / "run" / "eval" / tmp_path.name / "greedy_000001.jsonl").read_text().splitlines()) == 3


def test_an_exported_model_is_evaluated(quickstart, tmp_path):
    """The export of a run, by the run's folder and settings: greedy it answers as at the run's end; sampled, pass@k."""
    _, run_dir = quickstart
    argv = ["--model", run_dir, "--config", run_dir / "config.yaml", "--eval-samples", "3"]
    result = launch(0, "scripts/evaluate.py", *argv, "--run-dir", tmp_path / "out", timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    now, then = (d / "eval" / "chain_sum" for d in (tmp_path / "out", run_dir))
    assert (now / "greedy_000000.jsonl").read_text() == (then / "greedy_000002.jsonl").read_text()
    assert train.model_folder(train.Config(model=str(run_dir))) == str(run_dir / "model")
    chances = [results[f"eval/chain_sum/sampled/format/pass@{k}"] for k in (1, 2, 3)]
    assert chances == sorted(chances) and f"eval/chain_sum/sampled/format/pass@3: {chances[2]:.4f}" in result.stdout
    for mode, count in (("greedy", 6), ("sampled", 18)):
        lines = (tmp_path / "out" / "eval" / "chain_sum" / f"{mode}_000000.jsonl").read_text().splitlines()
        assert len(lines) == count and {"question", "response", "correctness", "format"} <= json.loads(lines[0]).keys()
    assert (tmp_path / "out" / "config.yaml").exists()


def test_plot_of_several_runs(quickstart, tmp_path):
    _, run_dir = quickstart
    command = [sys.executable, "scripts/plot.py", run_dir, run_dir, "--by", "algorithm", "--out", tmp_path / "a.png"]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    wrong = subprocess.run([sys.executable, "scripts/plot.py", tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert wrong.returncode != 0 and "is no run folder" in wrong.stderr


def run_script(*command: object) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT, env=env, timeout=200)


def test_the_commands_of_surviving_runs(tiny, tmp_path):
    """soak.py trains; the first step of its run is replayed, a checkpoint exported; each by its command line."""
    argv = (
        "--config scripts/quickstart.yaml --prompts-per-step 2 --samples-per-prompt 2 --steps 2 --save-every 1 --max-growth 9 "
    )
    argv += "--engine hf --dtype float32 --max-response-tokens 4 --eval-every 0 --no-export --rewards length repetition"
    soak = run_script("scripts/soak.py", *argv.split(), "--model", tiny, "--run-dir", tmp_path / "run")
    assert soak.returncode == 0, soak.stderr[-3000:]
    said = (
        r"step 1: [\d.]+ GiB\nstep 2: [\d.]+ GiB\nmemory of a rank, GiB: step 1: [\d.]+; last fifth against second fifth: [+-]"
    )
    assert re.search(said, soak.stdout)
    replayed = run_script("scripts/replay.py", tmp_path / "run", "--step", "1", "--algorithm", "cispo")
    assert replayed.returncode == 0 and "step 1 again, on the weights of step 0\n" in replayed.stdout, replayed.stderr[-3000:]
    assert re.search(r"optim/grad_norm +[\d.e-]+ +[\d.e-]+", replayed.stdout)
    out = tmp_path / "models" / "a"
    exported = run_script("scripts/export.py", tmp_path / "run", "--step", "2", "--out", out)
    assert exported.returncode == 0 and f"the policy after step 2: {out}" in exported.stdout, exported.stderr[-3000:]
    assert (out / "config.json").exists()


def test_every_command_of_the_readme_is_run_here_or_by_the_checks():
    text = (ROOT / "README.md").read_text()
    commands = [
        c.split(" #")[0].strip() for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for c in block.splitlines()
    ]
    assert commands == [
        "bash scripts/quickstart.sh",  # its set-up by test.sh, its run by the fixture `quickstart`
        "bash scripts/test.sh",  # this
        "python train.py --config scripts/quickstart.yaml",  # `quickstart`
        "torchrun --nproc-per-node 2 train.py --config scripts/gsm8k.yaml --steps 10",  # test_gsm8k_on_two_ranks
        # test_an_exported_model_is_evaluated
        "python scripts/evaluate.py --model runs/a --config scripts/quickstart.yaml --eval-samples 8",
        "python scripts/plot.py runs/a runs/b runs/c --by algorithm --out compare.png",  # test_plot_of_several_runs
        # test_survival: test_a_run_that_goes_on_is_the_run_that_never_stopped
        "python train.py --resume runs/a",
        # test_survival: test_torchrun_restarts_a_run_that_goes_on_and_sigterm_ends_it
        "torchrun --nproc-per-node 2 --max-restarts 3 train.py --config scripts/gsm8k.yaml",
        "python scripts/replay.py runs/a --step 1",  # test_the_commands_of_surviving_runs, as the next three
        "python scripts/replay.py runs/a --step 1 --algorithm cispo",
        "python scripts/export.py runs/a --step 50 --out models/a-50",
        "python scripts/soak.py --config scripts/quickstart.yaml --steps 200 --prompts-per-step 2 --samples-per-prompt 2",
    ]
