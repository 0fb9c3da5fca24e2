"""rewards.py: reading answers, the built-in graders, what values are refused, and the processes that grade."""

import asyncio
import itertools
import math
import threading
import time
from collections import Counter

import numpy as np
import psutil
import pytest
import torch

import rewards as rw

TAIL = " and the reasoning above confirms this result is consistent."
NUMBER_ROW = {"scorer": "number", "answer": "6*7=42\n#### 42"}

# ---------------------------------------------------------------------------------------------- reading answers


@pytest.mark.parametrize("grader", [rw.correctness, rw.gsm8k, rw.exact_match, rw.math_answer])
@pytest.mark.parametrize("mark", ["#### 42\n", "<answer>42</answer>", "\\boxed{42}"])
@pytest.mark.parametrize("length", [0, 10, 299, 300, 301, 5000])
def test_answer_is_found_however_much_follows(grader, mark, length):
    assert grader(f"2+40=42\n{mark}" + (TAIL * 100)[:length], NUMBER_ROW) == 1.0


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


@pytest.mark.parametrize("place", list(rw.ANSWER_PLACES))
def test_answers_are_looked_for_where_the_flag_says(place):
    texts = {"hash": "1 #### 7\n2", "boxed": "1 \\boxed{7} 2", "tag": "1 <answer>7</answer> 2", "last": "1 2 7"}
    found = {name: rw.gsm8k(text, {"answer": "7"}, answer_in=place) for name, text in texts.items()}
    assert found == {name: float(place in ("any", name)) for name in texts}


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


@pytest.mark.parametrize("grader", [rw.gsm8k, rw.math_answer])
@pytest.mark.parametrize(
    "response, value",
    [
        ("#### Solution\nso \\boxed{42}", 1.0),
        ("#### Step 2\nso \\boxed{42}", 1.0),
        ("\\boxed{42}\n#### Check\nok", 1.0),
        ("\\boxed{42} <answer>41</answer>", 0.0),
        ("<answer>41</answer> \\boxed{42}", 0.0),
    ],
)
def test_headings_are_no_answers(grader, response, value):
    assert grader(response, NUMBER_ROW) == value


