"""Makes tests/data/baselines/*.npz from the PyTorch originals: ``python tests/baselines/peer_golden.py [NAME ...]``.

Needs the `parity` extra, and for lpmm a checkout of thu-ml/low-bit-optimizers on PYTHONPATH with yacs installed.
"""

import sys
from pathlib import Path

import numpy as np
import peer_originals

FOLDER = Path(__file__).parent.parent / "data" / "baselines"


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or peer_originals.ORIGINALS:
        original = peer_originals.ORIGINALS[name]
        arrays = original.run(original.case)
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
        print(f"{name}: {(FOLDER / f'{name}.npz').stat().st_size:,} bytes")
