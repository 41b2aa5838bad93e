"""NVTX ranges in the domain ``moira``: names on the host's timeline of Nsight Systems.

They show when a stage is launched. A CUDA-graph replay launches nothing by name, so its kernels are told apart by their
own names (``moira_cli/stages.py``). Where no tool listens a range costs 0.2 to 0.4 us of host time (measured).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

try:
    import nvtx
except ModuleNotFoundError:  # a checkout on a machine where nothing can be installed runs all the same, without ranges
    nvtx = None


@cache
def annotate(message: str) -> AbstractContextManager:
    """A push/pop range named ``message``, to be used with ``with`` as often as wanted.

    Messages are kept for the life of the process: name stages, layers and arms, not single steps.
    """
    return nullcontext() if nvtx is None else nvtx.annotate(message, domain="moira")