def test_boxes_nest():
    assert rw.boxed("\\boxed{1} or \\boxed{\\frac{1}{2}} or \\boxed{3") == "\\frac{1}{2}"
    assert rw.boxed("\\boxed {7}") == "7" and rw.boxed("boxed{7}") is None
    assert rw.final_answer("so \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"


# ---------------------------------------------------------------------------------------------- built-in graders


def test_reasoning_gym_scorer():
    row = {"scorer": "rg:chain_sum", "answer": "-48", "metadata": {}}
    for grader in (rw.correctness, rw.reasoning_gym):
        assert grader("40 - 88 = -48 <answer>-48</answer>", row) == 1.0
        assert grader("40 - 88 = 48 <answer>48</answer>", row) < 0.5
    assert rw.reasoning_gym("7", NUMBER_ROW) is None


MATH = [
    ("\\boxed{\\frac13}", "1/3", 1.0),
    ("so $x = \\frac{1}{3}$", "0.3333333", 1.0),
    ("<answer>\\frac{2}{6}</answer>", "\\boxed{\\frac{1}{3}}", 1.0),
    ("#### (x+1)^2", "$x^2+2x+1$", 1.0),
    ("the answer is 12", "#### 12", 1.0),
    ("\\boxed{\\{1,2\\}}", "\\{2, 1\\}", 1.0),
    ("\\boxed{0.34}", "1/3", 0.0),
    ("", "1/3", 0.0),
    ("<answer></answer>", "1/3", 0.0),
    ("no idea", "42", 0.0),
    ("\\boxed{7}", "", None),
]


@pytest.mark.parametrize("response, answer, value", MATH)
def test_math(response, answer, value):
    assert rw.math_answer(response, {"answer": answer}) == value


class LoadMath(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return rw.math_answer("\\boxed{\\frac13}", {"answer": "1/3"})


def test_math_works_in_threads_and_loaders():
    """math-verify's own limits raise ValueError outside the main thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(rw.math_answer("\\boxed{\\frac13}", {"answer": "1/3"})))
    thread.start()
    thread.join()
    found.append(asyncio.run(asyncio.to_thread(rw.math_answer, "\\boxed{\\frac13}", {"answer": "1/3"})))
    found += next(iter(torch.utils.data.DataLoader(LoadMath(), batch_size=2, num_workers=1))).tolist()
    assert found == [1.0] * 4


LETTERS = {"answer": "C", "choices": ["red", "blue", "green", "grey"]}


@pytest.mark.parametrize(
    "response, row, value",
    [
        ("<answer>C</answer>", LETTERS, 1.0),
        ("<answer>(c) green</answer>", LETTERS, 1.0),
        ("A is wrong, so the answer is (C).", LETTERS, 1.0),
        ("Answer: B. No: answer: C", LETTERS, 1.0),
        ("C", LETTERS, 1.0),
        ("C.", LETTERS, 1.0),
        ("\\boxed{B}", LETTERS, 0.0),
        ("Certainly green", LETTERS, 0.0),
        ("A or C", LETTERS, 0.0),
        ("A or C", {**LETTERS, "answer": "A"}, 0.0),
        ("A quick look says none.", {**LETTERS, "answer": "A"}, 0.0),
        ("The answer is a green one, so C", {**LETTERS, "answer": "A"}, 0.0),
        ("The answer is A green one", {**LETTERS, "answer": "A"}, 0.0),
        ("The answer is **C**", LETTERS, 1.0),
        ("**C**", LETTERS, 1.0),
        ("the answer is: (C) green", LETTERS, 1.0),
        ("\\boxed{\\text{C}}", LETTERS, 1.0),
        ("C: green it is", LETTERS, 1.0),
        ("c", LETTERS, 0.0),
        ("The correct answer is option C", LETTERS, 1.0),
        ("Answer is \\(C\\)", LETTERS, 1.0),
        ("Option C", LETTERS, 1.0),
        ("<answer>green</answer>", LETTERS, 1.0),
        ("<answer>red</answer>", LETTERS, 0.0),
        ("C is wrong, so it must be B", LETTERS, 0.0),
        ("the answer is a mystery", {**LETTERS, "answer": "A"}, 0.0),
        ("C", {"answer": "C", "options": {"A": "w", "C": "x"}}, 1.0),
        ("C", {**LETTERS, "answer": 2.0}, 1.0),
        ("#### L", {"answer": 11, "choices": list("abcdefghijkl")}, 1.0),
        ("C", {"answer": 30, "choices": ["x"] * 40}, None),
        ("", LETTERS, 0.0),
        ("C", {**LETTERS, "answer": 2}, 1.0),
        ("C", {**LETTERS, "answer": "green"}, 1.0),
        ("C", {"answer": "(C)"}, 1.0),
        ("#### 2", {"answer": "2", "choices": {"text": ["a", "b"], "label": ["1", "2"]}}, 1.0),
        ("C", {**LETTERS, "answer": "pink"}, None),
        ("E", {**LETTERS, "answer": "E"}, None),
    ],
)
def test_multiple_choice(response, row, value):
    assert rw.multiple_choice(response, row) == value


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
    assert rw.tag_format(response, {}) == value


@pytest.mark.parametrize(
    "response, value",
    [
        ("<think>a</think> <answer>b</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
    ],
)
def test_format_of_several_tags_in_order(response, value):
    assert rw.tag_format(response, {}, format_tags=("think", "answer")) == value


def test_length_overlong_repetition_truncated_and_exact():
    def row(tokens, reason="stop"):
        return {"response_tokens": tokens, "finish_reason": reason}

    assert rw.length("", row(25), max_response_tokens=100) == 0.75
    penalties = [rw.overlong("", row(n), max_response_tokens=100, overlong_buffer=20) for n in (0, 80, 85, 90, 100)]
    assert penalties == [0, 0, -0.25, -0.5, -1] and rw.overlong("", row(90), max_response_tokens=100) == -0.5
    assert rw.repetition("a b c d", {}) == 0 and rw.repetition("a b", {}) == 0
    assert rw.repetition("a a a a a", {}) == pytest.approx(1 / 3 - 1)
    assert rw.repetition("a b a b", {}, repetition_ngram=2) == pytest.approx(2 / 3 - 1)
    assert [rw.truncated("", row(9, r)) for r in ("stop", "length")] == [0, -1]
    assert rw.exact_match(" the  cat ", {"answer": "the cat"}) == 1 and rw.exact_match("The cat", {"answer": "the cat"}) == 0
    for grader in (rw.exact_match, rw.math_answer):  # a column of floats, and rows without an answer
        assert [grader("20", {"answer": a}) for a in (20.0, 20, "20", None, math.nan, " ")] == [1, 1, 1, None, None, None]


@pytest.fixture(scope="module")
def classifier(embedded, tmp_path_factory):
    """A random sequence classifier, with the labels asked for."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    def make(num_labels, **more):
        torch.manual_seed(num_labels)
        sizes = {"vocab_size": 49152, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        config = LlamaConfig(**sizes, num_attention_heads=2, num_labels=num_labels, **more)
        path = tmp_path_factory.mktemp("classifier")
        LlamaForSequenceClassification(config).save_pretrained(path)
        AutoTokenizer.from_pretrained(embedded).save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("pad", [2, None])
def test_reward_model_scores_question_and_response(classifier, pad):
    """Against the model alone on each text; batches, padding and order do not matter, long texts abstain."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = classifier(1, pad_token_id=pad, max_position_embeddings=90)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    responses = [f"It is {'very ' * (i % 7)}{i}." for i in range(20)] + ["long " * 100]
    rows = [{"question": f"What is {i}?"} for i in range(21)]
    with rw.Graders({"reward_model": rw.REWARDS["reward_model"]}, {"reward_model": {"reward_model": str(path)}}) as graders:
        graded = graders.score(["reward_model"], responses, rows)
        assert graders.host is None  # the model stays in this process
    assert graded.scored[:, 0].tolist() == [True] * 20 + [False]
    for response, row, value in zip(responses[:20], rows, graded.components[:, 0]):
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=False)
        assert model(ids).logits.item() == pytest.approx(value.item(), abs=1e-5)


def test_reward_model_without_one_trained_label_is_refused(classifier, tiny):
    with pytest.raises(ValueError, match=r"--reward-model .* has 2 labels"):
        rw.RewardModel(reward_model=str(classifier(2)))
    with pytest.raises(ValueError, match=r"untrained \['score.weight'\]"):
        rw.RewardModel(reward_model=str(tiny))


# ---------------------------------------------------------------------------------------------- values


def score(reward, responses, rows=None, **options):
    """One reward, called "mine", on the responses."""
    reward = reward if isinstance(reward, rw.Reward) else rw.Reward(reward)
    with rw.Graders({"mine": reward}, workers=2, **options) as graders:
        return graders.score(["mine"], responses, rows or [{}] * len(responses))


@pytest.mark.parametrize("in_process", [False, True])
def test_values_that_count(in_process):
    values = [True, 1, 0.5, np.float32(0.5), np.int64(3), np.bool_(True), np.array(2.0), torch.tensor(0.5), 1e30]
    graded = score(rw.Reward(lambda r, row: values[int(r)], in_process=in_process), [str(i) for i in range(9)])
    assert graded.components[:, 0].tolist() == [1, 1, 0.5, 0.5, 3, 1, 2, 0.5, 1e30]
    assert graded.scored.all() and graded.components.dtype == torch.float64 and graded.names == ("mine",)


def test_none_abstains_and_no_sample_is_no_error():
    graded = score(lambda response, row: None if response == "a" else 2.0, ["a", "b"])
    assert graded.scored.tolist() == [[False], [True]] and graded.components.tolist() == [[0], [2]]
    assert score(lambda response, row: 1.0, []).components.shape == (0, 1)


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    "value, says",
    [
        (math.nan, "mine returned nan, which is not finite; expected a finite number or None"),
        (-math.inf, "mine returned -inf, which is not finite"),
        (1e300, "mine returned 1e[+]300, beyond float32; expected at most 3.40282e[+]38"),
        (10**400, "beyond float32"),
        ("1", "mine returned '1' of type str; expected a number or None"),
        ([1.0], r"mine returned \[1.0\] of type list"),
        (1j, "of type complex"),
        (7, "mine returned 7, outside the range 0 to 5 that it declares"),
        ({"a": 1}, r"a mapping, and declares no components: declare Reward\(function, components=\('a',\)\)"),
    ],
)
def test_values_that_are_refused_by_name(value, says, in_process):
    reward = rw.Reward(lambda response, row: value, range=(0, 5) if value == 7 else None, in_process=in_process)
    with pytest.raises(ValueError, match=says):
        score(reward, ["a"])


@pytest.mark.parametrize("in_process", [True])
@pytest.mark.parametrize(
    "value, says",
    [
        ([1.0], "mine returned 1 values; expected 3, one a response"),
        (1.0, "mine returned 1.0 of type float; expected a list of 3 values"),
        ([], "returned 0 values; expected 3"),
        ([1.0] * 2, "returned 2 values"),
        ([1.0] * 4, "returned 4 values"),
        (torch.ones(3, 1), r"an array of shape \(3, 1\); expected \(3,\)"),
        (np.float64(1.0), r"an array of shape \(\)"),
        ({"a": 1}, r"\{'a': 1\} of type dict; expected a list"),
        ("abc", "'abc' of type str"),
        (None, "None of type NoneType"),
        ([1.0, "x", 1.0], "mine returned 'x' of type str"),
        ([1.0, math.nan, 1.0], "not finite"),
    ],
)
def test_a_batch_of_another_count_or_shape_is_refused(value, says, in_process):
    with pytest.raises(ValueError, match=says):
        score(rw.Reward(lambda responses, rows: value, batched=True, in_process=in_process), ["a"] * 3)


def test_a_generator_is_no_batch():
    with pytest.raises(ValueError, match="of type generator"):
        score(rw.Reward(lambda responses, rows: (1.0 for _ in rows), batched=True), ["a"])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_batches_that_count(kind):
    graded = score(rw.Reward(lambda responses, rows: kind([float(r) for r in responses]), batched=True), ["1", "2", "4"])
    assert graded.components[:, 0].tolist() == [1, 2, 4]


def test_a_mapping_gives_named_components():
    def grade(response, row):
        return {"b": None, "a": len(response)} if response else None

    reward = rw.Reward(grade, components=("a", "b"))
    assert rw.component_names({"x": rw.Reward(grade), "mine": reward}) == ("x", "mine.a", "mine.b")
    graded = score(reward, ["xy", ""])
    assert graded.names == ("mine.a", "mine.b") and graded.components.tolist() == [[2, 0], [0, 0]]
    assert graded.scored.tolist() == [[True, False], [False, False]]
    for value in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, 1.0):
        with pytest.raises(ValueError, match=r"mine returned .*; expected a mapping of a, b"):
            score(rw.Reward(lambda r, row: value, components=("a", "b")), ["x"])  # noqa: B023
    batched = rw.Reward(lambda rs, rows: [{"a": 1, "b": len(r)} for r in rs], components=("a", "b"), batched=True)
    assert score(batched, ["x", "yz"]).components.tolist() == [[1, 1], [1, 2]]


def test_async_rewards_wait_together():
    async def grade(response, row):
        await asyncio.sleep(60 if response == "hang" else 0.3)
        if response == "raise":
            raise TimeoutError("its own")
        return float(len(response))

    began = time.monotonic()
    graded = score(grade, ["a"] * 40 + ["hang", "raise", "abc"], timeout=2)
    assert time.monotonic() - began < 13  # what they would take one after another
    assert graded.components[:40].sum() == 40 and graded.components[-1] == 3 and graded.scored.sum() == 41
    assert graded.failures["mine"] == {"timeout": 1, "error": 1}

    async def blocks(response, row):
        if response == "hang":
            while True:
                pass
        return 1.0

    graded = score(blocks, ["a", "hang", "b"], timeout=0.5)  # it hangs the whole loop: each is asked alone then
    assert graded.scored[:, 0].tolist() == [True, False, True] and graded.failures["mine"] == {"timeout": 1}

    async def many(responses, rows):
        await asyncio.sleep(0)
        return [1.0] * len(rows)

    assert score(rw.Reward(many, batched=True), ["a", "b"]).components.tolist() == [[1], [1]]


def test_classes_are_made_once_with_their_settings():
    class Counting:
        def __init__(self, *, start):
            self.count = start

        def __call__(self, response, row):
            self.count += 1
            return self.count

    with rw.Graders({"mine": rw.Reward(Counting)}, {"mine": {"start": 5}}, workers=1) as graders:
        assert graders.score(["mine"], ["a"] * 3, [{}] * 3).components[:, 0].tolist() == [6, 7, 8]
        assert graders.score(["mine"], ["a"], [{}]).components.item() == 9


def test_rewards_of_a_users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from rewards import Reward\n"
        "import neighbour\n"
        "def tone(response, row):\n    return float(row['want'] in response)\n"
        "def score(response, row):\n    return 1.0\n"
        "both = Reward(lambda response, row: {'a': 1, 'b': 2}, components=('a', 'b'))\n"
    )
    (tmp_path / "neighbour.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').open('a').write('x')\n")
    rewards = rw.resolve(["format", f"{path}:tone", f"{path}:both"])
    assert (tmp_path / "neighbour.py.ran").read_text() == "x"
    assert rw.component_names(rewards) == ("format", "tone", "both.a", "both.b")
    with rw.Graders(rewards) as graders:
        graded = graders.score(list(rewards), ["yes <answer>1</answer>", "no"], [{"want": "yes"}, {"want": "yes"}])
    assert graded.components.tolist() == [[1, 1, 1, 2], [0, 0, 1, 2]]
    for asked, says in {
        ("formt",): "formt: unknown .did you mean format..; there are correctness, gsm8k, rg, math",
        ("format", "format"): "two are called format",
        (f"{path}:score",): "score is what a metric or a column of the samples is called; rename the function",
        (f"{path}:nothing",): "has no function nothing; it has tone, score",
        (f"{path.parent}/none.py:tone",): "none.py .seen from .* gave FileNotFoundError",
        (): "name at least one",
    }.items():
        with pytest.raises(ValueError, match=says):
            rw.resolve(asked)


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
        ("format=1", "format=2"): "format is given twice",
    }.items():
        with pytest.raises(ValueError, match=says):
            rw.parse_weights(names, weights)


# ---------------------------------------------------------------------------------------------- hostile graders


def hostile(kind, out=None):
    """A grader that is good except on the response "bad", where it does something; in the file `out` it leaves a pid."""

    def grade(response, row):
        import ctypes
        import os
        import pathlib
        import signal
        import subprocess
        import sys
        import threading
        import time

        if response != "bad":
            time.sleep(0.08 if kind == "forks and returns twice" else 0)  # so that a second answer would meet a later call
            return float(response)
        if kind == "hangs in C":
            return 5 ** (5 ** (5**5))
        if kind == "hangs ignoring signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        if kind == "exits":
            os._exit(0)
        if kind == "sys.exit":
            sys.exit(3)
        if kind == "raises":
            raise ValueError("\x1b[2Jboo")
        if kind == "crashes":
            return ctypes.string_at(0)
        if kind == "eats memory":
            return float(len(bytearray(8 << 30)))
        if kind == "recurses":
            return grade("bad", row) + 1
        if kind == "forks and hangs":
            if os.fork() == 0:
                pathlib.Path(out).write_text(str(os.getpid()))
                time.sleep(1000)
            time.sleep(1000)
        if kind == "forks and returns":
            if os.fork() == 0:
                pathlib.Path(out).write_text(str(os.getpid()))
                time.sleep(1000)
            time.sleep(0.2)
        if kind == "forks and returns twice" and os.fork():
            time.sleep(0.12)  # the child is the first to return
        if kind == "leaves a daemon":
            subprocess.Popen(["sh", "-c", f"setsid sh -c 'echo $$ > {out}; exec sleep 1000' & sleep 0.3"]).wait()
        if kind == "leaves a thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        if kind == "closes everything":
            os.closerange(3, 256)
        if kind == "prints":
            print("forged" * 10000)
            print("forged", file=sys.stderr)
            os.write(1, b"forged")
            os.system("echo forged; echo forged >&2")
        if kind == "kills the host":
            pathlib.Path(out).write_text(str(os.getpid()))
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        if kind == "leaves the folder":
            os.chdir("/")
        if kind == "writes half a message":
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"\x00\x00\x01\x00half")
                except OSError:
                    pass
            time.sleep(1000)
        return 1.0

    return grade


LOST = {
    "hangs in C": "timeout",
    "hangs ignoring signals": "timeout",
    "forks and hangs": "timeout",
    "exits": "error",
    "sys.exit": "error",
    "raises": "error",
    "crashes": "error",
    "eats memory": "error",
    "recurses": "error",
    "closes everything": "error",
    "kills the host": "error",
    "writes half a message": "error",
}
KEPT = ["forks and returns", "forks and returns twice", "leaves a daemon", "leaves a thread", "leaves the folder", "prints"]


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def below():
    """Processes below this one."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("kind", [*LOST, *KEPT])
def test_a_hostile_call_costs_its_own_sample_alone(kind, tmp_path, capfd):
    """The others are right, nothing it started is left, the next batch works, and what it prints goes nowhere."""
    before, out = below(), tmp_path / "pid"
    responses = [str(i) for i in range(12)]
    responses[5] = "bad"
    reward = rw.Reward(hostile(kind, str(out)))
    with rw.Graders({"mine": reward}, timeout=0.5, workers=1 if kind == "kills the host" else 3, memory_gib=1) as graders:
        for _ in range(2):
            graded = graders.score(["mine"], responses, [{}] * 12)
            lost = [] if kind in KEPT else [5]
            assert (~graded.scored[:, 0]).nonzero()[:, 0].tolist() == lost
            want = [1.0 if i == 5 and not lost else 0.0 if i == 5 else float(i) for i in range(12)]
            assert graded.components[:, 0].tolist() == want
            assert graded.failures["mine"] == (Counter({LOST[kind]: 1}) if lost else Counter())
            if out.exists():
                assert not alive(int(out.read_text()))
            workers = [psutil.Process(w.pid) for w in graders.workers]  # nothing is left in those that go on either
            assert all(w.num_threads() == 1 and w.cwd() == str(rw.Path.cwd()) for w in workers)
        assert kind not in ("forks and hangs", "forks and returns", "leaves a daemon", "kills the host") or out.exists()
    assert below() == before
    said = capfd.readouterr()
    assert "forged" not in said.out + said.err and "\x1b" not in said.err
    assert bool(lost) == ("reward mine failed on 1 of 12 samples; the first, sample 5: " in said.err)


def test_a_killed_host_costs_the_calls_that_were_running(capfd):
    """Three workers are busy when one of them kills the host: at most these three are lost, all others are right."""

    def grade(response, row):
        import os
        import time

        time.sleep(0.2)
        if response == "5":
            os.kill(os.getppid(), 9)
        return float(response)

    before = below()
    with rw.Graders({"mine": rw.Reward(grade)}, workers=3) as graders:
        hosts = [graders.host.pid]
        for _ in range(2):
            graded = graders.score(["mine"], [str(i) for i in range(12)], [{}] * 12)
            lost = (~graded.scored[:, 0]).nonzero()[:, 0].tolist()
            assert len(lost) <= 3 and graded.failures["mine"]["error"] == len(lost)
            assert graders.host.pid not in hosts and not any(map(alive, hosts))
            hosts.append(graders.host.pid)
            assert all(graded.components[i] == i for i in range(12) if i not in lost)
    assert below() == before


def test_a_grader_that_never_answers_is_given_up(capfd):
    """Its other calls of the batch are timeouts at once; one answer in between starts the count again."""

    def grade(response, row):
        import time

        time.sleep(1000 if response == "hang" else 0)
        return 1.0

    with rw.Graders({"mine": rw.Reward(grade)}, workers=2, timeout=0.2) as graders:
        began = time.monotonic()
        graded = graders.score(["mine"], ["hang"] * 400, [{}] * 400)
        assert graded.failures["mine"] == {"timeout": 400} and time.monotonic() - began < 20  # one by one: 40 s
        assert graders.score(["mine"], ["a"], [{}]).components.item() == 1
        graded = graders.score(["mine"], (["hang"] * 6 + ["a"] * 2) * 3, [{}] * 24)
        assert graded.failures["mine"] == {"timeout": 18} and graded.components.sum() == 6


def test_each_worker_has_an_instance_of_its_own():
    """Random states and files are not shared, and what an instance starts for itself lives as long as its worker."""

    class Served:
        def __init__(self):
            import subprocess

            import numpy as np

            self.server, self.random = subprocess.Popen(["sleep", "1000"]).pid, np.random.default_rng()

        def __call__(self, response, row):
            import os
            import time

            os.kill(self.server, 0)
            time.sleep(0.1)
            return {"server": self.server, "draw": self.random.random()}

    servers, draws = set(), []
    with rw.Graders({"mine": rw.Reward(Served, components=("server", "draw"))}, workers=2) as graders:
        for _ in range(3):
            graded = graders.score(["mine"], ["a"] * 4, [{}] * 4)
            assert graded.scored.all()
            servers |= set(graded.components[:, 0].tolist())
            draws += graded.components[:, 1].tolist()
    assert len(servers) == 2 and len(set(draws)) == 12 and not any(alive(int(s)) for s in servers)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda f: rw.Reward(3), "expected a function or a class"),
        (lambda f: rw.Reward(f, components="lines"), "expected a tuple of different names"),
        (lambda f: rw.Reward(f, components=("a", "a")), "expected a tuple of different names"),
        (lambda f: rw.Reward(f, components=("a/b",)), "expected a tuple of different names"),
        (lambda f: rw.Reward(f, range=(1, 0)), "expected .smallest, largest."),
    ],
)
def test_a_reward_that_cannot_be_is_refused_as_it_is_declared(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong(lambda response, row: 1.0)


def test_a_worker_that_starts_as_the_host_is_killed_is_started_again(tmp_path):
    """The second instance that is ever made kills the host, before its worker has said that it is ready."""
    flags = [tmp_path / "first", tmp_path / "second"]

    class Made:
        def __init__(self):
            import os
            import time

            if flags[0].exists() and not flags[1].exists():
                flags[1].touch()
                os.kill(os.getppid(), 9)
                time.sleep(100)
            flags[0].touch()

        def __call__(self, response, row):
            return 1.0

    with rw.Graders({"mine": rw.Reward(Made)}, workers=2) as graders:
        graders.check()
        graded = graders.score(["mine"], ["a"] * 6, [{}] * 6)
    assert flags[1].exists() and graded.components.sum() >= 5  # the call that was running may be lost


def test_a_stopped_host_is_replaced(monkeypatch):
    """It answers no more: after a while it is killed, and its workers with it."""
    with rw.Graders({"mine": rw.Reward(lambda response, row: float(response))}, workers=2) as graders:
        graders.score(["mine"], ["1", "2"], [{}] * 2)
        first = graders.host.pid
        monkeypatch.setattr(rw, "ANSWER_SECONDS", 0.5)
        psutil.Process(first).suspend()
        graders.score(["mine"], ["1", "2"], [{}] * 2)  # its workers still work; the sweep does not
        assert graders.score(["mine"], ["1", "2"], [{}] * 2).components.sum() == 3
        assert graders.host.pid != first and not alive(first)


@pytest.mark.parametrize("failure", rw.FAILURES)
def test_a_failed_grader_abstains_scores_zero_or_stops(failure):
    reward = rw.Reward(hostile("raises"), components=())
    if failure == "stop":
        with pytest.raises(RuntimeError, match=r"reward mine failed on 1 of 2 samples; the first, sample 1: .ValueError"):
            score(reward, ["3", "bad"], failure=failure)
        return
    graded = score(reward, ["3", "bad"], failure=failure)
    assert graded.components.tolist() == [[3], [0]] and graded.scored.tolist() == [[True], [failure == "zero"]]
    assert graded.failures["mine"] == {"error": 1}


SLOW = [r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}", r"\boxed{9^{9^{9^9}}}"]
SLOW += [r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k^2}}", "$" + "(" * 300 + "1" + ")" * 300 + "$"]


