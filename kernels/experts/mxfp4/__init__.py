"""The CUDA kernels for MXFP4 weights on integer matrix units: `choose.py` says which calls get which."""
