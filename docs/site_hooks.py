"""What mkdocs does not do by itself for the site (mkdocs.yml): pages from outside of docs/, links to them, llms.txt.

Pages stay where GitHub shows them. Each link to a file of the repository becomes one to its page, or to a copy of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "benchmarks/README.md": "benchmarks.md",
    "deploy/README.md": "deploy.md",
    "deploy/first-hour/README.md": "first-hour.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files that are pages of the site under another name."""
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[#)])")
LINKED = re.compile(r"\[([^]]+)\]\([^)]+\)")
ROW = re.compile(r"^\| \[[^]]+\]\(([^)#]+)\) \| (.*) \|$")

_addresses: dict[Path, str] = {}
"""Where on the site a file of the repository is; filled by `on_files` for each build."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.remove(files.src_uris["README.md"])
    _addresses.clear()
    _addresses.update({(ROOT / "docs" / file.src_uri).resolve(): file.src_uri for file in files.documentation_pages()})
    _addresses.update({(ROOT / "docs" / file.src_uri).resolve(): file.src_uri for file in files.media_files()})
    for source, address in OUTSIDE.items():
        _addresses[ROOT / source] = address
        files.append(File.generated(config, address, content=(ROOT / source).read_text(encoding="utf-8")))
    for source in [path for path in _addresses if path.suffix == ".md"]:
        for target in _links(source):
            if target not in _addresses:
                _addresses[target] = f"files/{target.relative_to(ROOT).as_posix()}"
                files.append(File.generated(config, _addresses[target], abs_src_path=str(target)))
    return files


def _links(source: Path) -> Iterator[Path]:
    for name in LINK.findall(source.read_text(encoding="utf-8")):
        target = (source.parent / name).resolve()
        if not (target.is_file() and target.is_relative_to(ROOT)):
            raise PluginError(f"{source.relative_to(ROOT)}: {name} is no file of the repository")
        yield target


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _on_the_site(markdown, page.file.src_uri)


def _on_the_site(markdown: str, address: str) -> str:
    """The text with links to other places of the site, as a page at `address` has them."""
    source = next(path for path, at in _addresses.items() if at == address)

    def there(match: re.Match[str]) -> str:
        return os.path.relpath(_addresses[(source.parent / match[1]).resolve()], os.path.dirname(address) or ".")

    return LINK.sub(there, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes every page as Markdown, a list of them for language models (llmstxt.org), and all of them in one file."""
    site = Path(config.site_dir)
    pages = {}
    for source, address in _addresses.items():
        if source.suffix == ".md":
            pages[address] = _on_the_site(source.read_text(encoding="utf-8"), address)
            (site / address).parent.mkdir(parents=True, exist_ok=True)
            (site / address).write_text(pages[address], encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += ["- [Tandem](index.md): what it is, first commands, what is measured and what is not", ""]
    left = dict.fromkeys(sorted(pages.keys() - {"index.md", "pages.md"}))
    for line in pages["pages.md"].splitlines():
        if line.endswith(":"):
            lines += [f"## {line[:-1]}", ""]
        elif match := ROW.match(line):
            lines.append(f"- [{_title(pages[match[1]])}]({match[1]}): {LINKED.sub(_words, match[2])}")
            left.pop(match[1])
        elif not line and lines[-1]:
            lines.append("")
    lines += ["", "## Optional", "", *(f"- [{_title(pages[address])}]({address})" for address in left)]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    whole = "\n\n".join(f"<!-- {address} -->\n\n{text}" for address, text in sorted(pages.items()))
    (site / "llms-full.txt").write_text(whole, encoding="utf-8")


def _words(link: re.Match[str]) -> str:
    return link[1]


def _title(markdown: str) -> str:
    return markdown.partition("\n")[0].removeprefix("# ")
