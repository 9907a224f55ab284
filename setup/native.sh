#!/usr/bin/env bash
# Step: the native parts (sandbox agent, OCI runtime wrapper), compiled with musl and installed under /opt/belayer.
. "$(dirname "$0")/lib.sh"

build=$ROOT/envkeeper/agent/build.sh
# shellcheck disable=SC2046
inputs=$(key $(find "$ROOT/envkeeper/agent" "$ROOT/envkeeper/runtime" -type f ! -name '*.py' ! -name '*.pyc' 2>/dev/null | sort))
if stamped "$inputs" && [ -x "$PREFIX/bin/belayer-runtime" ] && [ -x "$PREFIX/agent/current" ]; then
  say "agent and runtime are built"
  exit 0
fi
need_root
long "building the agent and the runtime wrapper" "the compiler's message is above; musl-gcc comes with musl-tools" \
  bash "$build" "$PREFIX"
[ -x "$PREFIX/bin/belayer-runtime" ] || die "$build left no $PREFIX/bin/belayer-runtime" "read $CACHE/logs/native.log"
stamp "$inputs"
