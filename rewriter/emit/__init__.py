"""Emission: real source, real objects, for a GPU that is not there.

    emitted = emit_unit(unit, load_target("mi355x"), folder, "attn_res_norm", Provenance(...))
    emitted.name              attn_res_norm_1f0c...      operation and content hash
    emitted.assembly          <folder>/attn_res_norm_1f0c....s
    emitted.object            <folder>/attn_res_norm_1f0c....hsaco
    emitted.resources         registers, spills, LDS, occupancy, read from the object

`emission.py` emits the kernels of a graph, `unit.py` one of them; `triton_compiler.py`, `clang_compiler.py` and
`cuda_compiler.py` do the work; `resources.py` reads the objects; `manifest.py` records a folder of kernels;
`assembly.py` counts instructions; `launch.py` runs a HIP object on the device of this machine.
"""

from k3rewrite.emit.assembly import AssemblySummary, summarise_assembly
from k3rewrite.emit.manifest import ManifestEntry, read_manifest, write_manifest
from k3rewrite.emit.occupancy import Occupancy, occupancy
from k3rewrite.emit.resources import Resources, read_resources
from k3rewrite.emit.source import unit_source, unit_source_hash
from k3rewrite.emit.unit import EmittedKernel, Provenance, emit_unit, unit_name

__all__ = [
    "AssemblySummary",
    "EmittedKernel",
    "ManifestEntry",
    "Occupancy",
    "Provenance",
    "Resources",
    "emit_unit",
    "occupancy",
    "read_manifest",
    "read_resources",
    "summarise_assembly",
    "unit_name",
    "unit_source",
    "unit_source_hash",
    "write_manifest",
]
