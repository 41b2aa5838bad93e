"""The `moira` command: one module a command; this file only puts them together."""

from __future__ import annotations

import sys

import typer
from typer.core import TyperGroup

from moira_cli import __version__
from moira_cli.bench_e2e import bench_e2e
from moira_cli.bench_kernel import bench_kernel
from moira_cli.bench_layer import bench_layer
from moira_cli.compare import compare
from moira_cli.doctor import doctor
from moira_cli.errors import CliError
from moira_cli.listing import list_names
from moira_cli.profiling import profile
from moira_cli.record import record
from moira_cli.report import report
from moira_cli.verify import verify


class OneLineErrors(TyperGroup):
    """Prints what the user can act on as one line on stderr and exits with its code."""

    def invoke(self, ctx):
        """Run the command."""
        try:
            return super().invoke(ctx)
        except CliError as error:
            print(f"moira: {error}", file=sys.stderr)
            raise typer.Exit(error.code) from error
        except Exception as error:
            # Usage errors of the option parser, known by their shape: Typer may carry its own copy of click.
            if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
                raise
            path = getattr(getattr(error, "ctx", None), "command_path", "").split()[1:]
            message = " ".join(error.format_message().split())
            stop = "" if message.endswith((".", "?", "!")) else "."
            print(f"moira: {message}{stop} See '{' '.join(['moira', *path])} --help'.", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"auto_envvar_prefix": "MOIRA", "help_option_names": ["-h", "--help"]},
    help="Benchmark and profile sparse decode attention: the Moira kernels and their baselines on the same page lists.",
)
bench = typer.Typer(no_args_is_help=True, help="Check and time.")
bench.command("kernel")(bench_kernel)
bench.command("e2e")(bench_e2e)
bench.command("layer")(bench_layer)
app.add_typer(bench, name="bench")
app.command()(compare)
app.command()(doctor)
app.command("list")(list_names)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(profile)
app.command()(record)
app.command()(report)
app.command()(verify)


def _version(value: bool) -> None:
    if value:
        print(f"moira {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


if __name__ == "__main__":
    app()