def test_math_that_never_ends_costs_its_own_samples_and_leaves_no_process():
    """One bad item among 64 good ones, then eight with four workers, then fifty rounds with one."""
    before = below()
    good = ([r"so \boxed{\frac{84}{2}}"], [{"answer": "42"}])
    with rw.Graders({"math": rw.REWARDS["math"]}, timeout=2.0, workers=4) as graders:
        graders.check()
        for bad in (SLOW[:1], SLOW * 2):
            responses, rows = good[0] * 64 + bad, good[1] * (64 + len(bad))
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
            began = time.monotonic()
            graded = graders.score(["math"], [responses[i] for i in order], rows)
            assert time.monotonic() - began < 30  # serially eight of them would take for ever
            is_good = torch.tensor([i < 64 for i in order])
            assert graded.components[is_good].sum() == 64 and graded.scored[is_good].all()
            assert not graded.components[~is_good].any() and graded.failures["math"]["timeout"] >= 0.75 * len(bad)
        most, num_scored = 0, 0
        graders.timeout = 0.1
        for _ in range(50):
            graded = graders.score(["math"], SLOW[:1] + good[0] * 3, good[1] * 4)
            assert not graded.scored[0] and (graded.components[1:] == graded.scored[1:]).all()
            most, num_scored = max(most, len(below() - before)), num_scored + int(graded.scored.sum())
        assert most <= 5 and num_scored > 50  # the host and four workers
        graders.timeout = 10
        assert graders.score(["math"], good[0] * 8, good[1] * 8).components.sum() == 8
    assert below() == before


