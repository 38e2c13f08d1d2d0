"""One run of the quality study as one JSON line: its form, reading and appending.

| field | meaning |
|---|---|
| schema | version of this form, 1 |
| benchmark | "bench quality" |
| task, optimizer | names in `quality_tasks.TASKS` and `quality_variants.VARIANTS` |
| rate | peak learning rate, AdamW's (others by `optimizers.Choice.rate`) |
| seed | of the initial parameters and of the batches |
| steps, batch, weight_decay, b2 | of the run |
| data | fingerprint of the data |
| purpose | "choice": only to choose learning rates; "study": to compare |
| loss, accuracy | of the last validation; nats per prediction, null if not finite; share of right predictions |
| validation | list of (step, loss) |
| training | list of (step, mean training loss of the steps since the last) |
| diverged | a loss was not finite, or the last validation loss is above the untrained model's training loss |
| parameters, state_bytes, peak_bytes | number of parameters; bytes of optimizer state; bytes a step needs at its peak |
| step_seconds, step_cpu_seconds | median wall and CPU time of a training step |
| compile_seconds | of the step; 0 if an earlier run had compiled it |
| environment | versions, device, threads, commit; see `machine.environment` |
| time | seconds since 1970, UTC |
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.record import finite

SCHEMA = 1
BENCHMARK = "bench quality"
CODEBOOKS = "bench quality codebooks"  # lines of `quality_momentum`, which may stand in the same file
CHOICE, STUDY = "choice", "study"


class Key(NamedTuple):
    """What names a run: two runs with one key give the same numbers on one machine and one version."""

    task: str
    optimizer: str
    rate: float
    seed: int
    steps: int
    batch: int
    weight_decay: float
    b2: float
    data: str


class Setting(NamedTuple):
    """What two runs must share to be compared."""

    task: str
    steps: int
    batch: int
    weight_decay: float
    b2: float
    data: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """One finished run; fields as in the module's table."""

    task: str
    optimizer: str
    rate: float
    seed: int
    steps: int
    batch: int
    weight_decay: float
    b2: float
    data: str
    purpose: str
    loss: float
    accuracy: float
    validation: list[tuple[int, float]]
    training: list[tuple[int, float]]
    diverged: bool
    parameters: int
    state_bytes: int
    peak_bytes: int
    step_seconds: float
    step_cpu_seconds: float
    compile_seconds: float
    environment: dict[str, Any]
    time: float

    @property
    def key(self) -> Key:
        return Key(*(getattr(self, name) for name in Key._fields))

    @property
    def setting(self) -> Setting:
        return Setting(*(getattr(self, name) for name in Setting._fields))

    def dumps(self) -> str:
        """The JSON line, numbers rounded to 7 digits."""
        fields = {"schema": SCHEMA, "benchmark": BENCHMARK, **dataclasses.asdict(self)}
        return json.dumps(_all_rounded(finite(fields)), allow_nan=False)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Cell":
        """The cell of a line's object; raises ValueError for anything else."""
        if (found.get("benchmark"), found.get("schema")) != (BENCHMARK, SCHEMA):
            raise ValueError(f"not a line of {BENCHMARK!r}, schema {SCHEMA}")
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"no field {missing[0]!r}")
        fields = {name: found[name] for name in names}
        for name in ("loss", "accuracy"):
            fields[name] = math.nan if fields[name] is None else float(fields[name])
        for name in ("validation", "training"):
            fields[name] = [(int(step), math.nan if loss is None else float(loss)) for step, loss in fields[name]]
        return cls(**fields)


def rounded(number: float) -> float:
    """A number to the digits that a cell keeps.

    >>> rounded(3 * 0.1)
    0.3
    """
    return float(f"{number:.7g}")


def _all_rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if key == "time" else _all_rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_all_rounded(item) for item in value]
    return rounded(value) if isinstance(value, float) else value


def read(paths: Iterable[str | Path]) -> list[Cell]:
    """The cells of JSON-lines files, each key once: the first line wins.

    A last line without its newline, which a killed run leaves, is ignored.

    Raises:
      UsageError: a file cannot be read, or a line is not a cell.
    """
    found: dict[Key, Cell] = {}
    for where, line in lines(paths):
        if line.get("benchmark") == CODEBOOKS:
            continue
        try:
            cell = Cell.of(line)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{where}: {error}") from error
        found.setdefault(cell.key, cell)
    return list(found.values())


def lines(paths: Iterable[str | Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every whole line of JSON-lines files; raises `UsageError`."""
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read ({error})") from error
        for number, line in enumerate(text.split("\n")[:-1], 1):
            where = f"{path}, line {number}"
            try:
                found = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{where}: {error}") from error
            if not isinstance(found, dict):
                raise UsageError(f"{where}: found {type(found).__name__}, expected an object")
            yield where, found


def append(path: str | Path, cell: Cell) -> None:
    """Add a line to a file; what a killed run left of its last line is cut off first."""
    with open(path, "ab+") as file:
        end = _end_of_lines(path)
        if end < file.tell():
            file.truncate(end)
        file.write(cell.dumps().encode() + b"\n")


def _end_of_lines(path: str | Path) -> int:
    """Bytes up to and with the last newline of a file."""
    return Path(path).read_bytes().rfind(b"\n") + 1
