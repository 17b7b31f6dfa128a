"""What a user's own environment gets: no torch, all files of the package, and the entry points."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moonclipfs"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in PACKAGE.rglob("*.py")
)


def test_dependencies_hold_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {line.split(">")[0].split("=")[0] for line in project["dependencies"]}
    assert "numpy" in names
    assert not names & {"torch", "safetensors", "moonclip", "zipnn"}
    assert "torch" in project["optional-dependencies"]


@pytest.mark.parametrize(
    "module", ["moonclipfs", "moonclipfs.cli.main", "moonclipfs.store.store", "moonclipfs.fuse.mount"]
)
def test_importing_brings_no_torch(module: str) -> None:
    """In an interpreter of its own; torch is hidden, so that a guarded import would show as well."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"import {module}\n"
        "heavy = {'torch', 'safetensors', 'fsspec', 'pandas', 'scipy'} & {n for n, m in sys.modules.items() if m}\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_imports_without_torch() -> None:
    others = {f"moonclipfs.compat.{name}" for name in ("fsspec", "lightning", "moonclip", "transformers")}
    modules = [module for module in MODULES if module not in others and not module.startswith("moonclipfs.torch")]
    code = "import sys, importlib; sys.modules['torch'] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_entry_points_lead_somewhere() -> None:
    distribution = importlib.metadata.distribution("moonclipfs")
    points = {point.name: point for point in distribution.entry_points}
    assert callable(points["moonclipfs"].load())
    assert points["moonclip"].group == "fsspec.specs"
    assert points["moonclip"].load().protocol in ("moonclip", ("moonclip",))


def test_the_version_is_said_once() -> None:
    import moonclipfs

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert moonclipfs.__version__ == project["version"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_holds_the_whole_package_and_works_alone(tmp_path: Path) -> None:
    """Built from a copy of what git tracks, installed into an environment of its own, run from elsewhere."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", tmp_path, tmp_path / "tree"], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {name for name in tracked.decode().split("\0") if name.startswith("moonclipfs/")}
    assert expected <= names
    for extension in ("_codec", "_fuseinit"):
        assert any(name.startswith(f"moonclipfs/{extension}.") and name.endswith(".so") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "ext/"))]
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--quiet", wheel], check=True, capture_output=True)
    site = sysconfig.get_paths()["purelib"]
    code = "import moonclipfs.store.store as s, sys; print(s.__file__); s.Store.create(sys.argv[1]).close()"
    done = subprocess.run(
        [python, "-c", code, tmp_path / "store"],
        cwd=tmp_path,
        env={"PYTHONPATH": site},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path / "venv"))
