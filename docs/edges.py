"""Draws docs/edges.svg, the time of training against the number of edges, from the committed figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

HERE = Path(__file__).parent
FIGURES = HERE.parent / "benchmarks" / "results" / "training" / "results.json"
TITLE = "100 epochs, preparation included, 1,000 Erdos-Renyi graphs, 1 thread"
MILLIONS_OF_EDGES = 1000 * 100 * 99 / 1e6  # directed, where p = 1: 1,000 graphs of 100 nodes
LINES = {  # from below; name in the figures: label at the end of the line, colour
    "SPIN-att": ("SPIN", "#1f5fa8"),
    "GCN CSR, collated": ("tuned GCN", "#a06a2c"),
    "GIN CSR, collated": ("tuned GIN", "#c2453c"),
    "GIN edge_index, DataLoader": ("GIN of PyG", "#3f8f4f"),
    "GCN edge_index, DataLoader": ("GCN of PyG", "#8a5fb0"),
}
LEFT, RIGHT, TOP, BOTTOM = 64, 560, 58, 330
LOWEST, HIGHEST = 3, 1200  # seconds


def x_of(millions: float) -> float:
    return LEFT + (RIGHT - LEFT) * millions / 10


def y_of(seconds: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(seconds / LOWEST) / math.log(HIGHEST / LOWEST)


def drawn() -> str:
    all_curves = json.loads(FIGURES.read_text())["curves"]
    seconds = next(curves["seconds"] for curves in all_curves if curves["title"] == TITLE)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 384" font-family="Helvetica, Arial, sans-serif" '
        'font-size="13">',
        '<rect width="720" height="384" fill="#ffffff"/>',
        '<g fill="#222"><text x="16" y="26" font-size="16" font-weight="bold">Training time against the number of '
        'edges</text><text x="16" y="46" fill="#666">seconds for 100 epochs and all preparation, one CPU thread, '
        "logarithmic axis</text></g>",
    ]
    for tick in (5, 10, 20, 50, 100, 200, 500, 1000):
        y = y_of(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f} H{RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick:,}</text>')
    for tick in range(0, 11, 2):
        parts.append(f'<path d="M{x_of(tick):.1f} {BOTTOM} v5" stroke="#888"/>')
        parts.append(f'<text x="{x_of(tick):.1f}" y="{BOTTOM + 20}" text-anchor="middle" fill="#555">{tick}</text>')
    parts.append(f'<path d="M{LEFT} {BOTTOM} H{RIGHT}" stroke="#888"/>')
    parts.append(
        f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{BOTTOM + 42}" text-anchor="middle" fill="#222">millions of edges of '
        "1,000 random graphs of 100 nodes each</text>"
    )
    free = float(BOTTOM)
    for name, (label, colour) in LINES.items():
        points = [(x_of(float(p) * MILLIONS_OF_EDGES), y_of(time)) for p, time in seconds[name].items()]
        width = 3.5 if name.startswith("SPIN") else 2
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width + 1}" fill="{colour}"/>' for x, y in points]
        x, y = points[-1]
        free = min(y, free - 16)  # above the label before it
        last = list(seconds[name].values())[-1]
        weight = ' font-weight="bold"' if name.startswith("SPIN") else ""
        parts.append(f'<text x="{x + 12:.1f}" y="{free + 4:.1f}" fill="{colour}"{weight}>{label}, {last:.0f} s</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "edges.svg").write_text(drawn())
