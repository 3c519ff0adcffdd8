"""Imports point one way, vendor libraries enter lazily through the files named after them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Low to high; a module may import its own layer and those before it.
RUNTIME_LAYERS = (
    "errors", "faults", "specs", "artifacts", "device", "backends", "export", "compress", "quantize", "datasets",
    "executor", "quality", "benchmark", "promotion", "predictions", "scoring",
)  # fmt: skip
PACKAGES = ("gpu_runtime", "inference_resources", "inference_dags")

# Vendor library → the files that may import it, relative to the root.
VENDORS = {
    "torch": ("gpu_runtime/export/", "gpu_runtime/compress/", "gpu_runtime/backends/pytorch_backend.py",
              "inference_dags/defs/"),
    "onnx": ("gpu_runtime/export/", "gpu_runtime/quantize/", "gpu_runtime/backends/tensorrt_backend.py"),
    "onnxruntime": ("gpu_runtime/backends/onnxruntime_backend.py", "gpu_runtime/quantize/"),
    "openvino": ("gpu_runtime/backends/openvino_backend.py",),
    "tensorrt": ("gpu_runtime/backends/tensorrt_backend.py",),
    "tensorrt_rtx": ("gpu_runtime/backends/tensorrt_backend.py",),
    "cuda": ("gpu_runtime/device/", "gpu_runtime/backends/tensorrt_backend.py"),
    "pynvml": ("gpu_runtime/benchmark/telemetry.py",),
    "PIL": ("gpu_runtime/datasets/decode.py",),
    "cv2": ("inference_dags/defs/photo_tags/land.py", "gpu_runtime/datasets/decode.py"),
    "simplejpeg": ("gpu_runtime/datasets/decode.py",),
    "pyarrow": ("gpu_runtime/datasets/", "gpu_runtime/predictions/", "inference_dags/defs/"),
    "obstore": ("gpu_runtime/predictions/storage.py",),
    "scipy": ("gpu_runtime/quality/",),
    "deltalake": ("gpu_runtime/predictions/",),
    "pandas": ("gpu_runtime/predictions/", "inference_dags/defs/"),
    "safetensors": ("gpu_runtime/quantize/", "inference_dags/defs/"),
    "dagster": ("resources/", "inference_dags/"),
}  # fmt: skip
# Imported at module level only where it is a core dependency and its own layer.
EAGER = {"dagster"}


def modules() -> list[Path]:
    found = [p for top in ("gpu_runtime", "resources", "inference_dags") for p in (ROOT / top).rglob("*.py")]
    return sorted(found)


def imported(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def at_module_level(tree: ast.Module) -> set[ast.AST]:
    """Nodes that run when the module is imported; what stands under TYPE_CHECKING does not."""
    run: set[ast.AST] = set()
    for statement in tree.body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            run.update(ast.walk(statement))
    return run


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_down_and_vendors_stay_in_their_rooms(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    eager = at_module_level(tree)
    top = "inference_resources" if relative.startswith("resources/") else relative.partition("/")[0]
    for name, node in imported(tree):
        library = name.partition(".")[0]
        if library in PACKAGES:
            assert PACKAGES.index(library) <= PACKAGES.index(top), f"{relative} imports {name}: a layer above it"
            if library == top == "gpu_runtime" and "." in name:
                assert layer(name.split(".")[1]) <= layer(path.relative_to(ROOT / top).parts[0]), f"{relative}: {name}"
        if library in VENDORS:
            assert relative.startswith(VENDORS[library]), f"{relative} may not import {library}"
            lazy_here = library not in EAGER and not relative.startswith("inference_dags/defs/")
            assert not (lazy_here and node in eager), f"{relative} imports {library} when it is imported"


def layer(name: str) -> int:
    name = name.removesuffix(".py")
    return -1 if name == "__init__" else RUNTIME_LAYERS.index(name)


def run_python(code: str, *path: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd, timeout=120
    )


def test_everything_imports_with_no_optional_library_and_touches_no_device() -> None:
    names = [
        ".".join(path.relative_to(ROOT / ("resources" if "resources" in path.parts else "")).with_suffix("").parts)
        for path in modules()
        if "defs" not in path.relative_to(ROOT).parts
    ]
    code = f"""
import importlib, sys, threading
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(set(VENDORS) - {"dagster", "pandas"})!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for name in {names!r}:
    importlib.import_module(name.removesuffix(".__init__"))
assert threading.active_count() == 1, threading.enumerate()
print("imported", len({names!r}))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("imported")


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_project_with_its_own_resources_and_tests_can_install_this_one(tmp_path: Path, ours_first: bool) -> None:
    for name in ("resources", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("owner = 'theirs'\n")
    ours, theirs = [ROOT, ROOT / "resources"], [tmp_path]
    code = """
import resources, tests, inference_resources, inference_dags, gpu_runtime
assert resources.owner == tests.owner == 'theirs', (resources, tests)
"""
    result = run_python(code, *(ours + theirs if ours_first else theirs + ours), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
