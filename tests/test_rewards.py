"""rewards.py: reading answers, the reward functions, and what the matrix refuses."""

import numpy as np
import pytest
import torch

import rewards as rw

TAIL = " and the reasoning above confirms this result is consistent."


@pytest.mark.parametrize("length", [0, 299, 300, 301, 5000])
def test_answer_is_found_however_much_follows(length):
    response = "2+40=42\n#### 42\n" + (TAIL * 100)[:length]
    assert rw.correctness(response, {"scorer": "number", "answer": "6*7=42\n#### 42"}) == 1.0


@pytest.mark.parametrize(
    "response, value",
    [
        ("<answer>1,234</answer> and 9 more words", 1.0),
        ("so it is \\boxed{1234}.", 1.0),
        ("the total is $1,234.00", 1.0),
        ("#### -1234", 0.0),
        ("<answer></answer> 1234", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
    ],
)
def test_number_scorer(response, value):
    assert rw.correctness(response, {"scorer": "number", "answer": "#### 1,234"}) == value


@pytest.mark.parametrize("answer", [None, "", "no number", "\\frac{3}{7}", "3 or 4"])
def test_number_scorer_abstains_without_one_number_as_target(answer):
    assert rw.correctness("#### 7", {"scorer": "number", "answer": answer}) is None


@pytest.mark.parametrize(
    "text, found",
    [
        ("so 10-5 and 5 - 7", [10, 5, 5, 7]),
        ("-5, (-3) and x=-2", [-5, -3, -2]),
        ("1,234,567.5 but 1,2", [1234567.5, 1, 2]),
        (".5 and -.25", [0.5, -0.25]),
        ("20-30%", [20, 30]),
        ("\u22125", [-5]),
    ],
)
def test_numbers_in_a_text(text, found):
    assert rw.numbers_in(text) == found


def test_reasoning_gym_scorer():
    row = {"scorer": "rg:chain_sum", "answer": "-48", "metadata": {}}
    assert rw.correctness("40 - 88 = -48 <answer>-48</answer>", row) == 1.0
    assert rw.correctness("40 - 88 = 48 <answer>48</answer>", row) < 0.5


def test_an_answer_that_a_scorer_cannot_read_scores_zero_and_is_said(capsys):
    import reasoning_gym

    row = {**reasoning_gym.create_dataset("prime_factorization", size=1, seed=0)[0], "scorer": "rg:prime_factorization"}
    assert [rw.correctness("abc", row) for _ in range(2)] == [0.0, 0.0]
    assert capsys.readouterr().err.count("cannot read 'abc'") == 1


@pytest.mark.parametrize(
    "response, value",
    [
        ("x <answer>7</answer>", 1.0),
        ("<answer> </answer>", 0.0),
        ("<answer>7", 0.0),
        ("</answer>7<answer>", 0.0),
        ("<answer>7</answer><answer>7</answer>", 0.0),
        ("7", 0.0),
    ],
)
def test_format(response, value):
    assert rw.format_tag(response, {}) == value


@pytest.mark.parametrize(
    "value, number", [(True, 1.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0), (1e30, 1e30)]
)
def test_values_that_count(monkeypatch, value, number):
    monkeypatch.setitem(rw.REWARDS, "mine", lambda response, row: value)
    components, scored = rw.score(["mine"], ["a", "b"], [{}, {}])
    assert components.tolist() == [[number]] * 2 and scored.all() and components.dtype == torch.float64


def test_none_abstains(monkeypatch):
    monkeypatch.setitem(rw.REWARDS, "mine", lambda response, row: None if response == "a" else 2.0)
    components, scored = rw.score(["mine"], ["a", "b"], [{}, {}])
    assert scored.tolist() == [[False], [True]] and components[1, 0] == 2.0


@pytest.mark.parametrize(
    "value, says",
    [
        (float("nan"), "not finite"),
        (float("-inf"), "not finite"),
        (1e300, "beyond float32"),
        ("1", "type str"),
        ([1.0], "type list"),
    ],
)
def test_values_that_are_refused_by_name(monkeypatch, value, says):
    monkeypatch.setitem(rw.REWARDS, "mine", lambda response, row: value)
    with pytest.raises(ValueError, match=f"'mine'.*{says}"):
        rw.score(["mine"], ["a"], [{}])


def test_weights():
    names = ["correctness", "format"]
    assert rw.parse_weights(names, []) == [1.0, 1.0]
    assert rw.parse_weights(names, ["format=0.5", "correctness=0"]) == [0.0, 0.5]
    for weights, says in {
        ("formt=1",): "out of correctness, format",
        ("format=x",): "not a number",
        ("format=1e300",): "fit float32",
        ("format=nan",): "finite",
        ("format=1e-50", "correctness=1e-50"): "all weights are zero",
    }.items():
        with pytest.raises(ValueError, match=says):
            rw.parse_weights(names, weights)
    with pytest.raises(ValueError, match="did you mean format"):
        rw.parse_weights(["formt"], [])
    with pytest.raises(ValueError, match="each once"):
        rw.parse_weights(["format", "format"], [])
