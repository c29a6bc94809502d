#!/usr/bin/env bash
# Trains on the nodes of a SLURM job: `sbatch` takes what follows the script's name as dlm-train's own options.
#   sbatch --nodes 4 --gpus-per-node 8 scripts/slurm.sh --config pico --train.out /shared/runs/pico
#   ACCELERATE=ddp sbatch …          ddp, fsdp2 (unless told), deepspeed-zero2, deepspeed-zero3, or a file of your own
# Submit from the clone, on a file system that all nodes see; train.out must lie on one too. Near its time limit the job
# saves a checkpoint and leaves; requeued or submitted again, it goes on there.
#SBATCH --job-name=dlm-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@180
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"

if [ -z "${VIRTUAL_ENV:-}" ]; then # else the environment you submitted from is used
    bash scripts/setup
    export PATH="$PWD/.venv/bin:$PATH"
fi
kind=${ACCELERATE:-fsdp2}
[ -f "$kind" ] || kind=configs/accelerate/$kind.yaml
gpus=${SLURM_GPUS_ON_NODE:?ask for GPUs: --gpus-per-node N}

# One task a node; it starts a process a GPU. Its own number is known on the node alone.
exec srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch \
    --config_file "$kind" --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * gpus)) \
    --main_process_ip "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" \
    --main_process_port $((20000 + SLURM_JOB_ID % 20000)) \
    -m dlm.cli.train "$@"
