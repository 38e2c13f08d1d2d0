"""Peers of Gefen, side by side: low-memory Adam variants as Optax transformations, and a registry of all baselines."""

from gefen_jax.baselines.adam4bit import Adam4bitState as Adam4bitState
from gefen_jax.baselines.adam4bit import adam4bit as adam4bit
from gefen_jax.baselines.adam4bit import scale_by_adam4bit as scale_by_adam4bit
from gefen_jax.baselines.adam8bit import Adam8bitState as Adam8bitState
from gefen_jax.baselines.adam8bit import adam8bit as adam8bit
from gefen_jax.baselines.adam8bit import scale_by_adam8bit as scale_by_adam8bit
from gefen_jax.baselines.adam_mini import AdamMiniState as AdamMiniState
from gefen_jax.baselines.adam_mini import adam_mini as adam_mini
from gefen_jax.baselines.adam_mini import scale_by_adam_mini as scale_by_adam_mini
from gefen_jax.baselines.mini_rules import DEFAULT_RULES as DEFAULT_RULES
from gefen_jax.baselines.mini_rules import Rule as Rule
from gefen_jax.baselines.registry import PEERS as PEERS
from gefen_jax.baselines.registry import Peer as Peer
from gefen_jax.baselines.registry import build as build
from gefen_jax.baselines.registry import state_bytes as state_bytes
from gefen_jax.baselines.registry import state_table as state_table
