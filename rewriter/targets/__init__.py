"""Targets: what a GPU is, as data.

    load_target("mi355x")        the shipped description of AMD Instinct MI355X (gfx950)
    load_target("my_gpu.yaml")   a description of your own
    load_target("auto")          the device of this machine, `cpu` where there is none

The shipped files stand in `pass_configs/targets/`; `k3rewrite.targets.target` says what each figure means.
"""

from k3rewrite.targets.detect import detect_target, machine_arch
from k3rewrite.targets.lds import LdsUse, lds_use, most_lds
from k3rewrite.targets.load import known_targets, load_target
from k3rewrite.targets.target import Target

__all__ = [
    "LdsUse",
    "Target",
    "detect_target",
    "known_targets",
    "lds_use",
    "load_target",
    "machine_arch",
    "most_lds",
]
