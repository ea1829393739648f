//! Pages for newcomers: short sentences, short paragraphs, one number a cell.

use crate::documents::lines_of_prose;

/// Folders of pages for newcomers.
pub(crate) const FOLDERS: [&str; 4] =
    ["docs/start/", "docs/guides/", "docs/reference/", "docs/performance/"];

const SENTENCE_WORDS: usize = 30;
const PARAGRAPH_WORDS: usize = 90;

/// Sentences and paragraphs of a page that are too long, and cells of tables with two numbers.
pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, paragraph) in paragraphs(text) {
        let plain = plain(&paragraph);
        let words = plain.split_whitespace().filter(|word| word.contains(char::is_alphanumeric));
        let count = words.count();
        if count > PARAGRAPH_WORDS {
            let most = format!("at most {PARAGRAPH_WORDS} words of a paragraph");
            found.push(format!("{path}:{at}: expected {most}, found {count}"));
        }
        for sentence in sentences(&plain).into_iter().filter(|of| of.len() > SENTENCE_WORDS) {
            let begin = sentence[..4].join(" ");
            let most = format!("at most {SENTENCE_WORDS} words of a sentence");
            found.push(format!("{path}:{at}: expected {most}, found {}: {begin}", sentence.len()));
        }
    }
    for (at, line) in lines_of_prose(text).filter(|(_, line)| line.starts_with('|')) {
        for cell in plain(line).split('|') {
            let numbers: Vec<&str> =
                cell.split_whitespace().filter(|word| is_number(word)).collect();
            if numbers.len() > 1 {
                found.push(format!("{path}:{at}: expected one number a cell, found {numbers:?}"));
            }
        }
    }
    found
}

/// Lines of the first screen of README, which ends at its second part.
const FIRST_SCREEN: &str = "\n## What it is\n";
const FIRST_SCREEN_LINES: usize = 40;

/// A first screen of README that has too many lines beside the code of its quickstarts.
pub(crate) fn long_first_screen(path: &str, text: &str) -> Vec<String> {
    if path != "README.md" {
        return Vec::new();
    }
    let Some((screen, _)) = text.split_once(FIRST_SCREEN) else {
        return vec![format!("{path}: expected the part {:?}", FIRST_SCREEN.trim())];
    };
    let mut in_quickstart = false;
    let lines = screen.lines().filter(|line| {
        let (begins, ends) = (line.starts_with("```diff"), *line == "```");
        let was_in = in_quickstart;
        in_quickstart = begins || (was_in && !ends);
        !(begins || was_in || line.trim().is_empty())
    });
    let count = lines.count();
    let most = format!("at most {FIRST_SCREEN_LINES} lines beside the quickstarts' code");
    let is_long = count > FIRST_SCREEN_LINES;
    is_long.then(|| format!("{path}: expected {most}, found {count}")).into_iter().collect()
}

/// Paragraphs and items of lists, each with the number of its first line. Headings, tables,
/// pictures and comments are none.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    // The line behind the last of a paragraph.
    let mut next = 0;
    for (at, line) in lines_of_prose(text) {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', '|', '!', '<']) {
            continue;
        }
        let is_item = line.starts_with("- ")
            || line.split_once(". ").is_some_and(|(number, _)| number.parse::<usize>().is_ok());
        match found.last_mut() {
            Some((_, paragraph)) if next == at && !is_item => {
                paragraph.push(' ');
                paragraph.push_str(line);
            }
            _ => found.push((at, line.to_owned())),
        }
        next = at + 1;
    }
    found
}

/// The text without marks: code is one word, a link is what is read of it.
fn plain(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let text: String = parts.map(|(at, part)| if at % 2 == 1 { "code" } else { part }).collect();
    let mut parts = text.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    let rest = parts.map(|part| part.split_once(')').map_or(part, |(_, behind)| behind));
    rest.fold(first, |all, part| all + part).replace(['[', '*'], "")
}

/// The words of each sentence.
fn sentences(text: &str) -> Vec<Vec<&str>> {
    let words = text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric));
    let words: Vec<&str> = words.collect();
    let ends = |word: &&str| word.trim_end_matches([')', '"']).ends_with(['.', '?', '!']);
    words.split_inclusive(ends).map(<[&str]>::to_vec).collect()
}

fn is_number(word: &str) -> bool {
    let word = word.trim_start_matches(['(', '+', '-', '−', '~', '×']);
    word.starts_with(|c: char| c.is_ascii_digit())
}

#[test]
fn long_sentences_and_full_cells_are_found() {
    let long = "word ".repeat(SENTENCE_WORDS);
    let page = format!(
        "# {long} {long}\n\n{long}\n[two](x.md).\n\n- {long}.\n- `{long}{long}`\n\n| 1 | f32 `1 2` | 3.2, 2.9 |\n\n```text\n{long} {long}\n```\n"
    );
    let found = violations("a.md", &page);
    assert_eq!(
        found,
        [
            "a.md:3: expected at most 30 words of a sentence, found 31: word word word word",
            r#"a.md:9: expected one number a cell, found ["3.2,", "2.9"]"#,
        ]
    );
    let found = violations("a.md", &"Six words are in this one. ".repeat(16));
    assert_eq!(found, ["a.md:1: expected at most 90 words of a paragraph, found 96"]);
}

#[test]
fn a_first_screen_is_counted_without_quickstarts() {
    let page = |lines: usize| {
        let text = "text\n\n".repeat(lines);
        format!("{text}```diff\n+a\n b\n```\n## What it is\n{text}")
    };
    assert!(long_first_screen("README.md", &page(FIRST_SCREEN_LINES)).is_empty());
    let found = long_first_screen("README.md", &page(FIRST_SCREEN_LINES + 1));
    let expected = "README.md: expected at most 40 lines beside the quickstarts' code, found 41";
    assert_eq!(found, [expected.to_owned()]);
    assert_eq!(long_first_screen("README.md", "text").len(), 1);
    assert!(long_first_screen("docs/README.md", "text").is_empty());
}
