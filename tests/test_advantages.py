"""advantages.py: stages against the oracles and the worked cases, across real ranks, and the capability check."""

import dataclasses
import json

import oracles
import pytest
import torch
from conftest import launch
from hypothesis import given, settings
from hypothesis import strategies as st

import advantages as adv
import train

WEIGHTS = {"grpo": [1.0, 0.5], "gdpo": [1.0, 0.5]}


def scores(name, columns, weights, groups):
    """`columns` is K lists of numbers, None where a grader abstained."""
    rows = list(zip(*columns))
    scored = torch.tensor([[x is not None for x in row] for row in rows])
    components = torch.tensor([[0.0 if x is None else x for x in row] for row in rows], dtype=torch.float64)
    return adv.group_scores(name, components, scored, weights, torch.tensor(groups))


# ---------------------------------------------------------------------------------------------- group stages

values = st.one_of(st.floats(-100, 100, width=32), st.sampled_from([0.0, 1.0, 0.5]), st.none())


@pytest.mark.parametrize("name", list(adv.ALGORITHMS))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_group_stages_equal_their_oracles(name, data):
    count = data.draw(st.integers(1, 12))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    columns = [data.draw(st.lists(values, min_size=count, max_size=count)) for _ in range(2)]
    got = scores(name, columns, WEIGHTS[name], groups)
    want = getattr(oracles, adv.ALGORITHMS[name].group_stage)(list(zip(*columns)), WEIGHTS[name], groups)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", list(adv.ALGORITHMS))
def test_order_of_rows_and_uneven_groups(name):
    groups, rewards = [0] * 4 + [1] * 3 + [2] * 4 + [3], [0, 1, 0, 1, 5, 5, 5, 2, 2, 3, 3, 8]
    got = scores(name, [rewards], [1.0], groups)
    assert got[4:7].tolist() == [0, 0, 0] and got[11] == 0  # constant; a group of one
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = scores(name, [[rewards[i] for i in order]], [1.0], [groups[i] for i in order])
    torch.testing.assert_close(shuffled, got[order], atol=1e-12, rtol=0)
    torch.testing.assert_close(got[:4], scores(name, [rewards[:4]], [1.0], [0] * 4), atol=0, rtol=0)


@pytest.mark.parametrize("name", list(adv.ALGORITHMS))
@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("value", [0.1, 0.2, 0.3, 0.35, 0.7, 1 / 3])
def test_equal_rewards_give_exactly_zero(name, size, value):
    got = scores(name, [[value] * size], [1.0], [0] * size)
    assert (got == 0).all() and not adv.has_signal(got, torch.zeros(size))[0]


def test_grpo_by_hand():
    got = scores("grpo", [[1, 1, 1, 0, 0, 0, 0, 0]], [1.0], [0] * 8)
    assert got.tolist() == pytest.approx([1.2076124] * 3 + [-0.7245674] * 5, rel=1e-5)
    assert (scores("grpo", [[0.1 + 0.2, 0.3, 0.3, 0.3]], [1.0], [0] * 4) == 0).all()  # equal as float32
    near = scores("grpo", [[10000, 10000.005, 10000.010, 10000.015]], [1.0], [0] * 4)
    assert near[0] < -1 and near[3] > 1


def test_grpo_abstentions():
    got = scores("grpo", [[1, None, 0, 1]], [1.0], [0] * 4)
    assert got[1] == 0
    torch.testing.assert_close(got[[0, 2, 3]], scores("grpo", [[1, 0, 1]], [1.0], [0] * 3))
    two = scores("grpo", [[1, None, 0, 1], [None, 1, None, None]], [1.0, 1.0], [0] * 4)  # sums 1, 1, 0, 1
    torch.testing.assert_close(two, scores("grpo", [[1, 1, 0, 1]], [1.0], [0] * 4))
    assert (scores("grpo", [[None] * 4], [1.0], [0] * 4) == 0).all()


def test_grpo_refuses_sums_beyond_float32():
    assert scores("grpo", [[1e30, 0]], [1.0], [0, 0])[0] > 0
    with pytest.raises(ValueError, match="beyond float32"):
        scores("grpo", [[1e30, 0]], [1e10], [0, 0])


def test_gdpo_cases():
    def gdpo(columns, weights):
        return scores("gdpo", columns, weights, [0] * len(columns[0])).tolist()

    assert gdpo([[0, 1, 2], [2, 1, 0]], [16777216.0, 16777217.0]) == pytest.approx([0.9999000095, 0, -0.9999000095], rel=1e-6)
    assert gdpo([[1, 0], [0, 1]], [1.0, 1.0]) == [0, 0]
    assert gdpo([[1, 0], [0, 1]], [2.0, 1.0]) == pytest.approx([0.7070067953, -0.7070067953], rel=1e-6)
    c = 308.95172119140625
    x1 = [-75.74329876632146, -75.74330217449115, -75.7432989215475]
    residue = gdpo([x1, [c - x for x in x1]], [1.0, 1.0])
    assert all(abs(s) < 1e-8 for s in residue) and any(s != 0 for s in residue)
    two_groups = scores("gdpo", [[1, 0, 1, 0], [3, 3, 1, 0]], [1.0, 1.0], [0, 0, 1, 1])
    assert two_groups.tolist() == pytest.approx([0.7070067953, -0.7070067953, 1.4140135907, -1.4140135907], rel=1e-6)


