"""Sparse decode attention in vLLM 0.30, chosen with ``--attention-backend CUSTOM``.

vLLM calls ``register`` (entry point group ``vllm.general_plugins``) in every one of its processes. It names the class
that the choice CUSTOM stands for and does nothing else, so an engine that does not choose it is not changed.

    config.py     one object with every setting
    backend.py    backend, metadata builder and implementation over FlashAttention's
    steps.py      what the layers of one step share: which rows decode, which pages were filled, buffers, counters
    cpu.py        the same backend in PyTorch, for tests with vLLM's CPU build
"""

from __future__ import annotations

import logging
from typing import Any

CLASS_PATH = "moira_kernels.vllm_plugin.backend.MoiraBackend"
SUPPORTED_VLLM = "0.30"
"""The only minor version whose interfaces this was written for and is tested with; any other is refused."""


def register() -> None:
    """Name the class that vLLM's choice CUSTOM stands for; may be called any number of times.

    Nothing is raised here, where it would stop engines that have not chosen CUSTOM: the vLLM version is checked when
    the class is imported. If another plugin has CUSTOM already, it keeps it, with a warning.
    """
    logger = logging.getLogger("vllm.moira")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        logger.warning("moira: not registered, this vLLM has no backend registry (%s)", error)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != CLASS_PATH:
        logger.warning("moira: not registered, CUSTOM is %s; VLLM_PLUGINS=moira loads this one", custom.get_path())
        return
    register_backend(custom, CLASS_PATH)


class WorkerExtension:
    """Methods for vLLM's workers: ``--worker-extension-cls moira_kernels.vllm_plugin.WorkerExtension``."""

    def moira_counters(self) -> dict[str, dict[str, Any]]:
        """Counters of one worker by layer name (``steps.Counters.read``); empty if no layer runs this backend."""
        from moira_kernels.vllm_plugin.backend import MoiraMetadataBuilder

        found = {}
        for groups in self.model_runner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    if isinstance(builder, MoiraMetadataBuilder) and builder.group is not None:
                        found |= builder.group.counters.read()
        return found


def require_sparse(llm: Any) -> list[dict[str, dict[str, Any]]]:
    """The counters of every worker of an ``LLM`` made with ``WorkerExtension``, if decoding was sparse.

    Raises ``RuntimeError`` if a worker has no sparse layer, or if a layer that should be sparse decoded nothing or
    decoded a row densely.
    """
    workers = llm.collective_rpc("moira_counters")
    for rank, layers in enumerate(workers):
        meant = {name: counts for name, counts in layers.items() if counts["dense_because"] is None}
        if not meant:
            raise RuntimeError(f"moira: rank {rank} has no sparse layer; was the CUSTOM backend chosen and used?")
        for name, counts in meant.items():
            if counts["dense_rows"] or not counts["sparse_rows"]:
                raise RuntimeError(
                    f"moira: rank {rank}, {name}: {counts['sparse_rows']} decode rows were sparse and "
                    f"{counts['dense_rows']} dense; expected all to be sparse, and at least one"
                )
    return workers
