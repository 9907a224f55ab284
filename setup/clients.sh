#!/usr/bin/env bash
# Step: .cache/clients, an environment above .venv with the clients of requirements/clients.txt.
. "$(dirname "$0")/lib.sh"

base=$ROOT/.venv
clients=$CACHE/clients
pins=$ROOT/requirements/clients.txt
[ -x "$base/bin/python" ] || die "no .venv yet" "run setup/venv.sh first"
inputs=$(key "$("$base/bin/python" -c 'import sys; print(sys.base_prefix, sys.version)')" "$base" "$pins" "$0")
imports='import litellm, renderers.client, trl.import_utils, verifiers.v1.clients.client, vllm_router_rs'
if stamped "$inputs" && "$clients/bin/python" -c 'import orjson, msgspec' 2>/dev/null; then
  say "$clients is there"
  exit 0
fi
make_venv() {
  rm -rf "$clients"
  "$base/bin/python" -m venv "$clients"
  # What is installed here hides what has the same name below; all else comes from .venv.
  "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$clients/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
}
pinned() {
  "$clients/bin/python" -m pip --no-color --retries 5 install --no-compile --no-deps --ignore-installed \
    --progress-bar off --requirement "$pins"
}
remedy="read the end of the log above: mostly the package index was not reachable; run make setup again"
long "making $clients" "install python3-venv" make_venv
long "installing clients of other projects" "$remedy" pinned
long "importing them once" "requirements/clients.txt does not fit this Python: run make setup again with the Python of .venv" \
  env LITELLM_LOCAL_MODEL_COST_MAP=True HF_HUB_OFFLINE=1 "$clients/bin/python" -c "$imports"
stamp "$inputs"
