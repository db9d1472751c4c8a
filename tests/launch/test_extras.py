"""The extras for accelerators, resolved by pip against the package index together with the pins of requirements.txt."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PIP = "pip==26.3"  # reads the requirements of a wheel of gigabytes from its last kilobytes, and a dry run of it downloads no more
EXTRAS = {
    "rocm": {"jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"},
    "cuda": {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"},
    "tpu": {"libtpu": "0.0.42.1"},
}


def pins():
    """Name -> version in requirements.txt, names as the index normalises them."""
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What pip reads of the checkout, elsewhere: building its metadata leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """`dry_run(folder, *arguments)`: (exit code, name -> version of what `pip install` would install, its errors)."""
    home = tmp_path_factory.mktemp("pip")
    fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home), PIP]
    fetched = subprocess.run(fetch, capture_output=True, text=True, timeout=300, check=False)
    if fetched.returncode != 0:
        pytest.skip(f"the package index gave no {PIP}: {' '.join(fetched.stderr.split())[-300:]}")

    def run(folder, *arguments):
        report = home / "report.json"
        report.unlink(missing_ok=True)
        options = ["--dry-run", "--use-feature=fast-deps", "--no-build-isolation", "--quiet", "--report", str(report)]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, *arguments],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(home)}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        chosen = json.loads(report.read_text())["install"] if report.exists() else []
        found = {normal(item["metadata"]["name"]): item["metadata"]["version"] for item in chosen}
        return done.returncode, found, done.stderr

    return run


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_resolves_with_every_pin_as_it_is(extra, checkout, dry_run):
    # --ignore-installed: what this environment happens to hold decides nothing
    code, found, errors = dry_run(checkout, "--ignore-installed", "-r", "requirements.txt", f".[{extra}]")
    assert code == 0, errors
    assert found.items() >= pins().items()
    assert found.items() >= EXTRAS[extra].items()


def test_a_plugin_is_at_the_version_of_jax():
    versions = {version for extra in ("rocm", "cuda") for version in EXTRAS[extra].values()}
    assert versions == {pins()["jax"]} == {pins()["jaxlib"]}


def test_versions_that_do_not_fit_are_found(checkout, dry_run, tmp_path):
    setup = (checkout / "setup.py").read_text()
    assert setup.count("jax-rocm7-plugin==0.10.2") == 1
    shutil.copytree(checkout, tmp_path, dirs_exist_ok=True)
    (tmp_path / "setup.py").write_text(setup.replace("jax-rocm7-plugin==0.10.2", "jax-rocm7-plugin==0.10.1"))
    code, found, errors = dry_run(tmp_path, "-r", "requirements.txt", ".[rocm]")
    assert code == 1 and not found
    assert "ResolutionImpossible" in errors, errors
