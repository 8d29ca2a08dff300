"""LDS of a workgroup and workgroups of a CU: units of 1,280 bytes, reserves, requests nobody serves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rewrite.errors import ConfigError
from k3rewrite.targets import LdsUse, lds_use, load_target, most_lds

KIB = 1024
GPUS = ("mi355x", "mi325x", "h200", "b200")


def test_gfx950_allocates_in_units_of_1280_bytes() -> None:
    mi355x = load_target("mi355x")
    asked = 79 * KIB + 512
    assert lds_use(mi355x, asked) == LdsUse(asked, 80 * KIB, 2, 0)  # 79.5 KiB, two in 160 KiB
    assert lds_use(mi355x, 80 * KIB).workgroups_per_cu == 2
    assert lds_use(mi355x, 80 * KIB + 1) == LdsUse(80 * KIB + 1, 80 * KIB + 1280, 1, 80 * KIB - 1280)
    asked = 81 * KIB + 256
    assert lds_use(mi355x, asked) == LdsUse(asked, 65 * 1280, 1, 63 * 1280)  # 81.25 KiB are 65 units
    assert [most_lds(mi355x, n) for n in (1, 2, 3)] == [160 * KIB, 80 * KIB, 42 * 1280]


@pytest.mark.parametrize(
    ("target", "asked", "allocated", "workgroups"),
    [
        ("mi325x", 32 * KIB, 32 * KIB, 2),
        ("mi325x", 32 * KIB + 1, 32 * KIB + 512, 1),
        ("mi325x", 64 * KIB, 64 * KIB, 1),
        ("h200", 79 * KIB + 512, 80 * KIB + 512, 2),  # 1 KiB of a block is the system's
        ("h200", 75 * KIB, 76 * KIB, 3),
        ("h200", 75 * KIB + 1, 76 * KIB + 128, 2),
        ("h200", 0, KIB, 228),
        ("b200", 227 * KIB, 228 * KIB, 1),
    ],
)
def test_other_targets(target: str, asked: int, allocated: int, workgroups: int) -> None:
    use = lds_use(load_target(target), asked)
    assert (use.allocated, use.workgroups_per_cu) == (allocated, workgroups)


def test_without_a_request_the_waves_of_a_cdna_cu_are_the_bound() -> None:
    assert lds_use(load_target("mi355x"), 0) == LdsUse(0, 0, 32, 160 * KIB)


@given(st.sampled_from(GPUS), st.integers(1, 16))
def test_the_most_that_fits_fits_and_no_byte_more(name: str, workgroups: int) -> None:
    target = load_target(name)
    most = most_lds(target, workgroups)
    assert lds_use(target, most).workgroups_per_cu >= workgroups
    if most < target.lds_bytes_per_workgroup:
        assert lds_use(target, most + 1).workgroups_per_cu < workgroups


def test_requests_that_nobody_serves() -> None:
    with pytest.raises(ConfigError, match=r"target mi325x: 81,408 bytes .* a workgroup can have 65,536\n.*smaller"):
        lds_use(load_target("mi325x"), 81408)
    with pytest.raises(ConfigError, match="-1 bytes"):
        lds_use(load_target("h200"), -1)
    with pytest.raises(ConfigError, match="target cpu: there is no LDS"):
        lds_use(load_target("cpu"), 64)
    with pytest.raises(ConfigError, match="target cpu: there is no LDS"):
        most_lds(load_target("cpu"), 2)
    with pytest.raises(ConfigError, match="300 workgroups do not fit: the system takes 1,024"):
        most_lds(load_target("h200"), 300)
    with pytest.raises(ConfigError, match="0 workgroups"):
        most_lds(load_target("mi355x"), 0)
