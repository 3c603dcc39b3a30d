"""Forty-four faults that users of this kind of software have reported, one test each; the number is the number of the report.

Each test shows that the whole kind of fault is absent, by the input that was reported and by others like it. What needs a kernel, a
cluster or large files is tested where those are set up: `ELSEWHERE` says where, and the last test here looks that it is so.
"""
import ast
import json
import math
import os
import re
import shutil
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch
import xarray as xr
from conftest import ROOT, SMALL, cells
from torch import nn

from qkgeo import corpus as corpus_module
from qkgeo import geometry as geo
from qkgeo import sweep as sweep_module
from qkgeo import training
from qkgeo.config import ConfigError, config, from_json, run_id
from qkgeo.control import KeySpectrumController
from qkgeo.corpus import check_vocab, decode, encode, load_corpus, smallest_dtype
from qkgeo.model import GPT, GPTConfig, attentions, capture
from qkgeo.plots import plot_spectra, plot_trajectory, savefig, subplots, trajectory_grid
from qkgeo.pretrained import capturing, integrity, load_checkpoint, qk_weights, text_windows, weights_hash
from qkgeo.pretrained import _sorted_revisions as sorted_revisions
from qkgeo.pretrained import probe_arrays as probe_checkpoint
from qkgeo.probe import head_arrays, LayerState, probe, probe_arrays
from qkgeo.probe import update as observe
from qkgeo.results import SCHEMA, SchemaError, collect, combine, final, load, save, synthetic, write_atomically
from qkgeo.sweep import DaskPool, grid, make_job, plan_runs, read_runs, result_fault

NOT_HERE = {  # number: why it cannot apply. None is left out: where a library's part is absent, the kind of fault still has a test
}
ELSEWHERE = {  # number: (file, the test's name, or words that stand in a cell of the notebook)
    1: [("tests/test_repository.py", "test_every_papermill_target_has_one_parameters_cell_and_no_output")],
    2: [("tests/test_train_notebook.py", "test_what_cannot_be_meant_is_refused_by_name_before_training")],
    3: [("tests/test_pretrained.py", "test_the_stock_models_show_no_attention_but_the_capture_does")],
    5: [("tests/test_sweep.py", "test_sixteen_kernels_at_once"), ("tests/test_sweep.py", "test_a_kernel_that_does_not_come_up_is_tried_three_times"),
        ("tests/test_sweep.py", "test_one_kernel_a_run_with_this_interpreter_its_threads_and_its_own_ipython")],
    11: [("tests/test_sweep.py", "test_a_cell_is_never_run_twice"), ("tests/test_train_notebook.py", "test_a_killed_kernel_loses_nothing_that_was_saved")],
    14: [("nbs/04_corpus.ipynb", "### Sixteen workers, one cache")],
    15: [("nbs/08_training.ipynb", "child.kill()")],
    19: [("tests/test_pretrained.py", "test_capture_reproduces_the_stock_model")],
    23: [("nbs/11_pretrained.ipynb", "chars.post_processor = processors.TemplateProcessing")],
    24: [("tests/test_sweep.py", "test_a_broken_run_keeps_its_traceback_and_stops_only_those_that_need_it")],
    25: [("tests/test_repository.py", "test_every_notebook_names_the_kernel_of_every_jupyter"),
         ("tests/test_sweep.py", "test_one_kernel_a_run_with_this_interpreter_its_threads_and_its_own_ipython")],
    31: [("tests/test_pretrained.py", "test_grouped_keys_are_repeated_not_tiled")],
    34: [("nbs/04_corpus.ipynb", "VmHWM")],
    38: [("nbs/07_control.ipynb", "def behind_the_optimizer(edit):")],
    40: [("tests/test_sweep.py", "test_a_dask_worker_killed_at_work_loses_nothing")],
    41: [("tests/test_repository.py", "test_importing_sets_no_matplotlib_backend_and_needs_no_display")],
    43: [("tests/test_pretrained.py", "test_gguf_permutation_is_undone_with_the_right_numbers_of_heads")],
    44: [("tests/test_pretrained.py", "test_offline_with_only_main_in_the_cache")],
}
TARGETS = [p for n in ("train", "checkpoints", "benchmarks") if (p := ROOT / "nbs" / f"{n}.ipynb").exists()]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # small samples by design; nbdev's own
TINY = SMALL | {"steps": 20, "checkpoint_every": 10, "probe_points": 3}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(text, tmp_path_factory):
    "A small run, trained once."
    cfg = config(TINY | {"corpus": str(text), "out_dir": str(tmp_path_factory.mktemp("runs"))})
    return cfg, training.train(cfg, show=False)


def folder_of(cfg): return Path(cfg.out_dir) / run_id(cfg)


def weights(cfg): return training.read_checkpoint(folder_of(cfg) / "checkpoint.pt")["model"]


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def stored(folder, **differing):
    "A made-up finished run in its folder; its dataset."
    cfg = config(TINY | differing)
    ds = synthetic(cfg).assign_attrs(status="finished")
    save(ds, folder / run_id(cfg) / "result.nc")
    return ds


def transformer(kind, **settings):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    known = dict(vocab_size=20, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **known | settings), dtype=torch.float32)


def test_case_01_cleaning_strips_the_parameters_tag(tmp_path, monkeypatch):
    "Cleaning took the tag, papermill then injected where nothing read it, and every run of a sweep used the defaults."
    from nbdev.clean import nbdev_clean
    monkeypatch.chdir(ROOT)  # where its settings are
    for target in TARGETS:
        shutil.copy(target, tmp_path / target.name)
        nbdev_clean(fname=str(tmp_path / target.name))
        assert sum("parameters" in c["metadata"].get("tags", []) for c in cells(tmp_path / target.name)) == 1, target
    nb = nbformat.read(ROOT / "nbs" / "train.ipynb", as_version=4)
    tagged = next(c for c in nb.cells if "parameters" in c.metadata.get("tags", []))
    for n, found in ((0, []), (2, [tagged, nbformat.v4.new_code_cell(tagged.source, metadata=tagged.metadata)])):
        nb.cells = [c for c in nb.cells if c is not tagged] + found
        nbformat.write(nb, tmp_path / "wrong.ipynb")
        said, = sweep_module._target_faults(tmp_path / "wrong.ipynb")
        assert "wrong.ipynb" in said and f"has {n} cells tagged 'parameters'" in said


