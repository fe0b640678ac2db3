"""Draw docs/scale.svg: what runs where when a run is on verl. `python docs/draw_scale.py [--check]`

Light and dark come from the reader's own setting. A test fails when the file is not what this draws.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

FILE = Path(__file__).parent / "scale.svg"
WIDTH, HEIGHT = 1000, 600
STYLE = """
  .page { fill: #ffffff } .panel { fill: #f4f5f7; stroke: #c9ced6 }
  .box { fill: #ffffff; stroke: #6b7686 } .gpu { fill: #e8f3e8; stroke: #4c8a4c }
  .search { fill: #fdf1df; stroke: #b97a1f } .disk { fill: #e9eefb; stroke: #5470b8 }
  .line { stroke: #4a5361; fill: none } .head { fill: #4a5361 }
  text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; fill: #1d2430 }
  .title { font-weight: 600 } .small { font-size: 12px; fill: #4a5361 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0f141b } .panel { fill: #171e28; stroke: #3a4452 }
    .box { fill: #202937; stroke: #8794a8 } .gpu { fill: #1b3322; stroke: #6fb27a }
    .search { fill: #3a2c15; stroke: #d9a04a } .disk { fill: #1c2747; stroke: #8fa6e6 }
    .line { stroke: #aeb8c6 } .head { fill: #aeb8c6 }
    text { fill: #e8ecf2 } .small { fill: #b4becb }
  }
"""
LABEL = "What runs where: one launcher, one trainer, one writer of the log; workers on every machine."


def text(x: float, y: float, words: str, kind: str = "small", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(
    x: float, y: float, w: float, h: float, kind: str, title: str, lines: Sequence[str] = ()
) -> list[str]:
    """A rounded box with a title and lines below it."""
    drawn = [f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" class="{kind}"/>']
    drawn.append(text(x + 14, y + 24, title, "title"))
    return drawn + [text(x + 14, y + 44 + 18 * number, line) for number, line in enumerate(lines)]


def arrow(points: Sequence[tuple[float, float]], both: bool = False) -> str:
    path = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
    start = ' marker-start="url(#head)"' if both else ""
    return f'<path d="{path}" class="line" stroke-width="1.5"{start} marker-end="url(#head)"/>'


def once() -> list[str]:
    """What there is one of."""
    return [
        *box(20, 20, 270, 454, "panel", "Once"),
        *box(36, 64, 238, 104, "box", "srl train --backend verl", [
            "checks settings, questions, search;", "starts the rest, tells the news,",
            "ends a run that stands still",
        ]),
        *box(36, 212, 238, 104, "box", "The trainer", [
            "verl's loop, our estimators:", "rewards to advantages;", "checks every worker at the start",
        ]),
        *box(36, 354, 238, 104, "box", "The log's writer", [
            "one process, one writer:", "trajectories, searches, metrics", "of a step become one part",
        ]),
        arrow([(155, 168), (155, 212)]),
        arrow([(60, 354), (60, 334), (28, 334), (28, 116), (36, 116)]),
        text(68, 342, "news"),
    ]  # fmt: skip


def everywhere() -> list[str]:
    """What runs on each machine."""
    return [
        *box(330, 20, 650, 454, "panel", "On every machine"),
        *box(350, 64, 270, 104, "gpu", "GPU workers", [
            "policy, reference and critic in shards", "(FSDP2 or Megatron):", "log-probs, values, update",
        ]),
        *box(700, 64, 260, 104, "gpu", "Servers that generate", [
            "vLLM or SGLang, whole copies,", "on the same GPUs, in turn", "with the training",
        ]),
        *box(350, 222, 270, 84, "box", "TransferQueue", [
            "ids, masks, log-probs, rewards,", "values, advantages of the batch",
        ]),
        *box(700, 222, 260, 84, "box", "Agent workers", [
            "the episode: turns, searches, reward;", "the same code as the local backend's",
        ]),
        *box(700, 378, 260, 80, "search", "Search server", [
            "srl serve retriever --replicas N,", "here or on machines of its own",
        ]),
        arrow([(620, 116), (700, 116)]),
        text(660, 94, "weights,", anchor="middle"),
        text(660, 108, "each step", anchor="middle"),
        arrow([(830, 222), (830, 168)], both=True),
        text(842, 192, "ids;"),
        text(842, 208, "tokens, log-probs"),
        arrow([(850, 306), (850, 378)], both=True),
        text(862, 338, "queries;"),
        text(862, 354, "passages"),
        arrow([(700, 264), (620, 264)]),
        text(660, 256, "episodes", anchor="middle"),
        arrow([(485, 222), (485, 168)], both=True),
        text(497, 200, "micro-batches"),
        arrow([(274, 264), (350, 264)], both=True),
        arrow([(274, 232), (310, 232), (310, 116), (350, 116)]),
        arrow([(750, 306), (750, 346), (310, 346), (310, 406), (274, 406)]),
        text(530, 366, "every trajectory, whole, as soon as it ends", anchor="middle"),
    ]  # fmt: skip


def disk() -> list[str]:
    """What all of them see."""
    return [
        *box(20, 518, 960, 62, "disk", "A file system that every machine sees", [
            "model, questions, index; the run: config.yaml, tokenizer/, checkpoints/global_step_N/, log/",
        ]),
        arrow([(155, 458), (155, 518)]),
        text(167, 500, "a part for each step"),
        arrow([(655, 474), (655, 518)]),
        text(667, 500, "checkpoints, a shard from each worker"),
    ]  # fmt: skip


def drawn() -> str:
    marker = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" class="head"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{escape(LABEL)}">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>'
    parts = [head, f"<style>{STYLE}</style>", f"<defs>{marker}</defs>", page, *once(), *everywhere(), *disk()]
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(not FILE.is_file() or FILE.read_text(encoding="utf-8") != drawn())
    FILE.write_text(drawn(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
