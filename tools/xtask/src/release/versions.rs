//! One version everywhere: members, what they ask of each other, README.

use anyhow::Result;

use super::{Tree, name};

/// Members and requirements of another version than the workspace's, and a README that does not
/// name it.
pub(super) fn refusals(tree: &Tree) -> Result<Vec<String>> {
    let version = tree.version()?;
    let mut found = Vec::new();
    for package in tree.members() {
        if package["version"] != version {
            found.push(format!(
                "{}: expected version {version} as the workspace has, found {}",
                name(package),
                package["version"]
            ));
        }
    }
    let required = format!("^{version}");
    let members: Vec<&str> = tree.members().map(name).collect();
    for package in tree.public() {
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            // A dependency for tests that names no version is left out of what is published.
            let is_left_out = dependency["kind"] == "dev" && dependency["req"] == "*";
            if members.contains(&name(dependency)) && !is_left_out && dependency["req"] != *required
            {
                found.push(format!(
                    "{}: expected {} of version {required}, found {}",
                    name(package),
                    name(dependency),
                    dependency["req"]
                ));
            }
        }
    }
    if !tree.text("README.md")?.contains(version) {
        found.push(format!("README.md: expected the version {version}, found no mention of it"));
    }
    Ok(found)
}
