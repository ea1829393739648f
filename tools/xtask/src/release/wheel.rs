//! Metadata of the Python package.

use std::fs;

use anyhow::Result;
use spdx::Expression;
use toml::{Table, Value};

use super::{Tree, read_table};

/// Folder of the Python package.
pub(super) const FOLDER: &str = "crates/python";

/// Keys that the package index shows, each a text.
const TEXTS: [&str; 5] = ["name", "description", "readme", "license", "requires-python"];

/// Links that the package index shows beside the page.
const URLS: [&str; 4] = ["Homepage", "Documentation", "Changelog", "Issues"];

/// Links of a page that lead nowhere from an index.
fn relative_links(page: &str) -> impl Iterator<Item = &str> {
    let links = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    links.filter(|link| !link.starts_with("https://"))
}

/// What the metadata of the wheels lacks.
pub(super) fn refusals(tree: &Tree) -> Result<Vec<String>> {
    let folder = tree.root.join(FOLDER);
    let pyproject = read_table(&folder.join("pyproject.toml"))?;
    let empty = Table::new();
    let project = pyproject.get("project").and_then(Value::as_table).unwrap_or(&empty);
    let text = |key: &str| project.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    let mut found: Vec<String> = TEXTS
        .iter()
        .filter(|key| text(key).is_none())
        .map(|key| format!("expected `project.{key}`, found none"))
        .collect();
    let list = |key: &str| project.get(key).and_then(Value::as_array).into_iter().flatten();
    let licences: Vec<&str> = list("license-files").filter_map(Value::as_str).collect();
    if licences.is_empty() {
        found.push("expected `project.license-files`, found none".to_owned());
    }
    for file in licences.into_iter().chain(text("readme")) {
        if !folder.join(file).is_file() {
            found.push(format!("expected the file {file}, found none"));
        }
    }
    if let Some(licence) = text("license").filter(|own| Expression::parse(own).is_err()) {
        found.push(format!("license: expected a licence of SPDX, found {licence:?}"));
    }
    if list("authors").next().is_none() {
        found.push("expected `project.authors`, found none".to_owned());
    }
    let urls = project.get("urls").and_then(Value::as_table).unwrap_or(&empty);
    for name in URLS {
        let address = urls.get(name).and_then(Value::as_str).unwrap_or_default();
        if !address.starts_with("https://") {
            found.push(format!("urls.{name}: expected an address of https, found {address:?}"));
        }
    }
    if let Some(readme) = text("readme") {
        let page = fs::read_to_string(folder.join(readme)).unwrap_or_default();
        found.extend(relative_links(&page).map(|link| {
            format!("{readme}: expected links of https, which an index follows, found {link:?}")
        }));
    }
    // The version is the crate's, which maturin reads.
    if !list("dynamic").any(|key| key.as_str() == Some("version")) {
        found.push("expected `version` in `project.dynamic`, found none".to_owned());
    }
    found.extend(wrong_interpreter(tree, text("requires-python").unwrap_or_default()));
    Ok(found.into_iter().map(|gap| format!("{FOLDER}/pyproject.toml: {gap}")).collect())
}

/// An oldest interpreter that is not the one of the stable interface that the module is built for.
fn wrong_interpreter(tree: &Tree, requires: &str) -> Option<String> {
    let pyo3 = tree.manifest.get("workspace")?.get("dependencies")?.get("pyo3")?;
    let mut features = pyo3.get("features")?.as_array()?.iter().filter_map(Value::as_str);
    let (major, minor) = features.find_map(|own| own.strip_prefix("abi3-py"))?.split_at(1);
    let expected = format!(">={major}.{minor}");
    (requires != expected).then(|| {
        format!(
            "requires-python: expected {expected:?}, as pyo3's feature says, found {requires:?}"
        )
    })
}
