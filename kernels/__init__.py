"""The vocabulary's ops and their kernels, one folder an op: meaning, schema and fake, cost, Triton, HIP.

Importing this package registers every op with the dispatcher, once. `OPS` maps names to ops; `KERNELS` are all
kernels, in the order in which `select` prefers them when their cost estimates are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from k3rewrite.kernels import (
    attn_res,
    attn_res_norm,
    conv_verify,
    experts,
    gated_rms_norm,
    kda_chunk,
    kda_decode,
    kda_step,
    kda_verify,
    kda_window,
    l2_norm,
    mla_attend,
    mlp,
    pack_rows,
    rms_norm,
    route,
    short_conv,
)
from k3rewrite.kernels.attn_res import kernel as attn_res_kernel
from k3rewrite.ops.kernel import Kernel
from k3rewrite.ops.vocabulary import Op

_FOLDERS = (
    rms_norm,
    gated_rms_norm,
    l2_norm,
    mlp,
    route,
    experts,
    short_conv,
    kda_step,
    kda_chunk,
    kda_decode,
    conv_verify,
    kda_window,
    kda_verify,
    mla_attend,
    attn_res,
    attn_res_norm,
    pack_rows,
)

OPS: Mapping[str, Op] = MappingProxyType({op.name: op.register() for folder in _FOLDERS for op in folder.OPS})
KERNELS: tuple[Kernel, ...] = (
    *attn_res_norm.KERNELS,
    *attn_res_kernel.KERNELS,
    *experts.KERNELS,
    *kda_chunk.KERNELS,
    *kda_decode.KERNELS,
    *kda_verify.KERNELS,
    *mla_attend.KERNELS,
)
