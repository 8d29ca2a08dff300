"""`k3rewrite passes`, `targets` and `check`: what there is, and whether a pipeline fits it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from k3rewrite.driver import kimi_k3
from k3rewrite.driver.names import check_given, names_in_programs, names_of_command, used_names
from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.layer import option_hints
from k3rewrite.pipeline.runner import build_passes
from k3rewrite.plain_data.located import dump_yaml
from k3rewrite.plain_data.typed import describe_hint
from k3rewrite.report.table import human_bytes
from k3rewrite.targets import known_targets, load_target


def known_passes() -> dict[str, type]:
    """The pass classes by name, in the order in which a pipeline runs them."""
    from k3rewrite.passes import ALL_PASSES

    return {cls.name: cls for cls in ALL_PASSES}


def list_passes(passes: Mapping[str, type]) -> Group:
    """Each pass with the first line of its docstring and its options; options that passes inherit stand at the end."""
    parts: list[RenderableType] = []
    shared: dict[str, Text] = {}
    for name, cls in passes.items():
        parts.append(Text.assemble((name, "bold cyan"), f"  {_summary(cls)}"))
        for option, line in _options(cls).items():
            if option in inspect.get_annotations(cls):
                parts.append(Padding(line, (0, 0, 0, 4)))
            else:
                shared.setdefault(option, line)
    if shared:
        parts.append(Text("\nOptions that passes share (`k3rewrite passes NAME` lists all of a pass):"))
        parts += [Padding(line, (0, 0, 0, 4)) for line in shared.values()]
    return Group(*parts)


def describe_pass(passes: Mapping[str, type], name: str) -> Group:
    """One pass: its whole docstring, what it needs, its options."""
    if name not in passes:
        raise ConfigError(f"no pass '{name}'", place="NAME", remedy=did_you_mean(name, passes))
    cls = passes[name]
    level, requires = getattr(cls, "level", ""), ", ".join(sorted(getattr(cls, "requires", ()))) or "nothing"
    parts: list[RenderableType] = [
        Text(name, "bold cyan"),
        Text(inspect.getdoc(cls) or ""),
        Text(""),
        *_sketch(cls),
        Text(f"level {level}; needs {requires} before it"),
    ]
    options = _options(cls)
    if options:
        parts += [Text("options:"), *(Padding(line, (0, 0, 0, 4)) for line in options.values())]
    return Group(*parts)


def _sketch(cls: type) -> list[Text]:
    """The text at the head of the pass's file: what the graph looks like before and after."""
    module = inspect.getmodule(cls)
    text = inspect.getdoc(module) if module is not None else None
    return [Text(text), Text("")] if text else []


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")


def _options(cls: type) -> dict[str, Text]:
    """`name: type, default, description` of each option."""
    hints, texts = option_hints(cls), field_texts(cls)
    lines = {}
    for field in dataclasses.fields(cls):
        if field.name not in hints:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        given = "needed" if default is dataclasses.MISSING else f"default {_as_yaml(default)}"
        line = Text.assemble((field.name, "bold"), f": {describe_hint(hints[field.name])}, {given}")
        if field.name in texts:
            line.append(f"   {texts[field.name]}", "dim")
        lines[field.name] = line
    return lines


def _as_yaml(value: object) -> str:
    return dump_yaml(list(value) if isinstance(value, tuple) else value).splitlines()[0]


def field_texts(cls: type) -> dict[str, str]:
    """The texts that stand below the fields of a class in its source, and of its bases; those that cannot be read are
    left out."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
        for field, text in pairwise(body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if (
                isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                texts[field.target.id] = " ".join(text.value.value.split())
    return texts


def target_table() -> Table:
    """The shipped targets with the figures that kernels are chosen by; 0 is shown as a dash."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("target", no_wrap=True)
    table.add_column("description")
    for heading in ("arch", "units", "wave", "LDS/unit", "regs/thread", "memory", "bandwidth", "bf16"):
        table.add_column(heading, justify="right", overflow="fold", min_width=len(heading))
    for name in known_targets():
        t = load_target(name)
        figures = [
            t.arch,
            str(t.compute_units),
            str(t.wave_size),
            f"{t.lds_bytes_per_cu / 1024:g} KiB" if t.lds_bytes_per_cu else "-",
            str(t.max_registers_per_thread or "-"),
            human_bytes(t.memory_bytes) if t.memory_bytes else "-",
            f"{t.memory_bandwidth / 1e12:.3g} TB/s" if t.memory_bandwidth else "-",
            f"{t.bf16_flops / 1e12:.4g} TFLOP/s" if t.bf16_flops else "-",
        ]
        table.add_row(name, t.description, *figures)
    return table


def check_pipeline(source: str, given: Sequence[str] = ()) -> Text:
    """Load a pipeline against the passes, targets and names of this package; a text that says what it holds.

    `given` are names that its conditions may use because options={"names": ...} of torch.compile gives them. Names
    that not every run has are told with who has them.
    """
    check_given(dict.fromkeys(given, 0), "--names")
    passes = known_passes()
    names = (*names_of_command(kimi_k3.NAME), *given)
    config = load_pipeline(source, known_passes=passes, known_targets=known_targets(), known_names=names)
    build_passes(config, passes)  # their order
    load_target(config.target)
    expecting = sum(entry.expect is not None for entry in config.passes)
    origin = f", extends {' <- '.join(reversed(config.extends))}" if config.extends else ""
    text = Text(
        f"{source}: fine ({len(config.passes)} passes, {expecting} with an expectation, target {config.target}{origin})"
    )
    used = used_names(config)
    for known, who in (
        (names_in_programs(), "under torch.compile: give options={'names': ...} with"),
        (names_of_command("a factory"), "k3rewrite compile package.module:factory does not know"),
        (names_of_command(kimi_k3.NAME), "k3rewrite compile kimi-k3 does not know"),
    ):
        if missing := sorted(used - {*known}):
            text.append(f"\n  {who} {', '.join(missing)}")
    return text
