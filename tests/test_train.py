"""train.py: configuration, and whole runs on real processes with the reference engine."""

import dataclasses
import json
import re
import time

import pytest
import torch
import yaml
from conftest import ROOT, launch, make_samples

import dist_utils as du
import rollout as ro
import train

README = (ROOT / "README.md").read_text()

# ---------------------------------------------------------------------------------------------- configuration


def parse(*argv):
    return train.parse([str(a) for a in argv])


def refused(capsys, *argv):
    """What a wrong configuration prints; it must exit with code 2."""
    with pytest.raises(SystemExit) as e:
        parse(*argv)
    assert e.value.code == 2
    return capsys.readouterr().err


def test_file_is_parsed_like_the_command_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "lr: 1e-6\nsteps: 7\nrewards: [format]\nreward_weights: {format: 0.5}\nexport: false\nclip-high: null\n"
        "dataset_params: {min_terms: 2}\nactivation_checkpointing: true\nprompt_template: 'a: {b}'\n"
    )
    cfg = parse("--config", path, "--steps", "8")
    assert (cfg.lr, cfg.steps, cfg.rewards, cfg.weights) == (1e-6, 8, ("format",), [0.5])
    assert (cfg.export, cfg.clip_high, cfg.activation_checkpointing) == (False, None, True)
    assert yaml.safe_load(cfg.dataset_params) == {"min_terms": 2} and cfg.prompt_template == "a: {b}"
    path.write_text("algorithm: grpo\nnormalize_advantages: true\n")
    assert parse(f"--config={path}").normalize_advantages
    assert not parse("--config", path, "--no-normalize-advantages", "--algorithm", "gdpo").normalize_advantages


@pytest.mark.parametrize(
    "text, says",
    [
        ("learning_rat: 1\nstep: 3\nlr: 1e-5\n", ["learning_rat: unknown", "step: unknown, did you mean steps?"]),
        ("lr: 1\nlr: 2\n", ["given twice: lr"]),
        ("- lr\n", ["expected a mapping", "list"]),
        ("", ["expected a mapping", "NoneType"]),
        ("lr: [1, 2]\n", ["lr: [1, 2] is a list, not a single value"]),
        ("optim: {lr: 1}\n", ["optim: unknown"]),
        ("export: maybe\n", ["export: 'maybe' is not true or false"]),
        ("rewards: format\n", ["rewards: 'format' is not a list"]),
        ("lr: abc\n", ["--lr"]),
        ("a: [\n", ["--config"]),
    ],
)
def test_wrong_files_end_in_one_message(tmp_path, capsys, text, says):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    err = refused(capsys, "--config", path)
    assert all(s in err for s in says), err
    assert "Traceback" not in err


def test_files_that_are_none(tmp_path, capsys):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none.yaml", tmp_path / "b.yaml"):
        assert f"--config {path}" in refused(capsys, "--config", path)


