"""One picture of a sync_latency result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PHASES = ("quiesce", "transfer", "finalize", "resume", "first_token")
_LINES = ("--", ":", "-.", (0, (1, 4)))
_LOADS = ("-", "--", ":", "-.")
"""Lines of the same method under one load after the other."""
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def draw(result: dict[str, Any], path: Path) -> None:
    """Left: stall of every request, by method. Right: where the time of a swap goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [m for m in result["methods"] if m["samples"]]
    loads = sorted({m["requests"] for m in methods})
    for m in methods:
        m["label"] = m["name"] if len(loads) == 1 else f"{m['name']}, {m['requests']} requests"
    names = list(dict.fromkeys(m["name"] for m in methods))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    for method in methods:
        stalls = sorted(max(s, 1e-4) * 1e3 for x in method["samples"] for s in x["stalls"])
        if not stalls:
            continue
        left.plot(
            stalls,
            [(i + 1) / len(stalls) for i in range(len(stalls))],
            drawstyle="steps-post",
            linewidth=2,
            color=_COLOURS[names.index(method["name"]) % len(_COLOURS)],
            linestyle=_LOADS[loads.index(method["requests"]) % len(_LOADS)],
            label=f"{method['label']} (p50 {method['stall_s']['p50'] * 1e3:.1f} ms)",
        )
    for (name, top), style in zip(result["ceiling"].items(), _LINES, strict=False):
        if top is not None:
            at_ms = top["p50_s"] * 1e3
            label = f"ceiling: {name.replace('_', ' ')} {at_ms:.1f} ms"
            left.axvline(at_ms, color="#c44e52", linestyle=style, label=label)
    left.set_xscale("log")
    left.set_xlabel("stall of a request, ms")
    left.set_ylabel("share of requests")
    left.set_ylim(0, 1.02)
    left.grid(True, which="major", alpha=0.3)
    # Beside the lines, not over them.
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2, fontsize=8)

    labels = [m["label"] for m in methods]
    base = [0.0] * len(methods)
    for phase, colour in zip(PHASES, _COLOURS, strict=False):
        values = [(m["phases"][phase]["p50"] or 0.0) * 1e3 for m in methods]
        right.barh(labels, values, left=base, color=colour, label=phase.replace("_", " "))
        base = [b + v for b, v in zip(base, values, strict=True)]
    # Linear, so that lengths compare; a bar that sleeps for seconds is cut and says so.
    shown = min(base) * 8
    right.set_xlim(0, min(max(base), shown) * 1.02)
    for row, total in enumerate(base):
        if total > shown:
            right.text(shown, row, f"{total / 1e3:.1f} s  \u25b6 ", ha="right", va="center",
                       color="white", weight="bold")  # fmt: skip
    right.invert_yaxis()
    right.set_xlabel("time of a swap by phase, p50, ms")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=5, fontsize=8)
    figure.suptitle(
        f"{result['model']}, {result['bytes'] / 1e6:.1f} MB, KV {result['kv_policy']}, "
        f"{' and '.join(map(str, loads))} requests on {result['hardware']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
