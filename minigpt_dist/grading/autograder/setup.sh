#!/usr/bin/env bash
# Run once, when Gradescope builds the image: an interpreter of its own, the suite, and bubblewrap to run submissions in.
set -euo pipefail
root="${AUTOGRADER_ROOT:-/autograder}"
apt-get update
apt-get install -y --no-install-recommends python3 python3-venv bubblewrap
python3 -m venv "$root/venv"
"$root/venv/bin/pip" install --no-cache-dir @TORCH@
"$root/venv/bin/pip" install --no-cache-dir "$root/source/@WHEEL@[grading]"
# What a submission could look for: neither the suite's source nor results are for its eyes.
mkdir -p "$root/results"
chmod -R o= "$root/source" "$root/results"
