"""What the repository must never hold, and promises of the documents that a test can keep."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Written in halves, so that this file passes its own test.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.$}])/" + r"(?:work|root|home)/[\w.]",
    "a folder outside the repository": r"\.\./" + "shared",
    "a registry's host": r"\b(?:pypi|pythonhosted|npmjs|registry\.npm)\." + r"(?:org|com)\b",
}


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what):
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if re.search(FORBIDDEN[what], line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


def test_forbidden_patterns_can_match():
    examples = ["cd /" + "work/x", "see ../" + "shared/data", "https://pypi." + "org/simple"]
    for pattern, example in zip(FORBIDDEN.values(), examples, strict=True):
        assert re.search(pattern, example)


def test_no_large_file_is_tracked():
    large = [str(p.relative_to(ROOT)) for p in tracked() if p.stat().st_size > 512 * 1024]
    assert not large


def test_license_is_complete():
    text = (ROOT / "LICENSE").read_text()
    for part in (
        "Version 2.0, January 2004",
        "9. Accepting Warranty",
        "END OF TERMS AND CONDITIONS",
        "limitations under",
    ):
        assert part in text


def documents() -> list[Path]:
    return [p for p in tracked() if p.suffix == ".md"]


def test_links_between_documents_lead_somewhere():
    broken = []
    for path in documents():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken


def test_ci_runs_the_readme_s_test_command():
    (command,) = re.findall(r"^python3 -m venv .* -m pytest.*$", (ROOT / "README.md").read_text(), flags=re.M)
    in_ci = (ROOT / ".ci/run").read_text().replace("pip install -q", "pip install")
    assert command in in_ci


def test_make_targets_that_documents_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for path in documents():
        named = set(re.findall(r"`make ([a-z-]+)`", path.read_text()))
        assert named <= targets, path
