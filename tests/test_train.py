"""train.py: configuration, and whole runs on real processes with the reference engine."""

import dataclasses
import itertools
import json
import math
import re
import runpy
import time
from types import SimpleNamespace

import pytest
import torch
import train_worker
import yaml
from conftest import ROOT, launch, make_samples

import advantages as adv
import dist_utils as du
import losses
import rewards as rw
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
        "lr: 1e-6\nsteps: 7\nrewards: [format]\nreward_weights: {format: 0.5}\nexport: false\nclip-high: null\nkl_place: null\n"
        "dataset_params: {min_terms: 2}\nactivation_checkpointing: true\nprompt_template: 'a: {b}'\n"
    )
    cfg = parse("--config", path, "--steps", "8")
    assert (cfg.lr, cfg.steps, cfg.rewards, cfg.weights) == (1e-6, 8, ("format",), [0.5])
    assert (cfg.export, cfg.clip_high, cfg.activation_checkpointing) == (False, None, True)
    assert yaml.safe_load(cfg.dataset_params) == {"min_terms": 2} and cfg.prompt_template == "a: {b}"
    path.write_text("algorithm: grpo\nnormalize_advantages: true\n")
    assert parse(f"--config={path}").normalize_advantages
    for text, lr, steps in (("steps: 010\nlr: 1_0.5e-3", 1.05e-2, 10), ("\ufefflr: +1E-05\r\n", 1e-5, 100)):
        path.write_text(text, encoding="utf-8")  # numbers are read as on the command line, not as octal
        assert (parse("--config", path).lr, parse("--config", path).steps) == (lr, steps)
    assert not parse("--config", path, "--no-normalize-advantages", "--algorithm", "gdpo").normalize_advantages


