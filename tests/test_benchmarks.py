"""The benchmark notebook at its tiny size: every row is there, what cannot be measured says so, senseless parameters are refused."""
import html
import importlib.util
import json
import re

import pytest
from conftest import ROOT, as_args, cells, papermill

TINY = {"size": "tiny", "repeats": 1, "threads": 1, "out_dir": "made"}
ROWS = ["matrix products, float32", "matrix products, bf16 over float32", "memory bandwidth", "training step, float32, over nanoGPT",
        "training step, bf16, over nanoGPT in float32", "training step, bf16 over float32", "training step, float32, over its floor",
        "training step, bf16, over its floor", "two runs side by side, float32, over nanoGPT", "two runs side by side, bf16, over nanoGPT",
        "compiled over eager step, default size, one thread", "time to compile, default size, one thread",
        "compiled over eager step, size above", "time to compile, size above", "ensemble of four over separate runs",
        "ensemble of twelve very small models over separate runs",
        *[f"probe beyond the forward pass, over it, {n}" for n in ("size above", "default size, one thread")],
        *[f"probe: {n}, of a forward pass" for n in ("moments", "entropy", "eigenvalues", "subset")],
        "probe over singular values and full attention", "largest difference between the two", "the same at context 1,024",
        "probes at the default cadence, share of a run", "of these, beyond the pass that the validation loss takes",
        "controller at the default cadence, share of a run",
        *[f"slope of the probe's time in {n}" for n in ("sequences", "context", "d_model", "n_head", "depth")],
        "memory that 256 instead of 64 sequences add to the probe's peak", "sweep with two workers, of the ideal",
        "a run's cost besides training", "collect 10 results", "collect 20 results", "slope of collecting, time",
        "slope of collecting, memory", "pretrained capture over the eager forward pass"]


def test_every_row_is_measured_or_says_that_it_is_not(tmp_path):
    done = papermill(tmp_path, *as_args(TINY), notebook="benchmarks", timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads((tmp_path / "made" / "benchmarks.json").read_text(encoding="utf-8"))
    assert [r["what"] for r in made["rows"]] == ROWS
    page = (tmp_path / "made" / "benchmarks.html").read_text(encoding="utf-8")
    for r in made["rows"]:
        left = "nanoGPT" in r["what"] or "compile" in r["what"]  # no checkout, and no minutes for a compiler
        left |= "pretrained" in r["what"] and importlib.util.find_spec("transformers") is None
        assert (r["median"] is None) == left, r
        assert r["what"].split(",")[0].split("'")[0] in page
    same = next(r for r in made["rows"] if r["what"] == "largest difference between the two")
    assert same["median"] < 1e-5
    assert str(ROOT) not in page and str(tmp_path) not in page


@pytest.mark.parametrize(("name", "value", "says"), [("sise", "tiny", "Did you mean 'size'?"), ("size", "huge", "'full' or 'tiny' was wanted"),
                                                     ("timer", "cpu", "'cpu' with threads 1"),
                                                     ("repeats", "0", "a whole number of at least 1 was wanted")])
def test_what_cannot_be_meant_is_refused(tmp_path, name, value, says):
    done = papermill(tmp_path, "-p", name, value, notebook="benchmarks")
    assert done.returncode != 0 and name in done.stderr and says in done.stderr


def test_the_target_computes_only_under_papermill():
    code = [c for c in cells(ROOT / "nbs" / "benchmarks.ipynb") if c["cell_type"] == "code"]
    assert all("".join(c["source"]).startswith("#| eval: false") for c in code[4:])
    assert all(sum(bool(line.strip()) for line in c["source"]) <= 40 for c in code)


def test_the_saved_output_is_a_full_run_with_every_row_and_its_misses_are_explained():
    "The table that a reader sees has the rows of a tiny run, with the numbers of sequences and results of the full size."
    shown = [o["data"]["text/html"] for c in cells(ROOT / "nbs" / "benchmarks.ipynb") for o in c.get("outputs", []) if "text/html" in o.get("data", {})]
    page = html.unescape("".join("".join(t) for t in shown))
    full = {"memory that 256": "memory that 2048", "collect 10 ": "collect 500 ", "collect 20 ": "collect 1000 "}
    for row in ROWS:
        for small, large in full.items(): row = row.replace(small, large)
        assert row in page, row
    said = "".join(cells(ROOT / "nbs" / "benchmarks.ipynb")[-1]["source"])
    counts = re.search(r"(\d+) targets are met and (\d+) missed", said).groups()
    assert [int(n) for n in counts] == [page.count(">yes<"), page.count(">no<")]
