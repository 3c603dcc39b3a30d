"""The notebooks of the paper: they run from the committed datasets, draw the committed figures, and say nothing that was typed."""
import ast
import json
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from conftest import ROOT, SMALL, as_args, cells

from qkgeo.config import config, run_id
from qkgeo.results import final, load, save, synthetic

PAPER = ROOT / "paper"
FIGURES = ["overview", "f1_trajectories", "f2_gap", "f3_coupling", "f4_causal", "f5_dose", "f6_specifications", "f7_spectra", "f8_origin",
           "f9_pretraining", "f10_link", "t1_claims"]
NOTEBOOKS = [*FIGURES, "report", "collect", "acute", "pretrained"]
SETS = [p for p in sorted((PAPER / "results").glob("*.nc"))]
NO_KERNEL = "Kernel died before replying to kernel_info", "Kernel didn't respond in"
needs_sets = pytest.mark.skipif(not SETS, reason="there are no datasets in paper/results yet")


def run(name, notebook, cwd=ROOT, timeout=600, tries=3, **parameters):
    """One notebook of the paper through papermill's command line. A kernel that never came up is started again, as a
    sweep does: its ports are chosen before it binds them, and another kernel that starts meanwhile may take one."""
    command = [sys.executable, "-m", "papermill", str(PAPER / f"{name}.ipynb"), str(notebook), *map(str, as_args(parameters))]
    for _ in range(tries):
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
        if not any(said in done.stderr for said in NO_KERNEL): break
    return done


def run_all(folder, results, cwd=ROOT):
    "All figures, two at a time, then the report; CPU seconds they took."
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    where = {"results": results, "figures": folder / "figures"}
    (folder / "figures").mkdir()
    with ThreadPoolExecutor(2) as pool: done = list(pool.map(lambda n: run(n, folder / f"{n}.ipynb", cwd, **where), FIGURES))
    done.append(run("report", folder / "report.ipynb", cwd, **where))
    for name, one in zip([*FIGURES, "report"], done): assert one.returncode == 0, f"{name}: {one.stderr[-2000:]}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def said(path):
    "All that a notebook displays as Markdown."
    shown = [o["data"].get("text/markdown", "") for c in cells(path) for o in c.get("outputs", []) if "data" in o]
    return "\n".join("".join(text) for text in shown)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    "Everything drawn anew from the committed datasets."
    folder = tmp_path_factory.mktemp("paper")
    return folder, run_all(folder, PAPER / "results")


@needs_sets
def test_all_notebooks_run_in_two_minutes_on_two_cores(fresh):
    assert fresh[1] / 2 < 120, f"{fresh[1]:.0f} s of CPU time"  # not wall time: other work may share the machine


@needs_sets
def test_figures_are_redrawn_byte_by_byte_and_none_is_left_over(fresh):
    made = {p.name: p.read_bytes() for p in (fresh[0] / "figures").iterdir()}
    kept = {p.name: p.read_bytes() for p in (PAPER / "figures").iterdir() if not p.name.startswith(".")}
    assert sorted(made) == sorted(kept)
    differing = [n for n in made if made[n] != kept[n]]
    assert not differing, f"draw again and commit: {differing}"


@needs_sets
def test_committed_report_and_table_say_what_a_fresh_evaluation_says(fresh):
    for name in ("t1_claims", "report"):
        told = said(PAPER / f"{name}.ipynb")
        assert told and told.replace("figures/", "") == said(fresh[0] / f"{name}.ipynb").replace(f"{fresh[0]}/figures/", "")


