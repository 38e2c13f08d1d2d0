"""The values that structural arguments may have, and checks of one value at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from gefen_jax.codebook import companding_codebook
from gefen_jax.quantization import companding

RULES = ("gefen", "reference")
SECOND_MOMENTS = ("auto", "block", "factored", "full")
BITS = (8, 4)
CODECS = ("table", "companding")
WHERE = ("auto", "host", "device")


def check_choice(what: str, found: Any, choices: tuple[Any, ...]) -> None:
    """Raise a ValueError unless ``found`` is one of ``choices``."""
    if not isinstance(found, str | int) or found not in choices:
        hint = ""
        if hasattr(found, "shape"):
            hint = f"; an array arrives here from optax.inject_hyperparams: add {what!r} to its static_args"
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}; found {found!r}{hint}")


def check_min_size(found: Any) -> None:
    """Raise a ValueError unless ``found`` is a whole number >= 0."""
    if isinstance(found, bool) or not isinstance(found, int | np.integer) or found < 0:
        hint = ""
        if hasattr(found, "shape"):
            hint = "; an array arrives here from optax.inject_hyperparams: add 'min_size' to its static_args"
        raise ValueError(f"min_size must be a whole number of elements >= 0; found {found!r}{hint}")


def check_codec(found: Any, bits: int, rule: str) -> None:
    """Raise a ValueError unless ``found`` is a codec that exists for this rule and number of bits."""
    check_choice("codec", found, CODECS)
    if found == "companding" and (bits != 8 or rule != "gefen"):
        raise ValueError(f"codec 'companding' exists for rule 'gefen' and 8 bits; found rule {rule!r} and {bits} bits")


def check_codebook(codebook: Any, bits: int, rule: str, codec: str = "table") -> np.ndarray:
    """The codebook as float32, or a ValueError that says what is wrong with it."""
    words = np.asarray(codebook, np.float32)
    expected = 2**bits
    if words.shape != (expected,):
        raise ValueError(f"a codebook of {bits} bits has {expected} words; found an array of shape {words.shape}")
    if not np.all(np.isfinite(words)) or np.any(np.diff(words) < 0):
        raise ValueError("a codebook's words must be finite and ascending")
    if words[0] != -1 or words[-1] != 1:
        raise ValueError(f"a codebook's ends must be -1 and 1; found {words[0]} and {words[-1]}")
    if rule == "gefen" and words[expected // 2 - 1] != 0:
        raise ValueError(f"word {expected // 2 - 1} must be exactly 0, so that weights without gradient stay put")
    if codec == "companding":
        with np.errstate(divide="ignore", invalid="ignore"):
            closed = companding_codebook(float(companding(words).c))  # type: ignore[arg-type]
        if not np.allclose(words, closed, rtol=1e-5, atol=0):
            raise ValueError("the words of codec 'companding' must have its closed form, by which codes are found")
    return words