@pytest.mark.parametrize(
    "text, says",
    [
        ("learning_rat: 1\nstep: 3\nlr: 1e-5\n", ["learning_rat: unknown", "step: unknown, did you mean steps?"]),
        ("lr: 1\nlr: 2\n", ["given twice: lr"]),
        ("- lr\n", ["expected a mapping", "list"]),
        ("", ["expected a mapping", "found nothing"]),
        ("lr: [1, 2]\n", ["lr: [1, 2] is a list, not a single value"]),
        ("optim: {lr: 1}\n", ["optim: unknown"]),
        ("export: maybe\n", ["export: 'maybe' is not true or false"]),
        ("rewards: format\n", ["rewards: 'format' is not a list"]),
        ("lr: abc\n", ["--lr"]),
        ("a: [\n", ["--config"]),
        ("kl_coef: 0.1\nkl-coef: 0.2\n", ["kl-coef: given twice"]),
        ("shadow: ['--steps=1']\n", ["shadow: ['--steps=1'] is not a list of values"]),
        ("shadow: null\n", ["shadow: None is not a list of values"]),
        ("model: null\n", ["model: null, but it needs a value"]),
        ("steps: 1:30\n", ["--steps", "'1:30'"]),  # ninety, in YAML 1.1
        ("steps: 0x10\n", ["--steps", "'0x10'"]),
        ("steps: 1.5\n", ["--steps", "'1.5'"]),
        ("lr: 2001-01-01\n", ["--lr", "2001-01-01"]),
        ("lr: .nan\n", ["--lr nan: must be a positive, finite number"]),
        ("lr: 1e400\n", ["--lr inf: must be"]),
        ("model: no\n", ["model: false is no value of this setting; put a text in quotes"]),
        ("lr: true\n", ["lr: true is no value of this setting"]),
        ("[1, 2]: 3\n", ["--config", "unhashable key"]),
        ("lr: !!python/object/apply:os.system ['exit']\n", ["--config", "could not determine a constructor"]),
        ("lr: 1\n---\nlr: 2\n", ["--config", "another document"]),
        ("a: " + "[" * 5000, ["--config", "recursion"]),
        ("#" * 2**20 + "\n", ["--config", "is over 1048576 bytes"]),
        ("dataset_params: &a {b: *a}\n", ["line 1: aliases (*name) are not read"]),
        ("dataset_params: {min_trems: 2}\n", ["--dataset-params: rg:chain_sum has no min_trems; it has min_terms, max_terms"]),
        ("dataset_params: [1]\n", ["dataset_params: [1] is a list"]),
        ("reward_weights: {format: {a: 1}}\n", ["is not a number"]),
        ("resume: x\n", ["resume: is given on the command line, not in a file"]),
        ("config: x\n", ["config: is given on the command line"]),
        ("model: ''\n", ["--model '': is empty"]),
        ('model: "a\\0b"\n', ["--model 'a\\x00b': holds characters that cannot be shown"]),
        ('eval_datasets: ["\\e[2J"]\n', ["--eval-datasets '\\x1b[2J': holds characters"]),
        ('system_prompt: "\\ud800"\n', ["--system-prompt '\\ud800': holds a NUL or a part of a character"]),
        ("prompt_template: 'a {'\n", ["--prompt-template 'a {': Single '{'"]),
        ("prompt_template: 'a {}'\n", ["--prompt-template 'a {}': braces hold a column's name"]),
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
        (("--algorithm", "grop"), "--algorithm grop: unknown; there are grpo, dr_grpo"),
        (
            ("--tau-positive", "1"),
            "the loss ppo of gdpo does not read it. Drop the flag, or use --algorithm sapo",
        ),
        (("--algorithm", "sapo", "--clip-low", "0.1"), "--clip-low 0.1: the loss sapo of sapo does not read it"),
        (
            ("--gae-lambda", "0.9"),
            "--gae-lambda 0.9: the batch stage whiten_sequence of gdpo does not",
        ),
        (("--gamma", "0.9"), "or use --algorithm reinforce_plus_plus|ppo"),
        (("--dual-clip", "0.9"), "--dual-clip 0.9: must be over 1"),
        (("--kl-coef", "-1"), "--kl-coef -1.0: must be at least 0"),
        (("--kl-coef", "nan"), "--kl-coef nan: must be at least 0, and finite"),
        (("--kl-estimator", "k2"), "--kl-estimator k2: there is no KL term, as --kl-coef is 0"),
        (("--kl-coef", "0.1", "--kl-estimator", "k4"), "--kl-estimator k4: unknown; there are k1, k2, k3"),
        (("--reference-update-every", "5"), "--reference-update-every 5: there is no KL term"),
        (("--offload-reference",), "--offload-reference True: there is no KL term"),
        (("--mismatch", "mask", "--mismatch-low", "3"), "--mismatch-low 3.0: must be below --mismatch-cap 2.0"),
        (("--mismatch-low", "0.1"), "the --mismatch truncate of gdpo does not read it. Drop the flag, or use --mismatch mask"),
        (("--mismatch", "none", "--mismatch-cap", "5"), "or use --mismatch truncate|mask"),
        (("--mismatch", "none", "--mismatch-level", "sequence"), "--mismatch none does not read it"),
        (("--clip-low", "5"), "--clip-low 5.0: must be over 0 and at most 1"),
        (("--kl-coef", "1", "--reference-update-every", "1"), "the reference would always be the policy itself"),
        (("--algorithm", "grpo", "--reward-hook", "tests/hooks_that_exit.py:f"), "gave SystemExit: 0"),
        (("--algorithm", "grpo", "--push-every", "2", "--eval-every", "3"), "--eval-every 3: not a multiple of --push-every 2"),
        (("--algorithm", "ppo", "--critic-warmup-steps", "100"), "the policy would never learn"),
        (("--algorithm", "ppo", "--gae-lambda", "1.5"), "--gae-lambda 1.5: must be from 0 to 1"),
        (("--algorithm", "grpo", "--reward-hook", "hook"), "--reward-hook hook: expected path.py:function"),
        (("--algorithm", "grpo", "--reward-hook", "no.py:f"), "--reward-hook no.py:f: running no.py (seen from"),
        (("--algorithm", "grpo", "--reward-hook", "train.py:f", "--no-normalize-rewards"), "both replace the group stage"),
        (("--algorithm", "ppo", "--no-normalize-rewards"), "group_stage = none of ppo refuses it"),
        (("--shadow", "gpdo"), "--shadow gpdo: unknown"),
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
        (
            ("--rewards", "format", "overlng"),
            "did you mean overlong?); there are correctness, gsm8k, rg, math, multiple_choice",
        ),
        (("--rewards", "tests/hooks.py:best"), "tests/hooks.py has no function best; it has best_of_group"),
        (
            ("--rewards", "tests/hooks.py:three"),
            "reward three: is called with (response, row): missing a required argument: 'more'",
        ),
        (
            ("--rewards", "tests/hooks.py:needs"),
            "reward needs: keyword-only width must have a default, as it is none of answer_in, format_tags",
        ),
        (("--rewards", "tests/hooks.py:Unfit"), "reward Unfit: is called with (response, row): too many positional arguments"),
        (
            ("--algorithm", "grpo", "--reward-hook", "tests/hooks.py:three"),
            "is called with (rewards, groups): missing a required",
        ),
        (("--rewards", "reward_model"), "reward reward_model: needs --reward-model"),
        (
            ("--reward-model", "x"),
            "--reward-model x: no reward of this run reads it. Drop the flag, or add --rewards reward_model",
        ),
        (("--rewards", "format", "--answer-in", "boxed"), "or add --rewards correctness|gsm8k"),
        (("--overlong-buffer", "5"), "--overlong-buffer 5: no reward of this run reads it"),
        (("--rewards", "overlong", "--overlong-buffer", "0"), "--overlong-buffer 0: must be at least 1"),
        (("--reward-weights", "frmat=1"), "with a name out of correctness, format"),
        (("--grader-timeout", "0"), "--grader-timeout 0.0: must be over 0"),
        (("--grader-failure", "ignore"), "--grader-failure"),
        (("--max-refills", "3"), "--max-refills 3: there are no refills without --dynamic-sampling True"),
        (("--refill-exhausted", "stop"), "--refill-exhausted stop: there are no refills"),
        (("--algorithm", "ppo", "--samples-per-prompt", "1", "--dynamic-sampling", "True"), "a group of one sample never has"),
        (("--eval-samples", "4"), "--eval-samples 4: greedy responses are all alike. Add --eval-modes sampled"),
        (("--eval-datasets", "rg:chain_sum", "rg:chain_sum"), "two are called chain_sum. Name them: name=place"),
        (("--eval-datasets", "x/.y"), "'.y' is no name for its metrics. Give one: name=x/.y"),
        (("--rewards", "tests/hooks.py:Mute"), "reward Mute: is called with (response, row): its class has no __call__"),
        (
            ("--rewards", "tests/hooks.py:Wants"),
            "reward Wants: is called with (response, row): missing a required argument: 'p",
        ),
        (("--eval-samples", "4", "--eval-modes", "sampled"), "--eval-samples 4: nothing is evaluated, as --eval-every is 0"),
        (("--eval-temperature", "0.5", "--eval-every", "1"), "--eval-temperature 0.5: greedy answers have none"),
        (("--eval-rewards", "format"), "--eval-rewards format: nothing is evaluated"),
        (("--grader-timeout", "1e7"), "--grader-timeout 10000000.0: must be over 0 and at most 86400"),
        (("--grader-memory-gib", "1e12"), "must be over 0 and at most 16384"),
        (("--model", "/nope"), "--model /nope: no model there"),
        (("--model", "tests"), "--model tests: no model there"),
        (("--eval-rewards", "acuracy"), "--eval-rewards acuracy: unknown"),
    ],
)
def test_wrong_command_lines(capsys, argv, says):
    assert says in refused(capsys, *argv)


