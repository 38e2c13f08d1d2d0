"""Real data without a network: one resolver for text, one for images, and everybody's own.

A *spec* says what to load. Whatever cannot be loaded is a `DataError` that names the spec, what was found and
what to give instead.
"""

import glob
import gzip
import hashlib
import importlib
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gefen_jax.lab.errors import UsageError

VALIDATION = 10  # every tenth block of a text is for validation
BLOCK = 65536  # bytes; shorter for texts below VALIDATION blocks
MIN_TEXT = 1000  # bytes
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"  # where Debian's dataset-fashion-mnist installs it
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class DataError(UsageError):
    """Data that cannot be loaded, with the reason and what to do, in one line."""


class Text(NamedTuple):
    train: np.ndarray  # uint8, (bytes,)
    validation: np.ndarray  # uint8, (bytes,)
    source: str  # what was found, for people


class Images(NamedTuple):
    train: np.ndarray  # uint8, (n, height, width, channels)
    train_labels: np.ndarray  # int32, (n,)
    validation: np.ndarray
    validation_labels: np.ndarray
    classes: int
    source: str


def fingerprint(*arrays: np.ndarray) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the arrays' bytes: names the data of a run."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ text


def load_text(spec: str = "stdlib") -> Text:
    """Bytes to train and to validate on.

    Args:
      spec: `stdlib` (the Python standard library's own sources, without tests), `pydoc` (0.5 MB of prose: the
        language reference that Python carries), the path of a file, a glob pattern (`**` allowed; files in
        sorted order), or `module:callable`. Gzipped files are unpacked. The callable takes no argument and
        returns bytes, a str, a uint8 array of rank 1, or a pair of those (train, validation).

    Returns:
      `Text`. Unless the callable decided, the split is that of `split`: deterministic, and spread over the
      whole text.

    Raises:
      DataError: nothing found, unreadable, empty or too short, or the callable failed.

    >>> text = load_text("stdlib")
    >>> text.train.dtype, text.train.size > 5 * text.validation.size
    (dtype('uint8'), True)
    """
    if spec == "stdlib":
        files = stdlib_sources()
        data = b"".join(path.read_bytes() for path in files)
        train, validation = split(np.frombuffer(data, np.uint8))
        source = f"{len(files)} source files of Python {sysconfig.get_python_version()}'s standard library"
    elif spec == "pydoc":
        train, validation = split(np.frombuffer(language_reference().encode(), np.uint8))
        source = f"the language reference of Python {sysconfig.get_python_version()}"
    elif is_callable(spec):
        value, source = call(spec), spec
        if isinstance(value, tuple | list) and len(value) == 2:
            train, validation = (as_bytes(part, spec) for part in value)
        else:
            train, validation = split(as_bytes(value, spec))
    else:
        files = matching_files(spec)
        data = b"".join(read(path) for path in files)
        train, validation = split(np.frombuffer(data, np.uint8))
        source = str(files[0]) if len(files) == 1 else f"{len(files)} files matching {spec}"
    for name, part in (("train", train), ("validation", validation)):
        if part.size < MIN_TEXT // VALIDATION:
            raise DataError(f"data {spec!r}: {part.size} bytes of {name} text; give at least {MIN_TEXT} bytes in all")
    return Text(train, validation, source)


def split(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(train, validation): the text is cut into blocks of 64 KiB and every tenth block is for validation.

    Texts below 640 KiB are cut into ten equal blocks instead, so the last tenth is for validation.

    >>> train, validation = split(np.arange(20, dtype=np.uint8))
    >>> train.size, validation
    (18, array([18, 19], dtype=uint8))
    """
    block = max(1, min(BLOCK, data.size // VALIDATION))
    held_out = np.arange(data.size) // block % VALIDATION == VALIDATION - 1
    return data[~held_out], data[held_out]


def stdlib_sources() -> list[Path]:
    """The sorted .py files of the standard library that runs, without tests and site packages.

    They differ between Python versions: runs on `stdlib` compare only within one (see `fingerprint`).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
    files = []
    for folder, folders, names in os.walk(root):
        # config-*, _sysconfigdata* and *customize.py are written at installation: they differ by machine
        folders[:] = [name for name in folders if name not in skipped and not name.startswith("config-")]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(".py")
            and not name.startswith("_sysconfigdata")
            and name not in ("sitecustomize.py", "usercustomize.py")
        ]
    files.sort()
    if not files:
        raise DataError(f"data 'stdlib': no .py files below {root}; give the path of a text file")
    return files