@pytest.mark.parametrize(
    "argv, says",
    [
        (("--temperature", "0"), "--temperature 0.0: must be a positive, finite number; greedy"),
        (("--lr", "nan"), "--lr nan: must be a positive"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--samples-per-prompt", "1"), "min_group_size = 2 of gdpo"),
        (("--normalize-advantages",), "forbids_normalize_advantages of gdpo"),
        (("--algorithm", "grop"), "--algorithm grop: unknown; there are grpo, gdpo"),
        (("--rewards", "corectness"), "did you mean correctness"),
        (("--reward-weights", "format=0", "correctness=0"), "all weights are zero"),
        (("--prompts-per-step", "9", "--optimizer-steps-per-rollout", "2"), "not divisible"),
        (("--aggregation", "mean"), "there are token_mean, sequence_mean, sequence_sum_norm"),
        (("--run-dir", str(ROOT)), "is not empty"),
        (("--run-dir", str(ROOT / "README.md")), "is a file"),
        (("--few-shot", "none.json"), "--few-shot none.json (seen from"),
        (("--dataset-params", "[1]"), "--dataset-params [1]: expected a mapping"),
        (("--seed", "4294967296"), "must be below"),
        (("--eval-every", "1", "--eval-modes"), "each once"),
        (("--warmup-steps", "5", "--steps", "5"), "has 5 optimizer steps"),
        (("--lrr", "1"), "--lr"),
    ],
)
def test_wrong_command_lines(capsys, argv, says):
    assert says in refused(capsys, *argv)


def test_all_problems_in_one_message(capsys):
    err = refused(capsys, "--samples-per-prompt", "1", "--normalize-advantages", "--lr", "-1", "--rewards", "x")
    assert err.count("\n  - ") == 4


def test_lists_equal_the_readme(capsys):
    for flag in ("--list-algorithms", "--list-metrics"):
        train.main([flag])
        assert capsys.readouterr().out.strip() in README, f"the README's table is not the output of {flag}"


def test_configuration_table_names_every_field():
    section = README.split("## Configuration")[1].split("\n## ")[0]
    named = set(re.findall(r"`--([a-z0-9-]+)`", section))
    assert named == {f.name.replace("_", "-") for f in dataclasses.fields(train.Config)}


def test_trained_tokens_come_from_lengths_and_leave_out_what_nobody_scored():
    samples = make_samples([3], longest=4)
    scored = torch.tensor([[True, False], [False, False], [True, True]])
    mask = ro.trained_tokens(samples, scored, 6)
    assert mask.sum(1).tolist() == [len(samples[0].response_ids), 0, len(samples[2].response_ids)] and mask.shape == (3, 6)
    assert mask[0, 0] and not mask[0, 5]


# ---------------------------------------------------------------------------------------------- runs

BASE = ["--engine", "hf", "--dtype", "float32", "--rewards", "length", "vowels", "--max-prompt-tokens", "128"]
BASE += ["--max-response-tokens", "10", "--prompts-per-step", "6", "--samples-per-prompt", "3", "--lr", "1e-3"]
BASE += ["--dataset-params", "{size: 40}"]


def run(world, tmp_path, tiny, *argv, options=None, timeout=120):
    run_dir = tmp_path / f"run{world}"
    arguments = [json.dumps(options or {}), "--model", tiny, "--run-dir", run_dir, *BASE, *argv]
    result = launch(world, "train_worker.py", *arguments, timeout=timeout)
    return result, run_dir


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["gdpo", "grpo"])
def test_two_ranks_and_no_torchrun_give_one_run(tmp_path, tiny, algorithm):
    """4 updates a rollout, uneven micro-batches, an evaluation: the same numbers on 2 ranks and by plain python."""
    argv = ["--algorithm", algorithm, "--steps", "2", "--optimizer-steps-per-rollout", "2", "--epochs-per-rollout", "2"]
    argv += ["--eval-every", "1", "--eval-modes", "greedy", "sampled", "--eval-prompts", "7", "--micro-batch-tokens", "60"]
    found = {}
    for world in (0, 2):
        result, run_dir = run(world, tmp_path, tiny, *argv)
        assert result.returncode == 0, result.stderr[-3000:]
        found[world] = metrics_of(run_dir)
    assert len(found[0]) == 3
    for one, two in zip(found[0], found[2]):
        assert one.keys() == two.keys()
        for name in one:
            if not name.startswith("perf/"):
                assert one[name] == pytest.approx(two[name], rel=2e-3, abs=2e-5), name
    last = found[0][-1]
    assert last["optim/grad_norm"] > 0 and last["policy/ratio"] != 1.0 and last["advantage/abs"] > 0
    assert last["rollout/logprob_diff"] < 1e-3
    seconds = [last[f"perf/seconds_{p}"] for p in du.PHASES]
    assert sum(seconds) == pytest.approx(last["perf/seconds_step"], rel=1e-6)


