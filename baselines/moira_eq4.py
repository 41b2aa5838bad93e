"""Self-planning attention with the paper's partition, Equation (4) (C = 24, N_J = 32, N_T = 4096)."""

from __future__ import annotations

from baselines.moira import Moira

KIND = "attention"
NEEDS = ("cuda",)


class MoiraEq4(Moira):
    """``moira`` but for how rows are shared among thread blocks."""

    partition_name = "eq4"


ARM = MoiraEq4
