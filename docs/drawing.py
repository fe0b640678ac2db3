"""What the drawings of these pages share: boxes, arrows and text in SVG.

Light and dark come from the reader's own setting.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

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


def page(label: str, width: int, height: int, parts: Sequence[str]) -> str:
    """A whole drawing of `width` by `height` pixels; `label` says in words what it shows."""
    marker = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" class="head"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(label)}">'
    )
    background = f'<rect class="page" width="{width}" height="{height}"/>'
    lines = [head, f"<style>{STYLE}</style>", f"<defs>{marker}</defs>", background, *parts, "</svg>", ""]
    return "\n".join(lines)


def main(file: Path, drawing: str) -> int:
    """Write `drawing`, or with `--check` say by the exit code whether `file` is it."""
    if "--check" in sys.argv[1:]:
        return int(not file.is_file() or file.read_text(encoding="utf-8") != drawing)
    file.write_text(drawing, encoding="utf-8")
    return 0
