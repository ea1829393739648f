//! `release --dry-run`: everything that a release asks for, and the commands that publish it, in
//! order. It publishes nothing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use toml::Table;

use crate::commands::cargo;
use crate::{book, manylinux, package, performance, workspace_root};

mod changelog;
mod licences;
mod order;
#[cfg(test)]
mod tests;
mod versions;
mod wheel;

/// Whether to run what takes minutes, too.
#[derive(Clone, Copy, PartialEq)]
enum Depth {
    Full,
    Quick,
}

/// Checks the tree and prints the commands of a release; `--quick` leaves out packages, book and
/// wheels.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let depth = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--dry-run"] => Depth::Full,
        ["--dry-run", "--quick"] | ["--quick", "--dry-run"] => Depth::Quick,
        _ => bail!(
            "expected `release --dry-run [--quick]`, found {arguments:?}; it prints the commands \
             that publish and runs none of them"
        ),
    };
    let tree = Tree::read(&workspace_root())?;
    let refusals = refusals(&tree)?;
    ensure!(refusals.is_empty(), "not ready for a release\n{}", refusals.join("\n"));
    println!("{}", licences::list(&tree)?);
    if depth == Depth::Full {
        package::run(&[])?;
        book::run(&[])?;
        performance::run(&["--check".to_owned()])?;
        manylinux::run(&[])?;
    }
    println!("version {} is ready; to publish it:", tree.version()?);
    for step in steps(&tree)? {
        println!("  {step}");
    }
    Ok(())
}

/// A workspace as its files and cargo describe it.
struct Tree {
    root: PathBuf,
    /// Answer of `cargo metadata`, dependencies included.
    metadata: Value,
    /// Manifest of the workspace.
    manifest: Table,
}

impl Tree {
    fn read(root: &Path) -> Result<Self> {
        let output = cargo("metadata --format-version 1").current_dir(root).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`cargo metadata` fails: {}", said.trim_end());
        let metadata = serde_json::from_slice(&output.stdout)?;
        let manifest = read_table(&root.join("Cargo.toml"))?;
        Ok(Self { root: root.to_path_buf(), metadata, manifest })
    }

    /// Version that all members are to have.
    fn version(&self) -> Result<&str> {
        let version = self.manifest.get("workspace").and_then(|own| own.get("package"));
        let version = version.and_then(|own| own.get("version")).and_then(|own| own.as_str());
        version.context("Cargo.toml: expected `workspace.package.version`, found none")
    }

    fn packages(&self) -> impl Iterator<Item = &Value> {
        self.metadata["packages"].as_array().into_iter().flatten()
    }

    /// Packages of the workspace.
    fn members(&self) -> impl Iterator<Item = &Value> {
        self.packages().filter(|package| self.is_member(package))
    }

    fn is_member(&self, package: &Value) -> bool {
        let mut members = self.metadata["workspace_members"].as_array().into_iter().flatten();
        members.any(|id| *id == package["id"])
    }

    /// Packages of the workspace that go to the registry.
    fn public(&self) -> impl Iterator<Item = &Value> {
        self.members().filter(|package| package::is_public(package))
    }

    /// Text of a file of the tree, which has to be there.
    fn text(&self, path: &str) -> Result<String> {
        let whole = self.root.join(path);
        fs::read_to_string(&whole).with_context(|| format!("{path}: expected a file, found none"))
    }
}

fn read_table(path: &Path) -> Result<Table> {
    let text = fs::read_to_string(path);
    let text = text.with_context(|| format!("{}: expected a file, found none", path.display()))?;
    text.parse().with_context(|| path.display().to_string())
}

/// The name that a package's description has, for messages.
fn name(package: &Value) -> &str {
    package["name"].as_str().unwrap_or_default()
}

/// Everything that speaks against a release, one a line.
fn refusals(tree: &Tree) -> Result<Vec<String>> {
    let mut found = versions::refusals(tree)?;
    found.extend(changelog::refusals(&tree.text("CHANGELOG.md")?, tree.version()?));
    for package in tree.public() {
        found.extend(package::gaps(package).map(|gap| format!("{}: {gap}", name(package))));
    }
    found.extend(wheel::refusals(tree)?);
    found.extend(licences::refusals(tree)?);
    found.extend(order::sorted(tree).err().map(|error| format!("{error:#}")));
    Ok(found)
}

/// Commands of a release, in order.
fn steps(tree: &Tree) -> Result<Vec<String>> {
    let version = tree.version()?;
    let mut steps = Vec::new();
    if changelog::is_unreleased(&tree.text("CHANGELOG.md")?, version) {
        steps.push(format!(
            "# CHANGELOG.md: put the day in the place of `{}`",
            changelog::UNRELEASED
        ));
    }
    steps.push(format!("git tag -a v{version} -m 'fusestep {version}'"));
    steps.extend(order::sorted(tree)?.iter().map(|name| format!("cargo publish -p {name}")));
    steps.push("cargo xtask wheels".to_owned());
    steps.push("python3 -m twine upload target/python/manylinux/*".to_owned());
    steps.push(format!("git push origin v{version}"));
    Ok(steps)
}