def language_reference() -> str:
    """What `help()` shows on the language's topics, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise DataError("data 'pydoc': this Python comes without pydoc_data; give the path of a text file") from error
    return "\n\n".join(text for _, text in sorted(topics.items()))


def matching_files(spec: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.is_dir():
        raise DataError(f"data {spec!r}: is a folder; give a pattern, for example '{path / '**' / '*.txt'}'")
    if path.exists():
        return [path]
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not files:
        what = "no file matches" if glob.has_magic(spec) else "no such file"
        raise DataError(f"data {spec!r}: {what}; give stdlib, a path, a glob or module:callable")
    return files


def as_bytes(value: Any, spec: str) -> np.ndarray:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes | bytearray):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
        return value
    found = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    raise DataError(f"data {spec!r}: returned {found}; return bytes, str, a uint8 array of rank 1, or a pair of those")


# ---------------------------------------------------------------------------------------------- images


def load_images(spec: str = "digits") -> Images:
    """Labelled images to train and to validate on.

    Args:
      spec: `digits` (scikit-learn's 1,797 digits of 8x8; every fifth is for validation), `fashion-mnist`
        (Debian's package dataset-fashion-mnist), a folder of the four MNIST files in idx format, gzipped or
        not, a `.npz` file with x_train, y_train, x_test, y_test, or `module:callable` that returns those four
        arrays. Pixels are integers 0..255 or floats 0..1; shape (n, height, width) or (n, height, width,
        channels).

    Raises:
      DataError: nothing found, unreadable, or arrays that do not fit together.

    >>> images = load_images("digits")
    >>> images.train.shape, images.validation.shape, images.classes
    ((1438, 8, 8, 1), (359, 8, 8, 1), 10)
    """
    if spec == "digits":
        try:
            from sklearn.datasets import load_digits  # only here: it takes a second to import
        except ModuleNotFoundError as error:
            raise DataError("data 'digits': needs scikit-learn: pip install 'gefen-jax[demo]'") from error
        digits = load_digits()
        held_out = np.arange(len(digits.target)) % 5 == 4
        pixels = digits.images / 16
        arrays = pixels[~held_out], digits.target[~held_out], pixels[held_out], digits.target[held_out]
        return images_of(arrays, spec, "scikit-learn's digits")
    if spec == "fashion-mnist":
        if not Path(FASHION_MNIST).is_dir():
            raise DataError(f"data {spec!r}: nothing at {FASHION_MNIST}; on Debian: apt install dataset-fashion-mnist")
        return images_of(idx_folder(Path(FASHION_MNIST), spec), spec, "Fashion-MNIST")
    if is_callable(spec):
        value = call(spec)
        if not isinstance(value, tuple | list) or len(value) != 4:
            raise DataError(f"data {spec!r}: must return (x_train, y_train, x_test, y_test)")
        return images_of(tuple(np.asarray(array) for array in value), spec, spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        return images_of(idx_folder(path, spec), spec, str(path))
    if path.suffix == ".npz" and path.is_file():
        names = ("x_train", "y_train", "x_test", "y_test")
        try:
            with np.load(path, allow_pickle=False) as file:
                missing = [name for name in names if name not in file]
                if missing:
                    raise DataError(f"data {spec!r}: has {', '.join(file.files)}, but not {', '.join(missing)}")
                arrays = tuple(file[name] for name in names)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(f"data {spec!r}: not a readable .npz file of plain arrays ({error})") from error
        return images_of(arrays, spec, str(path))
    raise DataError(
        f"data {spec!r}: no such folder or .npz file; "
        "give digits, fashion-mnist, a folder of idx files, a .npz file or module:callable"
    )


def images_of(arrays: tuple[np.ndarray, ...], spec: str, source: str) -> Images:
    x_train, y_train, x_test, y_test = arrays
    parts = []
    for name, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim not in (3, 4) or len(x) == 0 or y.shape != (len(x),) or x.shape[1:] != x_train.shape[1:]:
            raise DataError(
                f"data {spec!r}: {name} images {x.shape} and labels {y.shape}; expected "
                "(n, height, width[, channels]) and (n,), n > 0, the same image size in both sets"
            )
        if not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
            raise DataError(f"data {spec!r}: {name} labels must be integers 0, 1, 2, ..., found {y.dtype}")
        parts += [as_pixels(x, spec), y.astype(np.int32)]
    classes = int(max(y_train.max(), y_test.max())) + 1
    return Images(parts[0], parts[1], parts[2], parts[3], classes, source)


def as_pixels(x: np.ndarray, spec: str) -> np.ndarray:
    """uint8 pixels 0..255 with a channel axis."""
    floats = np.issubdtype(x.dtype, np.floating)
    low, high, limit = x.min(), x.max(), 1 if floats else 255
    if not (floats or np.issubdtype(x.dtype, np.integer)) or not (low >= 0 and high <= limit):
        raise DataError(
            f"data {spec!r}: pixels are {x.dtype} from {low} to {high}; expected integers 0..255 or floats 0..1"
        )
    x = np.round(x * 255).astype(np.uint8) if floats else x.astype(np.uint8)
    return x if x.ndim == 4 else x[..., None]


def idx_folder(folder: Path, spec: str) -> tuple[np.ndarray, ...]:
    """The four arrays of a folder that holds MNIST's file names."""
    arrays = []
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        names = [part + "-ubyte", part + "-ubyte.gz"]
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is None:
            raise DataError(f"data {spec!r}: the folder has no {names[0]}(.gz)")
        arrays.append(read_idx(read(path), str(path)))
    return tuple(arrays)


def read_idx(data: bytes, name: str) -> np.ndarray:
    """An array of bytes in the idx format: 0, 0, type 8, rank, sizes (big-endian int32), values."""
    rank = data[3] if len(data) > 3 else 0
    header = 4 + 4 * rank
    if data[:3] != b"\0\0\x08" or len(data) < header:
        raise DataError(f"data {name!r}: not an idx file of unsigned bytes")
    shape = tuple(np.frombuffer(data, ">i4", rank, 4).tolist())
    if len(data) != header + int(np.prod(shape)):
        raise DataError(f"data {name!r}: {len(data) - header} values, but its header says {shape}; is it complete?")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


# ---------------------------------------------------------------------------------------------- common


def read(path: Path) -> bytes:
    """The bytes of a file, unpacked if it is gzipped."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:  # gzip raises both
        raise DataError(f"data {str(path)!r}: cannot be read ({error})") from error


def is_callable(spec: str) -> bool:
    return CALLABLE.fullmatch(spec) is not None and not Path(spec).exists()


def call(spec: str) -> Any:
    """What `module:callable` returns; the current folder is searched for the module, as `python -m` does."""
    module_name, _, name = spec.partition(":")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"data {spec!r}: {error}") from error
    try:
        return function()
    except Exception as error:  # the user's code: whatever it raises is shown in one line
        raise DataError(f"data {spec!r}: the call failed with {type(error).__name__}: {error}") from error