@needs_sets
def test_report_becomes_one_html_file(fresh, tmp_path):
    command = ["jupyter", "nbconvert", "--to", "html", "--no-input", "--embed-images", "--output-dir", tmp_path, fresh[0] / "report.ipynb"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "data:image/png" in html and "C4" in html and 'src="figures' not in html


@needs_sets
def test_datasets_are_small_and_say_where_they_come_from():
    assert sum(p.stat().st_size for p in SETS) < 40e6
    for path in SETS:
        with xr.open_dataset(path) as ds:
            assert {"git_commit", "versions", "config"} <= set(ds.attrs), path.name
            runs = json.loads(ds.attrs["config"])
            for c in runs if isinstance(runs, list) else [runs]: assert not any(Path(v).is_absolute() for v in c.values() if isinstance(v, str)), path.name
            assert "planted" not in str(ds.attrs) and ds.attrs.get("status") != "synthetic", path.name


def test_without_datasets_everything_says_not_run(tmp_path):
    (tmp_path / "empty").mkdir()
    run_all(tmp_path, tmp_path / "empty", cwd=PAPER)
    for name in [n for n in FIGURES if n != "t1_claims"]: assert "not run" in said(tmp_path / f"{name}.ipynb"), name
    table = (tmp_path / "figures" / "t1_claims.md").read_text(encoding="utf-8")
    assert table.count("| not run |") == 10 and "supported" not in table
    report = said(tmp_path / "report.ipynb")
    assert "has not been run" in report and ": supported" not in report and ": contradicted" not in report
    assert sorted(p.suffix for p in (tmp_path / "figures").iterdir() if p.stem not in ("t1_claims",)) == [".csv"] * 6


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_function_is_defined_in_a_paper_notebook(name):
    for c in cells(PAPER / f"{name}.ipynb"):
        if c["cell_type"] != "code": continue
        kinds = {type(n).__name__ for n in ast.walk(ast.parse("".join(c["source"])))}
        assert not kinds & {"FunctionDef", "AsyncFunctionDef", "Lambda", "ClassDef"}
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells(PAPER / f"{name}.ipynb")) == 1


def test_every_paper_notebook_is_known():
    assert {p.stem for p in PAPER.glob("*.ipynb")} == set(NOTEBOOKS)


NAMES = r"C[1-6]|[FT]\d+|[ft]\d\w*|arXiv 2609\.34273|ACML 2026|WikiText-(2|103)|95 %|step 0"  # names, and a level


def texts(tree):
    "Text in code, but not format specifications."
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FormattedValue): yield from texts(ast.Expression(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str): yield node.value
        else: yield from texts(node)


def test_no_number_in_the_report_was_typed():
    for c in cells(PAPER / "report.ipynb"):
        source = "".join(c["source"])
        if "# the pilot:" in source: continue  # disclosed as typed, and only there
        found = [source] if c["cell_type"] == "markdown" else list(texts(ast.parse(source)))
        for text in found: assert not re.search(r"\d", re.sub(NAMES, "", text)), text


def sweep_folder(folder, configs, lost=()):
    "A finished sweep with made-up numbers."
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps([asdict(c) for c in configs]))
    for c in configs:
        if c not in lost: save(synthetic(c, (0, 1, 100, 200, 300)), folder / run_id(c) / "result.nc")


def test_collect_gathers_a_sweep_and_names_what_is_missing(tmp_path):
    runs = [config(depth=d, d_model=16, n_head=2, seed=s, steps=300, out_dir=str(tmp_path / "here")) for d in (2, 3) for s in (0, 1)]
    sweep_folder(tmp_path / "runs", runs, lost=runs[:1])
    done = run("collect", "out.ipynb", tmp_path, runs_dir="runs", out="set", results=tmp_path)
    assert done.returncode == 0, done.stderr
    ds = load(tmp_path / "set.nc")
    assert dict(ds.sizes) == {"depth": 2, "qk_init": 1, "control": 1, "seed": 2, "step": 5, "layer": 3, "head": 2, "side": 2, "rank": 8, "when": 2}
    assert json.loads(ds.attrs["report"])["missing"] == [run_id(runs[0])] and "Missing: 1 runs" in said(tmp_path / "out.ipynb")
    assert {c["out_dir"] for c in json.loads(ds.attrs["config"])} == {"here"} and str(tmp_path) not in str(ds.attrs)
    one, kept = load(tmp_path / "runs" / run_id(runs[3]) / "result.nc"), ds.sel(depth=3, seed=1, qk_init="gaussian", control="none")
    np.testing.assert_allclose(kept.pr, one.pr, rtol=1e-6)
    assert kept.spectrum.dropna("step", how="all").step.values.tolist() == [0, 200, 300] and "0, 200, 300" in ds.attrs["thinned"]
    np.testing.assert_allclose(kept.spectrum.sel(step=200), one.spectrum.sel(step=200), rtol=1e-6)


