#!/usr/bin/env bash
# From nothing to a trained masked-language model on this machine: environment, text, data, training on two ranks,
# evaluation, export, answers. Usage: bash launch/quickstart.sh [RUN_FOLDER]
# Needs Python 3.10+ with headers, git and a C++ compiler; PYTHON and VENV may name another interpreter and folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
run=${1:-$root/quickstart_run}
venv=${VENV:-$root/.venv}

"$root/launch/make_venv.sh" "$venv"
export PATH="$venv/bin:$PATH" HF_HUB_OFFLINE=1

step() { printf '\n== %s\n' "$*"; }

mkdir -p "$run"
step "Text: the docstrings of the installed packages"
[ -s "$run/corpus.txt" ] || python "$root/launch/docstring_corpus.py" --output "$run/corpus.txt"

step "ds-bert prepare"
[ -d "$run/data" ] || ds-bert prepare --input "$run/corpus.txt" --output "$run/data" \
  --vocab-size 8192 --max-length 128

step "ds-bert pretrain, two ranks"
ds-bert pretrain --data "$run/data" --output "$run/run" --model tiny --num-procs 2 --max-steps 1200 \
  --eval-interval 200 --save-interval 200 --keep-last 2 --deepspeed_config "$root/ds_configs/cpu_quickstart.json"

step "ds-bert evaluate"
ds-bert evaluate --checkpoint "$run/run" --data "$run/data" --json > "$run/figures.json"

step "ds-bert export"
[ -d "$run/model" ] || ds-bert export --checkpoint "$run/run" --output "$run/model"

step "The model's answers"
python "$root/launch/show_answers.py" "$run"
