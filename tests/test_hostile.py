"""Whatever comes in, from a command line, a file or a folder, is either understood or refused by name; nothing is run, and nothing is
written where it was not asked for. Random input from hypothesis, the same in every run."""
import json
import math
import os
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr
from conftest import ROOT, SMALL
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import qkgeo
from qkgeo import corpus as corpus_module
from qkgeo import sweep, training
from qkgeo.config import ConfigError, TrainConfig, config, control_label, from_json, run_id, to_json
from qkgeo.control import KeySpectrumController
from qkgeo.corpus import decode, encode, fixed_batch, load_corpus, windows
from qkgeo.model import GPT, GPTConfig, register_qk_init
from qkgeo.pretrained import SeriesConfig, series_config, series_folder
from qkgeo.results import SCHEMA, SchemaError, check_schema, collect, load, read_progress, save, synthetic
from qkgeo.sweep import plan_runs, read_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FIELDS = {f.name: f for f in fields(TrainConfig)}
TINY = SMALL | {"steps": 2, "probe_points": 2, "context": 8, "probe_sequences": 4, "probe_subset": 2, "batch": 2, "depth": 1}


def tries(n):
    return settings(max_examples=n, deadline=None, derandomize=True, database=None,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.data_too_large])


def clear(error, *things):
    """Whether an error speaks to a user: raised in qkgeo itself as a ValueError or OSError of its own words (an OSError of the system
    that names its file will do), in lines of a readable length, with one of `things` in the message."""
    last = error.__traceback__
    while last.tb_next: last = last.tb_next
    ours = Path(last.tb_frame.f_code.co_filename).parent == Path(qkgeo.__file__).parent
    own = isinstance(error, ValueError | OSError | training.TrainingFailed) and not isinstance(error, UnicodeError | json.JSONDecodeError)
    named = isinstance(error, OSError) and error.filename is not None
    said = str(error)
    return own and (ours or named) and len(said) < 5000 and any(str(t) in said or repr(str(t))[1:-1] in said for t in things)


WORDS = st.text(st.characters(), max_size=20)  # lone surrogates and NUL among them
NUMBERS = st.one_of(st.integers(), st.integers(-3, 300), st.floats(), st.sampled_from([10**400, 10**5000, -10**5000, -0.0, 1e300, 2**63, 5e-324]),
                    st.fractions(), st.decimals(), st.complex_numbers(), st.booleans())
NUMPY = st.one_of(st.integers(-9, 99).map(np.int64), st.floats(width=32).map(np.float32), st.booleans().map(np.bool_),
                  st.lists(st.integers(0, 9), max_size=3).map(np.array), st.integers(0, 9).map(np.array), WORDS.map(np.str_))
TYPED = st.one_of(st.sampled_from(["true", "False", "none", "null", "~", "", " ", "007", "1_000", "1e3", "1e-3", "nan", "-inf", "0x10", "1e400", "[1, 2]", "{}",
                                   "١٢", "²",
                                   "1/sqrt(d_model)", "0,1", "all", "0, 0", ",", "hold", "shrink", "target", "tied", "9" * 5000, "a\nb", "../../x", "/", "..",
                                   "\x00"]),
                  st.from_regex(r"-?[0-9]{1,4}(\.[0-9]{0,3})?(e-?[0-9]{1,3})?", fullmatch=True), WORDS)
ANYTHING = st.one_of(st.none(), NUMBERS, NUMPY, TYPED, st.binary(max_size=5), st.just(object()), WORDS.filter(lambda t: "\0" not in t).map(Path),
                     st.recursive(st.one_of(st.none(), st.integers(), WORDS),
                                  lambda x: st.lists(x, max_size=3) | st.dictionaries(WORDS, x, max_size=3), max_leaves=5))


def sound(cfg):
    "Every field of a configuration has its declared type and range."
    for f in FIELDS.values():
        value, spec = getattr(cfg, f.name), f.metadata
        if value is None: assert spec["optional"], f.name
        else:
            assert type(value) is spec["kind"], f.name
            if spec["choices"]: assert value in spec["choices"], f.name
            if spec["kind"] in (int, float): assert math.isfinite(value) and spec["low"] <= value <= spec["high"] and math.copysign(1, value) == 1, f.name
    assert from_json(to_json(cfg)) == cfg and replace(cfg) == cfg and run_id(from_json(to_json(cfg))) == run_id(cfg)
    return True


