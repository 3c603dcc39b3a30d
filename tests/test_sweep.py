"""Sweeps under faults: what is killed, broken or refused is named, and what is resumed equals what was never disturbed.

Cases 1, 2, 5, 6, 8 to 11, 14, 25 to 28, 36, 40 and 42 of the collection; 7 is met by `result.nc` (one JSON string), in the results notebook.
"""
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
import xarray as xr
from conftest import ROOT, SMALL, cells

from qkgeo import sweep as module
from qkgeo.config import ConfigError, config, run_id
from qkgeo.results import collect, read_progress
from qkgeo.sweep import Display, LocalPool, Report, find_target, grid, make_job, plan_runs, result_fault, run_job, sweep

QUICK = """
import os, sys
from pathlib import Path
from qkgeo.config import config, run_id
from qkgeo.corpus import load_corpus
from qkgeo.results import save, synthetic
cfg = config({n: v for n, v in globals().items() if n in config().__dataclass_fields__})
folder = Path(out_dir) / run_id(cfg)
print("python", sys.executable, "threads", os.environ["OMP_NUM_THREADS"], "ipython", os.environ["IPYTHONDIR"])
if seed == 13: raise ValueError("thirteen")
if seed == 9: os.kill(os.getpid(), 9)
save(synthetic(cfg).assign_attrs(status="finished", corpus_sha256=load_corpus(corpus).sha256), folder / "result.nc")
"""


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    "A target with the parameters of the real one that writes made-up numbers at once. Its kernelspec exists nowhere."
    nb = nbformat.read(ROOT / "nbs" / "train.ipynb", as_version=4)
    tagged = next(c for c in nb.cells if "parameters" in c.metadata.get("tags", []))
    nb.cells = [tagged, nbformat.v4.new_code_cell(QUICK)]
    nb.metadata = {"kernelspec": {"name": "no_such_env", "language": "python", "display_name": "x"}}
    path = tmp_path_factory.mktemp("target") / "quick.ipynb"
    nbformat.write(nb, path)
    return path


@pytest.fixture(scope="session")
def long(text):
    "Two real runs that take some seconds each."
    return grid(SMALL | {"corpus": str(text), "steps": 800, "checkpoint_every": 20, "probe_points": 8}, seed=[0, 1])


@pytest.fixture(scope="session")
def undisturbed(long, tmp_path_factory):
    "Their cube from a sweep in which nothing happens."
    return sweep(long, tmp_path_factory.mktemp("undisturbed"), workers=2, cores=2, show=False)


def command(*args, cwd=None, **kw):
    "The command as the entry point makes it."
    script = Path(os.environ["QKGEO_CACHE"]) / "qkgeo_sweep"
    script.write_text("import sys\nfrom qkgeo.sweep import qkgeo_sweep\nsys.exit(qkgeo_sweep())\n")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, script, *map(str, args)], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)


def finish(process, seconds=180):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def listed(rows, folder):
    "The runs as a YAML file."
    path = folder / "list.yaml"
    path.write_text(json.dumps([dict(r) for r in rows], default=int))
    return path


def wait_for(check, seconds=120):
    end = time.time() + seconds
    while not check():
        assert time.time() < end, "waited too long"
        time.sleep(0.02)


def names(rows, folder): return [run_id(config({k: v for k, v in r.items()}, out_dir=str(folder))) for r in rows]


def kernels_of(folder): return [read_progress(p)["pid"] for p in folder.iterdir() if read_progress(p).get("status") == "running"]


def test_killed_kernel_killed_sweep_and_ctrl_c_lose_nothing(tmp_path, long, undisturbed):
    out, ids = tmp_path / "out", names(long, tmp_path)
    args = [listed(long, tmp_path), "--out_dir", out, "--workers", 2, "--cores", 2]
    # kill -9 of one kernel at work: listed with its signal, the other run ends well (case 11)
    job = command(*args)
    wait_for(lambda: (out / ids[0] / "checkpoint.pt").exists())
    os.kill(read_progress(out / ids[0])["pid"], signal.SIGKILL)
    code, told, err = finish(job)
    assert code == 1, err
    assert "killed by signal 9 (SIGKILL); out of memory" in told and "goes on from its checkpoint" in told and "1 of 2 finished" in told
    assert (out / ids[0] / "train.ipynb").exists() and not (out / ids[0] / "result.nc").exists()
    # kill -9 of the sweep: its kernels do not live on
    job = command(*args)
    wait_for(lambda: kernels_of(out) and (out / ids[0] / "progress.json").stat().st_mtime > time.time() - 1)
    pids = [p for p in kernels_of(out) if psutil.pid_exists(p)]
    job.kill()
    finish(job)
    wait_for(lambda: not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids), 10)
    # Ctrl-C: a clean end within ten seconds
    job = command(*args)
    since = time.time()
    wait_for(lambda: any(p.stat().st_mtime > since for p in out.glob("*/progress.json")))
    stopped = time.time()
    job.send_signal(signal.SIGINT)
    code, _, err = finish(job)
    assert code == 130 and time.time() - stopped < 10, err
    assert "1 interrupted" in err and "failed" not in err and "the same command goes on" in err
    assert not (out / ids[0] / "result.nc").exists()
    # and on to the end, by --only_failed
    code, told, err = finish(command(*args, "--only_failed"))
    assert code == 0, told + err
    xr.testing.assert_equal(collect(out), undisturbed)
    assert not list(out.rglob(".ipython")) and not list(out.rglob("kernel.log"))