def test_collect_adds_what_came_later_to_the_set_that_is_there(tmp_path):
    runs = [config(depth=2, d_model=16, n_head=2, seed=s, steps=300, control=c) for c in ("none", "hold") for s in (0, 1)]
    sweep_folder(tmp_path / "all", runs)
    sweep_folder(tmp_path / "first", runs, lost=runs[2:])
    sweep_folder(tmp_path / "later", runs[1:], lost=runs[3:])  # one is known, one is new, one is still missing
    for folder, out, more in (("all", "whole", {}), ("first", "parts", {}), ("later", "parts", {"add": "true"})):
        done = run("collect", f"{folder}.ipynb", tmp_path, runs_dir=folder, out=out, results=tmp_path, **more)
        assert done.returncode == 0, done.stderr
    whole, parts = load(tmp_path / "whole.nc"), load(tmp_path / "parts.nc")
    assert json.loads(parts.attrs["report"])["missing"] == [run_id(runs[3])]
    assert parts.attrs["n_runs"] == 3 and "3 of 4 listed runs" in said(tmp_path / "later.ipynb")
    wanted = whole.where((whole.control_mode == "none") | (whole.seed == 0))
    for name in ("pr", "spectrum", "entropy", "val_loss"): xr.testing.assert_equal(parts[name], wanted[name])
    assert "run_attributes" not in parts.attrs  # the parts were made alike
    assert len(json.loads(parts.attrs["config"])) == 3 and abs(parts.attrs["wall_time_s"] - 0.75 * whole.attrs["wall_time_s"]) < 1e-6
    mixed = [config(depth=2, d_model=16, n_head=2, seed=5, steps=300, precision="bf16")]
    sweep_folder(tmp_path / "mixed", mixed)
    for folder, out, says in (("later", "nothing", "no such set to add to"), ("mixed", "parts", "precision differs between the runs")):
        done = run("collect", "refused.ipynb", tmp_path, runs_dir=folder, out=out, results=tmp_path, add=True)
        assert done.returncode != 0 and says in done.stderr
    xr.testing.assert_identical(load(tmp_path / "parts.nc"), parts)


def test_collect_puts_other_differences_along_variant(tmp_path):
    runs = [config(depth=2, d_model=16, n_head=2, seed=s, steps=300, optimizer=o) for o in ("sgd", "adamw") for s in (0, 1)]
    sweep_folder(tmp_path / "runs", runs)
    done = run("collect", "out.ipynb", tmp_path, runs_dir="runs", out="set", results=tmp_path)
    assert done.returncode == 0, done.stderr
    ds = load(tmp_path / "set.nc")
    assert ds.variant.values.tolist() == ["optimizer sgd", "optimizer adamw"] and ds.optimizer.values.tolist() == ["sgd", "adamw"]
    one = load(tmp_path / "runs" / run_id(runs[2]) / "result.nc")
    np.testing.assert_allclose(ds.pr.sel(variant="optimizer adamw", seed=0).squeeze(drop=True), one.pr, rtol=1e-6)


@pytest.mark.parametrize(("name", "given", "says"), [
    ("collect", {"runs_dri": "runs", "out": "x"}, "Did you mean 'runs_dir'?"), ("acute", {}, "runs_dir: '' came"), ("collect", {"out": "x"}, "both are wanted"),
    ("f1_trajectories", {"resluts": "x"}, "Did you mean 'results'?"), ("f2_gap", {"results": "nowhere"}, "there is no folder"),
    ("collect", {"runs_dir": "nowhere", "out": "x"}, "there is no such file"), ("pretrained", {"out": "x"}, "all three are wanted"),
    ("collect", {"runs_dir": "x", "out": "x", "add": "perhaps"}, "add: 'perhaps' came, true or false was wanted"),
    ("pretrained", {"source": "x.nc", "out": "x", "title": "X"}, "there is no such file")])
def test_a_misspelt_or_wrong_folder_is_refused(tmp_path, name, given, says):
    done = run(name, "out.ipynb", tmp_path, **given)
    assert done.returncode != 0 and says in done.stderr
    assert not list(tmp_path.rglob("*.nc"))