def test_case_02_a_misspelt_parameter_is_accepted(tmp_path, text):
    "A parameter that nothing reads was a line in a log, and the run was green with the default."
    for wrong, right in (("lrr", "lr"), ("dept", "depth"), ("Seed", "seed"), ("control_targt", "control_target")):
        with pytest.raises(ConfigError, match=f"{wrong}: there is no such parameter. Did you mean '{right}'?"): config({wrong: 5})
        with pytest.raises(ConfigError, match=f"{wrong}.*'{right}'"): plan_runs([TINY | {"corpus": str(text), wrong: 5}], tmp_path / "out")
    with pytest.raises(ConfigError, match="lrr.*'lr'"): plan_runs([TINY | {"corpus": str(text)}], tmp_path / "out", overrides={"lrr": 5})
    assert not (tmp_path / "out").exists()


def test_case_03_fused_attention_gives_no_weights():
    "Under fused attention the list of attention weights was empty, and means over it were NaN."
    model, seen, ids = GPT(GPTConfig(11, 3, 8, 2, 16)), [], torch.arange(32).view(2, 16) % 11
    with torch.no_grad(), capture(model, lambda layer, q, k, v: seen.append(geo.attention_probs(q, k))): model(ids)
    assert [p.shape for p in seen] == [(2, 2, 16, 16)] * 3
    for p in seen:
        assert torch.allclose(p.sum(-1), torch.ones(2, 2, 16), atol=1e-6) and not p.triu(1).any()
    arrays = probe_arrays(model, ids)
    for name in ("entropy", "entropy_unit", "peak"): assert arrays[name].shape == (3, 2) and np.isfinite(arrays[name]).all(), name


