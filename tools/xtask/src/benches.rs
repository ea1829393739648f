//! `benches`: every command that a page or a bench's header names, and every other bench, in
//! criterion's mode that runs each function once, so that what is written there works.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::commands::{cargo, must, succeed};
use crate::{folders, workspace_root};

/// What such a command begins with.
const COMMAND: &str = "cargo bench ";

/// Benches themselves with fewer optimizations: here each function runs once, so that building
/// takes longer. What they measure is built as always.
const QUICKLY_BUILT: &str = "--config profile.bench.package.fusestep-benches.opt-level=1";

/// Where they are written, besides the benches themselves.
const PAGES: [&str; 3] = ["CONTRIBUTING.md", "README.md", "docs"];

/// Runs every command that is written somewhere, and every bench that none of them names.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    ensure!(arguments.is_empty(), "expected `benches`, found {arguments:?}");
    let root = workspace_root();
    let mut commands = BTreeSet::new();
    for page in texts(&root)? {
        commands.extend(named(&fs::read_to_string(page)?));
    }
    let has = |bench: &str, command: &String| {
        command.split(' ').skip_while(|word| *word != "--bench").nth(1) == Some(bench)
    };
    let benches = benches(&fs::read_to_string(root.join("benches/Cargo.toml"))?);
    // On all cores: the commands build one program at a time.
    let all: String = benches.iter().map(|bench| format!(" --bench {bench}")).collect();
    let begun = Instant::now();
    must(&mut cargo(&format!("bench -q --no-run {QUICKLY_BUILT}{all}")), "a bench does not build")?;
    println!("benches: built in {:.0} s", begun.elapsed().as_secs_f64());
    for bench in benches {
        if !commands.iter().any(|command| has(&bench, command)) {
            commands.insert(format!("{COMMAND}--bench {bench}"));
        }
    }
    ensure!(commands.len() > 10, "expected a command for each bench, found {commands:?}");
    for command in commands {
        let begun = Instant::now();
        let words = command.strip_prefix(COMMAND).unwrap_or(&command);
        let test = if words.contains(" -- ") { " --test" } else { " -- --test" };
        let words = format!("bench {QUICKLY_BUILT} {words}{test}");
        succeed(&mut cargo(&words)).with_context(|| format!("`{command}`"))?;
        println!("benches: {command} in {:.0} s", begun.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Files in which commands may be written.
fn texts(root: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    for page in PAGES.iter().map(|page| root.join(page)) {
        if page.is_dir() { found.extend(folders::files_below(&page)?) } else { found.push(page) }
    }
    for entry in fs::read_dir(root.join("benches"))? {
        found.push(entry?.path());
    }
    found.retain(|path| path.extension().is_some_and(|ending| ending == "rs" || ending == "md"));
    Ok(found)
}

/// The commands that stand in quotes of code, which lines may break.
fn named(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.trim_start_matches("//!").trim());
    let text = lines.collect::<Vec<_>>().join(" ");
    let commands = text.split('`').filter(|quoted| quoted.starts_with(COMMAND));
    commands.map(str::to_owned).collect()
}

/// The benches of a manifest that need no feature.
fn benches(manifest: &str) -> Vec<String> {
    let tables = manifest.split("[[bench]]").skip(1);
    let tables = tables.filter(|table| !table.contains("required-features"));
    let names = tables.filter_map(|table| table.split_once("name = \"")?.1.split('"').next());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_headers_and_pages() {
        let text = "//! `cargo bench --bench a --\n//! gpt2` runs it\n| `cargo bench --bench b` |\n\
                    `cargo test` and cargo bench --bench c\n";
        assert_eq!(named(text), ["cargo bench --bench a -- gpt2", "cargo bench --bench b"]);
        let manifest = "[[bench]]\nname = \"a\"\nharness = false\n\n[[bench]]\nname = \"device\"\n\
                        required-features = [\"cuda\"]\n";
        assert_eq!(benches(manifest), ["a"]);
    }
}
