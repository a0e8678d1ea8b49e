#!/usr/bin/env bash
# Grades $SUBMISSION and leaves Classroom's result in $GITHUB_OUTPUT; the grade command itself adds to $GITHUB_STEP_SUMMARY.
set -uo pipefail
python="${SUITE_PYTHON:-$RUNNER_TEMP/minigpt-dist/bin/python}"
submission="$(realpath -- "$SUBMISSION")"
rubric="${RUBRIC:+$(realpath -- "$RUBRIC")}"
out="$(mktemp -d)"
mkdir "$out/here" && cd "$out/here" || exit 3 # an empty folder, so that nothing handed in can be imported from it
options=(--out "$out/grade" --isolation "$ISOLATION")
if [ -n "$rubric" ]; then
  options+=(--rubric "$rubric")
fi
PYTHONSAFEPATH=1 "$python" -m minigpt_dist grade "$submission" "${options[@]}"
code=$?

result="$(find "$out/grade" -name classroom.json -type f -print -quit 2>/dev/null)"
if [ -n "$result" ]; then
  echo "result=$(base64 <"$result" | tr -d '\n')" >>"$GITHUB_OUTPUT"
fi
# Lost points are no error of the job: Classroom reads them from the result. Anything else is.
case "$code" in 0 | 1 | 4) exit 0 ;; *) exit "$code" ;; esac