def test_only_the_final_configuration_is_checked(tmp_path, capsys):
    """A file that is legal for one algorithm, and a command line that changes it to another: the whole counts."""
    path = tmp_path / "a.yaml"
    path.write_text("algorithm: grpo\noptimizer_steps_per_rollout: 4\nnormalize_advantages: true\nclip_low: 0.1\n")
    changes = ["--algorithm", "rloo", "--optimizer-steps-per-rollout", "1", "--no-normalize-advantages", "--clip-low", "None"]
    cfg = parse("--config", path, *changes)
    assert (cfg.updates_per_rollout, train.policy_updates(cfg), train.batch_sequences(cfg)) == (1, 100, 64)
    err = refused(capsys, "--config", path, "--algorithm", "rloo")
    assert err.count("\n  - ") == 3 and "4 optimizer steps a rollout: requires_on_policy_updates of rloo refuses it" in err
    path.write_text("algorithm: rloo\nepochs_per_rollout: 2\nkl_place: reward\nsamples_per_prompt: 1\n")
    from_file = refused(capsys, "--config", path)
    argv = ["--algorithm", "rloo", "--epochs-per-rollout", "2", "--kl-place", "reward", "--samples-per-prompt", "1"]
    assert refused(capsys, *argv) == from_file and from_file.count("refuses it") == 3


def test_the_equation_is_what_the_configuration_looks_up():
    said = train.equation(parse("--reward-weights", "format=0.5"))
    assert said.startswith("gdpo: L = (1 / N) sum_i (sum_t m (c l) / T_i)") and "N = 64 sequences" in said
    assert "sum_k w_k (x_ik - mean_g(x_k)) / (std_g(x_k) + 1e-4); reward weights w: correctness 1, format 0.5" in said
    assert "c = min(q, mismatch_cap), q = exp(old_logprobs - rollout_logprobs) of a token" in said and "no KL" in said
    assert said.endswith("clip_low 0.2, clip_high 0.2, dual_clip off, mismatch_cap 2\n")
    argv = ["--algorithm", "dapo", "--kl-coef", "0.1", "--entropy-coef", "0.01", "--mismatch", "none", "--dual-clip", "3"]
    said = train.equation(parse(*argv, "--reference-update-every", "4", "--normalize-advantages"))
    assert "L = sum_it m (c l + 0.1 KL - 0.01 H) / sum_it m" in said and "c = 1\n" in said
    assert "KL = exp(-x) - 1 + x, x = logprobs - ref_logprobs in the loss alone, kl_coef 0.1; the reference takes" in said
    assert "clip_low 0.2, clip_high 0.28, dual_clip 3" in said and "then whitened over its tokens" in said
    said = train.equation(parse("--algorithm", "reinforce_plus_plus", "--mismatch", "mask", "--mismatch-level", "sequence"))
    assert "KL = old_logprobs - ref_logprobs in the reward alone, kl_coef 0.01" in said and "m (c l) /" in said
    assert "c = q where mismatch_low <= q <= mismatch_cap, else 0, q = exp(old_logprobs - rollout_logprobs) of a seq" in said
    argv = ["--algorithm", "grpo", "--kl-coef", "1", "--kl-estimator", "k1"]
    assert "warning: its expected gradient is 0" in train.equation(parse(*argv))
    said = train.equation(parse("--algorithm", "ppo"))
    assert "critic: mean over tokens of l_it = max((V_clip - R)^2" in said and "value_clip 0.2" in said
    assert "s_i = r_i - mean_g(r), r_i = sum_k w_k x_ik;" in train.equation(parse("--algorithm", "dr_grpo"))
    assert "s_i = r_i = sum_k" in train.equation(parse("--algorithm", "dr_grpo", "--no-normalize-rewards"))


def test_plan_counts_tokens_and_memory(mini):
    two = du.Ranks(0, 2, torch.device("cpu"))
    said = train.plan(parse("--algorithm", "ppo", "--kl-coef", "0.1", "--dtype", "float32"), two, str(mini))
    assert "8 x 8 = 64 responses, at most 16,384 tokens after 4,096 of prompts" in said and "2 ranks" in said
    assert "critic" in said and "reference" in said and "reference" not in train.plan(parse(), two, str(mini))


def test_registries_of_a_fork_are_checked_before_anything_else(monkeypatch, capsys):
    for name in ("GROUP_STAGES", "BATCH_STAGES", "ALGORITHMS"):
        monkeypatch.setattr(adv, name, dict(getattr(adv, name)))
    monkeypatch.setattr(losses, "POLICY_LOSSES", dict(losses.POLICY_LOSSES))
    adv.ALGORITHMS["typo"] = dataclasses.replace(adv.ALGORITHMS["grpo"], batch_stage="brodcast", kl_place="rewrd")
    adv.GROUP_STAGES["mute"] = lambda components, scored, weights, groups: None
    losses.POLICY_LOSSES["wide"] = lambda logprobs, old, advantages, mask, *, width: None
    for argv in ([], ["--list-algorithms"]):
        err = refused(capsys, *argv)
        assert "algorithm typo: batch_stage brodcast is unknown; there are broadcast, whiten_sequence" in err
        assert "algorithm typo: kl_place rewrd is unknown; there are loss, reward" in err
        assert "group_stage mute: the first line of its docstring must be its formula" in err
        assert "policy_loss wide: keyword-only width must be a field of Config and Algorithm" in err
        assert err.count("\n  - ") == 5


@pytest.mark.parametrize("shape", [lambda x: x.mean(), lambda x: x[:, :1], lambda x: x[0]])
def test_a_loss_of_another_shape_is_refused(alone, monkeypatch, shape):
    monkeypatch.setitem(losses.POLICY_LOSSES, "ppo", lambda lp, old, a, mask: (shape(lp), {}))
    x = torch.zeros(3, 4, requires_grad=True)
    mask = torch.ones(3, 4, dtype=torch.bool)
    batch = SimpleNamespace(response_mask=mask, old_logprobs=x, rollout_logprobs=x, advantages=x, ref_logprobs=None)
    with pytest.raises(ValueError, match=r"the loss ppo returned .*, not a loss for each token, \(3, 4\)"):
        train.policy_loss(train.Config(), batch, x, x, losses.Denominators(3, 12, 4), du.Meter())


