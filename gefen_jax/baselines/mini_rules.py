"""Adam-mini's partition as data: rules that say, from a leaf's path and rank, which elements share a second moment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from gefen_jax.baselines.leafwise import check_pattern


class Rule(NamedTuple):
    """Which axes of a parameter keep second moments of their own.

    Attributes:
      pattern: regular expression searched in the leaf's path (``h_0/attn/query/kernel``), upper and lower case alike.
      layouts: one or more readings separated by ``|``, one for each rank, such as ``in head dim -> head``: left, names
        for the axes in order; right, the axes that keep their own second moment. The squared gradient is averaged
        over the others. ``in (head dim) -> head`` splits the second axis. ``...`` stands for any rank:
        ``... -> ...`` is Adam, ``... ->`` one second moment for the tensor.
    """

    pattern: str
    layouts: str


DEFAULT_RULES = (
    Rule(r"bias$", "... -> ..."),
    Rule(r"(^|[/_])(scale|gamma)$", "... ->"),
    Rule(r"embed(ding)?s?$", "token feature -> token | one token feature -> token"),
    Rule(r"(^|[/_])(q|k|query|key)(_proj)?/kernel$", "in (head head_dim) -> head | in head head_dim -> head"),
    Rule(
        r"(^|[/_])(qkv|c_attn)(_proj)?/kernel$",
        "in (qkv_head head_dim) -> qkv_head | in qkv head head_dim -> qkv head",
    ),
    Rule(r"(^|[/_])(v|value)(_proj)?/kernel$", "in out -> out | in head head_dim -> head head_dim"),
    Rule(r"(^|[/_])(o|out|proj)(_proj)?/kernel$", "in out -> out | head head_dim out -> out"),
    Rule(r"lora_[ab]$", "in out -> out"),
    Rule(r"conv[^/]*/kernel$", "window in out -> | height width in out -> | depth height width in out ->"),
    Rule(r"kernel$", "in out -> out | height width in out ->"),
)
"""For the names that Flax and common models give; the classes follow the original, version 1.1.1."""


class Sharing(NamedTuple):
    """How one leaf shares: reshape it to ``view``, average over ``reduced`` (keepdims), giving ``nu_shape``."""

    view: tuple[int, ...]
    reduced: tuple[int, ...]
    nu_shape: tuple[int, ...]


def check_rules(rules: tuple[Rule, ...]) -> None:
    """Raises `ValueError`, naming the rule, for a bad regular expression or layout."""
    for rule in rules:
        check_pattern("the pattern of the rule", rule.pattern)
        for layout in rule.layouts.split("|"):
            axes, kept = _parse(layout, rule)
            names = [name for axis in axes for name in axis]
            unknown = [name for name in kept if name not in names]
            if unknown or len(set(names)) != len(names) or ("..." in names and len(names) > 1):
                raise ValueError(
                    f"rule {rule.pattern!r}: in the layout {layout.strip()!r} every axis needs a name of its own, "
                    "the right side may only use names from the left, and '...' must stand alone"
                )


def sharing(
    path: str,
    shape: tuple[int, ...],
    rules: tuple[Rule, ...] = DEFAULT_RULES,
    sizes: Mapping[str, int] | None = None,
    scanned: str | None = None,
) -> Sharing:
    """How the leaf at ``path`` shares its second moments.

    Args:
      path: names joined by ``/``.
      shape: of the leaf.
      rules, sizes, scanned: see `scale_by_adam_mini`.

    Raises:
      ValueError: no rule, no layout for this rank, or an axis that cannot be split; names the leaf.

    Examples:
      >>> sharing("query/kernel", (768, 12, 64))
      Sharing(view=(768, 12, 64), reduced=(0, 2), nu_shape=(1, 12, 1))
      >>> sharing("query/kernel", (768, 768), sizes={"head_dim": 64})
      Sharing(view=(768, 12, 64), reduced=(0, 2), nu_shape=(1, 12, 1))
      >>> sharing("layers/mlp/kernel", (24, 768, 3072), scanned="layers").nu_shape
      (24, 1, 3072)
    """
    stacked = scanned is not None and re.search(scanned, path) is not None
    if stacked and not shape:
        raise ValueError(f"leaf {path!r} is a scalar, yet scanned={scanned!r} says that it has an axis of layers")
    layers, body = (shape[:1], shape[1:]) if stacked else ((), shape)
    view, kept = _view(path, body, _rule(path, body, rules), sizes or {})
    view = layers + view
    reduced = tuple(i for i in range(len(view)) if i - len(layers) not in kept and i >= len(layers))
    return Sharing(view, reduced, tuple(1 if i in reduced else n for i, n in enumerate(view)))


def _rule(path: str, shape: tuple[int, ...], rules: tuple[Rule, ...]) -> Rule:
    for rule in rules:
        if re.search(rule.pattern, path, re.IGNORECASE):
            return rule
    if len(shape) < 2:
        return Rule("", "... ->")  # the original's default; for matrices it trains badly, so there it is an error
    raise ValueError(
        f"leaf {path!r} of shape {shape} has no Adam-mini rule; add one before the defaults, such as "
        f'rules=(Rule(r"{re.escape(path)}$", "in out -> out"), *DEFAULT_RULES)'
    )


def _view(
    path: str, shape: tuple[int, ...], rule: Rule, sizes: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape with its axes split as the rule says, and the axes of it that keep their own second moment."""
    for layout in rule.layouts.split("|"):
        axes, kept = _parse(layout, rule)
        if axes == [["..."]]:
            return shape, tuple(range(len(shape))) if kept else ()
        if len(axes) == len(shape):
            view = [n for axis, length in zip(axes, shape) for n in _split(path, axis, length, rule, sizes)]
            names = [name for axis in axes for name in axis]
            return tuple(view), tuple(names.index(name) for name in kept)
    raise ValueError(
        f"leaf {path!r} of shape {shape}: its Adam-mini rule {rule.pattern!r} knows only {rule.layouts!r}; if the "
        "first axis stacks layers, say so with scanned=, otherwise add a rule before the defaults"
    )


def _split(path: str, axis: list[str], length: int, rule: Rule, sizes: Mapping[str, int]) -> list[int]:
    """Lengths of the named parts of one axis; at most one may be missing from ``sizes``."""
    if len(axis) == 1:
        return [length]
    missing = [name for name in axis if name not in sizes]
    if len(missing) > 1:
        raise ValueError(
            f"leaf {path!r}: its Adam-mini rule {rule.pattern!r} splits an axis of {length} into {' * '.join(axis)}; "
            f'give the length of one of them, such as sizes={{"{axis[-1]}": 64}}'
        )
    known = 1
    for name in axis:
        known *= sizes.get(name, 1)
    if known < 1 or length % known or (not missing and known != length):
        raise ValueError(
            f"leaf {path!r}: an axis of {length} cannot be split into {' * '.join(axis)} with sizes "
            f"{ {name: sizes[name] for name in axis if name in sizes} }"
        )
    return [sizes.get(name, length // known) for name in axis]


def _parse(layout: str, rule: Rule) -> tuple[list[list[str]], list[str]]:
    """Axes (each one or more names) and kept names of a layout."""
    left, arrow, right = layout.partition("->")
    tokens = re.findall(r"\([^()]*\)|[^\s()]+", left)
    if not arrow or "".join(tokens).replace(" ", "") != left.replace(" ", ""):
        raise ValueError(
            f"rule {rule.pattern!r}: cannot read the layout {layout.strip()!r}; expected axes -> kept axes, "
            "such as 'in (head head_dim) -> head'"
        )
    return [token.strip("()").split() for token in tokens], right.split()
