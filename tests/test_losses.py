"""losses.py: the packed layout against plain rows, losses and aggregation against the oracles, splits against one process."""

import dataclasses
import itertools
import json

import oracles
import pytest
import torch
from conftest import launch, make_samples

import losses
import train


def load(tiny, **config):
    return train.load_model(train.Config(**config), str(tiny))


def batch_of(samples, advantages=None, mask=None):
    width = max(len(s.response_ids) for s in samples)
    advantages = torch.randn(len(samples), width) if advantages is None else advantages
    mask = torch.ones(len(samples), width, dtype=torch.bool) if mask is None else mask
    return losses.collate(samples, advantages, mask, torch.device("cpu"))


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
    weight = torch.randn(1100, dtype=torch.float64)
    (got,) = torch.autograd.grad((picked * weight).sum(), logits)
    (want,) = torch.autograd.grad((reference.gather(1, targets[:, None])[:, 0] * weight).sum(), logits)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


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


def test_ppo_by_hand():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    loss, metrics = losses.ppo(ratio.log(), torch.zeros(1, 4), advantages, mask, 0.2, 0.2)
    torch.testing.assert_close(loss, torch.tensor([[-1.2, 1.5, -0.5, 0.8]]))
    assert [float(a) / float(c) for a, c in metrics.values()] == pytest.approx([1.0, 0.25, 0.25])


def rows(mask, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(mask.shape, generator=generator) * scale).double()


MASK = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("aggregation", list(losses.AGGREGATIONS))
@pytest.mark.parametrize("name", list(losses.POLICY_LOSSES))
def test_losses_equal_their_oracles_in_value_and_gradient(name, aggregation, poison):
    logprobs, old, advantages = rows(MASK, 0.5, 1) - 1, rows(MASK, 0.5, 2) - 1, rows(MASK, 2.0, 3)
    lists = [x.tolist() for x in (logprobs, old, advantages)]

    def oracle(lp):
        token = getattr(oracles, name)(lp, lists[1], lists[2], MASK.tolist(), 0.2, 0.28)
        return oracles.aggregate(aggregation, token, MASK.tolist(), 6)

    total = losses.Denominators(len(MASK), int(MASK.sum()), 6)
    inputs = torch.where(MASK, logprobs, poison).requires_grad_()
    token_loss, _ = losses.POLICY_LOSSES[name](
        inputs, torch.where(MASK, old, poison), torch.where(MASK, advantages, poison), MASK, 0.2, 0.28
    )
    loss = losses.AGGREGATIONS[aggregation](token_loss, MASK, total)
    assert loss.item() == pytest.approx(oracle(lists[0]), abs=1e-6, rel=1e-6)
    loss.backward()
    assert (inputs.grad[~MASK] == 0).all()
    for i, t in MASK.nonzero().tolist():
        moved = []
        for h in (1e-6, -1e-6):
            shifted = [list(r) for r in lists[0]]
            shifted[i][t] += h
            moved.append(oracle(shifted))
        assert inputs.grad[i, t].item() == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-6, rel=1e-4)


def test_ratio_one_is_reinforce():
    logprobs = rows(MASK).requires_grad_()
    advantages = rows(MASK, seed=4)
    token_loss, _ = losses.ppo(logprobs, logprobs.detach(), advantages, MASK, 0.2, 0.2)
    losses.token_mean(token_loss, MASK, losses.Denominators(4, 8, 5)).backward()
    torch.testing.assert_close(logprobs.grad, torch.where(MASK, -advantages, 0.0) / 8)


def test_ppo_stays_finite_at_infinite_ratios():
    logprobs = torch.tensor([[500.0, 500.0, -500.0, -500.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss, _ = losses.ppo(logprobs, torch.zeros(1, 4), advantages, torch.ones(1, 4, dtype=torch.bool), 0.2, 0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all() and logprobs.grad[0, 0] == 0


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
    assert torch.isfinite(with_outlier).all()
    torch.testing.assert_close(with_outlier[:-1], gradient(normal), atol=0, rtol=0)


# ---------------------------------------------------------------------------------------------- ranks and micro-batches


@pytest.fixture(scope="module")
def gradients(tiny, tmp_path_factory):
    """Full gradients and losses of the same samples on 1, 2 and 3 ranks, over ways of splitting them."""
    found = {}
    for world in (1, 2, 3):
        out = tmp_path_factory.mktemp("gradients") / "out"
        result = launch(world, "gradient_worker.py", tiny, out, timeout=150)
        assert result.returncode == 0, result.stderr[-3000:]
        found[world] = torch.load(f"{out}.pt", weights_only=True), json.loads(out.with_suffix(".json").read_text())
    return found


@pytest.mark.parametrize("aggregation", list(losses.AGGREGATIONS))
def test_ranks_with_uneven_tokens_equal_one_process(gradients, aggregation):
    """Test number one: shares of 1 to 9 sequences a rank, also none, and micro-batches down to one sample."""
    want, want_loss = gradients[1][0][f"{aggregation}/even/1000000"], gradients[1][1][f"{aggregation}/even/1000000"]
    compared = 0
    for world, (found, found_loss) in gradients.items():
        for key, got in found.items():
            if key.startswith(aggregation):
                assert found_loss[key] == pytest.approx(want_loss, abs=1e-6)
                for name in want:
                    assert (got[name] - want[name]).abs().max() <= 1e-6, (world, key, name)
                assert max(w.abs().max() for w in want.values()) > 0.01
                compared += 1
    assert compared == 3 * 3 * 2