def test_all_problems_in_one_message(capsys):
    err = refused(capsys, "--samples-per-prompt", "1", "--normalize-advantages", "--lr", "-1", "--rewards", "x")
    assert err.count("\n  - ") == 4
    err = refused(capsys, "--algorithm", "ppo", "--critic-warmup-steps", "100", "--run-dir", "README.md", "--seed", "-1")
    assert err.count("\n  - ") == 3


def test_lists_equal_the_readme(capsys, monkeypatch):
    monkeypatch.setattr(rw, "REWARDS", {n: r for n, r in rw.REWARDS.items() if r.function.__module__ == "rewards"})
    for flag in ("--list-algorithms", "--list-rewards", "--list-metrics"):
        train.main([flag])
        assert capsys.readouterr().out.strip() in README, f"the README's table is not the output of {flag}"


def test_configuration_table_names_every_field():
    section = README.split("## Configuration")[1].split("\n## ")[0]
    named = set(re.findall(r"`--([a-z0-9-]+)`", section))
    assert named == {f.name.replace("_", "-") for f in dataclasses.fields(train.Config)}


def test_trained_tokens_come_from_lengths_and_leave_out_what_nobody_scored():
    samples = make_samples([3], longest=4)
    scored = torch.tensor([[True, False], [False, False], [True, True]])
    mask = ro.trained_tokens(samples, scored, 6, finished_only=False)
    assert mask.sum(1).tolist() == [len(samples[0].response_ids), 0, len(samples[2].response_ids)] and mask.shape == (3, 6)
    assert mask[0, 0] and not mask[0, 5]
    samples[2] = dataclasses.replace(samples[2], finish_reason="length")
    assert ro.trained_tokens(samples, scored, 6, finished_only=True).any(1).tolist() == [True, False, False]
    assert ro.trained_tokens(samples, scored, 6, finished_only=False).equal(mask)


# ---------------------------------------------------------------------------------------------- runs

BASE = ["--engine", "hf", "--dtype", "float32", "--rewards", "letters", "vowels", "--max-prompt-tokens", "128"]
BASE += ["--max-response-tokens", "10", "--prompts-per-step", "6", "--samples-per-prompt", "3", "--lr", "1e-3"]
BASE += ["--dataset-params", "{size: 40}", "--eval-prompts", "7"]


def run(world, tmp_path, tiny, *argv, options=None, timeout=120):
    run_dir = tmp_path / f"run{world}"
    arguments = [json.dumps(options or {}), "--model", tiny, "--run-dir", run_dir, *BASE, *argv]
    result = launch(world, "train_worker.py", *arguments, timeout=timeout)
    return result, run_dir


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


MANY = ["--steps", "2", "--micro-batch-tokens", "200", "--no-export", "--kl-coef", "0.05"]
SEVERAL = ["--optimizer-steps-per-rollout", "2"]
TWICE = ["--epochs-per-rollout", "2", "--mismatch-level", "sequence"]
EVALS = ["--eval-every", "1", "--eval-modes", "greedy", "sampled", "--eval-prompts", "7"]
RUNS = {name: ["--algorithm", name, *([] if a.requires_on_policy_updates else SEVERAL)] for name, a in adv.ALGORITHMS.items()}
SETS = ["--eval-datasets", "rg:chain_sum", "more=rg:chain_sum", "--eval-temperature", "0.8", "--eval-samples", "5"]
SETS += ["--eval-rewards", "letters", "odd", "picky", "overlong", "--eval-max-response-tokens", "12"]
EVALS += SETS
RUNS["gdpo"] += [*EVALS, "--epochs-per-rollout", "2", "--micro-batch-tokens", "60", "--shadow", "grpo", "reinforce_plus_plus"]
RUNS["ppo"] += ["--shadow", "ppo", "gdpo", "--normalize-advantages"]
RUNS |= {
    "warmup": ["--algorithm", "ppo", "--critic-warmup-steps", "1", "--kl-place", "loss", "--kl-estimator", "k2"],
    "following": [
        "--algorithm",
        "grpo",
        "--steps",
        "3",
        "--reference-update-every",
        "2",
        "--offload-reference",
        "--entropy-coef",
        "0.01",
        "--truncated-responses",
        "penalise",
    ],
    "stale": ["--algorithm", "grpo", "--push-every", "2", "--mismatch", "mask", "--mismatch-level", "sequence", "--lr", "0.02"],
    "hook": ["--algorithm", "grpo", "--reward-hook", "tests/hooks.py:best_of_group", "--dual-clip", "3", *TWICE],
    "plain": ["--algorithm", "dapo", "--no-normalize-rewards", "--mismatch", "none", "--dynamic-sampling", "False"],
    "unwatched": [a for a in RUNS["gdpo"] if a not in EVALS],  # gdpo without evaluation
    "filtered": ["--algorithm", "dapo", "--rewards", "odd", "--samples-per-prompt", "2", "--optimizer-steps-per-rollout", "3"],
}


SILENT = {  # no token is trained on: nothing is scored, all are flat, or all are cut and masked
    "silent": ["--algorithm", "grpo", "--rewards", "silent", "--weight-decay", "0.1"],
    "flat": ["--algorithm", "dapo", "--rewards", "silent", "truncated", "--max-refills", "2", "--weight-decay", "0.1"],
    "cut": ["--algorithm", "gdpo", "--truncated-responses", "mask", "--optimizer-steps-per-rollout", "2"],
}
RESUMED = ["--algorithm", "ppo", "--steps", "5", "--reference-update-every", "2", "--critic-warmup-steps", "1", *SEVERAL]
RESUMED += ["--lr-schedule", "cosine", "--warmup-steps", "3"]
COMPARED = ["gdpo", "reinforce_plus_plus", "ppo", "stale", "filtered"]  # on one process too


