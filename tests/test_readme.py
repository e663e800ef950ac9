"""The documents' examples: every command exists with its options, and blocks marked `checked` print what they show.

`make golden` (`ZPLAN_REWRITE=1`) puts what is printed now into the documents.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from zplan.cli import COMMANDS, cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(console|sh)( checked)?\n(.*?)^```$", flags=re.M | re.S)
REWRITE = os.environ.get("ZPLAN_REWRITE") == "1"


def blocks(path: Path) -> list[tuple[bool, str]]:
    """`(checked, text)` of every block of commands."""
    return [(bool(checked), text) for _, checked, text in BLOCK.findall(path.read_text())]


def commands(path: Path) -> list[list[str]]:
    """Words of every `zplan` command in a document, in blocks and in `code`."""
    lines = [line.removeprefix("$ ") for _, text in blocks(path) for line in text.splitlines()]
    lines += re.findall(r"`(zplan [a-z][^`]*)`", path.read_text())
    found = []
    for line in lines:
        for part in re.split(r"&&|\||>", line):
            words = shlex.split(part, comments=True) if part.lstrip().startswith(("zplan ", ".venv/bin/zplan ")) else []
            if len(words) > 1:
                found.append(words[1:])
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_exists_with_its_options(path):
    for words in commands(path):
        assert words[0] in COMMANDS, words
        command = cli.get_command(click.Context(cli), words[0])
        known = {o for p in command.params for o in p.opts} | {"--help"}
        # What follows a script's name is the script's.
        end = next((i for i, w in enumerate(words) if w.endswith(".py")), len(words))
        unknown = [w for w in words[:end] if w.startswith("--") and w.partition("=")[0] not in known]
        assert not unknown, words


def printed(command: str, folder: Path) -> str:
    """Standard output of one command line as a shell would run it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 141), f"{command}: {done.stderr}"
    return done.stdout.rstrip("\n")


def test_checked_blocks_print_what_they_show(tmp_path):
    text = (ROOT / "README.md").read_text()
    shown = [block for checked, block in blocks(ROOT / "README.md") if checked]
    assert shown
    for block in shown:
        parts = [p for p in re.split(r"^\$ ", block, flags=re.M) if p]
        now = ""
        for part in parts:
            command = part.partition("\n")[0]
            output = printed(command, tmp_path)
            now += f"$ {command}\n" + (f"{output}\n" if output else "")
        lines = [line.rstrip() for line in now.splitlines()]
        now = "\n".join(lines) + "\n"
        if REWRITE:
            text = text.replace(block, now)
        else:
            assert block == now
    if REWRITE:
        (ROOT / "README.md").write_text(text)
