"""The layers of a pipeline's YAML files merged into one pipeline.

    base.yaml:   passes: [canonicalise, lift_mlp, select]
    mine.yaml:   extends: base.yaml
                 passes:
                   - lift_mlp: {expect: "== n_layers"}     # known: keeps its place, settings are merged key by key
                   - select: off                           # known: taken out
                   - my_pass: {before: lift_mlp}           # new: where `before` or `after` says, else at the end

One file is read in `layer.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from k3rewrite.errors import K3RewriteError, did_you_mean
from k3rewrite.pipeline.expressions import EXPECT_NAMES, parse_expect, parse_when
from k3rewrite.pipeline.layer import SECTIONS, Entry, Layer, Problems, option_hints
from k3rewrite.pipeline.settings import OnMiss, PassConfig, PipelineConfig


def merge(layers: list[Layer], known_passes: Mapping[str, type], problems: Problems) -> PipelineConfig:
    """One pipeline from its layers, the base first. Later layers win, key by key."""
    plain: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {key: {} for key in SECTIONS}
    places: dict[str, str] = {}
    order: list[Entry] = []
    moves: dict[str, str] = {}
    for layer in layers:
        plain.update(layer.plain)
        places.update(layer.places)
        for key, given in layer.sections.items():
            sections[key].update(given)
        placed = [entry for entry in layer.entries if _merge_entry(order, entry, moves, problems)]
        _check_places(order, placed, problems)
    settings: dict[str, Any] = {}
    for key, cls in SECTIONS.items():
        try:
            settings[key] = cls(**sections[key])
        except ValueError as error:
            problems.add(f"'{key}': {error}", places[key], "correct the value")
    on_miss = plain.get("on_miss", "reference")
    passes = tuple(_pass_config(entry, known_passes[entry.name], on_miss, problems) for entry in order)
    dumped = settings["dump"].passes if "dump" in settings else "all"
    for name in () if dumped == "all" else dumped:
        if name not in {p.name for p in passes}:
            problems.add(
                f"'dump': no pass '{name}' in this pipeline",
                places["dump"],
                did_you_mean(name, [p.name for p in passes]),
            )
    return PipelineConfig(passes=passes, moves=moves, **plain, **settings)


def _merge_entry(order: list[Entry], entry: Entry, moves: dict[str, str], problems: Problems) -> bool:
    """Put an entry into the order, or take it out, and note in `moves` where that is said; False if the place that it
    names is none."""
    names = [known.name for known in order]
    at = names.index(entry.name) if entry.name in names else None
    if entry.off:
        if at is None:
            problems.add(
                f"'{entry.name}: off', but no pipeline before has it", entry.place, did_you_mean(entry.name, names)
            )
        else:
            del order[at]
            _note_move(moves, entry.name, entry.place)
        return True
    anchor = entry.settings.get("before") or entry.settings.get("after")
    if at is not None:
        known = order[at]
        inherited = {k: v for k, v in known.settings.items() if anchor is None or k not in ("before", "after")}
        entry = Entry(entry.name, entry.place, {**inherited, **entry.settings}, {**known.places, **entry.places})
        if anchor is None:
            order[at] = entry
            return True
        del order[at], names[at]
    if anchor is not None:
        _note_move(moves, entry.name, entry.places["before" if "before" in entry.settings else "after"])
    elif entry.name in moves:  # taken out before, and now at the end
        _note_move(moves, entry.name, entry.place)
    if anchor is None:
        order.append(entry)
    elif anchor in names:
        order.insert(names.index(anchor) + ("after" in entry.settings), entry)
    else:
        key = "before" if "before" in entry.settings else "after"
        problems.add(
            f"'{entry.name}': no pass '{anchor}' to stand {key}", entry.places[key], did_you_mean(anchor, names)
        )
        order.append(entry)
        return False
    return True


def _note_move(moves: dict[str, str], name: str, place: str) -> None:
    """The latest move stands last."""
    moves.pop(name, None)
    moves[name] = place


def _check_places(order: list[Entry], entries: Iterable[Entry], problems: Problems) -> None:
    """Report what a layer itself moves away again from where it was put: each before the other, say."""
    names = [known.name for known in order]
    for entry in entries:
        key = "before" if "before" in entry.settings else "after"
        anchor = entry.settings.get(key)
        if anchor not in names or entry.name not in names or anchor == entry.name:
            continue
        if (names.index(entry.name) < names.index(anchor)) != (key == "before"):
            problems.add(
                f"'{entry.name}' is to stand {key} '{anchor}', which another entry of this file undoes",
                entry.places[key],
                f"take one of the two out: they end up as {', '.join(n for n in names if n in (entry.name, anchor))}",
            )


def _pass_config(entry: Entry, pass_class: type, on_miss: OnMiss, problems: Problems) -> PassConfig:
    hints = option_hints(pass_class)
    options = {key: value for key, value in entry.settings.items() if key in hints}
    missing = [
        f.name
        for f in dataclasses.fields(pass_class)
        if f.init and f.name not in options and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        problems.add(f"the pass '{entry.name}' needs the option '{missing[0]}'", entry.place, "give it a value")
    else:
        try:
            pass_class(**options)
        except ValueError as error:
            problems.add(f"the pass '{entry.name}': {error}", entry.place, "correct its options")
        except K3RewriteError as error:
            problems.add(
                f"the pass '{entry.name}': {error.message}", entry.place, error.remedy or "correct its options"
            )
    return PassConfig(
        name=entry.name,
        options=options,
        expect=entry.settings.get("expect"),
        when=entry.settings.get("when"),
        on_miss=entry.settings.get("on_miss", on_miss),
        place=entry.place,
    )


def check_names(config: PipelineConfig, known: Iterable[str], problems: Problems) -> None:
    """Report every name in `expect` and `when` that no run defines."""
    names = frozenset(known)
    for entry in config.passes:
        with problems.catch():
            if entry.when is not None:
                parse_when(entry.when, entry.place).check_names(names)
        with problems.catch():
            if entry.expect is not None:
                parse_expect(entry.expect, entry.place).check_names(names | {*EXPECT_NAMES})