@pytest.fixture(scope="module")
def many(tiny, alone, tmp_path_factory):
    """Every algorithm, and runs with other flags, on two ranks; some on one process: {world: {name: metrics}}."""
    folder = tmp_path_factory.mktemp("many")
    found = {"folder": folder}
    argv = [str(a) for a in ("--model", tiny, *BASE, *MANY)]
    options = json.dumps({"runs": RUNS | SILENT, "resumes": [RESUMED, [3]]})
    result = launch(2, "train_worker.py", options, "--run-dir", folder / "2", *argv, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    train_worker.many_runs(alone, folder / "1", argv, {name: RUNS[name] for name in COMPARED})
    for world, names in ((1, COMPARED), (2, [*RUNS, *SILENT])):
        found[world] = {name: metrics_of(folder / str(world) / name) for name in names}
    return found


@pytest.mark.parametrize("name", list(RUNS))
def test_every_algorithm_trains_on_two_ranks(many, name):
    """Two steps: all metrics finite, a gradient that is not zero, a ledger that adds up."""
    for metrics in many[2][name]:
        assert all(math.isfinite(value) for value in metrics.values())
    last = many[2][name][-1]
    assert last["optim/grad_norm"] > 0 and last["advantage/abs"] > 0 and last["loss/policy"] != 0
    seconds = [last[f"perf/seconds_{p}"] for p in du.PHASES]
    assert sum(seconds) == pytest.approx(last["perf/seconds_step"], rel=1e-6)


@pytest.mark.parametrize("name", COMPARED)
def test_two_ranks_and_one_process_give_one_run(many, name):
    """Several updates a rollout, uneven micro-batches, KL, critic, evaluation: the same numbers on 2 ranks and on 1."""
    for one, two in zip(many[1][name], many[2][name], strict=True):
        assert one.keys() == two.keys()
        for metric in one:
            if not metric.startswith("perf/"):
                assert one[metric] == pytest.approx(two[metric], rel=5e-3, abs=5e-5), metric


@pytest.mark.parametrize("name", list(adv.ALGORITHMS))
def test_ratio_and_reference_start_where_they_must(many, name):
    """Before the first update the reference is the policy: KL to it is exactly 0 there, and no longer after it."""
    first, last = many[2][name][-2:]
    on_policy = adv.ALGORITHMS[name].requires_on_policy_updates
    assert (first["policy/ratio"] == 1) == on_policy
    assert (first["policy/ref_kl_k3"] == 0) == on_policy and last["policy/ref_kl_k3"] > 0
    assert first["rollout/logprob_diff"] < 1e-3 and last["rollout/logprob_diff"] < 1e-3


def test_a_second_epoch_compares_with_the_policy_that_sampled(many):
    assert all(abs(metrics["policy/ratio"] - 1) > 1e-4 for metrics in many[2]["hook"])


def test_a_run_of_two_ranks_that_goes_on_is_the_run_that_never_stopped(many):
    """With a critic that has warmed up, a reference that follows, two updates a step and a schedule."""
    whole, rest = (train_worker.facts(many["folder"] / "2" / name) for name in ("straight", "from_3"))
    assert whole == rest and [r["step"] for r in whole[0]] == [1, 2, 3, 4, 5]
    names = {name for _, name in whole[3]}
    assert {"policy", "critic", "reference"} == {
        name.split(".")[0] for name in names
    } and "critic.exp_avg_sq.head.weight" in names


def test_critic_learns_and_warms_up_alone(many):
    first, last = many[2]["ppo"]
    assert first["advantage/explained_variance"] == pytest.approx(0, abs=1e-6)  # the head starts at 0
    assert last["loss/value"] < first["loss/value"] and last["advantage/explained_variance"] > 0
    assert last["optim/critic_grad_norm"] > 0 and last["optim/critic_lr"] == 1e-5
    assert (
        last["advantage/shadow_ppo_correlation"] < 1 - 1e-6 or last["advantage/shadow_ppo_sign_agreement"] < 1
    )  # not whitened
    warm, then = many[2]["warmup"]
    assert "optim/grad_norm" not in warm and "loss/policy" not in warm and warm["loss/value"] > 0
    assert 0 < warm["rollout/logprob_diff"] < 1e-3  # the gate stands there too
    assert then["policy/ref_kl_k3"] == 0 and then["optim/grad_norm"] > 0  # the policy had not moved


def test_reference_follows_and_the_engine_may_be_stale(many):
    assert [m["policy/ref_kl_k3"] > 0 for m in many[2]["following"]] == [False, True, False]  # exactly 0 after the second step
    fresh, stale = many[2]["stale"]
    assert fresh["rollout/logprob_diff"] < 1e-3 < 0.2 < stale["rollout/logprob_diff"]  # over the limit, on purpose
    assert stale["policy/ratio"] == 1 and stale["policy/mismatch_weight"] < 1 and stale["policy/mismatch_outside"] > 0


@pytest.mark.parametrize("name, batches", [("silent", 1), ("flat", 1), ("cut", 2)])
def test_a_batch_without_a_token_is_counted_and_changes_nothing(many, name, batches):
    for metrics in many[2][name]:
        assert metrics["loss/empty_batches"] == batches and metrics["rollout/truncated"] > 0
        assert "optim/grad_norm" not in metrics and "rollout/logprob_diff" not in metrics
        assert metrics["rollout/response_tokens"] > 0
        if name == "silent":
            assert metrics["reward/silent/abstained"] == 18 and metrics["rollout/groups_without_signal"] == 1
            assert "reward/silent/zero_std" not in metrics and metrics["rollout/refills"] == 0
            assert {s["silent"] for s in samples_of(many, 2, name, 1)} == {None}  # and not 0


def samples_of(many, world, name, step):
    lines = (many["folder"] / str(world) / name / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_groups_without_signal_are_replaced_and_counted(many):
    """Two samples a prompt, reward 0 or 1: about half of the groups are flat. Every place is filled by one that is not."""
    position = 0
    for step, metrics in enumerate(many[2]["filtered"], 1):
        groups = {}
        for sample in samples_of(many, 2, "filtered", step):
            groups.setdefault(sample["group"], []).append(sample)
        assert list(groups) == list(range(len(groups))) and all(len(g) == 2 for g in groups.values())
        dropped = {}
        for group in groups.values():
            values = {s["odd"] for s in group}
            want = f"zero_std_{values.pop():.1f}" if len(values) == 1 else None
            assert {s.get("dropped") for s in group} == {want}
            if want:
                dropped[want] = dropped.get(want, 0) + 1
        assert len(groups) - sum(dropped.values()) == 6 and sum(dropped.values()) > 0
        assert {n.removeprefix("rollout/dropped/"): v for n, v in metrics.items() if "/dropped/" in n} == dropped
        every = [s for g in groups.values() for s in g]
        assert metrics["rollout/prompts_sampled"] == len(groups) and metrics["rollout/refills"] > 0
        assert metrics["rollout/prompts_missing"] == 0 and metrics["loss/empty_batches"] == 0
        assert metrics["perf/tokens_sampled"] == sum(s["response_tokens"] for s in every)
        assert metrics["rollout/tokens_dropped"] == sum(s["response_tokens"] for s in every if "dropped" in s)
        assert metrics["reward/odd"] == pytest.approx(sum(s["odd"] for s in every) / len(every))  # of all that was sampled
        assert metrics["rollout/groups_without_signal"] == sum(dropped.values()) / len(groups)
        assert metrics["advantage/abs"] == pytest.approx(2**-0.5, rel=1e-4)  # of those trained on: each 1 and 0
        position += len(groups)
        assert metrics["rollout/epoch"] == position / 40
    one, two = ([samples_of(many, world, "filtered", step) for step in (1, 2)] for world in (1, 2))
    assert one == two


def test_refills_have_a_limit(many, tiny, tmp_path, alone):
    for step, metrics in enumerate(many[2]["flat"], 1):
        assert metrics["rollout/refills"] == 2 and metrics["rollout/prompts_sampled"] == 18
        assert metrics["rollout/prompts_missing"] == 6 and metrics["rollout/dropped/zero_std_-1.0"] == 18
        assert {s["dropped"] for s in samples_of(many, 2, "flat", step)} == {"zero_std_-1.0"}
    argv = ["--model", tiny, *BASE, *RUNS["dapo"], "--rewards", "truncated", "--max-refills", "1", "--steps", "1"]
    argv += ["--refill-exhausted", "stop"]
    with pytest.raises(RuntimeError, match=r"6 of 6 places have no group with signal after 12 prompts .--max-refills 1."):
        train.train(parse(*argv, "--run-dir", tmp_path / "run"), alone)
    lines = (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert len(lines) == 36 and all(json.loads(line)["dropped"] == "zero_std_-1.0" for line in lines)


def test_evaluation_changes_nothing_in_training(many):
    """Two data sets, two modes, five samples: every number and response of training is bit-equal without them."""
    for step, (with_it, without) in enumerate(zip(many[2]["gdpo"][1:], many[2]["unwatched"], strict=True), 1):
        trained = {n: v for n, v in with_it.items() if not n.startswith(("eval/", "perf/"))}
        assert trained == {n: v for n, v in without.items() if not n.startswith("perf/")}
        assert samples_of(many, 2, "gdpo", step) == samples_of(many, 2, "unwatched", step)


def test_held_out_figures_are_those_of_the_responses(many):
    """pass@k over all draws of k of the five samples; means; every prompt once, at its own temperature and length."""
    for step, metrics in enumerate(many[2]["gdpo"]):
        for label, mode in itertools.product(("chain_sum", "more"), ("greedy", "sampled")):
            path = many["folder"] / "2" / "gdpo" / "eval" / label / f"{mode}_{step:06d}.jsonl"
            samples, before = [json.loads(line) for line in path.read_text().splitlines()], f"eval/{label}/{mode}/"
            groups = [[s for s in samples if s["group"] == g] for g in range(7)]
            count = 1 if mode == "greedy" else 5
            assert all(len(g) == count for g in groups) and len({s["question"] for s in samples}) == 7
            assert max(s["response_tokens"] for s in samples) == 12 and "vowels" not in samples[0]
            assert metrics[before + "odd"] == pytest.approx(sum(s["odd"] for s in samples) / len(samples))
            assert metrics[before + "num_truncated"] == sum(s["finish_reason"] == "length" for s in samples)
            assert metrics[before + "picky/abstained"] == sum(s["picky"] is None for s in samples)
            for reward, k in itertools.product(("odd", "picky", "letters"), (1, 2, 4, 5)):  # over prompts with k scored samples
                scored = [[s[reward] for s in g if s[reward] is not None] for g in groups]
                draws = [[any(v >= 1 for v in d) for d in itertools.combinations(g, k)] for g in scored if len(g) >= k]
                assert (f"{before}{reward}/pass@{k}" in metrics) == bool(draws)
                if draws:
                    chances = [sum(d) / len(d) for d in draws]
                    assert metrics[f"{before}{reward}/pass@{k}"] == pytest.approx(sum(chances) / len(chances))
        assert "eval/more/sampled/odd/pass@3" not in metrics and "eval/more/sampled/overlong/pass@1" not in metrics
        assert all(-2 < s["overlong"] <= 0 for s in samples)  # of its own limit of 12 tokens


def test_truncated_responses_are_penalised_by_a_reward_of_their_own(many):
    for metrics in many[2]["following"]:
        assert metrics["rollout/truncated"] == 18 and metrics["reward/truncated"] == -1
    assert parse("--truncated-responses", "penalise", "--reward-weights", "truncated=0.5").weights == [1, 1, 0.5]


def test_hooks_and_raw_rewards_are_used(many):
    for metrics in many[2]["hook"]:
        assert metrics["advantage/max"] == 1 and metrics["advantage/distinct_per_group"] <= 2
    for step, metrics in enumerate(many[2]["plain"], 1):
        samples = samples_of(many, 2, "plain", step)
        assert [s["score"] for s in samples] == pytest.approx([s["letters"] + s["vowels"] for s in samples])
        assert metrics["policy/mismatch_weight"] == 1


def test_the_parity_gate_sees_every_batch(alone):
    """Engine log-probs that are wrong, or not finite, in the second optimizer batch only."""

    def batch(engine):
        mask = torch.ones(1, 4, dtype=torch.bool)
        return SimpleNamespace(old_logprobs=-torch.ones(1, 4), rollout_logprobs=torch.tensor([engine]), response_mask=mask)

    def gate(*engines, fresh=True):
        meter = du.Meter()
        train.check_mismatch(train.Config(), [([batch(e)], None) for e in engines], fresh, meter)
        return meter.reduce()

    right, nan = [-1.0] * 4, math.nan
    some = gate(right, [-1.0, nan, -1.0, -1.1])
    assert some["rollout/nonfinite_logprobs"] == 1 / 8 and some["rollout/logprob_diff_max"] == pytest.approx(0.1)
    assert gate(right, [-5.0] * 4, fresh=False)["rollout/logprob_diff"] == 2
    for engines, fresh in (((right, [-5.0] * 4), True), (([nan] * 4, [nan] * 4), True), (([nan] * 4, [nan] * 4), False)):
        with pytest.raises(RuntimeError, match="over --max-logprob-diff"):
            gate(*engines, fresh=fresh)


def test_kl_estimators_follow_their_place():
    def estimator(*argv):
        return parse("--kl-coef", "0.1", *argv).number("kl_estimator")

    assert estimator("--algorithm", "ppo") == "k1" and estimator("--algorithm", "grpo") == "k3"
    assert estimator("--algorithm", "ppo", "--kl-place", "loss") == "k3"
    assert estimator("--algorithm", "ppo", "--kl-place", "loss", "--kl-estimator", "k2") == "k2"
    assert estimator("--algorithm", "reinforce_plus_plus_baseline", "--kl-place", "loss") == "k2"


def test_shadows_that_cannot_be_formed_are_left_out(alone):
    """A scalar shadow whose sum overflows, and an optimizer batch without a token, where the run itself goes on."""
    components, scored = torch.tensor([[0.0, 0], [1, 1], [2, 2], [3, 3]]).double(), torch.ones(4, 2).bool()
    groups = torch.zeros(4, dtype=torch.int64)
    for algorithm, weights, sizes, shadows, kept in (
        ("gdpo", [3e38, 3e38], {0: 4}, ("grpo", "gdpo"), {"gdpo"}),
        ("grpo", [1.0, 1.0], {0: 2, 1: 2}, ("gdpo", "rloo"), {"rloo"}),
    ):
        graded = (components, scored, weights, groups)
        mask = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 0]] if len(sizes) == 2 else [[1, 1]] * 4).bool()
        rollout = adv.Rollout(adv.group_scores(algorithm, *graded), mask, sizes)
        advantages, _ = adv.token_advantages(algorithm, rollout, False)
        meter = du.Meter()
        cfg = dataclasses.replace(train.Config(), algorithm=algorithm, shadow=shadows)
        train.measure_advantages(cfg, graded, rollout, advantages, None, meter)
        assert {n.split("_")[1] for n in meter.reduce() if "shadow" in n} == kept


