#!/bin/bash
# Train on several hosts under Slurm, on a Ray cluster that exists as long as the job.
#
#   sbatch [OPTIONS OF SBATCH] cluster/deploy/slurm_ray.sh CONFIG [KEY=VALUE ...]
#   sbatch --nodes=4 cluster/deploy/slurm_ray.sh configs/cluster/wt103-two-hosts.yaml optimizer.lr=2e-4
#
# Submit it from a directory that all hosts see under the same path; the environment of the project is
# its .venv, or is activated. Exit codes are those of `txl train`. After code 75 (stopped, saved) the job is requeued if the run has a newer
# checkpoint than at the start of the job. README.md lists what the script assumes, and when to take
# slurm.sh instead.

#SBATCH --job-name=txl-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# No other job on these hosts: `ray stop`, by which symmetric-run ends, ends every Ray of this user.
#SBATCH --exclusive
# "B:": only this script gets the signal. Ray must not: it would end the ranks before they save, and
# symmetric-run forwards no signal. grace_seconds below, and 20 seconds for Ray, must fit into this.
#SBATCH --signal=B:USR1@180

set -euo pipefail

if (($# == 0)); then
    echo "usage: sbatch slurm_ray.sh CONFIG [KEY=VALUE ...]" >&2
    exit 2
fi
grace_seconds=150
python=$(realpath --no-symlinks "${TXL_PYTHON:-$(command -v .venv/bin/python || command -v python)}")
export PATH=${python%/*}:$PATH  # symmetric-run calls `ray`
# The ranks of the run: one per GPU, or TXL_RANKS.
ranks=${TXL_RANKS:-$((SLURM_JOB_NUM_NODES * ${SLURM_GPUS_ON_NODE:-1}))}

settings=$("$python" -m txl_dist config show "$@")  # ends with 2 if the config is invalid
run=$(realpath --canonicalize-missing "$(sed -n 's/^directory: //p' <<<"$settings")")
latest() { cat "$run/LATEST" 2>/dev/null || true; }
latest_before=$(latest)

# What the hosts share: the token of this Ray, and what the driver reports. Removed at the end, or by
# the next start of a job that was killed.
state=$run/.slurm-ray-$SLURM_JOB_ID
mkdir -p "$run"
rm -rf "$state"
mkdir -m 700 "$state"
trap 'rm -rf "$state"' EXIT
export TXL_STATE=$state
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state/token
(umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$state/token")

# By default symmetric-run gives the other hosts 30 seconds to start.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
export RAY_USAGE_STATS_ENABLED=0
export SLURM_EXPORT_ENV=ALL  # also with `sbatch --export=NONE`, the rule of some sites
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_ON_NODE:-1}  # one task: all CPUs of its host
ulimit -n "$(ulimit -Hn)"  # Ray opens a file per connection

# This script runs on the first host, which becomes the head node: symmetric-run compares the address
# with those of its host. The host's own name may resolve to 127.0.1.1, so it is no address. The port
# differs between jobs, and is below 32768, where Linux starts to assign ports.
addresses=$(hostname -I)
address=${TXL_HEAD_ADDRESS:-${addresses%% *}}:$((20000 + SLURM_JOB_ID % 10000))

# The driver, `txl train`, as symmetric-run starts it on this host. It writes its exit code to a file,
# because symmetric-run also exits with 0 when Ray could not be started or was interrupted. 138: the
# signal came before Python could catch it.
# shellcheck disable=SC2016  # expanded by the inner bash
driver='
    "$@" & echo $! >"$TXL_STATE/pid"
    if [[ -e $TXL_STATE/stop ]]; then kill -USR1 $!; fi
    code=0; wait $! || code=$?
    if ((code == 138)); then code=75; fi
    echo $code >"$TXL_STATE/code"
    exit $code
'
resources=(--num-cpus="${SLURM_CPUS_ON_NODE:-1}")
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then resources+=(--num-gpus="$SLURM_GPUS_ON_NODE"); fi
srun --ntasks-per-node=1 --kill-on-bad-exit=0 \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" "${resources[@]}" -- \
    bash -c "$driver" driver \
    "$python" -m txl_dist train "$1" --on "$address" --ranks "$ranks" \
    "training.grace_seconds=$grace_seconds" "${@:2}" &
step=$!

# The time limit is near (USR1), or the job is cancelled or preempted (TERM).
terminated=false
stop() {
    touch "$state/stop"
    if [[ -s $state/pid ]]; then
        kill -USR1 "$(<"$state/pid")" 2>/dev/null || true
    else
        kill "$step" 2>/dev/null || true  # Ray is not ready; there is nothing to save
    fi
}
trap stop USR1
trap 'terminated=true; stop' TERM
status=0
while kill -0 "$step" 2>/dev/null; do
    status=0
    wait "$step" || status=$?  # also returns after a signal
done

if [[ -s $state/code ]]; then
    code=$(<"$state/code")
elif [[ -e $state/stop ]]; then
    code=75
else
    echo "Ray did not start, or its head node failed: symmetric-run ended with $status before" \
        "txl train did. To resume, submit the same command again" >&2
    exit 1
fi
if ((code == 75)) && ! $terminated; then
    if [[ $(latest) == "$latest_before" ]]; then
        echo "stopped without a new checkpoint in $run, so the job is not requeued: the next one" \
            "would end in the same way. Raise --time, or save more often" >&2
    else
        rm -rf "$state"
        scontrol requeue "$SLURM_JOB_ID"  # on a real cluster this ends the script
    fi
fi
exit "$code"
