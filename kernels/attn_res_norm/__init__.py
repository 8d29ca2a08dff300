"""`k3::attn_res_norm`, `k3::add_attn_res_norm` and `k3::write_attn_res_norm`.

op.py         meaning, schemas, shapes, costs
triton.py     the Triton kernels          hip/      the HIP C++ kernel
schedule.py   which layout a number of rows gets
launch.py     running them on tensors     hip_kernel.py
accept.py     what they do not take       kernel.py their descriptions for `select` and the emitter
"""

from k3rewrite.kernels.attn_res_norm import launch
from k3rewrite.kernels.attn_res_norm.kernel import kernels_of
from k3rewrite.kernels.attn_res_norm.op import ADD_ATTN_RES_NORM, ATTN_RES_NORM, OPS, WRITE_ATTN_RES_NORM

KERNELS = (
    *kernels_of(ATTN_RES_NORM, launch.attn_res_norm),
    *kernels_of(ADD_ATTN_RES_NORM, launch.add_attn_res_norm),
    *kernels_of(WRITE_ATTN_RES_NORM, launch.write_attn_res_norm),
)

__all__ = ["KERNELS", "OPS"]
