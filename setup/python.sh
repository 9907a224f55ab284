#!/usr/bin/env bash
# Prints the Python to build .venv with: 3.11, 3.12 or 3.13, the first that runs and can make a virtual environment.
#   python.sh             path of that interpreter; exit 1 when there is none
#   python.sh --packages  the Debian packages that would bring one, when there is none
set -euo pipefail

usable() { # a pyenv shim exists for versions that are switched off: only running it tells
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

found=""
for candidate in ${BELAYER_PYTHON:-} python3.11 python3.12 python3.13 python3; do
  if command -v "$candidate" >/dev/null && usable "$candidate"; then
    found=$("$candidate" -c 'import sys; print(sys.executable)')
    break
  fi
done
if [ "${1:-}" = --packages ]; then
  # python3-dev: torch compiles small kernels at first use and needs Python.h; a pyenv Python brings its own.
  if [ -z "$found" ]; then
    echo python3 python3-venv python3-dev
  elif [ "$found" != "${found#/usr/bin/}" ]; then
    header=$("$found" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
    [ -f "$header" ] || echo python3-dev
  fi
  exit 0
fi
[ -n "$found" ] || exit 1
echo "$found"
