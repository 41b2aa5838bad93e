"""Shapes CONTEXTxBATCH and attention geometries, parsed from what users type."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from moira_cli.errors import CliError, unknown

# 130k is the paper's prompt length of 127 x 1,024 tokens; every other k is 1,024, and 131k is 128 x 1,024.
CONTEXT_ALIASES = {"130k": 130_048, "131k": 131_072}

PAPER_SHAPES = ("8kx32", "32kx16", "64kx8", "131kx4")
"""Shapes of the paper's Table 6."""

TABLE_3_SHAPES = ("8kx32", "16kx32", "32kx16", "64kx8", "130kx4")
"""Shapes of the paper's Table 3."""

BATCH_OF_ONE = ("2kx1", "4kx1", "8kx1", "16kx1", "32kx1", "64kx1")
"""Contexts of a single request, as in the paper's Section 5.5.5."""

E2E_SUITES = {"table3": TABLE_3_SHAPES, "batch1": BATCH_OF_ONE, "paper": (*TABLE_3_SHAPES, *BATCH_OF_ONE)}
"""Named sets of shapes of `bench e2e`."""

TABLE_3_READS = {
    "llama-3.1-8b": {"8k": 0.42, "16k": 0.37, "32k": 0.31, "64k": 0.16, "130k": 0.15},
    "qwen3-4b": {"8k": 0.49, "16k": 0.43, "32k": 0.39, "64k": 0.25, "130k": 0.21},
}
"""Share of the pages that Moira reads at gamma 0.98, by model and context, in the paper's Table 3."""

GEOMETRIES = {
    "llama-3.1-8b": (32, 8, 128),
    "qwen3-4b": (32, 8, 128),
    "qwen3-4b-thinking": (32, 8, 128),
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


def paper_reads(model: str, context_tokens: int) -> tuple[float, str]:
    """(share of the pages read, where it is from) for a model preset and context, after the paper's Table 3.

    Contexts between those of the table are interpolated over log2(context). Shorter ones go on with the slope from 8k
    to 16k, which the paper does not report: reading more makes the sparse arm slower, never faster.
    """
    family = next((name for name in TABLE_3_READS if model.startswith(name)), None)
    if family is None:
        raise CliError(
            f"--reads paper: the paper's Table 3 has {', '.join(TABLE_3_READS)}, not '{model}'. Give a number."
        )
    table = sorted((_context(label), reads) for label, reads in TABLE_3_READS[family].items())
    if context_tokens in dict(table):
        return dict(table)[context_tokens], "paper's Table 3"
    if context_tokens > table[-1][0]:
        return table[-1][1], "paper's Table 3 at 130k"
    above = next(i for i, (context, _) in enumerate(table) if context > context_tokens) or 1
    (x0, y0), (x1, y1) = table[above - 1], table[above]
    slope = (y1 - y0) / math.log2(x1 / x0)
    reads = min(1.0, y0 + slope * math.log2(context_tokens / x0))
    return round(reads, 4), "extended from the paper's Table 3" if context_tokens < x0 else "within the paper's Table 3"


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
