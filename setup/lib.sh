# Shared by every step of setup/. Source it; it sets ROOT, CACHE, PREFIX, STEP and the helpers below.
# shellcheck shell=bash
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${BELAYER_CACHE:-$ROOT/.cache}
PREFIX=/opt/belayer
STEP=$(basename "$0" .sh)
# A plain su leaves the sbin directories out.
export PATH=$PATH:/usr/sbin:/sbin
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1
mkdir -p "$CACHE/stamps" "$CACHE/logs"

say() { printf '[%s] %s\n' "$STEP" "$*"; }

# die WHAT REMEDY [STATUS]: one sentence on what failed, one on what to do. Status 2 = the machine or the config is unfit.
die() {
  printf '[%s] FAILED: %s\n[%s] remedy: %s\n' "$STEP" "$1" "$STEP" "$2" >&2
  exit "${3:-1}"
}
trap 'die "line $LINENO of setup/$STEP.sh: $BASH_COMMAND" "read the lines above, then run make setup again (finished steps are kept)"' ERR
set -E

need_root() {
  [ "$(id -u)" = 0 ] || die "this step changes the system and needs root" "run it as root (sudo make setup)" 2
}

# key WORDS-OR-FILES...: a digest of the inputs of a step; a changed input makes the step run again.
key() {
  local item
  for item in "$@"; do
    if [ -f "$item" ]; then sha256sum <"$item"; else printf '%s\n' "$item"; fi
  done | sha256sum | cut -c1-16
}
stamped() { [ "$(cat "$CACHE/stamps/$STEP" 2>/dev/null)" = "$1" ]; }
stamp() { printf '%s\n' "$1" >"$CACHE/stamps/$STEP.tmp" && mv "$CACHE/stamps/$STEP.tmp" "$CACHE/stamps/$STEP"; }

# long WHAT REMEDY COMMAND...: run with the output in a log file, a line of progress every 15 s, and the end of the log on failure.
long() {
  local what=$1 remedy=$2 began=$SECONDS log=$CACHE/logs/$STEP.log pid status=0 ticks=0
  shift 2
  say "$what ..."
  "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    ticks=$((ticks + 1))
    if [ $((ticks % 30)) = 0 ]; then say "$what: $((SECONDS - began)) s so far: $(tail -n 1 "$log" | cut -c1-100)"; fi
  done
  wait "$pid" || status=$?
  if [ "$status" != 0 ]; then
    tail -n 15 "$log" | sed 's/^/    /' >&2
    die "$what (exit status $status; whole log: $log)" "$remedy"
  fi
  say "$what: done in $((SECONDS - began)) s"
}
