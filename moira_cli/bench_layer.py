"""`moira bench layer`: the stages of one decode layer, each on its own and together, beside dense attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moira_cli.errors import CliError, ExitCode
from moira_cli.shapes import Shape, parse_geometry, parse_shape, split_list

if TYPE_CHECKING:
    import torch

    from moira_kernels.layout import PagedKV
    from moira_kernels.pipeline import DecodeLayer

SHARPNESS = 16
"""Factor on N(0, 1) queries: their attention is then about as uneven as a model's (a fifth to a half of the pages make
98%)."""
MAX_ROTATIONS = 32
"""Buffer sets at most: enough for a request of 2k tokens, whose pages are a sixth of the L2."""


def measure(
    shape: Shape, geometry: tuple[int, int, int], page_size: int, layout: str, gamma: float, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The rows of a shape, as they are measured: stage, median us with its interval, and the floor of its bytes.

    Every time is of CUDA-graph replays over rotating buffers (L2 cold). First the layer's output is compared with
    float32 attention over the lists it selected.
    """
    import baselines
    from moira_cli import timing
    from moira_cli.harness import l2_bytes
    from moira_kernels import MoiraError, attend, attention, estimate, selection
    from moira_kernels.testing import Geometry, max_abs_error, tolerance, useful_bytes

    heads = Geometry(*geometry)
    pages = -(-shape.context_tokens // page_size)
    summary_bytes = shape.batch * pages * heads.num_kv_heads * 2 * heads.head_dim * 2
    rotations = min(MAX_ROTATIONS, timing.rotations_for_cold_l2(summary_bytes, l2_bytes(device)))
    sets = [_buffers(shape, heads, page_size, layout, device, seed) for seed in range(rotations)]

    q, kv, layer = sets[0]
    out = layer.run(q, kv, gamma=gamma)
    truth = attention.reference(q, kv, layer.pages)[0]
    limit = tolerance(truth, attention.reference(q, kv, layer.pages, dtype=q.dtype)[0])
    error = max_abs_error(out, truth)
    if not error <= limit:
        raise CliError(
            f"{shape.label}: wrong result: the layer differs from float32 by {error:.3g} (limit {limit:.3g}).",
            ExitCode.WRONG_RESULT,
        )
    for q, kv, layer in sets[1:]:
        layer.run(q, kv, gamma=gamma)
    kept = statistics.mean(layer.pages.lengths.float().mean().item() for _, _, layer in sets) / pages
    kept_bytes = useful_bytes(kv, sets[0][2].pages)

    def run_estimate(i: int) -> None:
        q, kv, layer = sets[i]
        estimate.launch(q, kv, layer.summaries, layer.log_mass)

    def run_select(i: int, after_estimate: bool = False) -> None:
        _, kv, layer = sets[i]
        selection.launch(layer.log_mass, kv, layer.pages, gamma=gamma, after_estimate=after_estimate)

    def run_both(i: int) -> None:
        run_estimate(i)
        run_select(i, after_estimate=True)

    def run_attend(i: int) -> None:
        q, kv, layer = sets[i]
        attend(q, kv, layer.pages, out=layer.out, workspace=layer.workspace)

    def run_layer(i: int) -> None:
        q, kv, layer = sets[i]
        layer.run(q, kv, gamma=gamma)

    common = {"shape": shape.label, "pages": pages, "kept": kept, "rotations": rotations, "max_abs": error}
    stages: list[tuple[str, Callable[[int], None], int]] = [
        ("estimate", run_estimate, summary_bytes),
        ("select", run_select, 0),
        ("estimate + select", run_both, summary_bytes),
        ("attend + merge", run_attend, kept_bytes),
        ("layer", run_layer, summary_bytes + kept_bytes),
    ]
    for name, call, num_bytes in stages:
        yield {**common, "stage": name, **_time(call, rotations, num_bytes, device)}
    for name in ("dense-fa3", "dense-flashinfer"):
        missing = baselines.describe()[name].missing("cuda")
        if missing:
            yield {**common, "stage": name, "reason": missing}
            continue
        arm = baselines.load(name)
        try:
            arms = [arm(q, kv, layer.pages) for q, kv, layer in sets]
        except MoiraError as error:
            yield {**common, "stage": name, "reason": str(error)}
            continue
        for each in arms:
            each.plan()
        num_bytes = useful_bytes(kv, baselines.all_pages(kv))
        yield {**common, "stage": name, **_time(lambda i, arms=arms: arms[i].run(), rotations, num_bytes, device)}


def _buffers(
    shape: Shape, geometry: Any, page_size: int, layout: str, device: torch.device, seed: int
) -> tuple[torch.Tensor, PagedKV, DecodeLayer]:
    import torch

    from moira_kernels.pipeline import DecodeLayer
    from moira_kernels.testing import make_case

    lengths = [shape.context_tokens] * shape.batch
    q, kv = make_case(lengths, geometry, page_size=page_size, layout=layout, device=device, seed=seed)
    layer = DecodeLayer.allocate(kv, geometry.num_q_heads)
    layer.prefill(kv, torch.arange(kv.k.shape[0], dtype=torch.int32, device=device))
    return SHARPNESS * q, kv, layer


def _time(call: Callable[[int], None], rotations: int, num_bytes: int, device: torch.device) -> dict[str, Any]:
    from moira_cli import timing

    timer = timing.GraphTimer(call, rotations, timing.calls_per_pass(rotations, timing.rough_us(call, rotations)))
    figures = timer.sample(timing.StopRule(30, 100, 1.0, 2.0)).statistics()
    read = timing.read_floor_us(num_bytes, device) if num_bytes else None
    return {"kernel_us": figures, "read_us": read, "read_bytes": num_bytes}


def bench_layer(
    shape: Annotated[str, typer.Option(help="CONTEXTxBATCH, comma-separated.")] = "2kx1,8kx32,130kx4",
    geometry: Annotated[str, typer.Option(help="Model name ('moira list geometries') or HQ/HKV/D.")] = "llama-3.1-8b",
    page_size: Annotated[int, typer.Option(min=1, max=128, help="Tokens per page.")] = 64,
    kv_layout: Annotated[str, typer.Option(help="nhd (token-major) or hnd (head-major).")] = "nhd",
    gamma: Annotated[float, typer.Option(min=0, max=1, help="Coverage.")] = 0.98,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Time the stages of one decode layer: Estimate, Select, Attend + Merge, all together, and dense attention.

    Needs a CUDA GPU. A context that ends on a page's last token makes every request rebuild a page summary, which
    happens once in a page's length of steps: 8191x32 times the usual step.
    """
    shapes = [parse_shape(text) for text in split_list(shape)]
    from moira_cli import environment
    from moira_cli.records import dumps
    from moira_cli.render import new_console, new_table
    from moira_kernels.testing import LAYOUTS

    if kv_layout not in LAYOUTS:
        raise CliError(f"--kv-layout: expected {' or '.join(LAYOUTS)}, got '{kv_layout}'.")
    import torch

    if not torch.cuda.is_available():
        raise CliError(
            "moira bench layer needs a CUDA GPU: the stages are Triton kernels. 'moira verify' runs them in the "
            "interpreter.",
            ExitCode.ENVIRONMENT,
        )
    target = environment.resolve_device(device)
    env = environment.describe(str(target))
    console = new_console()
    if not json_output:
        libraries = env["libraries"]
        console.print(
            f"{env['gpu']['name']}, driver {env['gpu']['driver']}, torch {libraries['torch']}, triton "
            f"{libraries['triton']}; {geometry}, pages of {page_size} tokens, {kv_layout}, gamma {gamma:g}; L2 cold"
        )
    rows = []
    for one in shapes:
        found = list(measure(one, parse_geometry(geometry), page_size, kv_layout, gamma, target))
        rows += found
        if json_output:
            continue
        table = new_table("stage", "us", "+-95%", "read us", "x read", left=1)
        for row in found:
            if "reason" in row:
                table.add_row(row["stage"], f"skipped: {row['reason']}")
                continue
            us, (low, high), read = row["kernel_us"]["median"], row["kernel_us"]["ci95"], row["read_us"]
            floor = ("-", "-") if read is None else (f"{read:.1f}", f"{us / read:.2f}")
            table.add_row(row["stage"], f"{us:.1f}", f"{50 * (high - low) / us:.1f}%", *floor)
        first = found[0]
        console.print(f"\n[bold]{first['shape']}[/bold]  {first['pages']} pages a request, kept {first['kept']:.1%}")
        console.print(table)
    if json_output:
        print(dumps({"env": env, "tool": environment.code_version(), "gamma": gamma, "rows": rows}, indent=1))
