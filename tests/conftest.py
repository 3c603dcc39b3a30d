"""What several tests need: where things are, a small text, and a small configuration as papermill arguments."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"depth": 2, "d_model": 16, "n_head": 2, "context": 16, "batch": 8, "steps": 40, "warmup": 5, "probe_points": 6,
         "probe_sequences": 16, "probe_subset": 4, "threads": 1, "checkpoint_every": 10}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    "A text file in which each letter depends on the one before."
    draw, letters, seen = np.random.default_rng(0), "abcdefghij \n", [0]
    table = draw.dirichlet(np.full(len(letters), 0.2), len(letters))
    for _ in range(8000): seen.append(draw.choice(len(letters), p=table[seen[-1]]))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(letters[i] for i in seen))
    return path


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    "Tests leave the user's cache alone."
    os.environ["QKGEO_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["IPYTHONDIR"] = str(tmp_path_factory.mktemp("ipython"))
    os.environ.pop("IN_TEST", None)


def cells(path):
    "The cells of a notebook file."
    return json.loads(Path(path).read_text(encoding="utf-8"))["cells"]


def papermill(cwd, *args, notebook="train", timeout=300):
    "Run a target of `nbs` through papermill's command line."
    command = [sys.executable, "-m", "papermill", str(ROOT / "nbs" / f"{notebook}.ipynb"), "out.ipynb", *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)


def as_args(values):
    "A dict as `-p name value` arguments."
    return [x for n, v in values.items() for x in ("-p", n, v)]
