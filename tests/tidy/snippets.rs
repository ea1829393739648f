//! Code on the first page is code that runs: each block is a part of a file that a test runs.

/// Files that tests compile and run, and that blocks of README.md are parts of.
pub(crate) const RUN: [&str; 5] = [
    "crates/fusestep/examples/quickstart.rs",
    "crates/fusestep/examples/one_process.rs",
    "crates/candle/examples/quickstart.rs",
    "crates/python/examples/quickstart.py",
    "crates/fused-adam/README.md",
];

/// Blocks of code of a page that are no contiguous part of any source, up to indentation and blank
/// lines. Of a `diff` what was before has to be one, and what is after too.
pub(crate) fn not_run(path: &str, page: &str, sources: &[String]) -> Vec<String> {
    let sources: Vec<Vec<&str>> = sources.iter().map(|source| trimmed(source.lines())).collect();
    let mut found = Vec::new();
    for (at, language, lines) in blocks(page) {
        let versions = match language {
            "rust" | "python" => vec![lines],
            "diff" => vec![side(&lines, '-'), side(&lines, '+')],
            _ => continue,
        };
        for version in versions {
            let block = trimmed(version);
            let is_part = |source: &Vec<&str>| source.windows(block.len()).any(|of| of == block);
            if block.is_empty() || !sources.iter().any(is_part) {
                let expected = "a part of a file that tests run";
                found.push(format!("{path}:{at}: expected {expected}, found {block:?}"));
            }
        }
    }
    found
}

/// Programs of a page that `cargo xtask pages` runs.
pub(crate) fn programs(page: &str) -> impl Iterator<Item = String> {
    let blocks = blocks(page).into_iter();
    let run = blocks.filter(|(_, language, _)| language.ends_with(" run"));
    run.map(|(_, _, lines)| lines.join("\n"))
}

/// The blocks between fences: the number of the fence's line, the language, the lines.
fn blocks(page: &str) -> Vec<(usize, &str, Vec<&str>)> {
    let mut found = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let inside = lines.by_ref().map(|(_, line)| line);
            found.push((at + 1, language, inside.take_while(|line| *line != "```").collect()));
        }
    }
    found
}

/// The lines of one side of a diff: those of this sign, and those of both sides.
fn side<'a>(lines: &[&'a str], sign: char) -> Vec<&'a str> {
    lines.iter().filter_map(|line| line.strip_prefix([sign, ' '])).collect()
}

fn trimmed<'a>(lines: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    lines.into_iter().map(str::trim).filter(|line| !line.is_empty()).collect()
}

#[test]
fn code_that_nothing_runs_is_found() {
    let sources = ["fn f() {\n    a();\n    b();\n}\nfn g() {\n    a();\n    c();\n}\n".to_owned()];
    let good = "```rust\na();\nb();\n```\n\n```text\nx\n```\n\n```diff\n a();\n-b();\n+c();\n```\n";
    assert_eq!(not_run("a.md", good, &sources), Vec::<String>::new());
    let bad = "x\n\n```rust\nb();\na();\n```\n\n```diff\n a();\n-c();\n+d();\n```\n";
    let expected = "expected a part of a file that tests run, found";
    assert_eq!(
        not_run("a.md", bad, &sources),
        [
            format!(r#"a.md:3: {expected} ["b();", "a();"]"#),
            format!(r#"a.md:8: {expected} ["a();", "d();"]"#),
        ]
    );
}
