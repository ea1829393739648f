//! The order in which crates are published: each behind those that it depends on.

use anyhow::{Result, ensure};
use serde_json::Value;

use super::{Tree, name};

/// Names of the crates for the registry, in the order in which it takes them.
///
/// # Errors
/// Crates that depend on each other, or on a member that is not published; both are named.
pub(super) fn sorted(tree: &Tree) -> Result<Vec<String>> {
    let members: Vec<&str> = tree.members().map(name).collect();
    let mut left: Vec<&Value> = tree.public().collect();
    let public: Vec<&str> = left.iter().map(|package| name(package)).collect();
    for package in &left {
        for needed in needed(package).filter(|needed| members.contains(needed)) {
            ensure!(
                public.contains(&needed),
                "{}: expected dependencies that are published, found {needed} with `publish = false`",
                name(package)
            );
        }
    }
    let mut sorted: Vec<String> = Vec::new();
    while !left.is_empty() {
        let is_ready = |package: &&Value| {
            let waits = |needed: &str| {
                public.contains(&needed) && !sorted.iter().any(|done| done == needed)
            };
            !needed(package).any(waits)
        };
        let (ready, rest): (Vec<&Value>, Vec<&Value>) = left.into_iter().partition(is_ready);
        let names: Vec<&str> = rest.iter().map(|package| name(package)).collect();
        ensure!(
            !ready.is_empty(),
            "expected an order to publish in, found that {names:?} depend on each other"
        );
        sorted.extend(ready.into_iter().map(|package| name(package).to_owned()));
        left = rest;
    }
    Ok(sorted)
}

/// Dependencies that the registry looks for: all but those for tests that name no version.
fn needed(package: &Value) -> impl Iterator<Item = &str> {
    let dependencies = package["dependencies"].as_array().into_iter().flatten();
    dependencies.filter(|own| own["kind"] != "dev" || own["req"] != "*").map(name)
}
