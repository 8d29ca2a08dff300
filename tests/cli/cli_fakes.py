"""A command line whose compiler is a fake that records the request, and whose passes need no graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from typer.testing import CliRunner, Result

from k3rewrite.cli import main
from k3rewrite.driver.request import CompileRequest
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import PassReport, RunInfo, RunReport


@dataclass(frozen=True)
class Shared:
    """Options that several passes have."""

    level: ClassVar[str] = "aten"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    allow_changes_rounding: bool = field(default=False, kw_only=True)
    """let rules of policy changes_rounding rewrite"""


def plain(pass_name: str) -> type:
    @dataclass(frozen=True)
    class Plain(Shared):
        """Lift something."""

        name: ClassVar[str] = pass_name

    return Plain


@dataclass(frozen=True)
class Fuse(Shared):
    """Fuse the mix and the norm.

    before -> after
    """

    name: ClassVar[str] = "fuse_attn_res_norm"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_attn_res"})
    roundings: Literal["fewest", "model"] = "fewest"
    """how often a value is rounded"""
    sizes: tuple[int, ...] = (16,)


@dataclass(frozen=True)
class Warp(Shared):
    """Round less."""

    name: ClassVar[str] = "warp_decode_moe"
    roundings: Literal["fewest", "model"] = "fewest"


@dataclass(frozen=True)
class Kda(Shared):
    """Round less here, too."""

    name: ClassVar[str] = "fuse_kda_decode"
    roundings: Literal["fewest", "model"] = "fewest"


@dataclass(frozen=True)
class Window(Shared):
    """Round less over a window."""

    name: ClassVar[str] = "fuse_kda_verify"
    roundings: Literal["fewest", "model"] = "fewest"


BEFORE = (
    "canonicalise",
    "lift_rms_norm",
    "lift_gated_rms_norm",
    "lift_l2_norm",
    "lift_conv_verify",
    "lift_short_conv",
    "lift_kda_step",
    "lift_kda_window",
    "lift_state_slots",
    "lift_kda_chunk",
    "lift_route",
    "lift_moe",
    "lift_mlp",
    "lift_attn_res",
)
FAKE_PASSES = (
    *(plain(name) for name in BEFORE),
    Fuse,
    plain("fuse_block_write"),
    Warp,
    Kda,
    Window,
    plain("fuse_kda_chunk"),
    plain("merge_projections"),
    plain("stack_weights"),
    plain("select"),
    plain("reuse_storage"),
)


@dataclass
class CommandLine:
    """`run("compile", "kimi-k3")` -> result. `outcome` is what the fake compiler returns or raises."""

    folder: Path
    requests: list[CompileRequest]
    outcome: Callable[[CompileRequest], RunReport]

    def run(self, *args: str) -> Result:
        return CliRunner().invoke(main, [str(arg) for arg in args])

    def compile(self, *args: str) -> CompileRequest:
        """The request of a compilation that ends well."""
        result = self.run("compile", *args)
        assert result.exit_code == 0, result.output
        return self.requests[-1]

    def refused(self, *args: str) -> str:
        """The message of a command that ends with code 2 before anything is compiled or written."""
        before = sorted(self.folder.rglob("*"))
        result = self.run(*args)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output and not self.requests
        assert sorted(self.folder.rglob("*")) == before
        return result.stderr


def report_of(request: CompileRequest) -> RunReport:
    entry = PassReport("lift_mlp", candidates=3, matched=3, nodes_before=20, nodes_after=12, seconds=0.1)
    report = RunReport(RunInfo(request.model, target=request.target), passes=[entry])
    RunFolder.create(request.out).write_report(report)
    return report
