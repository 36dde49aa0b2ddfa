#!/usr/bin/env bash
# Correctness and the whole table on one CUDA GPU in bfloat16, in under 8 minutes; figures land in the folder given.
#   benchmarks/gpu.sh [results-folder]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/gpu}
mkdir -p "$out"
python=.venv/bin/python
[ -x "$python" ] || python=python3
export HF_HUB_OFFLINE=1
"$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("benchmarks/gpu.sh needs a CUDA device; for a CPU run the scripts themselves.")'
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
failed=0
step() { # limit in seconds, name, command ...: a step that fails or takes too long does not keep the others from running
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.log" || { echo "== $name failed"; failed=1; }
}
step 90 kernel "$python" benchmarks/kernel_check.py
step 60 alignment "$python" benchmarks/alignment.py --output "$out/alignment.json"
step 60 head "$python" benchmarks/head.py --output "$out/head.json"
step 240 throughput "$python" benchmarks/throughput.py --keep_memory --repeats 10 --output "$out/throughput.json"
exit "$failed"
