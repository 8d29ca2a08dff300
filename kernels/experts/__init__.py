"""`k3::experts`: the routed experts of a mixture.

op.py              meaning, schema, shape, cost       formats.py     dense, MXFP4 and MXFP8 weights
schedule.py        which path and tiles a number of tokens gets
triton_decode.py   few tokens: outputs are owned      triton_shared.py   one read for the routes of an expert
triton_sorted.py   many tokens: the expert-centric path
hip_kernel.py      few tokens in HIP C++ (hip/)       mxfp4/choose.py       few tokens, MXFP4, NVIDIA
hip_call.py        what the two share: how many tokens are few, and handing the others over
plan.py            a call as a list of launches       launch.py      running them on tensors
paths.py           which path serves which number of tokens, in words
accept.py          what they do not take              kernel.py      their description for `select` and the emitter
"""

from k3rewrite.kernels.experts.kernel import KERNELS
from k3rewrite.kernels.experts.op import OPS

__all__ = ["KERNELS", "OPS"]