@given(shift=st.floats(-50, 50), scale=st.floats(0.5, 20), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_group_stages_ignore_shift_and_nearly_scale(shift, scale, seed):
    x = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(seed)).double()
    for name in adv.ALGORITHMS:
        base = scores(name, [x.tolist()], [1.0], [0] * 6)
        torch.testing.assert_close(scores(name, [(x + shift).tolist()], [1.0], [0] * 6), base, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(scores(name, [(x * scale).tolist()], [1.0], [0] * 6), base, atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------------------------------- batch stages, real ranks


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """What every rank of a group of 1, 2 and 3 said to each case of stage_worker.py."""
    found = {}
    for world in (1, 2, 3):
        out = tmp_path_factory.mktemp("stages") / "out.json"
        result = launch(world, "stage_worker.py", out, timeout=90)
        assert result.returncode == 0, result.stderr[-3000:]
        found[world] = json.loads(out.read_text())
    return found


def per_sample(answers, case):
    """The first token's advantage of each sample, ranks one after another."""
    return [row[0] for rank in answers[case] for row in rank]


def test_whitening_cases_on_one_process(stages):
    one = stages[1]
    assert per_sample(one, "two groups") == pytest.approx([0.5476801, -0.5476801, 1.0953603, -1.0953603], rel=1e-6)
    assert per_sample(one, "largest floats") == pytest.approx([-0.70710677, 0.70710677], rel=1e-6)
    assert per_sample(one, "huge weights") == pytest.approx([-1, 0, 1], abs=2e-4)
    assert per_sample(one, "weights of one") == pytest.approx([1.2246583, 0, 0, -1.2246583], rel=1e-6)
    assert per_sample(one, "small weights") == pytest.approx([0.7173874, 0, 0, -0.7173874], rel=1e-6)
    assert per_sample(one, "two batches") == pytest.approx(
        [-0.547423, 0.547423, -1.094845, 1.094845, -1.094845, 1.094845, -0.547423, 0.547423], rel=1e-5
    )
    merged = per_sample(one, "merged batches")
    assert sum((a > 0) != (b > 0) for a, b in zip(per_sample(one, "two batches"), merged)) == 4
    assert per_sample(one, "all equal") == [0, 0, 0]


def test_statistics_cross_ranks(stages):
    two = stages[2]
    assert per_sample(two, "13|26") == pytest.approx([-0.9257773, 0, -0.4628886, 1.3886659], rel=1e-6)
    assert per_sample(two, "13|") == pytest.approx([-0.7070568, 0.7070568], rel=1e-6)
    assert per_sample(two, "all equal") == [0, 0, 0]


@pytest.mark.parametrize("case", ["uneven lengths", "uneven lengths, tokens"])
def test_partition_over_ranks_does_not_matter(stages, case):
    flat = [[row for rank in stages[w][case] for row in rank] for w in (1, 2, 3)]
    torch.testing.assert_close(torch.tensor(flat[0]), torch.tensor(flat[1]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.tensor(flat[0]), torch.tensor(flat[2]), atol=1e-6, rtol=1e-6)
    s, mask = [0.5, -1.5, 2.0, 0.25, 1.0], [[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]]
    if case == "uneven lengths":
        want = oracles.whiten_sequence(s, mask)
    else:
        want = oracles.whiten_tokens(oracles.broadcast(s, mask), mask)
    torch.testing.assert_close(torch.tensor(flat[0], dtype=torch.float64), torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize(
    "case, says",
    [
        ("segment counts differ", "do not agree on the number of optimizer batches"),
        ("a list against None", "no segmentation"),
        ("malformed on one rank", "do not add up"),
        ("inf on one rank", "not finite"),
        ("nothing valid anywhere", "no valid value"),
    ],
)
def test_all_ranks_return_and_refuse(stages, case, says):
    for answers in (stages[2][case], stages[3][case]):
        assert len(set(answers)) == 1 and says in answers[0] and answers[0].startswith("RankFailure"), answers


# ---------------------------------------------------------------------------------------------- the check


def config(**changes):
    return dataclasses.replace(train.Config(), **changes)


def test_check_reports_every_violation_with_capability_and_remedy(monkeypatch):
    assert adv.check(config()) == [] and adv.check(config(algorithm="grpo", normalize_advantages=True)) == []
    assert adv.check(config(optimizer_steps_per_rollout=4)) == []
    on_policy = dataclasses.replace(adv.ALGORITHMS["gdpo"], requires_on_policy_updates=True)
    monkeypatch.setitem(adv.ALGORITHMS, "strict", on_policy)
    wrong = adv.check(config(algorithm="strict", samples_per_prompt=1, normalize_advantages=True, epochs_per_rollout=2))
    assert len(wrong) == 3
    for message, flag, capability, instead in zip(
        wrong,
        ("--samples-per-prompt 1", "--normalize-advantages", "2 optimizer steps a rollout"),
        ("min_group_size", "forbids_normalize_advantages", "requires_on_policy_updates"),
        ("--samples-per-prompt 2", "--algorithm grpo", "--epochs-per-rollout 1"),
    ):
        assert message.startswith(flag) and capability in message and instead in message
    assert "unknown" in adv.check(config(algorithm="grop"))[0]


def test_registry_entries_exist():
    import losses

    for name, a in adv.ALGORITHMS.items():
        assert a.group_stage in adv.GROUP_STAGES and a.batch_stage in adv.BATCH_STAGES, name
        assert a.policy_loss in losses.POLICY_LOSSES and a.aggregation in losses.AGGREGATIONS, name
