"""Exit codes, and the error that becomes one line on stderr."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees. If several apply, the first of CANCELLED, INTERNAL, ENVIRONMENT, WRONG_RESULT, NO_CELL,
    PARTIAL, PROFILER, STRICT counts.
    """

    OK = 0
    INTERNAL = 1
    USAGE = 2
    ENVIRONMENT = 3
    PARTIAL = 4
    NO_CELL = 5
    WRONG_RESULT = 6
    REGRESSION = 7
    STRICT = 8
    PROFILER = 9
    CANCELLED = 130


class CliError(Exception):
    """A failure that the user can act on: what happened, why, what to do, in one line."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE):
        super().__init__(message)
        self.code = code


class ProfilerError(CliError):
    """A profiler is missing, lacks permission, or brought back nothing that can be used."""

    def __init__(self, message: str, code: ExitCode = ExitCode.PROFILER):
        super().__init__(message, code)


def unknown(what: str, given: str, known: Iterable[str]) -> CliError:
    """'Arm 'mora' is not known. Did you mean 'moira'? Known: ...'."""
    known = list(known)
    close = get_close_matches(given, known, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return CliError(f"{what} '{given}' is not known.{hint} Known: {', '.join(known)}.")
