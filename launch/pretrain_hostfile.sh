#!/usr/bin/env bash
# Pretrain on the hosts of a hostfile, over ssh. Run it on any machine that can log in to them, in an environment that lies
# at the same path on all. Usage: bash launch/pretrain_hostfile.sh HOSTFILE [options of ds-bert pretrain]
# Example: bash launch/pretrain_hostfile.sh hostfile --data /shared/data --output /shared/run --model base \
#            --deepspeed_config ds_configs/gpu_base_bf16_zero1.json --max-steps 100000 --save-interval 1000
set -euo pipefail
hostfile=$1
shift

exec ds-bert pretrain --hostfile "$hostfile" --max-restarts 3 "$@"
