"""The PyTorch originals of the baselines, run on the CPU. Imported lazily: none of them is needed to test."""

import importlib
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import peer_cases as cases

Arrays = dict[str, np.ndarray]


def load(name: str) -> types.ModuleType:
    """The module, or `ImportError`; warnings of foreign packages do not concern us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def run(case: cases.Case, make: Callable, state: Callable) -> Arrays:
    """Parameters and state after the case's steps: ``make`` builds the optimizer, ``state`` reads one leaf's state."""
    torch = load("torch")
    leaves = {path: torch.nn.Parameter(torch.tensor(value)) for path, value in cases.params(case).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make(leaves)
        for step in range(cases.STEPS):
            for path, gradient in cases.gradients(case, step).items():
                leaves[path].grad = torch.tensor(gradient)
            optimizer.step()
    out = {f"{path}:param": leaf.detach().numpy() for path, leaf in leaves.items()}
    for path, leaf in leaves.items():
        out |= {f"{path}:{name}": np.asarray(value) for name, value in state(optimizer.state[leaf]).items()}
    return out


def bitsandbytes_adam8bit(case: cases.Case) -> Arrays:
    """bitsandbytes' AdamW8bit.

    Its CPU kernel looks codes up in a table of 65,536 equal cells of [-1, 1], so it never stores values below 1e-5 of
    the maximum rightly; the CUDA kernel and the package's own fallback take the nearest word. The fallback is used.
    """
    bnb, kernels, torch = load("bitsandbytes"), load("bitsandbytes.backends.cpu.ops"), load("torch")

    def quantize_nearest(moment, words, absmax_out, codes_out, blocksize):
        codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(moment.double(), words, blocksize)
        codes_out.copy_(codes)
        absmax_out.copy_(absmax)

    def make(leaves):
        return bnb.optim.AdamW8bit(
            leaves.values(),
            lr=cases.LEARNING_RATE,
            betas=(cases.B1, cases.B2),
            eps=cases.EPS,
            weight_decay=cases.WEIGHT_DECAY,
        )

    def state(s):
        out = {"mu": s["state1"], "nu": s["state2"]}
        return out | {"mu_scale": s["absmax1"], "nu_scale": s["absmax2"]} if "absmax1" in s else out

    table_search = kernels._quant_blockwise_fp32_direct
    kernels._quant_blockwise_fp32_direct = quantize_nearest
    try:
        maps = {f"map:{n}": bnb.functional.create_dynamic_map(n == "signed").numpy() for n in ("signed", "unsigned")}
        return run(case, make, state) | maps
    finally:
        kernels._quant_blockwise_fp32_direct = table_search


def torchao_adam4bit(case: cases.Case) -> Arrays:
    """torchao's AdamW4bit on a vector, where its block-wise second moment is the paper's too. Run without compiling."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    optim = load("torchao.optim")

    def make(leaves):
        return optim.AdamW4bit(
            leaves.values(),
            lr=cases.LEARNING_RATE,
            betas=(cases.B1, cases.B2),
            eps=cases.EPS,
            weight_decay=cases.WEIGHT_DECAY,
        )

    def state(s):
        out = {}
        for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            codes = s[theirs].codes.numpy()  # the earlier element in the high four bits
            out[ours] = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)
            out[f"{ours}_scale"] = s[theirs].scale.numpy()
        return out

    return run(case, make, state)


def lpmm_adam4bit(case: cases.Case) -> Arrays:
    """The 4-bit paper's AdamW (package lpmm): its plain PyTorch path, with the CUDA packing extension left out.

    Not in a registry; put a checkout of thu-ml/low-bit-optimizers on PYTHONPATH.
    """
    for name in ("lpmm.cpp_extension", "lpmm.cpp_extension.quantization"):
        sys.modules.setdefault(name, types.ModuleType(name))
    lpmm = load("lpmm.optim")
    moment = "    ENABLE: True\n    BITS: 4\n    GROUP_SIZE: 128\n    ROUND_TYPE: nearest\n"
    config = (
        f"QUANT:\n  M:\n{moment}    SCALE_TYPE:\n      DEFAULT: group\n    QUANT_TYPE:\n      DEFAULT: nonlinear\n"
        f"  SQM:\n{moment}    SCALE_TYPE:\n      DEFAULT: rank1\n    QUANT_TYPE:\n      DEFAULT: power-1\n"
    )

    def make(leaves):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "nearest.yml")
            with open(path, "w") as file:
                file.write(f"{config}OUTPUT: {folder}\n")
            return lpmm.AdamW(
                leaves.values(),
                lr=cases.LEARNING_RATE,
                betas=(cases.B1, cases.B2),
                eps=cases.EPS,
                weight_decay=cases.WEIGHT_DECAY,
                qconfig=path,
            )

    def state(s):
        out = {}
        for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            extra = s[f"{theirs}_qstate"]["overhead"]
            out[ours] = s[theirs].numpy()
            if extra:
                out[ours] = out[ours].astype(np.uint8)
                scales = [extra["max1"]] if extra["max1"] is not None else extra["max_dims"]
                out[f"{ours}_scale"] = np.concatenate([scale.numpy().reshape(-1) for scale in scales])
        return out

    return run(case, make, state)


def adam_mini(case: cases.Case) -> Arrays:
    """Adam-mini, on the same layers in PyTorch's layout: kernels (out, in); it decays all but norms and biases."""
    torch, package = load("torch"), load("adam_mini")
    contiguous = torch.contiguous_format
    names = {
        path: path.replace("embedding", "weight").replace("kernel", "weight").replace("scale", "weight")
        for path in case.shapes
    }

    class Transposed:
        """Carries gradients of Flax kernels to the original's parameters, and its parameters back."""

        def __init__(self, leaves):
            self.leaves = leaves
            self.theirs = {p: torch.nn.Parameter(self.turn(p, leaf.detach())) for p, leaf in leaves.items()}
            self.inner = package.Adam_mini(
                [(names[path], leaf) for path, leaf in self.theirs.items()],
                lr=cases.LEARNING_RATE,
                betas=(cases.B1, cases.B2),
                eps=cases.EPS,
                weight_decay=cases.WEIGHT_DECAY,
                dim=cases.WIDTH,
                n_heads=cases.HEADS,
                n_kv_heads=cases.KV_HEADS,
                verbose=False,
            )

        @staticmethod
        def turn(path, x):
            return (x.T if path.endswith("kernel") and x.ndim == 2 else x).clone(memory_format=contiguous)

        @property
        def state(self):
            return {leaf: self.inner.state[self.theirs[path]] for path, leaf in self.leaves.items()}

        def step(self):
            for path, leaf in self.leaves.items():
                self.theirs[path].grad = self.turn(path, leaf.grad)
            self.inner.step()
            for path, leaf in self.leaves.items():
                leaf.data.copy_(self.turn(path, self.theirs[path].data))

    def state(s):
        return {"nu": (s["v"] if "v" in s else s["vmean"]).numpy().reshape(-1)}

    return run(case, Transposed, state)


class Original(NamedTuple):
    package: str
    case: cases.Case
    run: Callable[[cases.Case], Arrays]


ORIGINALS = {
    "bitsandbytes_adam8bit": Original("bitsandbytes", cases.ADAM8BIT, bitsandbytes_adam8bit),
    "torchao_adam4bit": Original("torchao", cases.ADAM4BIT_VECTOR, torchao_adam4bit),
    "lpmm_adam4bit": Original("lpmm", cases.ADAM4BIT, lpmm_adam4bit),
    "adam_mini": Original("adam_mini", cases.ADAM_MINI, adam_mini),
}
"""By the name of their golden file."""
