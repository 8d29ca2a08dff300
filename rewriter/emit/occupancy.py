"""How many workgroups and waves of a kernel fit one compute unit at a time.

    waves       a CU holds `simds_per_cu * max_waves_per_simd` waves
    workgroups  a CU holds `max_workgroups_per_cu` workgroups (AMD: of more than one wave, which need a barrier)
    registers   a SIMD holds `registers_per_simd // rounded registers` waves
    scalars     the same with scalar registers (AMD)
    lds         a CU holds `lds_bytes_per_cu // rounded LDS` workgroups

The rules are those of LLVM's AMDGPU subtarget and of NVIDIA's occupancy calculator; the figures stand in the target.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3rewrite.targets.lds import lds_use
from k3rewrite.targets.target import Target


@dataclass(frozen=True)
class Occupancy:
    """Resident workgroups and waves of one CU, and what bounds them. 0 workgroups: the kernel cannot be launched."""

    workgroups_per_cu: int
    waves_per_cu: int
    waves_per_simd: float
    limited_by: str
    """waves, workgroups, registers, scalars or lds: the first of the tightest"""


def occupancy(target: Target, *, threads: int, registers: int, scalars: int, lds_bytes: int) -> Occupancy:
    """For workgroups of `threads`, with vector and scalar registers a thread (a wave) and LDS bytes as asked for."""
    waves = -(-threads // target.wave_size)
    needs_barrier = waves > 1 or target.vendor == "nvidia"
    limits = {
        "waves": target.max_waves_per_cu // waves if threads <= target.max_threads_per_workgroup else 0,
        "workgroups": target.max_workgroups_per_cu if needs_barrier else target.max_waves_per_cu,
        "registers": _by_registers(target, registers, waves),
        "scalars": _by_scalars(target, scalars, waves),
        "lds": _by_lds(target, lds_bytes),
    }
    limited_by = min(limits, key=lambda name: limits[name])
    workgroups = limits[limited_by]
    resident = workgroups * waves
    return Occupancy(workgroups, resident, resident / target.simds_per_cu, limited_by)


def _by_registers(target: Target, registers: int, waves: int) -> int:
    if registers > target.max_registers_per_thread:
        return 0
    waves_per_simd = target.registers_per_simd // _rounded(max(registers, 1), target.register_granularity)
    return min(waves_per_simd, target.max_waves_per_simd) * target.simds_per_cu // waves


def _by_scalars(target: Target, scalars: int, waves: int) -> int:
    if target.sgprs_per_simd == 0:
        return target.max_waves_per_cu // waves
    waves_per_simd = target.sgprs_per_simd // _rounded(max(scalars, 1), target.sgpr_granularity)
    return min(waves_per_simd, target.max_waves_per_simd) * target.simds_per_cu // waves


def _by_lds(target: Target, asked: int) -> int:
    return lds_use(target, asked).workgroups_per_cu if asked <= target.lds_bytes_per_workgroup else 0


def _rounded(value: int, granularity: int) -> int:
    return -(-value // granularity) * granularity
