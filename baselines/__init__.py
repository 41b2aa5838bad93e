"""The arms of a comparison: every decode attention that can be measured, one file each.

The arm's name is its file name with hyphens (``dense_torch.py`` is ``dense-torch``). Each file starts with a docstring
whose first line describes the arm, and two literals:

    KIND = "attention"                       # or "layer": selects as well
    NEEDS = ("cuda", "vllm|flash_attn_3")    # "cuda", or the import name of an optional library, or one of several

They are read from the source, so listing arms imports no library. ``ARM`` is the file's ``Attention`` subclass. A file
without ``KIND`` is shared by arms and is none itself.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moira_kernels.layout import PagedKV, RaggedPages
    from moira_kernels.partition import Partition

INSTALL = {
    "flash_attn_3": "pip install 'moira-attention[fa3]'",
    "flashinfer": "pip install 'moira-attention[flashinfer]'",
    "vllm": "pip install 'moira-attention[vllm]'",
}


@dataclass(frozen=True)
class Description:
    """What is known of an arm without importing it."""

    name: str
    kind: str
    summary: str
    needs: tuple[str, ...]

    def missing(self, device: str) -> str | None:
        """Why the arm cannot run on this device type ('cuda' or 'cpu') and installation; None if it can."""
        for need in self.needs:
            if need == "cuda":
                if device != "cuda":
                    return f"needs a CUDA GPU, this run is on the {device}"
                continue
            choices = need.split("|")
            if all(importlib.util.find_spec(library) is None for library in choices):
                how = " or ".join(INSTALL.get(library, f"pip install {library}") for library in choices)
                return f"needs {' or '.join(choices)}, which is not installed ({how})"
        return None


def _read(path: Path) -> Description | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    literals = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("KIND", "NEEDS")
    }
    if "KIND" not in literals:
        return None
    summary = (ast.get_docstring(tree) or "").splitlines()[0]
    return Description(path.stem.replace("_", "-"), literals["KIND"], summary, literals.get("NEEDS", ()))


def describe(kind: str | None = "attention") -> dict[str, Description]:
    """Every arm of this kind (None: of any) by name, in alphabetical order."""
    found = (_read(path) for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem != "__init__")
    return {arm.name: arm for arm in found if arm is not None and kind in (None, arm.kind)}


def names(kind: str | None = "attention") -> list[str]:
    """Names of the arms of this kind (None: of any)."""
    return list(describe(kind))


def load(name: str) -> type[Attention]:
    """Import the arm's file and return its class. An unknown name raises ``KeyError``."""
    if name not in describe(None):
        raise KeyError(name)
    return importlib.import_module(f"baselines.{name.replace('-', '_')}").ARM


class Attention(ABC):
    """One implementation of decode attention, bound to its inputs.

    Args:
        q: [B, H_q, D] queries.
        kv: the paged cache.
        pages: the page lists.

    Attributes:
        out: [B, H_q, D], written by ``run``; NaN until then.
        graph_safe: True if nothing has to be planned on the host when lists change, so that a captured graph stays
            valid from step to step.
        extra_caches: memory that ``run`` takes on top of its inputs, in copies of the KV cache.
        implementation: library and version of the kernel, where it is not this project's own or the arm has a choice.
    """

    graph_safe = True
    extra_caches = 0.0
    implementation: str | None = None

    def __init__(self, q: torch.Tensor, kv: PagedKV, pages: RaggedPages):
        self.q, self.kv, self.pages = q, kv, pages
        self.out = q.new_full(q.shape, float("nan"))

    def plan(self) -> dict[str, float]:
        """Everything outside ``run`` that must be repeated whenever the lists change.

        Returns the parts of the host work in microseconds, among ``d2h_us`` (lengths to the host), ``index_build_us``
        and ``plan_call_us``; nothing by default. Device work here is not timed: only what whoever writes the lists
        would do anyway (page ids in the arm's own numbering), or what the arm's docstring names.
        """
        return {}

    @abstractmethod
    def run(self) -> None:
        """Device work of one decode step of one layer: read the lists and the cache, write ``out``."""

    def attended(self) -> RaggedPages:
        """The lists whose tokens ``out`` attends to; an arm that reads more than it was given says so here."""
        return self.pages

    def partition(self) -> Partition | None:
        """Which pages each thread block takes, where the arm's own kernel decides it."""
        return None

    def moved_bytes(self) -> int:
        """Bytes of keys and values that ``run`` reads or writes in memory; at least those it attends to."""
        from moira_kernels.testing import useful_bytes

        return useful_bytes(self.kv, self.attended())


def all_pages(kv: PagedKV) -> RaggedPages:
    """The lists that keep every page of every row, one per KV head."""
    import torch

    from moira_kernels.selection import compact

    keep = torch.ones((kv.batch, kv.num_kv_heads, kv.max_pages), dtype=torch.bool, device=kv.k.device)
    return compact(keep, kv)
