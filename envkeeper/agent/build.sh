#!/bin/sh
# Builds the native parts into PREFIX (default /opt/belayer):
#   agent/belayer-agent-<hash>  PID 1 of sandboxes; the hash is in the name because a restore needs the very same file
#   agent/current               symlink to the newest
#   bin/belayer-runtime         OCI runtime that Docker's daemon.json names
#   lib/criu-path/tar           stand-in for tar on CRIU's PATH
#   lib/criu-plugins/relock.so  takes record locks again at the end of a restore (x86-64 only)
# Nothing is touched when the result is already there. Needs a C compiler that links static musl: CC (default musl-gcc,
# Debian: musl-tools; another machine's binaries: CC="python3 -m ziglang cc -target aarch64-linux-musl").
set -eu
prefix=${1:-/opt/belayer}
here=$(cd "$(dirname "$0")" && pwd)
CC=${CC:-musl-gcc}
command -v "${CC%% *}" >/dev/null || { echo "build: ${CC%% *} is missing; install musl-tools, or set CC" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-Os -static -s -Wall -Wextra -Werror -fno-asynchronous-unwind-tables"
# musl-gcc does not look for the kernel's own headers (linux/openat2.h); a cross compiler brings them along.
[ "$CC" != musl-gcc ] || flags="$flags -idirafter /usr/include -idirafter /usr/include/$(uname -m)-linux-gnu"

install_new() { # FILE TARGET: replace by rename, so that a running program or a start in this moment sees a whole file
    cmp -s "$1" "$2" 2>/dev/null && return 0
    mkdir -p "$(dirname "$2")"
    cp "$1" "$2.new.$$" && chmod 755 "$2.new.$$" && mv "$2.new.$$" "$2"
}
# In this order always: the bytes, and with them the name, must not depend on the locale's idea of sorting.
cd "$here"
$CC $flags -o "$work/agent" main.c conn.c proc.c user.c session.c act.c files.c
hash=$(sha256sum "$work/agent" | cut -c1-12)
install_new "$work/agent" "$prefix/agent/belayer-agent-$hash"
ln -sfn "belayer-agent-$hash" "$prefix/agent/current.new.$$" && mv -T "$prefix/agent/current.new.$$" "$prefix/agent/current"
for pair in runtime:bin/belayer-runtime tar:lib/criu-path/tar; do
    source="$here/../runtime/${pair%%:*}.c"
    [ -f "$source" ] || continue
    $CC $flags -o "$work/bin" "$source"
    install_new "$work/bin" "$prefix/${pair#*:}"
done
case "$CC $($CC -dumpmachine 2>/dev/null)" in *x86_64*)
    # Loaded into CRIU, which brings its own libc: none is linked here.
    shared=$(echo "$flags" | sed 's/-static/-shared -fPIC -nostdlib -fvisibility=hidden -fno-stack-protector/')
    $CC $shared -o "$work/relock.so" "$here/../runtime/relock.c"
    install_new "$work/relock.so" "$prefix/lib/criu-plugins/relock.so" ;;
esac
echo "$prefix/agent/belayer-agent-$hash"
