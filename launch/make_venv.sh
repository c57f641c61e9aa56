#!/usr/bin/env bash
# Make a virtual environment with the tested versions and this package in it; does nothing if it is already complete.
# Usage: bash launch/make_venv.sh FOLDER
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$1
wanted=$(cat "$root/requirements.txt" "$root/setup.py" | cksum)

[ -f "$venv/.complete" ] && [ "$(cat "$venv/.complete")" = "$wanted" ] && exit 0
echo "== Environment: $venv"
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "Python 3.10 or newer is needed; name one with PYTHON=/path/to/python3" >&2; exit 1; }
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$root/requirements.txt"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable "$root"
echo "$wanted" > "$venv/.complete"
