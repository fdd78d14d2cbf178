"""`draftline` means this package wherever Python was started.

The trap: from the repository's root, the folder `kernels/` is importable by its bare name, which
is that of a distribution that transformers probes for.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec, resolve_name
from pathlib import Path

import draftline
import pytest
from support.tools.tree_copy import ROOT

PUBLIC_NAMES = {
    "AsyncEngine", "DrafterConfig", "Engine", "EngineConfig", "SamplingParams", "demo_path",
}  # fmt: skip

PROBE = """
import draftline, draftline.core.steps, draftline.models
import transformers
from transformers.utils.import_utils import is_kernels_available
from transformers.integrations import hub_kernels
assert not is_kernels_available()
print(draftline.__file__)
"""

RAY_PROBE = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
def probe():
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(PROBE, {})
    return out.getvalue()

print(ray.get(probe.remote()), end="")
ray.shutdown()
"""


def run_python(code: str, cwd: Path) -> str:
    """Standard output of a fresh interpreter; fails with its standard error."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, check=False, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("folder", ["root", "empty"])
def test_import_from_any_folder(folder: str, tmp_path: Path) -> None:
    cwd = ROOT if folder == "root" else tmp_path
    assert run_python(PROBE, cwd).strip() == str(ROOT / "__init__.py")


def test_from_the_root_the_bare_name_kernels_is_ours_and_empty() -> None:
    """If this fails, the trap is gone and `test_import_from_any_folder` proves less."""
    found = run_python("import kernels; print(kernels.__file__)", ROOT).strip()
    assert found == str(ROOT / "kernels" / "__init__.py")
    assert Path(found).read_text(encoding="utf-8") == ""


@pytest.mark.cluster
@pytest.mark.full
def test_import_inside_a_ray_worker_of_a_driver_in_the_root() -> None:
    output = run_python(f"PROBE = {PROBE!r}\n{RAY_PROBE}", ROOT)
    assert output.strip() == str(ROOT / "__init__.py")


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, draftline; print({'torch', 'ray', 'grpc', 'numpy'} & set(sys.modules))"
    assert run_python(code, ROOT).strip() == "set()"


def test_the_public_names_resolve() -> None:
    assert set(draftline.__all__) >= PUBLIC_NAMES
    for name in draftline.__all__:
        assert getattr(draftline, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = draftline.no_such_name


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # The servers of drafters that copy text start in a fraction of the time.
        ("actors.drafter_server", {"torch", "transformers"}),
        # Ray Serve's controller imports it.
        (
            "deploy.ray_serve.autoscaling",
            {"torch", "transformers", "numba", "grpc", "pydantic"},
        ),
    ],
)
def test_what_starts_often_imports_little(module: str, heavy: set[str], tmp_path: Path) -> None:
    code = f"import sys, draftline.{module}; print(*{heavy!r} & sys.modules.keys())"
    assert run_python(code, tmp_path).split() == []


def named_modules() -> set[str]:
    """Modules of ours that `import_module` is called with by a relative name."""
    found = set()
    for path in ROOT.rglob("*.py"):
        folder = path.relative_to(ROOT).parent
        if not (folder.parts and (ROOT / folder.parts[0] / "__init__.py").is_file()):
            continue
        package = ".".join(("draftline", *folder.parts))
        text = path.read_text(encoding="utf-8")
        if "import_module(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                name = node.args[0]
                if isinstance(name, ast.Constant) and str(name.value).startswith("."):
                    found.add(resolve_name(str(name.value), package))
    return found


def test_modules_that_are_imported_by_name_exist() -> None:
    """No type checker sees these names."""
    named = named_modules()
    assert named
    assert not [name for name in named if find_spec(name) is None]
