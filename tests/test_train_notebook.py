"""The main job through papermill's command line, in a terminal and cell by cell."""
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import nbformat
import papermill as pm
import pytest
import xarray as xr
from conftest import ROOT, SMALL, as_args, cells, papermill
from nbclient import NotebookClient

from qkgeo.config import TrainConfig, config, run_id
from qkgeo.results import load, read_progress

TRAIN = ROOT / "nbs" / "train.ipynb"


def test_the_parameters_cell_declares_every_field_with_its_default():
    declared = pm.inspect_notebook(str(TRAIN))
    assert set(declared) == {f.name for f in fields(TrainConfig)}
    space = {}
    exec("".join(next(c for c in cells(TRAIN) if "parameters" in c["metadata"].get("tags", []))["source"]), space)
    assert config({n: space[n] for n in declared}) == TrainConfig()
    source = "".join(next(c for c in cells(TRAIN) if "parameters" in c["metadata"].get("tags", []))["source"])
    assert all("  # " in line for line in source.splitlines()), "every parameter has its reason beside it"


def test_main_job_leaves_a_notebook_with_figures_and_a_result(tmp_path, text):
    done = papermill(tmp_path, *as_args(SMALL | {"corpus": text}))
    assert done.returncode == 0, done.stderr
    cfg = config(SMALL | {"corpus": str(text)})
    ds = load(tmp_path / "runs" / run_id(cfg) / "result.nc")
    assert ds.attrs["status"] == "finished" and ds.step.values[-1] == 40
    out = cells(tmp_path / "out.ipynb")
    pictures = [o for c in out for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures
    words = "".join("".join(o.get("text", "")) for o in out[-1]["outputs"])
    assert "The gap is positive in" in words and "result.nc" in words and "Loss:" in words
    assert (tmp_path / "out.ipynb").stat().st_size < 1_000_000
    again = papermill(tmp_path, *as_args(SMALL | {"corpus": text}))
    assert again.returncode == 0
    assert "is finished; its result was loaded" in (tmp_path / "out.ipynb").read_text()


@pytest.mark.parametrize(("name", "value", "says"), [
    ("dept", "4", "Did you mean 'depth'?"), ("depth", "four", "a whole number was wanted"), ("lr", "nan", "a finite number was wanted"),
    ("qk_init", "gausian", "Did you mean 'gaussian'?"), ("seed", "1.5", "a whole number was wanted"), ("np", "3", "there is no such parameter"),
    ("corpus", "wikipedia-sampel", "wikipedia-sample"), ("control", "hodl", "Did you mean 'hold'?"), ("device", "gpu", "'cuda'")])
def test_what_cannot_be_meant_is_refused_by_name_before_training(tmp_path, name, value, says):
    done = papermill(tmp_path, "-p", name, value)
    assert done.returncode != 0
    assert name in done.stderr and says in done.stderr
    assert not list(tmp_path.rglob("checkpoint.pt")) and not list(tmp_path.rglob("*.nc"))


def test_text_from_the_command_line_is_understood(tmp_path, text):
    done = papermill(tmp_path, *as_args(SMALL | {"corpus": text, "steps": "1e1", "seed": "007"}))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / run_id(config(SMALL | {"corpus": str(text), "steps": 10, "seed": 7})) / "result.nc").is_file()


def test_a_killed_kernel_loses_nothing_that_was_saved(tmp_path, text):
    values = SMALL | {"corpus": text, "steps": 600, "probe_points": 8}
    cfg = config({**values, "corpus": str(text)})
    folder = tmp_path / "runs" / run_id(cfg)
    command = [sys.executable, "-m", "papermill", str(TRAIN), "out.ipynb", *map(str, as_args(values))]
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    end = time.time() + 120
    while not (folder / "checkpoint.pt").exists() and time.time() < end: time.sleep(0.05)
    os.kill(read_progress(folder)["pid"], signal.SIGKILL)
    assert job.wait(timeout=60) != 0
    assert not (folder / "result.nc").exists()
    assert papermill(tmp_path, *as_args(values)).returncode == 0
    (tmp_path / "straight").mkdir()
    assert papermill(tmp_path / "straight", *as_args(values)).returncode == 0
    xr.testing.assert_equal(load(folder / "result.nc"), load(tmp_path / "straight" / "runs" / run_id(cfg) / "result.nc"))


def test_progress_reaches_the_terminal_under_bare_papermill(tmp_path, text):
    values = SMALL | {"corpus": text, "steps": 1500, "probe_points": 4}
    ours, theirs = pty.openpty()
    users = {n: v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}  # a kernel that sees it keeps its standard error to itself
    command = [sys.executable, "-m", "papermill", str(TRAIN), "out.ipynb", *map(str, as_args(values))]
    job = subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True, env=users)
    os.close(theirs)
    seen = b""
    while True:
        try: part = os.read(ours, 4096)
        except OSError: break
        if not part: break
        seen += part
    assert job.wait(timeout=120) == 0
    assert "of 1,500, loss" in seen.decode(errors="replace") and "steps/s" in seen.decode(errors="replace")


def test_cell_by_cell_and_again_in_one_kernel(tmp_path, text):
    nb = nbformat.read(TRAIN, as_version=4)
    for c in nb.cells:
        if "parameters" in c.metadata.get("tags", []):
            c.source += "\n" + "\n".join(f"{n} = {v!r}" for n, v in (SMALL | {"corpus": str(text)}).items())
    client = NotebookClient(nb, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for _ in range(2):
            for i, c in enumerate(nb.cells): client.execute_cell(c, i)
    assert "The gap is positive in" in nb.cells[-1].outputs[0]["text"]
    assert Path(tmp_path / "runs").is_dir()
