#!/usr/bin/env bash
# `make doctor`: does this machine hold what Belayer needs? Each line is ok or FAILED with a remedy; exit 1 if any failed.
# Versions prove little (a CRIU can pass its own check and fail at the first TCP socket), so a sandbox is really dumped and restored.
. "$(dirname "$0")/lib.sh"
trap - ERR
set +e

failed=0
check() { # WHAT REMEDY COMMAND...: the command's last line is shown as the detail
  local what=$1 remedy=$2 out
  shift 2
  if out=$("$@" 2>&1); then
    printf 'ok      %-22s %s\n' "$what" "$(tail -n 1 <<<"$out" | cut -c1-110)"
  else
    printf 'FAILED  %-22s %s\n        remedy: %s\n' "$what" "$(tail -n 1 <<<"$out" | cut -c1-200)" "$remedy"
    failed=1
  fi
}
root() { [ "$(id -u)" = 0 ] && echo "uid 0" || { echo "uid $(id -u)"; return 1; }; }
machine() { . /etc/os-release && echo "${PRETTY_NAME:-?}, kernel $(uname -r), $(env -u OMP_NUM_THREADS nproc) cores"; [ "$(uname -m)" = x86_64 ]; }
space() { df -Pm "$CACHE" | awk 'NR == 2 { print $4 " MB free"; exit $4 < 2000 }'; }
venv() { "$ROOT/.venv/bin/python" -c 'import sys, torch, vllm; print(f"Python {sys.version.split()[0]}, vLLM {vllm.__version__}, torch {torch.__version__}")' 2>/dev/null; }
model() { cd "$CACHE/models/SmolLM2-135M-Instruct" && sha256sum --quiet --check MANIFEST.sha256 && echo "digests match"; }
criu() { "$PREFIX/criu/usr/sbin/criu" check >/dev/null 2>&1 && "$PREFIX/criu/usr/sbin/criu" --version | head -n 1; }
engine() { timeout 10 docker info --format 'Docker {{.ServerVersion}}, {{.Driver}}, cgroup v{{.CgroupVersion}}, live-restore {{.LiveRestoreEnabled}}'; }
runtime() { timeout 10 docker info --format '{{json .Runtimes}}' | grep -q '"belayer"' && [ -x "$PREFIX/bin/belayer-runtime" ] && echo "registered"; }
image() { docker image inspect --format '{{.Id}}' belayer-sandbox:base; }
cycle() {
  local scratch status
  scratch=$(mktemp -d) && : >"$scratch/belayer.toml"
  BELAYER_ROOT=$scratch "$ROOT/.venv/bin/envkeeper" --doctor >"$scratch/out" 2>&1
  status=$?
  [ "$status" = 0 ] && sed 's/^/        /' "$scratch/out" >&3
  tail -n 1 "$scratch/out"
  rm -rf "$scratch"
  return "$status"
}
exec 3>&1

check root "run as root: CRIU and the Docker Engine need it" root
check machine "x86_64 is needed" machine
check "free space" "2 GB under $CACHE are needed" space
check ".venv" "setup/venv.sh" venv
check model "rm -r $CACHE/models && setup/model.sh" model
check "criu check" "setup/criu.sh" criu
check "Docker Engine" "setup/docker.sh" engine
check "runtime belayer" "setup/native.sh && setup/docker.sh" runtime
check "sandbox image" "setup/image.sh" image
check "dump and restore" "read the line: it names what this kernel, CRIU or Docker cannot do" cycle
exit "$failed"
