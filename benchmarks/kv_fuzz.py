"""KV reuse under random kills: is any stream ever different from the unfailed run?

    python -m benchmarks.kv_fuzz [--kills 200] [--quick] [--json FILE] [--plot FILE]

Rounds of 24 requests over an arena of 48 blocks; the main is killed at random moments and the shadow goes on with what
it had finished. Tokens must be equal and logprobs within the difference of float32 kernels. Exit status 1 when one
stream differs. The rate that zero failures bound: below 3 / kills at 95 % (the rule of three).
"""

from __future__ import annotations

import sys

from belayer.clock import Stopwatch
from benchmarks import tiny
from benchmarks.report import Report, parser
from tests.support.kv_fuzz import Fuzz, Outcome, slot
from tests.support.owner_stack import MODEL, REPO
from tests.support.worker_stack import WorkerStack

TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head size, float32
PER_ROUND = 8


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    wanted = 2 * PER_ROUND if arguments.quick else arguments.kills
    stack = WorkerStack(slot(TOKEN_BYTES), tiny.make(REPO / ".cache/models/belayer-tiny", MODEL))
    total, bad, watch = Outcome(), list[str](), Stopwatch()
    try:
        stack.start()
        fuzz = Fuzz(stack, seed=arguments.seed)
        while total.kills < wanted:
            out = fuzz.round(PER_ROUND)
            total.kills += out.kills
            total.adopted += out.adopted
            total.resumed += out.resumed
            bad += out.bad
            for line in out.bad:
                print(line, file=sys.stderr)
            print(f"{total.kills} kills, {total.resumed} resumed, {len(bad)} different", file=sys.stderr)
    finally:
        stack.stop()
    report = Report("kv_fuzz")
    report.add("kills", "", [total.kills])
    report.add("blocks adopted per kill", "", [total.adopted / total.kills])
    report.add("requests resumed", "", [total.resumed])
    report.add("streams that differ", "", [len(bad)], note=f"in {watch.ms() / 1e3:.0f} s")
    report.write(arguments)
    return 1 if bad or not total.adopted else 0


if __name__ == "__main__":
    sys.exit(main())
