"""Every notebook runs from a clean kernel, and what is committed of it is small, complete and free of traces."""

import base64
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LARGEST = 300_000  # bytes of a committed notebook
TRACES = re.compile(r"/(root|home|tmp|work|Users)/|site-packages")


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(output):
    """Everything that an output says in words."""
    if output.output_type == "stream":
        return output.text
    return "\n".join(str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/"))


def test_there_are_six():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_as_executed_once_from_top_to_bottom(path):
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < LARGEST
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    assert notebook.metadata.kernelspec.name == "python3"
    found = outputs(notebook)
    assert {output.output_type for output in found} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in found if output.output_type == "stream" and output.name == "stderr"]
    pictures = [base64.b64decode(o.data["image/png"]) for o in found if "image/png" in o.get("data", {})]
    assert pictures
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    said = "\n".join(map(texts, found))
    assert not TRACES.search(said + notebook.cells[0].source)


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_a_clean_kernel(path, tmp_path, monkeypatch):
    """In fast mode; the assertions at the end of each notebook check what its text states."""
    monkeypatch.setenv("GEFEN_FAST", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):  # a clean kernel: nothing of this process's devices
        monkeypatch.delenv(name, raising=False)
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    assert not list(tmp_path.iterdir())
