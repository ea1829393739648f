//! Unsafe code lies in few crates and states why it is sound.

use crate::source::{code_only, line_of, words};

/// Folders whose code may be unsafe.
const MAY_BE_UNSAFE: [&str; 16] = [
    "crates/simd/",
    // Where ranks of a process lend each other slices, and the model of it.
    "crates/collective/src/rendezvous.rs",
    "crates/collective/src/rendezvous/",
    "crates/collective/tests/model.rs",
    "crates/collective-mpi/",
    "crates/collective-nccl/",
    "crates/collective-processes/",
    "crates/cuda/",
    "tools/cuda-emulator/",
    // What a device's memory is promised to be, by whoever lends it.
    "crates/tensor/src/device.rs",
    // Two calls of POSIX, for which a crate would turn on features of crates that candle shares.
    "crates/tensor-file/src/posix.rs",
    // Addresses in candle's memory of a device, with the feature `cuda` only.
    "crates/candle/src/cuda.rs",
    "crates/candle/tests/cuda.rs",
    // Memory of tensors that Python libraries keep.
    "crates/python/src/",
    // Allocators that count, which Rust lets no safe code be.
    "tests/steady_state.rs",
    "tests/memory.rs",
];

const FORBID: &str = "#![forbid(unsafe_code)]";

/// The end of the same where a feature lifts it for one file.
const FORBID_WITHOUT: &str = "), forbid(unsafe_code))]";

/// What stands in its place where one file of a crate may be unsafe.
const DENY: &str = "#![deny(unsafe_code)]";

/// What is wrong with a Rust file.
pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let may = MAY_BE_UNSAFE.iter().any(|folder| path.starts_with(folder));
    let is_root = path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
    let code = code_only(text);
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let has_one = |may: &&str| may.ends_with(".rs") && may.starts_with(folder);
    let denies = MAY_BE_UNSAFE.iter().any(has_one) && code.contains(DENY);
    let forbids = code.contains(FORBID) || code.contains(FORBID_WITHOUT) || denies;
    if is_root && !may && !forbids {
        found.push(format!("{path}: expected `{FORBID}`, found none"));
    }
    for index in words(&code, "unsafe") {
        let line = line_of(&code, index);
        if !may {
            found.push(format!(
                "{path}:{line}: expected no unsafe code outside of {MAY_BE_UNSAFE:?}, found some"
            ));
        }
        let rest = code[index + "unsafe".len()..].trim_start();
        let needs_reason = rest.starts_with('{') || rest.starts_with("impl");
        if needs_reason && !has_reason(text, line) {
            found.push(format!(
                "{path}:{line}: expected a `// SAFETY:` comment right before it, found none"
            ));
        }
    }
    found
}

/// Whether the comment right before a line (counted from 1) has `SAFETY:`; the start of the line's
/// own statement and attributes may lie between.
fn has_reason(text: &str, line: usize) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut in_comment = false;
    for above in lines[..line - 1].iter().rev() {
        let comment = above.starts_with("//");
        if comment && above.contains("SAFETY:") {
            return true;
        }
        let statement_goes_on = above.starts_with("#[") || !above.ends_with([';', '{', '}', ',']);
        if above.is_empty() || (!comment && (in_comment || !statement_goes_on)) {
            return false;
        }
        in_comment |= comment;
    }
    false
}

#[test]
fn unsafe_code_in_the_wrong_place_or_without_a_reason_is_found() {
    let block = "fn f() {\n    // SAFETY: it is.\n    let x =\n        unsafe { g() };\n}\n";
    let bare = "// SAFETY: not about the block.\nlet y = 1;\nunsafe { g() }\n";
    let forbidden = format!("//! What.\n{FORBID}\n");
    let cases: [(&str, &str, usize); 9] = [
        ("crates/tensor/src/lib.rs", &forbidden, 0),
        ("crates/tensor/src/lib.rs", "//! What.\n", 1),
        ("crates/tensor/src/main.rs", "// #![forbid(unsafe_code)]\n", 1),
        ("crates/simd/src/lib.rs", "//! What.\n", 0),
        ("crates/simd/src/a.rs", block, 0),
        ("crates/simd/src/a.rs", bare, 1),
        ("crates/tensor/src/a.rs", block, 1),
        ("crates/simd/src/a.rs", "unsafe impl Send for X {}\n", 1),
        ("crates/tensor/src/a.rs", "// unsafe { }\nlet x = \"unsafe { }\";\n", 0),
    ];
    for (path, text, expected) in cases {
        let found = violations(path, text);
        assert_eq!(found.len(), expected, "{path}: {text}\n{found:?}");
    }
}