def test_run_folder_describes_the_run_and_exports_the_policy(tmp_path, tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    probe = tmp_path / "probe.pt"
    argv = ["--steps", "2", "--wandb-mode", "offline", "--eval-every", "2", "--eval-prompts", "5", "--activation-checkpointing"]
    result, run_dir = run(2, tmp_path, tiny, *argv, options={"probe": str(probe)})
    assert result.returncode == 0, result.stderr[-3000:]
    names = {p.name for p in run_dir.iterdir()}
    assert names >= {
        "config.yaml",
        "command.txt",
        "git_revision.txt",
        "git.diff",
        "packages.txt",
        "metrics.jsonl",
        "curves.png",
    }
    assert names >= {"samples", "eval", "model", "wandb"}
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["lr"] == 1e-3
    assert parse("--config", run_dir / "config.yaml", "--run-dir", tmp_path / "again", "--rewards", "format").lr == 1e-3
    assert "torch==" in (run_dir / "packages.txt").read_text()
    for step in (1, 2):
        samples = [json.loads(line) for line in (run_dir / "samples" / f"step_00000{step}.jsonl").read_text().splitlines()]
        assert [s["group"] for s in samples] == [g for g in range(6) for _ in range(3)]
    answered = [json.loads(line)["question"] for line in (run_dir / "eval" / "greedy_000002.jsonl").read_text().splitlines()]
    held_out = ro.load_data(
        parse(*BASE[7:], "--eval-every", 2, "--eval-prompts", 5, "--model", tiny, "--rewards", "format"), tiny
    )[3]
    assert answered == [row["question"] for row in held_out.rows]  # each once, whatever the world size
    # one update a rollout: nothing was updated since sampling, so the ratio is exactly 1
    assert all(m["policy/ratio"] == 1.0 for m in metrics_of(run_dir) if "policy/ratio" in m)
    # the export has the trainer's log-probs, and is an ordinary folder
    from train_worker import PROBE

    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype="auto")
    assert model.config.architectures == ["LlamaForCausalLM"] and model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(run_dir / "model").chat_template
    logits = model(torch.tensor([PROBE.prompt_ids + PROBE.response_ids])).logits[0, len(PROBE.prompt_ids) - 1 : -1]
    got = torch.log_softmax(logits, -1).gather(1, torch.tensor(PROBE.response_ids)[:, None])[:, 0]
    torch.testing.assert_close(got, torch.load(probe, weights_only=True), atol=1e-4, rtol=1e-4)
    before = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert any((a != b).any() for a, b in zip(model.parameters(), before.parameters()))


def test_later_optimizer_batches_compare_with_the_policy_that_sampled(tmp_path, tiny):
    """Two batches, one epoch: the second sees a ratio other than 1, as the first has moved the weights; norms are clipped."""
    argv = [
        "--steps",
        "2",
        "--optimizer-steps-per-rollout",
        "2",
        "--lr",
        "0.01",
        "--warmup-steps",
        "3",
        "--lr-schedule",
        "linear",
    ]
    result, run_dir = run(0, tmp_path, tiny, *argv, "--max-grad-norm", "0.1", "--no-export")
    assert result.returncode == 0, result.stderr[-3000:]
    for metrics in metrics_of(run_dir):
        assert abs(metrics["policy/ratio"] - 1) > 1e-3 and metrics["optim/grad_norm"] > 0.1
    assert [m["optim/lr"] for m in metrics_of(run_dir)] == pytest.approx([0.005, 0.01])


def test_a_push_that_does_nothing_stops_the_run(tmp_path, tiny):
    result, _ = run(2, tmp_path, tiny, "--steps", "30", "--lr", "0.05", options={"skip_push": True})
    assert result.returncode != 0 and "over --max-logprob-diff 0.2" in result.stderr


@pytest.mark.parametrize(
    "phase, module, function, rank",
    [
        ("loading the data failed on rank 1", "ro", "load_data", 1),
        ("sampling failed on rank 1", "ro", "sample_groups", 1),
        ("grading failed on rank 0", "rw", "score", 0),
        ("forming batches failed on rank 1", "losses", "form_batches", 1),
        (None, "losses", "token_logprobs", 1),
        (None, "engine", "load_weights", 1),
        ("logging failed on rank 0", "log", "step", 0),
    ],
)
def test_a_failure_on_one_rank_ends_all(tmp_path, tiny, phase, module, function, rank):
    options = {"fail": [module, function, rank]}
    began = time.monotonic()
    result, run_dir = run(2, tmp_path, tiny, "--steps", "2", options=options, timeout=60)
    assert result.returncode != 0 and f"ValueError: injected into {function}" in result.stderr
    assert result.stderr.count("Traceback (most recent call last):\n  File") <= 2 or phase is None
    if phase:
        assert f"[rank 0] {phase}" in result.stderr and f"[rank 1] {phase}" in result.stderr
    assert not (run_dir / "model").exists()
    assert time.monotonic() - began < 60
