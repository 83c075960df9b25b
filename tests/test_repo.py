"""The repository itself: versions agree, pins cover the dependencies, generated files are up to date."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import seatrial

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".html", ".css", ".js", ""}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def pins() -> dict[str, str]:
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_version_is_the_same_everywhere() -> None:
    assert seatrial.__version__ == PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", changelog, re.MULTILINE)[0] == PROJECT["version"]


def test_every_direct_dependency_is_pinned_within_its_bounds() -> None:
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, declared):
        pinned = pins().get(canonicalize_name(requirement.name))
        assert pinned is not None, f"constraints.txt lacks {requirement.name}"
        assert pinned in requirement.specifier, f"constraints.txt pins {requirement.name} outside {requirement}"


def test_every_transitive_dependency_is_pinned() -> None:
    """Holds for the platform that the tests run on; torch's CUDA libraries are pinned by torch itself."""
    unpinned = set()
    waiting, seen = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]], set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if not any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if name not in pins() and name not in {"setuptools", "triton"} and not name.startswith(("nvidia-", "cuda-")):
            unpinned.add(name)
        elif name in pins() and name not in seen:
            seen.add(name)
            waiting += [line for line in requires(name) or [] if "extra ==" not in line]
    assert not unpinned, f"add to constraints.txt: {sorted(unpinned)}"


def test_examples_equal_their_sources() -> None:
    done = run(sys.executable, "scripts/examples", "--check")
    assert done.returncode == 0, done.stderr


def test_the_demo_says_once_how_its_lines_can_be_typed() -> None:
    planned = run("make", "-n", "demo").stdout
    assert planned.count(". .venv/bin/activate") == 1
    assert "\n. .venv/bin/activate\n" in (ROOT / "README.md").read_text()


def test_stale_examples_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "examples", tmp_path / "scripts")
    with (tmp_path / "examples" / "rmsnorm" / "src" / "honest.py").open("a") as source:
        source.write("# changed\n")
    stale = run(sys.executable, str(tmp_path / "scripts" / "examples"), "--check")
    assert stale.returncode == 1
    assert "candidates/honest.json is out of date; run make docs" in stale.stderr
    assert run(sys.executable, str(tmp_path / "scripts" / "examples")).returncode == 0
    assert run(sys.executable, str(tmp_path / "scripts" / "examples"), "--check").returncode == 0


def test_docs_equal_their_sources() -> None:
    done = run(sys.executable, "scripts/docs", "--check")
    assert done.returncode == 0, done.stderr


def test_new_check_registers_what_it_writes(tmp_path: Path) -> None:
    checks = tmp_path / "src" / "seatrial" / "checks"
    checks.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "new-check", tmp_path / "scripts")
    shutil.copy(ROOT / "src" / "seatrial" / "checks" / "__init__.py", checks)
    done = run(sys.executable, str(tmp_path / "scripts" / "new-check"), "leaked-memory", "memory is given back")
    assert done.returncode == 0, done.stderr
    table = (checks / "__init__.py").read_text()
    assert table.count("leaked_memory") == 4  # imported, typed (twice on its line), listed
    compile(table, "table", "exec")
    compile((checks / "leaked_memory.py").read_text(), "page", "exec")
    again = run(sys.executable, str(tmp_path / "scripts" / "new-check"), "leaked-memory", "memory is given back")
    assert again.returncode == 2
    assert "exists already" in again.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env ")


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_importing_seatrial_leaves_torch_alone() -> None:
    code = "import sys, seatrial; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert run(sys.executable, "-c", code).returncode == 0


def test_links_in_the_docs_lead_somewhere() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md"]
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]
    assert not dead
