"""The commands and their options. What they do stands in `compile.py`, `catalogue.py` and `k3rewrite.report`.

Exit codes: 0 fine; 1 an expectation or a verification failed; 2 bad usage, configuration or input. An error raised on
purpose is printed as one message; any other keeps its traceback. Everything heavy (torch above all) is imported inside
the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from k3rewrite.errors import K3RewriteError


class _Commands(TyperGroup):
    """The group of all commands; turns our own errors into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except K3RewriteError as error:
            from k3rewrite.cli.output import show_error

            show_error(error)
            raise typer.Exit(error.exit_code) from None


main = typer.Typer(
    cls=_Commands,
    name="k3rewrite",
    help="Rewrite a captured model with a pipeline of passes and emit the kernels of a target GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"k3rewrite {version('k3rewrite')}")
        raise typer.Exit


@main.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@main.command("compile")
def compile_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="kimi-k3, or package.module:factory.")],
    config: Annotated[
        str | None,
        typer.Option(help="Kimi K3 only: tiny (default), tiny-tp8, full, or a config.json.", show_default=False),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Kimi K3 only: keep the first N layers.")] = None,
    phase: Annotated[str | None, typer.Option(help="decode (default), verify or prefill.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences; default 4.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of each sequence in this call; default 1 decode, 4 verify, 128 prefill.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each sequence in the caches; default 64 decode and verify, 0 prefill.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (default), float32 or float64.")] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(help="A shipped pipeline or a YAML file; default kimi-k3-PHASE, or default for another model."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="See `k3rewrite targets`; wins over the pipeline's.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel ranks; wins over the pipeline's.")] = None,
    rank: Annotated[int, typer.Option(help="The rank to compile for.")] = 0,
    out: Annotated[
        str, typer.Option(help="Folder in which the run gets a fresh folder run-NNN.", metavar="PATH")
    ] = "k3rewrite-runs",
    verify: Annotated[
        str | None, typer.Option(help="none, regions, end-to-end or all; wins over the pipeline's.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run the result, or compile only, without weights.")
    ] = True,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and inputs; default 0.")] = None,
) -> None:
    """Capture a model, rewrite it, emit kernels, run it and compare; leaves a report in a fresh folder."""
    from k3rewrite.cli.compile import compile_command

    code = compile_command(
        model=model,
        config=config,
        layers=layers,
        phase=phase,
        batch=batch,
        tokens=tokens,
        context=context,
        dtype=dtype,
        pipeline=pipeline,
        target=target,
        tp=tp,
        rank=rank,
        out=out,
        verify=verify,
        run=run,
        seed=seed,
        command=shlex.join(["k3rewrite", *sys.argv[1:]]),
    )
    raise typer.Exit(code)


@main.command()
def explain(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, or the folder of several (the latest counts).")
    ],
    pass_name: Annotated[str | None, typer.Option("--pass", help="One pass, with every site.")] = None,
) -> None:
    """What each pass matched and missed, and why, from a run's report."""
    from k3rewrite.cli.output import stdout
    from k3rewrite.report.explain import explain as explanation
    from k3rewrite.report.explain import list_runs
    from k3rewrite.report.run_folder import RunFolder

    explained = explanation(RunFolder.find(run).read_report(), pass_name)
    stdout().print(list_runs(RunFolder.reports(run)), end="")
    stdout().print(explained)


@main.command()
def passes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One pass, with its whole description.")] = None,
) -> None:
    """The passes, their options and defaults."""
    from k3rewrite.cli.catalogue import describe_pass, known_passes, list_passes
    from k3rewrite.cli.output import stdout

    stdout().print(list_passes(known_passes()) if name is None else describe_pass(known_passes(), name))


@main.command()
def targets() -> None:
    """The targets and their main figures."""
    from k3rewrite.cli.catalogue import target_table
    from k3rewrite.cli.output import stdout

    stdout().print(target_table())


@main.command()
def check(
    file: Annotated[
        str, typer.Argument(metavar="FILE.yaml", help="A pipeline file, or the name of a shipped pipeline.")
    ],
    names: Annotated[
        str, typer.Option(help="Names, with commas between, that torch.compile's options={'names': ...} will give.")
    ] = "",
) -> None:
    """Check a pipeline without running it; lists all of its problems, and the names that not every run has."""
    from k3rewrite.cli.catalogue import check_pipeline
    from k3rewrite.cli.output import stdout

    stdout().print(check_pipeline(file, [name.strip() for name in names.split(",") if name.strip()]))
