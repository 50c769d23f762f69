"""Files for those who work on Tandem: the changelog, hooks, and GitHub's workflows, which have not run there."""

from __future__ import annotations

import re
import shlex
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


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", ())]


def test_the_changelog_names_the_version_that_runs() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "") and all(date for _, date in headings[1:])
    assert (headings[1][0] if headings[1:] else f"`tandem.__version__` is {tandem.__version__}") in text
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


def test_there_is_a_workflow_for_each_purpose() -> None:
    assert set(WORKFLOWS) == {"test", "docs", "wheels", "release"}
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert "**They have not run on GitHub:**" in text and all(f"`{name}`" in text for name in WORKFLOWS)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_pins_its_actions_and_may_only_read_unless_a_job_says_more(name: str) -> None:
    used = [step["uses"] for step in steps(name) if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", action)] == []
    assert workflow(name)["permissions"] == {"contents": "read"}
    assert all(job.get("timeout-minutes") or len(job.get("steps", ())) < 3 for job in workflow(name)["jobs"].values())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_runs_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for step in steps(name):
        for line in step.get("run", "").splitlines():
            words = shlex.split(line.partition("$")[0]) if "$" not in line else []
            if words[:1] == ["make"]:
                assert words[1] in targets, line
            if words[:1] == ["python"] and words[1] != "-m":
                assert (ROOT / words[1]).is_file(), line
            if words and "/" in words[0] and not words[0].startswith("/"):
                assert (ROOT / words[0]).is_file(), line
    for job in workflow(name)["jobs"].values():
        assert (ROOT / job.get("uses", ".")).exists()


def test_tests_on_github_are_those_of_the_script() -> None:
    assert [step["run"] for step in steps("test") if "run" in step] == [".ci/run", "make test"]


def test_a_release_is_published_by_trust_in_the_repository_alone() -> None:
    jobs = workflow("release")["jobs"]
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]["name"] == "pypi"
    assert "secrets." not in WORKFLOWS["release"].read_text(encoding="utf-8")
    (upload,) = (step for step in publish["steps"] if "pypi-publish" in step["uses"])
    assert "password" not in upload["with"]
    assert publish["needs"] == "wheels" and jobs["wheels"]["needs"] == "version"


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


def test_hooks_are_local_and_run_what_lint_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local" and all(hook["language"] == "system" for hook in repository["hooks"])
    lint = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0]
    programs = {tuple(entry.split()[:2]) for entry in re.findall(r"\$\(BIN\)/(.*)", lint)}
    hooks = {tuple(hook["entry"].removeprefix(".venv/bin/").split()[:2]) for hook in repository["hooks"]}
    assert hooks == programs
