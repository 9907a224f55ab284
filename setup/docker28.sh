#!/usr/bin/env bash
# A newer Docker Engine (28, the unstable suite's) beside the system's, under /opt/belayer/docker28: for the tests that prove
# checkpoints on that stack with an engine of their own. Nothing is started and nothing of the host's Docker is touched.
#
# dockerd and containerd of that suite run on Debian 12's libc; its runc does not, so runc stays the system's. No step of
# `make setup`: the tests that need it run it.
. "$(dirname "$0")/lib.sh"
. "$ROOT/setup/sid.sh"

prefix=$PREFIX/docker28
debs=$CACHE/debs/docker28
packages="docker.io containerd tini-static"
version() { "$1/bin/dockerd" --version 2>/dev/null | sed -n 's/^Docker version \([0-9][0-9.]*\).*/\1/p'; }
newer() { [ "${1%%.*}" -ge 28 ] 2>/dev/null; }

# Two test runs at once would unpack over each other.
exec 9>"$CACHE/docker28.lock"
flock -w 300 9 || die "another run holds $CACHE/docker28.lock for 300 s" "wait for it, then try again"

have=$(version "$prefix" || true)
if newer "$have"; then
  say "Docker Engine $have is in $prefix"
  exit 0
fi
need_root
command -v runc >/dev/null || die "runc is not installed" "run make setup"
mkdir -p "$PREFIX"
work=$(mktemp -d "$PREFIX/.docker28.XXXXXX") # beside its target: the last move is a rename
trap 'rm -rf "$work"' EXIT
mkdir -p "$debs"
sid_open "$work"

fetch() {
  apt-get "${private[@]}" update || return 1
  # shellcheck disable=SC2086
  (cd "$debs" && rm -f ./*.deb && apt-get "${private[@]}" download $(printf '%s/sid ' $packages))
}
if ! ls "$debs"/docker.io_*.deb >/dev/null 2>&1; then
  long "downloading Docker Engine (50 MB)" "the mirror $SID_URI must serve the suite sid; see the log" fetch
fi
unpack() {
  local deb program
  mkdir -p "$work/prefix/bin"
  for deb in "$debs"/*.deb; do dpkg-deb -x "$deb" "$work/unpacked" || return 1; done
  for program in usr/sbin/dockerd usr/bin/docker-proxy usr/sbin/docker-proxy usr/bin/containerd usr/bin/containerd-shim-runc-v2 usr/bin/ctr; do
    if [ -e "$work/unpacked/$program" ]; then mv "$work/unpacked/$program" "$work/prefix/bin/"; fi
  done
}
long "unpacking into $prefix" "rm -r $debs and try again" unpack
rm -rf "$prefix"
mv "$work/prefix" "$prefix"
have=$(version "$prefix" || true)
newer "$have" || die "the engine of the unstable suite is '$have', wanted is >= 28" "rm -r $debs and try again; this machine's libc may be too old" 2
say "Docker Engine $have in $prefix"
