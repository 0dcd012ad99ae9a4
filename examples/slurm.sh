#!/bin/bash
# Train a plan under SLURM: sbatch examples/slurm.sh plan.json --steps 1000 --device cuda --checkpoint /shared/run
# The plan's devices are nodes times ranks of a node. What SLURM requeues goes on from its last checkpoint.
#SBATCH --job-name=soapstone
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

# One torchrun on each node, which starts the ranks; they meet at the first node.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_ON_NODE}" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:${PORT:-29500}" \
  --max-restarts 3 \
  -m soapstone train "$@"
