"""Counting instructions in emitted assembly (AMD .s, NVIDIA .ptx): what tests assert about a kernel's shape.

    summary = summarise_assembly(text)
    summary.wide_loads        global_load_dwordx4 / ld.global.v4.b32: 16 bytes a lane
    summary.lane_exchanges    DPP, ds_swizzle, ds_bpermute, v_permlane*_swap / shfl.sync
    summary.scratch_accesses  must be 0 in a kernel that spills nothing

`summarise_assembly` counts what stands in the text: an instruction inside a loop counts once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class AssemblySummary:
    """Instructions of one assembly text, by what they do. Global accesses are vector accesses, not scalar ones."""

    global_loads: int
    wide_loads: int
    """16 bytes or more a lane"""
    global_stores: int
    wide_stores: int
    dpp: int
    """AMD: moves within a row of 16 lanes, in registers"""
    permlane_swaps: int
    """gfx950: exchanges between halves of a wave, in registers"""
    lds_permutes: int
    """AMD: ds_swizzle, ds_permute and ds_bpermute, through the LDS crossbar but not its memory"""
    shuffles: int
    """NVIDIA: shfl.sync of any mode"""
    butterfly_shuffles: int
    """NVIDIA: shfl.sync.bfly"""
    barriers: int
    lds_accesses: int
    scratch_accesses: int
    matrix_instructions: int
    """v_mfma / mma.sync, wgmma, tcgen05.mma"""

    @property
    def lane_exchanges(self) -> int:
        return self.dpp + self.permlane_swaps + self.lds_permutes + self.shuffles


_AMD = {
    "global_loads": r"^(global|flat|buffer)_load_",
    "wide_loads": r"^(global|flat|buffer)_load_dwordx4\b",
    "global_stores": r"^(global|flat|buffer)_store_",
    "wide_stores": r"^(global|flat|buffer)_store_dwordx4\b",
    "dpp": r"^v_\S+.*\b(quad_perm|row_\w+|wave_\w+)\b",
    "permlane_swaps": r"^v_permlane\d+_swap",
    "lds_permutes": r"^ds_(swizzle|permute|bpermute)_",
    "barriers": r"^s_barrier\b",
    "lds_accesses": r"^ds_(read|write|load|store)",
    "scratch_accesses": r"^scratch_(load|store)",
    "matrix_instructions": r"^v_s?mfma",
}
_WIDE_PTX = r"(v4\.\w*32|v2\.\w*64|v8\.\w*|v4\.\w*64|b128)\b"
_PTX = {
    "global_loads": r"^ld\.(\w+\.)*?global\b|^ld\.global",
    "wide_loads": rf"^ld\.(\S+\.)?global\.(\S+\.)?{_WIDE_PTX}",
    "global_stores": r"^st\.(\w+\.)*?global\b|^st\.global",
    "wide_stores": rf"^st\.(\S+\.)?global\.(\S+\.)?{_WIDE_PTX}",
    "shuffles": r"^shfl\.sync\.",
    "butterfly_shuffles": r"^shfl\.sync\.bfly\.",
    "barriers": r"^(bar|barrier)\.(cta\.)?(sync|red|arrive)",
    "lds_accesses": r"^(ld|st|atom|red)\.(\w+\.)*shared\b",
    "scratch_accesses": r"^(ld|st)\.(\w+\.)*local\b",
    "matrix_instructions": r"^(mma\.sync|wgmma\.mma_async|tcgen05\.mma)",
}


def instructions(text: str) -> list[str]:
    """The instructions of an assembly text: no labels, directives, comments, predicates or braces."""
    found = []
    for line in text.splitlines():
        line = re.sub(r"(//|;(?=\s)).*$", "", line).strip()
        line = re.sub(r"^@!?%\w+\s+", "", line)
        if line and not line.startswith((".", "#", "{", "}", "(", ")", "$")) and not line.endswith(":"):
            found.append(line)
    return found


def summarise_assembly(text: str) -> AssemblySummary:
    """Counts for an AMD assembly or a PTX text; which of the two it is, the text says."""
    lines = instructions(text)
    patterns = _AMD if ".amdgcn_target" in text else _PTX
    compiled = {name: re.compile(pattern) for name, pattern in patterns.items()}
    counts = {name: sum(1 for line in lines if pattern.search(line)) for name, pattern in compiled.items()}
    return AssemblySummary(**{name: counts.get(name, 0) for name in AssemblySummary.__dataclass_fields__})
