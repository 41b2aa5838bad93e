"""Sparse decode attention over ragged page lists: page summaries, Estimate, Select, Attend and Merge."""

from moira_kernels.attention import Workspace, attend
from moira_kernels.checks import MissingDependencyError, MoiraError, UnsupportedError
from moira_kernels.layout import PagedKV, RaggedPages
from moira_kernels.policies import Coverage, FixedCount, Oracle, ProfiledCount, Proportional, Selector, SinkWindow

__all__ = [
    "Coverage",
    "FixedCount",
    "MissingDependencyError",
    "MoiraError",
    "Oracle",
    "PagedKV",
    "ProfiledCount",
    "Proportional",
    "RaggedPages",
    "Selector",
    "SinkWindow",
    "UnsupportedError",
    "Workspace",
    "attend",
]
