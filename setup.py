"""Says which packages the distribution holds; everything else stands in pyproject.toml.

The folders `lifecycle/`, `storage/` and `adapters/` install under the namespace `kvledger`. setuptools can find
packages by itself only under the names their folders have, so this file adds the namespace: a new sub-package needs no
entry anywhere.
"""

from __future__ import annotations

from setuptools import find_packages, setup

FOLDERS = ("lifecycle", "storage", "adapters")

setup(
    packages=[
        f"kvledger.{package}"
        for package in find_packages(include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
    ],
    package_dir={f"kvledger.{folder}": folder for folder in FOLDERS},
)
