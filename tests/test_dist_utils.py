"""dist_utils.py: statistics, failing together, and the memory of full parameters, on real ranks."""

import contextlib
import io
import json
import math
import random
import re

import dist_worker
import numpy as np
import pytest
import torch
from conftest import launch
from safetensors import safe_open

import dist_utils as du


@pytest.fixture(scope="module")
def answers(tmp_path_factory, mini, alone):
    """What one process and two ranks said to each case of dist_worker.py, and on stderr."""
    out, err = tmp_path_factory.mktemp("dist") / "out.json", io.StringIO()
    result = launch(2, "dist_worker.py", mini, out, timeout=90)
    assert result.returncode == 0, result.stderr[-3000:]
    du._say_world_size.cache_clear()
    with contextlib.redirect_stderr(err):
        one = dist_worker.answers_of(alone, str(mini), out.parent / "1")
    return {1: (one, err.getvalue()), 2: (json.loads(out.read_text()), result.stderr)}


@pytest.mark.parametrize("world", [1, 2])
def test_two_pass_statistics(answers, world):
    values = [10000, 10000.001, 10000.002, 10000.003]
    want = math.sqrt(sum((v - 10000.0015) ** 2 for v in values) / 3)
    for mean, std, count, low, high in answers[world][0]["close together"]:
        assert (mean, count, low, high) == (pytest.approx(10000.0015, rel=1e-12), 4, 10000, 10000.003)
        assert std == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_correlation_and_the_world_size_of_statistics(answers, world):
    said, stderr = answers[world]
    for both, constant, nothing in said["correlation"]:
        assert both == pytest.approx(0.5291502622129182, rel=1e-12) and constant is None and nothing is None
    lines = [line for line in stderr.splitlines() if "statistics are over" in line]
    assert sorted(lines) == [f"[rank {r}] statistics are over {world} ranks" for r in range(world)]  # once a rank


def test_failure_on_one_rank_reaches_all_with_its_message(answers):
    said, stderr = answers[2]
    assert said["one fails"] == ["RankFailure: grading failed on rank 1: ValueError: the ninth row"] * 2
    assert said["one exits"] == ["RankFailure: grading failed on rank 1: SystemExit: 3"] * 2
    assert said["after that"] == [[0, 1], [0, 1]]  # the collectives are still in step
    assert stderr.count("in fails\n") == 1 and "[rank 1] grading failed" in stderr  # the traceback, once


def test_agreement(answers):
    assert answers[2][0]["agree"] == ["ok", "ok"]
    assert all("do not agree on the rows: rank 0: 0, rank 1: 1" in a for a in answers[2][0]["disagree"])


@pytest.mark.parametrize("world", [1, 2])
def test_optimizer_state_is_fp32_and_weights_move_at_small_lr(answers, world):
    """bf16 compute over fp32 master weights: at lr 1e-6 every weight moves, and the moments are fp32."""
    for dtypes, moved in answers[world][0]["optimizer"]:
        assert set(dtypes) == {"torch.float32"} and moved > 0.99


@pytest.mark.parametrize("world", [1, 2])
def test_meter_reduces_means_totals_and_peaks(answers, world):
    want = {"m": (0 + 1) / (1 + 2), "t": 1.0, "p": 1.0} if world == 2 else {"m": 0.0, "t": 0.0, "p": 0.0}
    assert answers[world][0]["meter"] == [pytest.approx(want)] * world


def test_ledger_sums_to_the_step():
    ledger, meter = du.Ledger(("a", "other")), du.Meter()
    with ledger.phase("a"):
        sum(range(1000))
    ledger.close(meter, 10, 2)
    parts = [meter.means[f"perf/seconds_{n}"][0] for n in ("a", "other")]
    assert sum(parts) == pytest.approx(meter.means["perf/seconds_step"][0]) and all(p > 0 for p in parts)


def test_metric_names_are_a_closed_list():
    for name in ("reward/format", "eval/greedy/format", "reward/a_b_correlation", "advantage/shadow_grpo_correlation"):
        assert du.known_metric(name), name
    assert not du.known_metric("rewards/format") and not du.known_metric("optim/lrr")


@pytest.mark.parametrize(
    "schedule, warmup, want",
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [1 / 3, 2 / 3, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rate(schedule, warmup, want):
    got = [du.lr_factor(step, schedule, warmup, 6) for step in range(6)]
    assert got == pytest.approx(want)


def test_compute_dtype(monkeypatch):
    cpu = torch.device("cpu")
    assert du.compute_dtype("float32", cpu) == torch.float32 and du.compute_dtype("bfloat16", cpu) == torch.bfloat16
    for has_it, want in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has_it=has_it: has_it)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has_it=has_it: {"avx512_bf16": has_it})
        assert du.compute_dtype("auto", torch.device("cuda")) == want and du.compute_dtype("auto", cpu) == want


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("world", [1, 2])
def test_no_rank_takes_a_step_that_is_not_finite_on_one(answers, world):
    """Loss or gradient is NaN or infinite on the last rank alone: weights and moments are untouched on all."""
    for said in answers[world][0]["skipped"]:
        assert said == [False, False, False, False, 4, 1, True, True, 0, False]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["saved", "saved in the background"])
def test_what_is_loaded_is_what_was_saved_and_goes_on(answers, world, how):
    assert answers[world][0][how] == [[1, True, True]] * world


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_is_said_on_all_ranks_and_costs_nothing(answers, world):
    for said in answers[world][0]["one cannot write"]:
        assert said.startswith(f"RankFailure: writing the checkpoint of step 2 failed on rank {world - 1}: ")
        assert "File too large" in said and said.endswith("['step_000001']") and said.count("rank") == 1


