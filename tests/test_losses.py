"""losses.py: the packed layout against plain rows, losses and aggregation against the oracles, splits against one process."""

import dataclasses
import itertools
import json
import shutil

import gradient_worker
import oracles
import pytest
import torch
from conftest import launch, make_samples

import advantages as adv
import losses


def load(tiny):
    return losses.load_model(str(tiny))


def batch_of(samples):
    mask = torch.ones(len(samples), max(len(s.response_ids) for s in samples), dtype=torch.bool)
    return losses.collate(samples, mask, torch.device("cpu"))


def plain_logprobs(model, sample, temperature):
    """Reference: the sample alone as an ordinary row, transformers' own causal attention."""
    row = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(input_ids=row).logits[0, len(sample.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_packed_logprobs_and_gradients_equal_plain_rows(tiny, temperature):
    from transformers import AutoModelForCausalLM

    samples = make_samples([3, 1, 4])
    packed, plain = load(tiny), AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    batch = batch_of(samples)
    logprobs, _ = losses.token_logprobs(packed, batch, temperature)
    expected = [plain_logprobs(plain, s, temperature) for s in samples]
    for row, sample, want in zip(logprobs, samples, expected):
        torch.testing.assert_close(row[: len(sample.response_ids)], want, atol=2e-5, rtol=1e-5)
        assert (row[len(sample.response_ids) :] == 0).all()
    weight = torch.randn(logprobs.shape)
    (logprobs * weight).sum().backward()
    sum((want * w[: len(want)]).sum() for want, w in zip(expected, weight)).backward()
    for (name, got), (_, want) in zip(packed.named_parameters(), plain.named_parameters()):
        scale = want.grad.abs().max()
        assert (got.grad - want.grad).abs().max() <= 2e-5 * scale, name


def test_a_response_sees_only_its_prompt_and_itself(tiny):
    samples = make_samples([2, 2])
    model = load(tiny)
    before, _ = losses.token_logprobs(model, batch_of(samples), 1.0)
    samples[1].response_ids[0] += 1  # the neighbour changes
    after, _ = losses.token_logprobs(model, batch_of(samples), 1.0)
    changed = (before - after).abs().sum(1) > 1e-4
    assert changed.tolist() == [False, True, False, False]


def test_target_logprobs_gradient_and_entropy():
    torch.manual_seed(0)
    logits = torch.randn(1100, 7, dtype=torch.float64, requires_grad=True)  # more rows than a chunk
    targets = torch.randint(0, 7, (1100,))
    picked, entropy = losses._TargetLogprobs.apply(logits, targets, 0.7)
    reference = torch.log_softmax(logits / 0.7, -1)
    torch.testing.assert_close(picked.double(), reference.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(reference.exp() * reference).sum(-1), atol=1e-5, rtol=1e-5)
    weight, entropy_weight = torch.randn(2, 1100, dtype=torch.float64)
    want_entropy = -(reference.exp() * reference).sum(-1)
    for both in (0.0, 1.0):  # with the entropy unused, and with both
        loss = (picked * weight).sum() + (both * (entropy * entropy_weight).sum() if both else 0.0)
        (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
        expected = (reference.gather(1, targets[:, None])[:, 0] * weight).sum() + both * (want_entropy * entropy_weight).sum()
        (want,) = torch.autograd.grad(expected, logits, retain_graph=True)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    (alone,) = torch.autograd.grad((entropy * entropy_weight).sum(), logits)
    (want,) = torch.autograd.grad((want_entropy * entropy_weight).sum(), logits)
    torch.testing.assert_close(alone, want, atol=1e-5, rtol=1e-4)


def test_values_are_of_the_state_before_each_token(mini):
    """The critic on packed rows equals the critic on each response's own row; a value does not see its own token."""
    torch.manual_seed(0)
    samples = make_samples([3, 2], words=512)
    backbone = losses.load_model(str(mini)).get_decoder()
    critic = losses.Critic(backbone, 64)
    batch = batch_of(samples)
    assert (losses.token_values(critic, batch) == 0).all()  # the head starts at 0
    torch.nn.init.normal_(critic.head.weight)
    values = losses.token_values(critic, batch)
    for row, sample in zip(values, samples):
        own = losses.token_values(critic, batch_of([sample]))[0]
        torch.testing.assert_close(row[: len(own)], own, atol=1e-5, rtol=1e-5)
        assert (row[len(own) :] == 0).all()
    samples[0].response_ids[-1] += 1  # the last token is no input of any value
    torch.testing.assert_close(losses.token_values(critic, batch_of(samples)), values, atol=0, rtol=0)
    samples[0].prompt_ids[-1] += 1
    changed = (losses.token_values(critic, batch_of(samples)) != values).any(1)
    assert changed.tolist() == [True, True, True, False, False]


def test_masks_come_from_lengths_not_ids(tiny):
    """EOS (= PAD here) inside a response and a prompt stays: the mask is as long as the response."""
    samples = make_samples([2])
    samples[0].response_ids[:] = [2, 5, 2]
    samples[0].logprobs[:] = [-1.0] * 3
    samples[0].prompt_ids[1] = 2
    samples[1].response_ids[:] = [9]
    samples[1].logprobs[:] = [-1.0]
    assert batch_of(samples).response_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch_of(samples).input_ids.shape[1] == len(samples[0].prompt_ids) + 2  # last tokens are no inputs


def test_micro_batches_keep_order_and_budget():
    samples = make_samples([5, 1, 7, 3], longest=30)
    for budget in (1, 20, 60, 10**6):
        splits = losses.micro_batches(samples, budget)
        assert list(itertools.chain(*splits)) == list(range(16))
        for split in splits:
            prompts = {samples[i].group: len(samples[i].prompt_ids) for i in split}
            cost = sum(prompts.values()) + sum(len(samples[i].response_ids) for i in split)
            assert cost <= budget or len(split) == 1
    assert len(losses.micro_batches(samples, 10**6)) == 1


def test_one_long_response_does_not_pad_many_short_ones():
    samples = make_samples([30], longest=3)
    long = dataclasses.replace(samples[0], response_ids=[5] * 900, logprobs=[-1.0] * 900)
    splits = losses.micro_batches([*samples, long], 1200)
    assert splits == [list(range(30)), [30]]  # together they would be 1,000 packed tokens, but 28,000 padded ones


# ---------------------------------------------------------------------------------------------- losses and aggregation


ONE = torch.ones(1, 4, dtype=torch.bool)
NUMBERS = {
    "ppo": [{"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.3}],
    "gspo": [{"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.2, "clip_high": 0.3}],
    "sapo": [{"tau_positive": 1.0, "tau_negative": 1.05}],
    "cispo": [{"clip_low": 0.2, "clip_high": 0.28}],
    "reinforce": [{}],
}


def token_loss(name, ratio, advantages, **numbers):
    """The loss of single tokens of these ratios."""
    logprobs = torch.tensor([ratio], dtype=torch.float64).log()
    numbers = numbers or NUMBERS[name][0]
    mask = torch.ones(1, len(ratio), dtype=torch.bool)
    return losses.POLICY_LOSSES[name](
        logprobs, torch.zeros_like(logprobs), torch.tensor([advantages]).double(), mask, **numbers
    )


def test_ppo_by_hand():
    loss, metrics = token_loss("ppo", [1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], clip_low=0.2, clip_high=0.2)
    assert loss[0].tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert [float(a) / float(c) for a, c in metrics.values()] == pytest.approx([0.25, 0.25])
    loss, metrics = token_loss("ppo", [4.0, 2.0, 4.0], [-1.0, -1.0, 1.0], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert loss[0].tolist() == pytest.approx([3.0, 2.0, -1.2]) and float(metrics["policy/dual_clip_fraction"][0]) == 1


def test_gspo_by_hand():
    old, new = torch.tensor([[-1.0, -2.0, -3.0]]).double(), torch.tensor([[-0.9, -2.3, -2.9]]).double()
    loss, _ = losses.gspo(new, old, torch.ones(1, 3).double(), torch.ones(1, 3).bool(), clip_low=1.0, clip_high=1.0)
    assert loss[0].tolist() == pytest.approx([-0.9672161] * 3, rel=1e-6)


def test_sapo_and_cispo_by_hand():
    assert token_loss("sapo", [1.0, 1.0], [1.0, -1.0])[0][0].tolist() == pytest.approx([-2, 1.9047619])
    logprobs = torch.tensor([[1.5, 0.5, 1.1]], dtype=torch.float64).log().requires_grad_()
    loss, _ = losses.cispo(
        logprobs, torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 1.0]]), torch.ones(1, 3).bool(), clip_low=0.2, clip_high=0.28
    )
    loss.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-1.28, 0.8, -1.1])  # every token keeps a gradient
    _, metrics = token_loss("cispo", [1.5, 0.5, 0.5], [-1.0, 1.0, -1.0])
    assert [int(amount) for amount, _ in metrics.values()] == [2, 1]  # clipped whatever the sign of A


def rows(mask, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(mask.shape, generator=generator) * scale).double()


# response lengths 1, 3, 5; right padding; a hole; a response with nothing
MASK = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
CASES = [(name, numbers) for name, every in NUMBERS.items() for numbers in every]


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("aggregation", list(losses.AGGREGATIONS))
@pytest.mark.parametrize("name, numbers", CASES)
def test_losses_equal_their_oracles_in_value_and_gradient(name, numbers, aggregation, poison):
    logprobs, old, advantages = rows(MASK, 0.5, 1) - 1, rows(MASK, 0.5, 2) - 1, rows(MASK, 2.0, 3)
    frozen, old_list, advantage_list, mask = (x.tolist() for x in (logprobs, old, advantages, MASK))

    def oracle(lp):
        token = oracles.policy(name, lp, old_list, advantage_list, mask, frozen, **numbers)
        return oracles.aggregate(aggregation, token, mask, 6)

    total = losses.Denominators(len(MASK), int(MASK.sum()), 6)
    inputs = torch.where(MASK, logprobs, poison).requires_grad_()
    per_token, _ = losses.POLICY_LOSSES[name](
        inputs, torch.where(MASK, old, poison), torch.where(MASK, advantages, poison), MASK, **numbers
    )
    assert (per_token[~MASK] == 0).all()
    loss = losses.AGGREGATIONS[aggregation](per_token, MASK, total)
    assert loss.item() == pytest.approx(oracle(frozen), abs=1e-6, rel=1e-6)
    loss.backward()
    want = torch.tensor(oracles.gradient(oracle, frozen, mask), dtype=torch.float64)
    torch.testing.assert_close(inputs.grad, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", list(losses.POLICY_LOSSES))
def test_ratio_one_is_reinforce(name):
    logprobs, advantages = rows(MASK).requires_grad_(), rows(MASK, seed=4)
    per_token, _ = losses.POLICY_LOSSES[name](logprobs, logprobs.detach(), advantages, MASK, **NUMBERS[name][0])
    losses.token_mean(per_token, MASK, losses.Denominators(4, 8, 5)).backward()
    want = torch.where(MASK, -advantages, 0.0)
    if name in ("gspo",):  # each token's gradient goes through the mean over its response
        want = torch.where(MASK, want.sum(1, keepdim=True) / MASK.sum(1, keepdim=True).clamp(min=1), 0.0)
    torch.testing.assert_close(logprobs.grad, want / 8)


@pytest.mark.parametrize("name", list(losses.POLICY_LOSSES))
def test_losses_stay_finite_at_infinite_ratios(name):
    logprobs = torch.tensor([[500.0], [500.0], [-500.0], [-500.0]], requires_grad=True)
    advantages, old = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.zeros(4, 1)
    mask = torch.ones(4, 1, dtype=torch.bool)
    loss, _ = losses.POLICY_LOSSES[name](logprobs, old, advantages, mask, **NUMBERS[name][0])
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()
    if name in ("ppo", "gspo", "sapo"):
        assert logprobs.grad[0, 0] == 0  # A > 0 with an infinite ratio: no gradient
    counted = losses.policy_metrics(logprobs.detach(), old, mask)["policy/bounded_log_ratio"]
    assert [int(x) for x in counted] == [4, 4]


# ---------------------------------------------------------------------------------------------- engine against trainer


RANGE = {"mismatch_low": 0.5, "mismatch_cap": 2.0}


def mismatch(mode, *tensors, whole_sequence=False):
    correction = losses.MISMATCH_CORRECTIONS[mode]
    return losses.mismatch_weight(correction, *tensors, whole_sequence, **{n: RANGE[n] for n in adv.options_of(correction)})


def test_mismatch_by_hand():
    old, engine = torch.tensor([[3.0, 0.3, 1.2]]).double().log(), torch.zeros(1, 3)
    mask = torch.ones(1, 3).bool()
    for mode, want in (("truncate", [2, 0.3, 1.2]), ("mask", [0, 0, 1.2]), ("none", [1, 1, 1])):
        weight, metrics = mismatch(mode, old, engine, mask)
        assert weight[0].tolist() == pytest.approx(want)
        assert int(metrics["policy/mismatch_outside"][0]) == {"truncate": 1, "mask": 2, "none": 3}[mode]
    assert mismatch("truncate", old, engine, mask, whole_sequence=True)[0][0].tolist() == pytest.approx([1.08] * 3)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", list(losses.MISMATCH_CORRECTIONS))
def test_mismatch_weights_equal_their_oracle(mode, level):
    old, engine = rows(MASK, 0.6, 1), rows(MASK, 0.6, 2)
    engine[2, 2], engine[1, 1] = float("nan"), float("-inf")
    engine = torch.where(MASK, engine, float("inf"))
    weight, _ = mismatch(mode, old.requires_grad_(), engine, MASK, whole_sequence=level == "sequence")
    want = oracles.mismatch(old.tolist(), engine.tolist(), MASK.tolist(), mode, level, 0.5, 2.0)
    torch.testing.assert_close(weight.double(), torch.tensor(want, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    assert not weight.requires_grad and weight[2, 2] == 0 and weight[1, 1] == 0
    gaps, _ = losses.engine_gap(old.detach(), engine, MASK)
    assert [int(x) for x in gaps["rollout/nonfinite_logprobs"]] == [2, 8]
    assert all(torch.isfinite(torch.as_tensor(x)).all() for pair in gaps.values() for x in pair)


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_value_loss_equals_its_oracle_in_value_and_gradient(poison):
    values, old, returns = rows(MASK, 0.6, 1), rows(MASK, 0.6, 2), rows(MASK, 1.0, 3)
    lists = [x.tolist() for x in (values, old, returns, MASK)]

    def oracle(v):
        return oracles.aggregate("token_mean", oracles.value(v, lists[1], lists[2], lists[3], 0.2), lists[3], 6)

    inputs = torch.where(MASK, values, poison).requires_grad_()
    per_token, metrics = losses.value_loss(
        inputs, torch.where(MASK, old, poison), torch.where(MASK, returns, poison), MASK, 0.2
    )
    loss = losses.token_mean(per_token, MASK, losses.Denominators(4, 8, 6))
    assert loss.item() == pytest.approx(oracle(lists[0]), abs=1e-6, rel=1e-6)
    loss.backward()
    want = torch.tensor(oracles.gradient(oracle, lists[0], lists[3]), dtype=torch.float64)
    torch.testing.assert_close(inputs.grad, want, atol=1e-6, rtol=1e-6)
    assert (inputs.grad[MASK] == 0).sum() == metrics["loss/value_clip_fraction"][0] > 0


def test_value_loss_by_hand():
    loss, _ = losses.value_loss(*(torch.tensor([[x]]) for x in (1.0, 0.5, 2.0)), torch.ones(1, 1).bool(), 0.2)
    assert loss.item() == pytest.approx((0.7 - 2) ** 2 / 2)  # the clipped value is farther from the return
    loss, _ = losses.value_loss(*(torch.tensor([[x]]) for x in (1.0, 0.5, 0.6)), torch.ones(1, 1).bool(), 0.2)
    assert loss.item() == pytest.approx((1.0 - 0.6) ** 2 / 2)


# ---------------------------------------------------------------------------------------------- aggregation and KL


def test_aggregation_by_hand():
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0], mask[1, :2] = True, True
    ones = torch.zeros(2, 10)
    ones[0] = 1.0
    total = losses.Denominators(2, 12, 20)
    got = {name: f(ones, mask, total).item() for name, f in losses.AGGREGATIONS.items()}
    assert got == pytest.approx({"token_mean": 10 / 12, "sequence_mean": 0.5, "sequence_sum_norm": 0.25})


@pytest.mark.parametrize("x, k1, k2, k3", [(0.5, 0.5, 0.125, 0.106531), (-0.5, -0.5, 0.125, 0.148721)])
def test_kl_by_hand_and_oracle(x, k1, k2, k3):
    for name, want in {"k1": k1, "k2": k2, "k3": k3}.items():
        got = losses.KL_ESTIMATORS[name](torch.tensor(x, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)).item()
        assert got == pytest.approx(want, abs=1e-6) and got == pytest.approx(oracles.kl(name, x, 0.0), rel=1e-12)


@pytest.mark.parametrize("logprob", [-30.0, -100.0, -200.0])
def test_k3_gradient_stays_finite_and_leaves_other_tokens_alone(logprob):
    def gradient(values):
        x = torch.tensor(values, requires_grad=True)
        losses.k3(x, torch.full_like(x, -1.0)).sum().backward()
        return x.grad

    normal = [-1.0 - 0.1 * i for i in range(20)]
    with_outlier = gradient([*normal, logprob])
    assert torch.isfinite(with_outlier).all() and with_outlier[-1] <= 0  # never away from the reference
    torch.testing.assert_close(with_outlier[:-1], gradient(normal), atol=0, rtol=0)


# ---------------------------------------------------------------------------------------------- ranks and micro-batches


@pytest.fixture(scope="module")
def gradients(mini, alone, tmp_path_factory):
    """Full gradients and losses of the same samples on 1, 2 and 3 ranks, over ways of splitting them."""
    found = {1: gradient_worker.compute(alone, str(mini))}
    for world in (2, 3):
        out = tmp_path_factory.mktemp("gradients") / "out"
        result = launch(world, "gradient_worker.py", mini, out, timeout=150)
        assert result.returncode == 0, result.stderr[-3000:]
        found[world] = torch.load(f"{out}.pt", weights_only=True), json.loads(out.with_suffix(".json").read_text())
    return found


@pytest.mark.parametrize("case", [f"{n}/{a}" for n in losses.POLICY_LOSSES for a in losses.AGGREGATIONS] + ["value/token_mean"])
def test_ranks_with_uneven_tokens_equal_one_process(gradients, case):
    """Test number one: shares of 1 to 9 sequences a rank, also none, and micro-batches down to one sample."""
    want, want_loss = gradients[1][0][f"{case}/even/1000000"], gradients[1][1][f"{case}/even/1000000"]
    assert max(w.abs().max() for w in want.values()) > 0.01
    compared = 0
    for world, (found, found_loss) in gradients.items():
        for key, got in found.items():
            if key.startswith(case + "/"):
                assert found_loss[key] == pytest.approx(want_loss, abs=1e-6)
                for name in want:
                    assert (got[name] - want[name]).abs().max() <= 1e-6, (world, key, name)
                compared += 1
    assert compared == 3 * (3 if case.startswith(("ppo", "value")) else 2)


class Attack:
    """A pickle that makes a file when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_no_code_of_a_models_folder_is_run(mini, tmp_path):
    """Neither a pickle beside its config.json, nor the Python files that it names."""
    for name in ("pickled", "coded"):
        shutil.copytree(mini, tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Attack(tmp_path / "owned")}, tmp_path / "pickled" / "pytorch_model.bin")
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config))
    (tmp_path / "coded" / "own.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        losses.load_model(str(tmp_path / "pickled"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        losses.load_model(str(tmp_path / "coded"))
    assert not (tmp_path / "owned").exists()
