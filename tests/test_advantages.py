"""advantages.py: stages against the oracles and the worked cases, whole algorithms, real ranks, and the capability check."""

import dataclasses
import json
import math
from types import SimpleNamespace

import oracles
import pytest
import stage_worker
import torch
from conftest import launch
from hypothesis import given, settings
from hypothesis import strategies as st

import advantages as adv
import dist_utils as du
import losses
import train

NAMES = list(adv.ALGORITHMS)
STAGES = list(adv.GROUP_STAGES)
COMPARING = [s for s in STAGES if s != "none"]
ALGORITHM_OF = {a.group_stage: name for name, a in reversed(adv.ALGORITHMS.items())}  # an algorithm for each group stage


def scores(stage, columns, weights, groups):
    """`columns` is K lists of numbers, None where a grader abstained."""
    components, scored = matrix(columns)
    return adv.group_scores(ALGORITHM_OF[stage], components, scored, weights, torch.tensor(groups))


def matrix(columns):
    rows = list(zip(*columns))
    scored = torch.tensor([[x is not None for x in row] for row in rows])
    return torch.tensor([[0.0 if x is None else x for x in row] for row in rows], dtype=torch.float64), scored


# ---------------------------------------------------------------------------------------------- group stages

values = st.one_of(st.floats(-100, 100, width=32), st.sampled_from([0.0, 1.0, 0.5]), st.none())