def test_a_dask_worker_killed_at_work_loses_nothing(tmp_path, long, undisturbed):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster, distributed.Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
        code = ("import sys, json\nfrom qkgeo.sweep import sweep\n"
                "sweep(json.loads(sys.argv[1]), sys.argv[2], scheduler=sys.argv[3], show=False)")
        rows = json.dumps([dict(r) for r in long])
        job = subprocess.Popen([sys.executable, "-c", code, rows, str(tmp_path), cluster.scheduler_address], env=os.environ | {"PYTHONPATH": str(ROOT)})
        wait_for(lambda: len(list(tmp_path.glob("*/checkpoint.pt"))) == 2)
        os.kill(pids[0], signal.SIGKILL)
        assert job.wait(timeout=180) == 0
        # equal arguments are another run when the first one's result is gone (case 40)
        (tmp_path / names(long, tmp_path)[0] / "result.nc").unlink()
        again = sweep(long, tmp_path, scheduler=cluster.scheduler_address, show=False)
    xr.testing.assert_equal(again, undisturbed)


def test_nobody_answers_at_the_scheduler(tmp_path, quick, text, monkeypatch):
    rows = grid(SMALL | {"corpus": str(text)}, seed=[0])
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ModuleNotFoundError, match=r"dask.distributed: pip install .*\[cluster\]"):
        sweep(rows, tmp_path, scheduler="tcp://127.0.0.1:9", target=quick)


def test_one_kernel_a_run_with_this_interpreter_its_threads_and_its_own_ipython(tmp_path, quick, text):
    rows = grid(SMALL | {"corpus": str(text)}, seed=np.arange(2), qk_init=("gaussian", "tied"))  # numpy numbers and a tuple (case 10)
    ds = sweep(rows, tmp_path, workers=2, cores=2, target=quick, show=False)
    assert json.loads(ds.attrs["report"])["missing"] == [] and ds.sizes["seed"] == 2
    for name in names(rows, tmp_path):
        words = "".join(cells(tmp_path / name / "train.ipynb")[-1]["outputs"][0]["text"])
        assert f"python {sys.executable} threads 1 ipython {tmp_path / name / '.ipython'}" in words  # cases 5, 25, 42
    code, told, _ = finish(command(listed(rows, tmp_path), "--out_dir", tmp_path, "--dry_run", "--workers", 2, "--cores", 2))
    assert code == 0 and told.count("done") == 4


def test_sixteen_kernels_at_once(tmp_path, quick, text):
    rows = grid(SMALL | {"corpus": str(text)}, seed=range(20, 36))
    ds = sweep(rows, tmp_path, workers=16, cores=16, target=quick, show=False)
    assert ds.sizes["seed"] == 16 and not any(json.loads(ds.attrs["report"]).values())


def test_a_broken_run_keeps_its_traceback_and_stops_only_those_that_need_it(tmp_path, quick, text):
    rows = grid(SMALL | {"corpus": str(text)}, seed=[0, 9, 13]) + [SMALL | {"corpus": str(text), "seed": 13, "control": "shrink"}]
    with pytest.warns(UserWarning, match="collected with gaps"): ds = sweep(rows, tmp_path, workers=2, cores=2, target=quick, show=False)
    report, (_, ninth, thirteenth, shrunk) = json.loads(ds.attrs["report"]), names(rows, tmp_path)
    assert report["failed"][thirteenth] == "ValueError: thirteen" and "SIGKILL" in report["failed"][ninth]
    assert report["not_begun"] == {shrunk: f"needs {thirteenth}, which failed"} and set(report["missing"]) == {ninth, thirteenth, shrunk}
    outputs = [o for c in cells(tmp_path / thirteenth / "train.ipynb") for o in c.get("outputs", [])]
    assert any(o["output_type"] == "error" and o["ename"] == "ValueError" for o in outputs)
    assert not (tmp_path / shrunk).exists() and ds.seed.values.tolist() == [0]


