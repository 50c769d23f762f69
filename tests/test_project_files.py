"""Files for those who work on Tandem: the changelog, hooks, and GitHub's workflows, which have not run there."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}


def workflow(name: str) -> dict[Any, Any]:
    return dict(yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8")))


@pytest.mark.parametrize(("tag", "date", "right"), [("v{}", "2026-11-24", True), ("v9.9.9", "2026-11-24", False)])
def test_a_release_whose_tag_is_another_version_than_the_package_stops(
    tag: str, date: str, right: bool, tmp_path: Path
) -> None:
    """Runs the script of the release's first job."""
    (script,) = (step["run"] for step in workflow("release")["jobs"]["version"]["steps"] if "run" in step)
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "__init__.py").write_text((ROOT / "tandem" / "__init__.py").read_text("utf-8"), "utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{tandem.__version__}] - {date}\n", encoding="utf-8")
    environment = {"GITHUB_REF_NAME": tag.format(tandem.__version__), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode == 0) == right
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n", encoding="utf-8")
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode != 0