@pytest.mark.parametrize("stage", STAGES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_group_stages_equal_their_oracles(stage, data):
    count = data.draw(st.integers(1, 12))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    columns = [data.draw(st.lists(values, min_size=count, max_size=count)) for _ in range(2)]
    got = scores(stage, columns, [1.0, 0.5], groups)
    want = oracles.GROUP[stage](list(zip(*columns)), [1.0, 0.5], groups)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@given(seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_order_of_rows_does_not_matter(stage, seed):
    generator = torch.Generator().manual_seed(seed)
    x, groups = torch.randint(0, 4, (2, 11), generator=generator).double(), torch.randint(0, 3, (11,), generator=generator)
    order = torch.randperm(11, generator=generator)
    got = scores(stage, x.tolist(), [1.0, 2.0], groups.tolist())
    shuffled = scores(stage, x[:, order].tolist(), [1.0, 2.0], groups[order].tolist())
    torch.testing.assert_close(shuffled, got[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("stage", COMPARING)
def test_uneven_groups_stand_alone(stage):
    groups, rewards = [0] * 4 + [1] * 3 + [2] * 4 + [3], [0, 1, 0, 1, 5, 5, 5, 2, 2, 3, 3, 8]
    got = scores(stage, [rewards], [1.0], groups)
    assert got[4:7].tolist() == [0, 0, 0] and got[11] == 0  # constant; a group of one
    torch.testing.assert_close(got[:4], scores(stage, [rewards[:4]], [1.0], [0] * 4), atol=0, rtol=0)


@pytest.mark.parametrize("stage", COMPARING)
@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("value", [0.1, 0.2, 0.3, 0.35, 0.7, 1 / 3])
def test_equal_rewards_give_exactly_zero(stage, size, value):
    got = scores(stage, [[value] * size], [1.0], [0] * size)
    assert (got == 0).all() and not adv.has_signal(got, torch.zeros(size), torch.ones(size, 1).bool())[0]


@pytest.mark.parametrize(
    "stage, right, wrong", [("grpo", 1.2076124, -0.7245674), ("mean", 0.625, -0.375), ("rloo", 0.7142857, -0.4285714)]
)
def test_three_of_eight_correct(stage, right, wrong):
    got = scores(stage, [[1, 1, 1, 0, 0, 0, 0, 0]], [1.0], [0] * 8)
    assert got.tolist() == pytest.approx([right] * 3 + [wrong] * 5, rel=1e-5)


@pytest.mark.parametrize("stage", ["grpo", "mean", "rloo"])
def test_collapse_is_judged_as_float32_and_nothing_else_is(stage):
    assert (scores(stage, [[0.1 + 0.2, 0.3, 0.3, 0.3]], [1.0], [0] * 4) == 0).all()  # equal as float32
    near = scores(stage, [[10000, 10000.005, 10000.010, 10000.015]], [1.0], [0] * 4)
    assert near[0] < near[1] < 0 < near[2] < near[3]


def test_a_lone_different_sample_keeps_its_size():
    assert scores("rloo", [[0.35] * 7 + [0.0]], [1.0], [0] * 8)[7].item() == pytest.approx(-0.35, rel=1e-12)


@pytest.mark.parametrize("stage", ["grpo", "mean", "rloo"])
def test_abstentions_stay_out_of_their_group(stage):
    got = scores(stage, [[1, None, 0, 1]], [1.0], [0] * 4)
    assert got[1] == 0
    torch.testing.assert_close(got[[0, 2, 3]], scores(stage, [[1, 0, 1]], [1.0], [0] * 3))
    two = scores(stage, [[1, None, 0, 1], [None, 1, None, None]], [1.0, 1.0], [0] * 4)  # sums 1, 1, 0, 1
    torch.testing.assert_close(two, scores(stage, [[1, 1, 0, 1]], [1.0], [0] * 4))
    assert (scores(stage, [[None] * 4], [1.0], [0] * 4) == 0).all()


@pytest.mark.parametrize("stage", ["grpo", "mean", "rloo", "none"])
def test_sums_beyond_float32_are_refused(stage):
    assert scores(stage, [[1e30, 0]], [1.0], [0, 0])[0] > 0
    with pytest.raises(ValueError, match="beyond float32"):
        scores(stage, [[1e30, 0]], [1e10], [0, 0])


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
def test_shift_and_scale_of_rewards(shift, scale, seed):
    """Comparing stages ignore a shift; standardised ones ignore a scale as well, the others take it over; `none` keeps both."""
    x = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(seed)).double()
    for stage in STAGES:
        base = scores(stage, [x.tolist()], [1.0], [0] * 6)
        moved, scaled = (scores(stage, [y.tolist()], [1.0], [0] * 6) for y in (x + shift, x * scale))
        torch.testing.assert_close(moved, base + (shift if stage == "none" else 0), atol=1e-6, rtol=1e-6)
        if stage in ("grpo", "gdpo"):
            torch.testing.assert_close(scaled, base, atol=1e-3, rtol=1e-3)
        else:
            torch.testing.assert_close(scaled, base * scale, atol=1e-9, rtol=1e-9)


def test_group_stage_off_and_a_hook_in_its_place():
    components, scored = matrix([[1, 2, None, 4], [0, 1, None, 0]])
    graded = (components, scored, [1.0, 0.5], torch.tensor([0, 0, 1, 1]))
    assert adv.group_scores("grpo", *graded, normalize_rewards=False).tolist() == [1, 2.5, 0, 4]
    seen = []

    def hook(rewards, groups):
        seen.append((rewards.tolist(), groups.tolist()))
        return rewards - 1

    assert adv.group_scores("grpo", *graded, hook=hook).tolist() == [0, 1.5, 0, 3]  # nothing scored: 0 all the same
    assert seen == [([1, 2.5, 0, 4], [0, 0, 1, 1])]
    empty = (components[:0], scored[:0], [1.0, 0.5], torch.zeros(0, dtype=torch.int64))
    assert adv.group_scores("grpo", *empty, hook=lambda r, g: 1 / 0).shape == (0,)  # a rank without samples
    for wrong in (lambda r, g: r[:1], lambda r, g: r * float("nan"), lambda r, g: 1.0, lambda r, g: None, lambda r, g: {}):
        with pytest.raises(ValueError, match=r"--reward-hook: expected 4 (finite )?scores"):
            adv.group_scores("grpo", *graded, hook=wrong)
    grown = adv.group_scores("grpo", *graded, hook=lambda r, g: r.requires_grad_() * 2)
    assert not grown.requires_grad


def test_a_group_stage_of_a_fork_must_give_one_score_a_sample(monkeypatch):
    components, scored = matrix([[1, 2]])
    graded = (components, scored, [1.0], torch.tensor([0, 0]))
    for wrong in (lambda c, s, w, g: c, lambda c, s, w, g: [1.0], lambda c, s, w, g: "no"):
        monkeypatch.setitem(adv.GROUP_STAGES, "grpo", wrong)
        with pytest.raises(ValueError, match=r"grpo: expected 2 (finite )?scores"):
            adv.group_scores("grpo", *graded)


# ---------------------------------------------------------------------------------------------- batch stages by hand


def rollout(s, mask, penalty=None, values=None):
    as64 = [None if x is None else torch.tensor(x, dtype=torch.float64) for x in (penalty, values)]
    mask = torch.tensor(mask, dtype=torch.bool)
    return adv.Rollout(torch.tensor(s, dtype=torch.float64), mask, {0: len(s)}, *as64)


def returns_of(monkeypatch, r, gamma):
    """What REINFORCE++ whitens."""
    found = []
    monkeypatch.setattr(adv, "whiten_tokens", lambda x, mask, sizes: found.append(torch.where(mask, x, 0.0)) or x)
    adv.reinforce_plus_plus(r, gamma=gamma)
    return found[0][0].tolist()


def test_reinforce_plus_plus_returns_by_hand(monkeypatch):
    kl = [[0.01 * k for k in (0.2, -0.1, 0.3, 9)]]
    assert returns_of(monkeypatch, rollout([1.0], [[1, 1, 1, 0]], kl), 1.0) == pytest.approx([0.996, 0.998, 0.997, 0])
    holes = rollout([0.0], [[1, 0, 0, 1]], [[1.0] * 4])
    assert returns_of(monkeypatch, holes, 0.9) == pytest.approx([-1.729, 0, 0, -1])


def test_token_whitening_by_hand(alone):
    def whiten(rows, mask):
        return adv.whiten_tokens(torch.tensor(rows, dtype=torch.float64), torch.tensor(mask).bool(), {0: len(rows)}).tolist()

    assert whiten([[1, 2, 3, 4]], [[1] * 4])[0] == pytest.approx([-1.3416408, -0.4472136, 0.4472136, 1.3416408], rel=1e-6)
    assert whiten([[0, 2e-5]], [[1, 1]])[0] == pytest.approx([-0.1, 0.1], rel=1e-6)  # the floor of the variance
    assert whiten([[5, 5, 5]], [[1, 1, 1]]) == whiten([[0.1, 0.1, 0.1]], [[1, 1, 1]]) == [[0, 0, 0]]  # exactly
    assert whiten([[1, math.inf, 3]], [[1, 0, 1]])[0] == pytest.approx([-1, 0, 1])  # masked inf changes nothing
    weighted = adv.reinforce_plus_plus_baseline(rollout([1.0, -1.0], [[1, 1, 1], [1, 0, 0]]))
    assert weighted[0].tolist() == pytest.approx([0.57735027] * 3) and weighted[1, 0].item() == pytest.approx(-1.7320508)


def test_gae_by_hand(alone):
    r = rollout([1.0], [[1, 1, 1, 0]], values=[[0.5, 0.6, 0.7, math.nan]])
    advantages, returns = adv.token_advantages("ppo", r, False, gamma=1.0, gae_lambda=0.95)
    assert advantages[0].tolist() == pytest.approx([0.46575, 0.385, 0.3, 0])
    assert returns[0].tolist() == pytest.approx([0.96575, 0.985, 1.0, 0])
    whitened, same = adv.token_advantages("ppo", r, True, gamma=1.0, gae_lambda=0.95)
    assert torch.equal(same, returns) and whitened[0, :3].mean().abs() < 1e-6  # the critic's target is not whitened
    with pytest.raises(ValueError, match="needs the values of a critic"):
        adv.gae(rollout([1.0], [[1]]), gamma=1.0, gae_lambda=0.95)


# ---------------------------------------------------------------------------------------------- whole algorithms

T = 6
LENGTHS = [[1], [1, 1, 1], [1, 0, 1, 1, 1], [1, 1], [1, 1, 1, 1, 1], [1, 1, 1]]  # 1, 3, 5 tokens; a hole; padded to T
ROWS = [row + [0] * (T - len(row)) for row in LENGTHS]
REWARDS = {
    "varied": ([[1, 0, 0.5, 1, 0, 0.25], [0, 1, 1, 0, 1, 0]], [0, 0, 0, 1, 1, 1], ROWS),
    "shuffled groups": ([[1, 0, 0.5, 1, 0, 0.25], [0, 1, 1, 0, 1, 0]], [1, 0, 1, 0, 1, 0], ROWS),
    "uneven groups": ([[1, 0, 0.5, 1, 0, 0.25], [0, 1, 1, 0, 1, 0]], [7, 3, 3, 3, 3, 7], ROWS),
    "all zero": ([[0] * 6, [0] * 6], [0, 0, 0, 1, 1, 1], ROWS),
    "zero variance": ([[0.3] * 6, [0.7] * 6], [0, 0, 0, 1, 1, 1], ROWS),
    "one valid token": (
        [[1, 0, 0.5, 1, 0, 0.25], [0, 1, 1, 0, 1, 0]],
        [0, 0, 0, 1, 1, 1],
        [[0] * T] * 5 + [[0, 1, 0, 0, 0, 0]],
    ),
    "abstentions": ([[1, None, 0.5, 1, None, 0.25], [0, None, 1, None, 1, 0]], [0, 0, 0, 1, 1, 1], ROWS),
}


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("case", list(REWARDS))
@pytest.mark.parametrize("name", NAMES)
def test_whole_algorithm_equals_its_oracle(alone, name, case, poison):
    """Group stage, batch stage, loss with KL, entropy and mismatch weights, aggregation: value and gradient."""
    columns, groups, rows = REWARDS[case]
    components, scored = matrix(columns)
    mask = torch.tensor(rows, dtype=torch.bool) & scored.any(1)[:, None]
    generator = torch.Generator().manual_seed(5)
    lp, old, ref, roll, values, entropy = torch.randn(6, 6, T, generator=generator, dtype=torch.float64) * 0.4 - 0.5
    weights, kl_coef, entropy_coef = [1.0, 0.5], 0.1, 0.05
    lists = {n: x.tolist() for n, x in (("lp", lp), ("old", old), ("ref", ref), ("roll", roll), ("v", values), ("h", entropy))}
    inside = mask.tolist()

    cfg = train.Config(algorithm=name, kl_coef=kl_coef, entropy_coef=entropy_coef, max_response_tokens=T)
    dirty = [torch.where(mask, x, poison) for x in (lp, old, ref, roll, values)]
    graded = (components, scored, weights, torch.tensor(groups))
    own = adv.group_scores(name, *graded)
    known = {"old_logprobs": dirty[1], "ref_logprobs": dirty[2], "old_values": dirty[4], "rollout_logprobs": dirty[3]}
    batch = SimpleNamespace(rows=slice(0, 6), response_mask=mask, **known)
    batch.put = lambda part, to: losses.Batch.put(batch, part, to)
    r = train.rollout_of(cfg, [([batch], None)], SimpleNamespace(scores=own, response_mask=mask), {0: 6})
    numbers = cfg.numbers(adv.BATCH_STAGES[cfg.spec.batch_stage])
    advantages, returns = adv.token_advantages(name, r, False, **numbers)
    want = oracles.advantages_of(
        name, list(zip(*columns)), weights, groups, inside, lists["old"], lists["ref"], lists["v"], kl_coef
    )
    torch.testing.assert_close(advantages.double(), torch.where(mask, torch.tensor(want).double(), 0.0), atol=1e-6, rtol=1e-6)
    if returns is not None:
        target = torch.where(mask, torch.tensor(want).double() + values, 0.0)
        torch.testing.assert_close(returns.double(), target, atol=1e-6, rtol=1e-6)

    def oracle(x):
        fixed = (lists["old"], lists["ref"], lists["roll"], lists["lp"])
        return oracles.objective(name, x, want, inside, *fixed, kl_coef, lists["h"], entropy_coef, T)

    inputs = dirty[0].clone().requires_grad_()
    batch.advantages = advantages.double()
    total = losses.Denominators(6, int(mask.sum()), T)
    share = train.policy_loss(cfg, batch, inputs, torch.where(mask, entropy, 0.0), total, du.Meter())
    assert share.item() == pytest.approx(oracle(lists["lp"]), abs=1e-6, rel=1e-6)
    share.backward()
    slope = torch.tensor(oracles.gradient(oracle, lists["lp"], inside), dtype=torch.float64)
    torch.testing.assert_close(inputs.grad, slope, atol=1e-6, rtol=1e-6)


def test_the_registry_is_the_oracles_table():
    """Defaults are asserted by the pipeline above, which reads them from both: here that none is missing."""
    assert list(adv.ALGORITHMS) == list(oracles.ALGORITHMS)
    coefficients = {n: a.kl_coef for n, a in adv.ALGORITHMS.items() if a.kl_coef}
    assert coefficients == {"reinforce_plus_plus": 0.01, "reinforce_plus_plus_baseline": 0.01}
    for name, a in adv.ALGORITHMS.items():
        assert (a.kl_estimator, a.kl_place) == oracles.ALGORITHMS[name][5]
        for formula in (adv.GROUP_STAGES[a.group_stage], adv.BATCH_STAGES[a.batch_stage], losses.POLICY_LOSSES[a.policy_loss]):
            assert len(adv.formula_of(formula)) > 5 and not adv.formula_of(formula).endswith(".")


# ---------------------------------------------------------------------------------------------- batch stages, real ranks


@pytest.fixture(scope="module")
def stages(alone, tmp_path_factory):
    """What every rank of a group of 1, 2 and 3 said to each case of stage_worker.py."""
    found = {1: stage_worker.answers_of(alone)}
    for world in (2, 3):
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
    # batch by batch: (1, 2) and (3, 6), each over both ranks
    assert per_sample(two, "13|26 of two batches") == pytest.approx([-0.7070068, -0.7070734, 0.7070068, 0.7070734], rel=1e-6)


@pytest.mark.parametrize("case", [*adv.BATCH_STAGES, "grpo, normalized"])
def test_partition_over_ranks_does_not_matter(stages, case):
    flat = [[row for rank in stages[w][f"uneven lengths, {case}"] for row in rank] for w in (1, 2, 3)]
    s, mask = stage_worker.SCORES, stage_worker.MASK
    if case in adv.BATCH_STAGES:
        want = oracles.BATCH[case](s, mask, stage_worker.PENALTY, stage_worker.VALUES, 0.9, 0.8)
    else:
        want = oracles.whiten_tokens(oracles.broadcast(s, mask), mask)
    for got in flat:
        torch.testing.assert_close(torch.tensor(got).double(), torch.tensor(want).double(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("batch_stage", list(adv.BATCH_STAGES))
@pytest.mark.parametrize(
    "case, says",
    [
        ("segment counts differ", "do not agree on the optimizer batches"),
        ("batches in another order", "do not agree on the optimizer batches"),
        ("a list against None", "no segmentation"),
        ("malformed on one rank", "do not add up"),
        ("inf on one rank", "finite|does not fit float32"),
        ("nothing valid anywhere", "no valid value"),
    ],
)
def test_all_ranks_return_and_refuse(stages, batch_stage, case, says):
    for world in (2, 3):
        answers = stages[world][f"{case}, {batch_stage}"]
        if case == "nothing valid anywhere" and batch_stage in ("broadcast", "gae"):  # no statistics: zeros, a counted step
            assert answers == [[[0.0, 0.0], [0.0, 0.0]]] * world
            continue
        assert all(a == answers[0] for a in answers) and answers[0].startswith("RankFailure"), answers
        assert any(part in answers[0] for part in says.split("|"))


# ---------------------------------------------------------------------------------------------- measuring


def test_contributions_add_up_to_the_score():
    components, scored = matrix([[1, 0, 0.5, 1, 1, 0], [0, 1, 1, 0, 3, 2]])
    graded = (components, scored, [1.0, 0.5], torch.tensor([0, 0, 0, 1, 1, 1]))
    for name in NAMES:
        whole = adv.group_scores(name, *graded)
        parts = adv.contributions(name, *graded, whole)
        if adv.ALGORITHMS[name].group_stage != "none":
            torch.testing.assert_close(parts.sum(1), whole, atol=1e-12, rtol=1e-12)


def test_observation_of_rewards_that_nearly_cancel(alone):
    def measured(second, weights=(1.0, 1.0)):
        components, scored = matrix([[0, 1, 2], second])
        graded = (components, scored, weights, torch.zeros(3, dtype=torch.int64))
        meter = du.Meter()
        s = adv.group_scores("gdpo", *graded)
        parts = adv.contributions("gdpo", *graded, s)
        adv.measure(meter, ["a", "b"], *graded, s, parts)
        return meter.reduce(), s

    cancel, s = measured([2, 1.001, 0])
    assert cancel["advantage/cancellation_median"] < 1e-3 and cancel["reward/a_b_correlation"] == pytest.approx(-1, abs=1e-3)
    assert cancel["advantage/distinct_per_group"] == len(set(s.float().tolist()))
    huge, _ = measured([0, 1, 2], (3e38, 3e38))  # sums that a scalar algorithm refuses: observation never raises
    assert huge["reward/total"] == pytest.approx(6e38) and huge["advantage/b_share"] == 0.5
    agree, _ = measured([0, 1, 2])
    assert agree["advantage/cancellation_min"] == 1 and agree["reward/a_b_correlation"] == pytest.approx(1)
    assert agree["advantage/a_share"] == agree["advantage/b_share"] == 0.5
    components, scored = matrix([[1, 2, None, None]])
    meter = du.Meter()
    graded = (components, scored, [1.0], torch.tensor([0, 0, 1, 1]))
    s = adv.group_scores("gdpo", *graded)
    adv.measure(meter, ["a"], *graded, s, adv.contributions("gdpo", *graded, s))
    assert meter.reduce()["reward/a/zero_std"] == 0  # of the second group nothing is known
    constant, _ = measured([1, 1, 1])
    assert "reward/a_b_correlation" not in constant and constant["reward/b/zero_std"] == 1
    assert constant["advantage/a_share"] == 1 and constant["advantage/b_share"] == 0


def test_shadows_are_compared_over_valid_tokens(alone):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    mine, other = torch.tensor([[1.0, 2, 9], [-1, 9, 9]]), torch.tensor([[2.0, 4, -9], [2, -9, -9]])
    meter = du.Meter()
    adv.measure_shadows(meter, {"x": other, "same": mine}, mine, mask)
    got = meter.reduce()
    assert got["advantage/shadow_x_sign_agreement"] == pytest.approx(2 / 3)
    assert got["advantage/shadow_same_correlation"] == pytest.approx(1)
    assert got["advantage/shadow_x_correlation"] == pytest.approx(oracle_correlation([1, 2, -1], [2, 4, 2]))


def oracle_correlation(a, b):
    x, y = [v - oracles.mean(a) for v in a], [v - oracles.mean(b) for v in b]
    return math.fsum(p * q for p, q in zip(x, y)) / math.sqrt(math.fsum(p * p for p in x) * math.fsum(q * q for q in y))


# ---------------------------------------------------------------------------------------------- the check


def config(**changes):
    return dataclasses.replace(train.Config(), **changes)


# capability, an entry that has it, what is asked, what the message says, an entry without it that accepts the same
REFUSALS = [
    ("min_group_size", "grpo", {"samples_per_prompt": 1}, "--samples-per-prompt 1: min_group_size = 2", "ppo"),
    ("forbids_normalize_advantages", "gdpo", {"normalize_advantages": True}, "--normalize-advantages: forbids_", "grpo"),
    ("forbids_normalize_advantages", "dr_grpo", {"normalize_advantages": True}, "scale that is kept on purpose", "dapo"),
    (
        "requires_on_policy_updates",
        "rloo",
        {"optimizer_steps_per_rollout": 4},
        "4 optimizer steps a rollout: requires_",
        "grpo",
    ),
    ("requires_on_policy_updates", "rloo", {"epochs_per_rollout": 2}, "2 optimizer steps a rollout: requires_", "gspo"),
    ("requires_on_policy_updates", "rloo", {"push_every": 2}, "--push-every 2: requires_on_policy_updates", "cispo"),
    ("supports_fully_async", "gdpo", {"push_every": 2}, "--push-every 2: supports_fully_async = False", "sapo"),
    ("requires_rewards_normalization", "rloo", {"normalize_rewards": False}, "--no-normalize-rewards: requires_", "grpo"),
    ("group_stage", "ppo", {"normalize_rewards": False}, "--no-normalize-rewards: group_stage = none of ppo", "grpo"),
    ("allows_reward_post_process_hooks", "gdpo", {"reward_hook": "a.py:f"}, "--reward-hook a.py:f: allows_", "grpo"),
    (
        "forbids_reward_side_kl",
        "grpo",
        {"kl_place": "reward"},
        "--kl-place reward: forbids_reward_side_kl",
        "reinforce_plus_plus",
    ),
    ("requires_kl", "reinforce_plus_plus", {"kl_coef": 0.0}, "--kl-coef 0: requires_kl", "ppo"),
    ("requires_kl", "reinforce_plus_plus", {"kl_place": "loss"}, "--kl-place loss: requires_kl", "ppo"),
    ("needs_critic", "grpo", {"critic_lr": 1e-4}, "--critic-lr 0.0001: needs_critic = False", "ppo"),
    ("needs_critic", "grpo", {"critic_warmup_steps": 1, "value_clip": 0.1}, "--critic-warmup-steps 1 --value-clip 0.1", "ppo"),
]


@pytest.mark.parametrize("capability, refuses, asked, says, accepts", REFUSALS)
def test_every_capability_refuses_and_accepts(capability, refuses, asked, says, accepts):
    (message,) = adv.check(config(algorithm=refuses, **asked))
    assert says in message and capability in message and f"of {refuses} refuses it; " in message
    assert ("Use " in message or "Drop " in message) and accepts in message.rpartition("--algorithm ")[2].split("|")
    assert adv.check(config(algorithm=accepts, **asked)) == []


@pytest.mark.parametrize(
    "capability, asked",
    [
        ({"advantage_normalization": "token_global"}, {"normalize_advantages": True}),
        ({"uses_reward_components": True}, {"normalize_rewards": False}),
        ({"uses_reward_components": True}, {"reward_hook": "a.py:f"}),
    ],
)
def test_capabilities_that_only_come_together_refuse_alone_too(monkeypatch, capability, asked):
    monkeypatch.setitem(adv.ALGORITHMS, "one", dataclasses.replace(adv.ALGORITHMS["grpo"], **capability))
    (message,) = adv.check(config(algorithm="one", **asked))
    assert next(iter(capability)) in message and "Use " in message


GROUPED = {"min_group_size": 2, "forbids_reward_side_kl": True}
CAPABILITIES = {  # ALGORITHMS' table: what is not the default
    "grpo": GROUPED,
    "dr_grpo": GROUPED | {"forbids_normalize_advantages": True},
    "dapo": GROUPED,
    "gspo": GROUPED,
    "sapo": GROUPED,
    "cispo": GROUPED,
    "rloo": GROUPED
    | {"requires_on_policy_updates": True, "forbids_normalize_advantages": True, "requires_rewards_normalization": True},
    "reinforce_plus_plus": {
        "advantage_normalization": "token_global",
        "forbids_normalize_advantages": True,
        "requires_kl": True,
    },
    "reinforce_plus_plus_baseline": GROUPED
    | {"advantage_normalization": "token_global", "forbids_normalize_advantages": True}
    | {"requires_rewards_normalization": True, "allows_reward_post_process_hooks": False},
    "ppo": {"needs_critic": True},
    "gdpo": GROUPED
    | {"uses_reward_components": True, "supports_fully_async": False, "advantage_normalization": "sequence"}
    | {"forbids_normalize_advantages": True, "requires_rewards_normalization": True}
    | {"allows_reward_post_process_hooks": False},
}


def test_capabilities_are_those_of_the_table():
    fields = dataclasses.fields(adv.Algorithm)
    names = [f.name for f in fields]
    flags = fields[names.index("uses_reward_components") :]
    found = {
        n: {f.name: getattr(a, f.name) for f in flags if getattr(a, f.name) != f.default} for n, a in adv.ALGORITHMS.items()
    }
    assert found == CAPABILITIES


def test_every_capability_has_a_test():
    fields = [f.name for f in dataclasses.fields(adv.Algorithm)]
    capabilities = set(fields[fields.index("uses_reward_components") :])
    assert capabilities == {r[0] for r in REFUSALS} - {"group_stage"} | {"advantage_normalization", "uses_reward_components"}


def test_check_reports_every_violation_at_once():
    assert all(adv.check(config(algorithm=name)) == [] for name in NAMES)
    wrong = config(algorithm="rloo", samples_per_prompt=1, normalize_advantages=True, epochs_per_rollout=2, kl_place="reward")
    assert len(adv.check(wrong)) == 4
    assert adv.check(config(algorithm="grop")) == [f"--algorithm grop: unknown; there are {', '.join(NAMES)}"]
    named = adv.check(config(algorithm="gdpo", push_every=2))[0].rpartition("--algorithm ")[2].split("|")
    assert "rloo" not in named and all(adv.check(config(algorithm=n, push_every=2)) == [] for n in named)


def test_shadows_are_checked():
    assert adv.check(config(algorithm="grpo", shadow=("gdpo", "rloo", "reinforce_plus_plus"))) == []
    assert adv.check(config(algorithm="ppo", shadow=("grpo", "ppo"))) == []
    assert "--shadow gpdo: unknown" in adv.check(config(shadow=("gpdo",)))[0]
    assert "--shadow ppo: needs_critic" in adv.check(config(algorithm="grpo", shadow=("ppo",)))[0]
    assert "--shadow rloo: min_group_size" in adv.check(config(algorithm="ppo", samples_per_prompt=1, shadow=("rloo",)))[0]


def test_registry_entries_exist():
    for name, a in adv.ALGORITHMS.items():
        assert a.group_stage in adv.GROUP_STAGES and a.batch_stage in adv.BATCH_STAGES, name
        assert a.policy_loss in losses.POLICY_LOSSES and a.aggregation in losses.AGGREGATIONS, name
        assert a.kl_estimator in losses.KL_ESTIMATORS and a.kl_place in ("loss", "reward"), name
