#!/usr/bin/env bash
# `make test`: linters and types first (seconds), then pytest. What the run leaves behind is killed and named at the end.
. "$(dirname "$0")/lib.sh"

cd "$ROOT"
python=$ROOT/.venv/bin/python
# Every process that the tests start inherits this word; it is how leftovers are found, whoever their parent is by now.
export BELAYER_TEST_RUN="run-$$-$RANDOM"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

leftovers() {
  local entry pid
  for entry in /proc/[0-9]*; do
    pid=${entry#/proc/}
    [ "$pid" != $$ ] && [ "$pid" != "$BASHPID" ] || continue
    if tr '\0' '\n' 2>/dev/null <"$entry/environ" | grep -qx "BELAYER_TEST_RUN=$BELAYER_TEST_RUN"; then echo "$pid"; fi
  done 2>/dev/null
}
sweep() {
  local status=$? pid found
  trap - EXIT ERR
  for _ in 1 2 3; do
    found=$(leftovers)
    for pid in $found; do
      [ -e "/proc/$pid/cmdline" ] || continue
      [ "$(ps -o ppid= -p "$pid" 2>/dev/null | tr -d ' ')" != $$ ] || continue
      printf '[test] left behind, killed: %s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-100)"
      kill -KILL "$pid" 2>/dev/null
    done
  done
  exit "$status"
}
trap sweep EXIT
trap 'exit 130' INT TERM

check() {
  say "$*"
  "$@" || die "$*" "read the messages above"
}
sources=()
for folder in belayer gpuowner belayerd envkeeper belayerctl tests benchmarks examples setup; do
  if find "$folder" -name '*.py' -print -quit 2>/dev/null | grep -q .; then sources+=("$folder"); fi
done
if [ "${BELAYER_SKIP_LINT:-}" != 1 ]; then
  check "$python" -m ruff check "${sources[@]}"
  check "$python" -m ruff format --check "${sources[@]}"
  check "$python" -m mypy
fi
say "pytest $*"
status=0
"$python" -m pytest "$@" || status=$?
exit "$status"
