"""Self-planning attention over the page lists: Triton Attend + Merge, balanced partition.

Every thread block works out its own part from the row lengths in device memory (``moira_kernels.attention``).
"""

from __future__ import annotations

from baselines import Attention
from moira_kernels.attention import LaunchShape, Workspace, attend
from moira_kernels.partition import Partition, balanced, eq4, eq4_min_chunk_pages

KIND = "attention"
NEEDS = ("cuda",)


class Moira(Attention):
    """``moira_kernels.attend`` over buffers allocated once."""

    partition_name = "balanced"

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.workspace = Workspace.allocate(
            kv.batch, q.shape[1], pages.num_lists, kv.head_dim, q.device, self.partition_name
        )

    def run(self) -> None:
        """Attend, then Merge."""
        attend(self.q, self.kv, self.pages, out=self.out, workspace=self.workspace)

    def partition(self) -> Partition:
        """What the kernel computes on the device, from the lists' lengths."""
        lengths, page_size = self.pages.lengths.flatten().tolist(), self.kv.page_size
        if self.partition_name == "eq4":
            return eq4(lengths, self.workspace.blocks, eq4_min_chunk_pages(page_size))
        return balanced(lengths, self.workspace.blocks, page_size, LaunchShape().tile)


ARM = Moira
