//! Each refusal, on a small workspace with one thing wrong.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::*;

/// Files of a workspace that is ready: `high` stands on `low` and on `elsewhere`, another's crate.
const READY: &[(&str, &str)] = &[
    (
        "Cargo.toml",
        "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\nexclude = [\"elsewhere\"]\n\
         [workspace.package]\nversion = \"1.2.0\"\n\
         [workspace.dependencies]\nlow = { path = \"crates/low\", version = \"1.2.0\" }\n\
         pyo3 = { version = \"0.26\", features = [\"abi3-py39\"] }\n",
    ),
    ("README.md", "Version 1.2.0.\n"),
    (
        "CHANGELOG.md",
        "# Changelog\n\n## 1.2.0 (not yet released)\n\n### Breaking\n\n- a\n\n### New\n\n- b\n\n\
         ### Faster\n\n- c\n\n### Fixed\n\n- d\n\n### Upgrading\n\n| before | after |\n|---|---|\n| a | b |\n\n\
         ## 1.1.0\n\nOld.\n",
    ),
    ("LICENSE-MIT", "mit\n"),
    ("LICENSE-APACHE", "apache\n"),
    ("deny.toml", "[licenses]\nallow = [\"MIT\", \"Zlib\"]\n"),
    (
        "crates/low/Cargo.toml",
        "[package]\nname = \"low\"\nversion.workspace = true\nedition = \"2024\"\ndescription = \"d\"\n\
         license = \"MIT\"\nrepository = \"r\"\nreadme = \"README.md\"\nkeywords = [\"k\"]\ncategories = [\"c\"]\n",
    ),
    ("crates/low/src/lib.rs", ""),
    ("crates/low/LICENSE-MIT", "mit\n"),
    ("crates/low/LICENSE-APACHE", "apache\n"),
    (
        "crates/high/Cargo.toml",
        "[package]\nname = \"high\"\nversion.workspace = true\nedition = \"2024\"\ndescription = \"d\"\n\
         license = \"MIT\"\nrepository = \"r\"\nreadme = \"README.md\"\nkeywords = [\"k\"]\ncategories = [\"c\"]\n\
         [dependencies]\nlow.workspace = true\nelsewhere = { path = \"../../elsewhere\" }\n",
    ),
    ("crates/high/src/lib.rs", ""),
    ("crates/high/LICENSE-MIT", "mit\n"),
    ("crates/high/LICENSE-APACHE", "apache\n"),
    (
        "crates/python/Cargo.toml",
        "[package]\nname = \"module\"\nversion.workspace = true\nedition = \"2024\"\npublish = false\n\
         [dependencies]\nhigh = { path = \"../high\" }\n",
    ),
    ("crates/python/src/lib.rs", ""),
    (
        "crates/python/pyproject.toml",
        "[project]\nname = \"n\"\ndescription = \"d\"\nreadme = \"README.md\"\nlicense = \"MIT OR Apache-2.0\"\n\
         license-files = [\"LICENSE-MIT\"]\nrequires-python = \">=3.9\"\ndynamic = [\"version\"]\n\
         authors = [{ name = \"a\" }]\n\
         [project.urls]\nHomepage = \"https://h\"\nDocumentation = \"https://d\"\n\
         Changelog = \"https://c\"\nIssues = \"https://i\"\n",
    ),
    ("crates/python/README.md", "r, [more](https://m)\n"),
    ("crates/python/LICENSE-MIT", "mit\n"),
    (
        "elsewhere/Cargo.toml",
        "[package]\nname = \"elsewhere\"\nversion = \"3.0.0\"\nedition = \"2024\"\nlicense = \"GPL-3.0/Zlib\"\n",
    ),
    ("elsewhere/src/lib.rs", ""),
];

