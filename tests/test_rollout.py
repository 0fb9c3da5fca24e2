"""rollout.py: data sets, prompts, order, seeds, and both engines against the trainer."""

import json

import pytest
import torch
from conftest import ROOT
from transformers import AutoTokenizer

import losses
import rollout as ro
import train

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(12)]


# ---------------------------------------------------------------------------------------------- rows


def test_files_of_every_kind_give_the_same_rows(tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    write(tmp_path / "a.jsonl", ROWS)
    want = [(r["question"], r["answer"]) for r in ROWS]
    for kind in ("csv", "parquet", "json", "jsonl"):
        rows = ro.load_rows(ro.Source(str(tmp_path / f"a.{kind}")))
        assert [(r["question"], str(r["answer"])) for r in rows] == want, kind
        assert {r["scorer"] for r in rows} == {"number"}


def test_a_folder_has_splits(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:8])
    write(tmp_path / "test-00000-of-00001.jsonl", ROWS[8:])
    (tmp_path / "README.md").write_text("not data")
    assert len(ro.load_rows(ro.Source(str(tmp_path)))) == 8
    assert len(ro.load_rows(ro.Source(str(tmp_path), split="test"))) == 4
    with pytest.raises(ValueError, match=r"no file dev\.\*.*README.md"):
        ro.load_rows(ro.Source(str(tmp_path), split="dev"))


@pytest.mark.skipif(not GSM8K.exists(), reason="the shared GSM8K files are not here")
def test_gsm8k_files():
    rows = ro.load_rows(ro.Source(str(GSM8K)))
    assert len(rows) == 7473 and rows[0]["question"].startswith("Natalia") and "#### 72" in rows[0]["answer"]
    assert len(ro.load_rows(ro.Source(str(GSM8K), split="test"))) == 1319


def test_gsm8k_by_name_knows_its_columns(monkeypatch):
    import datasets

    seen = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: seen.append((a, k)) or datasets.Dataset.from_list(ROWS))
    assert len(ro.load_rows(ro.Source("gsm8k"))) == 12
    assert seen == [(("openai/gsm8k", "main"), {"split": "train"})]


