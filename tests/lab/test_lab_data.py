"""Data: what each spec finds, that splits are deterministic and disjoint, and what a wrong spec says."""

import gzip
import struct
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gefen_jax.lab import data
from gefen_jax.lab.data import DataError, load_images, load_text

TEXT = bytes(range(256)) * 20


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module `my_data` with the given source importable."""

    def write(source):
        (tmp_path / "my_data.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "my_data", raising=False)

    return write


# ------------------------------------------------------------------------------------------------ text


def test_stdlib_is_the_librarys_sources_without_its_tests():
    files = data.stdlib_sources()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {str(path.relative_to(root)) for path in files}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    folders = {part for name in names for part in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    assert files == sorted(files)
    text = load_text("stdlib")
    assert text.train.size + text.validation.size == sum(path.stat().st_size for path in files)
    assert text.train.size + text.validation.size > 4_000_000
    assert data.fingerprint(*text[:2]) == data.fingerprint(*load_text()[:2])


@given(st.integers(10, 3000), st.sampled_from([7, 16, 65536]))
def test_split_keeps_every_byte_once_and_a_tenth_for_validation(size, block):
    original, data.BLOCK = data.BLOCK, block
    try:
        text = np.arange(size)
        train, validation = data.split(text)
    finally:
        data.BLOCK = original
    assert sorted([*train, *validation]) == list(text)
    cut = min(block, size // 10)
    expected = [i for i in range(size) if (i // cut) % 10 == 9]  # by the words of the documentation
    assert list(validation) == expected


def test_split_of_a_long_text_is_spread_over_it():
    _, validation = data.split(np.arange(3_000_000, dtype=np.int32))
    starts = validation[np.flatnonzero(np.diff(validation, prepend=-9) != 1)]
    assert list(starts) == [9 * 65536, 19 * 65536, 29 * 65536, 39 * 65536]


def test_a_file_plain_or_gzipped(tmp_path):
    (tmp_path / "plain.txt").write_bytes(TEXT)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(TEXT))
    plain, packed = (load_text(str(tmp_path / name)) for name in ("plain.txt", "packed.txt.gz"))
    assert plain.train.tobytes() + plain.validation.tobytes() == TEXT
    np.testing.assert_array_equal(plain.train, packed.train)
    assert plain.train.dtype == np.uint8
    assert plain.source == str(tmp_path / "plain.txt")


def test_a_glob_joins_files_in_sorted_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, byte in (("b.txt", b"b"), ("sub/c.txt", b"c"), ("a.txt", b"a"), ("d.dat", b"d")):
        (tmp_path / name).write_bytes(byte * 1000)
    text = load_text(str(tmp_path / "**" / "*.txt"))
    assert text.train.tobytes() + text.validation.tobytes() == b"a" * 1000 + b"b" * 1000 + b"c" * 1000
    assert text.source.startswith("3 files matching")


@pytest.mark.parametrize("value", ["'ab' * 1000", "b'ab' * 1000", "np.frombuffer(b'ab' * 1000, np.uint8)"])
def test_a_callable_may_return_text_bytes_or_an_array(module, value):
    module(f"import numpy as np\ndef text(): return {value}")
    text = load_text("my_data:text")
    assert text.train.tobytes() + text.validation.tobytes() == b"ab" * 1000
    assert text.validation.size == 200


def test_a_callable_may_decide_the_split(module):
    module("def text(): return 'a' * 900, b'b' * 300")
    text = load_text("my_data:text")
    assert (text.train.tobytes(), text.validation.tobytes()) == (b"a" * 900, b"b" * 300)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.txt", "no such file; give stdlib, a path, a glob or module:callable"),
        ("nowhere/*.txt", "no file matches"),
        (".", r"is a folder; give a pattern, for example '\*\*/\*.txt'"),
        ("no_such_module:text", "No module named 'no_such_module'"),
        ("my_data:missing", "has no attribute 'missing'"),
        ("my_data:number", "returned int; return bytes, str, a uint8 array of rank 1"),
        ("my_data:floats", r"returned float64\(5,\)"),
        ("my_data:fails", "the call failed with KeyError: 'oh'"),
        ("my_data:short", "99 bytes of train text; give at least 1000 bytes in all"),
        ("my_data:one_sided", "0 bytes of validation text"),
    ],
)
def test_wrong_text_specs(module, spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module(
        "import numpy as np\n"
        "def number(): return 3\n"
        "def floats(): return np.zeros(5)\n"
        "def fails(): raise KeyError('oh')\n"
        "def short(): return 'x' * 110\n"
        "def one_sided(): return 'x' * 2000, ''\n"
    )
    with pytest.raises(DataError, match=message) as caught:
        load_text(spec)
    assert "\n" not in str(caught.value)
    assert spec in str(caught.value)


def test_a_truncated_gzip_file_is_named(tmp_path):
    path = tmp_path / "half.gz"
    path.write_bytes(gzip.compress(np.random.default_rng(0).bytes(5000))[:2000])
    with pytest.raises(DataError, match=r"half.gz': cannot be read"):
        load_text(str(path))


# ---------------------------------------------------------------------------------------------- images


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    raw, images = load_digits(), load_images("digits")
    assert images.train.dtype == np.uint8
    assert images.train_labels.dtype == np.int32
    np.testing.assert_array_equal(images.validation_labels, raw.target[4::5])
    np.testing.assert_array_equal(np.round(images.validation[..., 0] / 255 * 16), raw.images[4::5])
    assert len(images.train) + len(images.validation) == 1797


def write_idx(folder, packed):
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 7), ("t10k", 3)):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(256, size=(count, 4, 5)).astype(np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(10, size=count).astype(np.uint8)
    for name, array in arrays.items():
        content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return list(arrays.values())


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_idx_files(tmp_path, packed):
    x, y, x_test, y_test = write_idx(tmp_path, packed)
    images = load_images(str(tmp_path))
    np.testing.assert_array_equal(images.train[..., 0], x)
    np.testing.assert_array_equal(images.train_labels, y)
    np.testing.assert_array_equal(images.validation[..., 0], x_test)
    np.testing.assert_array_equal(images.validation_labels, y_test)
    assert images.classes == max(y.max(), y_test.max()) + 1


def test_a_npz_file_of_floats_with_channels(tmp_path):
    x = np.linspace(0, 1, 2 * 3 * 3 * 2).reshape(2, 3, 3, 2)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=[0, 1], x_test=x[:1], y_test=[2])
    images = load_images(str(tmp_path / "mine.npz"))
    np.testing.assert_array_equal(images.train, np.round(x * 255))
    assert images.classes == 3


def test_a_callable_returns_four_arrays(module):
    module("import numpy as np\ndef images(): return np.ones((4, 2, 2), int), [0, 1, 0, 1], np.ones((1, 2, 2)), [1]")
    images = load_images("my_data:images")
    assert images.train.max() == 1  # integers are 0..255
    assert images.validation.max() == 255  # floats are 0..1


GOOD = "np.zeros((4, 2, 2)), np.zeros(4, int), np.zeros((1, 2, 2)), np.zeros(1, int)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("np.zeros((4, 2, 2))", "np.full((4, 2, 2), 2.0)"), "pixels are float64 from 2.0 to 2.0; expected"),
        (("np.zeros((4, 2, 2))", "np.full((4, 2, 2), np.nan)"), "pixels are float64 from nan to nan"),
        (("np.zeros((4, 2, 2))", "np.full((4, 2, 2), -1)"), "pixels are int64 from -1 to -1"),
        (("np.zeros((4, 2, 2))", "np.zeros((4, 2))"), r"train images \(4, 2\) and labels \(4,\)"),
        (("np.zeros((1, 2, 2))", "np.zeros((1, 3, 2))"), r"test images \(1, 3, 2\)"),
        (("np.zeros(4, int)", "np.zeros(3, int)"), r"labels \(3,\)"),
        (("np.zeros(4, int)", "np.zeros(4)"), "train labels must be integers .* found float64"),
        ((", np.zeros(1, int)", ""), "must return"),
    ],
)
def test_wrong_arrays(module, change, message):
    module(f"import numpy as np\ndef images(): return {GOOD.replace(*change)}")
    with pytest.raises(DataError, match=message):
        load_images("my_data:images")


def test_wrong_image_specs(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FASHION_MNIST", str(tmp_path / "none"))
    with pytest.raises(DataError, match="apt install dataset-fashion-mnist"):
        load_images("fashion-mnist")
    with pytest.raises(DataError, match=r"no such folder or .npz file"):
        load_images("nowhere")
    with pytest.raises(DataError, match=r"the folder has no train-images-idx3-ubyte\(.gz\)"):
        load_images(str(tmp_path))
    np.savez(tmp_path / "part.npz", x_train=np.zeros((1, 2, 2)), y_train=[0])
    with pytest.raises(DataError, match="has x_train, y_train, but not x_test, y_test"):
        load_images(str(tmp_path / "part.npz"))
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"not a readable .npz file"):
        load_images(str(tmp_path / "bad.npz"))


def test_damaged_idx_files(tmp_path):
    write_idx(tmp_path, packed=False)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"2 values, but its header says \(3,\); is it complete"):
        load_images(str(tmp_path))
    path.write_bytes(b"\0\0\x0d\x01" + content[4:])
    with pytest.raises(DataError, match="not an idx file of unsigned bytes"):
        load_images(str(tmp_path))


def test_fashion_mnist_where_debian_installs_it():
    if not Path(data.FASHION_MNIST).is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    images = load_images("fashion-mnist")
    assert images.train.shape == (60000, 28, 28, 1)
    assert (np.bincount(images.validation_labels) == 1000).all()