def test_case_04_zero_times_log_zero():
    "0 log 0 made the entropy of every causal row NaN, or its gradient; a small number added inside biased it."
    assert geo.entropy(torch.tensor([0.5, 0.5, 0.0])).item() == pytest.approx(math.log(2), rel=1e-6)
    for n in (3, 1024):
        for kind in (torch.float64, torch.float32, torch.float16):
            row = torch.zeros(n, dtype=kind)
            row[-1] = 1
            assert geo.entropy(row).item() == 0
    p = torch.tensor([0.5, 0.5, 0.0], requires_grad=True)
    geo.entropy(p).backward()
    assert torch.isfinite(p.grad).all()
    q = (100 * torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()  # weights that are 0 and 1 to the last bit
    rows = geo.attention_entropy(q, q, normalize=False)
    rows.sum().backward()
    assert torch.isfinite(rows).all() and (rows[:, 0] == 0).all() and torch.isfinite(q.grad).all()
    assert torch.isfinite(geo.effective_rank(torch.tensor([1.0, 0.0, 0.0])))


def test_case_05_kernels_started_together_race_for_ports(tmp_path, text):
    "Ports were picked, released and taken by another kernel before they were bound; one history file served all."
    job = make_job(plan_runs([TINY | {"corpus": str(text)}], tmp_path, cores=2), run_id(config(TINY | {"corpus": str(text)})))
    kernel = sweep_module._kernel_class(job, tmp_path / "k", None, [])(kernel_name="python3")
    if os.name == "posix" and len(str(tmp_path)) < 68: assert kernel.transport == "ipc", "sockets are files, so that there is no port to race for"
    assert sweep_module._environment(1, IPYTHONDIR="own")["IPYTHONDIR"] == "own"


def test_case_06_a_missing_run_is_silent_nan(tmp_path):
    "A run that was not there became NaN, or worse 0, and nobody was told."
    values = {("gaussian", 0): 1.0, ("gaussian", 1): 2.0, ("tied", 0): 3.0}
    for (init, seed), v in values.items():
        ds = stored(tmp_path, qk_init=init, seed=seed)
        save(ds.assign(val_loss=ds.val_loss * 0 + v), tmp_path / ds.attrs["run_id"] / "result.nc")
    listed = [config(TINY | {"qk_init": i, "seed": s}) for i in ("gaussian", "tied") for s in (0, 1)]
    absent = run_id(listed[-1])
    with pytest.warns(UserWarning, match=f"collected with gaps. missing: {absent}"): cube = collect(tmp_path, listed)
    report, loss = json.loads(cube.attrs["report"]), final(cube.val_loss).isel(depth=0, control=0)
    assert report["missing"] == [absent] and cube.attrs["n_runs"] == 3
    np.testing.assert_array_equal(loss.sel(qk_init=["gaussian", "tied"], seed=[0, 1]), [[1, 2], [3, np.nan]])
    np.testing.assert_array_equal(loss.mean("seed"), [1.5, 3])
    fig = trajectory_grid(cube.isel(control=0))
    words = " ".join(t.get_text() for t in fig.findobj(lambda o: hasattr(o, "get_text")))
    assert "1 seed" in words and "2 seeds" in words, "every mean carries its n"


AWKWARD = ["λ-text.txt", "a b.txt", "None.txt", "0"]


def test_case_07_netcdf_takes_no_none_bool_or_dict(tmp_path):
    "The save after hours of training failed over an attribute that netCDF cannot hold."
    for value in AWKWARD:
        cfg = config(TINY | {"corpus": value, "corpus_dir": None, "control": "hold", "control_layers": "1"})
        save(synthetic(cfg), tmp_path / "x.nc")
        back = load(tmp_path / "x.nc").attrs
        assert from_json(back["config"]) == cfg and from_json(back["config"]).corpus_dir is None
        assert json.loads(back["versions"])["torch"]
    for value in (None, True, {"a": 1}, Path("x"), np.True_, [[1], [2]], 2**70, b"x", "a\0b", "\ud800"):  # refused by name, and no half file is left
        with pytest.raises(SchemaError, match="attribute 'note'"): save(synthetic(cfg).assign_attrs(note=value), tmp_path / "y.nc")
    assert [p.name for p in tmp_path.iterdir()] == ["x.nc"]


def test_case_08_casts_of_the_command_line():
    "Lists stayed text, identifiers became numbers, `true` was a truthy string and `nan` a learning rate."
    from papermill.cli import _resolve_type as as_papermill_does
    assert as_papermill_does("007") == 7 and as_papermill_does("true") == "true" and as_papermill_does("[1, 2]") == "[1, 2]"
    good = [("steps", "1_000", 1000), ("steps", "1e5", 100_000), ("seed", "007", 7), ("lr", "1e-3", 0.001), ("corpus_dir", "none", None),
            ("corpus_dir", "None", None), ("corpus", "true", "true")]
    for name, typed, wanted in good:
        made = getattr(config({name: as_papermill_does(typed)}), name)
        assert made == wanted and type(made) is type(wanted), name
    bad = [("depth", "[1, 2]"), ("depth", "true"), ("depth", "True"), ("depth", "none"), ("lr", "nan"), ("lr", "inf"), ("lr", "-inf"), ("seed", "1.5"),
           ("out_dir", "007"), ("corpus", "1e5"), ("out_dir", "True"), ("control_target", "nan")]
    for name, typed in bad:
        with pytest.raises(ConfigError, match=f"^{name}: "): config({name: as_papermill_does(typed), "steps": 10})


def test_case_09_yaml_reads_1e_3_as_text(tmp_path):
    "YAML made 1e-3 a string, no a bool, 12:30 a number of minutes and 1.10 another version."
    (tmp_path / "runs.yaml").write_text("- {lr: 1e-3, seed: 08, corpus: no, init_scale: 1.10}\n- {lr: 1.0e-3, corpus: 12:30}\n- {corpus: on, corpus_dir: ~}\n")
    first, second, third = (config(r) for r in read_runs(tmp_path / "runs.yaml"))
    assert (first.lr, first.seed, first.corpus, first.init_scale) == (0.001, 8, "no", "1.1")
    assert (second.lr, second.corpus) == (0.001, "12:30") and (third.corpus, third.corpus_dir) == ("on", None)
    (tmp_path / "bad.yaml").write_text("- {corpus: no.txt}\n- {corpus: no.txt, lr: fast}\n")
    with pytest.raises(ConfigError, match="bad.yaml, run 2: lr: 'fast' came"): plan_runs(tmp_path / "bad.yaml", tmp_path / "out")


def test_case_10_tuples_become_text_and_numpy_numbers_crash(tmp_path, text):
    "A tuple of seeds arrived as a string of six characters; numpy numbers and paths broke the job without an output."
    rows = grid(TINY | {"corpus": text, "depth": np.int64(2), "lr": np.float32(0.5)}, seed=(1, 2), threads=np.arange(1, 2))
    plan = plan_runs(rows, tmp_path, cores=2)
    jobs = [json.loads(json.dumps(make_job(plan, n))) for n in plan.configs]
    assert [j["parameters"]["seed"] for j in jobs] == [1, 2]
    for j in jobs:
        for name, value in j["parameters"].items(): assert type(value) is type(getattr(plan.configs[j["id"]], name)), name
    for value in ((1, 2), [1, 2], np.arange(2), {"a": 1}, {1}, b"1"):
        with pytest.raises(ConfigError, match="^seed: "): config(seed=value)


def test_case_11_a_killed_kernel_leaves_a_notebook_that_says_completed(tmp_path):
    "A collector that believed the notebook's own word counted a killed run as good."
    cfg = config(TINY)
    folder = tmp_path / run_id(cfg)
    folder.mkdir()
    nb = nbformat.v4.new_notebook(metadata={"papermill": {"exception": None}}, cells=[nbformat.v4.new_code_cell("1")])
    nb.cells[0].metadata.papermill = {"status": "completed"}
    nbformat.write(nb, folder / "train.ipynb")
    assert result_fault(tmp_path, run_id(cfg)) == "no result"
    with pytest.raises(FileNotFoundError, match=run_id(cfg)): collect(tmp_path, [cfg])
    for status in ("unfinished", "failed: the loss was not finite at step 3"):
        save(synthetic(cfg).assign_attrs(status=status), folder / "result.nc")
        assert status in result_fault(tmp_path, run_id(cfg))
        with pytest.raises(FileNotFoundError, match=status[:10]): collect(tmp_path, [cfg])


def test_case_12_a_character_outside_the_vocabulary(tiny):
    "A validation text or a prompt held a character that the training text had not, or a checkpoint met another text's vocabulary."
    assert encode("abd", "abc").tolist() == [1, 2, 0] and int((encode("abd", "abc") == 0).sum()) == 1
    assert decode(encode("abd", "abc"), "abc") == "ab\ufffd"
    with pytest.raises(ValueError, match=r"U\+0064 at offset 2"): encode("abd", "abc", strict=True)
    with pytest.raises(ValueError, match="id 271 is outside 0 … 3"): decode([271], "abc")
    cfg, _ = tiny
    model, vocab, _ = training.load_model(folder_of(cfg))
    assert vocab == load_corpus(cfg.corpus).vocab and model.cfg.vocab_size == len(vocab) + 1
    with pytest.raises(ValueError, match=f"vocab_size {len(vocab) + 1} here, 4 in the checkpoint"): check_vocab(vocab, "abc")
    with pytest.raises(ValueError, match="wanted 0 to"): model(torch.tensor([[len(vocab) + 1]]))


def test_case_13_wikitext_raw_and_tokens_are_mixed_up(tmp_path):
    "The two editions were swapped, so that a model of characters learnt <unk> and ` @-@ `, and losses could not be compared."
    assert len("M @-@ 82") == len(encode("M @-@ 82", "M @-82")) == 8 and len(encode("M-82", "M-82")) == 4
    for edition, line in (("tokens", "M @-@ 82 <unk> \n"), ("raw", "M-82 here\n")):
        for split in ("train", "valid", "test"):
            (tmp_path / edition).mkdir(exist_ok=True)
            (tmp_path / edition / f"wiki.{split}.{edition}").write_text(line * 40)
    with pytest.warns(UserWarning, match='has 80 "<unk>": this is the tokens edition'):
        tokens = load_corpus("wikitext-103", tmp_path / "tokens", cache_dir=tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raw = load_corpus("wikitext-103", tmp_path / "raw", cache_dir=tmp_path / "cache")
    assert (tokens.edition, tokens.unk_marks, tokens.hyphen_marks) == ("tokens", 80, 80) and (raw.edition, raw.unk_marks, raw.hyphen_marks) == ("raw", 0, 0)
    assert tokens.attrs()["corpus_edition"] != raw.attrs()["corpus_edition"] and tokens.sha256 != raw.sha256


def test_case_14_many_runs_fill_one_cache(tmp_path, text):
    "Runs that started together read each other's half-written files."
    def counts(_): return len(load_corpus(text, cache_dir=tmp_path).train), load_corpus(text, cache_dir=tmp_path).sha256
    with ThreadPoolExecutor(16) as pool: assert len(set(pool.map(counts, range(16)))) == 1
    whole, ids = counts(0), next(tmp_path.glob("*.ids"))
    good = ids.read_bytes()
    for damaged in (good[: len(good) // 2], b"", bytes(len(good)), good + b"x"):  # a writer was killed, or a disk lied
        ids.write_bytes(damaged)
        assert counts(0) == whole and ids.read_bytes() == good
    next(tmp_path.glob("*.json")).write_text("{")
    assert counts(0) == whole


def test_case_15_resuming_is_another_run(tiny, tmp_path):
    "After a restart the optimizer, the random numbers or the position in the data were others, so the losses were."
    cfg, straight = tiny
    cut = replace(cfg, out_dir=str(tmp_path), probe_every=10)
    def stop(run):
        if run.step == 10: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): training.train(cut, show=False, watch=stop)
    assert training.read_checkpoint(folder_of(cut) / "checkpoint.pt")["step"] <= 10
    torch.manual_seed(99); np.random.seed(99)
    again = training.train(cut, show=False)
    assert same(weights(cut), weights(cfg)) and float(again.val_loss[-1]) == float(straight.val_loss[-1])
    assert float(again.train_loss[-1]) == float(straight.train_loss[-1])
    ids = load_corpus(cfg.corpus).train
    assert torch.equal(training.batch_at(ids, cfg, 11)[0], training.batch_at(ids, cut, 11)[0]) and \
        not torch.equal(training.batch_at(ids, cfg, 11)[0], training.batch_at(ids, cfg, 1)[0])


def test_case_16_branches_that_are_not_their_step():
    "Branches named after early steps held late weights, and were drawn as a plateau; steps were sorted as text."
    model = GPT(GPTConfig(11, 1, 8, 2, 16))
    first, other = weights_hash(model), weights_hash(GPT(GPTConfig(11, 1, 8, 2, 16), 1))
    records = [dict(revision=f"step{s}", step=s, hash=h, shape={}, fresh={}) for s, h in ((0, first), (512, first), (1000, other))]
    assert integrity(records) == {"step0": ["has the same weights as step512"], "step512": ["has the same weights as step0"]}
    assert first != other and integrity(records[1:]) == {}
    assert sorted_revisions([f"step{s}" for s in (1000, 10000, 2000, 512)]) == ["step512", "step1000", "step2000", "step10000"]


def test_case_17_half_precision_by_default(tmp_path):
    "A new release of a library loaded weights in half precision, and statistics were coarse or NaN."
    for kind in (torch.float16, torch.bfloat16):
        place = tmp_path / str(kind)
        transformer("gpt_neox", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8).to(kind).save_pretrained(place)
        model, own = load_checkpoint(place)
        assert {p.dtype for p in model.parameters()} == {torch.float32} and own == str(kind).removeprefix("torch.")
    q = torch.ones(1, 2, 4, 3)
    q[0, 1, 2, 0] = torch.inf
    with pytest.raises(geo.NotFinite, match="query, layer 3, step400: 1 of 24 entries not finite"): observe(LayerState(), q, q, name="layer 3, step400")


def test_case_18_no_eigenvalues_in_half_and_widened_too_late(text):
    "Eigenvalues were not implemented in half precision, and widening after a subtraction in half precision came too late."
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        assert geo.covariance_pr(torch.eye(2, dtype=kind)).item() == 2 and geo.spectrum(torch.eye(2, dtype=kind)).tolist() == [1, 1]
        assert geo.stable_rank(torch.eye(2, dtype=kind)).item() == 2
        points = torch.tensor([[256.0], [257], [258]])
        assert geo.Moments.of(points).covariance(ddof=1).item() == 1
    square = torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1, -1]], dtype=torch.bfloat16) + 128
    assert geo.participation_ratio(square).item() == 2, "what can be told apart in bf16 is told apart"
    cfg, seen = config(TINY | {"corpus": str(text), "precision": "bf16"}), []
    run = training.new_run(cfg, load_corpus(cfg.corpus))
    ids = torch.zeros(2, cfg.context, dtype=torch.long)
    with capture(run.model, lambda layer, q, k, v: seen.append(q.dtype)): training.look(run, (ids, ids))
    assert set(seen) == {torch.float32}, "the probe looks in float32 whatever training computes in"


