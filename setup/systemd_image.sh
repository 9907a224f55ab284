#!/usr/bin/env bash
# The image of tests/process/test_systemd.py: this machine's Debian release with systemd as PID 1.
exec "$(dirname "$0")/debian_image.sh" belayer-systemd:test bash coreutils procps python3 systemd systemd-sysv dbus libnuma1 gcc g++
