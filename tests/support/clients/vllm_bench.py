"""vLLM's own serving benchmark (``vllm bench serve``), all its texts kept. ``vllm_bench.py URL MODEL FOLDER``"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from loop import serve
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

url, model, folder = sys.argv[1:4]
parser = FlexibleArgumentParser()
add_cli_args(parser)
WORDS = f"--backend openai --base-url {url} --model smollm2 --tokenizer {model} --dataset-name random --seed 1"
WORDS += " --num-prompts 4 --random-input-len 20 --random-output-len 40 --ignore-eos --temperature 0"
WORDS += f" --save-result --save-detailed --result-dir {folder} --result-filename result.json --disable-tqdm"


def ask() -> dict[str, Any]:
    main(parser.parse_args(WORDS.split()))
    result = json.loads((Path(folder) / "result.json").read_text())
    return {name: result[name] for name in ("completed", "output_lens", "generated_texts", "errors")}


serve(ask)
