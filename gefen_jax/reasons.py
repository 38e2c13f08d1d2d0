"""Why a leaf has its structure: the words that `explain` shows and the state's ``format`` stores as numbers."""

from __future__ import annotations

LEARNED = "learned"
SHAPE_RULE = "shape rule"
SMALL = "small"
FULL_PRECISION = "full precision"
ZERO = "zero gradient"
FLAT = "flat gradient"
NON_FINITE = "non-finite gradient"
EMPTY = "no elements"
SINGLES = "blocks of one element"
NO_GRADIENT_YET = "no gradient yet"

REASONS = (LEARNED, SHAPE_RULE, SMALL, FULL_PRECISION, ZERO, FLAT, NON_FINITE, EMPTY, SINGLES, NO_GRADIENT_YET)
"""All of them. Their order is part of the state's format: append only."""

EXACT_REASONS = (SMALL, FULL_PRECISION, EMPTY, SINGLES)
"""Those that mean exact Adam; all others mean a quantised first moment."""

EXPLANATIONS = {
    LEARNED: "chosen from the first gradients",
    SHAPE_RULE: "chosen from the parameter's shape",
    SMALL: "fewer than min_size elements: exact Adam costs little and sets the usable learning rate",
    FULL_PRECISION: "full_precision asks for exact Adam",
    ZERO: "the first gradient is zero, so the shape rule decides",
    FLAT: "the squared first gradient shows no structure, so the shape rule decides",
    NON_FINITE: "the first gradient has NaN or infinite elements, so the shape rule decides",
    EMPTY: "the parameter has no elements",
    SINGLES: "its blocks would hold one element each: exact Adam is smaller",
    NO_GRADIENT_YET: "rule 'reference' needs the first gradient (calibrate): full second moment until then",
}
