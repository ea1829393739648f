"""What pages have for readers on a code host, put as mkdocs reads it.

Links that leave docs/ lead to the repository, and those to files that are not there are warnings,
which `--strict` makes errors. Fences that a test runs, such as `sh run`, lose the second word.
Headings have the anchors that GitHub gives them. Code has its colours, and wide tables their bars, from a sheet of the book's own.
"""

import logging
import pathlib
import re

from mkdocs.structure.files import File
from pygments.formatters import HtmlFormatter

ROOT = pathlib.Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"

# Where the sheet lies, and the style of Pygments for each of the theme's modes.
SHEET = "css/code.css"
STYLES = {"light": "default", "dark": "github-dark"}
# A table wider than the page is moved by itself, or it would run out of the window.
TABLES = "[role=main] table { display: block; overflow-x: auto; }"

log = logging.getLogger("mkdocs.hooks.book")


def repository():
    """The address that `Cargo.toml` gives."""
    line = re.search(r'^repository = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    if line is None:
        raise LookupError("Cargo.toml: expected a line `repository = ...`, found none")
    return line.group(1)


def anchor(heading, separator):
    """The anchor of a heading on GitHub: marks go, spaces become hyphens."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", separator)


def on_config(config):
    config.repo_url = repository()
    config.repo_name = "Sources"
    config.mdx_configs["toc"]["slugify"] = anchor
    config.extra_css.append(SHEET)
    return config


def on_files(files, config):
    sheets = (
        HtmlFormatter(style=style).get_style_defs(f"[data-bs-theme={mode}] .codehilite")
        for mode, style in STYLES.items()
    )
    files.append(File.generated(config, SHEET, content="\n".join([*sheets, TABLES])))
    return files


def on_page_markdown(markdown, page, config, files):
    folder = (DOCS / page.file.src_uri).parent
    lines, fenced = [], False
    for at, line in enumerate(markdown.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            lines.append(re.sub(r"^(\s*```\w+) run$", r"\1", line))
        elif fenced:
            lines.append(line)
        else:
            where = f"docs/{page.file.src_uri}:{at}"
            # A bar in code needs no stroke before it here.
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
            lines.append(re.sub(r"\]\(([^)\s]+)\)", lambda link: led(link, folder, where, config), line))
    return "\n".join(lines)


def led(link, folder, where, config):
    """A link that leaves docs/, as an address of the repository; others as they are."""
    target, hash_sign, heading = link[1].partition("#")
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = (folder / target).resolve()
    if DOCS == path or DOCS in path.parents:
        return link[0]
    if not path.exists():
        log.warning(f"{where}: expected a file, found no {target}")
        return link[0]
    kind = "tree" if path.is_dir() else "blob"
    relative = path.relative_to(ROOT).as_posix()
    return f"]({config.repo_url}/{kind}/main/{relative}{hash_sign}{heading})"