def test_case_19_neox_fuses_query_key_and_value_head_by_head():
    "A flat split in three took queries of one head for keys of another; all shapes fitted."
    model = transformer("gpt_neox", hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    fused = model.gpt_neox.layers[0].attention.query_key_value
    fused.weight.data = torch.arange(12.0)[:, None].expand(12, 4).clone()
    fused.bias.data = 100 + torch.arange(12.0)
    wq, wk, bq, bk = qk_weights(model)[0]
    assert wq[..., 0].tolist() == [[0, 1], [6, 7]] and wk[..., 0].tolist() == [[2, 3], [8, 9]]
    assert bq.tolist() == [[100, 101], [106, 107]] and bk.tolist() == [[102, 103], [108, 109]]


def test_case_20_unequal_step_axes():
    "Joining runs with different steps filled in NaN, made the steps floats, and the last column was empty for some runs."
    runs = []
    for seed, steps, values in ((0, (0, 100), (1.0, 2.0)), (1, (0, 150), (3.0, 4.0))):
        ds = synthetic(config(TINY | {"seed": seed}), steps=steps)
        runs.append(ds.assign(val_loss=("step", list(values), ds.val_loss.attrs)))
    with pytest.warns(UserWarning, match="unequal_steps"): cube = combine(runs)
    assert cube.step.dtype == np.int64 and cube.step.values.tolist() == [0, 100, 150]
    loss = cube.val_loss.isel(depth=0, qk_init=0, control=0)
    np.testing.assert_array_equal(loss, [[1, 2, np.nan], [3, np.nan, 4]])
    assert final(loss).values.tolist() == [2, 4]
    lacking = json.loads(cube.attrs["report"])["unequal_steps"]
    assert lacking == {runs[0].attrs["run_id"]: [150], runs[1].attrs["run_id"]: [100]}
    diverged = loss.where(loss.step < 150)  # a run that ended in NaN: its last valid value
    assert final(diverged).values.tolist() == [2, 3]


def test_case_21_fewer_samples_than_dimensions():
    "A covariance from few samples has low rank, and a low participation ratio was read as collapse."
    draw, d = torch.Generator().manual_seed(0), 64
    for n in (64, 16, 3, 2):
        x = torch.randn(200, n, d, generator=draw)
        pr = geo.participation_ratio(x)
        assert pr.mean().item() == pytest.approx((n - 1) * d / (n + d), rel=0.05) and pr.max() <= min(n - 1, d) + 1e-9
        with pytest.warns(UserWarning, match=f"{n} samples for 64 features .* cannot exceed {min(n - 1, d)}"): geo.small_sample_warning(n, d)
    corrected = geo.corrected_pr(geo.Moments.of(torch.randn(64, 64, d, generator=draw)).covariance(), 64)
    assert corrected.mean().item() == pytest.approx(64, rel=0.1), "the corrected one is not pulled down"
    with pytest.warns(UserWarning, match="n = 1"): assert geo.participation_ratio(torch.ones(1, 5)).isnan()
    with pytest.warns(UserWarning, match="samples for 8 features"): arrays = probe_arrays(GPT(GPTConfig(11, 1, 8, 2, 16)), torch.arange(8).view(1, 8))
    assert arrays["n_samples"] == 8 and arrays["n_sequences"] == 1 and {"n_samples", "n_sequences", "n_subset"} <= set(SCHEMA)


def test_case_22_centred_or_not_rounded_or_not(tmp_path):
    "Two tools gave two numbers for the same keys, as one subtracted the mean and one rounded."
    x = torch.tensor([[101.0, 100], [99, 100], [100, 101], [100, 99]])
    assert geo.participation_ratio(x).item() == pytest.approx(2, rel=1e-12)
    assert geo.participation_ratio(x, center=False).item() == pytest.approx(20001**2 / (20000.5**2 + 0.5**2), rel=1e-12)
    assert geo.spectrum_pr(torch.tensor([4.0, 1.0])).item() == pytest.approx(25 / 17, rel=1e-12)
    ds = synthetic(config(TINY))
    save(ds, tmp_path / "x.nc")
    names = load(tmp_path / "x.nc")
    assert "about the mean" in names.pr.attrs["long_name"] and "about the origin" in names.pr_raw.attrs["long_name"]
    assert "position means removed" in names.pr_content.attrs["long_name"]


def test_case_23_the_first_token_dominates():
    "One token with a huge key made the participation ratio 1 everywhere."
    keys = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    sink = torch.tensor([[0, 0, 100.0]])
    assert geo.participation_ratio(keys).item() == 2
    assert geo.participation_ratio(torch.cat([sink, keys])).item() == pytest.approx(1600.8**2 / (1600**2 + 2 * 0.4**2), rel=1e-9)
    model, seen = transformer("gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=16).eval(), []
    ids = torch.randint(20, (6, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capturing(model, seen.append): model(ids)
    for drop in (0, 1, 3):
        kept = seen[0].k[:, :, drop:].transpose(0, 1).flatten(1, 2)  # (H, B·T, d)
        found = probe_checkpoint(model, ids, drop_first=drop)[0]["after"]["pr"][0, :, 1]
        np.testing.assert_allclose(found, geo.participation_ratio(kept), rtol=1e-5)

    class Words:  # a tokenizer that puts a mark in front
        bos_token_id = 7
        def __call__(self, text, add_special_tokens=True, **_): return {"input_ids": [7] * add_special_tokens + [ord(c) % 7 for c in text]}
    windows = text_windows("abcdefghijkl", Words(), 4)
    assert ((windows == 7).sum(1) == 1).all() and (windows[:, 0] == 7).all()
    Words.bos_token_id = None
    Words.__call__ = lambda self, text, **_: {"input_ids": [ord(c) % 7 for c in text]}
    assert ((text_windows("abcdefghijkl", Words(), 4) == 7).sum(1) == 0).all()


def test_case_24_not_finite_input():
    "NaN in a matrix gave finite eigenvalues, a misleading message, or a crash."
    bad = torch.tensor([[math.nan, 0], [0, 1]], dtype=torch.float64)
    for value in (math.nan, math.inf, -math.inf):
        bad[0, 0] = value
        for f in (geo.spectrum, geo.covariance_pr, geo.participation_ratio, geo.stable_rank, geo.weight_pr, geo.Moments.of, geo.spectrum_pr,
                  geo.effective_rank):
            with pytest.raises(geo.NotFinite, match="1 of 4 entries not finite"): f(bad)
        for f in (geo.attention_entropy, geo.interaction_pr, geo.balance):
            with pytest.raises(ValueError, match="not finite"): f(bad, torch.eye(2, dtype=torch.float64))
    model = GPT(GPTConfig(11, 2, 8, 2, 16))
    with torch.no_grad(): attentions(model)[1].k.weight[0, 0] = math.nan
    with pytest.raises(geo.NotFinite, match="key, layer 1, step 400: 32 of 256 entries not finite"): probe_arrays(model, torch.zeros(2, 16).long(), step=400)


def test_case_25_the_authors_kernel(tmp_path, text):
    "A notebook that was saved with its author's kernel failed everywhere else."
    job = make_job(plan_runs([TINY | {"corpus": str(text)}], tmp_path, cores=2), run_id(config(TINY | {"corpus": str(text)})))
    spec = sweep_module._kernel_class(job, tmp_path / "k", None, [])(kernel_name="no_such_env").kernel_spec
    assert spec.argv[0] == sys.executable and spec.language == "python"
    for path in [*(ROOT / "nbs").glob("*.ipynb"), *(ROOT / "paper").glob("*.ipynb")]:
        assert json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernelspec"]["name"] == "python3", path


def test_case_26_relative_paths_and_another_working_directory(tmp_path, monkeypatch):
    "Relative paths meant another folder, and a silent fall-back to a small excerpt made the run green."
    (tmp_path / "a").mkdir(); (tmp_path / "b").mkdir()
    (tmp_path / "a" / "own.txt").write_text("abcdefgh " * 600)
    monkeypatch.chdir(tmp_path / "a")
    plan = plan_runs([TINY | {"corpus": "own.txt"}], "out", cores=2)
    job = make_job(plan, next(iter(plan.configs)))
    assert Path(job["folder"]) == tmp_path / "a" / "out" / job["id"] and Path(job["target"]).is_absolute() and job["cwd"] == str(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "b" / "own.txt"))): load_corpus("own.txt")
    for split in ("", ":valid+test"):
        with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "b" / "data"))): load_corpus("wikitext-103" + split, "data")
    (tmp_path / "b" / "data").mkdir()
    with pytest.raises(FileNotFoundError, match="no WikiText-103 files"): load_corpus("wikitext-103", "data")


