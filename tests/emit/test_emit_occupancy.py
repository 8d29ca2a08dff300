"""Occupancy arithmetic against figures worked out by hand and against rules that always hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rewrite.emit import Occupancy, occupancy
from k3rewrite.targets import load_target

KIB = 1024
GPUS = ("mi355x", "mi325x", "h200", "b200")


@pytest.mark.parametrize(
    ("target", "threads", "registers", "scalars", "lds", "expected"),
    [
        # waves: 4 SIMDs x 8 waves, 4 waves a workgroup
        ("mi355x", 256, 32, 32, 0, Occupancy(8, 32, 8.0, "waves")),
        # 512 registers // 128 = 4 waves a SIMD; 129 round up to 136, and 3 remain
        ("mi355x", 256, 128, 32, 0, Occupancy(4, 16, 4.0, "registers")),
        ("mi355x", 256, 129, 32, 0, Occupancy(3, 12, 3.0, "registers")),
        ("mi325x", 256, 512, 32, 0, Occupancy(1, 4, 1.0, "registers")),
        # 800 scalar registers // 112 = 7 waves a SIMD
        ("mi325x", 64, 16, 102, 0, Occupancy(28, 28, 7.0, "scalars")),
        # single-wave workgroups need no barrier: 32 of them, not 16
        ("mi355x", 64, 16, 16, 0, Occupancy(32, 32, 8.0, "waves")),
        ("mi355x", 128, 16, 16, 0, Occupancy(16, 32, 8.0, "waves")),
        # 79.5 KiB take 80 of 160; 81.25 KiB are whole units, and two of them are 2.5 KiB too many
        ("mi355x", 256, 64, 32, 79 * KIB + 512, Occupancy(2, 8, 2.0, "lds")),
        ("mi355x", 256, 64, 32, 81 * KIB + 256, Occupancy(1, 4, 1.0, "lds")),
        ("mi325x", 256, 64, 32, 32 * KIB, Occupancy(2, 8, 2.0, "lds")),
        ("mi325x", 256, 64, 32, 32 * KIB + 1, Occupancy(1, 4, 1.0, "lds")),
        # CUDA's occupancy calculator for compute capability 9.0
        ("h200", 256, 32, 0, 0, Occupancy(8, 64, 16.0, "waves")),
        ("h200", 256, 64, 0, 0, Occupancy(4, 32, 8.0, "registers")),
        ("h200", 128, 255, 0, 0, Occupancy(2, 8, 2.0, "registers")),
        ("h200", 32, 16, 0, 0, Occupancy(32, 32, 8.0, "workgroups")),
        ("h200", 128, 32, 0, 113 * KIB, Occupancy(2, 8, 2.0, "lds")),
        ("b200", 128, 32, 0, 227 * KIB, Occupancy(1, 4, 1.0, "lds")),
    ],
)
def test_worked_out_by_hand(
    target: str, threads: int, registers: int, scalars: int, lds: int, expected: Occupancy
) -> None:
    found = occupancy(load_target(target), threads=threads, registers=registers, scalars=scalars, lds_bytes=lds)
    assert found == expected


@pytest.mark.parametrize(
    ("target", "threads", "registers", "lds"),
    [
        ("mi355x", 2048, 16, 0),
        ("mi325x", 256, 32, 64 * KIB + 1),
        ("h200", 128, 256, 0),
        ("mi355x", 1024, 136, 0),  # 16 waves of 3 a SIMD do not fit 4 SIMDs
        ("h200", 128, 32, 227 * KIB + 1),
    ],
)
def test_what_cannot_be_launched(target: str, threads: int, registers: int, lds: int) -> None:
    found = occupancy(load_target(target), threads=threads, registers=registers, scalars=16, lds_bytes=lds)
    assert found.workgroups_per_cu == found.waves_per_cu == 0


@given(
    name=st.sampled_from(GPUS),
    threads=st.integers(1, 1024),
    registers=st.integers(1, 250),
    lds=st.integers(0, 64 * KIB),
    more=st.integers(0, 200),
)
def test_never_more_than_the_hardware_and_never_more_for_needing_more(
    name: str, threads: int, registers: int, lds: int, more: int
) -> None:
    target = load_target(name)
    found = occupancy(target, threads=threads, registers=registers, scalars=32, lds_bytes=lds)
    waves = -(-threads // target.wave_size)
    assert found.waves_per_cu == found.workgroups_per_cu * waves <= target.max_waves_per_cu
    assert found.workgroups_per_cu * target.allocated_lds(lds) <= target.lds_bytes_per_cu
    assert found.waves_per_cu * registers <= target.registers_per_simd * target.simds_per_cu
    for changed in ({"registers": registers + more}, {"lds_bytes": lds + more}, {"threads": min(threads + more, 1024)}):
        needs = {"threads": threads, "registers": registers, "scalars": 32, "lds_bytes": lds, **changed}
        assert occupancy(target, **needs).workgroups_per_cu <= found.workgroups_per_cu
