"""The tables of docs/scale.md, from bench/results/scale.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.markdown_table import table

RESULT = Path(__file__).parent / "results" / "scale.json"
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def load() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))


def steps() -> str:
    """The parts of a step in the middle case, its length from fast to slow."""
    rows = []
    for plan in load()["plans"]:
        cases, middle = plan["cases"], plan["cases"]["middle"]
        parts = [
            f"{middle['step_s'][part]:.0f} s" for part in ("rollout", "log_probs", "update", "communication")
        ]
        whole = (
            f"{middle['total_s']:,.0f} s ({cases['fast']['total_s']:,.0f} to {cases['slow']['total_s']:,.0f})"
        )
        rows.append([f"{plan['model']} on {plan['gpus']}", *parts, whole])
    return table(["GPUs", "rollout", "log-probs", "update", "gathers", "a step (fast to slow)"], rows)


def searches() -> str:
    """How many searches a second there are and what answers them."""
    rows = []
    for plan in load()["plans"]:
        cases = plan["cases"]
        low, high = cases["slow"]["searches_per_s"], cases["fast"]["searches_per_s"]
        worst = cases["fast"]["servers"]
        rows.append(
            [f"{plan['model']} on {plan['gpus']}", f"{low:.0f} to {high:.0f}", f"{worst['peak_per_s']:,.0f}",
             f"{worst['bm25_cores']:.0f}", f"{worst['e5_flat_gpus']:.2f}", f"{worst['e5_flat_cores']:,}"]
        )  # fmt: skip
    headers = ["GPUs", "searches/s in the rollout", "at the peak", "`bm25`: cores", "E5, exact: H100s",
               "E5, exact: cores"]  # fmt: skip
    return table(headers, rows)


def links() -> str:
    """What a step moves over each link, and the share of the time that it keeps it busy, at the worst."""
    plans = load()["plans"]
    rows = []
    for name in plans[0]["cases"]["fast"]["links"]:
        cells = [_link([case["links"][name] for case in plan["cases"].values()]) for plan in plans]
        rows.append([name, *cells])
    return table(["", *(f"{plan['model']} on {plan['gpus']}" for plan in plans)], rows)


def _link(flows: Sequence[dict[str, float]]) -> str:
    worst = max(flows, key=lambda flow: flow["share"])
    return f"{_bytes(worst['bytes'])}, {_percent(worst['share'])}" if worst["bytes"] else "–"


def _bytes(size: float) -> str:
    unit, name = next((unit, name) for unit, name in UNITS if size >= unit)
    number = size / unit
    return f"{number:.1f} {name}" if number < 10 else f"{number:.0f} {name}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.001 else "< 0.1%"


def networks() -> str:
    """64 GPUs with slower networks between their machines."""
    found = load()["networks"]
    rows = []
    for name in dict.fromkeys(row["network"] for row in found):
        cells = [name]
        for row in (row for row in found if row["network"] == name):
            cells += [f"{row['total_s']:.0f} s", _percent(row["share"]), f"{row['weights_s']:.2g} s"]
        rows.append(cells)
    headers = ["network of a machine"]
    for model in ("7B", "32B"):
        headers += [f"{model}: a step", "in the network", "new weights"]
    return table(headers, rows)


def measured() -> str:
    """The constants that were measured, and what follows from them."""
    found = load()
    constants, limits = found["measured"], found["saturation"]
    rows = [
        ["a `bm25` search in wiki-18, with HTTP", f"{found['search_core_ms']:.1f} ms of a core"],
        ["an exact search in wiki-18's E5 vectors", f"{constants['flat_s'] * 21.015:.1f} s of a core"],
        ["a search over HTTP, query and three passages", _bytes(constants["search_bytes"])],
        ["an episode on its way to the log", _bytes(constants["sent_bytes"])],
        ["an episode in the log", _bytes(constants["log_bytes"])],
        ["an episode, in the log's writer", f"{1000 * constants['write_s']:.1f} ms of a core"],
        ["so one writer takes at most", f"{limits['writer_episodes_per_s']:,.0f} episodes/s"],
    ]
    return table(["", "measured"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "scale_measured": measured,
    "scale_steps": steps,
    "scale_searches": searches,
    "scale_links": links,
    "scale_networks": networks,
}