def pretrained(path, name, analogue, steps, seed):
    "A made-up model of four layers and six query heads that share two key heads, as `nbs/checkpoints.ipynb` leaves it."
    draw, one = np.random.default_rng(seed), synthetic(config(depth=4, d_model=48, n_head=6, seed=seed), steps)
    sided = [n for n, v in one.data_vars.items() if {"head", "side"} <= set(v.dims)]
    two = xr.concat([one, one], xr.Variable("rope", ["before", "after"]), data_vars=sided, coords="minimal", compat="override")
    for n in ("pr", "entropy", "interaction_erank", "logit_std"): two[n] = two[n] * draw.uniform(0.7, 1, two[n].shape)
    two["pr"] = two.pr.where((two.side == "query") | (two["head"] < 2))
    two = two.assign_coords(tokens=("step", 1e3 * np.array(steps) if len(steps) > 1 else [np.nan]))
    attrs = {"config": json.dumps({"source": f"/somewhere/{name}"}), "analogue": analogue, "architecture": "LlamaForCausalLM", "facts": "{}"}
    save(two.assign(n_kv=xr.full_like(two.n_kv, 2)).assign_attrs(attrs), path)


def test_pretrained_models_are_stored_drawn_and_judged(tmp_path):
    made = {"a": (0, (0,)), "b": (0, (0,)), "c": (1, (0, 10, 20, 40, 80))}
    for i, (name, (analogue, steps)) in enumerate(made.items()):
        pretrained(tmp_path / name / "result.nc", name, analogue, steps, i)
        done = run("pretrained", f"{name}.ipynb", tmp_path, source=f"{name}/result.nc", out=name, title=f"Model {name}", results=tmp_path / "results")
        assert done.returncode == 0, done.stderr
        kept = load(tmp_path / "results" / f"pretrained_{name}.nc")
        assert kept.attrs["model"] == f"Model {name}" and "somewhere" not in str(kept.attrs) and kept.pr.dtype == np.float32 and "facts" not in kept.attrs
    for name in ("f9_pretraining", "f10_link", "t1_claims"):
        done = run(name, f"{name}.ipynb", tmp_path, results=tmp_path / "results", figures=tmp_path / "figures")
        assert done.returncode == 0, done.stderr
    assert {"f9_series.png", "f9_models.png", "f10_heads.png", "f10_links.png"} <= {p.name for p in (tmp_path / "figures").iterdir()}
    table = (tmp_path / "figures" / "t1_claims.csv").read_text(encoding="utf-8")
    assert "C5,pretrained,not run" in table and "C6,pretrained,undecided" in table
    assert "Series of public families: not run" in said(tmp_path / "f9_pretraining.ipynb")


def test_acute_reads_checkpoints_and_the_compensated_arm_changes_nothing(tmp_path, text):
    from qkgeo.training import train
    runs = [config(SMALL | {"corpus": str(text), "seed": s, "out_dir": str(tmp_path / "runs")}) for s in (0, 1)]
    for c in runs: train(c, show=False)
    (tmp_path / "runs" / "runs.json").write_text(json.dumps([asdict(c) for c in runs]))
    done = run("acute", "out.ipynb", tmp_path, runs_dir="runs", results=tmp_path)
    assert done.returncode == 0, done.stderr
    ds = xr.load_dataset(tmp_path / "acute.nc")
    assert ds.seed.values.tolist() == [0, 1] and ds.when.values.tolist() == ["before", "after"] and "hold · energy as trained" in ds.arm.values
    change = abs(ds.entropy.sel(when="after") - ds.entropy.sel(when="before")).max(["seed", "layer", "head"])
    assert change.sel(arm="compensate") < 1e-4 < change.sel(arm="scale · × 0.5")
    assert os.path.getsize(tmp_path / "acute.nc") < 1e6


