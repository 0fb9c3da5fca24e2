#!/usr/bin/env bash
# From nothing to a trained model: packages, embedded model, GDPO on two-term sums, six to nine minutes on two CPU cores.
#   bash scripts/quickstart.sh [flags of train.py]     ends with the rewards before and after, and a picture of the run
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
echo "quickstart: training; the run's settings are scripts/quickstart.yaml"
exec .venv/bin/python train.py --config scripts/quickstart.yaml "$@"
