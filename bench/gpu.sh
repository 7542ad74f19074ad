#!/usr/bin/env bash
# All figures that need a GPU, in one command: at most 8 minutes on one card, no downloads. See docs/benchmarks.md.
# Rates and times are judged only on an NVIDIA H200, everything else on any card.
#
#   bench/gpu.sh                      everything; the result goes to bench/results/gpu-<time>.json
#   bench/gpu.sh --rehearse           the same program on the CPU with tiny shapes and Triton's interpreter; no figures
#   bench/gpu.sh --only kernels,peers some parts (the calibration and their warm-ups always run)
#   PYTHON=/path/to/python bench/gpu.sh --out result.json --logs logs.tgz
#
# If the card is available for longer: two commands of at most 8 minutes each, in which every part has time up to its limit:
#   bench/gpu.sh --only 'checks,invariant,kernels,choices'
#   bench/gpu.sh --only 'llama 8b,small models,formats,latency,saturated,peers'
#
# Needs torch, triton, numpy, safetensors, tokenizers and jinja2, and a C compiler with Python's headers for Triton;
# transformers for the peers, pytest for the rehearsal. No package of the web half.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "bench/gpu.sh needs Python 3.11 or newer, and $python is not; PYTHON=/path/to/python names another" >&2
    exit 1
fi
exec "$python" -m bench.gpu "$@"