def understood_or_refused(values):
    try: made = config(values)
    except ConfigError as e:
        assert clear(e, *values), (values, str(e)[:300])
        for line in str(e).split("\n"): assert line.strip() and len(line) < 700 and ": " in line, line
        return None
    assert sound(made)
    return made


@given(st.sampled_from(sorted(FIELDS)), ANYTHING)
@example("control_target", 10**5000)
@example("out_dir", "\ud800")
@tries(100)
def test_any_value_of_a_field_is_understood_or_refused_by_name(name, value):
    understood_or_refused({name: value})


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)) | WORDS | st.integers(), ANYTHING, max_size=5))
@tries(80)
def test_any_values_together(values):
    assume(values)
    understood_or_refused(values)


@given(st.sampled_from(sorted(FIELDS)), TYPED)
@tries(40)
def test_text_as_papermill_hands_it_over(name, typed):
    from papermill.cli import _resolve_type
    try: given_on = _resolve_type(typed)
    except ValueError: return  # papermill's own: more digits than Python turns into a number
    made = understood_or_refused({name: given_on})
    if made is not None and FIELDS[name].metadata["kind"] is str and isinstance(given_on, str) and name not in ("init_scale", "corpus"):
        assert getattr(made, name) in (given_on, None), "text stays as it was typed"


@given(ANYTHING)
@tries(100)
def test_series_values_are_understood_or_refused_by_name(value):
    names = [f.name for f in fields(SeriesConfig)]
    for name in names:
        try: series_config({name: value})
        except ConfigError as e: assert clear(e, *names) and (name in str(e) or "multiple of" in str(e)), name


VALID = st.fixed_dictionaries({}, optional={
    "depth": st.integers(1, 4), "d_model": st.sampled_from([16, 64]), "lr": st.floats(0, 1), "seed": st.integers(0, 3), "batch": st.integers(1, 4),
    "qk_init": st.sampled_from(["gaussian", "tied"]), "init_scale": st.sampled_from([0.02, "2e-2", "0.5", "1/sqrt(d_model)", "1 / sqrt(d_model)"]),
    "corpus": st.sampled_from(["a", "A", "a/b", "a//b", "./a/b", "b/a", "a-b", "a b", "..", "ä", "a" * 60, "a" * 61, "wikipedia-sample"]),
    "corpus_dir": st.sampled_from([None, "x"]), "out_dir": st.sampled_from(["x", "runs"]), "threads": st.sampled_from([1, 2]),
    "weight_decay": st.sampled_from([0.0, -0.0, 0, 0.1]), "control": st.sampled_from(["hold", "shrink", "scale", "compensate", "sham"])})
SPELLINGS = [{"init_scale": "0.020"}, {"lr": "2e-3"}, {"lr": 0.002}, {"corpus": "./wikipedia-sample/"}, {"steps": "1.5e3"}, {"control": "none"}]


@given(VALID, VALID, st.sampled_from(["all", "0", "00", " 0"]), st.sampled_from(["all", "0"]))
@tries(100)
def test_run_ids_differ_exactly_when_numbers_may(one, other, layers, others):
    if "control" in one: one["control_layers"] = layers
    if "control" in other: other["control_layers"] = others
    a, b = config(one), config(other)
    numbers = lambda c: [getattr(c, n) for n, f in FIELDS.items() if f.metadata["names_run"]]
    assert (run_id(a) == run_id(b)) == (numbers(a) == numbers(b))
    steered = lambda c: [getattr(c, n) for n, f in FIELDS.items() if f.metadata["names_run"] and n.startswith("control")]
    if a.depth == b.depth: assert (control_label(a) == control_label(b)) == (steered(a) == steered(b))


def test_other_spellings_of_the_same_numbers_have_the_same_id():
    assert {run_id(config(v)) for v in SPELLINGS if "corpus" not in v} == {run_id(TrainConfig())}
    assert run_id(config(corpus="a/../b/x.txt")) == run_id(config(corpus="b//x.txt")) == run_id(config(corpus="./b/x.txt"))


