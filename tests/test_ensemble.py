"""Every kind of control, seed by seed against separate runs; a stop by signal; two precisions."""
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import SMALL

from qkgeo.config import config, run_id
from qkgeo.ensemble import Stack, train_ensemble, update_all
from qkgeo.results import collect, load
from qkgeo.training import check, new_run, train, update

ARMS = {"none": {}, "no clip": dict(grad_clip=0.0), "sgd": dict(optimizer="sgd", lr=0.1), "hold": dict(control="hold"),
        "hold, activation": dict(control="hold", control_space="activation", control_every=7), "logit": dict(control="hold", control_rule="logit"),
        "query": dict(control="target", control_target=2, control_side="query"), "sham": dict(control="sham"), "freeze": dict(control="freeze"),
        "compensate": dict(control="compensate"), "penalty": dict(control="penalty-low"),
        "penalty, activation": dict(control="penalty-hold", control_space="activation")}


@pytest.fixture(autouse=True)
def one_thread():
    "Two threads for matrices this small cost more than they save."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def vector(run):
    "All weights of a run in one row."
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize(("arm", "batched"), [*[(arm, True) for arm in ARMS], ("hold", False), ("penalty", False)])
def test_together_as_alone_after_100_steps(tmp_path, text, arm, batched):
    cfg = config(SMALL | {"corpus": str(text), "out_dir": str(tmp_path), "steps": 100} | ARMS[arm])
    corpus = check(cfg)
    together, alone = ([new_run(replace(cfg, seed=s), corpus) for s in (0, 1)] for _ in range(2))
    stack = Stack(together, batched)
    for _ in range(100):
        for got, wanted in zip(update_all(stack), [update(run) for run in alone]): assert got == pytest.approx(wanted, rel=1e-5)
    for a, b in zip(together, alone):
        assert (vector(a) - vector(b)).norm() < 1e-5 * vector(b).norm()
        assert a.controller.steps == b.controller.steps
        assert all(torch.allclose(x[:4], y[:4], rtol=1e-5, equal_nan=True) for x, y in zip(a.controller.rows, b.controller.rows))


def test_shrink_follows_the_ensembles_own_uncontrolled_runs(tmp_path, text):
    cfg = config(SMALL | {"corpus": str(text), "out_dir": str(tmp_path)})
    train_ensemble(cfg, [0, 1], show=False)
    for s in (0, 1): train(replace(cfg, seed=s), show=False)
    shrunk = replace(cfg, control="shrink")
    cube = train_ensemble(shrunk, [0, 1], show=False)
    for s in (0, 1):
        alone = train(replace(shrunk, seed=s), show=False)
        assert np.allclose(cube.pr_layer.sel(seed=s).squeeze(drop=True), alone.pr_layer, rtol=1e-5)
    assert collect(tmp_path / "ensemble").sizes["seed"] == 2


def test_bf16_stays_near_float32(tmp_path, text):
    cfg = config(SMALL | {"corpus": str(text), "out_dir": str(tmp_path), "precision": "bf16"})
    cube = train_ensemble(cfg, [0, 1], show=False)
    for s in (0, 1):
        alone = train(replace(cfg, seed=s), show=False)
        assert np.allclose(cube.val_loss.sel(seed=s).squeeze(drop=True), alone.val_loss, rtol=0.02)


CHILD = """
import json, sys
from qkgeo.config import config
from qkgeo.ensemble import train_ensemble
train_ensemble(config(json.loads(sys.argv[1])), [0, 1], show=False)
"""


def test_an_interrupt_is_obeyed_between_steps_and_the_same_command_goes_on(tmp_path, text):
    values = SMALL | {"corpus": str(text), "steps": 400, "checkpoint_every": 10_000}
    stopped, straight = ({**values, "out_dir": str(tmp_path / d)} for d in ("stopped", "straight"))
    job = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(stopped)], stderr=subprocess.DEVNULL)
    end = time.time() + 120
    while not list(tmp_path.rglob("progress.json")) and time.time() < end: time.sleep(0.05)
    time.sleep(0.2)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(timeout=60) != 0
    assert len(list(tmp_path.rglob("together-*/checkpoint.pt"))) == 1
    for v in (stopped, straight): train_ensemble(config(v), [0, 1], show=False)
    for s in (0, 1):
        a, b = (load(tmp_path / d / "ensemble" / run_id(config({**values, "seed": s})) / "result.nc") for d in ("stopped", "straight"))
        assert a.drop_attrs().equals(b.drop_attrs())
    assert not list(tmp_path.rglob("together-*/checkpoint.pt"))