def test_damaged_results_are_made_again(tmp_path, quick, text):
    rows = grid(SMALL | {"corpus": str(text)}, seed=range(3))
    first, ids = sweep(rows, tmp_path, workers=2, cores=2, target=quick, show=False), names(rows, tmp_path)
    (tmp_path / ids[0] / "result.nc").write_bytes(b"")
    cut = tmp_path / ids[1] / "result.nc"
    cut.write_bytes(cut.read_bytes()[:5000])
    kept = (tmp_path / ids[2] / "result.nc").stat().st_mtime_ns
    with pytest.warns(UserWarning, match="unreadable"): assert collect(tmp_path).seed.values.tolist() == [2]
    xr.testing.assert_equal(sweep(rows, tmp_path, workers=2, cores=2, target=quick, show=False), first)
    assert (tmp_path / ids[2] / "result.nc").stat().st_mtime_ns == kept


def test_a_full_disk_is_named_and_survived(tmp_path, quick, text):
    rows = grid(SMALL | {"corpus": str(text)}, seed=range(2))
    plan_runs(rows, tmp_path, target=quick)  # the corpus is in its cache
    code = ("import sys, json\nfrom qkgeo.sweep import carry_out, plan_runs\n"
            "print(carry_out(plan_runs(json.loads(sys.argv[1]), sys.argv[2], target=sys.argv[3]), show=False))")
    command = [sys.executable, "-c", code, json.dumps([dict(r) for r in rows]), str(tmp_path), str(quick)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, preexec_fn=limit, timeout=120)
    assert done.returncode == 0 and "2 failed" in done.stdout, done.stderr
    assert not list(tmp_path.rglob("result.nc")) and not list(tmp_path.rglob("*.tmp"))
    ds = sweep(rows, tmp_path, workers=2, cores=2, target=quick, show=False)
    xr.testing.assert_equal(ds, sweep(rows, tmp_path / "straight", workers=2, cores=2, target=quick, show=False))


def test_a_kernel_that_does_not_come_up_is_tried_three_times(tmp_path, quick, text):
    rows = grid(SMALL | {"corpus": str(text)}, seed=[0])
    plan = plan_runs(rows, tmp_path / "out", target=quick)
    job, count = make_job(plan, next(iter(plan.configs))), tmp_path / "count"
    stubborn = tmp_path / "python"
    stubborn.write_text(f'#!/bin/sh\necho x >> {count}\n[ $(wc -l < {count}) -lt $FAILS ] && echo "no luck" && exit 7\nexec {sys.executable} "$@"\n')
    stubborn.chmod(0o755)
    os.environ["FAILS"] = "3"
    try:
        assert run_job(job | {"python": [str(stubborn)]}) | {"seconds": 0} == {"id": job["id"], "status": "finished", "reason": "", "starts": 3, "seconds": 0}
        (tmp_path / "out" / job["id"] / "result.nc").unlink()
        os.environ["FAILS"] = "99"
        outcome = run_job(job | {"python": [str(stubborn)]})
    finally: del os.environ["FAILS"]
    assert (outcome["status"], outcome["starts"]) == ("failed", 3)
    assert "the kernel died while it started: it left with exit status 7; its last words: no luck" in outcome["reason"]


def test_a_cell_is_never_run_twice(tmp_path, quick, text):
    plan = plan_runs(grid(SMALL | {"corpus": str(text)}, seed=[9]), tmp_path, target=quick)
    outcome = run_job(make_job(plan, next(iter(plan.configs))))
    assert (outcome["status"], outcome["starts"]) == ("failed", 1) and "at work: killed by signal 9" in outcome["reason"]
    assert "exception\": null" in (tmp_path / outcome["id"] / "train.ipynb").read_text(), "papermill itself calls this run completed"


def test_a_killed_worker_process_is_one_failed_run(tmp_path, quick, text):
    plan = plan_runs(grid(SMALL | {"corpus": str(text)}, seed=[0, 1]), tmp_path, target=quick)
    pool, (first, second) = LocalPool(1, subprocess.DEVNULL), plan.configs
    pool.start(make_job(plan, first))
    pool.workers[0].process.kill()
    outcomes = []
    wait_for(lambda: outcomes.extend(pool.poll()) or outcomes)
    assert "its worker process died: killed by signal 9" in outcomes[0]["reason"]
    pool.start(make_job(plan, second))
    wait_for(lambda: len(outcomes) > 1 or outcomes.extend(pool.poll()))
    pool.close()
    assert outcomes[1]["status"] == "finished" and result_fault(tmp_path, second) == ""


def test_sigterm_ends_a_sweep_that_inherited_an_ignored_sigint(tmp_path, long):
    out = tmp_path / "out"
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = command(listed(long[:1], tmp_path), "--out_dir", out, "--cores", 1, preexec_fn=ignore)
    wait_for(lambda: (out / ".sweep.owner.json").exists() and list(out.glob("*/kernel.log")))
    stopped = time.time()
    job.terminate()
    code, _, err = finish(job)
    assert code == 130 and time.time() - stopped < 10 and "the same command goes on" in err


