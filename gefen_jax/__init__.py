"""Gefen for JAX: AdamW's recipe with about one byte of optimizer state per parameter."""

from gefen_jax.adam import from_adam_state as from_adam_state
from gefen_jax.adam import to_adam_state as to_adam_state
from gefen_jax.calibrate import calibrate as calibrate
from gefen_jax.calibrate import plan_from_state as plan_from_state
from gefen_jax.diagnose import advise as advise
from gefen_jax.diagnose import diagnose as diagnose
from gefen_jax.explain import blocks as blocks
from gefen_jax.explain import explain as explain
from gefen_jax.fused import apply as apply
from gefen_jax.fused import clip_by_global_norm as clip_by_global_norm
from gefen_jax.fused import fused_chain as fused_chain
from gefen_jax.learn import learn_plan as learn_plan
from gefen_jax.placement import state_sharding as state_sharding
from gefen_jax.plan import LeafPlan as LeafPlan
from gefen_jax.plan import Plan as Plan
from gefen_jax.state import GefenState as GefenState
from gefen_jax.transform import gefen as gefen
from gefen_jax.transform import scale_by_gefen as scale_by_gefen