def test_shadows_have_no_kl(alone):
    """REINFORCE++ with a KL in its reward is not the same as its own shadow, which has none."""
    name, correlations = "reinforce_plus_plus", []
    graded = (torch.tensor([[0.0], [1], [2], [3]]).double(), torch.ones(4, 1).bool(), [1.0], torch.zeros(4, dtype=torch.int64))
    for penalty in (None, torch.tensor([[0.0, 2], [1, 0], [0, 3], [1, 1]]).double()):
        rollout = adv.Rollout(adv.group_scores(name, *graded), torch.ones(4, 2).bool(), {0: 4}, penalty)
        advantages, _ = adv.token_advantages(name, rollout, False, gamma=1.0)
        meter = du.Meter()
        cfg = dataclasses.replace(train.Config(), algorithm=name, shadow=(name,))
        train.measure_advantages(cfg, graded, rollout, advantages, None, meter)
        correlations.append(meter.reduce()[f"advantage/shadow_{name}_correlation"])
    assert correlations[0] == pytest.approx(1) and correlations[1] < 0.99


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
    answered = [
        json.loads(line)["question"]
        for line in (run_dir / "eval" / "chain_sum" / "greedy_000002.jsonl").read_text().splitlines()
    ]
    cfg = parse(*BASE[7:], "--eval-every", 2, "--eval-prompts", 5, "--model", tiny, "--rewards", "format")
    held_out = ro.load_data(cfg, tiny)[3]["chain_sum"]
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


