"""How much LDS a workgroup gets, and how many workgroups one compute unit holds with it.

    use = lds_use(load_target("mi355x"), 81_408)        a kernel asks for 79.5 KiB
    use.allocated, use.workgroups_per_cu                81,920 (64 units of 1,280 bytes) and 2, of 163,840
    most_lds(load_target("mi355x"), workgroups=2)       81,920: what a kernel may ask for, if two are to fit

Only LDS is looked at; `k3rewrite.emit.occupancy` has what else bounds the workgroups of a CU.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3rewrite.errors import ConfigError
from k3rewrite.targets.target import Target


@dataclass(frozen=True)
class LdsUse:
    """Bytes of one workgroup as asked for and as allocated, with what the system reserves; workgroups that a CU holds;
    bytes of the CU that nobody has then."""

    asked: int
    allocated: int
    workgroups_per_cu: int
    unused: int


def lds_use(target: Target, asked: int) -> LdsUse:
    """What a request of `asked` bytes comes to. ConfigError for one that the target cannot serve, or that is none.

    Without a request a workgroup has only what the system reserves. Where that is nothing the waves alone bound it.
    """
    _demand_lds(target)
    if asked < 0:
        raise ConfigError(f"{asked:,} bytes of LDS are asked for", place=_place(target), remedy="ask for 0 or more")
    if asked > target.lds_bytes_per_workgroup:
        raise ConfigError(
            f"{asked:,} bytes of LDS are asked for, and a workgroup can have {target.lds_bytes_per_workgroup:,}",
            place=_place(target),
            remedy="take smaller tiles, or share storage between tiles that are not needed at the same time",
        )
    allocated = target.allocated_lds(asked)
    workgroups = target.lds_bytes_per_cu // allocated if allocated else target.max_waves_per_cu
    return LdsUse(asked, allocated, workgroups, target.lds_bytes_per_cu - workgroups * allocated)


def most_lds(target: Target, workgroups: int) -> int:
    """The largest request with which a CU holds so many workgroups. ConfigError if there is none."""
    _demand_lds(target)
    if workgroups < 1:
        raise ConfigError(f"{workgroups} workgroups a CU", place=_place(target), remedy="ask for 1 or more")
    share = target.lds_bytes_per_cu // workgroups - target.lds_reserved_per_workgroup
    if share < 0:
        raise ConfigError(
            f"{workgroups} workgroups do not fit: the system takes {target.lds_reserved_per_workgroup:,} bytes of LDS "
            f"for each, and a CU has {target.lds_bytes_per_cu:,}",
            place=_place(target),
            remedy="ask for fewer workgroups",
        )
    return min(target.lds_bytes_per_workgroup, share // target.lds_granularity * target.lds_granularity)


def _demand_lds(target: Target) -> None:
    if not target.is_gpu:
        raise ConfigError("there is no LDS", place=_place(target), remedy="name a GPU: mi355x, mi325x, h200 or b200")


def _place(target: Target) -> str:
    return f"target {target.name}"
