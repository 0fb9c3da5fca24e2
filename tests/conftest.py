"""Shared set-up: small random models, samples, and real processes over gloo."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_OFFLINE="1")

import dist_utils as du
import rollout as ro
from train import embedded_model_path


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded 135M model's folder."""
    path = embedded_model_path()
    assert path.exists(), "run python scripts/prepare_model.py first (bash scripts/test.sh does)"
    return path


@pytest.fixture(scope="session")
def tiny(embedded, tmp_path_factory) -> Path:
    """A random two-layer Llama with the embedded model's tokenizer, tied embeddings, and two EOS ids."""
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    # what a hub model may ship, and an engine must not pick up; its EOS ids count
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, eos_token_id=[2, 7]
    )
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(embedded).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def mini(tmp_path_factory) -> Path:
    """A random two-layer Llama with 512 words and no tokenizer, of small activations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    path = tmp_path_factory.mktemp("mini")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1, tie_word_embeddings=True)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def alone() -> Iterator[du.Ranks]:
    """A process group of one in the test's own process: collectives answer at once."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield du.Ranks(0, 1, torch.device("cpu"))
    torch.distributed.destroy_process_group()


def make_samples(group_sizes: list[int], seed: int = 0, longest: int = 9, words: int = 40000) -> list[ro.Sample]:
    """Random samples of uneven lengths, one prompt a group, of ids from 10 to `words`."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        return torch.randint(10, words, (length,), generator=generator).tolist()

    samples = []
    for group, size in enumerate(group_sizes):
        prompt = ids(2, 12)
        for _ in range(size):
            response = ids(1, longest)
            samples.append(ro.Sample(prompt, response, [-1.0] * len(response), "stop", "", {}, group))
    return samples


def launch(world_size: int, script: str, *args: object, timeout: int = 120) -> subprocess.CompletedProcess:
    """torchrun `tests/<script>` (or a path) on `world_size` ranks; fails the test when they do not all return in time."""
    path = ROOT / script if "/" in script or script == "train.py" else ROOT / "tests" / script
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [*(torchrun if world_size else [sys.executable]), str(path), *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        pytest.fail(f"{command} did not return within {timeout} s\n{out[-3000:]}\n{err[-6000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="session")
def quickstart(embedded, tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """What scripts/quickstart.sh runs after its set-up, cut to two small steps: the process and the run folder."""
    run_dir = tmp_path_factory.mktemp("quickstart") / "run"
    argv = ["--config", "scripts/quickstart.yaml", "--steps", "2", "--eval-prompts", "6", "--prompts-per-step", "4"]
    argv += ["--run-dir", run_dir]
    return launch(0, "train.py", *argv, timeout=240), run_dir
