"""The wheel holds every module and every data file: an editable install would not notice a missing one."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"zplan": "zplan", "planner": "zplan/planner", "runtime": "zplan/runtime", "cuda_ops": "zplan/cuda_ops"}

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The unpacked wheel, built from a copy so that the checkout stays clean, without network or isolation."""
    source, out, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "out", "wheel"))
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, check=True, capture_output=True, timeout=100)
    (path,) = out.glob("*.whl")
    zipfile.ZipFile(path).extractall(unpacked)
    return unpacked


def checkout_files(*suffixes: str) -> list[str]:
    """Where every file of the checkout with one of these suffixes must lie in the wheel."""
    return sorted(
        f"{inside}/{path.relative_to(ROOT / folder)}"
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    )


def test_every_module_imports_from_the_wheel(wheel, tmp_path):
    files = checkout_files(".py")
    assert "zplan/planner/ledger.py" in files
    modules = [f.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for f in files]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(wheel), *(m for m in modules if m != "zplan.__main__")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(wheel), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_every_data_file_is_in_the_wheel(wheel):
    missing = [f for f in checkout_files(".json", ".csv", ".cu", ".cpp", ".cuh", ".h") if not (wheel / f).is_file()]
    assert not missing


def test_wheel_metadata(wheel):
    (info,) = wheel.glob("*.dist-info")
    assert "zplan = zplan.cli:main" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    metadata = (info / "METADATA").read_text()
    core = [x for x in metadata.splitlines() if x.startswith("Requires-Dist:") and "extra ==" not in x]
    assert sorted(x.split()[1].split(">")[0] for x in core) == ["click", "numpy", "tabulate"]
