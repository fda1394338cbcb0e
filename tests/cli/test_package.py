"""The sdist and the wheel: all that a user needs is in them, and runs from any folder."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_version
ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
BUILD = "import setuptools.build_meta as b; print(b.build_sdist('out'), b.build_wheel('out'))"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the sdist and the wheel of a copy of this checkout."""
    source = tmp_path_factory.mktemp("package") / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    run([sys.executable, "-W", "ignore", "-c", BUILD], source)
    return source / "out"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """What pip makes of the wheel, without its dependencies, and an environment that uses it."""
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, "--target", str(target), str(wheel)], target)
    return target, {**os.environ, "PYTHONPATH": str(target)}


def run(words, cwd, env=None):
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked(*folders):
    found = [ROOT / folder for folder in folders]
    return {
        path.relative_to(ROOT).as_posix()
        for top in found
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_sdist_has_what_it_takes_to_test_and_to_compare(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("megatron_autorecompute", "tests", "scripts", "patches", "docs", "constraints")
    assert tracked(*wanted, "Makefile", "LICENSE", "README.md", "CHANGELOG.md") <= names


def test_the_wheel_has_every_file_of_the_package_and_the_pages_and_patches(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert tracked("megatron_autorecompute") <= names


def test_pages_and_patches_are_installed_as_they_are_and_every_link_in_them_leads_somewhere(
    installed,
):
    target, _ = installed
    pages = target / "share" / "doc" / "megatron-autorecompute"
    found = (path for path in pages.rglob("*.*") if path.is_file() and path.suffix != ".pyc")
    files = {path.relative_to(pages).as_posix() for path in found}
    assert tracked("README.md", "CHANGELOG.md", "docs", "patches") <= files
    assert all((pages / name).read_bytes() == (ROOT / name).read_bytes() for name in files)
    dead = [
        f"{name}: {link}"
        for name in files
        if name.endswith(".md")
        for link in LINK.findall((pages / name).read_text())
        if "://" not in link and not (pages / name).parent.joinpath(link).exists()
    ]
    assert dead == []


def test_what_was_installed_plans_from_another_folder(installed, tmp_path):
    target, env = installed
    where = "import megatron_autorecompute as m; print(m.__file__)"
    assert Path(run([sys.executable, "-c", where], tmp_path, env).strip()).is_relative_to(target)
    example = next((ROOT / "examples" / "profiles").glob("*.json"))
    program = str(target / "bin" / "megatron-autorecompute")
    asked = ["plan", "--profile", str(example), "--pp", "4", "--num-microbatches", "16"]
    assert "a step" in run([program, *asked, "--budget-gib", "60", "-o", "p.json"], tmp_path, env)
    assert "\n--recompute-policy '" in run(
        [program, "plan", "--example", "llama3-70b", "--gpu", "h100"], tmp_path, env
    )
    module = [sys.executable, "-m", "megatron_autorecompute"]
    assert run([*module, "show", "p.json"], tmp_path, env)
    assert "--budget-gib" in run([program, "compare", "--help"], tmp_path, env)
