"""What a CUDA device has to show, in one go and in less than eight minutes: `python scripts/gpu_check.py --out gpu.json`.

The device computes what the CPU computes, an ensemble computes what separate runs compute, and how long the `paper` sweep would take.
Exits with status 1 if a check fails. `--device cpu --tiny` goes through the same lines where there is no device.
"""
import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from qkgeo.config import ConfigError, config
from qkgeo.corpus import fixed_batch
from qkgeo.ensemble import Stack, compile_loss, update_all
from qkgeo.probe import probe_arrays
from qkgeo.sweep import preset
from qkgeo.training import check, new_run, pick_device, probe_steps, train, update

TINY = dict(depth=2, d_model=16, n_head=2, context=16, batch=8, warmup=5, probe_points=3, probe_sequences=16, probe_subset=4, threads=1)


def relative(a, b):
    "Largest difference over the largest value of `b`, NaN entries left out."
    a, b = np.asarray(a, float), np.asarray(b, float)
    return float(np.nanmax(abs(a - b), initial=0) / max(np.nanmax(abs(b), initial=0), 1e-12))


def weights(run):
    "All weights of a run in one row, on the CPU."
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]).cpu()


def seconds_per_step(step, least):
    "Median seconds of `step`, over at least five calls and `least` seconds; three calls before do not count."
    for _ in range(3): step()
    taken, end = [], time.perf_counter() + least
    while len(taken) < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


def device_against_cpu(cfg, device, steps):
    "The same run on both: geometry at step 0, geometry and loss at the end."
    with tempfile.TemporaryDirectory() as d:
        runs = {n: train(replace(cfg, device=n, steps=steps, out_dir=str(Path(d) / where)), show=False) for n, where in ((device, "device"), ("cpu", "host"))}
    a, b = runs[device], runs["cpu"]
    seen = lambda at: [n for n, v in b.data_vars.items() if "step" in v.dims and v.isel(step=at).notnull().any()]
    worst = lambda at: max((relative(a[n].isel(step=at), b[n].isel(step=at)), n) for n in seen(at))
    return {"step 0, largest relative difference": worst(0), f"step {steps}, largest relative difference": worst(-1),
            "ok": worst(0)[0] < 1e-3 and relative(a.val_loss, b.val_loss) < 1e-3}


def ensemble_against_runs(cfg, corpus, n, steps, least, compiled):
    "n seeds together and one by one: the numbers after some steps, and the time of a step."
    make = lambda: [new_run(replace(cfg, seed=s), corpus) for s in range(n)]
    stack, alone = Stack(make()), make()
    out = {"compiled": compile_loss(stack)} if compiled else {}
    for _ in range(steps):
        update_all(stack)
        for run in alone: update(run)
    out["largest relative difference of weights"] = max(((weights(a) - weights(b)).norm() / weights(b).norm()).item() for a, b in zip(stack.runs, alone))
    together = seconds_per_step(lambda: update_all(stack), least)
    one = seconds_per_step(lambda: update(alone[0]), least)
    return out | {"seconds a step, together": together, "seconds a step, one run": one, "times faster": n * one / together,
                  "ok": out["largest relative difference of weights"] < 1e-4}


def bf16_step(cfg, corpus, least):
    "Seconds of a step in both precisions."
    runs = {p: new_run(replace(cfg, precision=p), corpus) for p in ("float32", "bf16")}
    return {p: seconds_per_step(lambda run=run: update(run), least) for p, run in runs.items()} | {"ok": True}


def timed(cfg, corpus, n, least):
    "Seconds of a step of n seeds together, of a step of one, and of a probe."
    stack, alone = Stack([new_run(replace(cfg, seed=s), corpus) for s in range(n)]), new_run(cfg, corpus)
    batch = [t.to(alone.device) for t in fixed_batch(corpus.val, cfg.context, cfg.probe_sequences)]
    calls = (lambda: update_all(stack), lambda: update(alone), lambda: probe_arrays(alone.model, *batch, subset=cfg.probe_subset))
    return [seconds_per_step(f, least) for f in calls]


def projected(device, corpus_name, least, tiny):
    "Hours of the `paper` sweep: an ensemble for each depth and initialisation, and one by one."
    hours = {"together": 0.0, "one by one": 0.0}
    rows = preset("paper")
    groups = sorted({(r["depth"], r["qk_init"]) for r in rows})
    seeds, measured, corpus = len(rows) // len(groups), {}, check(config(corpus=corpus_name))
    for depth in sorted({d for d, _ in groups}):
        sizes = TINY if tiny else {n: v for n, v in rows[0].items() if n not in ("seed", "qk_init", "depth")} | {"depth": depth}
        cfg = config(sizes | {"device": device, "corpus": corpus_name})
        measured[depth] = timed(cfg, corpus, seeds, least)
    for depth, _ in groups:
        together, one, probe = measured[depth]
        looks = seeds * len(probe_steps(cfg)) * probe
        hours["together"] += (cfg.steps * together + looks) / 3600
        hours["one by one"] += (cfg.steps * seeds * one + looks) / 3600
    return {"hours": hours, "runs": len(rows), "seconds a step together, a step alone, a probe; by depth": measured, "ok": True}


def main():
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--device", default="cuda", help="cuda, or cpu to see that the script runs, which takes long without --tiny")
    ask.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs")
    ask.add_argument("--corpus", default="wikipedia-sample", help="name of a corpus, or path of a text file")
    ask.add_argument("--out", help="JSON file for what was found")
    args = ask.parse_args()
    try: device = pick_device(args.device)
    except ConfigError as e: ask.error(str(e))
    began = time.perf_counter()
    cfg = config((TINY if args.tiny else {}) | {"corpus": args.corpus, "device": device})
    torch.set_num_threads(cfg.threads)
    corpus, n, steps, least = check(cfg), 3 if args.tiny else 12, 5 if args.tiny else 30, 0.05 if args.tiny else 4.0
    found = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__}
    checks = {"device against cpu": lambda: device_against_cpu(cfg, device, steps),
              "ensemble": lambda: ensemble_against_runs(cfg, corpus, n, steps, least, False),
              "ensemble with control": lambda: ensemble_against_runs(replace(cfg, control="hold"), corpus, n, steps, least, False),
              "paper": lambda: projected(device, args.corpus, least, args.tiny),
              "bf16 step": lambda: bf16_step(cfg, corpus, least),
              "ensemble, compiled": lambda: ensemble_against_runs(cfg, corpus, n, steps, least, True)}
    if args.tiny: checks.pop("ensemble, compiled")  # minutes of a compiler's work
    for name, run in checks.items():
        at = time.perf_counter()
        try: found[name] = run()
        except Exception as e: found[name] = {"error": f"{type(e).__name__}: {e}", "ok": False}  # the other checks still tell something
        print(f"{'ok    ' if found[name]['ok'] else 'FAILED'} {name} ({time.perf_counter() - at:.0f} s): {found[name]}", flush=True)
    found["seconds"] = time.perf_counter() - began
    if args.out: Path(args.out).write_text(json.dumps(found, indent=1))
    sys.exit(not all(found[name]["ok"] for name in checks))


if __name__ == "__main__": main()
