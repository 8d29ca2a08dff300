"""The shipped target descriptions, their arithmetic, and every way of getting a description wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from k3rewrite.errors import ConfigError
from k3rewrite.targets import Target, detect_target, known_targets, load_target
from k3rewrite.targets.detect import device_arch

KIB = 1024
GPUS = ("mi355x", "mi325x", "h200", "b200")


def written(folder: Path, **changes: object) -> Path:
    """A target file like mi355x with some fields changed (None removes one)."""
    content = {**dataclasses.asdict(load_target("mi355x")), **changes}
    path = folder / "mine.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in content.items() if value is not None}, sort_keys=False)
    )
    return path


def line_of(path: Path, key: str) -> int:
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(f"{key}:"))


def test_the_shipped_targets() -> None:
    assert known_targets() == ("b200", "cpu", "h200", "mi325x", "mi355x")
    archs = {name: load_target(name).arch for name in known_targets()}
    assert archs == {"b200": "sm_100", "cpu": "cpu", "h200": "sm_90", "mi325x": "gfx942", "mi355x": "gfx950"}
    assert all(load_target(name).name == name for name in known_targets())


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_has_a_source(name: str) -> None:
    target = load_target(name)
    words = {"name", "vendor", "arch", "description", "sources"}
    figures = {field.name for field in dataclasses.fields(Target) if getattr(target, field.name) != {}} - words
    assert figures == set(target.sources)


def test_figures_that_kernels_rest_on() -> None:
    mi355x, mi325x, h200, b200 = (load_target(name) for name in GPUS)
    assert (mi355x.compute_units, mi325x.compute_units, h200.compute_units, b200.compute_units) == (256, 304, 132, 148)
    assert (mi355x.wave_size, h200.wave_size) == (64, 32)
    assert (mi355x.max_waves_per_cu, h200.max_waves_per_cu) == (32, 64)
    # a vector register file of 512 KiB a CU on CDNA, of 256 KiB an SM on Hopper and Blackwell
    assert mi355x.registers_per_simd * mi355x.simds_per_cu * mi355x.wave_size * 4 == 512 * KIB
    assert h200.registers_per_simd * h200.simds_per_cu * h200.wave_size == 65536
    assert h200.lds_bytes_per_cu - h200.lds_reserved_per_workgroup == h200.lds_bytes_per_workgroup == 227 * KIB
    assert h200.read_bandwidth == h200.measured_bandwidth["read"] < h200.memory_bandwidth
    assert b200.read_bandwidth == b200.memory_bandwidth == 8.0e12


def test_lds_is_allocated_in_units() -> None:
    mi355x, mi325x, h200 = (load_target(name) for name in GPUS[:3])
    asked = 79 * KIB + 512
    assert mi355x.allocated_lds(asked) == 80 * KIB
    assert mi355x.lds_bytes_per_cu // mi355x.allocated_lds(asked) == 2
    assert mi355x.lds_bytes_per_cu // mi355x.allocated_lds(81 * KIB + 256) == 1
    assert mi325x.allocated_lds(1) == 512
    assert h200.allocated_lds(1) == 128 + 1024


@given(name=st.sampled_from(GPUS), asked=st.integers(0, 65536))
def test_allocated_lds_is_the_smallest_multiple_that_holds(name: str, asked: int) -> None:
    target = load_target(name)
    allocated = target.allocated_lds(asked) - target.lds_reserved_per_workgroup
    assert allocated % target.lds_granularity == 0
    assert 0 <= allocated - asked < target.lds_granularity


def test_a_target_is_a_value() -> None:
    assert load_target("h200") == load_target("h200")
    assert hash(load_target("h200")) == hash(load_target("h200"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_target("h200").wave_size = 64  # type: ignore[misc]


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="no target 'mi335x'; did you mean 'mi355x'") as caught:
        load_target("mi335x")
    assert caught.value.remedy is not None


def test_a_target_of_your_own(tmp_path: Path) -> None:
    target = load_target(written(tmp_path, name="mine", compute_units=128))
    assert target == dataclasses.replace(load_target("mi355x"), name="mine", compute_units=128)
    assert load_target(str(tmp_path / "mine.yaml")) == target


@pytest.mark.parametrize(
    ("changes", "at", "message"),
    [
        ({"wave_sise": 64}, "wave_sise", "no field 'wave_sise'; did you mean 'wave_size'"),
        ({"wave_size": "64"}, "wave_size", "wave_size: an integer is needed"),
        ({"wave_size": True}, "wave_size", "wave_size: an integer is needed"),
        ({"compute_units": 0}, "compute_units", "compute_units: must be greater than zero"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth", "memory_bandwidth: must be greater than zero"),
        ({"vendor": "intel"}, "vendor", "vendor"),
        ({"arch": " "}, "arch", "arch: must not be empty"),
        ({"lds_bytes_per_workgroup": 163841}, "lds_bytes_per_workgroup", "cannot have more than the 163840 bytes"),
        ({"max_registers_per_thread": 1024}, "max_registers_per_thread", "more than the 512 registers"),
        ({"measured_bandwidth": {"raed": 1.0}}, "raed", "no entry 'raed'; did you mean 'read'"),
        ({"head_multiples": {"mla_attend": "16"}}, "mla_attend", "head_multiples.mla_attend: an integer is needed"),
        ({"head_multiples": {"mla_attend": 0}}, "head_multiples", "'mla_attend' must be greater than zero"),
        ({"sources": {"wavesize": "a guess"}}, "wavesize", "no entry 'wavesize'; did you mean 'wave_size'"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, changes: dict[str, object], at: str, message: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(path)
    assert caught.value.place is not None
    file, line = caught.value.place.rsplit(":", 1)
    assert file == str(path)
    assert int(line) in (line_of(path, at), line_of(path, at) + 1)
    assert caught.value.remedy


def test_missing_fields_are_listed_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lacks wave_size, l2_bytes"):
        load_target(written(tmp_path, wave_size=None, l2_bytes=None))


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("- wave_size\n")
    with pytest.raises(ConfigError, match="mapping of fields"):
        load_target(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_target(tmp_path / "none.yaml")


def test_auto_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_target("auto") is load_target("cpu")


def pretend_device(monkeypatch: pytest.MonkeyPatch, hip: str | None, **properties: object) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    ("name", "hip", "properties"),
    [
        ("mi355x", "7.0", {"gcnArchName": "gfx950:sramecc+:xnack-"}),
        ("mi325x", "7.0", {"gcnArchName": "gfx942:sramecc+:xnack-"}),
        ("h200", None, {"major": 9, "minor": 0}),
        ("b200", None, {"major": 10, "minor": 0}),
    ],
)
def test_auto_reads_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, hip: str | None, properties: dict[str, object]
) -> None:
    pretend_device(monkeypatch, hip, **properties)
    assert detect_target().name == name


def test_auto_on_an_undescribed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch, None, major=8, minor=0, name="Some GPU")
    with pytest.raises(ConfigError, match=r"Some GPU \(sm_80\)") as caught:
        detect_target()
    assert "path of a target's YAML file" in str(caught.value.remedy)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_description_fits_this_device() -> None:
    target = detect_target()
    properties = torch.cuda.get_device_properties(0)
    assert device_arch(properties, rocm=torch.version.hip is not None) == target.arch
    assert properties.warp_size == target.wave_size
    assert properties.regs_per_multiprocessor == target.registers_per_simd * target.simds_per_cu * target.wave_size
    if target.vendor == "nvidia":
        assert properties.multi_processor_count == target.compute_units
        assert properties.shared_memory_per_block_optin == target.lds_bytes_per_workgroup
        assert properties.shared_memory_per_multiprocessor == target.lds_bytes_per_cu
        assert properties.max_threads_per_multi_processor == target.max_waves_per_cu * target.wave_size
        assert properties.L2_cache_size == target.l2_bytes
