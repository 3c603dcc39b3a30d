"""Everything that installing needs stands in settings.ini; this file only hands it on."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="], interpolation=None)
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

extras = {name: cfg[f"{name}_requirements"].split() for name in ("hub", "cluster", "dev")}
extras["dev"] += extras["hub"] + extras["cluster"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="MIT",
    packages=[cfg["lib_name"]],
    # an installed wheel runs the same notebooks as a clone does
    data_files=[("share/qkgeo", ["nbs/train.ipynb", "nbs/checkpoints.ipynb"])],
    package_data={cfg["lib_name"]: ["*.mplstyle"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split(),
                  "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
)