@given(st.text(st.characters(), min_size=1, max_size=400) | TYPED, WORDS)
@example("../" * 80 + "x", "../../evil")
@example("....", "..")
@tries(100)
def test_run_ids_are_safe_folder_names(corpus, qk_init):
    cfg = understood_or_refused({"corpus": corpus, "qk_init": qk_init})
    if cfg is None: return
    name = run_id(cfg)
    assert re.fullmatch(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*", name) and len(name) < 200 and not name.endswith(".")
    assert os.path.normpath(os.path.join("out", name)) == os.path.join("out", name) and os.path.split(os.path.join("out", name))[0] == "out"


JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | WORDS | st.sampled_from(["x", "code", "parameters", "python3"]),
                    lambda x: st.lists(x, max_size=4) | st.dictionaries(WORDS | st.sampled_from([*FIELDS, "cells", "metadata", "tags"]), x, max_size=4),
                    max_leaves=12)


@given(JSON.map(json.dumps) | WORDS | st.sampled_from(["[" * 100_000, "{}", "", "null", '{"depth": 1e999}', '{"depth": 3, "depth": "x"}']))
@tries(80)
def test_any_text_is_a_configuration_or_said_not_to_be_one(text):
    try: assert sound(from_json(text))
    except ConfigError as e: assert clear(e, "not a configuration", "no such parameter", *FIELDS)


BOM = b"\xef\xbb\xbf"
TEXTS = st.one_of(st.binary(max_size=60), st.text(st.characters(exclude_categories=["Cs"]), max_size=40).map(str.encode),
                  st.text("a\r\n\0é𝔄 =", max_size=60).map(str.encode), st.text(st.characters(), max_size=20).map(lambda s: s.encode("utf-8", "surrogatepass")),
                  st.text("aé", min_size=1).map(lambda s: s.encode("utf-16")), st.text("abé", min_size=1).map(lambda s: s.encode("latin1")))


@given(st.sampled_from([b"", BOM]), TEXTS, st.sampled_from([b"", b"abc", b"\xff", b"\xe2\x82"]), st.sampled_from([2, 3, 7, 2**20]))
@example(b"", b"", b"", 2)
@example(BOM, b"", b"", 2)
@example(b"", b"x", b"", 2)
@example(b"", b"\0\r\n\0\r\n", b"", 2)
@tries(60)
def test_any_bytes_are_a_text_or_an_error_with_file_and_offset(tmp_path_factory, mark, body, end, piece):
    folder = tmp_path_factory.getbasetemp() / "texts"
    folder.mkdir(exist_ok=True)
    path, data = folder / "some text.txt", mark + body + end
    path.write_bytes(data)
    before, corpus_module._PIECE = corpus_module._PIECE, piece  # so that characters lie across the borders of what is read at once
    try: c = load_corpus(path, min_count=1, val_fraction=0.4, cache_dir=folder / "cache")
    except ValueError as e:
        assert clear(e, path, path.name)
        try: text = data.decode("utf-8-sig")
        except UnicodeDecodeError as wrong: assert f"at byte offset {wrong.start + 3 * data.startswith(BOM)} " in str(e), (wrong, str(e))
        else: assert len(text) < 3 and "empty" in str(e)
        return
    finally: corpus_module._PIECE = before
    text = data.decode("utf-8-sig")
    whole = c.decode(c.train) + c.decode(c.val)
    assert len(whole) == len(text) == c.n_chars and c.unknown_train == 0
    known = "".join(x if x in c.vocab else "\ufffd" for x in text)
    assert whole == known and c.unknown_val == sum(x not in c.vocab for x in text)
    if not c.unknown_val: assert whole.encode() == data.removeprefix(BOM)


@given(st.text(st.characters(), max_size=50), st.text(st.characters(), max_size=10))
@tries(60)
def test_ids_decode_to_the_text(text, more):
    vocab = "".join(sorted(set(text)))
    assert decode(encode(text, vocab, strict=True), vocab) == text
    ids = encode(text + more, vocab)
    assert len(ids) == len(text + more) and decode(ids, vocab) == "".join(x if x in vocab else "\ufffd" for x in text + more)
    with pytest.raises(ValueError, match=f"id {len(vocab) + 1} is outside"): decode([len(vocab) + 1], vocab)


