#!/usr/bin/env bash
# Every check: ruff, then pytest. Prepares what it needs.
#   bash scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest tests "$@"
