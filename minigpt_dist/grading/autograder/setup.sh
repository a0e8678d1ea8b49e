#!/usr/bin/env bash
# Run once, when Gradescope builds the image: an interpreter of its own, the suite, and bubblewrap to run submissions in.
set -euo pipefail
root="${AUTOGRADER_ROOT:-/autograder}"
apt-get update
apt-get install -y --no-install-recommends python3 python3-venv bubblewrap
python3 -m venv "$root/venv"
"$root/venv/bin/pip" install --no-cache-dir @TORCH@
"$root/venv/bin/pip" install --no-cache-dir "$root/source/@WHEEL@[grading]"
# What a submission could look for: neither the suite nor results are for its eyes, also where no sandbox can wall them off.
mkdir -p "$root/results"
suite="$(cd / && "$root/venv/bin/python" -c 'import minigpt_dist; print(minigpt_dist.__path__[0])')"
chmod -R o= "$root/source" "$root/results" "$suite"