@given(ANYTHING)
@example("~nobody-of-this-name/x")
@example("a" * 5000)
@tries(120)
def test_any_name_of_a_corpus(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp() / "names"
    try: load_corpus(name, cache_dir=folder)
    except (ValueError, OSError) as e: assert clear(e, "corpus", "Valid names", "split")
    for wrong in ({"val_fraction": name}, {"min_count": name}):
        if isinstance(name, int | float) and not isinstance(name, bool) and 0 < name < math.inf: continue
        with pytest.raises(ValueError) as e: load_corpus("x", cache_dir=folder, **wrong)
        assert clear(e.value, *wrong)
    assert not folder.exists()


@given(ANYTHING)
@tries(100)
def test_any_size_of_a_window(size):
    ids, draw = np.zeros(40, np.uint8), torch.Generator().manual_seed(0)
    for words, call in (("context", lambda: windows(ids, size, 2, draw)), ("number of windows", lambda: windows(ids, 8, size, draw)),
                        ("context", lambda: fixed_batch(ids, size, 2))):
        if words == "number of windows" and isinstance(size, int | float) and size > 1000: continue  # a large batch is no fault
        try: x, y = call()
        except ValueError as e: assert clear(e, words)
        else: assert x.shape == y.shape


TARGET = (ROOT / "nbs" / "train.ipynb").read_text(encoding="utf-8")
PLACES = [("cells",), ("cells", 0), ("cells", 2), ("cells", 2, "metadata"), ("cells", 2, "metadata", "tags"), ("cells", 2, "source"), ("cells", 2, "cell_type"),
          ("metadata",), ("metadata", "kernelspec"), ("nbformat",), ("nbformat_minor",)]


def target_faults(text, folder):
    path = folder / "target.ipynb"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    said = sweep._target_faults(path)
    for line in said: assert isinstance(line, str) and str(path) in line and len(line) < 1000
    return said


@given(st.integers(0, len(TARGET) - 3))
@tries(25)
def test_a_target_that_was_cut_short(tmp_path_factory, n):
    assert target_faults(TARGET[:n], tmp_path_factory.getbasetemp())


@given(JSON.map(json.dumps) | WORDS)
@example("[" * 100_000)
@example(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}}))
@tries(30)
def test_a_target_that_is_something_else(tmp_path_factory, text):
    assert target_faults(text, tmp_path_factory.getbasetemp())


@given(st.sampled_from(PLACES), JSON, st.booleans())
@tries(30)
def test_a_target_with_one_part_replaced(tmp_path_factory, place, value, remove):
    nb = json.loads(TARGET)
    at = nb
    for step in place[:-1]: at = at[step]
    if remove: del at[place[-1]]
    else: at[place[-1]] = value
    said = target_faults(json.dumps(nb), tmp_path_factory.getbasetemp())
    if place[:2] == ("cells", 2) or place == ("cells",):
        good = place[2:] == ("metadata", "tags") and isinstance(value, list) and "parameters" in value and not remove
        assert said or good


def test_a_broken_target_starts_no_kernel(tmp_path, text):
    for n, broken in enumerate((TARGET[:500], "{}", TARGET.replace('"parameters"', '"parametres"'), "")):
        (tmp_path / f"{n}.ipynb").write_text(broken)
        with pytest.raises(ConfigError, match=f"nothing was started:\n.*{n}.ipynb"):
            plan_runs([TINY | {"corpus": str(text)}], tmp_path / "out", target=tmp_path / f"{n}.ipynb")
    assert not (tmp_path / "out").exists()


GOOD = synthetic(config(TINY), steps=(0, 2)).assign_attrs(status="finished")


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory):
    return save(GOOD, tmp_path_factory.mktemp("good") / "result.nc").read_bytes()


