#!/usr/bin/env bash
# Step: system packages. Only what is missing is installed, so a host with its own Docker keeps it.
. "$(dirname "$0")/lib.sh"

# command:package pairs; a command that is found (from whatever source) needs no package.
WANTED="dockerd:docker.io runc:runc containerd:containerd iptables:iptables patchelf:patchelf debootstrap:debootstrap musl-gcc:musl-tools gcc:gcc
g++:g++ git:git make:make ip:iproute2 mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs nsenter:util-linux tar:tar xz:xz-utils"
LIBRARIES="libnuma1 ca-certificates"

missing=()
for pair in $WANTED; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
for library in $LIBRARIES; do
  dpkg-query -W -f '${Status}' "$library" 2>/dev/null | grep -q 'ok installed' || missing+=("$library")
done
# Debian 13 splits the client from docker.io.
if ! command -v docker >/dev/null && [ -n "$(apt-cache madison docker-cli 2>/dev/null)" ]; then missing+=(docker-cli); fi
# With AppArmor in the kernel, dockerd cannot start a container without its parser.
if [ "$(cat /sys/module/apparmor/parameters/enabled 2>/dev/null)" = Y ] && ! command -v apparmor_parser >/dev/null; then
  missing+=(apparmor)
fi
if [ "$("$ROOT/setup/python.sh" --packages)" != "" ]; then
  # shellcheck disable=SC2207
  missing+=($("$ROOT/setup/python.sh" --packages))
fi
if [ "${#missing[@]}" = 0 ]; then
  say "all there"
  exit 0
fi
need_root
command -v apt-get >/dev/null || die "this machine has no apt-get" "Belayer's setup supports Debian 12 and 13; elsewhere install by hand: ${missing[*]}" 2
# Written before the engine is installed: where the package starts it, it starts with our settings.
"$ROOT/setup/daemon_json.sh"
long "apt-get update" "check the network and the files under /etc/apt/sources.list.d" apt-get update
if ! command -v docker >/dev/null && ! printf '%s\n' "${missing[@]}" | grep -qx docker-cli \
   && [ -n "$(apt-cache madison docker-cli 2>/dev/null)" ]; then missing+=(docker-cli); fi
# apt-get update succeeds even when no mirror answered, so the offer itself is looked at.
for package in "${missing[@]}"; do
  apt-cache show --no-all-versions "$package" >/dev/null 2>&1 ||
    die "no package $package on offer after apt-get update" "check the network and the files under /etc/apt/sources.list.d (log: $CACHE/logs/$STEP.log)"
done
long "installing ${missing[*]}" "run apt-get install ${missing[*]} by hand and read what it says" \
  apt-get install -y --no-install-recommends "${missing[@]}"
