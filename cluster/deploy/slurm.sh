#!/bin/bash
# Train on several hosts under Slurm, without Ray: one Slurm task per rank.
#
#   sbatch [OPTIONS OF SBATCH] cluster/deploy/slurm.sh CONFIG [KEY=VALUE ...]
#   sbatch --nodes=4 cluster/deploy/slurm.sh configs/cluster/wt103-two-hosts.yaml optimizer.lr=2e-4
#
# Submit it from a directory that all hosts see under the same path; the environment of the project is
# its .venv, or is activated. Exit codes are those of `txl train`. After code 75 (stopped on request) the job is requeued if there is a
# new checkpoint, and resumes from it. README.md lists what the script assumes and why it does not
# start torchrun.

#SBATCH --job-name=txl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# Without "B:" Slurm signals the tasks, not this script: every rank finishes its step and saves.
# grace_seconds below must be less than these 120 seconds.
#SBATCH --signal=USR1@120

set -euo pipefail

if (($# == 0)); then
    echo "usage: sbatch slurm.sh CONFIG [KEY=VALUE ...]" >&2
    exit 2
fi
python=${TXL_PYTHON:-$(command -v .venv/bin/python || command -v python)}
# A rank that has not saved by then ends by itself, and says what is lost, before Slurm kills it.
grace_seconds=110

settings=$("$python" -m txl_dist config show "$@")  # ends with 2 if the config is invalid
run=$(realpath --canonicalize-missing "$(sed -n 's/^directory: //p' <<<"$settings")")
latest() { cat "$run/LATEST" 2>/dev/null || true; }
latest_before=$(latest)

# The variables that torchrun sets and that are the same for all ranks. `txl train` is a rank, and
# starts no processes, only if it finds the complete set (txl_dist/runtime/process.py).
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]}
# Two jobs on one host get different ports; all are below 32768, where Linux starts to assign ports.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-1}
export TORCHELASTIC_RUN_ID=slurm-$SLURM_JOB_ID
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# With `sbatch --export=NONE`, the rule of some sites, tasks would get none of these.
export SLURM_EXPORT_ENV=ALL
# Since Slurm 22.05 srun does not take this from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# RANK and LOCAL_RANK differ per task, so each task sets them. `exec`: the signal reaches Python.
# Ranks end some seconds after each other: --kill-on-bad-exit=0 lets rank 0 finish after another
# rank has ended with 75, and --wait ends ranks that hang after another rank has failed. It is longer
# than rank 0 may deliver its metrics after the other ranks have ended.
code=0
srun --kill-on-bad-exit=0 --wait=$((grace_seconds + 30)) \
    bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank \
    "$python" -m txl_dist train "$1" "training.grace_seconds=$grace_seconds" "${@:2}" || code=$?

if ((code == 75)); then
    if [[ $(latest) == "$latest_before" ]]; then
        echo "stopped without a new checkpoint in $run, so the job is not requeued: the next one" \
            "would end in the same way. Raise --time, or save more often" >&2
    else
        scontrol requeue "$SLURM_JOB_ID"  # on a real cluster this ends the script
    fi
fi
exit "$code"