def readable_or_refused(folder, damage):
    "A damaged file beside a whole one: `load` names it, and `collect` keeps the other."
    path, other = folder / run_id(config(TINY)) / "result.nc", config(TINY | {"seed": 1})
    path.parent.mkdir(parents=True, exist_ok=True)
    damage(path)
    try: ds = load(path)
    except SchemaError as e: assert clear(e, path); ds = None
    else: check_schema(ds)
    beside = folder / run_id(other) / "result.nc"
    if not beside.exists(): save(synthetic(other, steps=(0, 2)).assign_attrs(status="finished"), beside)
    cube = collect(folder, [config(TINY), other])
    named = json.loads(cube.attrs["report"])["unreadable"]
    assert 1 in cube.seed.values.tolist() and (str(path) in named.get(path.parent.name, "") or ds is not None)
    assert isinstance(sweep.result_fault(folder, path.parent.name), str)
    if ds is not None and 0 in cube.seed.values:
        np.testing.assert_array_equal(cube.val_loss.sel(seed=0, step=ds.step).isel(depth=0, qk_init=0, control=0), ds.val_loss)
    return ds


@given(st.floats(0, 0.999), st.sampled_from(["cut", "head", "random", "text"]), st.binary(max_size=200))
@tries(12)
def test_a_result_that_was_cut_short_or_is_something_else(tmp_path_factory, good_bytes, share, kind, noise):
    n = int(share * len(good_bytes))
    data = {"cut": good_bytes[:n], "head": good_bytes[:8] + noise, "random": noise, "text": b"CDF\x01" + noise}[kind]
    assert readable_or_refused(tmp_path_factory.getbasetemp() / "cut", lambda p: p.write_bytes(data)) is None


def rewritten(path, change):
    "The good file after a change that `save` would refuse."
    ds = change(GOOD.copy(deep=True))
    ds.to_netcdf(path, engine="netcdf4")


ATTRIBUTE = st.one_of(st.none(), st.integers(-5, 99), st.floats(), st.sampled_from(["", "x", "{}", "[]", "2", "[" * 5000, '{"depth": "x"}', '{"dept": 1}']),
                      st.lists(st.integers(0, 3), max_size=3), st.lists(st.sampled_from(["a", "b"]), min_size=2, max_size=3))


@given(st.sampled_from(["schema_version", "config", "run_id", "status", "git_commit", "versions", "precision", "threads", "wall_time_s"]), ATTRIBUTE)
@example("schema_version", "x")
@example("schema_version", -1)
@example("schema_version", [1, 2])
@example("config", "x")
@example("config", 3)
@example("schema_version", 1)
@tries(4)
def test_attributes_of_another_kind(tmp_path_factory, name, value):
    def change(ds):
        ds.attrs.pop(name, None)
        return ds if value is None else ds.assign_attrs({name: value})
    readable_or_refused(tmp_path_factory.getbasetemp() / "attributes", lambda p: rewritten(p, change))


def as_text(v): return v.astype(str)


def packed(ds, n):
    "The variable as whole numbers with a scale, as other programs write them."
    ds[n] = ds[n].astype(float)
    ds[n].encoding = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 5.0, "_FillValue": -999}
    return ds


CHANGES = {
    "gone": lambda ds, n: ds.drop_vars(n), "text": lambda ds, n: ds.assign({n: as_text(ds[n]).assign_attrs(ds[n].attrs)}),
    "bare": lambda ds, n: ds.assign({n: ds[n].drop_attrs()}), "turned": lambda ds, n: ds.assign({n: ds[n].transpose(*ds[n].dims[::-1])}),
    "renamed": lambda ds, n: ds.rename({n: "x"}), "flat": lambda ds, n: ds.assign({n: ds[n].isel({d: 0 for d in ds[n].dims}, drop=True)}),
    "whole": lambda ds, n: ds.assign({n: ds[n].fillna(0).astype(np.int8).assign_attrs(ds[n].attrs)}),
    "dates": lambda ds, n: ds.assign({n: ds[n].assign_attrs(units="days since yesterday")}), "packed": lambda ds, n: packed(ds, n),
}
COORDINATES = {
    "no side": lambda ds: ds.drop_vars("side"), "other sides": lambda ds: ds.assign_coords(side=["key", "query"]),
    "numbers": lambda ds: ds.assign_coords(side=[0, 1]),
    "no step": lambda ds: ds.drop_vars("step"), "steps fall": lambda ds: ds.isel(step=[1, 0]), "steps repeat": lambda ds: ds.isel(step=[0, 0]),
    "float steps": lambda ds: ds.assign_coords(step=ds.step * 1.0), "text steps": lambda ds: ds.assign_coords(step=["a", "b"]),
    "no when": lambda ds: ds.drop_vars("when"), "other when": lambda ds: ds.assign_coords(when=["a", "b"]), "empty": lambda ds: ds.isel(step=[]),
    "one side": lambda ds: ds.isel(side=[0]), "scalar side": lambda ds: ds.isel(side=0), "scalar step": lambda ds: ds.isel(step=0),
    "more": lambda ds: ds.expand_dims(extra=[1, 2]), "nothing": lambda ds: xr.Dataset(), "no heads": lambda ds: ds.isel(head=[]),
}