def test_a_reward_that_does_not_load_is_named(tmp_path):
    class Broken:
        def __init__(self):
            raise OSError("no model")

    graders = rw.Graders({"format": rw.REWARDS["format"], "mine": rw.Reward(Broken)})
    with graders, pytest.raises(RuntimeError, match=r"a grader did not start: reward mine: OSError: no model$"):
        graders.check()


def test_graders_end_with_their_process(tmp_path):
    """The training process is killed outright during calls: host, workers and what these have started go too."""
    import subprocess
    import sys

    script = (
        "import rewards as rw, os, psutil, signal, time, threading\n"
        "grade = lambda response, row: os.system('setsid sleep 1000 & sleep 1000')\n"
        "graders = rw.Graders({'mine': rw.Reward(grade)}, timeout=100)\n"
        "def end():\n"
        "    while len(pids := [p.pid for p in psutil.Process().children(recursive=True)]) < 9: time.sleep(0.1)\n"
        "    print(*pids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=end).start()\n"
        "graders.score(['mine'], ['a'] * 9, [{}] * 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=rw.Path(rw.__file__).parent
    )
    pids = [int(p) for p in done.stdout.split()]
    assert len(pids) >= 9  # the host, four workers, their shells and sleepers
    for _ in range(100):
        if not any(map(alive, pids)):
            return
        time.sleep(0.1)
    pytest.fail(f"left: {[p for p in pids if alive(p)]}")


# ---------------------------------------------------------------------------------------------- pass@k


def test_pass_at_k_is_the_chance_over_all_draws():
    for n, passed in ((1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (7, 1)):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([i < passed for i in range(n)], k))
            assert rw.pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)
    assert rw.pass_at_k(200, 3, 1) == pytest.approx(0.015)
    for wrong in ((5, 2, 6), (5, 2, 0), (5, 6, 1)):
        with pytest.raises(ValueError, match="expected 1 <= k <= n"):
            rw.pass_at_k(*wrong)
