//! Code and comments that a tired reader understands at once.

use crate::source;

/// Words of our own that the field has others for; as identifiers of Rust.
const RETIRED: [(&str, &str); 29] = [
    ("Ring", "CommStream"),
    ("rings", "comm_streams"),
    ("Meet", "Rendezvous"),
    ("Seat", "Participant"),
    ("seat", "participant"),
    ("seats", "participants"),
    ("Offer", "Contribution"),
    ("Bell", "Notifier"),
    ("bell", "notifier"),
    ("Lent", "Borrowed"),
    ("lent", "borrowed"),
    ("Carried", "Cached"),
    ("carried", "cached"),
    ("set_absent", "set_without_gradient"),
    ("SetValues", "GroupValues"),
    ("write_set", "write_step_scalars"),
    ("set_bytes", "step_scalar_bytes"),
    ("SET_BYTES", "STEP_SCALAR_BYTES"),
    ("ResidentSets", "ResidentStepScalars"),
    ("sets_entry", "step_scalars_entry"),
    ("HyperClass", "ParameterGroup"),
    ("CLASS_BYTES", "GROUP_BYTES"),
    ("SLOT_VALUES", "ROW_VALUES"),
    ("first_slot", "first_row"),
    ("UpdateSlots", "UpdateRows"),
    ("Piece", "Message"),
    ("PieceBytes", "TensorPartBytes"),
    ("apart", "separate"),
    ("abort_apart", "abort_in_background"),
];

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
            found.push(format!("{path}:{line}: expected what it is, found \"The same\""));
        }
    }
    if path.ends_with(".rs") {
        for (word, expected) in RETIRED {
            for at in source::words(&code, word) {
                let line = source::line_of(&code, at);
                found.push(format!("{path}:{line}: expected `{expected}`, found `{word}`"));
            }
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
        assert_eq!(violations("a.rs", "use a::Ring; // Ring\n").len(), 1);
    }
}
