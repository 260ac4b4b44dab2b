#!/usr/bin/env bash
# Two "machines" of two ranks each, both on this one: two torchruns that meet at a port of the loopback interface.
# On real machines run one of the two commands on each, with the name of the first in place of 127.0.0.1.
#
#   bash examples/two_nodes.sh [PORT]
set -euo pipefail
cd "$(dirname "$0")/.."
port=${1:-29500}
run=(python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$port")
program=(-m examples.distributed --deterministic)
"${run[@]}" --node-rank 1 "${program[@]}" &
other=$!
trap 'kill "$other" 2>/dev/null || :' EXIT  # if node 0 fails, node 1 would wait for it
"${run[@]}" --node-rank 0 "${program[@]}"
wait "$other"
