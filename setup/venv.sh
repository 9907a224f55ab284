#!/usr/bin/env bash
# Step: .venv with the pinned packages and this tree (editable).
. "$(dirname "$0")/lib.sh"

venv=$ROOT/.venv
requirements=$ROOT/requirements
python=$("$ROOT/setup/python.sh") || die "no Python 3.11, 3.12 or 3.13 that can make a virtual environment" \
  "run setup/packages.sh (or set BELAYER_PYTHON to one)" 2
inputs=$(key "$python" "$requirements/cpu.txt" "$requirements/dev.txt" "$ROOT/pyproject.toml" "$0")
imports='import vllm.v1.engine.core, vllm.entrypoints.openai.api_server, transformers, docker, pytest, mypy.api, belayer'
if stamped "$inputs" && [ -x "$venv/bin/belayerd" ] && "$venv/bin/python" -c 'import belayer, msgspec, zmq, torch' 2>/dev/null; then
  say "$venv is there"
  exit 0
fi
# --no-compile: compiling all 20,000 files takes longer than unpacking them; the import at the end compiles what is used.
pip() { "$venv/bin/python" -m pip --no-color --retries 5 "$@" --progress-bar off; }

make_venv() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' || "$python" -m venv --clear "$venv"; }
# torch alone may bring dependencies of its own (a build with CUDA does), so it is not installed with --no-deps.
torch() { pip install --no-compile --constraint "$requirements/cpu.txt" "$(grep '^torch==' "$requirements/cpu.txt")"; }
pinned() { pip install --no-compile --no-deps --requirement "$requirements/cpu.txt" --requirement "$requirements/dev.txt"; }
# Left by an earlier hand-made environment they would break transformers; see requirements/cpu.txt.
unwanted() { "$venv/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec; }
tree() { pip install --no-deps --no-build-isolation --editable "$ROOT"; }

remedy="read the end of the log above: mostly the package index was not reachable; run make setup again"
long "making $venv with $("$python" -V)" "install python3-venv" make_venv
long "installing torch" "$remedy" torch
long "installing vLLM and the other pinned packages" "$remedy" pinned
long "removing packages that break the import" "$remedy" unwanted
long "installing this tree" "$remedy" tree
long "importing vllm once" "requirements/cpu.txt does not fit this Python: set BELAYER_PYTHON=python3.11, rm -r .venv, and run make setup again" \
  env OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$venv/bin/python" -c "$imports"
stamp "$inputs"
