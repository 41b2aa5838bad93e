"""One list per request, the union of its heads' lists, on this project's kernel: what a list per layer costs.

Every KV head reads the union, which is longer than any of the lists, and the output is checked over it. A selector that
works per layer writes the union itself, so making it is not timed.
"""

from __future__ import annotations

from baselines import page_sets
from baselines.moira import Moira

KIND = "attention"
NEEDS = ("cuda",)


class SharedList(Moira):
    """``moira`` over the union of each request's lists."""

    def __init__(self, q, kv, pages):
        self.given = pages
        super().__init__(q, kv, page_sets.union(pages, kv))

    def plan(self) -> dict[str, float]:
        """Device work only: the unions of the lists as they are."""
        page_sets.overwrite(self.pages, page_sets.union(self.given, self.kv))
        return {}


ARM = SharedList
