"""The picture of ``benchmarks.handover``: seconds to the next token over the context, with and without KV reuse."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.handover_turns import Turns

Drawn = tuple[dict[tuple[str, int], Turns], list[float], list[float]]


def plot(path: Path, runs: dict[str, Drawn]) -> None:
    """``runs``: by name, (turns by kind and context, seconds of cold servers, of cold engines). One field per model;
    dots are repetitions, lines go through medians, dashed ones with ``kv_reuse``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(run.removesuffix("_reuse") for run in runs))
    figure, fields = pyplot.subplots(1, len(models), figsize=(6 * len(models), 5), squeeze=False)
    for axes, model in zip(fields[0], models, strict=True):
        for run, (turns, servers, engines) in runs.items():
            if run.removesuffix("_reuse") != model:
                continue
            _lines(axes, turns, reuse=run.endswith("_reuse"))
            for seconds, said in ((servers, "vLLM's own server restarted"), (engines, "leanest engine restarted")):
                if seconds:
                    axes.axhline(min(seconds), color="tab:red", linewidth=1)
                    axes.annotate(said, (0.02, min(seconds)), xycoords=("axes fraction", "data"), fontsize=7)
        axes.set(title=model, xlabel="tokens of context", ylabel="seconds from fault to next token", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _lines(axes: object, turns: dict[tuple[str, int], Turns], *, reuse: bool) -> None:
    colours = {"kill": "tab:blue", "stop": "tab:green", "stall": "tab:orange", "stuck": "tab:purple"}
    for kind, colour in colours.items():
        rows = sorted((context, one.seconds) for (name, context), one in turns.items() if name == kind and one.seconds)
        if not rows:
            continue
        medians = [statistics.median(seconds) for _, seconds in rows]
        style, label = ("--", f"{kind}, kv_reuse") if reuse else ("-", kind)
        axes.plot([context for context, _ in rows], medians, style, color=colour, label=label)  # type: ignore[attr-defined]
        for context, seconds in rows:
            axes.plot([context] * len(seconds), seconds, ".", color=colour, alpha=0.4)  # type: ignore[attr-defined]
