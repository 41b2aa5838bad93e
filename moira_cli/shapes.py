"""Shapes CONTEXTxBATCH and attention geometries, parsed from what users type."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moira_cli.errors import CliError, unknown

# 130k is the paper's prompt length of 127 x 1,024 tokens; every other k is 1,024, and 131k is 128 x 1,024.
CONTEXT_ALIASES = {"130k": 130_048, "131k": 131_072}

PAPER_SHAPES = ("8kx32", "32kx16", "64kx8", "131kx4")
"""Shapes of the paper's Table 6."""

GEOMETRIES = {
    "llama-3.1-8b": (32, 8, 128),
    "qwen3-4b": (32, 8, 128),
    "smollm2-135m": (9, 3, 64),
}
"""(H_q, H_kv, D) by model name."""


@dataclass(frozen=True)
class Shape:
    """A decode batch: ``batch`` requests of ``context_tokens`` tokens each."""

    label: str
    context_tokens: int
    batch: int


def _context(text: str) -> int:
    if text in CONTEXT_ALIASES:
        return CONTEXT_ALIASES[text]
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def parse_shape(text: str) -> Shape:
    """'32kx16' -> 32,768 tokens x 16 requests; plain integers work too ('2048x4')."""
    label = text.strip().lower().replace("×", "x")
    match = re.fullmatch(r"(\d+k?)x(\d+)", label)
    if match and int(match[2]) > 0 and _context(match[1]) > 0:
        return Shape(label, _context(match[1]), int(match[2]))
    swapped = re.fullmatch(r"(\d+)x(\d+k)", label)
    hint = f" Did you mean {swapped[2]}x{swapped[1]}?" if swapped else ""
    raise CliError(
        f"Shape '{text}' not understood. Use CONTEXTxBATCH, e.g. 32kx16 (32,768 tokens x 16 requests).{hint}"
    )


def parse_geometry(text: str) -> tuple[int, int, int]:
    """A model name or HQ/HKV/D, e.g. 32/8/128 -> (H_q, H_kv, D)."""
    if text in GEOMETRIES:
        return GEOMETRIES[text]
    if match := re.fullmatch(r"(\d+)/(\d+)/(\d+)", text):
        num_q, num_kv, head_dim = (int(group) for group in match.groups())
        if min(num_q, num_kv, head_dim) > 0 and num_q % num_kv == 0:
            return num_q, num_kv, head_dim
        raise CliError(f"Geometry '{text}': expected HQ/HKV/D with HQ a multiple of HKV, all positive, e.g. 32/8/128.")
    raise unknown("Geometry", text, [*GEOMETRIES, "HQ/HKV/D"])


def split_list(text: str) -> list[str]:
    """'a, b' -> ['a', 'b']; empty items are dropped."""
    return [item.strip() for item in text.split(",") if item.strip()]


def parse_floats(option: str, text: str, low: float, high: float) -> list[float]:
    """Comma-separated numbers in [low, high]."""
    values = []
    for item in split_list(text):
        try:
            value = float(item)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise CliError(f"{option}: expected numbers from {low:g} to {high:g}, got '{item}'.")
        values.append(value)
    if not values:
        raise CliError(f"{option}: expected at least one number.")
    return values
