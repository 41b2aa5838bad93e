"""Pictures of a run: time against CV (the paper's Figure 4), time against rows, work per thread block (Figure 2); of a
profiled run the stages of a step and a timeline of one layer.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moira_cli.compare import clock_of
from moira_cli.errors import CliError, ExitCode
from moira_cli.stages import STAGES, UNCLASSIFIED

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
    profiled = [cell for cell in cells if "stages" in cell.get("profile", {})]
    cells = [cell for cell in cells if cell.get("kind") != "e2e"]
    made = {
        "cv": time_against_cv(cells),
        "rows": time_against_rows(cells),
        "blocks": pages_per_block(cells),
        "stages": stages_of_a_step(profiled),
        "timeline": timeline_of_a_layer(profiled),
    }
    return {name: _png(figure) for name, figure in made.items() if figure is not None}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
    return buffer.getvalue()


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(count, 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _series(cells: list[dict[str, Any]]) -> Callable[[dict[str, Any]], str]:
    """Names a cell's line: the arm, and of mode and layout what the run has more than one of."""
    varying = [name for name in ("mode", "kv_layout") if len({cell[name] for cell in cells}) > 1]
    return lambda cell: ", ".join([cell["arm"], *(cell[name] for name in varying)])


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels, beside them: a line has the same colour in each."""
    lines: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")


def _unit(cell: dict[str, Any]) -> str:
    return "kernel time (us)" if cell["device"] == "cuda" else "cpu time (us)"


def _draw(axes: Axes, points: dict[str, list[tuple[float, dict[str, Any]]]], names: list[str]) -> None:
    """One line per series with its 95% intervals; its colour and marker follow from its place in ``names``."""
    for name, values in points.items():
        number = names.index(name)
        style = {"color": f"C{number % 10}", "marker": "os^v"[number // 10 % 4], "markersize": 4}
        values.sort(key=lambda value: value[0])
        times = [cell["timing"][clock_of(cell)] for _, cell in values]
        median = [time["median"] for time in times]
        low = [max(0.0, time["median"] - time["ci95"][0]) for time in times]
        high = [max(0.0, time["ci95"][1] - time["median"]) for time in times]
        axes.errorbar([x for x, _ in values], median, yerr=[low, high], label=name, **style)
    axes.set_ylim(bottom=0)


def time_against_cv(cells: list[dict[str, Any]]) -> Figure | None:
    """One panel per shape; None if no shape was measured at two CVs of synthetic lists."""
    shapes: dict[str, dict[str, list]] = {}
    series = _series(cells)
    for cell in cells:
        if cell["cv_nominal"] is not None:
            line = shapes.setdefault(cell["shape"]["alias"], {}).setdefault(series(cell), [])
            line.append((cell["cv_measured"], cell))
    shapes = {
        label: lines for label, lines in shapes.items() if max(len({x for x, _ in line}) for line in lines.values()) > 1
    }
    if not shapes:
        return None
    figure, panels = _panels(len(shapes))
    names = list(dict.fromkeys(map(series, cells)))
    for axes, (label, lines) in zip(panels, shapes.items(), strict=True):
        _draw(axes, lines, names)
        axes.set(title=label, xlabel="CV of the page counts (measured)", ylabel=_unit(cells[0]))
    _legend(figure, panels)
    return figure


def time_against_rows(cells: list[dict[str, Any]]) -> Figure | None:
    """One panel per list source or nominal CV; None if everything has the same number of rows."""
    sources: dict[str, dict[str, list]] = {}
    series = _series(cells)
    for cell in cells:
        cv = cell["cv_nominal"]
        source = "recorded lists" if cv is None else f"CV {cv:g}"
        sources.setdefault(source, {}).setdefault(series(cell), []).append((cell["shape"]["rows"], cell))
    sources = {
        name: lines for name, lines in sources.items() if max(len({x for x, _ in line}) for line in lines.values()) > 1
    }
    if not sources:
        return None
    figure, panels = _panels(len(sources))
    names = list(dict.fromkeys(map(series, cells)))
    for axes, (name, lines) in zip(panels, sources.items(), strict=True):
        _draw(axes, lines, names)
        axes.set_xscale("log", base=2)
        axes.set(title=name, xlabel="rows (requests x KV heads)", ylabel=_unit(cells[0]))
    _legend(figure, panels)
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


HUES = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")
STAGE_COLORS = {"rest": "0.7", UNCLASSIFIED: "black"}
STAGE_COLORS |= dict(zip([stage for stage in STAGES if stage not in STAGE_COLORS], HUES, strict=True))


def _bars(cells: list[dict[str, Any]]) -> tuple[Figure, Axes, list[int]]:
    """Axes with a row per cell, first on top, labelled with shape and arm; the rows' places."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.5 * len(cells)))
    axes = figure.subplots()
    places = list(range(len(cells)))
    axes.set_yticks(places, [f"{cell['arm']}, {cell['shape']['alias']}" for cell in cells])
    axes.invert_yaxis()
    return figure, axes, places


def _name_stages(axes: Axes, stages: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=STAGE_COLORS[stage], label=stage) for stage in STAGES if stage in stages]
    axes.legend(handles=handles, fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def stages_of_a_step(cells: list[dict[str, Any]]) -> Figure | None:
    """A stacked bar per arm and shape; the untraced step is a line across it."""
    if not cells:
        return None
    figure, axes, places = _bars(cells)
    left = [0.0] * len(cells)
    for stage in STAGES:
        times = [cell["profile"]["stages"][stage] for cell in cells]
        axes.barh(places, times, left=left, height=0.6, color=STAGE_COLORS[stage])
        left = [a + b for a, b in zip(left, times, strict=True)]
    for place, cell in zip(places, cells, strict=True):
        axes.plot([cell["profile"]["untraced_us"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
    axes.set(xlabel=f"us per step ({_device(cells[0])}); line: the step without a profiler")
    axes.set_xlim(left=0)
    _name_stages(axes, {stage for cell in cells for stage, us in cell["profile"]["stages"].items() if us})
    return figure


def timeline_of_a_layer(cells: list[dict[str, Any]]) -> Figure | None:
    """When each kernel of one layer ran, a line per arm and shape."""
    cells = [cell for cell in cells if cell["profile"]["timeline"]]
    if not cells:
        return None
    figure, axes, places = _bars(cells)
    for place, cell in zip(places, cells, strict=True):
        for kernel in cell["profile"]["timeline"]:
            axes.broken_barh(
                [(kernel["start_us"], kernel["us"])],
                (place - 0.3, 0.6),
                facecolors=STAGE_COLORS[kernel["stage"]],
                edgecolor="white",
                linewidth=0.5,
            )
    axes.set(xlabel=f"us since the first {'kernel' if cells[0]['device'] == 'cuda' else 'operator'} of the layer")
    axes.set_xlim(left=0)
    _name_stages(axes, {kernel["stage"] for cell in cells for kernel in cell["profile"]["timeline"]})
    return figure


def _device(cell: dict[str, Any]) -> str:
    return "kernels" if cell["device"] == "cuda" else "operators on the cpu"