def test_errors_name_flag_value_and_remedy(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", "answer"\n')
    other = write(tmp_path / "other.jsonl", [{"q": "a", "a": "b"}])
    for source, says in [
        (ro.Source(str(tmp_path / "none.jsonl")), "no such file"),
        (ro.Source(str(empty)), "empty"),
        (ro.Source(str(broken)), "broken.jsonl"),
        (ro.Source(other), r"none of the usual prompt columns.*it has q, a.*--prompt-column"),
        (ro.Source(other, prompt_column="qq"), "no column 'qq'"),
        (ro.Source(other, prompt_column="q"), "--answer-column"),
        (ro.Source("no-such-name-on-any-hub"), "--dataset no-such-name-on-any-hub.*Check the name"),
        (ro.Source("rg:chain_sums"), "unknown task; there are.*chain_sum"),
        (ro.Source("rg:chain_sum", params="[1]"), "--dataset-params.*mapping"),
        (ro.Source("rg:chain_sum", params="{a"), "--dataset-params"),
        (ro.Source("rg:chain_sum", params="{seed: abc}"), "--dataset-params.*whole numbers"),
        (ro.Source("rg:chain_sum", params="{min_term: 2}"), "--dataset-params.*min_term"),
        (ro.Source(other, params="{a: 1}"), "only rg:<task> takes parameters"),
    ]:
        with pytest.raises(ValueError, match=says):
            ro.load_rows(source)


# ---------------------------------------------------------------------------------------------- prompts


@pytest.fixture(scope="module")
def tokenizer(embedded):
    return AutoTokenizer.from_pretrained(embedded)


def rows_of(*questions):
    return [{"question": q, "answer": "1", "scorer": "number"} for q in questions]


def test_chat_prompt_has_every_turn_once(tokenizer):
    fmt = ro.PromptFormat(
        "Be brief.", "Compute {question}!", ({"role": "user", "content": "U"}, {"role": "assistant", "content": "A"})
    )
    text = tokenizer.decode(ro.prompt_ids(tokenizer, rows_of("1 + 1")[0], fmt))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nCompute 1 + 1!<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = [{"role": "user", "content": "hello"}]
    assert ro.prompt_ids(tokenizer, {"question": chat}, ro.PromptFormat()) == ro.prompt_ids(
        tokenizer, {"question": "hello"}, ro.PromptFormat()
    )
    with pytest.raises(ValueError, match=r"--prompt-template.*expression.*a row has question"):
        ro.prompt_ids(tokenizer, rows_of("1")[0], ro.PromptFormat(template="{expression}"))


def test_prompts_that_are_none(tokenizer):
    rows = [{"question": "a", "ctx": None}, {"question": "b", "ctx": "c"}, {"question": [], "ctx": "c"}]
    with_template = ro.build_prompts(rows, tokenizer, ro.PromptFormat(template="{ctx} {question}"), 100, "drop", "--dataset")
    assert with_template.row_ids == [1] and with_template.num_null == 2
    with pytest.raises(ValueError, match="names no column"):
        ro.build_prompts(rows, tokenizer, ro.PromptFormat(template="Compute"), 100, "drop", "--dataset")
    for question in (["hi", "you"], [{"from": "user", "value": "hi"}], {"text": "hi"}):
        with pytest.raises(ValueError, match=r"the prompt column.*(is no message|expected a list)"):
            ro.build_prompts([{"question": question}], tokenizer, ro.PromptFormat(), 100, "drop", "--dataset")


@pytest.mark.parametrize("template", ["{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}", None])
def test_exactly_one_bos(embedded, template):
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(embedded)
    bos = tokenizer.bos_token_id
    single = f"{tokenizer.bos_token} $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[(tokenizer.bos_token, bos)])
    assert tokenizer("hi")["input_ids"][0] == bos
    tokenizer.chat_template = template
    assert ro.prompt_ids(tokenizer, rows_of("hello there")[0], ro.PromptFormat()).count(bos) == 1


def test_overlong_null_and_held_out_rows_are_counted(tokenizer):
    rows = rows_of("a", None, "word " * 200, "  ", "b", "word " * 300)
    prompts = ro.build_prompts(rows, tokenizer, ro.PromptFormat(), 100, "drop", "--dataset")
    assert prompts.row_ids == [0, 4] and (prompts.num_null, prompts.num_overlong, prompts.first_overlong) == (2, 2, 2)
    with pytest.raises(ValueError, match=r"2 prompts are longer than --max-prompt-tokens 100, the first is row 2.*drop"):
        ro.build_prompts(rows, tokenizer, ro.PromptFormat(), 100, "error", "--dataset")
    with pytest.raises(ValueError, match="no row is left of 6"):
        ro.build_prompts(rows, tokenizer, ro.PromptFormat(), 3, "drop", "--dataset")
    more = ro.build_prompts(rows_of("a", "c"), tokenizer, ro.PromptFormat(), 100, "drop", "--dataset", prompts)
    assert more.row_ids == [1] and more.num_held_out == 1


def test_few_shot_file(tmp_path):
    good = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    (tmp_path / "a.json").write_text(json.dumps(good))
    write(tmp_path / "a.jsonl", good)
    assert ro.read_few_shot(str(tmp_path / "a.json")) == ro.read_few_shot(str(tmp_path / "a.jsonl")) == tuple(good)
    (tmp_path / "b.json").write_text('{"role": "user"}')
    (tmp_path / "c.json").write_text('[{"role": "user", "content": 5}]')
    (tmp_path / "d.json").write_text('[{"role": "usr", "content": "a"}]')
    (tmp_path / "e.json").write_text('\ufeff[\n\t{"role": "user", "content": "\\ud83d\\ude00"}]', encoding="utf-8")
    assert ro.read_few_shot(str(tmp_path / "e.json"))[0]["content"] == "\U0001f600"
    for name, says in {
        "b.json": "is no message|expected a list",
        "none.json": "No such file.*|seen from",
        "c.json": "5.*is no message",
        "d.json": "usr.*is no message",
    }.items():
        with pytest.raises(ValueError, match=f"--few-shot.*{says}"):
            ro.read_few_shot(str(tmp_path / name))


def test_every_row_once_an_epoch_whatever_the_step(tokenizer):
    seen = []
    order = ro.PromptOrder(10, seed=3)
    for _ in range(10):
        seen += [v.index for v in order.take(4)]  # steps cross the epochs' ends
    epochs = [seen[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(e) == list(range(10)) for e in epochs) and epochs[0] != epochs[1]
    later = ro.PromptOrder(10, seed=3, position=12)
    assert [v.index for v in later.take(9)] == seen[12:21]
    assert [v.index for v in ro.PromptOrder(10, seed=4).take(10)] != epochs[0]
    assert len({v for _ in range(50) for v in order.take(7)}) == 350  # a row that comes twice in a step has two epochs


def test_held_out_rows_never_train(tmp_path, embedded):
    cfg = train.Config(dataset="rg:chain_sum", dataset_params="{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}")
    _, _, prompts, sets = ro.load_data(cfg, str(embedded))
    held_out = sets["chain_sum"]
    assert prompts.num_held_out > 0 and not {tuple(i) for i in prompts.token_ids} & {tuple(i) for i in held_out.token_ids}
    with_eval = ro.load_data(train.Config(**{**vars(cfg), "eval_every": 5}), str(embedded))[2]
    assert with_eval.token_ids == prompts.token_ids  # evaluation does not change what is trained on
    other = write(tmp_path / "eval.jsonl", ROWS[:5])
    both = ro.load_data(train.Config(**{**vars(cfg), "eval_every": 5, "eval_datasets": (other, "rg:chain_sum")}), str(embedded))
    assert list(both[3]) == ["eval", "chain_sum"] and len(both[3]["eval"].rows) == 5
    assert both[3]["chain_sum"].digest() == held_out.digest() and both[2].token_ids == prompts.token_ids
    few = write(tmp_path / "few.jsonl", ROWS[:3])
    with pytest.raises(ValueError, match="3 prompts are left, fewer than --prompts-per-step 8"):
        ro.load_data(train.Config(dataset=few), str(embedded))
    with pytest.raises(ValueError, match=r"is what --dataset .* trains on; name another file"):
        ro.load_data(train.Config(dataset=few, eval_every=1), str(embedded))
    folder = tmp_path / "folder"
    folder.mkdir()
    for place, own in ((few, few), (str(folder / "train.jsonl"), str(folder))):
        write(folder / "train.jsonl", ROWS)
        with pytest.raises(ValueError, match=r"--eval-datasets .* is what --dataset .* trains on"):
            ro.load_data(train.Config(dataset=own, eval_every=1, eval_datasets=(place,)), str(embedded))
    with pytest.raises(ValueError, match="has 8192 positions"):
        ro.load_data(train.Config(dataset=few, max_prompt_tokens=8192), str(embedded))


# ---------------------------------------------------------------------------------------------- engines

PROMPTS = [[1, 9690, 198, 28120], [1, 4093, 198], [1, 520, 9531, 198, 905, 77]]


def test_seeds_differ_in_every_part():
    parts = [(0, 1, 5), (1, 1, 5), (0, 2, 5), (0, 1, 6), (0, "greedy", 5)]
    assert len({ro.seed_for(*p) for p in parts}) == 5 and ro.seed_for(0, 1, 5) == ro.seed_for(0, 1, 5) < 2**62


def test_all_eos_ids_count(tiny, tokenizer):
    assert ro.eos_token_ids(str(tiny), tokenizer) == (2, 7)


def as_samples(prompts, responses):
    return [
        ro.Sample(p, r.token_ids, r.logprobs, r.finish_reason, "", {}, g)
        for g, (p, group) in enumerate(zip(prompts, responses))
        for r in group
    ]


def trainer_logprobs(model, samples, temperature):
    width = max(len(s.response_ids) for s in samples)
    mask = torch.ones(len(samples), width, dtype=torch.bool)
    batch = losses.collate(samples, mask, torch.device("cpu"))
    with torch.no_grad():
        return losses.token_logprobs(model, batch, temperature)[0], batch


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_hf_engine_logprobs_are_the_trainers(tiny, temperature):
    engine = ro.HFEngine(str(tiny), torch.float32, torch.device("cpu"))
    sampling = ro.Sampling(3, temperature, 12, (2, 7))
    responses = engine.generate(PROMPTS, sampling, [1, 2, 3])
    samples = as_samples(PROMPTS, responses)
    model = losses.load_model(str(tiny))
    got, batch = trainer_logprobs(model, samples, temperature)
    assert (got - batch.rollout_logprobs)[batch.response_mask].abs().max() < 1e-4


def test_hf_engine_seeds_belong_to_samples_not_to_the_batch(tiny):
    engine = ro.HFEngine(str(tiny), torch.float32, torch.device("cpu"))
    sampling = ro.Sampling(2, 1.0, 8, (2, 7))
    whole = engine.generate(PROMPTS, sampling, [1, 2, 3])
    alone = [engine.generate([p], sampling, [s])[0] for p, s in zip(PROMPTS, [1, 2, 3])]
    ids = [[r.token_ids for r in group] for group in whole]
    assert ids == [[r.token_ids for r in group] for group in alone]
    assert ids[0][0] != ids[0][1] and ids == [[r.token_ids for r in g] for g in engine.generate(PROMPTS, sampling, [1, 2, 3])]
    other = engine.generate(PROMPTS, sampling, [11, 12, 13])
    assert ids != [[r.token_ids for r in g] for g in other]


def test_hf_engine_samples_the_softmax(tiny):
    """Frequencies of the first token over 2,000 seeds against its probabilities."""
    engine = ro.HFEngine(str(tiny), torch.float32, torch.device("cpu"))
    draws = engine.generate([PROMPTS[0]], ro.Sampling(2000, 0.5, 1, (2,)), [0])[0]
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in draws]), minlength=49152) / 2000
    logits = engine.model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.5
    top = torch.softmax(logits, -1).topk(5)
    assert (counts[top.indices] - top.values).abs().max() < 0.045


