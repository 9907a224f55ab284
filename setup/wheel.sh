#!/usr/bin/env bash
# A wheel that carries the native parts for x86-64 and arm64, written to DIR (default dist/). After `pip install` on a host
# without a compiler: `envkeeper --install-native`. The other machine's binaries are linked against that machine's glibc,
# statically; ours against musl, as in `make setup`.
. "$(dirname "$0")/lib.sh"
out=$(mkdir -p "${1:-$ROOT/dist}" && cd "${1:-$ROOT/dist}" && pwd)

case $(uname -m) in
  x86_64) other=aarch64 cross=aarch64-linux-gnu packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;;
  aarch64) other=x86_64 cross=x86-64-linux-gnu packages="gcc-x86-64-linux-gnu libc6-dev-amd64-cross" ;;
  *) die "no wheel is built on $(uname -m)" "build it on x86-64 or arm64" 2 ;;
esac
compiler=${cross/x86-64/x86_64}-gcc
if ! command -v "$compiler" >/dev/null; then
  need_root
  # shellcheck disable=SC2086
  long "installing a compiler for $other" "see whether apt-get works on this machine" \
    apt-get install -y -q --no-install-recommends $packages
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
cp -r "$ROOT"/{belayer,belayerctl,belayerd,envkeeper,gpuowner,pyproject.toml,README.md,LICENSE} "$work/tree"
build=$ROOT/envkeeper/agent/build.sh
native=$work/tree/envkeeper/native
"$build" "$native/$(uname -m)" >/dev/null
CC=$compiler "$build" "$native/$other" >/dev/null
find "$native" -type l -delete # the installer makes `current`; a wheel keeps no links
long "building the wheel" "read the log that is named above" \
  "$ROOT/.venv/bin/python" -m pip wheel --no-deps --wheel-dir "$out" "$work/tree"
say "$(ls -t "$out"/belayer-*.whl | head -n 1)"
