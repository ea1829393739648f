//! Numbers of the house that may only fall: circles of imports, files that name a setting, docs
//! that begin without their noun, tuple parameters; and the doors between the planner's rooms.

use std::collections::BTreeMap;

use crate::imports::{Graph, circles, graph};
use crate::source::words;

/// Most modules in the largest circle of a crate that is not named below.
const LARGEST_CIRCLE: usize = 3;

/// Crates with a ceiling of their own, and the most modules of each.
const LARGEST_CIRCLES: [(&str, usize); 2] = [("checkpoint", 0), ("planner", 0)];

/// Most modules in circles of all crates together.
const MODULES_IN_CIRCLES: usize = 11;

/// Settings, and the most product files that name each.
const SETTINGS: [(&str, usize); 5] = [
    ("clip_norm", 6),
    ("accumulate", 10),
    ("local_sgd", 6),
    ("comm_streams", 5),
    ("update_in_backward", 6),
];

/// Most docs that begin without their noun.
const VAGUE_DOCS: usize = 0;

/// Most parameters that are tuples without names.
const TUPLE_PARAMETERS: usize = 13;

/// Rooms of the planner, each with the rooms that it knows nothing of.
const DOORS: [(&str, &[&str]); 1] = [("plan", &["run"])];

/// Imports through closed doors that are still there.
const OPEN: [(&str, &str); 0] = [];

/// Folders of what users get, and of the libraries that tests stand on.
const PRODUCT: [&str; 4] = ["crates/", "kernels/", "tools/cuda-emulator/", "tools/testkit/"];

/// Words by which a doc points at something instead of naming it.
const VAGUE: [&str; 13] = [
    "What", "Those", "That", "Whose", "Who", "Whoever", "Where", "As", "The same", "So many", "Of",
    "How many", "How much",
];

/// Whether a file is what users get or a library that tests stand on, and no test.
pub(crate) fn is_product(path: &str) -> bool {
    let endings = [".rs", ".cu", ".cuh", ".cpp", ".hpp", ".py"];
    let tests = path.ends_with("tests.rs") || path.ends_with("_test.rs");
    let folders = ["tests", "benches", "examples"];
    PRODUCT.iter().any(|folder| path.starts_with(folder))
        && endings.iter().any(|ending| path.ends_with(ending))
        && !tests
        && !path.split('/').any(|part| folders.contains(&part))
}

/// A source without its module of tests.
pub(crate) fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}

/// Every ceiling that `files`, paths and texts of the product, are above.
pub(crate) fn violations(files: &[(&str, &str)]) -> Vec<String> {
    let graphs = graphs_of_crates(files);
    let mut found = above_circles(&graphs);
    if let Some((_, planner)) = graphs.iter().find(|(name, _)| *name == "planner") {
        found.extend(through_closed_doors(planner, &OPEN));
    }
    for (setting, most) in SETTINGS {
        // Simulated runs set what they need, as tests do.
        let product = files.iter().filter(|(path, _)| !path.starts_with("tools/"));
        let naming = product.filter(|(_, text)| words(text, setting).next().is_some());
        let naming: Vec<&str> = naming.map(|(path, _)| *path).collect();
        let list = naming.join(", ");
        found.extend(above(&format!("files that name `{setting}` ({list})"), naming.len(), most));
    }
    let sources = files.iter().filter(|(path, _)| path.ends_with(".rs") && path.contains("/src/"));
    let (mut docs, mut tuples) = (0, 0);
    for (_, text) in sources {
        docs += vague_docs(text);
        tuples += text.lines().filter(|line| has_tuple_parameter(line.trim())).count();
    }
    found.extend(above("docs that begin without their noun", docs, VAGUE_DOCS));
    found.extend(above("tuple parameters", tuples, TUPLE_PARAMETERS));
    found
}

fn above(what: &str, found: usize, most: usize) -> Option<String> {
    println!("{found} {what}, at most {most}");
    (found > most).then(|| format!("{what}: expected at most {most}, found {found}"))
}

/// The imports of every crate, by the crate's folder.
fn graphs_of_crates<'a>(files: &[(&'a str, &'a str)]) -> Vec<(&'a str, Graph)> {
    let mut crates: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    for (path, text) in files.iter().filter(|(path, _)| path.ends_with(".rs")) {
        if let Some((folder, file)) = path.split_once("/src/") {
            let name = folder.rsplit('/').next().unwrap_or(folder);
            crates.entry(name).or_default().push((file, text));
        }
    }
    crates.into_iter().map(|(name, files)| (name, graph(files.into_iter()))).collect()
}

fn above_circles(graphs: &[(&str, Graph)]) -> Vec<String> {
    let (mut found, mut modules) = (Vec::new(), 0);
    for (name, graph) in graphs {
        let circles = circles(graph);
        modules += circles.iter().map(Vec::len).sum::<usize>();
        let Some(largest) = circles.first() else {
            continue;
        };
        let most = LARGEST_CIRCLES.iter().find(|(of, _)| of == name);
        let most = most.map_or(LARGEST_CIRCLE, |(_, most)| *most);
        let what = format!("modules in a circle of crate {name} ({})", largest.join(", "));
        found.extend(above(&what, largest.len(), most));
    }
    found.extend(above("modules in circles", modules, MODULES_IN_CIRCLES));
    found
}

