#!/bin/bash
# Checks and times the operators on 4 GPUs; results in $OUT (JSON, markdown, PNG, log). Under 8 minutes.
#   bash benchmarks/gpu_operators.sh [seconds] [further arguments of benchmarks.operators]
set -u -o pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
seconds=${1:-400}
[ $# -gt 0 ] && shift
mkdir -p "$out"
python3 -c 'import greenlet' 2>/dev/null || PYTHONPATH=$PWD/.gpu-site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python3 -c 'import pkt.kernels' 2>/dev/null || ln -sfn ../kernels pkt/kernels
# Results name what was measured, not the machine: the commit of a copy without its history, and this command.
[ -f .gpu-site/COMMIT ] && PKT_COMMIT=$(cat .gpu-site/COMMIT) && export PKT_COMMIT
export PKT_COMMAND="bash benchmarks/gpu_operators.sh $seconds${*:+ $*}"
# no multicast object, ever
export PKT_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
nvidia-smi --query-gpu=index,name,clocks.sm,temperature.gpu,power.draw --format=csv,noheader
timeout -k 5 $((seconds + 60)) python3 -m benchmarks.operators --seconds "$seconds" --out "$out" "$@" 2>&1 | tee "$out/operators.log"
code=$?
nvidia-smi --query-gpu=index,clocks.sm,temperature.gpu,power.draw --format=csv,noheader
if [ -n "${OUT:-}" ]; then # few files, where files are brought back
    cd "$out" && cat -- *.md && tar -czf tables.tgz --remove-files -- *.md *.png
fi
exit $code
