"""`moira bench e2e`: time per output token of whole decode steps in vLLM, dense and sparse."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moira_cli.errors import CliError, ExitCode, unknown
from moira_cli.shapes import E2E_SUITES, Shape, paper_reads, parse_shape, split_list

if TYPE_CHECKING:
    from moira_cli.records import Run
    from moira_cli.serving import Spec

PAGE_SIZE = 64
DEFAULTS = {
    "vllm": {
        "model": "llama-3.1-8b",
        "shape": "32kx16",
        "arms": "dense-fa3,dense-flashinfer,moira",
        "tokens": 256,
        "repetitions": 5,
        "launches": 2,
    },
    "transformers": {
        "model": "smollm2-135m",
        "shape": "1kx1",
        "arms": "dense-torch,sparse-torch",
        "tokens": 8,
        "repetitions": 2,
        "launches": 1,
    },
}
"""What the options that depend on the engine stand for."""

TRYOUT_ARMS = ("dense-torch", "sparse-torch")
VLLM_ONLY = ("reads", "lists", "reuse_prefill", "kv_layout", "gpu_memory_utilization", "max_model_len", "eager")
"""Settings that mean nothing to `--engine transformers`."""

INSTALL = {
    "vllm": "vLLM 0.30 (pip install 'moira-attention[vllm]')",
    "gpu": "a CUDA GPU (none is visible to PyTorch: see 'moira doctor')",
}


@dataclass(frozen=True)
class Config:
    """The settings of a run, resolved; lists are comma-separated as typed."""

    engine: str
    model: str
    shape: str
    arms: str
    relative_to: str
    reads: str | None
    lists: str
    gamma: float | None
    tokens: int
    repetitions: int
    launches: int
    reuse_prefill: bool
    prompts: str
    kv_layout: str
    gpu_memory_utilization: float
    max_model_len: int
    eager: bool
    seed: int
    timeout_s: float


def build_shapes(config: Config, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Every shape as the child gets it and as a cell records it; problems of the settings are reported here."""
    from moira_cli import lists

    recorded = lists.load_recorded(lists.SHIPPED if config.lists == "real" else Path(config.lists))
    built = []
    for shape in _shapes(config):
        if shape.context_tokens + config.tokens > config.max_model_len:
            raise CliError(
                f"{shape.label}: {shape.context_tokens:,} + {config.tokens} tokens are more than the "
                f"{config.max_model_len:,} of the engine (--max-model-len; the model's limit is "
                f"{model['max_position_embeddings']:,})."
            )
        described = {
            "alias": shape.label,
            "context_tokens": shape.context_tokens,
            "batch": shape.batch,
            "page_size": PAGE_SIZE,
            "pages_per_row": -(-shape.context_tokens // PAGE_SIZE),
            "rows": shape.batch * model["num_key_value_heads"],
        }
        selection, counts = None, None
        if config.reads is not None:
            paper = config.reads == "paper"
            reads, source = (
                paper_reads(config.model, shape.context_tokens) if paper else (float(config.reads), "--reads")
            )
            # Of the pages that a row has halfway through the decoding.
            pages = -(-(shape.context_tokens + config.tokens // 2) // PAGE_SIZE)
            layers, heads = model["num_hidden_layers"], model["num_key_value_heads"]
            counts = lists.profiled_counts(recorded, layers, heads, pages, reads, config.seed).tolist()
            selection = {"reads": reads, "reads_source": source, "profile": recorded.label}
        built.append({"shape": described, "selection": selection, "counts": counts})
    return built


def _shapes(config: Config) -> list[Shape]:
    """The shapes asked for, each once."""
    shapes = list(dict.fromkeys(parse_shape(text) for text in split_list(config.shape)))
    if not shapes:
        raise CliError("--shape: expected at least one shape, e.g. 32kx16.")
    return shapes


def build_spec(config: Config, arm: str, shapes: list[dict[str, Any]], model: dict[str, Any], folder: str) -> Spec:
    """What the child of ``arm`` has to do for ``shapes``."""
    from moira_cli.models import PRESETS
    from moira_cli.serving import ARMS, Spec

    settings = None
    if ARMS[arm].sparse:
        # The counts of the first shape are only there for the engine to start with.
        profiled = {"policy": "profiled-count", "counts": shapes[0]["counts"]}
        settings = {"gamma": config.gamma} if config.reads is None else profiled
    batches = sorted({entry["shape"]["batch"] for entry in shapes})
    return Spec(
        arm=arm,
        backend=ARMS[arm].backend,
        settings=settings,
        layer=ARMS[arm].layer,
        model=folder,
        dummy_weights=config.model in PRESETS,
        prompts=None if config.prompts == "random" else config.prompts,
        vocab_size=model["vocab_size"],
        max_model_len=config.max_model_len,
        max_num_seqs=batches[-1],
        capture_sizes=batches,
        gpu_memory_utilization=config.gpu_memory_utilization,
        eager=config.eager,
        reuse_prefill=config.reuse_prefill,
        tokens=config.tokens,
        repetitions=config.repetitions,
        seed=config.seed,
        environment={"VLLM_KV_CACHE_LAYOUT": config.kv_layout.upper()},
        shapes=[
            {
                "label": entry["shape"]["alias"],
                "context_tokens": entry["shape"]["context_tokens"],
                "batch": entry["shape"]["batch"],
                "counts": entry["counts"] if ARMS[arm].sparse else None,
            }
            for entry in shapes
        ],
    )


def require_engine() -> tuple[dict[str, Any], dict[str, Any]]:
    """(environment, state of the GPU), asked in another process so that this one takes no GPU memory.

    Raises ``CliError`` with the install line where vLLM or a GPU is missing.
    """
    import torch

    absent = [INSTALL["vllm"]] if importlib.util.find_spec("vllm") is None else []
    absent += [] if torch.cuda.is_available() else [INSTALL["gpu"]]
    if absent:
        raise CliError(
            f"'moira bench e2e' needs {' and '.join(absent)}. To try the command here: "
            "moira bench e2e --engine transformers",
            ExitCode.ENVIRONMENT,
        )
    code = (
        "import json; from moira_cli import environment as e; "
        "print(json.dumps({'env': e.describe('cuda:0'), 'state': e.gpu_state(0)}))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        raise CliError(f"The GPU does not answer: {asked.stderr.strip().splitlines()[-1]}", ExitCode.ENVIRONMENT)
    answer = json.loads(asked.stdout)
    return answer["env"], answer["state"]


@dataclass(frozen=True)
class Cell:
    """One cell to measure: an arm at a shape in one launch, and what it records whatever comes out."""

    arm: str
    launch: int
    entry: dict[str, Any]
    record: dict[str, Any]

    @property
    def label(self) -> str:
        """The shape's."""
        return self.record["shape"]["alias"]


def build_cells(config: Config, shapes: list[dict[str, Any]], run: Run, dummy: bool) -> list[Cell]:
    """Launches x arms x shapes in the order they run: arms forwards in one launch, backwards in the next."""
    from moira_cli import environment
    from moira_cli.records import cell_id
    from moira_cli.serving import ARMS

    env = run.header["env"]
    versions = {name: env["libraries"].get(name) for name in ("vllm", "flashinfer-python")}
    arms = split_list(config.arms)
    cells = []
    for launch in range(1, config.launches + 1):
        for arm in arms if launch % 2 else arms[::-1]:
            for entry in shapes:
                sparse = arm == "sparse-torch" if config.engine == "transformers" else ARMS[arm].sparse
                record = {
                    "kind": "e2e",
                    "arm": arm,
                    "launch": launch,
                    "engine": config.engine,
                    "device": env["device"],
                    "mode": "eager" if config.eager or config.engine == "transformers" else "graph",
                    "model": config.model,
                    "weights": "dummy" if dummy else "real",
                    "kv_layout": config.kv_layout,
                    "shape": entry["shape"],
                    "selection": (entry["selection"] or {"gamma": config.gamma}) if sparse else None,
                    "cv_nominal": None,
                }
                about = {**asdict(config), "arms": arm, "shape": entry["shape"]["alias"], "launches": launch}
                identity = [record, about, run.header["tool"], environment.identity(env), versions]
                cells.append(Cell(arm, launch, entry, {"cell_id": cell_id({"e2e": identity}), **record}))
    return cells


class Progress:
    """Lines on stderr about what the engine is doing: each new stage, and the engine's log while it starts."""

    EVERY_S = 5.0

    def __init__(self, mode: str):
        self.quiet = mode == "none" or (mode == "auto" and not sys.stderr.isatty())
        self.shown = -float("inf")

    def stage(self, text: str) -> None:
        """Always shown."""
        if not self.quiet:
            print(f"moira: {text}", file=sys.stderr, flush=True)
            self.shown = time.monotonic()

    def detail(self, text: str) -> None:
        """Shown if nothing else was for a while."""
        if time.monotonic() - self.shown >= self.EVERY_S:
            self.stage(text)


class Session:
    """Runs the engines of a run and writes each cell as its shape is done."""

    def __init__(self, config: Config, cells: list[Cell], run: Run, busy: bool, progress: Progress):
        self.config, self.cells, self.run, self.busy, self.progress = config, cells, run, busy, progress

    def missing(self) -> list[Cell]:
        """Cells that are not in the run yet."""
        done = {record["cell_id"] for record in self.run.cells}
        return [cell for cell in self.cells if cell.record["cell_id"] not in done]

    def measure_all(self, model: dict[str, Any]) -> str:
        """Measure what is missing, one engine per launch and arm; the run's status: complete or cancelled."""
        from moira_cli.serving import ARMS

        folder = model_folder(self.config, model, self.run.folder)
        try:
            for launch, arm in dict.fromkeys((cell.launch, cell.arm) for cell in self.missing()):
                cells = [cell for cell in self.missing() if (cell.launch, cell.arm) == (launch, arm)]
                if reason := ARMS[arm].missing():
                    self._fail(cells, "skipped_unsupported", f"{arm}: skipped - {reason}.")
                else:
                    spec = build_spec(self.config, arm, [cell.entry for cell in cells], model, folder)
                    self._measure(cells, spec, f"{arm}-{launch}")
        except KeyboardInterrupt:
            return "cancelled"
        return "complete"

    def try_out(self) -> str:
        """Measure what is missing with ``--engine transformers``; the run's status: complete or cancelled."""
        import torch

        from moira_cli import models
        from moira_cli.record import read_text
        from moira_cli.tryout import TryOut
        from moira_kernels import MoiraError

        config = self.config
        decoder, label = None, None
        try:
            content, origin = read_text(config.prompts)
            network, tokenizer, _ = models.load(config.model, "cpu")
            tokens = torch.tensor(tokenizer(content, verbose=False)["input_ids"])
            limit = min(len(tokens), network.config.max_position_embeddings - config.tokens)
            for cell in self.missing():
                context = cell.record["shape"]["context_tokens"]
                if context > limit:
                    reason = f"{cell.label}: {origin} and the model's positions allow {limit:,} tokens."
                    self._fail([cell], "error", reason)
                    continue
                self.progress.stage(f"{cell.label} {cell.arm}")
                if label != cell.label:
                    label = cell.label
                    decoder = TryOut(network, tokens[:context], config.gamma, config.tokens, config.repetitions)
                self.run.add({**cell.record, **decoder.measure(cell.arm)})
        except MoiraError as error:
            raise CliError(f"{config.model}: {error}.", ExitCode.ENVIRONMENT) from error
        except KeyboardInterrupt:
            return "cancelled"
        return "complete"

    def _fail(self, cells: list[Cell], status: str, reason: str, **more: Any) -> None:
        for cell in cells:
            self.run.add({**cell.record, "status": status, "reason": reason, **more})

    def _measure(self, cells: list[Cell], spec: Spec, name: str) -> None:
        """One engine: its messages become cells and progress."""
        from moira_cli.e2e_cells import figures
        from moira_cli.serving import Child

        child = Child(spec, self.run.folder / "engines", name)
        common: dict[str, Any] = {"child_command": child.repeat_command, "log": str(child.log_path)}
        described, left, start = asdict(spec), {cell.label: cell for cell in cells}, time.monotonic()
        what = f"{name}: engine starting"
        self.progress.stage(f"{what}: {child.repeat_command} (log: {child.log_path})")
        try:
            for message in child.messages(self.config.timeout_s):
                event = message.pop("event")
                if event == "log":
                    self.progress.detail(f"{what}, {time.monotonic() - start:.0f} s: {message['message']}")
                elif event == "tick":
                    self.progress.detail(f"{what}, {time.monotonic() - start:.0f} s")
                elif event == "engine":
                    common |= {"engine_detail": message, "kv_capacity_tokens": message["kv_capacity_tokens"]}
                    common |= {"cudagraph_mode": message["cudagraph_mode"]}
                    self.progress.stage(
                        f"{name}: engine up after {message['start_s']:.0f} s, {message['kv_capacity_tokens']:,} tokens "
                        f"of KV cache, CUDA graphs: {message['cudagraph_mode']}"
                    )
                elif event == "progress":
                    what = f"{name}: {message['shape']} {message['message']}"
                    self.progress.stage(what)
                elif event == "unfit":
                    self._fail([left.pop(message["shape"])], "oom", f"{name}: {message['reason']}.", **common)
                elif event == "result":
                    cell = left.pop(message["shape"])
                    shape = next(shape for shape in spec.shapes if shape["label"] == cell.label)
                    measured = figures(message, described, shape)
                    measured["flags"] += ["B"] * self.busy
                    if "reason" in measured:
                        measured["reason"] = f"{name}: {cell.label}: {measured['reason']}."
                    self.run.add({**cell.record, **common, **measured})
                elif event == "end" and left:
                    reason = message["reason"] or "the engine ended without measuring it"
                    reason = f"{name}: {reason}. Log: {child.log_path}; repeat: {child.repeat_command}"
                    self._fail(list(left.values()), message["status"], reason, **common)
        finally:
            child.stop()

    def unfinished(self) -> list[dict[str, Any]]:
        """The cells that did not run, as rows that say so."""
        return [{**cell.record, "status": "cancelled", "reason": "stopped before it ran"} for cell in self.missing()]


def model_folder(config: Config, model: dict[str, Any], run_folder: Path) -> str:
    """The directory that vLLM loads: the model's own, or one with only a preset's config.json."""
    from moira_cli.models import PRESETS

    if config.model not in PRESETS:
        return config.model
    folder = run_folder / "models" / config.model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model, indent=1) + "\n", encoding="utf-8")
    return str(folder)


def dry_run(config: Config, shapes: list[dict[str, Any]]) -> None:
    """Print the shapes, their KV cache and page reads, and the engines that would start."""
    from moira_cli.render import new_console, new_table

    table = new_table("shape", "context", "batch", "KV tokens", "pages/row", "reads", "from", left=1)
    for entry in shapes:
        shape, selection = entry["shape"], entry["selection"] or {}
        table.add_row(
            shape["alias"],
            f"{shape['context_tokens']:,}",
            str(shape["batch"]),
            f"{shape['batch'] * (shape['context_tokens'] + config.tokens):,}",
            f"{shape['pages_per_row']:,}",
            f"{selection['reads']:.1%}" if selection else "-",
            selection.get("reads_source", f"coverage, gamma {config.gamma}"),
        )
    console = new_console()
    console.print(table)
    arms = split_list(config.arms)
    console.print(
        f"{len(arms)} arms ({', '.join(arms)}) x {config.launches} launches = {len(arms) * config.launches} engine "
        f"starts; each shape {config.repetitions} x {config.tokens} tokens. Nothing was run."
    )


def resolve(config: Config) -> tuple[Config, dict[str, Any], bool]:
    """(settings without gaps, config.json, whether weights are dummies) for vLLM; wrong settings are reported."""
    from moira_cli.models import read_config
    from moira_cli.record import read_text
    from moira_cli.serving import ARMS

    dense = [arm for arm in ARMS if not ARMS[arm].sparse]
    arms, relative_to = _arms(config, list(ARMS), dense)
    model, dummy = read_config(config.model)
    if dummy and config.gamma is not None:
        raise CliError(
            f"--gamma: {config.model} has dummy weights, whose attention says nothing about pages. "
            "Give the share to read with --reads, or a model directory with weights."
        )
    if config.gamma is not None and config.reads is not None:
        raise CliError("--gamma lets the coverage rule choose the pages, --reads sets their number. Leave one out.")
    if dummy and config.prompts != "random":
        raise CliError(f"--prompts: {config.model} has dummy weights and no tokenizer. Leave it out.")
    if config.prompts != "random":
        read_text(config.prompts)
    reads = config.reads or ("paper" if dummy else None)
    gamma = config.gamma if reads else config.gamma or 0.98
    limit = model["max_position_embeddings"]
    longest = max(shape.context_tokens for shape in _shapes(config)) + config.tokens
    needed = min(limit, -(-longest // PAGE_SIZE) * PAGE_SIZE)
    config = replace(
        config,
        arms=arms,
        relative_to=relative_to,
        reads=reads,
        gamma=gamma,
        max_model_len=config.max_model_len or needed,
    )
    return config, model, dummy


def _arms(config: Config, known: list[str], dense: list[str]) -> tuple[str, str]:
    """(arms of the run, the one that ratios are to), both checked."""
    arms = known if config.arms == "all" else split_list(config.arms)
    for arm in arms:
        if arm not in known:
            raise unknown("Arm", arm, known)
    if not arms:
        raise CliError(f"--arms: expected at least one arm. Known: {', '.join(known)}.")
    relative_to = config.relative_to or next((arm for arm in arms if arm in dense), arms[0])
    if relative_to not in arms:
        raise CliError(f"--relative-to {relative_to}: not among the arms of this run ({', '.join(arms)}).")
    return ",".join(dict.fromkeys(arms)), relative_to


def resolve_tryout(config: Config, ctx: typer.Context) -> tuple[Config, list[dict[str, Any]]]:
    """(settings without gaps, shapes) for ``--engine transformers``; wrong settings are reported."""
    from moira_cli.record import STDLIB_TEXT, read_text

    for name in VLLM_ONLY:
        if ctx.get_parameter_source(name).name == "COMMANDLINE":
            raise CliError(f"--{name.replace('_', '-')} is for vLLM; --engine transformers has no such setting.")
    if config.launches != 1:
        raise CliError(f"--launches: --engine transformers runs once, in this process; got {config.launches}.")
    arms, relative_to = _arms(config, list(TRYOUT_ARMS), ["dense-torch"])
    shapes = _shapes(config)
    if any(shape.batch != 1 for shape in shapes):
        raise CliError("--shape: --engine transformers decodes one request, e.g. 1kx1.")
    prompts = STDLIB_TEXT if config.prompts == "random" else config.prompts
    read_text(prompts)  # so that a wrong name is reported before anything is written
    config = replace(config, arms=arms, relative_to=relative_to, gamma=config.gamma or 0.98, prompts=prompts)
    return config, [
        {
            "shape": {
                "alias": shape.label,
                "context_tokens": shape.context_tokens,
                "batch": 1,
                "page_size": PAGE_SIZE,
                "pages_per_row": -(-shape.context_tokens // PAGE_SIZE),
            },
            "selection": None,
            "counts": None,
        }
        for shape in shapes
    ]


def _check_numbers(reads: str | None, gamma: float | None) -> None:
    if reads is not None and reads != "paper":
        try:
            ok = 0 < float(reads) <= 1
        except ValueError:
            ok = False
        if not ok:
            raise CliError(f"--reads: expected paper or a number in (0, 1], got '{reads}'.")
    if gamma is not None and not 0 < gamma <= 1:
        raise CliError(f"--gamma: expected a number in (0, 1], got {gamma}.")


def bench_e2e(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="llama-3.1-8b, qwen3-4b, qwen3-4b-thinking (dummy weights), or a model directory."),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="CONTEXTxBATCH, comma-separated. (default: 32kx16)")] = None,
    suite: Annotated[
        str | None, typer.Option(help="Instead of --shape: table3 (the paper's), batch1 (2k to 64k) or paper (both).")
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option("--arms", "--baselines", help="Arms, comma-separated, or all. (default: dense ones and moira)"),
    ] = None,
    relative_to: Annotated[str | None, typer.Option(help="Arm of the ratio column. (default: first dense arm)")] = None,
    reads: Annotated[
        str | None,
        typer.Option(help="Mean share of pages to read, or paper: its Table 3. (default with dummy weights: paper)"),
    ] = None,
    lists: Annotated[str, typer.Option(help="Recording that page counts are scaled from: real (shipped) or FILE.")] = (
        "real"
    ),
    gamma: Annotated[float | None, typer.Option(help="Coverage, with real weights. (default: 0.98)")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=4, help="Output tokens per request and repetition. (default: 256)")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Times each shape is decoded per launch. (default: 5)")
    ] = None,
    launches: Annotated[
        int | None, typer.Option(min=1, help="Engine starts per arm, arms interleaved. (default: 2)")
    ] = None,
    reuse_prefill: Annotated[
        bool, typer.Option(help="Prefill once; repetitions take their prompts from the prefix cache.")
    ] = True,
    prompts: Annotated[str, typer.Option(help="random (token ids), or a text FILE for a model directory.")] = "random",
    kv_layout: Annotated[str, typer.Option(help="nhd (vLLM's default) or hnd.")] = "nhd",
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.1, max=0.98, help="vLLM's share of the GPU; page summaries come on top.")
    ] = 0.85,
    max_model_len: Annotated[
        int,
        typer.Option(
            min=0, help="Most tokens of a request. (default: what the longest shape needs)", show_default=False
        ),
    ] = 0,
    eager: Annotated[bool, typer.Option(help="No CUDA graphs, no compilation (flag E).")] = False,
    engine: Annotated[
        str, typer.Option(help="vllm, or transformers: a small real model on the CPU, to try the command.")
    ] = "vllm",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, weights and page counts.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Stop an engine that is silent for so long.")] = 600.0,
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Measure on a GPU that is not idle (flag B).")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 8 if a row is throttled.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print shapes, page reads and engines; run nothing.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for the results. (default: runs/<utc>_<commit>)")] = None,
    resume: Annotated[Path | None, typer.Option(help="Finish the run in this folder with its own settings.")] = None,
    tag: Annotated[str | None, typer.Option(help="Added to the name of the run folder.")] = None,
    output_json: Annotated[
        str | None, typer.Option(help="Also write the whole run as JSON to FILE, or - for stdout.")
    ] = None,
    progress: Annotated[str, typer.Option(help="auto (on a terminal), plain or none; on stderr.")] = "auto",
) -> None:
    """Time whole decode steps in vLLM: dense attention and Moira, each in processes of its own.

    With dummy weights the page counts come from a recorded profile, scaled to a mean read fraction; Estimate and Select
    run and are paid for. Every arm decodes the same prompts with the same settings; a shape that was preempted, missed
    its CUDA graph or became dense is a row that says so. Flags: T throttled, B busy GPU, E eager.
    """
    from moira_cli.bench_kernel import check_output_options

    check_output_options(progress, tag)
    for option, value, known in (("--engine", engine, DEFAULTS), ("--kv-layout", kv_layout, ("nhd", "hnd"))):
        if value not in known:
            raise unknown(option, value, known)
    if suite is not None:
        if shape is not None:
            raise CliError("--suite names shapes; leave --shape out.")
        if suite not in E2E_SUITES:
            raise unknown("Suite", suite, E2E_SUITES)
        shape = ",".join(E2E_SUITES[suite])
    for text in split_list(shape or ""):
        parse_shape(text)  # before torch is imported, so that a typing error answers at once
    _check_numbers(reads, gamma)

    from moira_cli import environment
    from moira_cli.bench_kernel import finish_run, require_idle, require_same_setup, resume_run
    from moira_cli.e2e_report import print_e2e
    from moira_cli.records import Run, header, new_run_folder, require_writable

    run = None
    if resume is not None:
        run, config = resume_run(resume, ctx, Config, "bench e2e")
    else:
        default = DEFAULTS[engine]
        config = Config(
            engine=engine,
            model=model or default["model"],
            shape=shape or default["shape"],
            arms=arms or default["arms"],
            relative_to=relative_to or "",
            reads=reads,
            lists=lists,
            gamma=gamma,
            tokens=tokens or default["tokens"],
            repetitions=repetitions or default["repetitions"],
            launches=launches or default["launches"],
            reuse_prefill=reuse_prefill,
            prompts=prompts,
            kv_layout=kv_layout,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            eager=eager,
            seed=seed,
            timeout_s=timeout_s,
        )
    on_vllm = config.engine == "vllm"
    if on_vllm:
        config, network, dummy = resolve(config)
        shapes = build_shapes(config, network)
    else:
        dummy = False
        config, shapes = resolve_tryout(config, ctx)
    if dry:
        dry_run(config, shapes)
        return
    if output_json not in (None, "-"):
        require_writable(Path(output_json), "--output-json")
    env, state = require_engine() if on_vllm else (environment.describe("cpu"), {})
    tool = environment.code_version()
    busy = require_idle(0, state, allow_busy)
    if run is None:
        run = Run.create(run_dir or new_run_folder(tag, tool), header(sys.argv[1:], asdict(config), env, tool))
    else:
        require_same_setup(run, env, tool)
    session = Session(config, build_cells(config, shapes, run, dummy), run, busy, Progress(progress))
    status = session.measure_all(network) if on_vllm else session.try_out()
    finish_run(run, status, session.unfinished(), strict, output_json, print_e2e, "bench e2e")