def test_a_finished_result_on_another_text_and_a_list_that_is_no_cube_are_told(tmp_path, quick):
    text = tmp_path / "own.txt"
    text.write_text("abcdefgh " * 600)
    rows = grid(SMALL | {"corpus": str(text), "seed": 0}, lr=[1e-3, 2e-3])
    sweep(rows[:1], tmp_path / "out", cores=1, target=quick, show=False)
    kept = next((tmp_path / "out").glob("*/result.nc"))
    before = kept.read_bytes()
    code, told, err = finish(command(listed(rows, tmp_path), "--out_dir", tmp_path / "out", "--cores", 1, "--dry_run"))
    assert code == 0 and "note: lr differs between the runs: 0.001, 0.002; collect will refuse" in err and "done" in told
    text.write_text("hgfedcba " * 600)
    code, _, err = finish(command(listed(rows[:1], tmp_path), "--out_dir", tmp_path / "out", "--cores", 1))
    assert code == 2 and "1 fault, nothing was started" in err and "is finished, but on another text: sha256" in err and "delete" in err
    assert kept.read_bytes() == before


def test_two_sweeps_on_one_folder(tmp_path, quick, text):
    rows = grid(SMALL | {"corpus": str(text)}, seed=[0])
    with module._hold(tmp_path):
        code, _, err = finish(command(listed(rows, tmp_path), "--out_dir", tmp_path))
    assert code == 2 and f"is being swept by process {os.getpid()} on" in err
    assert not list(tmp_path.rglob("train.ipynb"))


def test_nothing_starts_when_something_is_wrong(tmp_path, quick, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [SMALL | {"corpus": str(text)}, SMALL | {"corpus": "no.txt"}, {"lr": "nan"}, {"dept": 3}, {"out_dir": "/tmp/elsewhere"}, SMALL | {"qk_init": "tide"}]
    code, _, err = finish(command(listed(rows, tmp_path), "--out_dir", "out", "--workers", "500"))
    assert code == 2
    for words in ("workers: 500 ×", "no.txt", "run 3: lr: 'nan' came", "Did you mean 'depth'?", "run 5: out_dir:", "'tied'"): assert words in err, words
    (tmp_path / "file").write_text("")
    code, _, err = finish(command(listed(rows[:1], tmp_path), "--out_dir", "file"))
    assert code == 2 and "out_dir: nothing can be written to 'file'" in err
    nb = nbformat.read(quick, as_version=4)
    nb.cells[0].metadata.tags = []
    nbformat.write(nb, tmp_path / "untagged.ipynb")
    with pytest.raises(ConfigError, match="has 0 cells tagged 'parameters'"): sweep(rows[:1], "out", target=tmp_path / "untagged.ipynb")
    assert not list(tmp_path.rglob("*.nc")) and not list(tmp_path.rglob("kernel.log"))


def test_no_parameter_leads_out_of_the_folder(tmp_path, quick):
    evil = tmp_path / "..; rm -rf x.txt"
    evil.write_text("abcdefgh " * 600)
    rows = [SMALL | {"corpus": str(evil), "seed": s} for s in (0, 1)]
    before = set(tmp_path.iterdir())
    sweep(rows, tmp_path / "out", cores=2, target=quick, show=False)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out"}
    assert all((tmp_path / "out" / n).parent == tmp_path / "out" and (tmp_path / "out" / n / "result.nc").exists() for n in names(rows, tmp_path))


def test_the_target_of_a_wheel_is_found_or_said_to_be_missing(tmp_path, monkeypatch):
    package = tmp_path / "lib" / "site-packages" / "qkgeo" / "__init__.py"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: type("Spec", (), {"origin": str(package)}))
    monkeypatch.setattr(module.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(module.site, "getuserbase", lambda: str(tmp_path / "user"))
    with pytest.raises(ConfigError, match=r"train.ipynb is missing: looked in .*share/qkgeo"): find_target()
    installed = tmp_path / "share" / "qkgeo" / "train.ipynb"
    installed.parent.mkdir(parents=True)
    installed.write_text("{}")
    assert find_target() == installed


def test_the_terminal_shows_one_block(tmp_path):
    stream = io.StringIO()
    stream.isatty = lambda: True
    report = Report(["a", "b", "c"], Path(tmp_path), running=["a"])
    display = Display(report, stream=stream)
    display.update(force=True)
    report.running, report.failed = ["b"], {"a": "ValueError: no"}
    display.update(force=True)
    drawn = stream.getvalue()
    assert "\x1b[2F" in drawn and "running     a" in drawn and "failed      a  ValueError: no" in drawn.split("\x1b[2F")[1]
