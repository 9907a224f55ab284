#!/usr/bin/env bash
# Installs the units. Run `make setup` first.  Usage: systemd/install.sh [--user root] [--root DIR]
#   --user root  run all daemons as root instead of as the user belayer (no new user is made)
#   --root DIR   install below DIR instead of / (packaging, tests); no systemctl is called
# Idempotent; an existing /etc/belayer/belayer.toml is kept.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(dirname "$here")
user=belayer
root=
die() { printf 'install.sh: %s\n  remedy: %s\n' "$1" "$2" >&2; exit "${3:-2}"; }
while [ $# -gt 0 ]; do
  case "$1" in
    --user) user=${2:?}; shift 2 ;;
    --root) root=${2:?}; shift 2 ;;
    *) die "unknown argument $1" "usage: systemd/install.sh [--user root] [--root DIR]" ;;
  esac
done
[ "$(id -u)" = 0 ] || die "needs root" "sudo systemd/install.sh"
[ -x "$tree/.venv/bin/belayerd" ] || die "$tree/.venv has no belayerd" "run make setup first"
[ -n "$root" ] || [ -d /run/systemd/system ] || die "systemd does not run this machine" "use --root, or run the daemons by hand (docs/operations.md)"

units=$root/etc/systemd/system
install -d "$units" "$root/etc/sysusers.d" "$root/etc/tmpfiles.d" "$root/etc/belayer" "$root/opt/belayer/bin" "$root/opt/belayer/doc"
install -m 0644 "$here"/*.service "$here"/*.target "$units"
install -m 0644 "$here/belayer.sysusers.conf" "$root/etc/sysusers.d/belayer.conf"
install -m 0644 "$here/belayer.tmpfiles.conf" "$root/etc/tmpfiles.d/belayer.conf"
install -m 0755 "$here/belayer-end-workers" "$root/opt/belayer/bin/belayer-end-workers"
install -m 0644 "$tree/docs/operations.md" "$root/opt/belayer/doc/operations.md"
ln -sfn "$tree/.venv" "$root/opt/belayer/venv"
if [ ! -e "$root/etc/belayer/belayer.toml" ]; then
  sed "s#@MODEL@#$tree/.cache/models/SmolLM2-135M-Instruct#" "$here/belayer.toml" >"$root/etc/belayer/belayer.toml"
  chmod 0644 "$root/etc/belayer/belayer.toml"
fi
if [ "$user" != belayer ]; then
  for unit in gpuowner@ belayer-router belayerd; do
    install -d "$units/$unit.service.d"
    printf '[Service]\nUser=%s\nGroup=\nCapabilityBoundingSet=~\n' "$user" >"$units/$unit.service.d/user.conf"
  done
  sed -i "s/ belayer belayer -\$/ $user - -/" "$root/etc/tmpfiles.d/belayer.conf"
  rm -f "$root/etc/sysusers.d/belayer.conf"
fi
[ -z "$root" ] || exit 0

[ "$user" != belayer ] || systemd-sysusers "$root/etc/sysusers.d/belayer.conf"
systemd-tmpfiles --create "$root/etc/tmpfiles.d/belayer.conf"
runuser -u "$user" -- /opt/belayer/venv/bin/python -c 'import belayer' 2>/dev/null ||
  die "the user $user cannot run $tree/.venv/bin/python (a parent directory is closed to it)" \
    "move the tree and its Python to a readable place such as /opt, or: systemd/install.sh --user root"
systemctl daemon-reload
systemctl enable --quiet belayer.target
echo "installed; edit /etc/belayer/belayer.toml, then: systemctl start belayer.target"
