"""Loading pipelines: shipped files, inheritance, conversion of options, the round trip through YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rewrite.errors import ConfigError
from k3rewrite.pipeline.config import load_pipeline, shipped_pipelines
from k3rewrite.pipeline.settings import Dump, Inductor, Parallel, PassConfig, PipelineConfig, Verify


@dataclass(frozen=True)
class Plain:
    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Fuse:
    name: ClassVar[str] = "fuse"
    roundings: Literal["fewest", "model"] = "fewest"
    allow_changes_rounding: bool = False
    eps: float = 1e-6
    multiple: int = 16
    label: str = ""
    limit: int | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[int, float] = (1, 2.0)

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError("multiple must be 1 or more")


SHIPPED_PASSES = (
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
    "fuse_attn_res_norm",
    "fuse_block_write",
    "warp_decode_moe",
    "fuse_kda_decode",
    "fuse_kda_verify",
    "fuse_kda_chunk",
    "merge_projections",
    "stack_weights",
    "select",
    "reuse_storage",
)
KNOWN: dict[str, type] = {
    **dict.fromkeys(SHIPPED_PASSES, Plain),
    "fuse_attn_res_norm": Fuse,
    "warp_decode_moe": Fuse,
    "fuse_kda_decode": Fuse,
    "fuse_kda_verify": Fuse,
    "lift_kda_chunk": Fuse,
    "a": Plain,
    "b": Fuse,
    "c": Plain,
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(source: object) -> PipelineConfig:
    return load_pipeline(source, known_passes=KNOWN)  # type: ignore[arg-type]


def test_the_shipped_pipelines() -> None:
    assert set(shipped_pipelines()) == {
        "base",
        "default",
        "kimi-k3",
        *(f"kimi-k3-{p}" for p in ("decode", "verify", "prefill")),
    }
    assert load("default").target == "auto" and load("default").extends == ("pass_configs/base.yaml",)


def test_default_expects_nothing() -> None:
    assert all(p.expect is None for p in load("default").passes)


def test_child_overrides_in_place_drops_and_appends(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base.yaml",
        "version: 1\ntarget: cpu\npasses:\n  - a\n  - b: {multiple: 8, eps: 1e-5, expect: '>= 1'}\n",
    )
    child = write(
        tmp_path,
        "child.yaml",
        "version: 1\nextends: base.yaml\nparallel: {tp: 8}\npasses:\n"
        "  - c\n  - b: {multiple: 4, expect: null}\n  - a: off\n",
    )
    config = load(child)
    assert [p.name for p in config.passes] == ["b", "c"]
    assert config.passes[0] == PassConfig("b", {"multiple": 4, "eps": 1e-5})
    assert config.target == "cpu" and config.parallel == Parallel(tp=8, dcp=1)
    assert config.extends == (str(tmp_path / "base.yaml"),) and config.name == "child"
    assert config.passes[0].place == f"{child}:6"


@pytest.mark.parametrize(
    ("where", "order"), [("before: b", "acb"), ("after: a", "acb"), ("before: a", "cab"), ("after: b", "abc")]
)
def test_new_pass_stands_where_it_says(tmp_path: Path, where: str, order: str) -> None:
    write(tmp_path, "base.yaml", "version: 1\npasses: [a, b]\n")
    child = write(tmp_path, "child.yaml", f"version: 1\nextends: base.yaml\npasses:\n  - c: {{{where}}}\n")
    assert "".join(p.name for p in load(child).passes) == order


def test_inherited_pass_can_be_moved(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "version: 1\npasses: [a, b: {multiple: 2}, c]\n")
    child = write(tmp_path, "child.yaml", "version: 1\nextends: base.yaml\npasses:\n  - b: {after: c}\n")
    config = load(child)
    assert [p.name for p in config.passes] == ["a", "c", "b"] and config.passes[2].options == {"multiple": 2}


def test_where_a_pass_stands_is_said_anew_by_a_child(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "version: 1\npasses: [a, b: {multiple: 2}, select, c]\n")
    write(tmp_path, "mid.yaml", "version: 1\nextends: base.yaml\npasses:\n  - c: {after: a}\n")
    child = write(tmp_path, "child.yaml", "version: 1\nextends: mid.yaml\npasses:\n  - c: {before: select}\n")
    assert [p.name for p in load(child).passes] == ["a", "b", "c", "select"]


def test_extends_finds_a_file_beside_it_before_a_shipped_one(tmp_path: Path) -> None:
    child = write(tmp_path, "child.yaml", "version: 1\nextends: base.yaml\n")
    assert len(load(child).passes) == len(SHIPPED_PASSES)
    write(tmp_path, "base.yaml", "version: 1\npasses: [a]\n")
    assert [p.name for p in load(child).passes] == ["a"]


def test_extends_works_over_several_files(tmp_path: Path) -> None:
    write(tmp_path, "one.yaml", "version: 1\npasses: [a]\non_miss: error\n")
    write(tmp_path, "two.yaml", "version: 1\nextends: one.yaml\npasses: [b]\n")
    three = write(tmp_path, "three.yaml", "version: 1\nextends: two.yaml\npasses: [c: {on_miss: reference}]\n")
    config = load(three)
    assert [(p.name, p.on_miss) for p in config.passes] == [("a", "error"), ("b", "error"), ("c", "reference")]
    assert config.extends == (str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml"))


def test_mapping_is_read_like_a_file() -> None:
    config = load({"version": 1, "extends": "base", "passes": [{"fuse_attn_res_norm": {"roundings": "model"}}]})
    (options,) = [entry.options for entry in config.passes if entry.name == "fuse_attn_res_norm"]
    assert options == {"roundings": "model", "allow_changes_rounding": True}
    assert config.name == "<mapping>"


def test_options_are_converted_to_the_types_of_the_fields(tmp_path: Path) -> None:
    text = "version: 1\npasses:\n  - b: {eps: 1e-5, sizes: [1, 2], pair: [3, 4], limit: 7, label: '12'}\n"
    options = load(write(tmp_path, "p.yaml", text)).passes[0].options
    assert options == {"eps": 1e-5, "sizes": (1, 2), "pair": (3, 4.0), "limit": 7, "label": "12"}
    assert type(options["pair"][1]) is float
    assert Fuse(**options).eps == 1e-5


def test_dump_and_verify(tmp_path: Path) -> None:
    text = "version: 1\npasses: [a, b]\nverify: {regions: true}\ndump: {formats: [txt], passes: [b]}\nfinalise: eager\n"
    config = load(write(tmp_path, "p.yaml", text))
    assert config.verify == Verify(regions=True) and config.finalise == "eager"
    assert config.dump == Dump(("txt",), ("b",)) and config.dump.wants("b") and not config.dump.wants("a")
    assert not Dump(formats=()).wants("a") and Dump().wants("a")


def test_override_wins_and_leaves_the_rest() -> None:
    config = load("kimi-k3-decode").override(target="mi355x", tp=8, verify=Verify(end_to_end=True))
    assert (config.target, config.parallel, config.verify) == ("mi355x", Parallel(8, 1), Verify(False, True))
    assert config.override() == config


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "roundings": st.sampled_from(["fewest", "model"]),
        "allow_changes_rounding": st.booleans(),
        "eps": st.floats(allow_nan=False),
        "multiple": st.integers(1, 2**70),
        "label": st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        | st.sampled_from(
            ["1e-5", "true", "off", "null", "~", "1", "<<", "=", "# x", "- a", "2020-01-01", "*a", "&b", "!c", ""]
        ),
        "limit": st.none() | st.integers(-5, 5),
        "sizes": st.lists(st.integers(), max_size=3).map(tuple),
    },
)
ENTRIES = st.builds(
    PassConfig,
    name=st.just("b"),
    options=OPTIONS,
    expect=st.sampled_from([None, "== 2 * n_layers", ">= 1", "matched == candidates"]),
    when=st.sampled_from([None, "tp > 1", "phase == 'decode'"]),
    on_miss=st.sampled_from(["reference", "error"]),
)
PIPELINES = st.builds(
    PipelineConfig,
    passes=ENTRIES.map(lambda entry: (PassConfig("a", on_miss="error"), entry)),
    target=st.sampled_from(["auto", "cpu", "mi355x"]),
    parallel=st.builds(Parallel, tp=st.integers(1, 64), dcp=st.integers(1, 8)),
    verify=st.builds(Verify, regions=st.booleans(), end_to_end=st.booleans()),
    dump=st.builds(
        Dump, formats=st.sampled_from([(), ("txt",), ("txt", "svg")]), passes=st.sampled_from(["all", (), ("b",)])
    ),
    finalise=st.sampled_from(["inductor", "eager"]),
    inductor=st.builds(Inductor, cuda_graphs=st.booleans(), keep_roundings=st.booleans()),
    on_miss=st.sampled_from(["reference", "error"]),
)


@settings(max_examples=150, deadline=None)
@given(PIPELINES)
def test_to_yaml_reloads_equal(tmp_path_factory: pytest.TempPathFactory, config: PipelineConfig) -> None:
    path = tmp_path_factory.mktemp("round") / "p.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load(path) == config


def test_to_yaml_of_a_shipped_pipeline_reloads_equal(tmp_path: Path) -> None:
    config = load("kimi-k3-verify")
    assert load(write(tmp_path, "p.yaml", config.to_yaml())) == config


def test_text_option_is_not_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.yaml:2: 'label': expected text, found 12 \(integer\)"):
        load(write(tmp_path, "p.yaml", "version: 1\npasses: [b: {label: 12}]\n"))
