"""Read odd texts as calls of tools in every format: nothing may raise, and the time must be linear.

    python bench/calls_fuzz.py [--texts 1000000] [--out RESULTS]

A text is a mix of pieces of all formats, or a right call of one with pieces put into it or cut out. For the
time, hostile texts of doubling sizes are read; counted is the quotient of the times of the two largest.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path

from srl.files import write_json
from srl.protocol import FORMATS, ToolCall

PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "<|tool_call_start|>", "{", "}",
    "<|tool_call_end|>", '"name"', ": ", '"search"', ", ", '"arguments"', '"query"', "search(", "query=", ")",
    "<function=", "search>", "<parameter=query>", "</parameter>", "</function>", "\n", "\\", '"', "'", "\x00",
    "<|python_tag|>", ";", "1e999", "NaN", "9" * 5000, "(" * 300, "[" * 300, "f'{x}'", "lambda: 0", "\\N{",
    "\ud800", "[", "#", "'x'", "<|tool_call>", "<tool_call|>", "call:search{", "query:", '<|"|>', "None",
    "<|channel>thought\n", "<channel|>", " to=functions.search", "<|channel|>commentary", "<|message|>",
    "<|constrain|>json", "<|end|><|start|>assistant", "<|channel|>analysis<|message|>", "1.5",
]  # fmt: skip
CALL = ToolCall("search", {"query": "who built it"})
SIZES = (500_000, 1_000_000, 2_000_000)


def odd_text(rng: random.Random) -> str:
    """A text that is no call of any format, or almost one."""
    if rng.random() < 0.5:
        return "".join(rng.choices(PIECES, k=rng.randint(1, 14)))
    text = rng.choice(list(FORMATS.values())).write([CALL] * rng.randint(1, 3))
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(text))
        text = text[:start] + rng.choice(["", *PIECES]) + text[start + rng.choice([0, 1, 5]) :]
    return text


def hostile_units(name: str) -> list[str]:
    """What, many times over, may cost a reader of this format more than its length."""
    opening = FORMATS[name].write([CALL]).partition("search")[0]
    more = [f'{opening}f{{<|"|>', f"{opening}f><parameter=q>", f'{opening}"\\', f"{opening}f", "</think>"]
    return [FORMATS[name].token, opening, *'[{ ("\\a', "a:", '<|"|>', "<parameter=q>", *more,
            *FORMATS[name].thoughts]  # fmt: skip


def read_odd_texts(count: int, rng: random.Random) -> dict[str, dict[str, int]]:
    """For each format, how many of `count` texts had right calls, malformed ones, none."""
    outcomes = {name: Counter(right=0, malformed=0, none=0) for name in FORMATS}
    for number in range(count):
        text = odd_text(rng)
        for name, form in FORMATS.items():
            said = form.read(text, inside_thought=number % 2 == 0)
            assert all(call.error or call.name for call in said.calls)
            is_right = any(not call.error for call in said.calls)
            outcomes[name]["right" if is_right else "malformed" if said.calls else "none"] += 1
    return {name: dict(counter) for name, counter in outcomes.items()}


def hostile_seconds(name: str, unit: str, size: int) -> float:
    """The processor's time, the least of three, for a turn of `size` characters made of `unit`."""
    form, times = FORMATS[name], list[float]()
    text = form.write([CALL]).partition("search")[0] + unit * (size // len(unit))
    for _ in range(3):
        began = time.process_time()
        form.read(text)
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the readers of calls.")
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "calls_fuzz.json")
    options = parser.parse_args()
    outcomes = read_odd_texts(options.texts, random.Random("fuzz"))
    slowest = {}
    for name in FORMATS:
        seconds = {
            unit: [hostile_seconds(name, unit, size) for size in SIZES] for unit in hostile_units(name)
        }
        unit = max(seconds, key=lambda unit: seconds[unit][-1])
        quotients = [times[-1] / times[-2] for times in seconds.values() if times[-2] >= 1e-3]
        slowest[name] = {"unit": unit, "seconds": dict(zip(SIZES, seconds[unit], strict=True)),
                         "largest_quotient": max(quotients, default=None)}  # fmt: skip
    write_json(options.out, {"texts": options.texts, "outcomes": outcomes, "hostile": slowest})


if __name__ == "__main__":
    main()