/// Imports of a room of what it knows nothing of, beside those that are `open`; and of these the
/// ones that are gone and have to be taken off the list.
fn through_closed_doors(graph: &Graph, open: &[(&str, &str)]) -> Vec<String> {
    let is_in =
        |module: &str, room: &str| module == room || module.starts_with(&format!("{room}::"));
    let mut through = Vec::new();
    for (from, imports) in graph {
        let closed = DOORS.iter().filter(|(room, _)| is_in(from, room));
        let closed: Vec<&str> = closed.flat_map(|(_, rooms)| rooms.iter().copied()).collect();
        let behind = imports.iter().filter(|to| closed.iter().any(|room| is_in(to, room)));
        through.extend(behind.map(|to| (from.as_str(), to.as_str())));
    }
    let new = through.iter().filter(|pair| !open.contains(pair));
    let new = new.map(|(from, to)| format!("planner: {from} is not to import {to}"));
    let gone = open.iter().filter(|pair| !through.contains(pair));
    let gone = gone.map(|(from, to)| {
        format!("planner: {from} no longer imports {to}; take the pair off `OPEN`")
    });
    new.chain(gone).collect()
}

/// Docs of a source that begin without their noun.
fn vague_docs(text: &str) -> usize {
    let (mut found, mut before) = (0, "");
    for line in text.lines().map(str::trim) {
        for mark in ["///", "//!"] {
            let begins = line.starts_with(mark) && !before.starts_with(mark);
            found += usize::from(begins && is_vague(line[mark.len()..].trim()));
        }
        before = line;
    }
    found
}

fn is_vague(doc: &str) -> bool {
    VAGUE.iter().any(|word| {
        let rest = doc.strip_prefix(word);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    })
}

/// Whether a line declares a parameter, or annotates a pattern, that is a tuple of a tuple type.
fn has_tuple_parameter(line: &str) -> bool {
    line.match_indices(')').any(|(at, _)| {
        let behind = line[at + 1..].trim_start().strip_prefix(':');
        if !behind.is_some_and(|rest| rest.trim_start().starts_with('(')) {
            return false;
        }
        let is_part = |c: char| c.is_ascii_lowercase() || "_, ".contains(c);
        let before = line[..at].trim_end_matches(is_part);
        let names = &line[before.len()..at];
        !names.is_empty() && (before.ends_with('(') || names[..names.len() - 1].contains(','))
    })
}

/// Whether the file of a room's own declares modules and hands on names, and does nothing else.
pub(crate) fn violations_of_room(path: &str, text: &str) -> Vec<String> {
    let rooms = ["crates/planner/src/plan/", "crates/planner/src/run/"];
    if !rooms.iter().any(|room| path.starts_with(room)) {
        return Vec::new();
    }
    let code = crate::source::code_only(text);
    let other = code.split(';').map(str::trim).find(|item| {
        let item = item.trim_start_matches("pub(crate) ").trim_start_matches("pub ");
        !item.is_empty() && !item.starts_with("mod ") && !item.starts_with("use ")
    });
    let said =
        other.map(|_| format!("{path}: expected `mod` and `pub use` only, found other code"));
    said.into_iter().collect()
}

#[test]
fn closed_doors_and_pairs_that_are_gone_are_found() {
    let files = [
        ("lib.rs", "mod plan;\nmod run;\n"),
        ("plan/value.rs", "use crate::run::state::State;\npub struct Plan;\n"),
        ("plan/text.rs", "use crate::run::state::State;\n"),
        ("run/state.rs", "use crate::plan::value::Plan;\n"),
    ];
    let graph = graph(files.into_iter());
    let open = [("plan::text", "run::state"), ("plan::page", "run::state")];
    let found = through_closed_doors(&graph, &open);
    assert_eq!(
        found,
        [
            "planner: plan::value is not to import run::state",
            "planner: plan::page no longer imports run::state; take the pair off `OPEN`",
        ]
    );
}

#[test]
fn docs_without_their_noun_and_tuples_are_found() {
    let text =
        "//! What it is.\n//! What else.\n\n/// Whatever it is.\nfn a() {}\n    /// Of a plan.\n";
    assert_eq!(vague_docs(text), 2);
    for (line, expected) in [
        ("(stage, update): (&Stage, usize),", true),
        ("fn f((a, b): (u32, u32)) {", true),
        ("let f = |(_, b): (u32, u32)| b;", true),
        ("fn f(a: u32) -> (u32, u32) {", false),
        ("let (a, b) = (1, 2);", false),
        ("Some(x): (Option<u32>)", true),
    ] {
        assert_eq!(has_tuple_parameter(line), expected, "{line}");
    }
    assert!(is_product("crates/a/src/b.rs") && !is_product("crates/a/tests/b.rs"));
    assert!(is_product("tools/testkit/src/case.rs") && !is_product("tools/fuzz/src/main.rs"));
    let other = "mod a;\npub use a::A;\nfn f() {}\n";
    assert_eq!(violations_of_room("crates/planner/src/run/mod.rs", other).len(), 1);
    assert!(violations_of_room("crates/planner/src/run/mod.rs", &other[..21]).is_empty());
}