def test_numbers_in_the_readme_are_those_of_the_table():
    parts = pd.read_csv(PAPER / "figures" / "t1_parts.csv").query("set == 'wikitext'").set_index("part")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    moved = {f"{side} {when}": abs(parts.effect[f"C1 {side}, layer-wide, from step {when}"]) for side in ("queries", "keys") for when in ("0", "150 on")}
    narrower, sharper = (parts.effect[f"C3 {words}, differences"] for words in ("narrower QKᵀ", "sharper attention"))
    end, window = parts.loc["C2 layer-wide, at the end"], parts.loc["C2 layer-wide, from step 150 on"]
    for words in (f"falls by {moved['queries 0']:.1f} dimensions from step 0 to the end and that of keys by {moved['keys 0']:.1f}",
                  f"rank correlation of changes {narrower:+.2f} and {sharper:+.2f} above them",
                  f"queries gain {moved['queries 150 on']:.1f} and keys lose {moved['keys 150 on']:.1f}",
                  f"positive in {end['count']:.0f} of {end.total:.0f} seed-averaged trajectories, {end.effect:.1f} dimensions on average",
                  f"it is not, in all {window.total - window['count']:.0f} of them"):
        assert words in text, words


def test_the_numbers_on_the_embedded_corpus_in_the_readme_are_those_of_the_table():
    parts = pd.read_csv(PAPER / "figures" / "t1_parts.csv").set_index(["set", "part"])
    text, of = (ROOT / "README.md").read_text(encoding="utf-8"), parts.loc["wikipedia"]
    whole = {f"{side} {when}": abs(of.effect[f"C1 {side}, layer-wide, from step {when}"]) for side in ("queries", "keys") for when in ("0", "150 on")}
    heads, end = of.loc["C1 keys, per head, from step 150 on"], of.loc["C2 layer-wide, at the end"]
    for words in (f"From step 0 queries fall by {whole['queries 0']:.1f} and keys by {whole['keys 0']:.1f}",
                  f"queries gain {whole['queries 150 on']:.1f} and keys lose {whole['keys 150 on']:.1f}",
                  f"positive in {end['count']:.0f} of {end.total:.0f}, {end.effect:.1f} on average, and not all the way in any of them",
                  f"correlations are {of.effect['C3 narrower QKᵀ, differences']:+.2f} and {of.effect['C3 sharper attention, differences']:+.2f}",
                  f"they gain {heads.effect:.1f} (interval {heads.low:+.1f} to {heads.high:+.1f})",
                  f"on WikiText they lose {-parts.effect['wikitext', 'C1 keys, per head, from step 150 on']:.1f}"):
        assert words in text, words
    assert of.loc["C2 layer-wide, from step 150 on", "count"] == 0