@given(st.sampled_from(sorted(CHANGES)), st.sampled_from(["pr", "val_loss", "spectrum", "entropy", "n_kv", "control_gain"]))
@example("packed", "val_loss")
@example("dates", "val_loss")
@example("text", "pr")
@tries(5)
def test_variables_of_another_kind(tmp_path_factory, kind, name):
    ds = readable_or_refused(tmp_path_factory.getbasetemp() / "variables", lambda p: rewritten(p, lambda ds: CHANGES[kind](ds, name)))
    if ds is not None: assert ds[name].dtype.kind in "fi" and (ds[name].dims == tuple(SCHEMA[name][0].split()))


@pytest.mark.parametrize("kind", COORDINATES)
def test_coordinates_of_another_kind(tmp_path, kind):
    assert readable_or_refused(tmp_path, lambda p: rewritten(p, COORDINATES[kind])) is None or kind in ("no heads",)


def test_a_netcdf_file_of_somebody_else(tmp_path):
    def other(path):
        with netCDF4.Dataset(path, "w") as f:
            f.createDimension("step", 3)
            f.createVariable("step", str, ("step",))
            f.createGroup("inner").note = "x"
    assert readable_or_refused(tmp_path, other) is None


@pytest.fixture(scope="module")
def checkpoint(text, tmp_path_factory):
    "A trained run; its folder and its checkpoint's bytes."
    cfg = config(TINY | {"corpus": str(text), "out_dir": str(tmp_path_factory.mktemp("runs"))})
    training.train(cfg, show=False)
    path = Path(cfg.out_dir) / run_id(cfg) / "checkpoint.pt"
    return cfg, path.read_bytes(), training.read_checkpoint(path)


@given(st.floats(0, 0.999), st.sampled_from(["cut", "random", "pickle"]), st.binary(max_size=100))
@tries(20)
def test_a_checkpoint_that_was_cut_short_or_is_something_else(tmp_path_factory, checkpoint, share, kind, noise):
    path = tmp_path_factory.getbasetemp() / "checkpoint.pt"
    path.write_bytes({"cut": checkpoint[1][: int(share * len(checkpoint[1]))], "random": noise, "pickle": pickle.dumps(noise)}[kind])
    for read in (training.read_checkpoint, training.load_model):
        with pytest.raises(ValueError) as e: read(path)
        assert clear(e.value, path)


class Evil:
    "A pickle that writes a file when it is read."
    def __init__(self, path): self.path = path
    def __reduce__(self): return (Path.write_text, (self.path, "was here"))


def test_a_pickle_in_a_checkpoint_is_not_run(tmp_path, checkpoint, text):
    cfg, _, state = checkpoint
    trace, path = tmp_path / "trace", tmp_path / "checkpoint.pt"
    pickle.loads(pickle.dumps(Evil(trace)))
    assert trace.read_text() == "was here", "it would"
    trace.unlink()
    for save_it in (lambda: torch.save(Evil(trace), path), lambda: path.write_bytes(pickle.dumps(Evil(trace))),
                    lambda: torch.save(state | {"more": Evil(trace)}, path),
                    lambda: torch.save(state | {"model": Evil(trace)}, path, _use_new_zipfile_serialization=False)):
        save_it()
        for read in (training.read_checkpoint, training.load_model):
            with pytest.raises(ValueError) as e: read(path)
            assert clear(e.value, path)
        mine = replace(cfg, out_dir=str(tmp_path / "runs"))
        folder = tmp_path / "runs" / run_id(mine)
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*"): left.unlink()
        path.replace(folder / "checkpoint.pt")
        with pytest.warns(UserWarning, match="starts over"): training.train(mine, show=False)
        assert not trace.exists() and (folder / "checkpoint.damaged").exists()


