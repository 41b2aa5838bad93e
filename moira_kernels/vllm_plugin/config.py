"""The plugin's settings: one object, from vLLM's ``additional_config`` or from the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENVIRONMENT = "MOIRA_CONFIG"
POLICIES = ("coverage", "fixed-count", "profiled-count")
PARTITIONS = ("balanced", "eq4")


@dataclass(frozen=True)
class MoiraConfig:
    """How decode rows choose their pages.

    Attributes:
        gamma: share of the estimated attention mass that ``coverage`` keeps, in (0, 1]; 1 keeps every page.
        policy: ``coverage`` (Equation 3), ``fixed-count`` (``count`` pages) or ``profiled-count`` (``counts`` pages).
        count: pages of every row under ``fixed-count``, the first and the current one included.
        counts: pages per layer and KV head of the whole model under ``profiled-count``, [layers][H_kv].
        dense_layers: indices of layers that always attend to every page.
        partition: how Attend shares pages among thread blocks, ``balanced`` or the paper's ``eq4``.
    """

    gamma: float = 0.98
    policy: str = "coverage"
    count: int | None = None
    counts: tuple[tuple[int, ...], ...] | None = None
    dense_layers: tuple[int, ...] = ()
    partition: str = "balanced"

    def __post_init__(self) -> None:
        _expect("gamma", self.gamma, _is_number(self.gamma) and 0 < self.gamma <= 1, "a number in (0, 1]")
        for name, choices in (("policy", POLICIES), ("partition", PARTITIONS)):
            _expect(name, getattr(self, name), getattr(self, name) in choices, f"one of {', '.join(choices)}")
        _expect("dense_layers", self.dense_layers, _are_ints(self.dense_layers, 0), "layer indices from 0")
        _expect("count", self.count, self.count is None or _are_ints([self.count], 1), "at least 1 page")
        lists = self.counts is None or all(_are_ints(layer, 1) and layer for layer in self.counts)
        _expect("counts", self.counts, lists, "pages, at least 1, for each layer and each of its KV heads")
        needed = {"fixed-count": "count", "profiled-count": "counts"}.get(self.policy)
        for name in ("count", "counts"):
            if (getattr(self, name) is not None) != (name == needed):
                raise ValueError(
                    f"moira: policy {self.policy!r} " + (f"needs {name!r}" if name == needed else f"has no {name!r}")
                )

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> MoiraConfig:
        """From a JSON object. A wrong name or value raises ``ValueError`` with what was expected."""
        names = [field.name for field in fields(cls)]
        if not isinstance(settings, Mapping):
            raise ValueError(f"moira: expected a JSON object of settings, got {settings!r}")
        if unknown := sorted(set(settings) - set(names)):
            raise ValueError(f"moira: unknown setting {', '.join(unknown)}; expected {', '.join(names)}")
        return cls(**{name: _as_tuples(value) for name, value in settings.items()})

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> MoiraConfig:
        """``additional_config["moira"]``, or else the environment variable ``MOIRA_CONFIG`` (JSON, or a file of it).

        Both at once is an error. Layer and KV head numbers are checked against the model.
        """
        given = (vllm_config.additional_config or {}).get("moira")
        text = os.environ.get(ENVIRONMENT)
        if given is not None and text:
            raise ValueError(f"moira: set either additional_config['moira'] or {ENVIRONMENT}, not both")
        if given is None and text:
            try:
                given = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(f"{ENVIRONMENT}: expected a JSON object or a file that holds one ({error})") from None
        config = cls.parse({} if given is None else given)
        model = vllm_config.model_config
        layers, heads = model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads()
        if config.dense_layers and max(config.dense_layers) >= layers:
            raise ValueError(f"moira: dense_layers: the model has layers 0 to {layers - 1}, got {config.dense_layers}")
        if config.counts and (len(config.counts) != layers or any(len(layer) != heads for layer in config.counts)):
            raise ValueError(f"moira: counts: expected {layers} layers of {heads} KV heads each")
        return config


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_ints(values: Any, least: int) -> bool:
    return isinstance(values, tuple | list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values
    )


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _expect(name: str, value: Any, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"moira: {name}: expected {expected}, got {value!r}")
