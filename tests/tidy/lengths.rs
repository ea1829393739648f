//! Files end at 500 lines, functions at 70.

use crate::source::{closing_brace, code_only, line_of, words};

const FILE_LINES: usize = 500;
const FUNCTION_LINES: usize = 70;

/// What is too long in a file.
pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let lines = text.lines().count();
    if lines > FILE_LINES {
        found.push(format!("{path}: expected at most {FILE_LINES} lines, found {lines}; split it"));
    }
    let code = code_only(text);
    let functions = if path.ends_with(".rs") {
        rust_functions(&code)
    } else {
        cpp_functions(&without_directives(&code))
    };
    for (first, last) in functions {
        let lines = last - first + 1;
        if lines > FUNCTION_LINES {
            found.push(format!(
                "{path}:{first}: expected functions of at most {FUNCTION_LINES} lines, found {lines}; split it"
            ));
        }
    }
    found
}

/// First and last line of every function with a body.
fn rust_functions(code: &str) -> Vec<(usize, usize)> {
    let mut functions = Vec::new();
    for start in words(code, "fn") {
        if let Some(open) = body(code, start) {
            let end = closing_brace(code, open);
            functions.push((line_of(code, start), line_of(code, end - 1)));
        }
    }
    functions
}

/// The brace that opens the body of the function whose `fn` is at `start`; none for declarations
/// and function types.
fn body(code: &str, start: usize) -> Option<usize> {
    let mut depth = 0;
    for (offset, byte) in code.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' if depth == 0 => return None,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return Some(offset),
            b';' | b',' | b'=' if depth == 0 && !is_in_generics(code, start, offset) => {
                return None;
            }
            _ => {}
        }
    }
    None
}

/// Whether more angle brackets have been opened than closed; `->` closes none.
fn is_in_generics(code: &str, start: usize, end: usize) -> bool {
    let text = code[start..end].replace("->", "");
    text.matches('<').count() > text.matches('>').count() || text.contains("where")
}

/// First and last line of every function body outside of other functions.
fn cpp_functions(code: &str) -> Vec<(usize, usize)> {
    let mut functions = Vec::new();
    let (mut at, mut header) = (0, 0);
    while at < code.len() {
        match code.as_bytes()[at] {
            b';' | b'}' => header = at + 1,
            b'{' if opens_function(&code[header..at]) => {
                let end = closing_brace(code, at);
                let start = header + code[header..at].len() - code[header..at].trim_start().len();
                functions.push((line_of(code, start), line_of(code, end - 1)));
                at = end;
                header = end;
                continue;
            }
            b'{' => header = at + 1,
            _ => {}
        }
        at += 1;
    }
    functions
}

/// Whether the text before a brace is that of a function, not of a type, namespace, initialiser or
/// linkage block.
fn opens_function(header: &str) -> bool {
    let header = header.trim();
    let type_like = ["namespace", "enum", "union"];
    let ends = [")", "const", "noexcept", "override"];
    header.contains('(')
        && !type_like.iter().any(|word| header.starts_with(word))
        && ends.iter().any(|end| header.ends_with(end))
}

/// Preprocessor lines blanked, with the lines that continue them.
fn without_directives(code: &str) -> String {
    let mut continues = false;
    let lines = code.lines().map(|line| {
        let directive = continues || line.trim_start().starts_with('#');
        continues = directive && line.trim_end().ends_with('\\');
        if directive { "" } else { line }
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn long_files_and_functions_are_found() {
    let body = |lines: usize| "    x();\n".repeat(lines);
    let rust = |lines| {
        format!(
            "trait T {{ fn f(&self); }}\nfn g<A: Fn(u32) -> [u8; 3], B>(a: A, b: B)\nwhere A: Copy,\n{{\n{}}}\n",
            body(lines)
        )
    };
    assert_eq!(violations("a.rs", &rust(66)), Vec::<String>::new());
    assert_eq!(
        violations("a.rs", &rust(67)),
        ["a.rs:2: expected functions of at most 70 lines, found 71; split it"]
    );
    let cpp = |lines| {
        format!(
            "#define F(x) {{ \\\n  g() }}\nnamespace a {{\nstruct S {{ int x = 0; }};\nextern \"C\" __global__ void f(int a)\n{{\n{}}}\n}}\n",
            body(lines)
        )
    };
    assert_eq!(violations("a.cu", &cpp(67)), Vec::<String>::new());
    assert_eq!(
        violations("a.cu", &cpp(68)),
        ["a.cu:5: expected functions of at most 70 lines, found 71; split it"]
    );
    assert_eq!(
        violations("b.hpp", &"\n".repeat(501)),
        ["b.hpp: expected at most 500 lines, found 501; split it"]
    );
    let types = "struct S { f: fn(u32) -> u32, g: Box<dyn Fn()> }\nfn h() {}\n";
    assert_eq!(rust_functions(types), [(2, 2)]);
}
