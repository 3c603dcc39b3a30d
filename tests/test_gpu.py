"""What needs a CUDA device (`pytest -m gpu`), and a dry run of the device script where there is none."""
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL

from qkgeo.config import config
from qkgeo.ensemble import Stack, compile_loss, train_ensemble, update_all
from qkgeo.training import check, load_model, new_run, pick_device, train, update

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_cuda(fn):
    "Mark a test as one for a device."
    for mark in gpu: fn = mark(fn)
    return fn


def small(text, tmp_path, **more):
    "A small configuration that writes into the test's folder."
    return config(SMALL | {"corpus": str(text), "out_dir": str(tmp_path)} | more)


def vector(run):
    "All weights of a run in one row."
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_auto_takes_the_device_that_is_there():
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@on_cuda
@pytest.mark.parametrize("control", ["none", "hold"])
def test_a_run_on_the_device_is_the_run_on_the_cpu(tmp_path, text, control):
    cfg = small(text, tmp_path, control=control)
    a, b = train(replace(cfg, device="auto"), show=False), train(cfg, show=False)
    assert a.attrs["device"] == "cuda"
    for name in ("pr_layer", "pr", "entropy", "val_loss", "qk_erank", "control_pr"):
        assert np.allclose(a[name], b[name], rtol=1e-3, equal_nan=True), name
    assert next(load_model(tmp_path / a.attrs["run_id"])[0].parameters()).device.type == "cpu"


@on_cuda
def test_bf16_on_the_device_stays_near_float32(tmp_path, text):
    cfg = small(text, tmp_path, device="cuda")
    assert np.allclose(train(replace(cfg, precision="bf16"), show=False).val_loss, train(cfg, show=False).val_loss, rtol=0.02)


@on_cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_an_ensemble_on_the_device_is_its_separate_runs(tmp_path, text, compiled):
    cfg = small(text, tmp_path, device="cuda", steps=100)
    corpus = check(cfg)
    together, alone = ([new_run(replace(cfg, seed=s), corpus) for s in range(4)] for _ in range(2))
    stack = Stack(together)
    if compiled and not compile_loss(stack): pytest.skip("no compiler for this device")
    for _ in range(100):
        for got, wanted in zip(update_all(stack), [update(run) for run in alone]): assert got == pytest.approx(wanted, rel=1e-4)
    for a, b in zip(together, alone): assert (vector(a) - vector(b)).norm() < 1e-4 * vector(b).norm()


@on_cuda
def test_an_ensemble_on_the_device_trains_probes_and_saves(tmp_path, text):
    cube = train_ensemble(small(text, tmp_path, device="auto", control="hold"), range(3), show=False)
    assert cube.sizes["seed"] == 3 and not cube.pr.isnull().any()


def test_the_device_script_runs_through_on_the_cpu(tmp_path, text):
    command = [sys.executable, ROOT / "scripts" / "gpu_check.py", "--device", "cpu", "--tiny", "--corpus", text, "--out", tmp_path / "gpu.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["ensemble"]["largest relative difference of weights"] < 1e-5
    assert found["paper"]["runs"] == 36 and found["paper"]["hours"]["together"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_device_script_says_at_once_that_there_is_no_device():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "gpu_check.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "torch sees no CUDA device here" in done.stderr
