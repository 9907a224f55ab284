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
# Two cores, two halves side by side, of about one length: tests of hosts with worker engines, and all others. Each half
# runs its tests in order, so that sandboxes of one Docker Engine never meet another test's.
halves() {
  local logs=$ROOT/.cache/logs engines=() rest=() file pid one=0 two=0
  mkdir -p "$logs"
  for file in tests/e2e/test_*.py tests/conformance/test_rollout_workers.py; do
    case $file in *envkeeper* | */test_trajectory.py | */test_weights.py) ;; *) engines+=("$file") && rest+=("--ignore=$file") ;; esac
  done
  say "pytest, half of it in $logs/test-engines.log"
  "$python" -m pytest --durations=25 -o cache_dir=.cache/pytest-engines "${engines[@]}" >"$logs/test-engines.log" 2>&1 &
  pid=$!
  "$python" -m pytest --durations=25 -o cache_dir=.cache/pytest-rest tests "${rest[@]}" 2>&1 | tee "$logs/test-rest.log"
  one=${PIPESTATUS[0]}
  say "the other half"
  tail -n +1 -f --pid=$pid "$logs/test-engines.log"
  wait "$pid" || two=$?
  closing "$logs/test-rest.log" "$logs/test-engines.log"
  if [ "$one" != 0 ]; then return "$one"; fi
  return "$two"
}

# pytest's closing lines of both, added up in its own form.
closing() {
  local log
  for log in "$@"; do grep -aE '^=+ .* in [0-9.]+s.* =+$' "$log" | tail -n 1; done | tr -d '=,' | awk -v s="$SECONDS" '
    { for (i = 1; i < NF && $i != "in"; i += 2) { if (!($(i + 1) in n)) order[++k] = $(i + 1); n[$(i + 1)] += $i } }
    END { line = ""; for (i = 1; i <= k; i++) line = line (i > 1 ? ", " : "") n[order[i]] " " order[i]
          printf "=========== %s in %d.00s (%d:%02d:%02d) ===========\n", line, s, s / 3600, s % 3600 / 60, s % 60 }'
}

say "pytest $*"
status=0
if [ "$*" = tests ] && [ "$(getconf _NPROCESSORS_ONLN)" -gt 1 ]; then
  halves || status=$?
else
  "$python" -m pytest "$@" || status=$?
fi
exit "$status"
