#!/usr/bin/env python3
"""Build the wheel and try it as a stranger does: in an empty environment of every Python found.

python scripts/try_wheel.py [--extras] [PYTHON...]    (default: python3.10 to python3.13 on PATH)

Each environment gets the wheel and its dependencies by pip. One line says what was tried; a Python
for which pip cannot get the dependencies is said not to be tried. With --extras pip also resolves
each extra, without installing it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = tuple(f"python3.{minor}" for minor in range(10, 14))
EXTRAS = ("megatron", "te", "bridge")
BUILD = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
LEFT_OUT = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
PROGRAM = "megatron-autorecompute"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def main(*words: str) -> int:
    """Try every Python; 1 if one of them failed, or none was tried."""
    extras = EXTRAS if "--extras" in words else ()
    given = [word for word in words if word != "--extras"]
    pythons = given or [name for name in PYTHONS if _runs(name)]
    with tempfile.TemporaryDirectory() as folder:
        wheel = built(Path(folder))
        found = [tried(python, wheel, Path(folder) / str(at)) for at, python in enumerate(pythons)]
        for extra in extras:
            resolves(pythons[-1], wheel, extra)
    return 0 if found and all(found) else 1


def built(folder: Path) -> Path:
    """The wheel of a copy of this checkout."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    _run(sys.executable, "-W", "ignore", "-c", BUILD, str(folder), cwd=source)
    (wheel,) = folder.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def tried(python: str, wheel: Path, folder: Path) -> bool:
    """Whether a new environment of this Python got the wheel and passed; prints which, and why."""
    bin_ = folder / "env" / "bin"
    _run(python, "-m", "venv", str(folder / "env"))
    begun = time.monotonic()
    pip = [str(bin_ / "python"), "-m", "pip", "--disable-pip-version-check"]
    got = subprocess.run([*pip, "install", "-q", str(wheel)], capture_output=True, text=True)
    if got.returncode:
        print(f"{python}: not tried, pip could not install it: {got.stderr.strip()[-300:]}")
        return False
    installed_s = time.monotonic() - begun
    _run(*pip, "check")
    said = _run(str(bin_ / PROGRAM), "--version", cwd=folder)
    assert said.split()[-1] == wheel.name.split("-")[1], said
    begun = time.monotonic()
    plan = _run(str(bin_ / PROGRAM), "plan", "--example", "llama3-70b", "--gpu", "h100", cwd=folder)
    assert "\n--recompute-policy '" in plan, plan
    planned_s = time.monotonic() - begun
    path = folder / "plan.json"
    example = ("--example", "deepseek-v3", "--gpu", "h100")
    _run(str(bin_ / PROGRAM), "plan", *example, "-o", str(path), cwd=folder)
    for verb in ("show", "explain", "report", "trace"):
        _run(str(bin_ / PROGRAM), verb, str(path), cwd=folder)
    pages = links(folder / "env" / "share" / "doc" / PROGRAM)
    print(
        f"{python}: installed in {installed_s:.0f} s, planned in {planned_s:.1f} s, {pages} pages"
    )
    return True


def links(pages: Path) -> int:
    """The number of installed pages; all that they link to is there."""
    found = list(pages.rglob("*.md"))
    assert pages.joinpath("README.md") in found, pages
    dead = [
        f"{page}: {link}"
        for page in found
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not dead, dead
    return len(found)


def resolves(python: str, wheel: Path, extra: str) -> None:
    """Print what pip would install for an extra, or why it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        _run(python, "-m", "venv", folder)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        asked = [*pip, "--dry-run", "--report", f"{folder}/report.json", f"{wheel}[{extra}]"]
        got = subprocess.run(asked, capture_output=True, text=True)
    said = "resolves" if got.returncode == 0 else f"does not resolve: {got.stderr.strip()[-300:]}"
    print(f"[{extra}] on {python} {said}")


def _runs(python: str) -> bool:
    try:
        return not subprocess.run([python, "--version"], capture_output=True).returncode
    except FileNotFoundError:
        return False


def _run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(words)}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
