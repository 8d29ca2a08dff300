"""The description of one target: the figures that choosing, emitting and judging a kernel needs.

AMD's words are used for both vendors; NVIDIA's are:

    compute unit (CU)   streaming multiprocessor (SM)
    SIMD                one of the four schedulers of an SM, with its quarter of the register file
    wave                warp
    workgroup           thread block
    LDS                 shared memory
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Target:
    """One GPU model (or the CPU). Sizes are bytes, rates are bytes or operations a second; 0 means "has none"."""

    name: str
    vendor: Literal["amd", "nvidia", "cpu"]
    arch: str
    """the compiler's name: gfx950, sm_90, cpu"""
    description: str

    wave_size: int
    """lanes of a wave"""
    compute_units: int
    simds_per_cu: int
    max_waves_per_simd: int
    max_workgroups_per_cu: int
    """of more than one wave; a workgroup of one wave needs no barrier and is bounded by the waves alone"""
    max_threads_per_workgroup: int

    lds_bytes_per_cu: int
    lds_bytes_per_workgroup: int
    lds_granularity: int
    """a workgroup's LDS is rounded up to a multiple of this"""
    lds_reserved_per_workgroup: int
    """LDS that the system takes for each workgroup, beside what the kernel asks for"""

    registers_per_simd: int
    """32-bit vector registers that each lane position of a SIMD holds for all its resident waves together"""
    register_granularity: int
    """a wave's vector registers are rounded up to a multiple of this"""
    max_registers_per_thread: int
    sgprs_per_simd: int
    """scalar registers of a SIMD for all its resident waves together; 0 where they do not limit occupancy"""
    sgpr_granularity: int

    l2_bytes: int
    memory_bytes: int
    memory_bandwidth: float
    """the vendor's figure"""
    bf16_flops: float
    """the vendor's dense matrix rate for bfloat16"""
    measured_bandwidth: dict[str, float] = field(default_factory=dict, hash=False)
    """`read` and `copy` (bytes read + written) by a kernel, where this project has measured them"""
    head_multiples: dict[str, int] = field(default_factory=dict, hash=False)
    """op -> its kernels work on heads in multiples of this"""
    sources: dict[str, str] = field(default_factory=dict, hash=False)
    """field -> where its figure comes from"""

    @property
    def max_waves_per_cu(self) -> int:
        return self.simds_per_cu * self.max_waves_per_simd

    @property
    def read_bandwidth(self) -> float:
        """Bytes a second that a streaming read can reach: measured if known, else the vendor's figure."""
        return self.measured_bandwidth.get("read", self.memory_bandwidth)

    @property
    def is_gpu(self) -> bool:
        return self.vendor != "cpu"

    def allocated_lds(self, asked: int) -> int:
        """LDS bytes that a workgroup occupies when its kernel asks for `asked` bytes.

        gfx950: 79.5 KiB -> 80 KiB (1,280-byte units), so that two workgroups fit the 160 KiB of a CU.
        """
        if asked == 0:
            return self.lds_reserved_per_workgroup
        return -(-asked // self.lds_granularity) * self.lds_granularity + self.lds_reserved_per_workgroup
