"""The real vLLM on CPU, in the trainer's own process, on two ranks."""

import json

import pytest
from conftest import launch


@pytest.fixture(scope="module")
def seen(tiny, tmp_path_factory):
    """What vllm_worker saw on each of two ranks in float32 (bfloat16: test_end_to_end), and a limit of gaps."""
    out = tmp_path_factory.mktemp("vllm") / "out.json"
    result = launch(2, "vllm_worker.py", tiny, "float32", out, timeout=180)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(out.read_text()), 1e-3


def test_logprobs_are_processed_and_nothing_comes_from_generation_config(seen):
    """The tiny model ships top_k 20, top_p 0.8 and a repetition penalty: any of them would show in the log-probs."""
    for temperature in (0.5, 1.5):
        assert all(mean < seen[1] for mean, _ in seen[0][f"gap at {temperature}"]), temperature


def test_a_push_replaces_all_weights_and_forgets_the_prefix_cache(seen):
    for (before, _), (after, _) in zip(seen[0]["gap before the push"], seen[0]["gap after the push"]):
        assert after < seen[1] < 0.3 < before


def test_seeds_repeat_and_differ(seen):
    ids = seen[0]["ids"]
    assert ids == seen[0]["ids again"] and ids != seen[0]["ids of other seeds"]
    flat = [tuple(r) for rank in ids for group in rank for r in group]
    assert len(set(flat)) >= 0.9 * len(flat)  # over ranks, prompts and samples


def test_what_is_forgotten_changes_no_bit_of_what_follows(seen):
    assert all(seen[0]["repeats after others"])


def test_every_eos_id_ends_a_response(seen):
    assert all(a == [True, "stop"] for a in seen[0]["stops at any eos"])
