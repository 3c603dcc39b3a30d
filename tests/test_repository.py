"""Promises of the repository as a whole: notebooks and modules, imports, extras, the wheel."""
import ast
import os
import re
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, cells

NUMBERED = sorted((ROOT / "nbs").glob("[0-9][0-9]_*.ipynb"))
TARGETS = [p for n in ("train", "checkpoints", "benchmarks") if (p := ROOT / "nbs" / f"{n}.ipynb").exists()]
ALL = sorted([*(ROOT / "nbs").glob("*.ipynb"), *(ROOT / "paper").glob("*.ipynb")])


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.name)
def test_every_notebook_names_the_kernel_of_every_jupyter(path):
    import json
    spec = json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernelspec"]
    assert spec["name"] == "python3" and spec["language"] == "python"


@pytest.mark.parametrize("path", TARGETS, ids=lambda p: p.name)
def test_every_papermill_target_has_one_parameters_cell_and_no_output(path):
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells(path)) == 1
    if path.stem != "benchmarks": assert not any(c.get("outputs") for c in cells(path))  # that one keeps the table of a full run


@pytest.mark.parametrize("path", [p for p in ALL if p not in NUMBERED], ids=lambda p: p.name)
def test_every_notebook_with_parameters_refuses_others(path):
    sources = ["".join(c["source"]) for c in cells(path) if c["cell_type"] == "code"]
    at = next(i for i, c in enumerate(c for c in cells(path) if c["cell_type"] == "code") if "parameters" in c["metadata"].get("tags", []))
    assert "Guard(globals())" in sources[at - 1]
    if "guard.config(globals())" in sources[at + 1]: return
    names = re.findall(r"^(\w+) = ", sources[at], re.M)
    assert sources[at + 1].startswith(f'guard.only(globals(), "{" ".join(names)}")')


@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.name)
def test_every_numbered_notebook_has_name_and_blurb_and_short_cells(path):
    first = "".join(cells(path)[0]["source"])
    assert re.match(rf"# {path.stem[3:]}\n\n> .+", first)
    for c in cells(path):
        if c["cell_type"] == "code": assert sum(bool(line.strip()) for line in c["source"]) <= 40
        assert not any(o.get("output_type") == "error" for o in c.get("outputs", []))


@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.name)
def test_a_module_imports_only_from_rooms_before_it(path):
    order = [p.stem[3:] for p in NUMBERED]
    tree = ast.parse((ROOT / "qkgeo" / f"{path.stem[3:]}.py").read_text(encoding="utf-8"))
    used = [n.module.split(".")[-1] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and (n.level or n.module.startswith("qkgeo"))]
    assert all(order.index(m) < order.index(path.stem[3:]) for m in used)


def test_no_bare_assert_in_exported_code():
    for path in (ROOT / "qkgeo").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)], path


def python(code, **env):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env, timeout=120)


def test_importing_sets_no_matplotlib_backend_and_needs_no_display():
    code = ("import os; os.environ.pop('DISPLAY', None)\nimport matplotlib\nbefore = matplotlib.rcParams._get('backend')\n"
            "import qkgeo.plots\nassert matplotlib.rcParams._get('backend') == before\nprint('fine')")
    done = python(code, MPLBACKEND="TkAgg")
    assert done.stdout.strip() == "fine", done.stderr


def test_the_package_imports_without_its_extras():
    names = [p.stem[3:] for p in NUMBERED]
    block = "import sys\nfor m in ('transformers', 'datasets', 'accelerate', 'gguf', 'tokenizers', 'dask', 'distributed', 'zarr'): sys.modules[m] = None\n"
    done = python(block + "".join(f"import qkgeo.{n}\n" for n in names) + "print('fine')")
    assert done.stdout.strip() == "fine", done.stderr


def test_a_missing_extra_is_named_with_its_install_line(tmp_path):
    code = "import sys; sys.modules['datasets'] = None\nfrom qkgeo.corpus import load_corpus\nload_corpus('wikitext-103')"
    done = python(code, QKGEO_CACHE=str(tmp_path))
    assert done.returncode != 0 and '.[hub]' in done.stderr.strip().splitlines()[-1]


def test_the_wheel_carries_package_style_and_target_notebook(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    wanted = [f"qkgeo/{p.stem[3:]}.py" for p in NUMBERED] + ["qkgeo/qkgeo.mplstyle"]
    assert set(wanted) <= set(names)
    assert any(n.endswith("share/qkgeo/train.ipynb") for n in names)