@given(st.sampled_from(["format", "config", "vocab", "vocab_size", "corpus_sha256", "step", "average", "wall_time_s", "model", "optimizer", "controller",
                        "rows"]),
       st.sampled_from([None, 3, "x", "{}", [], [1], {}, {"a": 1}]))
@tries(15)
def test_a_checkpoint_with_one_part_replaced(tmp_path_factory, checkpoint, name, value):
    cfg, _, state = checkpoint
    path, corpus = tmp_path_factory.getbasetemp() / "part.pt", load_corpus(cfg.corpus)
    torch.save({n: v for n, v in (state | {name: value}).items() if n != name or value is not None}, path)
    harmless = (name, value) in [("average", 3), ("wall_time_s", 3), ("rows", [])]
    try: training.resume(training.new_run(cfg, corpus), training.read_checkpoint(path))
    except ValueError as e: assert clear(e, path, name, "checkpoint")
    else: assert harmless, (name, value)
    try: training.load_model(path)
    except ValueError as e: assert clear(e, path, name)


def test_a_checkpoint_of_another_configuration(checkpoint):
    cfg, _, state = checkpoint
    for other in (replace(cfg, seed=1), replace(cfg, d_model=32), replace(cfg, control="hold", control_every=1)):
        with pytest.raises(ValueError) as e: training.resume(training.new_run(other, load_corpus(cfg.corpus)), state)
        assert clear(e.value, run_id(cfg)) and run_id(other) in str(e.value)


PARTS = st.sampled_from(["base", "grid", "runs", "bsae", "depth", "lr", "seed", "corpus", "out_dir", "", "<<", "1"])
TREES = st.recursive(st.none() | st.integers(-3, 9) | st.sampled_from(["a", "1e-3", "~", "nan", "x.txt", "", "../x", "=", "!!python/name:os.system"]) | WORDS,
                     lambda x: st.lists(x, max_size=3) | st.dictionaries(PARTS, x, max_size=3), max_leaves=10)


def runs_or_refused(path):
    "What a file of runs comes to: configurations and faults, all of which name the file."
    try: rows = read_runs(path)
    except ConfigError as e:
        assert clear(e, path) and all(str(path) in line or not line.startswith(str(path.parent)) for line in str(e).split("\n"))
        return
    made, faults = sweep._configs(rows, path.parent / "out", {})
    for cfg in made.values(): assert sound(cfg)
    for line in faults: assert str(path) in line or line.startswith("runs: ")


@given(TREES.map(json.dumps) | WORDS | st.sampled_from(["- [&a [*a]]", "&a [*a]", "? [a]\n: b", "a: 1\na: 2", "- {lr: 1, lr: 2}", "--- 1\n--- 2", "\t",
                                                       "%YAML 9", "[" * 3000,
                                                       "- !!python/object/apply:os.system [\"touch ran\"]", "grid: {lr: [[1]]}", "grid: {lr: {a: 1}}", "*a"]))
