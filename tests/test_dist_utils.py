"""dist_utils.py: statistics, failing together, and the memory of full parameters, on real ranks."""

import json
import math

import pytest
import torch
from conftest import launch

import dist_utils as du


@pytest.fixture(scope="module")
def answers(tmp_path_factory, tiny):
    found = {}
    for world in (1, 2):
        out = tmp_path_factory.mktemp("dist") / "out.json"
        result = launch(world, "dist_worker.py", tiny, out, timeout=90)
        assert result.returncode == 0, result.stderr[-3000:]
        found[world] = json.loads(out.read_text()), result.stderr
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_two_pass_statistics(answers, world):
    values = [10000, 10000.001, 10000.002, 10000.003]
    want = math.sqrt(sum((v - 10000.0015) ** 2 for v in values) / 3)
    for mean, std, count, low, high in answers[world][0]["close together"]:
        assert (mean, count, low, high) == (pytest.approx(10000.0015, rel=1e-12), 4, 10000, 10000.003)
        assert std == pytest.approx(want, rel=1e-6)


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


def test_compute_dtype(monkeypatch):
    cpu = torch.device("cpu")
    assert du.compute_dtype("float32", cpu) == torch.float32 and du.compute_dtype("bfloat16", cpu) == torch.bfloat16
    for has_it, want in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has_it=has_it: has_it)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has_it=has_it: {"avx512_bf16": has_it})
        assert du.compute_dtype("auto", torch.device("cuda")) == want and du.compute_dtype("auto", cpu) == want