def test_later_optimizer_batches_compare_with_the_policy_that_sampled(tmp_path, tiny, alone):
    """Two batches, one epoch: the second sees a ratio other than 1, as the first has moved the weights; norms are clipped."""
    argv = ["--model", tiny, *BASE, *SEVERAL, "--steps", "2", "--lr", "0.01", "--warmup-steps", "3", "--lr-schedule", "linear"]
    train.train(parse(*argv, "--max-grad-norm", "0.1", "--no-export", "--run-dir", tmp_path / "run"), alone)
    for metrics in metrics_of(tmp_path / "run"):
        assert "policy/ref_kl_k1" not in metrics  # no KL term, so no reference model
        assert abs(metrics["policy/ratio"] - 1) > 1e-3 and metrics["optim/grad_norm"] > 0.1
    assert [m["optim/lr"] for m in metrics_of(tmp_path / "run")] == pytest.approx([0.005, 0.01])


def test_a_push_that_does_nothing_stops_the_run(tmp_path, tiny, alone, monkeypatch):
    monkeypatch.setattr(ro.HFEngine, "load_weights", lambda self, weights: [None for _ in weights] and None)
    argv = ["--model", tiny, *BASE, "--steps", "30", "--lr", "0.05", "--run-dir", tmp_path / "run"]
    with pytest.raises(RuntimeError, match=r"over --max-logprob-diff 0\.2"):
        train.train(parse(*argv), alone)
    assert len(metrics_of(tmp_path / "run")) < 30


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_rewards_of_the_readme_train(tmp_path, tiny, alone, monkeypatch):
    """The file as it stands there: one function, a batched one, and one with two components, each logged and weighed."""
    forgotten, asked, generate = [], [], ro.HFEngine.generate
    monkeypatch.setattr(ro.HFEngine, "forget", lambda self: forgotten.append(1))
    monkeypatch.setattr(ro.HFEngine, "generate", lambda self, p, s, seeds: asked.append(s) or generate(self, p, s, seeds))
    (block,) = [b for b in BLOCKS if "from rewards import Reward" in b]
    path = tmp_path / "mine.py"
    path.write_text(block)
    rewards = ["--rewards", "format", f"{path}:tone", f"{path}:brevity", f"{path}:steps", "--reward-weights", "steps.lines=0.1"]
    argv = ["--model", tiny, *BASE, "--steps", "1", "--no-export", "--run-dir", tmp_path / "run", *rewards]
    evaluates = ["--eval-every", "1", "--eval-prompts", "2", "--eval-modes", "greedy", "sampled", "--eval-samples", "2"]
    train.train(parse(*argv, *evaluates, "--eval-temperature", "0.7", "--eval-max-response-tokens", "9"), alone)
    held_out = [(1, 0.0, 9), (2, 0.7, 9)]
    assert [(s.num_samples, s.temperature, s.max_tokens) for s in asked] == [*held_out, (3, 1.0, 10), *held_out]
    _, metrics = metrics_of(tmp_path / "run")
    assert len(forgotten) == 2  # after each evaluation, so that training does not depend on it
    assert {"reward/tone", "reward/brevity", "reward/steps.lines", "reward/brevity/timeout"} <= metrics.keys()
    assert metrics["optim/grad_norm"] > 0
    assert "steps.lines 0.1, steps.sure 1" in train.equation(parse(*rewards))


