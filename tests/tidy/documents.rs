//! What pages name is there: files that links lead to, and names of the code.

use std::collections::HashSet;

/// Pages that walk through the code. Others name tools, entries made from a table, or what other
/// projects have.
const WALKS: [&str; 4] = ["README.md", "docs/ARCHITECTURE.md", "docs/TOUR.md", "docs/numerics.md"];

/// Names in quotes of code that stand for names of the code's.
const PLACEHOLDERS: [&str; 1] = ["STEM_FORMAT"];

/// Links of a page to files of the workspace that are not there; `exists` answers for a path, of a
/// file or a folder.
pub(crate) fn dead_links(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<String> {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut found = Vec::new();
    for (at, line) in lines_of_prose(text) {
        for target in line.split("](").skip(1) {
            let target = target.split([')', '#', ' ']).next().unwrap_or_default();
            if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let leads_to = joined(folder, target);
            if !exists(&leads_to) {
                found.push(format!("{path}:{at}: expected {leads_to}, found no such file"));
            }
        }
    }
    found
}

/// Names that a page which walks through the code puts in quotes of code and that the code does not
/// have; `words` are all of the code's.
pub(crate) fn unknown_names(path: &str, text: &str, words: &HashSet<&str>) -> Vec<String> {
    if !WALKS.contains(&path) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (at, line) in lines_of_prose(text) {
        for quoted in line.split('`').skip(1).step_by(2) {
            let name = quoted.split_once('(').map_or(quoted, |(name, _)| name);
            let is_name = (name.contains("::") || name.contains('_'))
                && name.chars().all(|c| c.is_alphanumeric() || ":_".contains(c));
            let mut parts = name.split("::");
            if is_name && !PLACEHOLDERS.contains(&name) && !parts.all(|part| words.contains(part)) {
                found.push(format!(
                    "{path}:{at}: expected a name of the code, found `{quoted}`, which nothing has"
                ));
            }
        }
    }
    found
}

/// Counts of all entries that a page tells behind a word and that are not `count`: `has 156
/// entries`, `all 156 entries`. Others are of one kernel, or of another time.
pub(crate) fn wrong_counts(path: &str, text: &str, word: &str, count: usize) -> Vec<String> {
    let mut found = Vec::new();
    for (at, line) in lines_of_prose(text) {
        let words: Vec<&str> = line.split(' ').collect();
        for told in words.windows(3).filter(|told| told[0] == word) {
            let number = told[1].parse::<usize>();
            if told[2].starts_with("entries") && number.is_ok_and(|number| number != count) {
                let expected = format!("the {count} entries of kernels/ptx");
                found.push(format!("{path}:{at}: expected {expected}, found {}", told[1]));
            }
        }
    }
    found
}

/// Folders that a map of layers puts elsewhere than `layer_of` does: a table whose first column has
/// the layer, or nothing if it is that of the row before.
pub(crate) fn wrong_layers(
    path: &str,
    map: &str,
    layer_of: &dyn Fn(&str) -> Option<usize>,
) -> Vec<String> {
    let (mut found, mut layer) = (Vec::new(), None);
    for (at, line) in lines_of_prose(map).filter(|(_, line)| line.starts_with("| ")) {
        let mut columns = line.split('|').skip(1).map(str::trim);
        let (Some(first), Some(folders)) = (columns.next(), columns.next()) else { continue };
        layer = first.parse().ok().or(if first.is_empty() { layer } else { None });
        let Some(layer) = layer else { continue };
        for folder in folders.split("](").skip(1) {
            let folder = folder.split(')').next().unwrap_or_default();
            let short = folder.rsplit('/').next().unwrap_or_default();
            if layer_of(short).is_some_and(|own| own != layer) {
                found.push(format!("{path}:{at}: expected {short} in another layer than {layer}"));
            }
        }
    }
    found
}

/// The words of a source.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    words.filter(|word| !word.is_empty())
}

/// The lines that do not stand between fences, numbered from 1.
pub(crate) fn lines_of_prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        (!fenced && !is_fence).then_some((at + 1, line))
    })
}

/// Where a link in a folder's page leads.
fn joined(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

#[test]
fn dead_links_and_unknown_names_are_found() {
    let exists = |path: &str| path == "crates/cpu/src/borrowed.rs";
    let page =
        "a [b](../crates/cpu/src/borrowed.rs#x), [c](https://d.e), [f](#g)\n\n[h](gone.rs)\n";
    assert_eq!(
        dead_links("docs/TOUR.md", page, &exists),
        ["docs/TOUR.md:3: expected docs/gone.rs, found no such file"]
    );
    let words: HashSet<&str> = words("impl Plan { fn run_borrowed(&self) {} }").collect();
    let page = "`Plan::run_borrowed()` calls `Plan::run_lent`, `--flags` and `x + y`\n\n```text\n`a_b`\n```\n";
    assert_eq!(
        unknown_names("docs/TOUR.md", page, &words),
        ["docs/TOUR.md:1: expected a name of the code, found `Plan::run_lent`, which nothing has"]
    );
    assert_eq!(unknown_names("docs/kernels.md", page, &words).len(), 0);
}

#[test]
fn stale_counts_and_layers_are_found() {
    let page = "`ptx/` has 154 entries in 4 MB, all 156 entries, of 12 entries\n";
    let found = wrong_counts("a.md", page, "has", 156);
    assert_eq!(found, ["a.md:1: expected the 156 entries of kernels/ptx, found 154"]);
    let map = "| Layer | Folder |\n|---|---|\n| 0 | [tensor](../crates/tensor) | x |\n\
               | | [cli](../crates/cli), [cpu](../crates/cpu) | y |\n| 1 | [cli](../crates/cli) | z |\n";
    let layer_of = |short: &str| ["tensor", "cli"].iter().position(|folder| *folder == short);
    let found = wrong_layers("a.md", map, &layer_of);
    assert_eq!(found, ["a.md:4: expected cli in another layer than 0"]);
}