def test_hf_engine_takes_nothing_from_generation_config(tiny):
    """A penalty or a suppressed token of the model's own configuration would change greedy answers."""
    sampling = ro.Sampling(1, 0.0, 8, (2,))
    plain = ro.HFEngine(str(tiny), torch.float32, torch.device("cpu"))
    want = plain.generate(PROMPTS, sampling, [0, 0, 0])
    first = want[0][0].token_ids[0]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    path = str(tiny) + "-penalised"
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.generation_config = GenerationConfig(repetition_penalty=50.0, suppress_tokens=[first], eos_token_id=2)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(path)
    penalised = ro.HFEngine(path, torch.float32, torch.device("cpu"))
    got = penalised.generate(PROMPTS, sampling, [0, 0, 0])
    assert [[r.token_ids for r in g] for g in got] == [[r.token_ids for r in g] for g in want]


def test_hf_engine_stops_at_any_eos(tiny):
    engine = ro.HFEngine(str(tiny), torch.float32, torch.device("cpu"))
    first = engine.generate([PROMPTS[0]], ro.Sampling(1, 0.0, 4, (2,)), [0])[0][0].token_ids
    stopped = engine.generate([PROMPTS[0]], ro.Sampling(1, 0.0, 4, (2, first[1])), [0])[0][0]
    assert stopped.token_ids == first[:2] and stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == 2


