"""A whole decode layer: Estimate and Select over the cache, then Attend and Merge over the given lists.

Attention reads the lists of the comparison, so its work is that of the other arms; Select makes its own lists, of about
the same length, and they are thrown away. For `moira profile`, whose table shows the four stages.
"""

from __future__ import annotations

from baselines.moira import Moira
from moira_kernels import estimate, selection
from moira_kernels.pipeline import DecodeLayer
from moira_kernels.ranges import annotate

KIND = "layer"
NEEDS = ("cuda",)


class MoiraLayer(Moira):
    """The stages of ``DecodeLayer`` one after another, over summaries made beforehand."""

    extra_caches = 0.05

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.layer = DecodeLayer.allocate(kv, q.shape[1])
        full = (kv.seq_lens // kv.page_size).tolist()
        for row, count in zip(kv.block_table, full, strict=True):
            self.layer.prefill(kv, row[:count])
        # Attention of random keys is nearly even, so coverage gamma keeps about that share of the pages.
        self.gamma = float(pages.lengths.sum() / (kv.num_pages().sum() * pages.num_lists).clamp(min=1))

    def run(self) -> None:
        """Estimate, Select, Attend, Merge."""
        with annotate("estimate"):
            estimate.launch(self.q, self.kv, self.layer.summaries, self.layer.log_mass)
        with annotate("select"):
            selection.launch(self.layer.log_mass, self.kv, self.layer.pages, gamma=self.gamma, after_estimate=True)
        with annotate("attend"):
            super().run()


ARM = MoiraLayer
