"""Where the bytes, the FLOPs and the time of a JAX training step go; useful with any Optax optimizer and any model.

>>> import jax, jax.numpy as jnp, optax
>>> from gefen_jax.accounting import account, tensors
>>> optimizer, params = optax.adamw(1e-3), {"w": jnp.ones((64, 32))}
>>> tensors(parameters=params, optimizer_state=optimizer.init(params)).bytes
24580

`account` does everything about one step in one call; the other functions do one thing each. Nothing here runs a step
unless it is asked to (``run=True``, `measure`, `profile`, `measure_cpu`).
"""

from gefen_jax.accounting.account import Account as Account
from gefen_jax.accounting.account import account as account
from gefen_jax.accounting.activations import Activations as Activations
from gefen_jax.accounting.activations import analytic_activations as analytic_activations
from gefen_jax.accounting.activations import compiled_activations as compiled_activations
from gefen_jax.accounting.activations import traced_activations as traced_activations
from gefen_jax.accounting.advice import advise as advise
from gefen_jax.accounting.decoder import DECODERS as DECODERS
from gefen_jax.accounting.decoder import Decoder as Decoder
from gefen_jax.accounting.decoder_loss import decoder_loss as decoder_loss
from gefen_jax.accounting.decoder_loss import decoder_tokens as decoder_tokens
from gefen_jax.accounting.devices import DEVICES as DEVICES
from gefen_jax.accounting.devices import Device as Device
from gefen_jax.accounting.devices import find_device as find_device
from gefen_jax.accounting.devices import local_device as local_device
from gefen_jax.accounting.devices import measure_cpu as measure_cpu
from gefen_jax.accounting.fits import LAYOUTS as LAYOUTS
from gefen_jax.accounting.fits import PRECISIONS as PRECISIONS
from gefen_jax.accounting.fits import Precision as Precision
from gefen_jax.accounting.fits import what_fits as what_fits
from gefen_jax.accounting.flops import Flops as Flops
from gefen_jax.accounting.flops import count_flops as count_flops
from gefen_jax.accounting.flops import xla_flops as xla_flops
from gefen_jax.accounting.memory import Memory as Memory
from gefen_jax.accounting.memory import StepMemory as StepMemory
from gefen_jax.accounting.memory import compiled_memory as compiled_memory
from gefen_jax.accounting.memory import live_after as live_after
from gefen_jax.accounting.memory import step_memory as step_memory
from gefen_jax.accounting.paper import paper_microbatches as paper_microbatches
from gefen_jax.accounting.paper import paper_states as paper_states
from gefen_jax.accounting.phases import Phases as Phases
from gefen_jax.accounting.phases import phases as phases
from gefen_jax.accounting.phases import update_temporaries as update_temporaries
from gefen_jax.accounting.program import StepError as StepError
from gefen_jax.accounting.residuals import Residuals as Residuals
from gefen_jax.accounting.residuals import residuals as residuals
from gefen_jax.accounting.states import OptimizerStates as OptimizerStates
from gefen_jax.accounting.states import optimizer_states as optimizer_states
from gefen_jax.accounting.targets import TARGETS as TARGETS
from gefen_jax.accounting.targets import TargetUnavailableError as TargetUnavailableError
from gefen_jax.accounting.targets import make_target as make_target
from gefen_jax.accounting.tensors import Tensors as Tensors
from gefen_jax.accounting.tensors import live_bytes as live_bytes
from gefen_jax.accounting.tensors import tensors as tensors
from gefen_jax.accounting.tensors import tree_bytes as tree_bytes
from gefen_jax.accounting.timing import ProfilerError as ProfilerError
from gefen_jax.accounting.timing import measure as measure
from gefen_jax.accounting.timing import profile as profile
from gefen_jax.accounting.timing import utilization as utilization