def test_case_27_half_written_results(tmp_path):
    "A file cut short by a kill stopped the whole collection, or an open file could not be written over."
    runs = [stored(tmp_path, seed=s) for s in range(4)]
    paths = [tmp_path / ds.attrs["run_id"] / "result.nc" for ds in runs]
    for path, size in zip(paths, (0, 100, paths[2].stat().st_size // 2)): path.write_bytes(path.read_bytes()[:size])
    for path in paths[:3]:
        with pytest.raises(SchemaError, match=re.escape(str(path))): load(path)
    with pytest.warns(UserWarning, match="unreadable"): cube = collect(tmp_path)
    assert set(json.loads(cube.attrs["report"])["unreadable"]) == {ds.attrs["run_id"] for ds in runs[:3]} and cube.seed.values.tolist() == [3]
    with pytest.raises(SchemaError): collect(tmp_path, strict=True)
    with xr.open_dataset(paths[3]) as held:
        save(runs[3].assign(val_loss=runs[3].val_loss + 1), paths[3])
        xr.testing.assert_equal(held.val_loss, runs[3].val_loss)
    xr.testing.assert_equal(load(paths[3]).val_loss, runs[3].val_loss + 1)
    before = paths[3].read_bytes()
    def fail(p):
        p.write_bytes(b"half")
        raise OSError("disk full")
    with pytest.raises(OSError, match="disk full"): write_atomically(paths[3], fail)
    assert paths[3].read_bytes() == before and len(list(paths[3].parent.iterdir())) == 1


def test_case_28_the_same_run_twice(tmp_path):
    "Of a run that was done twice, the order of a list decided which one counted."
    ds = stored(tmp_path / "first", seed=0)
    stored(tmp_path / "again", seed=0)
    with pytest.raises(ValueError, match="found twice") as e: collect(tmp_path)
    for part in ("first", "again"): assert str(tmp_path / part / ds.attrs["run_id"] / "result.nc") in str(e.value)
    with pytest.raises(ValueError, match="the same run came twice: .*'seed': 0"): combine([ds, ds.assign(val_loss=ds.val_loss * 9)])
    with pytest.raises(ConfigError, match="run 2: .* is in the list already"): plan_runs([TINY | {"corpus": "no.txt"}] * 2, tmp_path / "out")


def test_case_29_probing_changes_training(tiny, tmp_path):
    "Looking more often moved the random numbers, so the same seed gave other weights."
    cfg, _ = tiny
    often = replace(cfg, probe_every=1, out_dir=str(tmp_path))
    training.train(often, show=False)
    assert same(weights(often), weights(cfg))
    model, ids = GPT(GPTConfig(11, 1, 8, 2, 16)), torch.arange(96).view(6, 16) % 11
    model.train(); model.blocks[0].mlp.eval()
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    probe(model, ids)
    assert torch.equal(before[0], torch.random.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()
    assert model.training and model.blocks[0].attn.training and not model.blocks[0].mlp.training
    assert all(p.grad is None for p in model.parameters())


def test_case_30_conv1d_is_transposed():
    "The rows of a matrix that is stored as (in, out) were taken for the queries."
    model = transformer("gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=16).eval()
    fused = model.transformer.h[0].attn.c_attn
    assert fused.weight.shape == (8, 24)
    fused.bias.data.normal_()
    wq, wk, bq, bk = qk_weights(model)[0]
    assert torch.equal(wq.reshape(8, 8), fused.weight[:, :8].T) and torch.equal(wk.reshape(8, 8), fused.weight[:, 8:16].T)
    x = torch.randn(5, 8)
    q, k, _ = fused(x).split(8, -1)  # what the model makes of x
    for w, b, made in ((wq, bq, q), (wk, bk, k)):
        assert torch.allclose(torch.einsum("tD,hdD->thd", x, w) + b, made.view(5, 2, 4), atol=1e-6)


def test_case_31_grouped_keys_tiled_instead_of_repeated():
    "Query heads were paired with the wrong key head, or the repeat went along the sequence; no shape was wrong."
    for n_head, n_kv, wanted in ((4, 2, [0, 0, 1, 1]), (6, 3, [0, 0, 1, 1, 2, 2]), (4, 1, [0] * 4), (3, 3, [0, 1, 2])):
        k = torch.arange(float(n_kv))[None, :, None, None] + torch.zeros(1, n_kv, 5, 2)
        k[..., 1] = torch.arange(5.0)  # the position
        wide = geo.expand_kv(k, n_head)
        assert wide.shape == (1, n_head, 5, 2) and wide[0, :, 0, 0].tolist() == wanted and wide[0, 0, :, 1].tolist() == [0, 1, 2, 3, 4]
        assert [geo.kv_head(h, n_head, n_kv) for h in range(n_head)] == wanted
    state, draw = LayerState(), torch.Generator().manual_seed(0)
    observe(state, torch.randn(3, 4, 9, 2, generator=draw), torch.randn(3, 2, 9, 2, generator=draw), [0])
    pr = head_arrays([state])["pr"][0]
    assert np.isfinite(pr[:, 0]).all() and np.isfinite(pr[:2, 1]).all() and np.isnan(pr[2:, 1]).all(), "two key heads, not four copies"


def plain(x):
    "Whether x is tensors and plain Python all through."
    if isinstance(x, dict): return all(map(plain, x)) and all(map(plain, x.values()))
    if isinstance(x, list | tuple): return all(map(plain, x))
    return x is None or type(x) in (int, float, str, bool) or isinstance(x, torch.Tensor)


def test_case_32_torch_refuses_its_own_checkpoint(tiny, tmp_path, text):
    "Numpy numbers and paths in a checkpoint could be saved and not be read again."
    cfg, _ = tiny
    state = torch.load(folder_of(cfg) / "checkpoint.pt", weights_only=True)
    assert plain(state) and training.read_checkpoint(folder_of(cfg) / "checkpoint.pt").keys() == state.keys()
    for control in (dict(control="hold", control_every=5), dict(control="sham", control_space="activation", control_every=5), dict(optimizer="sgd")):
        other = config(TINY | control | {"corpus": str(text), "steps": 6, "out_dir": str(tmp_path)})
        training.train(other, show=False)
        run = training.new_run(other, load_corpus(other.corpus))
        training.resume(run, training.read_checkpoint(folder_of(other) / "checkpoint.pt"))
        assert run.step == 6 and plain(run.state(0.0)), control


def test_case_33_ids_overflow():
    "Ids were stored in a type that was too small, wrapped round, and decoded to other characters."
    letters = [chr(i) for i in range(0x21, 0x21 + 70_000) if not 0xD800 <= i < 0xE000]
    for size, bits in ((2, 8), (255, 8), (256, 8), (257, 16), (65535, 16), (65536, 16), (65537, 32)):
        assert smallest_dtype(size).itemsize * 8 == bits
        vocab = "".join(letters[: size - 1])  # and the reserved id
        text = vocab[-300:] + vocab[:300]
        ids = encode(text, vocab)
        assert ids.dtype == smallest_dtype(size) and int(ids.max()) == size - 1 and decode(ids, vocab) == text


def test_case_34_ids_are_a_read_only_map(tmp_path, text):
    "A list of ids took many times the memory of the text, once for every worker."
    c = load_corpus(text, cache_dir=tmp_path)
    for ids in (c.train, c.val):
        assert isinstance(ids, np.memmap) and ids.mode == "r" and ids.dtype == np.uint8
        with pytest.raises(ValueError, match="read-only"): ids[0] = 1


def test_case_35_lists_of_one_come_back_as_scalars(tmp_path):
    "A list with one seed was read back as a number, and a loop ran over the characters of a name."
    one = stored(tmp_path, seed=0)
    for value in ([], [1], ["a"], ["a", "b"], (1,), np.ones(1)):
        with pytest.raises(SchemaError, match="attribute 'seeds'.*json.dumps"): save(one.assign_attrs(seeds=value), tmp_path / "x.nc")
    for value in ("[1]", 1, 1.5, np.int64(3), np.float32(0.5), "λ"):
        save(one.assign_attrs(seeds=value), tmp_path / "x.nc")
        assert load(tmp_path / "x.nc").attrs["seeds"] == value
    listed = [config(TINY | {"seed": s}) for s in (0, 1)]
    with pytest.warns(UserWarning): cube = collect(tmp_path, listed)
    save(cube, tmp_path / "cube.nc")
    report = json.loads(load(tmp_path / "cube.nc").attrs["report"])
    assert report == json.loads(cube.attrs["report"]) and report["missing"] == [run_id(listed[1])] and report["duplicate"] == {}
    assert load(tmp_path / "cube.nc").seed.values.tolist() == [0] and load(tmp_path / "cube.nc").sizes["seed"] == 1
    one = synthetic(config(TINY | {"depth": 1}), steps=(0,))
    save(one, tmp_path / "one.nc")
    assert load(tmp_path / "one.nc").sizes == one.sizes


def test_case_36_none_in_a_text_variable(tmp_path):
    "A controller called None was read as '', and coordinates of mixed types could not be saved."
    runs = [synthetic(config(TINY | c)) for c in ({}, dict(control="target", control_target=4, control_every=5), dict(control="hold", control_layers="1"))]
    cube = combine(runs)
    save(cube, tmp_path / "cube.nc")
    back = load(tmp_path / "cube.nc")
    assert sorted(back.control.values.tolist()) == ["hold-key-weight-preserve-layers1", "none", "target-key-weight-preserve-target4-every5"]
    modes = dict(zip(back.control.values.tolist(), back.control_mode.values.tolist()))
    assert modes["none"] == "none" and set(modes.values()) == {"none", "target", "hold"}
    np.testing.assert_array_equal(back.control_target.sel(control=["none", "target-key-weight-preserve-target4-every5"]), [np.nan, 4])
    xr.testing.assert_equal(back, cube)
    assert len(list(back.pr.groupby("control"))) == 3, "no run is dropped"


def test_case_37_eigenvalues_of_one_triangle():
    "A routine for symmetric matrices reads one triangle, and gave neat, wrong eigenvalues for a product of weights."
    product = torch.tensor([[0.0, 1], [2, 3]], dtype=torch.float64)
    with pytest.raises(ValueError, match="not symmetric"): geo.spectrum(product)
    with pytest.raises(ValueError, match="not symmetric"): geo.spectrum(torch.eye(3) + 1e-3 * torch.triu(torch.ones(3, 3), 1))
    wq, wk = torch.eye(2, dtype=torch.float64), product  # W_Qᵀ W_K is the product
    assert torch.allclose(geo.qk_weight_spectrum(wq, wk), torch.linalg.svdvals(product))
    draw = torch.Generator().manual_seed(0)
    wq, wk = (torch.randn(3, 12, generator=draw, dtype=torch.float64) for _ in range(2))
    full = torch.linalg.svdvals(wq.T @ wk)
    assert torch.allclose(geo.qk_weight_spectrum(wq, wk), full[:3]) and full[3:].max() < 1e-12, "at most d_head of them are not zero"
    m, c = wq @ wq.T, wk @ wk.T
    assert torch.allclose(geo.interaction_spectrum(m, c).sort().values, torch.linalg.eigvals(m @ c).real.sort().values)


def test_case_38_weights_edited_behind_the_optimizer(text):
    "Momentum that belonged to the weights before an edit undid it a step later."
    k = nn.Linear(2, 2, bias=False)
    k.weight.data = torch.diag(torch.tensor([2.0, 1.0]))
    optimizer = torch.optim.Adam(k.parameters(), lr=0.05)
    control = KeySpectrumController(None, "freeze", modules=[(nn.Linear(2, 2), k, 1, 1)], every=1, optimizer=optimizer)
    k.weight.grad = torch.diag(torch.tensor([-1.0, 0.4])); optimizer.step()
    k.weight.data = torch.diag(torch.tensor([3.0, 1.0]))
    control.apply(1)
    assert torch.allclose(torch.linalg.svdvals(k.weight.data), torch.tensor([2.0, 1.0]), atol=1e-6)
    k.weight.grad = torch.zeros(2, 2); optimizer.step()
    control.apply(2)
    seen = control.history().control_pr.values[:, 0, 0]
    assert seen[0, 0] == pytest.approx(100 / 82) and seen[0, 1] == pytest.approx(25 / 17) and seen[1, 0] != seen[1, 1], "before and after, both in the log"
    cfg = config(TINY | {"corpus": str(text)})
    a, b = (training.new_run(cfg, load_corpus(cfg.corpus)) for _ in range(2))
    b.controller = types.SimpleNamespace(penalty=lambda: 0.0, apply=lambda step: False)
    for run in (a, b):
        for _ in range(3): training.update(run)
    assert same(a.model.state_dict(), b.model.state_dict()), "switched off, it changes no bit"
    assert "controller" in a.state(0.0) and a.state(0.0)["controller"]["settings"]["mode"] == "none"


def test_case_39_an_estimate_that_evaluation_moves():
    "An iterated estimate of the largest singular value was too low, moved in evaluation mode, and broke older weights."
    w = torch.diag(torch.tensor([3.0, 2.99]))
    assert geo.stable_rank(w).item() == pytest.approx((9 + 2.99**2) / 9, rel=1e-7)
    model = GPT(GPTConfig(11, 2, 8, 2, 16))
    names, ids = set(model.state_dict()), torch.arange(16)[None] % 11
    control = KeySpectrumController(model, "hold", space="activation", every=1)
    model.eval()
    assert torch.equal(model(ids)[0], model(ids)[0]) and not control.inputs["key"], "evaluation leaves the controller as it is"
    assert set(model.state_dict()) == names
    model.load_state_dict(GPT(GPTConfig(11, 2, 8, 2, 16), 1).state_dict())  # weights from before the controller
    for wrong in ({}, {"settings": {"mode": "hold"}}, {"u": torch.ones(2)}):
        with pytest.raises(ValueError, match="state"): control.load_state_dict(wrong)
    with pytest.raises(ValueError, match="every: state has 1, this controller 2"):
        KeySpectrumController(model, "hold", space="activation", every=2).load_state_dict(control.state_dict())


def test_case_40_dask_returns_the_cached_run():
    "A function that is taken for pure is not called again for equal arguments, so a second run did nothing."
    sent = []
    pool = DaskPool.__new__(DaskPool)
    pool.futures, pool.client = {}, types.SimpleNamespace(submit=lambda f, job, **kw: sent.append(kw) or object())
    for _ in range(2): pool.start({"id": "run-a"})
    assert [kw["pure"] for kw in sent] == [False, False] and sent[0]["key"] != sent[1]["key"] and all("run-a" in kw["key"] for kw in sent)


def test_case_41_figures_without_a_display(tmp_path):
    "Figures stayed open by the dozen, the same picture had other bytes each night, and a logarithmic axis met a zero."
    ds = synthetic(config(TINY | {"depth": 1}))
    ds = ds.assign(spectrum_layer=ds.spectrum_layer.where(ds["rank"] > 0, 0.0).assign_attrs(ds.spectrum_layer.attrs))
    ds.spectrum_layer[dict(rank=-1)] = 0.0
    before = plt.get_fignums()
    for _ in range(25): subplots()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("a.svg", "b.svg"): savefig(plot_spectra(ds, 0), tmp_path / name)
        savefig(plot_spectra(ds.assign(spectrum_layer=ds.spectrum_layer * 0), 0), tmp_path / "zero.svg")
        savefig(plot_trajectory(ds, 0), tmp_path / "t.png")
    assert plt.get_fignums() == before
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_case_42_the_number_of_threads_changes_results(tiny, text, tmp_path):
    "The order of a sum depends on the number of threads, which nobody had written down."
    cfg, ds = tiny
    assert ds.attrs["threads"] == cfg.threads == 1 and torch.get_num_threads() == 1
    assert run_id(cfg) != run_id(replace(cfg, threads=2)), "part of the run's name"
    seen = []
    training.train(replace(cfg, threads=2, out_dir=str(tmp_path), steps=1), show=False, watch=lambda run: seen.append(torch.get_num_threads()))
    assert set(seen) == {2} and torch.get_num_threads() == 1
    with pytest.raises(ConfigError, match="3 × 2 threads are more than 4 cores. Use at most 2 workers"):
        plan_runs([TINY | {"corpus": str(text), "threads": 2}], tmp_path / "out", workers=3, cores=4)
    assert plan_runs([TINY | {"corpus": str(text), "threads": 2, "seed": s} for s in range(9)], tmp_path / "out", cores=4).workers == 2
    env = sweep_module._environment(3)
    assert {env[f"{n}_NUM_THREADS"] for n in ("OMP", "MKL", "OPENBLAS")} == {"3"}


def test_case_44_names_revisions_and_no_network(monkeypatch, tmp_path):
    "A data set without its owner's name failed, or another data set or revision came in its place without a word."
    asked = {}
    def load_dataset(*args, **kw):
        asked.update(args=args, kw=kw)
        raise ConnectionError("no network\nand more")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(RuntimeError) as e: load_corpus("wikitext-103", cache_dir=tmp_path)
    said = str(e.value)
    assert "Salesforce/wikitext" in said and corpus_module.HUB_REVISION in said and "folder=…" in said and "\n" not in said
    assert asked["args"] == ("Salesforce/wikitext", "wikitext-103-raw-v1") and asked["kw"]["revision"] == corpus_module.HUB_REVISION
    assert not list(tmp_path.glob("*.ids")), "nothing stands in for it"
    for name in ("wikitext", "wikitext-2", "Wikitext-103", "wikipedia"):
        with pytest.raises(ValueError, match="Valid names"): load_corpus(name, cache_dir=tmp_path)


def test_every_case_has_a_test_a_pointer_or_a_reason():
    here = {int(m[1]) for n in globals() if (m := re.match(r"test_case_(\d\d)_", n))}
    assert here | set(NOT_HERE) | set(ELSEWHERE) == set(range(1, 45)) and not here & set(NOT_HERE)
    for file, words in (p for pointers in ELSEWHERE.values() for p in pointers):
        path = ROOT / file
        if path.suffix == ".py":
            names = {n.name for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)}
            assert words.startswith("test_") and words in names, (file, words)
        else: assert any(words in "".join(c["source"]) for c in cells(path)), (file, words)
