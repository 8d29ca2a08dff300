"""Bad pipelines: each gives one error with file, line and remedy; all problems of a file stand in one error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rewrite.errors import ConfigError
from k3rewrite.pipeline.config import load_pipeline


@dataclass(frozen=True)
class Lift:
    eps: float = 1e-6
    mode: Literal["fewest", "model"] = "fewest"
    fast: bool = False
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ValueError("eps is negative")


@dataclass(frozen=True)
class Needs:
    multiple: int


KNOWN: dict[str, type] = {"lift_mlp": Lift, "needs": Needs}
TARGETS = ("cpu", "mi355x")


def error_of(folder: Path, text: str | bytes, **options: object) -> str:
    path = folder / "p.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path, known_passes=KNOWN, known_targets=TARGETS, **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")


CASES = {
    "unknown key": ("version: 1\ntaget: cpu\n", "p.yaml:2: unknown key 'taget'\n  remedy: did you mean 'target'?"),
    "no version": ("target: cpu\n", "p.yaml:1: 'version' is missing\n  remedy: add 'version: 1'"),
    "empty file": ("", "p.yaml:1: 'version' is missing\n  remedy: add 'version: 1'"),
    "other version": (
        "version: 2\n",
        "p.yaml:1: version 2 (integer) is not known\n  remedy: this k3rewrite reads version 1",
    ),
    "version as text": ("version: '1'\n", "p.yaml:1: version '1' (text) is not known"),
    "a list": ("- a\n", "p.yaml:1: a pipeline is a mapping, found a list of 1"),
    "unknown pass": (
        "version: 1\npasses:\n  - lift_mpl\n",
        "p.yaml:3: unknown pass 'lift_mpl'\n  remedy: did you mean 'lift_mlp'?",
    ),
    "unknown option": (
        "version: 1\npasses:\n  - lift_mlp:\n      esp: 1\n",
        "p.yaml:4: the pass 'lift_mlp' has no option 'esp'\n  remedy: did you mean 'eps'?",
    ),
    "unknown target": (
        "version: 1\ntarget: mi355\n",
        "p.yaml:2: unknown target 'mi355'\n  remedy: did you mean 'mi355x'?",
    ),
    "wrong type": (
        "version: 1\npasses:\n  - lift_mlp: {eps: big}\n",
        "p.yaml:3: 'eps': expected a number, found 'big' (text)",
    ),
    "yes is no boolean": (
        "version: 1\npasses:\n  - lift_mlp: {fast: yes}\n",
        "p.yaml:3: 'fast': expected true or false, found 'yes' (text)",
    ),
    "a boolean is no number": ("version: 1\nparallel: {tp: true}\n", "p.yaml:2: 'tp': expected an integer, found true"),
    "none of the choices": (
        "version: 1\npasses:\n  - lift_mlp: {mode: modle}\n",
        "p.yaml:3: 'mode': expected one of 'fewest', 'model', found 'modle' (text)",
    ),
    "wrong entry of a list": (
        "version: 1\npasses:\n  - lift_mlp:\n      sizes:\n        - 1\n        - x\n",
        "p.yaml:6: 'sizes[1]': expected an integer, found 'x' (text)",
    ),
    "post-init of the pass": (
        "version: 1\npasses:\n  - lift_mlp: {eps: -1}\n",
        "p.yaml:3: the pass 'lift_mlp': eps is negative",
    ),
    "needed option": ("version: 1\npasses:\n  - needs\n", "p.yaml:3: the pass 'needs' needs the option 'multiple'"),
    "no ranks": ("version: 1\nparallel: {tp: 0}\n", "p.yaml:2: 'parallel': tp is 0; it must be from 1 to 1024"),
    "unknown key in a section": (
        "version: 1\nverify:\n  region: true\n",
        "p.yaml:3: unknown key 'region' in 'verify'\n  remedy: did you mean 'regions'?",
    ),
    "section as scalar": ("version: 1\nverify: true\n", "p.yaml:2: 'verify': expected a mapping, found true"),
    "unknown dump format": (
        "version: 1\ndump: {formats: [png]}\n",
        "p.yaml:2: 'formats[0]': expected one of 'txt', 'svg'",
    ),
    "dump of no pass": (
        "version: 1\npasses: [lift_mlp]\ndump: {passes: [lift_mpl]}\n",
        "p.yaml:3: 'dump': no pass 'lift_mpl' in this pipeline\n  remedy: did you mean 'lift_mlp'?",
    ),
    "finalise": ("version: 1\nfinalise: indcutor\n", "p.yaml:2: 'finalise': expected one of 'inductor', 'eager'"),
    "setting of inductor": (
        "version: 1\ninductor: {cudagraphs: true}\n",
        "p.yaml:2: unknown key 'cudagraphs' in 'inductor'\n  remedy: did you mean 'cuda_graphs'?",
    ),
    "passes as mapping": (
        "version: 1\npasses: {lift_mlp: {}}\n",
        "p.yaml:2: 'passes': expected a list, found a mapping",
    ),
    "pass as number": ("version: 1\npasses: [3]\n", "p.yaml:2: a pass is a name or a mapping with one name, found 3"),
    "two names in one entry": (
        "version: 1\npasses: [{lift_mlp: , needs: }]\n",
        "a mapping with one name, found a mapping",
    ),
    "options as number": (
        "version: 1\npasses: [lift_mlp: 3]\n",
        "p.yaml:2: 'lift_mlp': expected options or 'off', found 3",
    ),
    "pass twice": (
        "version: 1\npasses:\n  - lift_mlp\n  - lift_mlp\n",
        "p.yaml:4: the pass 'lift_mlp' stands twice\n  remedy: merge it with p.yaml:3",
    ),
    "off without a base": (
        "version: 1\npasses: [lift_mlp: off]\n",
        "p.yaml:2: 'lift_mlp: off', but no pipeline before has it",
    ),
    "before nothing": (
        "version: 1\npasses:\n  - lift_mlp: {before: select}\n",
        "p.yaml:3: 'lift_mlp': no pass 'select' to stand before",
    ),
    "before and after": (
        "version: 1\npasses:\n  - needs: {multiple: 1}\n  - lift_mlp: {before: needs, after: needs}\n",
        "p.yaml:4: 'lift_mlp' has both 'before' and 'after'",
    ),
    "expect without comparison": (
        "version: 1\npasses:\n  - lift_mlp: {expect: '3'}\n",
        "p.yaml:3: '3' does not speak of the matches\n  remedy: begin with a comparison, as in '>= 1'",
    ),
    "expect as number": (
        "version: 1\npasses:\n  - lift_mlp: {expect: 3}\n",
        "p.yaml:3: 'expect': expected text or null, found 3",
    ),
    "when calls a function": (
        'version: 1\npasses:\n  - lift_mlp: {when: \'__import__("os").system("x")\'}\n',
        "p.yaml:3: Call is not allowed in",
    ),
    "duplicate key": (
        "version: 1\ntarget: cpu\ntarget: auto\n",
        "p.yaml:3: the key 'target' stands twice\n  remedy: see also p.yaml:2",
    ),
    "not YAML": ("version: 1\npasses: [a\n", "p.yaml:3: not readable as YAML"),
    "a tag": (
        "version: 1\ntarget: !!python/object/apply:os.system ['x']\n",
        "p.yaml:2: not readable as YAML: the tag tag:yaml.org,2002:python/object/apply:os.system is not read",
    ),
    "an alias": ("version: &v 1\ntarget: *v\n", "p.yaml:1: not readable as YAML: anchors and aliases are not read"),
    "two documents": ("version: 1\n---\nversion: 1\n", "p.yaml:2: not readable as YAML"),
    "deep nesting": ("version: 1\npasses: " + "[" * 5000, "p.yaml:2: not readable as YAML: nested too deeply"),
    "no UTF-8": (b"version: 1\n# \xff\n", "p.yaml: not UTF-8 text (byte 13)"),
    "a control character": (b"version: 1\n# \x00\n", "p.yaml: not readable as YAML"),
    "huge": (b"#" * (2 << 20), "p.yaml: larger than 1048576 bytes"),
    "extends nothing": ("version: 1\nextends: bas\n", "p.yaml:2: no pipeline 'bas'\n  remedy: did you mean 'base'?"),
    "extends no file": ("version: 1\nextends: sub/x.yaml\n", "p.yaml:2: no file 'sub/x.yaml'"),
    "extends a number": ("version: 1\nextends: 3\n", "p.yaml:2: 'extends': expected the name or file of one pipeline"),
    "extends itself": ("version: 1\nextends: p.yaml\n", "p.yaml:2: 'extends' goes in a circle: p.yaml -> p.yaml"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(tmp_path: Path, case: str) -> None:
    text, message = CASES[case]
    assert message in error_of(tmp_path, text)


def test_all_problems_in_one_error(tmp_path: Path) -> None:
    text = "version: 1\ntaget: cpu\nparallel: {tp: 1.5}\npasses:\n  - nothing\n  - lift_mlp: {eps: x, when: tp >}\n"
    message = error_of(tmp_path, text)
    assert message.startswith("p.yaml: 5 problems:")
    assert [line.split(": ")[0].strip() for line in message.splitlines()[1:-1]] == [
        f"p.yaml:{n}" for n in (2, 3, 5, 6, 6)
    ]


def test_problems_of_parent_and_child_in_one_error(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("version: 1\npasses: [nothing]\n")
    message = error_of(tmp_path, "version: 1\nextends: parent.yaml\npasses: [lift_mlp: {esp: 1}]\n")
    assert "p.yaml:3: the pass 'lift_mlp' has no option 'esp'" in message
    assert "parent.yaml:2: unknown pass 'nothing'" in message


def test_circle_over_two_files(tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text("version: 1\nextends: p.yaml\n")
    assert "circle: p.yaml -> q.yaml -> p.yaml" in error_of(tmp_path, "version: 1\nextends: q.yaml\n")


def test_parent_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text("{")
    assert "q.yaml:1: not readable as YAML" in error_of(tmp_path, "version: 1\nextends: q.yaml\n")


def test_a_folder_is_not_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_pipeline(tmp_path / "d.yaml", known_passes=KNOWN)


def test_unknown_shipped_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline("kimi-k3-decod", known_passes=KNOWN)
    assert "no pipeline 'kimi-k3-decod'\n  remedy: did you mean 'kimi-k3-decode'?" in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file '.*none\.yaml'"):
        load_pipeline(tmp_path / "none.yaml", known_passes=KNOWN)


def test_unknown_name_in_a_condition(tmp_path: Path) -> None:
    text = "version: 1\npasses:\n  - lift_mlp: {expect: '== n_layer', when: tpp > 1}\n"
    message = error_of(tmp_path, text, known_names=("tp", "n_layers"))
    assert "p.yaml:3: unknown name 'n_layer' in '== n_layer' (did you mean 'n_layers'?)" in message
    assert "p.yaml:3: unknown name 'tpp' in 'tpp > 1' (did you mean 'tp'?)" in message


def test_mapping_errors_name_the_path() -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline({"version": 1, "passes": [{"lift_mlp": {"eps": "x"}}]}, known_passes=KNOWN)
    assert "pipeline.passes[0].lift_mlp.eps: 'eps': expected a number, found 'x' (text)" in str(caught.value)
    with pytest.raises(ConfigError, match=r"pipeline: the key 3 is not text"):
        load_pipeline({3: 1}, known_passes=KNOWN)  # type: ignore[dict-item]


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("version: 1\n-[]{}&*!|>'\"#%@`apse,~?\t"), max_size=60) | st.binary(max_size=40))
def test_any_text_gives_a_pipeline_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "p.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        config = load_pipeline(path, known_passes=KNOWN)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert config.version == 1
