"""Self-planning attention over the page lists: Triton Attend + Merge, partition of Equation (4).

Every thread block works out its own chunk from the row lengths in device memory (``moira_kernels.attention``).
"""

from __future__ import annotations

from baselines import Attention
from moira_kernels.attention import Workspace, attend
from moira_kernels.partition import Partition, eq4, eq4_min_chunk_pages

KIND = "attention"
NEEDS = ("cuda",)


class Moira(Attention):
    """``moira_kernels.attend`` over buffers allocated once."""

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.workspace = Workspace.allocate(kv.batch, q.shape[1], pages.num_lists, kv.head_dim, q.device)

    def run(self) -> None:
        """Attend, then Merge."""
        attend(self.q, self.kv, self.pages, out=self.out, workspace=self.workspace)

    def partition(self) -> Partition:
        """Equation (4) on the lists' lengths."""
        return eq4(self.pages.lengths.flatten().tolist(), min_chunk_pages=eq4_min_chunk_pages(self.kv.page_size))


ARM = Moira
