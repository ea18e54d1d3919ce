#!/bin/bash
# Start the ranks of one host, with the variables that torchrun would set, and wait for them. In the
# image: txl-ranks.
#
#   NUM_HOSTS=2 HOST_INDEX=0 MASTER_ADDR=host-0 txl-ranks CONFIG [KEY=VALUE ...]     # on host 0
#   NUM_HOSTS=2 HOST_INDEX=1 MASTER_ADDR=host-0 txl-ranks CONFIG [KEY=VALUE ...]     # on host 1
#
# RANKS_PER_HOST: as many as there are GPUs, or else 1. MASTER_PORT: 29500. The exit code is the
# highest of the ranks: it says whether the run was stopped (75) or failed, which that of torchrun does
# not (README.md). After a rank has failed, the others are killed AFTER_FAILURE_SECONDS (120) later.

set -euo pipefail

if (($# == 0)); then
    echo "usage: txl-ranks CONFIG [KEY=VALUE ...]" >&2
    exit 2
fi
num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS_PER_HOST:-$((num_gpus > 0 ? num_gpus : 1))}
export LOCAL_WORLD_SIZE=$ranks WORLD_SIZE=$((NUM_HOSTS * ranks)) MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-29500} TORCHELASTIC_RUN_ID=${TORCHELASTIC_RUN_ID:-txl-ranks}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

pids=() stop_requested=
# Kubernetes signals only this process, and kills what is left after the grace period.
trap 'stop_requested=1; kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT USR1
for ((local_rank = 0; local_rank < ranks; local_rank++)); do
    RANK=$((HOST_INDEX * ranks + local_rank)) LOCAL_RANK=$local_rank \
        "${TXL_PYTHON:-python}" -m txl_dist train "$@" &
    pids+=($!)
done
# A signal between two starts has reached only the ranks before it.
[[ -z $stop_requested ]] || kill -TERM "${pids[@]}" 2>/dev/null || true

# Ranks that wait for a failed one would notice after rank_timeout_seconds.
highest=0 kill_at=
while ((${#pids[@]})); do
    running=()
    for pid in "${pids[@]}"; do
        if kill -0 "$pid" 2>/dev/null; then
            running+=("$pid")
            continue
        fi
        code=0
        wait "$pid" || code=$?
        if ((code > highest)) && [[ -z $kill_at || $SECONDS -lt $kill_at ]]; then highest=$code; fi
        if ((code != 0 && code != 75)) && [[ -z $stop_requested ]]; then
            kill_at=${kill_at:-$((SECONDS + ${AFTER_FAILURE_SECONDS:-120}))}
        fi
    done
    pids=("${running[@]}")
    if [[ -n $kill_at && $SECONDS -ge $kill_at ]]; then
        kill -KILL "${pids[@]}" 2>/dev/null || true
    fi
    sleep 0.5 &
    wait $! || true  # a signal does not wait for the end of `sleep`
done
exit "$highest"
