"""A language model that is almost all embedding, with rows that are rarely or never used.

Every run of 1 to n bytes that ends at a position is hashed to a row of its order's table; the rows are concatenated
and a small network predicts the next byte. Long runs follow Zipf's law: a few rows see a gradient in every step,
most of them now and then, some never. Hashed n-gram embeddings: Joulin et al., arXiv 1607.01759.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from gefen_jax.lab.language import normal

FACTOR = 0x9E3779B1  # 2^32 divided by the golden ratio, odd: a multiplicative hash (Knuth, TAOCP 3, 6.4)


@dataclasses.dataclass(frozen=True)
class NGramConfig:
    """Sizes of a hashed n-gram model."""

    vocab: int
    context: int  # bytes of a training window; the parameters do not depend on it
    orders: int  # lengths of the runs: 1 .. orders
    rows: int  # of the table of each order from 2 on; order 1 has one row per byte
    width: int  # of a row
    hidden: int

    def __post_init__(self) -> None:
        if not 1 <= self.orders <= self.context:
            raise ValueError(f"NGramConfig: orders must be from 1 to the context {self.context}, found {self.orders}")


def rows_of(tokens: jax.Array, order: int, rows: int) -> jax.Array:
    """Row of the run of ``order`` tokens that ends at each position, int32 of the tokens' shape (batch, length).

    Runs that would begin before the window are filled up with a token that no window holds.

    >>> rows = rows_of(jnp.array([[7, 1, 2, 1, 2]], jnp.uint8), 2, 1000)
    >>> bool(rows[0, 2] == rows[0, 4]), bool(rows[0, 2] == rows[0, 3])
    (True, False)
    """
    padded = jnp.pad(tokens.astype(jnp.uint32) + 1, ((0, 0), (order - 1, 0)))
    length = tokens.shape[1]
    code = jnp.zeros(tokens.shape, jnp.uint32)
    for i in range(order):
        code = (code ^ padded[:, i : i + length]) * jnp.uint32(FACTOR)
        code ^= code >> 15
    return (code % rows).astype(jnp.int32)


class NGram(nn.Module):
    config: NGramConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        parts = [nn.Embed(c.vocab, c.width, embedding_init=normal(), name="embed_1")(tokens.astype(jnp.int32))]
        for order in range(2, c.orders + 1):
            embed = nn.Embed(c.rows, c.width, embedding_init=normal(), name=f"embed_{order}")
            parts.append(embed(rows_of(tokens, order, c.rows)))
        h = nn.gelu(nn.Dense(c.hidden, name="dense")(jnp.concatenate(parts, axis=-1)))
        return nn.Dense(c.vocab, name="head")(h)
