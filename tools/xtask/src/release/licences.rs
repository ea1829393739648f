//! Licences: files of ours in every crate, and those of others that deny.toml accepts.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use spdx::{Expression, ParseMode};

use super::{Tree, name, read_table};

/// Files that each published crate has, as the workspace has them.
pub(super) const FILES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Crates without our files, and crates of others whose licence deny.toml does not accept.
pub(super) fn refusals(tree: &Tree) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for package in tree.public() {
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        let folder = Path::new(manifest).parent().unwrap_or(&tree.root);
        for file in FILES {
            let expected = tree.text(file)?;
            match fs::read_to_string(folder.join(file)) {
                Ok(text) if text == expected => {}
                Ok(_) => found.push(format!(
                    "{}: expected {file} of the workspace, found another text",
                    name(package)
                )),
                Err(_) => found.push(format!("{}: expected {file}, found no file", name(package))),
            }
        }
    }
    let allowed = allowed(tree)?;
    for package in others(tree) {
        let title =
            format!("{} {}", name(package), package["version"].as_str().unwrap_or_default());
        match package["license"].as_str() {
            None => found.push(format!("{title}: expected a licence, found none")),
            Some(licence) => match Expression::parse_mode(licence, ParseMode::LAX) {
                Err(error) => found.push(format!(
                    "{title}: expected a licence of SPDX, found {licence:?}: {}",
                    error.reason
                )),
                Ok(expression)
                    if expression.evaluate(|term| allowed.contains(&term.to_string())) => {}
                Ok(_) => found.push(format!(
                    "{title}: expected a licence of deny.toml ({}), found {licence:?}",
                    allowed.join(", ")
                )),
            },
        }
    }
    Ok(found)
}

/// Licences of others, each with how many packages have it.
pub(super) fn list(tree: &Tree) -> Result<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for package in others(tree) {
        *counts.entry(package["license"].as_str().unwrap_or_default()).or_default() += 1;
    }
    let mut list = format!("licences of {} packages of others:", counts.values().sum::<usize>());
    for (licence, count) in counts {
        write!(list, "\n{count:>5}  {licence}")?;
    }
    Ok(list)
}

/// Packages that are not of the workspace.
fn others(tree: &Tree) -> impl Iterator<Item = &Value> {
    tree.packages().filter(|package| !tree.is_member(package))
}

/// Licences that deny.toml accepts.
fn allowed(tree: &Tree) -> Result<Vec<String>> {
    let deny = read_table(&tree.root.join("deny.toml"))?;
    let allow =
        deny.get("licenses").and_then(|own| own.get("allow")).and_then(|own| own.as_array());
    let allow = allow.context("deny.toml: expected `licenses.allow`, found none")?;
    Ok(allow.iter().filter_map(|licence| licence.as_str().map(str::to_owned)).collect())
}
