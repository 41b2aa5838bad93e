"""Pictures of a run: time against CV (the paper's Figure 4), time against rows, work per thread block (Figure 2)."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING, Any

from moira_cli.compare import clock_of
from moira_cli.errors import CliError, ExitCode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figures(document: dict[str, Any]) -> dict[str, bytes]:
    """PNG pictures by name; a picture that the run has no data for is left out."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CliError(
            "Pictures need matplotlib. Install with: pip install 'moira-attention[plots]'", ExitCode.ENVIRONMENT
        )
    cells = [cell for cell in document["cells"] if cell["status"] == "ok"]
    made = {"cv": time_against_cv(cells), "rows": time_against_rows(cells), "blocks": pages_per_block(cells)}
    return {name: _png(figure) for name, figure in made.items() if figure is not None}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
    return buffer.getvalue()


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count, 3.4))
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _series(cell: dict[str, Any]) -> str:
    return f"{cell['arm']} ({cell['mode']}, {cell['kv_layout']})"


def _unit(cell: dict[str, Any]) -> str:
    return "kernel time (us)" if cell["device"] == "cuda" else "cpu time (us)"


def _draw(axes: Axes, points: dict[str, list[tuple[float, dict[str, Any]]]]) -> None:
    """One line per series with its 95% intervals."""
    for name, values in points.items():
        values.sort(key=lambda value: value[0])
        times = [cell["timing"][clock_of(cell)] for _, cell in values]
        median = [time["median"] for time in times]
        low = [max(0.0, time["median"] - time["ci95"][0]) for time in times]
        high = [max(0.0, time["ci95"][1] - time["median"]) for time in times]
        axes.errorbar([x for x, _ in values], median, yerr=[low, high], marker="o", markersize=3, label=name)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")


def time_against_cv(cells: list[dict[str, Any]]) -> Figure | None:
    """One panel per shape; None if no shape was measured at two CVs of synthetic lists."""
    shapes: dict[str, dict[str, list]] = {}
    for cell in cells:
        if cell["cv_nominal"] is not None:
            series = shapes.setdefault(cell["shape"]["alias"], {}).setdefault(_series(cell), [])
            series.append((cell["cv_measured"], cell))
    shapes = {
        label: lines for label, lines in shapes.items() if max(len({x for x, _ in line}) for line in lines.values()) > 1
    }
    if not shapes:
        return None
    figure, panels = _panels(len(shapes))
    for axes, (label, lines) in zip(panels, shapes.items(), strict=True):
        _draw(axes, lines)
        axes.set(title=label, xlabel="CV of the page counts (measured)", ylabel=_unit(cells[0]))
    return figure


def time_against_rows(cells: list[dict[str, Any]]) -> Figure | None:
    """One panel per list source or nominal CV; None if everything has the same number of rows."""
    sources: dict[str, dict[str, list]] = {}
    for cell in cells:
        cv = cell["cv_nominal"]
        source = "recorded lists" if cv is None else f"CV {cv:g}"
        sources.setdefault(source, {}).setdefault(_series(cell), []).append((cell["shape"]["rows"], cell))
    sources = {
        name: lines for name, lines in sources.items() if max(len({x for x, _ in line}) for line in lines.values()) > 1
    }
    if not sources:
        return None
    figure, panels = _panels(len(sources))
    for axes, (name, lines) in zip(panels, sources.items(), strict=True):
        _draw(axes, lines)
        axes.set_xscale("log", base=2)
        axes.set(title=name, xlabel="rows (requests x KV heads)", ylabel=_unit(cells[0]))
    return figure


def pages_per_block(cells: list[dict[str, Any]]) -> Figure | None:
    """Pages of the busy thread blocks, fewest first, for arms that report their partition; one panel per point."""
    points: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        blocks = cell["work"].get("thread_blocks")
        if blocks and "quantiles" in blocks:
            cv = cell["cv_nominal"]
            point = f"{cell['shape']['alias']}, {'recorded' if cv is None else f'CV {cv:g}'}"
            name = f"{cell['arm']} ({blocks['idle']} of {blocks['blocks']} idle)"
            points.setdefault(point, {})[name] = blocks["quantiles"]
    if not points:
        return None
    figure, panels = _panels(len(points))
    for axes, (point, lines) in zip(panels, points.items(), strict=True):
        for name, quantiles in lines.items():
            axes.step(range(0, 101, 5), quantiles, where="mid", label=name)
        axes.set(title=point, xlabel="busy thread blocks (%)", ylabel="pages")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="x-small")
    return figure