@tries(30)
def test_any_file_of_runs(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "list.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    runs_or_refused(path)
    assert not (path.parent / "ran").exists() and not Path("ran").exists()


def test_a_file_of_runs_that_grows_without_end(tmp_path):
    "Ten lines of YAML that stand for ten thousand million values: the message stays short."
    tens = "".join(f"  - &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(9))
    (tmp_path / "list.yaml").write_text("grid:\n  lr: [1]\n  seed:\n  - &a0 [x, x]\n" + tens)
    with pytest.raises(ConfigError) as e: read_runs(tmp_path / "list.yaml")
    assert clear(e.value, tmp_path / "list.yaml", "seed") and len(str(e.value)) < 2000


@given(st.lists(ANYTHING | st.dictionaries(st.sampled_from(["lr", "depth", "out_dir"]), ANYTHING, max_size=2), max_size=3))
@tries(80)
def test_any_list_of_runs(runs):
    made, faults = sweep._configs(runs, Path("out"), {})
    assert all(map(sound, made.values())) and all(line.startswith("run") for line in faults) and (made or faults)


@given(st.text(st.characters(), max_size=30) | JSON.map(json.dumps))
@tries(60)
def test_a_damaged_list_or_progress_file(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp() / "listed"
    folder.mkdir(exist_ok=True)
    for name in ("runs.json", "progress.json"): (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert isinstance(read_progress(folder), dict)
    try: collect(folder)
    except (ValueError, FileNotFoundError) as e: assert clear(e, folder, folder / "runs.json")
    try: sweep._write_list({}, folder)
    except ConfigError as e: assert clear(e, folder / "runs.json")


MODEL = GPT(GPTConfig(7, 1, 8, 2, 8))
MEANT = {"mode": st.sampled_from(["hold", "target", "shrink", "truncate", "scale", "none"]), "target": st.sampled_from([2, 3.5, None]),
         "factor": st.sampled_from([0.5, None])}


@given(st.fixed_dictionaries({"mode": MEANT["mode"]}, optional={n: ANYTHING | MEANT.get(n, st.nothing()) for n in
       ("target", "factor", "energy", "side", "space", "unit", "every", "start", "ramp", "strength", "layers")}))
@tries(50)
def test_any_settings_of_the_controller(kw):
    try: control = KeySpectrumController(MODEL, **kw)
    except ValueError as e: assert clear(e, *kw), (kw, e)
    else:
        control.close()
        assert control.every >= 1 and math.isfinite(control.strength) and control.layers == [0]


def snapshot(folder): return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("name", ["../../x.txt", "a/../../b.txt", "..;x.txt", "$(touch ran).txt", "%2e%2e%2fx.txt", "ünï✓.txt", "-rf.txt", "a\nb.txt", " .txt",
                                  "x" * 200 + ".txt",
                                  "....txt", "con.txt", "`touch ran`.txt", "..\\..\\x.txt"])
def test_nothing_is_written_outside_the_output_folder(tmp_path, monkeypatch, name):
    inner = tmp_path / "p" / "q"
    (inner / "a").mkdir(parents=True)
    monkeypatch.chdir(inner)
    Path(name).write_text("abcdefgh " * 40)
    register_qk_init("../../../evil")(evil_init)
    before = snapshot(tmp_path)
    ds = training.train(config(TINY | {"corpus": name, "out_dir": "out", "qk_init": "../../../evil"}), show=False)
    made = {p: v for p, v in snapshot(tmp_path).items() if p not in before}
    assert {p for p, v in before.items() if snapshot(tmp_path).get(p, 0) != v} == set()
    assert made and all(p == inner / "out" or inner / "out" in p.parents for p in made)
    assert (inner / "out" / ds.attrs["run_id"] / "result.nc").is_file() and len(list((inner / "out").iterdir())) == 1


def evil_init(w_q, w_k, n_head, std, generator):
    for w in (w_q, w_k): w.normal_(generator=generator).mul_(std)


@given(st.text(st.characters(), min_size=1, max_size=30) | TYPED)
@example("..")
@example(".")
@example("/")
@example("../..")
@tries(150)
def test_folders_made_from_names_lie_in_their_folder(name):
    try: folder = series_folder(series_config({"source": name, "out_dir": "out"}))
    except ConfigError as e: assert clear(e, "source")
    else: assert folder.parent == Path("out") and os.path.normpath(folder) == str(folder) and len(folder.name.encode()) < 250
    source = corpus_module._Source(name, "file", {"key": name.encode("utf-8", "surrogatepass").hex()}, None)
    cache = Path(os.environ["QKGEO_CACHE"])
    entry = corpus_module._entry(source, cache, 0.1, 1)
    assert entry.parent == cache and os.path.normpath(entry) == str(entry) and len(entry.name.encode()) < 200