def test_hf_engine_refuses_a_partial_push(tiny):
    engine = ro.HFEngine(str(tiny), torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="left 1 parameters"):
        engine.load_weights(iter([(n, p) for n, p in engine.model.named_parameters()][1:]))


def test_ids_of_the_loss_are_the_engines_whatever_the_text(tokenizer):
    """Ids that no encoding of the text would give: a split merge, half an emoji, a special token spelt out, or inside."""
    emoji = tokenizer("\U0001f600", add_special_tokens=False)["input_ids"]
    spelt = [i for c in "<|im_end|>" for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
    letters = [tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "the"]
    assert len(emoji) > 1 and len(tokenizer("the", add_special_tokens=False)["input_ids"]) == 1 and len(spelt) > 1
    odd = [emoji[:1], spelt, letters, [*letters, 1, *letters], [2]]

    class Fixed:
        def generate(self, prompts, sampling, seeds):
            return [[ro.Response([*ids, 2], [-1.0] * (len(ids) + 1), "stop") for ids in odd] for _ in prompts]

    prompts = ro.build_prompts(rows_of("a"), tokenizer, ro.PromptFormat(), 100, "drop", "--dataset")
    samples = ro.sample_groups(Fixed(), tokenizer, prompts, [0], [0], ro.Sampling(5, 1.0, 90, (2,)), [0])
    texts = [s.text for s in samples]
    assert "\ufffd" in texts[0] and texts[1:3] == ["<|im_end|>", "the"]
    assert any(tokenizer(t, add_special_tokens=False)["input_ids"] != ids for t, ids in zip(texts, odd))
    mask = ro.trained_tokens(samples, torch.ones(5, 1).bool(), 90, finished_only=True)
    batch = losses.collate(samples, mask[:, : max(len(s.response_ids) for s in samples)], torch.device("cpu"))
    for i, ids in enumerate(odd):
        assert batch.targets[i][batch.response_mask[i]].tolist() == [*ids, 2]


# ---------------------------------------------------------------------------------------------- dynamic sampling


def scored_of(groups, components, lengths, scores=None):
    """Scored of one rank: rewards by sample (None: abstained), mask from lengths."""
    samples = [ro.Sample([1], [5] * n, [-1.0] * n, "stop", "", {}, g) for g, n in zip(groups, lengths)]
    scored = torch.tensor([[v is not None] for v in components])
    values = torch.tensor([[v or 0.0] for v in components], dtype=torch.float64)
    mask = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
    return ro.Scored(samples, values, scored, values[:, 0] if scores is None else torch.tensor(scores).double(), mask)


def test_groups_are_judged_with_a_reason():
    """As the advantage judges them: equal as float32, whatever abstained; a tolerance would drop the last group."""
    rewards = [1, 1, 0, 1, None, None, 0.25, None, 0.5, None, 0, 1, 10000, 10000.005, 1, 1 + 1e-9]
    groups = [3, 3, 4, 4, 0, 0, 7, 7, 8, 8, 5, 5, 1, 1, 2, 2]
    lengths = [2, 2, 2, 1, 2, 2, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2]
    part = scored_of(groups, rewards, lengths)
    judged = ro.judge(part, [2.0], filters=True)
    want = {3: "zero_std_2.0", 4: None, 0: "unreadable_reward", 7: "zero_std_0.5", 8: "zero_std_1.0", 5: "all_truncated"}
    assert {g: v.dropped for g, v in judged.items()} == want | {1: None, 2: "zero_std_2.0"}
    assert {g: v.num_tokens for g, v in judged.items()} == {3: 4, 4: 3, 0: 4, 7: 2, 8: 0, 5: 0, 1: 4, 2: 4}
    kept = ro.judge(part, [2.0], filters=False)
    assert all(v.dropped is None for v in kept.values()) and [v.num_tokens for v in kept.values()] == [
        judged[g].num_tokens for g in kept
    ]


def test_refills_go_where_groups_are_fewest():
    assert ro.owners([0, 0, 0], 7) == [0, 1, 2, 0, 1, 2, 0]
    assert ro.owners([3, 0, 1], 4) == [1, 1, 2, 1] and ro.owners([2, 2], 0) == []


def test_optimizer_batches_are_as_even_as_the_groups_divide():
    def verdict(tokens=5, dropped=None):
        return ro.Verdict(dropped, tokens)

    full = {g: verdict() for g in (4, 1, 0, 3, 2, 5)}
    assert ro.optimizer_batches(full, 3) == ({0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}, 0)
    assert ro.optimizer_batches(full | {1: verdict(dropped="zero_std_0.0"), 6: verdict()}, 2)[0] == {
        0: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1,
    }  # fmt: skip
    assert ro.optimizer_batches({0: verdict(), 5: verdict()}, 3) == ({0: 0, 5: 1}, 1)  # two groups fill no three batches
    assert ro.optimizer_batches({0: verdict(0), 1: verdict(0), 2: verdict(), 3: verdict(0)}, 2) == ({2: 1, 3: 1}, 1)
    assert ro.optimizer_batches({0: verdict(dropped="all_truncated")}, 2) == ({}, 2)


def test_text_is_cut_at_eos_and_ids_are_the_engines(tokenizer):
    class Fixed:
        def generate(self, prompts, sampling, seeds):
            return [
                [ro.Response([520, 9531, 2], [-1.0] * 3, "stop"), ro.Response([9531, 1], [-1.0] * 2, "length")] for _ in prompts
            ]

    prompts = ro.build_prompts(rows_of("a", "b"), tokenizer, ro.PromptFormat(), 100, "drop", "--dataset")
    samples = ro.sample_groups(Fixed(), tokenizer, prompts, [1], [5], ro.Sampling(2, 1.0, 9, (2,)), [0])
    assert [s.response_ids for s in samples] == [[520, 9531, 2], [9531, 1]] and {s.group for s in samples} == {5}
    assert samples[0].text == tokenizer.decode([520, 9531]) and samples[0].row["question"] == "b"


def test_responses_cannot_forge_lines_or_rule_a_terminal(alone, tmp_path):
    """They come back as they were, and the file holds nothing but printable text and one line a sample."""
    hostile = '\x1b[2J\r\n{"group": 9}\u2028\x9b1m\u202e\ud800<|im_end|> [bold]é'
    samples = [ro.Sample([1], [2], [0.0], "stop", hostile, {"question": hostile, "answer": hostile}, 0)]
    ones = torch.ones(1, 1, dtype=torch.float64)
    ro.write_samples(tmp_path / "samples" / "step_000001.jsonl", samples, ["a"], ones, ones.bool())
    text = (tmp_path / "samples" / "step_000001.jsonl").read_text()
    assert text.count("\n") == 1 and not any(c in text for c in "\x1b\r\u2028\x9b\u202e\ud800") and "é" in text
    assert json.loads(text)["response"] == json.loads(text)["question"] == hostile
