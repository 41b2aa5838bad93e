"""`moira bench kernel`: decode attention of one layer over ragged page lists, checked and timed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from moira_cli.errors import CliError, ExitCode, unknown
from moira_cli.shapes import parse_floats, parse_geometry, parse_shape, split_list

if TYPE_CHECKING:
    import torch

    from moira_cli.harness import Point
    from moira_cli.records import Run
    from moira_cli.timing import StopRule

DEFAULTS = {
    "cuda": {"shape": "32kx16", "arms": "moira,dense-torch", "mode": "graph", "min_samples": 30, "min_time_ms": 200.0},
    "cpu": {
        "shape": "8kx2",
        "arms": "sparse-torch,dense-torch",
        "mode": "eager",
        "min_samples": 15,
        "min_time_ms": 200.0,
    },
}
"""What the options that depend on the device stand for. On a CPU everything takes seconds."""


@dataclass(frozen=True)
class Config:
    """The settings of a run, resolved; lists are comma-separated as typed. Two equal configs give the same cells."""

    shape: str
    lists: str
    cv: str
    keep: float
    geometry: str
    page_size: int
    kv_layout: str
    seed: int
    arms: str
    relative_to: str | None
    mode: str
    l2: str
    min_samples: int
    min_time_ms: float
    max_noise: float
    timeout_s: float
    check: bool
    device: str


@dataclass(frozen=True)
class Cell:
    """One cell to measure: an arm in a mode at a point."""

    point: Point
    arm: str
    mode: str

    def identity(self, config: Config, tool: dict[str, Any], env: dict[str, Any]) -> dict[str, Any]:
        """Everything that the cell's id depends on."""
        from moira_cli import environment

        return {
            "kind": "kernel",
            "arm": self.arm,
            "mode": self.mode,
            "point": self.point.describe(),
            "rule": [config.min_samples, config.min_time_ms, config.max_noise, config.timeout_s, config.check],
            "tool": tool,
            "env": environment.identity(env),
        }


