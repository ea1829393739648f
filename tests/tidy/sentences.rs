//! Code and comments that a tired reader understands at once.

use crate::source;

/// What is wrong with a file.
pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    let code = source::code_only(text);
    let mut found = Vec::new();
    for (at, line) in code.lines().enumerate() {
        let arm = line.trim_start();
        if arm.starts_with("true =>") || arm.starts_with("false =>") {
            let line = at + 1;
            found.push(format!(
                "{path}:{line}: expected `if`, found a `match` of `true` and `false`"
            ));
        }
    }
    for (at, (line, code)) in text.lines().zip(code.lines()).enumerate() {
        let comment = line.trim_start();
        let begins = code.trim().is_empty() && comment.starts_with("//");
        let sentence = comment.trim_start_matches(['/', '!']).trim_start();
        if begins && sentence.starts_with("The same") {
            let line = at + 1;
            found.push(format!(
                "{path}:{line}: expected what it is, found \"The same\""
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_of_truth_and_comparisons_without_a_subject_are_found() {
        let text = "fn f() {\n    match x {\n        true => 1,\n        false => 2,\n    }\n}\n/// The same.\n";
        assert_eq!(violations("a.rs", text).len(), 3);
        let text = "fn f() {\n    match (x, y) {\n        (true, _) => 1,\n    }\n}\n// true => 1\n/// Of the same.\n";
        assert_eq!(violations("a.rs", text), Vec::<String>::new());
    }
}
