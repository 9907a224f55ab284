#!/usr/bin/env bash
# Step: a Docker Engine that answers and knows the OCI runtime `belayer`.
#
# A running engine and an existing daemon.json are left as they are: this step checks them and prints what to add. Where no engine
# runs, one is started in its own session with its own TMPDIR (engines leak checkpoint copies into TMPDIR) and a log file.
. "$(dirname "$0")/lib.sh"

config=/etc/docker/daemon.json
runtime=$PREFIX/bin/belayer-runtime
state=/var/lib/belayer
answers() { timeout 10 docker info >/dev/null 2>&1; }
knows_runtime() { timeout 10 docker info --format '{{json .Runtimes}}' 2>/dev/null | grep -q '"belayer"'; }

start_engine() {
  need_root
  local dockerd log=$state/dockerd.log tmp=$state/dockerd-tmp
  dockerd=$(command -v dockerd) || die "dockerd is not installed" "run make setup (its first step installs docker.io)"
  mkdir -p "$state" && mkdir -p -m 0700 "$tmp"
  if [ -d /run/systemd/system ] && systemctl cat docker.service >/dev/null 2>&1; then
    long "systemctl start docker" "journalctl -u docker tells why" systemctl start docker
  else
    say "starting dockerd (log: $log)"
    local running
    running=$(cat /var/run/docker.pid 2>/dev/null || true)
    if [ -n "$running" ] && [ "$(cat "/proc/$running/comm" 2>/dev/null)" = dockerd ]; then
      die "dockerd runs (pid $running) but does not answer on its socket" "look at its log; unset DOCKER_HOST if it points elsewhere"
    fi
    rm -f /var/run/docker.pid # left by an engine that was killed
    # At the usual priority, whatever ours is: all sandboxes inherit it, for as long as this engine runs.
    (
      renice -n 0 -p "$BASHPID" >/dev/null
      TMPDIR=$tmp PATH=$PREFIX/criu/usr/sbin:$PATH exec setsid nohup "$dockerd" >>"$log" 2>&1 </dev/null
    ) &
    echo $! >"$state/dockerd.pid"
  fi
  local waited=0
  until answers; do
    sleep 0.5
    waited=$((waited + 1))
    if [ -f "$state/dockerd.pid" ] && ! kill -0 "$(cat "$state/dockerd.pid")" 2>/dev/null; then
      tail -n 5 "$log" | sed 's/^/    /' >&2
      die "dockerd ended while starting (log: $log)" "read the last lines above: often iptables, cgroups or a storage driver are missing"
    fi
    [ "$waited" -lt 120 ] || die "dockerd did not answer within 60 s (log: $log)" "read the log"
  done
}

# Two set-ups at once would start two engines.
lock=/run/lock/belayer-docker.lock
[ -w /run/lock ] || lock=$CACHE/docker.lock
exec 9>"$lock"
flock -w 120 9 || die "another set-up holds the engine lock for 120 s" "wait for it, then run make setup again"

"$ROOT/setup/daemon_json.sh"
if ! answers; then
  if timeout 10 docker info 2>&1 | grep -qi 'permission denied'; then
    die "the Docker socket refuses this user" "run as root, or add the user to the group docker" 2
  fi
  start_engine 9>&-
fi
if ! knows_runtime && grep -q '"belayer"' "$config" 2>/dev/null; then
  # The engine was started before the file named the runtime: a reload is enough, nothing restarts.
  engine=$(cat /var/run/docker.pid 2>/dev/null || true)
  if [ -n "$engine" ] && [ "$(id -u)" = 0 ]; then
    kill -HUP "$engine"
    for _ in 1 2 3 4 5 6 7 8 9 10; do
      if knows_runtime; then break; fi
      sleep 0.5
    done
  fi
fi
if ! knows_runtime; then
  cat >&2 <<JSON
[docker] the running engine does not know the runtime "belayer". Your $config is left as it is; add to it:
    "live-restore": true,
    "runtimes": {"belayer": {"path": "$runtime"}}
JSON
  die "runtime belayer is not registered in $config" "add the lines above, then: kill -HUP \$(cat /var/run/docker.pid), and make setup again" 2
fi
live=$(docker info --format '{{.LiveRestoreEnabled}}')
[ "$live" = true ] || say "note: live-restore is off in $config: a restart of Docker will stop the sandboxes (add \"live-restore\": true)"
say "Docker $(docker info --format '{{.ServerVersion}}, {{.Driver}}, cgroup v{{.CgroupVersion}}') answers and knows the runtime belayer"