def state(step, run="mine"):
    return {"run": run, "step": step}


def tensors(value=1.0):
    return {"policy.weights.a": torch.full((50, 3), value), "policy.step.a": torch.tensor(7.0)}


@pytest.fixture
def three(alone, tmp_path):
    """Checkpoints of the steps 9, 10 and 11: their numbers are not in the order of their names' letters."""
    checkpoints = du.Checkpoints(tmp_path / "checkpoints")
    for step in (9, 10, 11):
        checkpoints.save(step, tensors(step), state(step))
    return checkpoints


def cut(file):
    file.write_bytes(file.read_bytes()[:-40])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "harm, says",
    [
        (lambda c: cut(next(c.path(11).glob("*.safetensors"))), "bytes and CRC-32"),
        (lambda c: flip(next(c.path(11).glob("*.safetensors"))), "bytes and CRC-32"),
        (lambda c: next(c.path(11).glob("*.safetensors")).unlink(), "No such file or directory"),
        (lambda c: (c.path(11) / du.STATE).unlink(), "state.json: No such file or directory"),
        (lambda c: (c.path(11) / du.STATE).write_text('{"run": '), "state.json is damaged"),
        (lambda c: (c.path(11) / du.STATE).write_text("[]"), "state.json is damaged"),
        (
            lambda c: (c.path(11) / du.STATE).write_text((c.path(11) / du.STATE).read_text().replace("11", "10")),
            "its own CRC-32",
        ),
        (lambda c: (c.path(11) / du.STATE).write_bytes(b"\xff\xfe"), "state.json is damaged"),
        (lambda c: c.path(12).symlink_to("nowhere"), "No such file or directory"),
        (lambda c: c.path(12).write_text("a file"), "Not a directory"),
        (lambda c: c.path(12).mkdir(), "No such file or directory"),
        (lambda c: c.path(12).with_suffix(".tmp").mkdir(), None),
    ],
)
def test_what_is_not_whole_is_said_and_the_one_before_is_used(three, capfd, harm, says):
    harm(three)
    found = three.find("mine")
    err = capfd.readouterr().err
    if says is None:  # a save that was killed
        assert found["step"] == 11 and not err
        return
    harmed = (
        12 if three.path(12).with_suffix(".damaged").is_symlink() or not three.path(11).with_suffix(".damaged").exists() else 11
    )
    assert found["step"] == {11: 10, 12: 11}[harmed] and says in err and f"step_0000{harmed} cannot be used" in err
    loaded = tensors(0)
    du.load_checkpoint(three.path(found["step"]), loaded)
    assert all(torch.equal(loaded[n], t) for n, t in tensors(found["step"]).items())
    assert three.find("mine")["step"] == found["step"] and not capfd.readouterr().err  # said once


def test_nothing_whole_is_nothing(three):
    for step in three.steps():
        cut(next(three.path(step).glob("*.safetensors")))
    assert three.find("mine") is None and three.steps() == []


def test_another_runs_checkpoint_is_refused(three):
    three.save(12, tensors(), state(12, "another"))
    with pytest.raises(du.RankFailure, match="step_000012 belongs to another run, another and not mine"):
        three.find("mine")


def test_the_last_are_kept_and_none_goes_before_a_newer_one_is_whole(three, monkeypatch):
    three.keep_last = 2
    monkeypatch.setattr(du, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(
        du.RankFailure, match=r"committing the checkpoint of step 12 failed on rank 0: OSError: .*No space left"
    ):
        three.save(12, tensors(), state(12))
    assert three.steps() == [9, 10, 11] and len(list(three.folder.iterdir())) == 3
    monkeypatch.undo()
    three.save(12, tensors(), state(12))
    assert three.steps() == [11, 12] and len(list(three.folder.iterdir())) == 2


def test_weights_that_are_not_finite_are_never_committed(three):
    for value in (math.nan, math.inf):
        with pytest.raises(du.RankFailure, match=r"policy\.weights\.a has elements that are not finite"):
            three.save(12, tensors(value), state(12))
    assert three.steps() == [9, 10, 11]


def test_tensors_that_do_not_fit_are_refused(three):
    for wrong, says in (
        ({"policy.weights.a": torch.zeros(50, 4)}, "Size mismatch|size"),
        ({"policy.weights.b": torch.zeros(1)}, "policy.weights.b"),
    ):
        with pytest.raises(du.RankFailure, match=says):
            du.load_checkpoint(three.path(11), wrong)


def test_a_checkpoint_holds_no_pickle(three):
    for file in three.path(11).iterdir():
        if file.name == du.STATE:
            assert json.loads(file.read_text())["files"].keys() == {f.name for f in three.path(11).glob("*.safetensors")}
        else:
            with safe_open(file, "pt") as f:
                assert set(f.keys()) <= set(tensors())


def test_random_generators_go_on_after_a_way_through_json():
    kept = json.loads(json.dumps(du.rng_state(torch.device("cpu"))))
    np.random.randn()  # leaves a second number behind
    draws = [
        (random.random(), np.random.randn(3).tolist(), torch.rand(3).tolist())
        for _ in range(2)
        if not du.set_rng_state(kept, torch.device("cpu"))
    ]
    assert draws[0] == draws[1]


def test_text_cannot_rule_a_terminal():
    said = du.printable("\x1b[2Ja\rb\x9b1mc\u202ed\ud800\n\te\x00 é 漢")
    assert said == "\\u001b[2Ja\\u000db\\u009b1mc\\u202ed\\ud800\n\te\\u0000 é 漢" and not re.search(
        "[\x00-\x08\x1b\x9b]", said
    )
