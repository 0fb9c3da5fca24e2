"""dist_utils.py: statistics, failing together, and the memory of full parameters, on real ranks."""

import contextlib
import io
import json
import math

import dist_worker
import pytest
import torch
from conftest import launch

import dist_utils as du


@pytest.fixture(scope="module")
def answers(tmp_path_factory, mini, alone):
    """What one process and two ranks said to each case of dist_worker.py, and on stderr."""
    out, err = tmp_path_factory.mktemp("dist") / "out.json", io.StringIO()
    result = launch(2, "dist_worker.py", mini, out, timeout=90)
    assert result.returncode == 0, result.stderr[-3000:]
    du._say_world_size.cache_clear()
    with contextlib.redirect_stderr(err):
        one = dist_worker.answers_of(alone, str(mini))
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
