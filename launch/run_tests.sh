#!/usr/bin/env bash
# Make an environment with the tested versions, if there is none, and run the whole test suite in it.
# Usage: bash launch/run_tests.sh [pytest options]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${VENV:-$root/.venv}

"$root/launch/make_venv.sh" "$venv"
export PATH="$venv/bin:$PATH"
cd "$root"
exec python -m pytest "$@"
