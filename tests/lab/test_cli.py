"""The command: what it lists, what it refuses, that it imports only what it needs; the doctor."""

import subprocess
import sys
import types

import pytest

from gefen_jax import cli
from gefen_jax.lab import doctor, machine
from gefen_jax.lab.errors import UsageError


def call(*words):
    try:
        return cli.main(words)
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_overview(words, capsys):
    assert call(*words) == 0
    printed = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert command.name in printed
        assert command.help in printed


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"gefen-jax {machine.version('gefen-jax')}\n"


@pytest.mark.parametrize("words", [("train",), ("--speed",), ("bench", "nothing")])
def test_unknown_commands(words, capsys):
    assert call(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("gefen-jax: ")
    assert error.count("\n") == 1
    assert "unknown command" in error
    for command in cli.COMMANDS:
        assert command.name in error


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command, capsys):
    assert call(*command.name.split(), "--help") == 0
    assert f"usage: gefen-jax {command.name}" in capsys.readouterr().out


def test_help_imports_no_laboratory():
    program = (
        "import sys; import gefen_jax; before = set(sys.modules)\n"
        "from gefen_jax import cli\n"
        "assert cli.main([]) == 0\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "heavy = new & {'jax', 'flax', 'optax', 'matplotlib', 'rich', 'numba', 'numpy', 'sklearn'}\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def command(monkeypatch):
    """Adds a command of two words made of the given function."""

    def add(run):
        module = types.ModuleType("made_up")
        module.__doc__ = "A command."
        module.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=1)
        module.run = run
        monkeypatch.setitem(sys.modules, "made_up", module)
        monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, cli.Command("bench made", "made up", "made_up")))

    return add


def test_a_command_of_two_words(command):
    command(lambda args: args.size)
    assert call("bench", "made", "--size", "7") == 7


def test_a_users_error_is_one_line(command, capsys):
    def run(args):
        raise UsageError("size 1: give more")

    command(run)
    assert call("bench", "made") == 2
    assert capsys.readouterr().err == "gefen-jax bench made: size 1: give more\n"


def test_any_other_error_is_shown_in_full(command):
    def run(args):
        raise ValueError("a defect")

    command(run)
    with pytest.raises(ValueError, match="a defect"):
        call("bench", "made")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("gefen_jax.lab.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert call("demo") == 2
    error = capsys.readouterr().err
    assert error == "gefen-jax demo: needs the package rich; install it with: pip install 'gefen-jax[demo]'\n"


def test_doctor(capsys, monkeypatch):
    assert call("doctor") == 0
    printed = capsys.readouterr().out
    for package in doctor.CORE:
        assert machine.version(package) in printed
    assert "cpu" in printed
    assert "norm scale (768,)       jnp (exact Adam)" in printed
    assert "apply                   at once, leaf by leaf: programs run on the CPU" in printed
    assert "missing" not in printed

    monkeypatch.setattr(doctor, "version", lambda package: None if package == "flax" else "1.0")
    assert "flax          missing, needed for the models" in doctor.report()
    assert "pip install 'gefen-jax[demo]'" in doctor.report()


def test_doctor_sees_an_unused_gpu(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/" + name)
    report = doctor.report()
    assert "an NVIDIA driver is here, but JAX runs on the CPU: pip install 'gefen-jax[cuda12]'" in report
    assert "jax-triton" in report


def test_doctor_reports_a_backend_that_does_not_start(monkeypatch):
    def broken():
        raise RuntimeError("no such platform")

    monkeypatch.setattr(doctor.jax, "devices", broken)
    assert "none, JAX cannot start its backend: RuntimeError('no such platform')" in doctor.report()


def test_the_commit_is_that_of_the_packages_own_checkout(monkeypatch, tmp_path):
    found = machine.commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)  # somebody's repository around an installation
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    package = tmp_path / "site-packages" / "gefen_jax"
    package.mkdir(parents=True)
    monkeypatch.setattr(machine.gefen_jax, "__file__", str(package / "__init__.py"))
    assert machine.commit() is None


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("bench", "memory"), "--out"),
        (("bench", "step"), "--out"),
        (("bench", "gpu"), "--out"),
        (("bench", "ladder"), "--out"),
        (("bench", "ladder", "--out", "{folder}/ladder.jsonl"), "--plot"),
        (("bench", "quality", "run"), "--out"),
        (("how",), "--out"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(words, option, tmp_path, capsys):
    occupied = tmp_path / "file"
    occupied.touch()
    words = [word.format(folder=tmp_path) for word in words]
    assert call(*words, option, str(occupied / "new")) == 2
    assert f": {option} '{occupied / 'new'}': cannot write there (" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [occupied]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "gpu", "--rows", "0"), "--rows and --steps must be at least 1; found 0 and 10"),
        (("bench", "gpu", "--models", "bert"), "unknown model 'bert'; choose among: gpt-tiny"),
        (("bench", "memory", "--models", "gpt2-124m,bert"), "unknown model 'bert'; choose among: gpt-tiny"),
        (("how", "--seed", "-1"), "argument --seed: '-1' is not a whole number from 0 to 2^32 - 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_options_are_refused_before_anything_runs(words, message, capsys):
    assert call(*words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_a_reader_who_stops_reading_is_no_error():
    """As in ``gefen-jax doctor | head -1``."""
    command = [sys.executable, "-m", "gefen_jax", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