def test_the_causal_numbers_in_the_readme_are_those_of_the_figures():
    arms, once = pd.read_csv(PAPER / "figures" / "f4_effects.csv").query("set == 'causal'").set_index("row"), pd.read_csv(PAPER / "figures" / "f4_acute.csv")
    text, once = (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-"), once[once.reading == "entropy"].set_index("row")
    shrink, hold = arms.loc["shrink · energy as trained"], arms.loc["hold · energy as trained"]
    for words in (f"softens attention a little (entropy {shrink.effect:+.3f}, interval {shrink.low:+.3f} to {shrink.high:+.3f})",
                  f"decides neither way ({hold.effect:+.3f}, interval {hold.low:+.3f} to {hold.high:+.3f})",
                  f"with the PR free, gives {arms.effect['scale · × 1']:+.3f}", f"shrinking does sharpen ({once.effect[shrink.name]:+.3f})",
                  f"holding does soften ({once.effect[hold.name]:+.3f})"):
        assert words in text, words


def test_the_numbers_on_other_edits_in_the_readme_are_those_of_the_figure():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-")
    arms = pd.read_csv(PAPER / "figures" / "f4_effects.csv").query("set == 'secondary'").set_index("row")
    doses = arms[arms["mode"] == "target"].sort_values("target")
    assert (doses["keys"].diff().dropna() > 0).all() and (arms.n == 5).all()
    most, least = doses.loc[doses.effect.idxmax()], doses.loc[doses.effect.idxmin()]
    own = float(final(load(PAPER / "results" / "secondary.nc").pr_weight.sel(side="key", control="none")).mean())
    assert least.target == doses.target[(doses.target - own).abs().idxmin()]
    for words in (f"moves the keys' PR from {doses['keys'].iloc[0]:+.1f} to {doses['keys'].iloc[-1]:+.1f}, higher with every dose",
                  f"highest at {most.target:.0f} ({most.effect:+.3f}) and lowest at {least.target:.0f} ({least.effect:+.3f}), "
                  f"near where the weights end by themselves ({own:.1f})",
                  f"in the activations ({arms['keys']['hold · activations']:+.1f}) sharpens attention ({arms.effect['hold · activations']:+.3f})",
                  f"lowers the keys' PR softens it ({arms.effect['penalty-low']:+.3f})", f"frozen key weights ({arms.effect['freeze']:+.3f})",
                  f"no edit moves entropy by more than {arms.entropy_unit.abs().max():.3f}"):
        assert words in text, words


def test_the_numbers_on_the_wider_models_in_the_readme_are_those_of_the_figure():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-")
    arms = pd.read_csv(PAPER / "figures" / "f4_effects.csv").query("set == 'width'").set_index("row")
    shrink, hold = arms.loc["shrink · energy as trained"], arms.loc["hold · energy as trained"]
    parts = pd.read_csv(PAPER / "figures" / "t1_parts.csv").query("set == 'width'").set_index("part")
    beyond = parts.loc["C4 hold softens, beyond placebo sham-key-weight-preserve"]
    assert shrink.low < 0 < shrink.high and hold.low > 0 and (arms.n == 5).all()
    for words in (f"shrinking does nothing that five seeds can see ({shrink.effect:+.3f}, interval {shrink.low:+.3f} to {shrink.high:+.3f})",
                  f"holding softens attention a little ({hold.effect:+.3f}, {hold.low:+.3f} to {hold.high:+.3f})",
                  f"random changes of the same size do ({beyond.effect:+.3f} above them, {beyond.low:+.3f} to {beyond.high:+.3f})",
                  f"the energy of step 0 alone softens it more ({arms.effect['scale · × 1']:+.3f})",
                  f"the placebo that moves PR without moving the function sharpens it ({arms.effect['compensate']:+.3f})"):
        assert words in text, words


def test_what_the_make_of_processor_adds_is_as_told():
    entropy = [load(PAPER / "results" / f"{n}.nc").entropy.sel(depth=4, qk_init="gaussian", control="none") for n in ("wikitext", "secondary")]
    one, other = (e.isel(step=-1, seed=slice(4)).mean(("layer", "head")).values for e in entropy)
    *small, large = sorted(abs(one - other))
    assert f"differs by {large:.4f} in one seed" in (PAPER / "README.md").read_text(encoding="utf-8") and max(small) < 1e-5


def test_the_readme_counts_the_runs_of_a_set_that_is_not_whole():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("wikitext", "wikipedia", "causal", "secondary", "width", "origin"):
        attrs = load(PAPER / "results" / f"{name}.nc").attrs
        missing = len(json.loads(attrs["report"])["missing"])
        assert (f"of the {attrs['n_runs'] + missing} runs of `{name}.nc`" in text) == bool(missing), name
        if missing: assert f"{attrs['n_runs']} of the {attrs['n_runs'] + missing} runs of `{name}.nc`" in text, name


def test_the_numbers_on_origin_in_the_readme_are_those_of_the_figure():
    rows, text = pd.read_csv(PAPER / "figures" / "f8_origin.csv").set_index("variant"), (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-")
    adam = [rows.gap[f"AdamW, decay {decay}, init {scale}, lr 0.002"] for scale in ("0.02", "1/√d") for decay in ("0.1", "0")]
    small, large = (rows.loc[f"SGD, decay 0, init {scale}, lr 0.1"] for scale in ("0.02", "1/√d"))
    loss = rows.loss["AdamW, decay 0.1, init 0.02, lr 0.002"]
    for words in (f"with weight decay ({adam[0]:+.1f}) and without ({adam[1]:+.1f})", f"larger initial scale ({adam[2]:+.1f} and {adam[3]:+.1f})",
                  f"{small.gap:+.1f} (interval {small.gap_low:+.1f} to {small.gap_high:+.1f})",
                  f"{large.gap:+.1f} ({large.gap_low:+.1f} to {large.gap_high:+.1f})", f"AdamW's loss ({large.loss:.2f} against {loss:.2f})",
                  f"in all six variants ({rows.weight_gap.min():+.1f} to {rows.weight_gap.max():+.1f})"):
        assert words in text, words
    assert (rows.weight_gap_low > 0).all() and not (rows.gap_low[["SGD" in v for v in rows.index]] > 0).any()
