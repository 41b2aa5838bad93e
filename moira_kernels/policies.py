"""Selectors: which pages each row reads, as one class per rule over the same stages.

Every selector allocates its per-layer state once (``allocate``), rebuilds it for pages just filled (``update``) and
returns page lists (``select``):

    selector = Coverage(gamma=0.98)
    selector.allocate(kv)
    selector.update(kv, filled_pages)          # physical ids of pages whose last slot was just written
    pages = selector.select(q, kv)             # -> RaggedPages

The first page (attention sink) and the current page are kept by every rule. These selectors run the float32 PyTorch
references, on any device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from moira_kernels import estimate, selection
from moira_kernels.checks import require_tensor
from moira_kernels.layout import PagedKV, RaggedPages
from moira_kernels.summary import PageSummaries, update_reference


@dataclass
class Selector(ABC):
    """Scores pages with the mvar estimate (Equation 2) and leaves the rule to ``keep``; one list per KV head."""

    summaries: PageSummaries | None = field(default=None, init=False, repr=False)

    def allocate(self, kv: PagedKV) -> None:
        """Take the memory for this layer's page summaries."""
        self.summaries = PageSummaries.allocate(kv)

    def update(self, kv: PagedKV, index: torch.Tensor) -> None:
        """Rebuild the summaries of the full pages ``index`` [n] int (physical ids)."""
        update_reference(self.summaries, kv, index)

    def log_mass(self, q: torch.Tensor, kv: PagedKV, scale: float | None = None) -> torch.Tensor:
        """Log mass [B, H_q, max_pages] float32 of every page."""
        return estimate.reference(q, kv, self.summaries, scale)

    def select(self, q: torch.Tensor, kv: PagedKV, scale: float | None = None) -> RaggedPages:
        """Page lists for the queries q [B, H_q, D], one per KV head."""
        shares = selection.group_shares(self.log_mass(q, kv, scale), kv.num_kv_heads)
        return selection.compact(self.keep(shares, kv), kv)

    @abstractmethod
    def keep(self, shares: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        """The rule: shares [B, H_kv, P] float32 -> keep mask [B, H_kv, P] bool."""


@dataclass
class Coverage(Selector):
    """The coverage rule (Equation 3): the fewest pages whose shares reach ``gamma``. A row's count is an output."""

    gamma: float = 0.98

    def __post_init__(self) -> None:
        _require_fraction("gamma", self.gamma)

    def keep(self, shares: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        """Algorithm 1."""
        return selection.coverage_bisection(shares, kv.num_pages(), self.gamma)


@dataclass
class Oracle(Coverage):
    """The coverage rule on the true mass (Equation 1): every key is read to choose; the bound, not a method."""

    def allocate(self, kv: PagedKV) -> None:
        """The oracle keeps no state."""

    def update(self, kv: PagedKV, index: torch.Tensor) -> None:
        """The oracle keeps no state."""

    def log_mass(self, q: torch.Tensor, kv: PagedKV, scale: float | None = None) -> torch.Tensor:
        """The true log mass of every page."""
        return estimate.exact_reference(q, kv, scale)


@dataclass
class FixedCount(Selector):
    """The ``count`` pages with the largest estimated share, forced pages included; shorter rows are read whole."""

    count: int = 64

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count: expected at least 1 page, got {self.count}")

    def keep(self, shares: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        """Exactly min(count, pages) pages a row, two at least where the row has two."""
        return selection.largest(shares, kv.num_pages(), self.count)


@dataclass
class Proportional(Selector):
    """The same ``fraction`` of every row's pages, rounded up."""

    fraction: float = 0.22

    def __post_init__(self) -> None:
        _require_fraction("fraction", self.fraction)

    def keep(self, shares: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        """ceil(fraction * pages) pages a row."""
        num_pages = kv.num_pages()
        counts = (num_pages.double() * self.fraction).ceil().int()
        return selection.largest(shares, num_pages, counts[:, None].expand(shares.shape[:2]))


@dataclass
class ProfiledCount(Selector):
    """One fixed count per KV head of this layer, from a profile: ``counts`` [H_kv] int, forced pages included."""

    counts: torch.Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        require_tensor("counts", self.counts, (None,), (torch.int32, torch.int64))

    def keep(self, shares: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        """Exactly min(counts[h], pages) pages for KV head h."""
        require_tensor("counts", self.counts, (kv.num_kv_heads,), (torch.int32, torch.int64))
        counts = self.counts.to(shares.device).expand(shares.shape[:2])
        return selection.largest(shares, kv.num_pages(), counts)


@dataclass
class SinkWindow(Selector):
    """The first ``sink_pages`` and the last ``window_pages`` of every row, whatever the query (StreamingLLM)."""

    sink_pages: int = 1
    window_pages: int = 16

    def __post_init__(self) -> None:
        if self.sink_pages < 1 or self.window_pages < 1:
            raise ValueError(
                f"sink_pages, window_pages: expected at least 1 each, got {self.sink_pages}, {self.window_pages}"
            )

    def allocate(self, kv: PagedKV) -> None:
        """The rule looks at no key, so it keeps no state."""

    def update(self, kv: PagedKV, index: torch.Tensor) -> None:
        """The rule looks at no key, so it keeps no state."""

    def select(self, q: torch.Tensor, kv: PagedKV, scale: float | None = None) -> RaggedPages:
        """The same list for every KV head of a request; ``q`` is not read."""
        shares = torch.empty((kv.batch, kv.num_kv_heads, kv.max_pages), device="meta")
        return selection.compact(self.keep(shares, kv), kv)

    def keep(self, shares: torch.Tensor, kv: PagedKV) -> torch.Tensor:
        """Pages [0, sink) and [pages - window, pages)."""
        column = torch.arange(kv.max_pages, device=kv.k.device)
        mask = (column < self.sink_pages) | (column >= kv.num_pages()[:, None, None] - self.window_pages)
        return mask.expand(shares.shape)


def _require_fraction(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name}: expected a number in (0, 1], got {value}")
