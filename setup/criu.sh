#!/usr/bin/env bash
# Step: CRIU >= 4.2 with its own libraries under /opt/belayer/criu.
#
# Why a prefix: CRIU 4.1 (Debian 13) passes `criu check` and then fails on any TCP socket on kernels >= 6.16, and Debian 12 has
# no CRIU at all. The build of Debian's unstable suite works on both, but wants a newer libc than they have, so it is unpacked
# beside the system with its own loader and libraries.
. "$(dirname "$0")/lib.sh"
. "$ROOT/setup/sid.sh"

criu=$PREFIX/criu/usr/sbin/criu
want=4.2
debs=$CACHE/debs/criu

version() { "$1" --version 2>/dev/null | sed -n 's/^Version: *//p'; }
at_least() { [ "$(printf '%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

have=$(version "$criu" || true)
if [ -n "$have" ] && at_least "$have" "$want" && "$criu" check >/dev/null 2>&1; then
  say "CRIU $have is there"
  exit 0
fi
need_root
python=$("$ROOT/setup/python.sh") || die "no Python 3.11-3.13" "run setup/packages.sh first"

mkdir -p "$PREFIX"
work=$(mktemp -d "$PREFIX/.criu.XXXXXX") # beside its target: the last move is a rename
trap 'rm -rf "$work"' EXIT
mkdir -p "$debs"
sid_open "$work"

fetch() {
  apt-get "${private[@]}" update
  # Names of libraries change whenever unstable moves, so no fixed list.
  apt-cache "${private[@]}" dumpavail | "$python" "$ROOT/setup/deb_closure.py" criu >"$work/packages"
  [ "$(wc -l <"$work/packages")" -gt 5 ] || { echo "criu has no libraries in this suite?"; return 1; }
  # shellcheck disable=SC2046
  (cd "$debs" && rm -f ./*.deb && apt-get "${private[@]}" download $(cat "$work/packages"))
}

if ! ls "$debs"/criu_*.deb >/dev/null 2>&1; then
  long "downloading CRIU and its libraries" "the mirror $SID_URI must serve the suite sid; see the log" fetch
fi

unpack() {
  local deb libs loader
  for deb in "$debs"/*.deb; do dpkg-deb -x "$deb" "$work/prefix"; done
  libs=$(dirname "$(find "$work/prefix/usr/lib" -name 'libc.so.6' | head -n 1)")
  loader=$(find "$libs" -maxdepth 1 -name 'ld-linux*' | head -n 1)
  local final=$PREFIX/criu${libs#"$work/prefix"}
  # DT_RPATH (not RUNPATH): it also holds for the libraries of the libraries.
  patchelf --set-interpreter "$final/$(basename "$loader")" --set-rpath "$final" --force-rpath "$work/prefix/usr/sbin/criu"
}
long "unpacking into $PREFIX/criu" "rm -r $debs and run make setup again" unpack
# Keep the old prefix until the new one is complete: a sandbox host may be dumping with it right now.
if [ -e "$PREFIX/criu" ]; then mv "$PREFIX/criu" "$work/old"; fi
mv "$work/prefix" "$PREFIX/criu"

loader=$(patchelf --print-interpreter "$criu")
foreign=$("$loader" --list "$criu" | grep -v -e vdso -e "$PREFIX/criu" || true)
[ -z "$foreign" ] || die "CRIU would load libraries from outside its prefix: $(echo "$foreign" | head -n 3)" \
  "rm -r $debs and run make setup again; if it stays, report the lines above"
have=$(version "$criu" || true)
if [ -z "$have" ] || ! at_least "$have" "$want"; then die "CRIU is '$have', needed is >= $want" "rm -r $debs and run make setup again" 2; fi
"$criu" check || die "criu check refuses this kernel" "a kernel with CONFIG_CHECKPOINT_RESTORE and root in the initial namespaces are needed" 2
say "CRIU $have in $PREFIX/criu"
