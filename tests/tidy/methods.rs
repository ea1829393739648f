//! A type's methods stand in few files, so that a reader knows where to look for them.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{closing_brace, code_only, words};

/// Most files of a crate that have `impl` blocks of one type, those of traits not counted. What
/// stands elsewhere and works on the type is a function of its module.
const MOST_FILES: usize = 4;

/// Types whose methods are scattered over more files of their crate; `sources` are paths and texts.
pub(crate) fn scattered<'a>(sources: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    let mut files: BTreeMap<(&str, String), BTreeSet<&str>> = BTreeMap::new();
    for (path, text) in sources {
        let Some((folder, file)) = path.split_once("/src/") else {
            continue;
        };
        if file.ends_with("tests.rs") || file.contains("tests/") {
            continue;
        }
        for name in types_with_methods(text) {
            files.entry((folder, name)).or_default().insert(file);
        }
    }
    let scattered = files.iter().filter(|(_, files)| files.len() > MOST_FILES);
    let said = scattered.map(|((folder, name), files)| {
        let files: Vec<&str> = files.iter().copied().collect();
        format!(
            "{folder}/src: expected methods of `{name}` in at most {MOST_FILES} files, found them \
             in {}: {}",
            files.len(),
            files.join(", ")
        )
    });
    said.collect()
}

/// Types that a source has methods of, those of its modules of tests not counted.
fn types_with_methods(text: &str) -> Vec<String> {
    let code = code_only(text);
    let tests: Vec<_> = code
        .match_indices("#[cfg(test)]\nmod ")
        .filter_map(|(at, _)| {
            let open = at + code[at..].find(['{', ';'])?;
            code[open..].starts_with('{').then(|| at..closing_brace(&code, open))
        })
        .collect();
    let blocks = words(&code, "impl").filter(|at| {
        let line = code[..*at].rsplit('\n').next().unwrap_or_default();
        line.trim().is_empty() && !tests.iter().any(|module| module.contains(at))
    });
    let heads = blocks.filter_map(|at| code[at + "impl".len()..].split(['{', ';']).next());
    let own = heads.filter(|head| !words(head, "for").any(|at| !head[at + 3..].starts_with('<')));
    own.map(|head| name_in(without_parameters(head).trim_start()).to_owned())
        .filter(|name| !name.is_empty())
        .collect()
}

/// A head without the parameters that stand first.
fn without_parameters(head: &str) -> &str {
    let mut depth = 0;
    for (at, byte) in head.bytes().enumerate() {
        match byte {
            b'<' => depth += 1,
            b'>' if at > 0 && head.as_bytes()[at - 1] != b'-' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &head[at + usize::from(byte == b'>')..];
        }
    }
    head
}

/// The last word of the path that a text begins with.
fn name_in(text: &str) -> &str {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
    let path = &text[..end.unwrap_or(text.len())];
    path.rsplit("::").next().unwrap_or_default()
}

#[test]
fn types_with_methods_in_many_files_are_found() {
    let own = [
        "impl Plan {\n}\n",
        "impl<'a, F: Fn() -> u8> Plan<'a, F> {\n}\n",
        "impl<T> crate::plan::Plan\nwhere\n    T: for<'a> Fn(&'a u8),\n{\n}\n",
        "mod inner {\n    impl Plan {\n    }\n}\n",
        "#[cfg(test)]\nmod tests;\nimpl Plan {}\n",
    ];
    for text in own {
        assert_eq!(types_with_methods(text), ["Plan"], "{text}");
    }
    let others = [
        "impl Pass for Plan {\n}\n",
        "unsafe impl Send for Plan {}\n",
        "fn f(\n    plan: u8,\n) -> impl Plan {\n}\n",
        "// impl Plan {\n",
        "#[cfg(test)]\nmod tests {\n    impl Plan {}\n}\n",
    ];
    for text in others {
        assert_eq!(types_with_methods(text), [""; 0], "{text}");
    }
    let paths = ["a", "b", "c", "d", "e"].map(|stem| format!("crates/x/src/{stem}.rs"));
    let sources = || paths.iter().map(String::as_str).zip(own);
    assert_eq!(scattered(sources().skip(1)).len(), 0);
    assert_eq!(
        scattered(sources()),
        ["crates/x/src: expected methods of `Plan` in at most 4 files, found them in 5: a.rs, \
          b.rs, c.rs, d.rs, e.rs"]
    );
    let test = "crates/x/src/tests/f.rs";
    assert_eq!(scattered(sources().skip(1).chain([(test, own[0])])).len(), 0);
}
