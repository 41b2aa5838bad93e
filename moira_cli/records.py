"""Results on disk.

A run is a folder:

    run.json        the whole run: environment, settings, status and every cell; rewritten atomically
    cells.jsonl     one finished cell a line, appended and flushed to the disk as it is measured

A cell is one arm at one point of the grid. It has a ``cell_id`` (hash of what was measured, with which code, on which
hardware and libraries), a ``status`` (ok, skipped_unsupported, oom, capture_failed, wrong_result, error or cancelled)
and, unless that is ok, a ``reason``. After a crash cells.jsonl holds every
finished cell; a last line cut short is dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moira_cli.errors import CliError, ExitCode

SCHEMA_VERSION = 1


def utc_now() -> str:
    """2026-12-01T12:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def strict(value: Any) -> Any:
    """The same JSON value with NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON text."""
    return json.dumps(strict(value), indent=indent, allow_nan=False)


def cell_id(identity: dict[str, Any]) -> str:
    """12 hexadecimal digits that depend on every value of ``identity``."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace the file in one step: readers see the old or the new content, never a part."""
    binary = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def current_umask() -> int:
    """The process's umask (readable only by setting it)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def require_writable(path: Path, what: str) -> None:
    """One clear line, before anything is measured, if the file cannot be written."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise CliError(f"{what} '{path}' cannot be written: {error.strerror}. Name another place.") from error


def redact(arguments: Iterable[str]) -> list[str]:
    """Command-line arguments with values that look like secrets replaced."""
    return [re.sub(r"(?i)((?:token|key|secret|password)[^=\s]*=).+", r"\1***", argument) for argument in arguments]


class Run:
    """One run's folder and its cells, in order."""

    def __init__(self, folder: Path, header: dict[str, Any], cells: list[dict[str, Any]] | None = None):
        self.folder = folder
        self.header = header
        self.cells = cells or []

    @classmethod
    def create(cls, folder: Path, header: dict[str, Any]) -> Run:
        """A new folder; refuses one that already holds a run."""
        if (folder / "run.json").exists():
            raise CliError(
                f"'{folder}' already holds a run. Continue it with --resume {folder}, or name another --run-dir."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run = cls(folder, {**header, "run_id": folder.name})
            run.save("running")
            (folder / "cells.jsonl").touch()
        except OSError as error:
            raise CliError(
                f"Run folder '{folder}' cannot be written: {error.strerror}. Name another --run-dir."
            ) from error
        return run

    @classmethod
    def load(cls, folder: Path) -> Run:
        """An earlier run with the cells it finished."""
        try:
            header = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            lines = (folder / "cells.jsonl").read_text(encoding="utf-8").split("\n")
            cells = [json.loads(line) for line in lines[:-1] if line]
        except OSError as error:
            raise CliError(f"'{folder}' is not a run folder: {error.strerror} ({error.filename}).") from error
        except ValueError as error:
            raise CliError(f"'{folder}' does not hold a readable run: {error}.") from error
        if header.get("schema_version") != SCHEMA_VERSION:
            raise CliError(
                f"'{folder}' has schema version {header.get('schema_version')}, this tool reads {SCHEMA_VERSION}."
            )
        header.pop("cells", None)
        # A kill in the middle of an append leaves a line without its newline: cut it, so that the next starts fresh.
        if lines[-1]:
            write_atomically(folder / "cells.jsonl", "".join(dumps(cell) + "\n" for cell in cells))
        return cls(folder, header, cells)

    def add(self, cell: dict[str, Any]) -> None:
        """Append a finished cell and force it to the disk."""
        self.cells.append(cell)
        with (self.folder / "cells.jsonl").open("a", encoding="utf-8") as file:
            file.write(dumps(cell) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def document(
        self, status: str, exit_code: ExitCode | None = None, unfinished: Iterable[dict] = ()
    ) -> dict[str, Any]:
        """The content of run.json."""
        return {
            **self.header,
            "status": status,
            "exit_code": None if exit_code is None else int(exit_code),
            "finished_utc": None if exit_code is None else utc_now(),
            "cells": [*self.cells, *unfinished],
        }

    def save(self, status: str, exit_code: ExitCode | None = None, unfinished: Iterable[dict] = ()) -> dict[str, Any]:
        """Write run.json and return its content."""
        document = self.document(status, exit_code, unfinished)
        write_atomically(self.folder / "run.json", dumps(document, indent=1) + "\n")
        return document


def header(command: list[str], config: dict[str, Any], env: dict[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
    """What a run records before its first cell."""
    import shlex

    arguments = redact(command)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": tool,
        "started_utc": utc_now(),
        "argv": arguments,
        "repro_command": shlex.join(["moira", *arguments]),
        "config_resolved": config,
        "env": env,
    }


def exit_code(cells: list[dict[str, Any]], *, cancelled: bool = False, strict_flags: bool = False) -> ExitCode:
    """The exit code for a set of cells. Skipped arms fail a run only when nothing else ran."""
    statuses = [cell["status"] for cell in cells]
    if cancelled:
        return ExitCode.CANCELLED
    if statuses and all(status == "skipped_unsupported" for status in statuses):
        return ExitCode.ENVIRONMENT
    if "wrong_result" in statuses:
        return ExitCode.WRONG_RESULT
    if "ok" not in statuses:
        return ExitCode.NO_CELL
    if any(status not in ("ok", "skipped_unsupported") for status in statuses):
        return ExitCode.PARTIAL
    if strict_flags and any({"N", "T", "U"} & set(cell.get("flags", [])) for cell in cells):
        return ExitCode.STRICT
    return ExitCode.OK


def new_run_folder(tag: str | None, tool: dict[str, Any]) -> Path:
    """runs/<utc>_<commit>[-dirty][_<tag>] under the current folder."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    commit = (tool["commit"] or f"v{tool['version']}") + ("-dirty" if tool["dirty"] else "")
    folder = Path("runs") / "_".join(filter(None, (stamp, commit, tag)))
    serial = 1
    while folder.exists():
        serial += 1
        folder = folder.with_name(f"{folder.name.split('+')[0]}+{serial}")
    return folder


def emit(document: dict[str, Any], target: str | None) -> None:
    """Write a document as strict JSON to a file, to stdout ('-') or nowhere (None)."""
    text = dumps(document, indent=1)
    if target == "-":
        print(text)
    elif target is not None:
        write_atomically(Path(target), text + "\n")


def plan_us(cell: dict[str, Any]) -> float:
    """Host plan of a measured cell: the sum of its parts."""
    return sum(value for name, value in cell["timing"]["plan"].items() if name.endswith("_us"))


def warn(message: str) -> None:
    """One line on stderr."""
    print(f"moira: {message}", file=sys.stderr)