/// The workspace that is ready, with the first text of a file replaced.
fn workspace(file: &str, from: &str, to: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in READY {
        let whole = folder.path().join(path);
        fs::create_dir_all(whole.parent().unwrap()).unwrap();
        assert!(*path != file || text.contains(from), "{file} has no {from:?}");
        let text = if *path == file { text.replacen(from, to, 1) } else { (*text).to_owned() };
        fs::write(whole, text).unwrap();
    }
    folder
}

fn found(root: &Path) -> Vec<String> {
    refusals(&Tree::read(root).unwrap()).unwrap()
}

#[test]
fn a_workspace_that_is_ready_is_published_from_the_bottom_up() {
    let folder = workspace("", "", "");
    assert_eq!(found(folder.path()), Vec::<String>::new());
    let tree = Tree::read(folder.path()).unwrap();
    assert_eq!(
        steps(&tree).unwrap(),
        [
            "# CHANGELOG.md: put the day in the place of `(not yet released)`",
            "git tag -a v1.2.0 -m 'fusestep 1.2.0'",
            "cargo publish -p low",
            "cargo publish -p high",
            "cargo xtask wheels",
            "python3 -m twine upload target/python/manylinux/*",
            "git push origin v1.2.0",
        ]
    );
    let list = licences::list(&tree).unwrap();
    assert_eq!(list, "licences of 1 packages of others:\n    1  GPL-3.0/Zlib");
}

const PYPROJECT: &str = "crates/python/pyproject.toml";

/// A file, a text of it, another in its place, and a part of the refusal.
type Wrong = (&'static str, &'static str, &'static str, &'static str);

const WRONG: &[Wrong] = &[
    (
        "crates/low/Cargo.toml",
        "version.workspace = true",
        "version = \"1.2.1\"",
        "low: expected version 1.2.0 as the workspace has, found \"1.2.1\"",
    ),
    (
        "crates/high/Cargo.toml",
        "low.workspace = true",
        "low = { path = \"../low\", version = \"1.1\" }",
        "high: expected low of version ^1.2.0, found \"^1.1\"",
    ),
    ("README.md", "1.2.0", "1.1.0", "README.md: expected the version 1.2.0"),
    ("CHANGELOG.md", "## 1.2.0", "## 1.3.0", "CHANGELOG.md: expected a section `## 1.2.0`"),
    (
        "CHANGELOG.md",
        "### Faster",
        "### Quicker",
        "1.2.0: expected the parts [\"Breaking\", \"New\", \"Faster\", \"Fixed\", \"Upgrading\"], found [\"Breaking\", \"New\", \"Quicker\"",
    ),
    ("CHANGELOG.md", "- c\n", "", "1.2.0: Faster: expected entries or `- Nothing.`, found none"),
    ("CHANGELOG.md", "- c\n", "- c\n  d\n", "1.2.0: Faster: expected an entry `- …` of one line"),
    (
        "CHANGELOG.md",
        "| before | after |",
        "| a | b |",
        "1.2.0: Upgrading: expected a table `| before | after |`",
    ),
    (
        "crates/low/Cargo.toml",
        "description = \"d\"\n",
        "",
        "low: expected `description`, found none",
    ),
    (
        "crates/low/LICENSE-MIT",
        "mit",
        "mti",
        "low: expected LICENSE-MIT of the workspace, found another text",
    ),
    (
        "elsewhere/Cargo.toml",
        "GPL-3.0/Zlib",
        "GPL-3.0",
        "elsewhere 3.0.0: expected a licence of deny.toml (MIT, Zlib), found \"GPL-3.0\"",
    ),
    (
        "elsewhere/Cargo.toml",
        "GPL-3.0/Zlib",
        "My own",
        "elsewhere 3.0.0: expected a licence of SPDX, found \"My own\"",
    ),
    (
        "elsewhere/Cargo.toml",
        "license = \"GPL-3.0/Zlib\"\n",
        "",
        "elsewhere 3.0.0: expected a licence, found none",
    ),
    (
        "crates/low/Cargo.toml",
        "categories = [\"c\"]\n",
        "categories = [\"c\"]\npublish = false\n",
        "high: expected dependencies that are published, found low with `publish = false`",
    ),
    (
        "crates/low/Cargo.toml",
        "categories = [\"c\"]\n",
        "categories = [\"c\"]\n[dev-dependencies]\nhigh = { path = \"../high\", version = \"1.2.0\" }\n",
        "found that [\"high\", \"low\"] depend on each other",
    ),
    (PYPROJECT, "description = \"d\"\n", "", "expected `project.description`, found none"),
    (
        PYPROJECT,
        "license-files = [\"LICENSE-MIT\"]\n",
        "",
        "expected `project.license-files`, found none",
    ),
    (PYPROJECT, "[\"LICENSE-MIT\"]", "[\"LICENSE\"]", "expected the file LICENSE, found none"),
    (PYPROJECT, "MIT OR Apache-2.0", "free", "license: expected a licence of SPDX, found \"free\""),
    (
        PYPROJECT,
        "dynamic = [\"version\"]\n",
        "",
        "expected `version` in `project.dynamic`, found none",
    ),
    (
        PYPROJECT,
        ">=3.9",
        ">=3.8",
        "requires-python: expected \">=3.9\", as pyo3's feature says, found \">=3.8\"",
    ),
    (PYPROJECT, "{ name = \"a\" }", "", "expected `project.authors`, found none"),
    (PYPROJECT, "Issues = \"https://i\"", "", "urls.Issues: expected an address of https, found"),
    (
        PYPROJECT,
        "https://d",
        "docs/python.md",
        "urls.Documentation: expected an address of https, found \"docs/python.md\"",
    ),
    (
        "crates/python/README.md",
        "https://m",
        "docs/m.md",
        "README.md: expected links of https, which an index follows, found \"docs/m.md\"",
    ),
];

