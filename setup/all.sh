#!/usr/bin/env bash
# All steps of `make setup`, in order. Each is idempotent and quick when its result is there.
. "$(dirname "$0")/lib.sh"

STEP=setup
began=$SECONDS
steps="packages venv clients criu native docker image model"
[ "$(uname -m)" = x86_64 ] || die "this machine is $(uname -m)" "the CPU engine and the agent are built for x86_64" 2
number=0
for step in $steps; do
  number=$((number + 1))
  printf -- '-- setup %d/8: %s\n' "$number" "$step"
  # The step has said what failed and what to do; its status is ours.
  "$ROOT/setup/$step.sh" || exit $?
done
say "ready in $((SECONDS - began)) s"
