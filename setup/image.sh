#!/usr/bin/env bash
# Step: the sandbox base image. Its tools are what an agent's shell actions and the tests use.
exec "$(dirname "$0")/debian_image.sh" belayer-sandbox:base bash coreutils procps python3 tmux