#[test]
fn each_thing_that_is_wrong_is_named() {
    for &(file, from, to, expected) in WRONG {
        let folder = workspace(file, from, to);
        let found = found(folder.path());
        assert!(found.iter().any(|line| line.contains(expected)), "{file}, {to:?}: {found:?}");
    }
}

#[test]
fn a_version_that_breaks_nothing_needs_no_upgrade() {
    let folder = workspace("CHANGELOG.md", "- a\n", "- Nothing.\n");
    let found = found(folder.path());
    let expected = "expected the parts [\"Breaking\", \"New\", \"Faster\", \"Fixed\"], found";
    assert!(matches!(&found[..], [one] if one.contains(expected)), "{found:?}");
    let text = fs::read_to_string(folder.path().join("CHANGELOG.md")).unwrap();
    let (before, _) = text.split_once("### Upgrading").unwrap();
    assert!(changelog::refusals(before, "1.2.0").is_empty());
}

#[test]
fn files_that_are_missing_are_named() {
    for (file, expected) in [
        ("crates/high/LICENSE-APACHE", "high: expected LICENSE-APACHE, found no file"),
        ("crates/python/README.md", "crates/python/pyproject.toml: expected the file README.md"),
    ] {
        let folder = workspace("", "", "");
        fs::remove_file(folder.path().join(file)).unwrap();
        let found = found(folder.path());
        assert!(found.iter().any(|line| line.contains(expected)), "{file}: {found:?}");
    }
    let folder = workspace("", "", "");
    fs::remove_file(folder.path().join("CHANGELOG.md")).unwrap();
    let error = refusals(&Tree::read(folder.path()).unwrap()).unwrap_err();
    assert!(format!("{error:#}").contains("CHANGELOG.md: expected a file, found none"));
}

#[test]
fn nothing_is_published_without_asking() {
    let error = run(&["--quick".to_owned()]).unwrap_err();
    assert!(error.to_string().contains("expected `release --dry-run [--quick]`"), "{error}");
}