@pytest.mark.parametrize("block", [b for b in BLOCKS if "train.main" in b], ids=lambda b: b[3:].split(".py")[0])
def test_examples_of_the_readme_train(tmp_path, tiny, alone, monkeypatch, capfd, block):
    """ "Add an algorithm" and "Add a loss": the files as they stand there, two steps, and what the run says of itself."""
    monkeypatch.setattr(adv, "ALGORITHMS", dict(adv.ALGORITHMS))
    monkeypatch.setattr(adv, "GROUP_STAGES", dict(adv.GROUP_STAGES))
    monkeypatch.setattr(losses, "POLICY_LOSSES", dict(losses.POLICY_LOSSES))
    name = re.match(r'"""(\w+)\.py: .*python (\w+)\.py --algorithm (\w+)', block).groups()
    assert len(set(name)) == 1 and block.endswith("    train.main(sys.argv[1:])\n")
    (tmp_path / f"{name[0]}.py").write_text(block)
    runpy.run_path(str(tmp_path / f"{name[0]}.py"), run_name="example")
    argv = ["--model", tiny, *BASE, "--algorithm", name[0], "--steps", "2", "--epochs-per-rollout", "2", "--no-export"]
    train.train(parse(*argv, "--run-dir", tmp_path / "run"), alone)
    for metrics in metrics_of(tmp_path / "run"):
        assert metrics["optim/grad_norm"] > 0 and math.isfinite(metrics["loss/policy"])
    said = capfd.readouterr().out
    assert f"{name[0]}: L = " in said and ("median_g(r)" in said or "-ratio A where" in said)


EVALUATES = ["--eval-every", "1", "--eval-prompts", "3"]
PHASES = {  # what fails, on which rank, with which further flags
    "loading the data failed on rank 1": ["ro", "load_rows", 1, []],
    "loading the data failed on rank 0": ["ro", "prompt_ids", 0, []],  # the template
    "sampling failed on rank 1": ["engine", "generate", 1, []],
    "grading failed on rank 0": ["graders", "score", 0, []],
    "grading held-out prompts failed on rank 0": ["ro", "grade", 0, EVALUATES],
    "sampling held-out prompts failed on rank 1": ["engine", "generate", 1, EVALUATES],
    "judging groups failed on rank 1": ["ro", "judge", 1, []],
    "forming batches failed on rank 1": ["losses", "form_batches", 1, []],
    "logging failed on rank 0": ["log", "step", 0, []],
    "writing the checkpoint of step 1 failed on rank 1": ["writer", "write_data", 1, ["--save-every", "1"]],
}


def test_a_failure_on_one_rank_reaches_all_with_its_message(tmp_path, tiny):
    """In one process group after another run has failed in it, so that no rank was left behind in a collective."""
    result, run_dir = run(2, tmp_path, tiny, "--steps", "1", options={"failures": PHASES}, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    for phase, (_, function, rank, _) in PHASES.items():
        for other in range(2):
            assert f"rank {other} saw: {phase}: ValueError: injected into {function}" in result.stdout
        assert result.stderr.count(f"[rank {rank}] {phase.split(' failed')[0]} failed:\nTraceback") == 1
    assert not list(run_dir.rglob("model")) and not list(run_dir.rglob("checkpoints/*"))


@pytest.mark.parametrize(
    "phase, module, function, rank",
    [
        ("sampling failed on rank 1", "ro", "sample_groups", 1),
        (None, "losses", "token_logprobs", 0),
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
    else:  # inside collectives: the other rank sees the network's error, and says whose failure was first
        assert f"[rank {1 - rank}] stopped: another rank failed first: rank {rank}: ValueError: injected" in result.stderr
    assert not (run_dir / "model").exists()
    assert time.monotonic() - began < 60