def build_points(config: Config, device: torch.device) -> list[Point]:
    """The grid of shapes x layouts x CVs, lists included; every problem of the settings is reported here."""
    from moira_cli import lists
    from moira_cli.harness import Point
    from moira_kernels.testing import LAYOUTS, Geometry

    geometry = Geometry(*parse_geometry(config.geometry))
    layouts = split_list(config.kv_layout)
    for layout in layouts:
        if layout not in LAYOUTS:
            raise unknown("KV layout", layout, LAYOUTS)
    recorded = None
    if config.lists not in ("synthetic", "one-long"):
        recorded = lists.load_recorded(lists.SHIPPED if config.lists == "real" else Path(config.lists))
    points = []
    for text in split_list(config.shape):
        shape = parse_shape(text)
        pages = -(-shape.context_tokens // config.page_size)
        heads = geometry.num_kv_heads
        if recorded is not None:
            sources = [lists.from_recorded(recorded, shape.batch, heads, pages, config.seed)]
        elif config.lists == "one-long":
            sources = [lists.one_long(shape.batch, heads, pages, config.seed)]
        else:
            cvs = parse_floats("--cv", config.cv, 0, 10)
            sources = [lists.synthetic(shape.batch, heads, pages, config.keep, cv, config.seed) for cv in cvs]
        l2 = config.l2 if device.type == "cuda" else "uncontrolled"
        points += [
            Point(shape, geometry, config.page_size, layout, source, config.seed, l2)
            for layout in layouts
            for source in sources
        ]
    if not points:
        raise CliError("--shape: expected at least one shape, e.g. 32kx16.")
    return points


def build_cells(config: Config, points: list[Point]) -> list[Cell]:
    """Points x arms x modes, in the order they run."""
    import baselines

    known = baselines.names(None)
    arms = baselines.names("attention") if config.arms == "all" else split_list(config.arms)
    for arm in arms:
        if arm not in known:
            raise unknown("Arm", arm, known)
    if not arms:
        raise CliError(f"--arms: expected at least one arm. Known: {', '.join(known)}.")
    if config.relative_to and config.relative_to not in arms:
        raise CliError(f"--relative-to {config.relative_to}: not among the arms of this run ({', '.join(arms)}).")
    modes = ["graph", "eager"] if config.mode == "both" else [config.mode]
    return [Cell(point, arm, mode) for point in points for mode in modes for arm in arms]


def require_idle(index: int | None, state: dict[str, Any], allow_busy: bool) -> bool:
    """Refuse a GPU that others use, by its ``gpu_state`` (empty on a CPU); True if it is busy and allowed to be."""
    busy, used = state.get("busy_pct") or 0, (state.get("memory_used_mib") or 0) / 1024
    if busy <= 10 and used <= 2:
        return False
    if not allow_busy:
        raise CliError(
            f"GPU {index} is not idle: {busy}% busy, {used:.1f} GiB used. Timings would be wrong. Wait, pick "
            "--device, or pass --allow-busy (rows get flag B).",
            ExitCode.ENVIRONMENT,
        )
    return True


class Session:
    """Measures the cells of a run that are not there yet, writing each as it is done."""

    def __init__(self, config: Config, cells: list[Cell], run: Run, device: torch.device, busy: bool, progress: str):
        import baselines

        self.config, self.cells, self.run, self.device, self.busy = config, cells, run, device, busy
        self.quiet = progress == "none" or (progress == "auto" and not sys.stderr.isatty())
        self.records = [self._record(cell) for cell in cells]
        self.arms = baselines.describe(None)

    def _record(self, cell: Cell) -> dict[str, Any]:
        from moira_cli.records import cell_id

        identity = cell.identity(self.config, self.run.header["tool"], self.run.header["env"])
        return {
            "cell_id": cell_id(identity),
            "kind": "kernel",
            "arm": cell.arm,
            "mode": cell.mode,
            "device": self.device.type,
            **cell.point.describe(),
        }

    def measure_all(self, rule: StopRule, fail_fast: bool) -> str:
        """Measure what is missing; the run's status: complete, failed (--fail-fast) or cancelled (Ctrl-C)."""
        from moira_cli.harness import build_case, measure

        done = {record["cell_id"] for record in self.run.cells}
        point, case = None, None
        try:
            for number, (cell, record) in enumerate(zip(self.cells, self.records, strict=True), 1):
                if record["cell_id"] in done:
                    continue
                if not self.quiet:
                    print(f"moira: {number}/{len(self.cells)} {record['shape']['alias']} {cell.arm}", file=sys.stderr)
                figures = self._skip(cell)
                if figures is None:
                    if point is not cell.point:
                        case = None  # frees the last point's buffers before the next are taken
                        point, case = cell.point, build_case(cell.point, self.device)
                    if isinstance(case, str):
                        figures = {"status": "oom", "reason": case}
                    else:
                        figures = measure(case, cell.arm, cell.mode, rule, self.config.check)
                if self.busy:
                    figures.setdefault("flags", []).append("B")
                self.run.add({**record, **figures})
                if fail_fast and figures["status"] not in ("ok", "skipped_unsupported"):
                    return "failed"
        except KeyboardInterrupt:
            return "cancelled"
        return "complete"

    def _skip(self, cell: Cell) -> dict[str, Any] | None:
        missing = self.arms[cell.arm].missing(self.device.type)
        if missing is None and cell.mode == "graph" and self.device.type != "cuda":
            missing = "needs a CUDA GPU for --mode graph"
        return missing and {"status": "skipped_unsupported", "reason": f"{cell.arm}: skipped - {missing}."}

    def unfinished(self, reason: str) -> list[dict[str, Any]]:
        """The cells that did not run, as rows that say so."""
        done = {record["cell_id"] for record in self.run.cells}
        return [{**r, "status": "cancelled", "reason": reason} for r in self.records if r["cell_id"] not in done]


def dry_run(cells: list[Cell], device: torch.device) -> None:
    """Print the cells, their bytes and their memory."""
    from moira_cli.harness import GIB, free_bytes, l2_bytes
    from moira_cli.render import new_console, new_table

    table = new_table(
        "shape", "layout", "arm", "mode", "rows", "pages", "CV", "kept", "useful MB", "copies", "GiB", left=4
    )
    for cell in cells:
        point, lists = cell.point, cell.point.lists.describe()
        copies = point.rotations(l2_bytes(device))
        table.add_row(
            point.shape.label,
            point.kv_layout,
            cell.arm,
            cell.mode,
            str(point.lists.counts.size),
            f"{lists['kept_pages']:,}",
            f"{lists['cv_measured']:.2f}",
            f"{lists['kept_fraction']:.1%}",
            f"{point.useful_bytes / 1e6:,.1f}",
            str(copies),
            f"{copies * point.copy_bytes / GIB:.2f}",
        )
    console = new_console()
    console.print(table)
    free = free_bytes(device) / GIB
    console.print(f"{len(cells)} cells on {device.type}; {free:.1f} GiB free. Nothing was run.")


def resume_run(folder: Path, ctx: typer.Context, config_class: type, command: str) -> tuple[Run, Any]:
    """An earlier run of ``command`` and its settings; options given again must agree with them."""
    from moira_cli.records import Run

    run = Run.load(folder)
    stored = run.header["config_resolved"]
    if set(stored) != {field.name for field in fields(config_class)}:
        raise CliError(f"'{folder}' is not a run of 'moira {command}' of this version.")
    config = config_class(**stored)
    for field in fields(config_class):
        source = ctx.get_parameter_source(field.name)
        given = ctx.params[field.name]
        if source is not None and source.name == "COMMANDLINE" and given != getattr(config, field.name):
            option = field.name.replace("_", "-")
            raise CliError(
                f"--{option} {given} differs from the run in '{folder}' ({getattr(config, field.name)}). "
                "Leave it out to resume, or start a new run."
            )
    return run, config


def require_same_setup(run: Run, env: dict[str, Any], tool: dict[str, Any]) -> None:
    """Refuse to continue a run that was measured on another machine, with other libraries or other code."""
    from moira_cli import environment

    then, now = environment.identity(run.header["env"]), environment.identity(env)
    if (then, run.header["tool"]) != (now, tool):
        raise CliError(
            f"'{run.folder}' was measured on {then} with {run.header['tool']}; this is {now} with {tool}. "
            "Its other cells would not be comparable: start a new run."
        )


def check_output_options(progress: str, tag: str | None) -> None:
    """Refuse a wrong --progress or --tag."""
    if progress not in ("auto", "plain", "none"):
        raise unknown("--progress", progress, ("auto", "plain", "none"))
    if tag is not None and not re.fullmatch(r"[\w.-]+", tag):
        raise CliError(f"--tag: expected letters, digits, '.', '_' and '-', got '{tag}'.")


def _arm_names() -> list[str]:
    import baselines

    return baselines.names(None)


def finish_run(
    run: Run,
    status: str,
    left: list[dict[str, Any]],
    strict: bool,
    output_json: str | None,
    show: Callable[..., None],
    command: str,
) -> NoReturn:
    """Save the run with the cells ``left`` over, print it with ``show``, say why cells failed, and exit."""
    from moira_cli.records import emit, exit_code, warn

    code = exit_code([*run.cells, *left], cancelled=status == "cancelled", strict_flags=strict)
    document = run.save(status, code, left)
    emit(document, output_json)
    show(document, to_stderr=output_json == "-")
    for reason in dict.fromkeys(cell["reason"] for cell in run.cells if cell["status"] != "ok"):
        warn(reason)
    if status != "complete":
        warn(
            f"Stopped after {len(run.cells)}/{len(run.cells) + len(left)} cells. Results saved. "
            f"Continue: moira {command} --resume {run.folder}"
        )
    raise typer.Exit(code)


def bench_kernel(
    ctx: typer.Context,
    shape: Annotated[
        str | None, typer.Option(help="CONTEXTxBATCH, comma-separated. (default: 32kx16 on a GPU, 8kx2 on a CPU)")
    ] = None,
    lists: Annotated[
        str | None,
        typer.Option(
            help="Page lists: real (shipped), synthetic, one-long, FILE. (default: real; synthetic with --cv, --keep)"
        ),
    ] = None,
    cv: Annotated[
        str | None, typer.Option(help="Spread of synthetic lengths (std/mean), comma-separated. (default: 1.0)")
    ] = None,
    keep: Annotated[
        float | None, typer.Option(help="Mean share of pages kept by synthetic lists. (default: 0.22)")
    ] = None,
    geometry: Annotated[str, typer.Option(help="Model name ('moira list geometries') or HQ/HKV/D.")] = "llama-3.1-8b",
    page_size: Annotated[int, typer.Option(min=1, max=128, help="Tokens per page.")] = 64,
    kv_layout: Annotated[str, typer.Option(help="nhd (token-major) and/or hnd (head-major).")] = "nhd",
    seed: Annotated[int, typer.Option(min=0, help="Seed of lists and data.")] = 0,
    arms: Annotated[
        str | None,
        typer.Option(
            "--arms",
            "--baselines",
            help="Arms, comma-separated, or all (attention alone). "
            "(default: moira,dense-torch; on a CPU sparse-torch,dense-torch)",
            autocompletion=_arm_names,
        ),
    ] = None,
    relative_to: Annotated[
        str | None, typer.Option(help="Arm that the ratio column compares with. (default: first arm)")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="graph (CUDA graph), eager or both. (default: graph on a GPU, eager on a CPU)")
    ] = None,
    l2: Annotated[str, typer.Option(help="cold (rotating buffers) or warm (one set).")] = "cold",
    min_samples: Annotated[
        int | None, typer.Option(min=2, help="Samples at least. (default: 30 on a GPU, 15 on a CPU)")
    ] = None,
    min_time_ms: Annotated[
        float | None, typer.Option(min=0, help="Time spent sampling at least. (default: 200)")
    ] = None,
    max_noise: Annotated[
        float, typer.Option(min=0, help="Sample until the median's 95% interval is within this percentage of it.")
    ] = 1.0,
    timeout_s: Annotated[float, typer.Option(min=0, help="Stop sampling a cell after this time (flag U).")] = 5.0,
    check: Annotated[bool, typer.Option(help="Compare with the float32 reference before timing.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Measure on a GPU that is not idle (flag B).")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 8 if a row is noisy, throttled or unsettled.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first cell that fails.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print cells, bytes and memory; run nothing.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for the results. (default: runs/<utc>_<commit>)")] = None,
    resume: Annotated[Path | None, typer.Option(help="Finish the run in this folder with its own settings.")] = None,
    tag: Annotated[str | None, typer.Option(help="Added to the name of the run folder.")] = None,
    output_json: Annotated[
        str | None, typer.Option(help="Also write the whole run as JSON to FILE, or - for stdout.")
    ] = None,
    progress: Annotated[str, typer.Option(help="auto (on a terminal), plain or none; on stderr.")] = "auto",
) -> None:
    """Check and time decode attention of one layer over ragged page lists.

    Without a GPU the same lists run through PyTorch on the CPU, at a small shape, and every time is labelled cpu.
    Rows carry flags: N noisy, U unsettled, T throttled, B busy GPU, W warm L2, E eager (launch cost included),
    P needs a host plan whenever lists change.
    """
    for option, value, known in (
        ("--mode", mode or "graph", ("graph", "eager", "both")),
        ("--l2", l2, ("cold", "warm")),
    ):
        if value not in known:
            raise unknown(option, value, known)
    check_output_options(progress, tag)
    if keep is not None and not 0 < keep <= 1:
        raise CliError(f"--keep: expected a number in (0, 1], got {keep}.")
    if lists not in (None, "synthetic") and (cv is not None or keep is not None):
        raise CliError(f"--cv and --keep shape synthetic lists; --lists {lists} has its own. Leave one out.")
    for text in split_list(shape or ""):
        parse_shape(text)  # before torch is imported, so that a typing error answers at once

    from moira_cli import environment, render
    from moira_cli.environment import resolve_device
    from moira_cli.records import Run, header, new_run_folder, require_writable
    from moira_cli.timing import StopRule

    run = None
    if resume is not None:
        run, config = resume_run(resume, ctx, Config, "bench kernel")
        target = resolve_device(config.device)
    else:
        target = resolve_device(device)
        default = DEFAULTS[target.type]
        config = Config(
            shape=shape or default["shape"],
            lists=lists or ("real" if cv is None and keep is None else "synthetic"),
            cv=cv or "1.0",
            keep=keep or 0.22,
            geometry=geometry,
            page_size=page_size,
            kv_layout=kv_layout,
            seed=seed,
            arms=arms or default["arms"],
            relative_to=relative_to,
            mode=mode or default["mode"],
            l2=l2,
            min_samples=min_samples or default["min_samples"],
            min_time_ms=default["min_time_ms"] if min_time_ms is None else min_time_ms,
            max_noise=max_noise,
            timeout_s=timeout_s,
            check=check,
            device=str(target),
        )
    cells = build_cells(config, build_points(config, target))
    if dry:
        dry_run(cells, target)
        return
    if output_json not in (None, "-"):
        require_writable(Path(output_json), "--output-json")
    state = environment.gpu_state(target.index) if target.type == "cuda" else {}
    busy = require_idle(target.index, state, allow_busy)
    env, tool = environment.describe(str(target)), environment.code_version()
    if run is None:
        head = header(sys.argv[1:], asdict(config), env, tool)
        run = Run.create(run_dir or new_run_folder(tag, tool), head)
    else:
        require_same_setup(run, env, tool)

    session = Session(config, cells, run, target, busy, progress)
    rule = StopRule(config.min_samples, config.min_time_ms, config.max_noise, config.timeout_s)
    status = session.measure_all(rule, fail_fast)
    left = session.unfinished("stopped before it ran")
    finish_run(run, status, left, strict, output_json, render.print_run, "bench kernel")
