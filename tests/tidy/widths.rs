//! Lines end at 100 columns, quoted texts left out.

use crate::source::code_only;

const COLUMNS: usize = 100;

/// Lines that are too wide. In code the texts of literals do not count: a message that is broken
/// up cannot be searched for.
pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    let code = code_only(text);
    let mut found = violations_of_comments(path, text);
    let lines = text.lines().zip(code.lines()).enumerate();
    found.extend(lines.filter_map(|(at, (line, code))| {
        let indent = line.chars().take_while(|&c| c == ' ').count();
        too_wide(path, at, indent + columns_of_code(code))
    }));
    found
}

/// Lines of comments that are too wide.
pub(crate) fn violations_of_comments(path: &str, text: &str) -> Vec<String> {
    let lines = text.lines().enumerate();
    let comments = lines.filter(|(_, line)| line.trim_start().starts_with("//"));
    comments.filter_map(|(at, line)| too_wide(path, at, line.chars().count())).collect()
}

fn too_wide(path: &str, at: usize, columns: usize) -> Option<String> {
    (columns > COLUMNS)
        .then(|| format!("{path}:{}: expected at most {COLUMNS} columns, found {columns}", at + 1))
}

/// Columns of a line whose literals and comments are blank, without its indentation.
fn columns_of_code(code: &str) -> usize {
    let words = code.split_whitespace();
    let columns: usize = words.map(|word| word.chars().count() + 1).sum();
    columns.saturating_sub(1)
}

/// Lines of a page of prose that are too wide. Tables, links on lines of their own, headings and
/// what stands between fences cannot be broken.
pub(crate) fn violations_of_prose(path: &str, text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        let unbreakable = fenced
            || line.trim_start().starts_with(['|', '#', '<', '!'])
            || line.trim().split(' ').count() == 1;
        if !unbreakable {
            found.extend(too_wide(path, at, line.chars().count()));
        }
    }
    found
}

#[test]
fn wide_lines_are_found() {
    let wide = "x".repeat(COLUMNS + 1);
    let (comment, code) = (format!("// {wide}\n"), format!("    let {wide} = 1;\n"));
    let quoted = format!("    let x = f(\"{wide} {wide}\");\n");
    assert_eq!(violations("a.rs", &comment).len(), 1);
    assert_eq!(violations("a.rs", &code).len(), 1);
    assert_eq!(violations("a.rs", &quoted), Vec::<String>::new());
    let prose = format!("a {wide}\n\n| {wide} |\n\n```text\na {wide}\n```\n");
    assert_eq!(
        violations_of_prose("a.md", &prose),
        ["a.md:1: expected at most 100 columns, found 103"]
    );
}
