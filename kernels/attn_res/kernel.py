"""The kernels of `k3::attn_res`: those of the fused ops (`kernels/attn_res_norm`), compiled without an output norm."""

from k3rewrite.kernels.attn_res.op import ATTN_RES
from k3rewrite.kernels.attn_res_norm import launch
from k3rewrite.kernels.attn_res_norm.kernel import kernels_of

KERNELS = kernels_of(ATTN_RES, launch.attn_res)
