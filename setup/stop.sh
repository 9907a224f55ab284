#!/usr/bin/env bash
# Removes sandboxes that no envkeeper serves any more, then stops the Docker Engine if setup started it.
. "$(dirname "$0")/lib.sh"

pidfile=/var/lib/belayer/dockerd.pid
if timeout 10 docker info >/dev/null 2>&1; then
  left=$(docker ps --all --quiet --filter label=belayer.sandbox 2>/dev/null || true)
  if [ -n "$left" ] && ! pgrep -f 'bin/envkeeper|-m envkeeper' >/dev/null; then
    # shellcheck disable=SC2086
    docker rm --force --volumes $left >/dev/null && say "removed $(echo "$left" | wc -l) sandboxes"
  fi
fi
if [ ! -f "$pidfile" ]; then
  say "setup did not start the Docker Engine: it is left running"
  exit 0
fi
pid=$(cat "$pidfile")
if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
  kill -TERM "$pid"
  for _ in $(seq 60); do
    [ -e "/proc/$pid" ] || break
    sleep 0.5
  done
  [ ! -e "/proc/$pid" ] || die "dockerd (pid $pid) did not stop in 30 s" "kill -KILL $pid"
  say "stopped dockerd"
fi
rm -f "$pidfile"
