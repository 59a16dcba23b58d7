#!/bin/bash
# Check and time pkt on the GPUs of this machine, with one command and within BUDGET seconds:
#
#   benchmarks/gpu_checks.sh                      every step, on as many ranks as there are GPUs
#   benchmarks/gpu_checks.sh quick language link  some steps, in this order
#   BUDGET=240 RANKS=2 benchmarks/gpu_checks.sh
#
# PKT_TEST_RANKS=2,4 leaves the tests of other numbers of ranks out.
# Steps: about simulator quick language litmus kernels operators graphs timeouts lost link semantics runtime doctor
# sanitize; and any module, as benchmarks.collectives, with the arguments that ARGS holds.
#
# A step that outlasts its time is ended and the next one begins; one that would begin too late is left out. Results come
# to $OUT (benchmarks/results where it is not set): log.txt, summary.txt and the newest six files of figures. Works on a
# copy of the tree, so nothing need be installed; packages that the machine lacks may lie in .gpu-site. Exit status 0 if
# every step was right.

set -uo pipefail
cd "$(dirname "$0")/.."
HERE=$PWD
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-520}
OUT=${OUT:-$HERE/benchmarks/results}
STEPS=("$@")
[ $# -gt 0 ] || STEPS=(about simulator quick language litmus kernels operators graphs timeouts lost link semantics
    runtime doctor sanitize)

# kernels/ is installed as pkt.kernels; in the copy it simply lies there.
STAGE=$(mktemp -d)
trap 'rm -rf "$STAGE"' EXIT
mkdir -p "$OUT" "$STAGE/site/pkt_triton-0.dist-info"
cp -rp pkt kernels tests benchmarks pyproject.toml "$STAGE"
cp -rp kernels "$STAGE/pkt/kernels"
printf 'Metadata-Version: 2.1\nName: pkt-triton\nVersion: 0\n' >"$STAGE/site/pkt_triton-0.dist-info/METADATA"
cd "$STAGE"

export PYTHONPATH=$STAGE:$STAGE/site
"$PYTHON" -c "import greenlet, platformdirs, cloudpickle" 2>/dev/null || PYTHONPATH=$PYTHONPATH:$HERE/.gpu-site
export PYTHONUNBUFFERED=1 COLUMNS=150 MPLBACKEND=agg PKT_DISABLE_MULTICAST=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$STAGE/triton}
[ -f "$HERE/.gpu-site/COMMIT" ] && PKT_COMMIT=$(cat "$HERE/.gpu-site/COMMIT") && export PKT_COMMIT
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
RANKS=${RANKS:-$((GPUS < 4 ? GPUS : 4))}
: >"$OUT/log.txt"
: >"$OUT/summary.txt"

gpu_tests() {
    "$PYTHON" -m pytest "$1" -m gpu -q -rfEP --tb=short --durations=5 -p no:cacheprovider --timeout=200
}

step() {
    case $1 in
    about)
        nvidia-smi -L
        nvidia-smi topo -m
        env | grep -E '^(NCCL_NVLS|TORCH_SYMM_MEM|NVSHMEM|PKT|CUDA)' | sort
        "$PYTHON" -c "import sys, torch, triton; print(sys.version, torch.__version__, triton.__version__)"
        ;;
    simulator) "$PYTHON" -m benchmarks.link --device cpu --quick ;;
    quick) "$PYTHON" -m benchmarks.link --quick --ranks "$RANKS" ;;
    link) "$PYTHON" -m benchmarks.link --ranks "$RANKS" ;;
    language | litmus | kernels | operators | graphs | timeouts | lost | semantics) gpu_tests "tests/gpu/test_$1.py" ;;
    runtime) gpu_tests tests/runtime ;;
    doctor) "$PYTHON" -m pkt.cli doctor ;;
    sanitize)
        compute-sanitizer --tool memcheck --report-api-errors no --target-processes all --error-exitcode 9 \
            "$PYTHON" -m tests.gpu.sanitize "$((RANKS < 2 ? RANKS : 2))"
        ;;
    *.*) "$PYTHON" -m "$1" ${ARGS:-} ;;
    *)
        echo "no step is called $1"
        return 2
        ;;
    esac
}

limit() { # seconds that a step may take
    case $1 in
    about) echo 30 ;;
    simulator) echo 60 ;;
    link | kernels | operators | language | runtime | *.*) echo 200 ;;
    *) echo 150 ;;
    esac
}

export -f step gpu_tests
export PYTHON RANKS ARGS=${ARGS:-}
WORST=0
for NAME in "${STEPS[@]}"; do
    LEFT=$((BUDGET - SECONDS))
    if [ $LEFT -lt 20 ]; then
        echo "$NAME: left out, no time" | tee -a "$OUT/summary.txt"
        WORST=1
        continue
    fi
    MOST=$(limit "$NAME")
    START=$SECONDS
    echo "=== $NAME" >>"$OUT/log.txt"
    timeout -k 10 $((LEFT < MOST ? LEFT : MOST)) bash -c "step $NAME" >"$STAGE/step.txt" 2>&1
    RC=$?
    cat "$STAGE/step.txt" >>"$OUT/log.txt"
    # What is printed is short; the log has everything.
    SHOWN=12
    [ $RC -ne 0 ] || [ "$NAME" = link ] && SHOWN=45
    tail -n $SHOWN "$STAGE/step.txt" | cut -c1-160
    echo "$NAME: status $RC, $((SECONDS - START)) s" | tee -a "$OUT/summary.txt"
    [ $RC -eq 0 ] || WORST=1
    find benchmarks/results -newer "$STAGE/site" -type f \( -name '*.json' -o -name '*.png' \) -size -16M -printf '%T@ %p\n' |
        sort -rn | head -6 | cut -d' ' -f2- | xargs -r cp -f -t "$OUT"
done
tail -c 15000000 "$OUT/log.txt" >"$STAGE/log.txt" && cp "$STAGE/log.txt" "$OUT/log.txt"
echo "--- summary"
cat "$OUT/summary.txt"
exit $WORST
