"""The tables of docs/performance.md, from bench/results/speed.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import markdown_table

RESULT = Path(__file__).parent / "results" / "speed.json"
NOT_MEASURED = "Not measured yet.\n"
SHAPES = {"real": "134.5 M parameters", "tiny": "0.7 M parameters"}


def load() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))["points"] if RESULT.is_file() else {}


def results(point: str) -> dict[str, Any]:
    """The results of a point; empty where it was not measured."""
    return load().get(point, {}).get("results", {})


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`markdown_table.table`, or a sentence where nothing was measured."""
    return markdown_table.table(headers, rows) if rows else NOT_MEASURED


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def times(value: float) -> str:
    return f"{value:.2f}×"


def memory(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 2048 else f"{mib:,.0f} MiB"


def rollout() -> str:
    """Each contender on one and two threads."""
    found = results("rollout")
    rows = []
    for shape, words in SHAPES.items():
        one, two = (found.get(f"{shape}, {threads} threads", {}) for threads in (1, 2))
        for name in two:
            cells = [f"{name} ({words})"]
            for side in (one.get(name), two[name]):
                cells += (
                    [seconds(side["seconds"]), _rate(side), times(side["times_ours"])] if side else [""] * 3
                )
            rows.append([*cells, memory(two[name]["peak_mib"])])
    headers = ["rollout", "1 thread", "tokens/s", "× ours", "2 threads", "tokens/s", "× ours", "peak memory"]
    return table(headers, rows)


def decode() -> str:
    """A decoding step, eager and compiled."""
    rows = [
        [name.replace("1 threads", "1 thread"), f"{1000 * row['seconds']:.1f} ms", times(row["times_eager"])]
        for name, row in results("decode").items()
    ]
    return table(["decoding", "a step", "× eager"], rows)


def _rate(side: dict[str, float]) -> str:
    return f"{side['tokens_per_s']:,.0f}" if "tokens_per_s" in side else ""


def step() -> str:
    """Where a step's time goes, in each contender."""
    rows = []
    for shape, contenders in results("step").items():
        for name, row in contenders.items():
            parts = [seconds(row[part]) if part in row else "in the update" for part in
                     ("generation", "log_probs", "update")]  # fmt: skip
            reward = row["rewards"]
            rows.append(
                [f"{name} ({SHAPES[shape]})", seconds(row["seconds"]), *parts, times(row["times_ours"]),
                 memory(row["peak_mib"]), f"{row['tokens']:.0f}",
                 f"{reward['mean']:.3f} ± {reward['standard_error']:.3f}"]
            )  # fmt: skip
    headers = ["a step", "all", "generation", "log-probs", "update", "× ours", "peak memory",
               "tokens an episode", "reward"]  # fmt: skip
    return table(headers, rows)


def trl_settings() -> str:
    parts = ("seconds", "generation", "update")
    rows = [
        [name, *(seconds(row[part]) for part in parts), memory(row["peak_mib"])] if row
        else [name, "no step in 15 minutes", "", "", ""]
        for name, row in results("trl_settings").items()
    ]  # fmt: skip
    return table(["trl's settings", "a step", "generation", "update", "peak memory"], rows)


def update() -> str:
    found = results("update")
    rows = [
        [name, seconds(row["seconds"]), f"{row['tokens_per_s']:,.0f}", times(row["eager_by_this"]),
         seconds(row["first_s"]), f"{100 * row['share_of_products']:.1f}%", memory(row["peak_mib"])]
        for name, row in found.items()
        if "first_s" in row
    ]  # fmt: skip
    headers = ["update", "seconds", "tokens/s", "speed-up over eager", "the first", "of the products' speed",
               "peak memory"]  # fmt: skip
    speeds = found.get("matrix products, GFLOP/s", {})
    said = ", ".join(f"{value:,.0f} GFLOP/s in {name}" for name, value in speeds.items())
    return table(headers, rows) + (f"\nMatrix products alone reach {said}.\n" if said else "")


def logprobs() -> str:
    rows = [[name, f"{row['mean']:.1e}", f"{row['largest']:.1e}", f"{row['tokens']:,.0f}"]
            for name, row in results("logprobs").items()]  # fmt: skip
    return table(["sampler; trainer", "mean difference of log-probs", "largest", "tokens"], rows)


def slow_search() -> str:
    rows = []
    if found := results("slow_search"):
        modes = found["modes"]
        rows.append(
            ["seconds", seconds(modes["at once"]["seconds"]), seconds(modes["500 ms"]["seconds"]),
             f"{100 * found['throughput_at_500_ms']:.0f}%", seconds(modes["at once"]["without_hang_s"]),
             seconds(modes["hanging"]["without_hang_s"]), f"{100 * found['throughput_without_hang']:.0f}%"]
        )  # fmt: skip
    headers = ["rollout", "searches at once", "500 ms each", "throughput", "the episodes without a hang",
               "beside hanging ones", "throughput"]  # fmt: skip
    return table(headers, rows)


def growth() -> str:
    rows = []
    for name, found in results("growth").items():
        sizes, spent, grown = found["sizes"], found["seconds"], found["grown_mib"]
        rows.append(
            [name, f"{sizes[0]:,} to {sizes[-1]:,}", f"{seconds(spent[0])} to {seconds(spent[-1])}",
             f"{found['time_exponent']:.2f}", f"{grown[0]:,.0f} to {grown[-1]:,.0f} MiB",
             f"{found['memory_exponent']:.2f}"]
        )  # fmt: skip
    headers = ["by", "sizes", "time", "exponent", "memory above the loaded process", "exponent"]
    return table(headers, rows)


def targets() -> str:
    """What was asked for, and what was found."""
    rows = [[what, wanted, found, "yes" if reached else "no"] for what, wanted, found, reached in _targets()]
    return table(["", "target", "measured", "reached"], rows)


def _targets() -> Iterator[tuple[str, str, str, bool]]:
    yield from _rollout_targets()
    for shape, wanted in (("real", 2.0), ("tiny", 3.0)):
        if found := results("step").get(shape):
            ours, trl = (
                min(
                    (row for name, row in found.items() if name in ("srl, float32", "srl, bfloat16")),
                    key=lambda row: row["seconds"],
                ),
                min(
                    (row for name, row in found.items() if name.startswith("trl") and "weights" not in name),
                    key=lambda row: row["seconds"],
                ),
            )
            ratio, mine, theirs = trl["times_ours"] / ours["times_ours"], ours["peak_mib"], trl["peak_mib"]
            yield f"a GRPO step by trl's, {shape}", f"≥ {wanted:g}×", times(ratio), ratio >= wanted
            yield f"its peak memory, {shape}", f"≤ {memory(theirs)}", memory(mine), mine <= theirs
    rows = results("update").items()
    if updates := [row["eager_by_this"] for name, row in rows if name in ("srl, float32", "srl, bfloat16")]:
        yield "the update by eager float32", "≥ 2×", times(max(updates)), max(updates) >= 2
    if apart := results("logprobs").get("torch engine, float32; trainer, float32"):
        mean = apart["mean"]
        yield "log-probs of sampler and trainer, float32", "≤ 1e-5", f"{mean:.1e}", mean <= 1e-5
    if found := results("slow_search"):
        slow, hang = found["throughput_at_500_ms"], found["throughput_without_hang"]
        yield "throughput with searches of 500 ms", "≥ 80%", f"{100 * slow:.0f}%", slow >= 0.8
        yield "throughput beside hanging searches", "> 95%", f"{100 * hang:.0f}%", hang > 0.95


def _rollout_targets() -> Iterator[tuple[str, str, str, bool]]:
    """The fastest of each kind at two threads."""
    for shape, kind, wanted in (
        ("real", "transformers.generate, lock-step", 3.0),
        ("tiny", "transformers.generate, lock-step", 2.5),
        ("real", "fixed length, as Search-R1 published", 8.0),
    ):
        for threads in (1, 2):
            rows = results("rollout").get(f"{shape}, {threads} threads", {})
            ratios = [row["times_ours"] for name, row in rows.items() if name.startswith(kind)]
            if ratios:
                what = f"rollout by {kind}, {shape}, {threads} thread{'s' * (threads > 1)}"
                yield what, f"≥ {wanted:g}×", times(min(ratios)), min(ratios) >= wanted


def machine() -> str:
    """Where the figures come from."""
    lines = []
    for found in load().values():
        source = found["provenance"]
        processor = f"{source['cores']} × {source['processor']}"
        lines.append([f"`{source['command']}`", f"{found['minutes']:g}", processor, source["torch"],
                      source["transformers"], source["model"]])  # fmt: skip
    return table(["command", "minutes", "processor", "torch", "transformers", "model"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "speed_targets": targets,
    "speed_rollout": rollout,
    "speed_decode": decode,
    "speed_step": step,
    "speed_trl": trl_settings,
    "speed_update": update,
    "speed_logprobs": logprobs,
    "speed_slow_search": slow_search,
    "speed_growth": growth,
    "speed_machine": machine,
}
