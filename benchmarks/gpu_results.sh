#!/usr/bin/env bash
# The papers' larger tables, for a machine with a GPU: each card stacked, one seed of it again in Ray, its
# page. Begun again, it goes on where it was.
#     bash benchmarks/gpu_results.sh DATA-DIR [OUT] [--setting reduced]
# DATA-DIR holds the files of CIFAR-10, MNIST and Sentiment140 (docs/data.md).
set -euo pipefail
data=${1:?give the folder of the data sets}
out=${2:-gpu-results}
for card in fedadc-t1 fedfor-t2 rfedavg-t1 rfedavg-t2 niid-bench-cifar10-100; do
    folder="$out/$card"
    if [ -f "$folder/experiment.toml" ]; then
        command=(flwr-regs bench --resume "$folder" --runner stacked)
    else
        command=(flwr-regs bench "$card" --runner stacked "data-dir=$data" "out=$folder" "${@:3}")
    fi
    "${command[@]}" || echo "$card: a method diverged, collapsed or failed; its table says which"
    seed=$(python -c "import sys, tomllib; print(tomllib.load(open(sys.argv[1], 'rb'))['seeds'][0])" "$folder/experiment.toml")
    flwr-regs reproduce "$folder" --runner ray --gpus-per-client 0.1 --tolerance 3 --seeds "$seed" \
        || echo "$card: Ray gave other figures"
    python -m benchmarks.results keep "$folder" "$card"
done
python -m benchmarks.results report
