#!/usr/bin/env bash
# Pretrain with mpirun (Open MPI), which starts the ranks where its own hostfile or scheduler says.
# Usage: RANKS=16 bash launch/pretrain_mpi.sh [options of ds-bert pretrain]
# MPIRUN_OPTIONS may hold more options of mpirun, such as "--hostfile hosts".
set -euo pipefail

# mpirun gives its processes one second after a Ctrl-C; saving takes longer.
# shellcheck disable=SC2086  # several options in one variable
exec mpirun -np "${RANKS:-2}" --mca odls_base_sigkill_timeout 30 ${MPIRUN_OPTIONS:-} ds-bert pretrain "$@"
