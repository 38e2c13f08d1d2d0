"""The examples run as they are written, on small models; `many_hosts` is run by test_two_processes.py."""

import pkgutil
import re
import subprocess
import sys

import pytest

from gefen_jax.lab import examples
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.examples import from_adamw, fsdp, host_offload, nnx_sharded, watching


def test_each_is_listed_and_run():
    names = {module.name for module in pkgutil.iter_modules(examples.__path__)}
    assert set(re.findall(r"^\* `(\w+)`:", examples.__doc__, re.MULTILINE)) == names
    assert names == {"fsdp", "many_hosts", "host_offload", "nnx_sharded", "from_adamw", "watching"}


def test_fsdp(capsys):
    """Half of the run on eight devices, half on four."""
    last = fsdp.main(["--model", "gpt-tiny", "--steps", "12"])
    printed = capsys.readouterr().out
    first = float(re.search(r"^step 6: loss (\S+) on 8 devices$", printed, re.MULTILINE)[1])
    assert re.search(rf"^step 12: loss {last:.4f} on 4 devices$", printed, re.MULTILINE)
    assert last < first < 6
    ours, adamw = (int(x.replace(",", "")) for x in re.search(r"(\S+) bytes .* AdamW's (\S+)\n", printed).groups())
    assert ours < 0.35 * adamw


def test_host_offload(capsys):
    losses = host_offload.main(["--model", "gpt-tiny", "--devices", "4", "--steps", "4"])
    printed = capsys.readouterr().out
    for name in ("AdamW", "Gefen"):
        assert losses[name, "device"] == losses[name, "pinned_host"]  # the same program but for the copies
        assert re.search(rf"^{name}: [\d,]+ bytes to each device and back", printed, re.MULTILINE)


def test_nnx_sharded(capsys):
    last = nnx_sharded.main(["--width", "256", "--steps", "12"])
    printed = capsys.readouterr().out
    first = float(re.search(r"^step 6: loss (\S+)$", printed, re.MULTILINE)[1])
    assert last < first
    assert "up/kernel" in printed


def test_from_adamw(capsys):
    before, during, after = from_adamw.main(["--model", "gpt-tiny", "--steps", "45"])
    assert after < during < before
    assert capsys.readouterr().out.count("bytes of state") == 2


def test_watching(capsys):
    advice = watching.main(["--model", "gpt-tiny", "--steps", "6", "--every", "3"])
    printed = capsys.readouterr().out
    assert len(advice) == 3
    assert all(line in printed for line in advice)
    assert ("  calibrated\n" in printed) == any(line.startswith("calibrate") for line in advice)


def test_more_devices_than_there_are():
    with pytest.raises(
        UsageError, match="--devices 9: there are 8 cpu devices; give at most as many, or set JAX_PLATF"
    ):
        fsdp.main(["--devices", "9"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "1"], "argument --devices: '1' is not a whole number of at least 2"),
        (["--model", "gtp"], "fsdp.py: unknown model 'gtp'; choose one of: gpt-tiny"),
    ],
)
def test_wrong_options_are_one_line(words, message):
    command = [sys.executable, "-W", "error", "-m", "gefen_jax.lab.examples.fsdp", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
