//! Source text reduced to what the rules are about.

/// The text with comments, strings and character literals blanked, line for line, so that braces
/// and keywords in it are code.
///
/// Knows Rust and C++ alike: nested block comments are Rust's, and a quote that opens a lifetime
/// closes nothing.
pub(crate) fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = match literal_end(&chars, at) {
            Some(end) => end,
            None => {
                code.push(chars[at]);
                at += 1;
                continue;
            }
        };
        for &c in &chars[at..end] {
            code.push(if c == '\n' { '\n' } else { ' ' });
        }
        at = end;
    }
    code
}

/// The end of the comment, string or character literal that starts at `at`, if one does.
fn literal_end(chars: &[char], at: usize) -> Option<usize> {
    let starts = |pattern: &str| {
        chars[at..].iter().copied().zip(pattern.chars()).filter(|(a, b)| a == b).count()
            == pattern.len()
    };
    if starts("//") {
        return Some(find(chars, at, '\n'));
    }
    if starts("/*") {
        return Some(block_comment_end(chars, at));
    }
    let part = |at: usize| chars[at].is_alphanumeric() || chars[at] == '_';
    // The `b` of a byte literal belongs to the literal.
    let byte = at > 0 && chars[at - 1] == 'b' && !(at > 1 && part(at - 2));
    let inside_a_word = at > 0 && part(at - 1) && !byte;
    match chars[at] {
        '"' => Some(quoted_end(chars, at)),
        'r' if !inside_a_word => raw_string_end(chars, at),
        '\'' if !inside_a_word => character_end(chars, at),
        _ => None,
    }
}

fn find(chars: &[char], from: usize, wanted: char) -> usize {
    let found = chars[from..].iter().position(|&c| c == wanted);
    found.map_or(chars.len(), |offset| from + offset)
}

fn block_comment_end(chars: &[char], at: usize) -> usize {
    let (mut depth, mut at) = (0, at);
    while at + 1 < chars.len() {
        match (chars[at], chars[at + 1]) {
            ('/', '*') => depth += 1,
            ('*', '/') => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    chars.len()
}

fn quoted_end(chars: &[char], at: usize) -> usize {
    let mut at = at + 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(chars.len())
}

fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
    if chars.get(at + 1 + hashes) != Some(&'"') {
        return None;
    }
    let mut at = at + 2 + hashes;
    while at < chars.len() {
        let closing = chars[at..].iter().skip(1).take_while(|&&c| c == '#').count();
        if chars[at] == '"' && closing >= hashes {
            return Some(at + 1 + hashes);
        }
        at += 1;
    }
    Some(chars.len())
}

/// `'x'` and `'\n'`, but not the lifetime `'x`.
fn character_end(chars: &[char], at: usize) -> Option<usize> {
    match (chars.get(at + 1)?, chars.get(at + 2)?) {
        ('\\', _) => Some((find(chars, at + 3, '\'') + 1).min(chars.len())),
        (_, '\'') => Some(at + 3),
        _ => None,
    }
}

/// The index behind the brace that closes the one at `open`; both are byte indices into code.
pub(crate) fn closing_brace(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (offset, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return offset + 1,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

/// The line, counted from 1, of a byte index.
pub(crate) fn line_of(code: &str, index: usize) -> usize {
    1 + code.as_bytes()[..index].iter().filter(|&&b| b == b'\n').count()
}

/// Byte indices at which `word` stands in `code` as a whole word.
pub(crate) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let part = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let bytes = code.as_bytes();
    let found = code.match_indices(word).map(|(index, _)| index);
    found.filter(move |&index| {
        let before = index.checked_sub(1).and_then(|before| bytes.get(before));
        !part(before) && !part(bytes.get(index + word.len()))
    })
}

#[test]
fn comments_strings_and_characters_are_blanked() {
    for (text, expected) in [
        ("a // {\nb", "a     \nb"),
        ("a /* { /* } */ { */ b", "a                   b"),
        ("f(\"{ \\\" }\")", "f(        )"),
        ("f(r#\"{ \" }\"#)", "f(          )"),
        ("f('{', '\\'', '\\u{7b}')", "f(   ,     ,         )"),
        ("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}"),
        ("1'000'000", "1'000'000"),
        ("[b'{', br\"{\"]", "[b   , b    ]"),
    ] {
        assert_eq!(code_only(text), expected, "{text}");
    }
}

#[test]
fn braces_lines_and_words_are_found() {
    let code = "fn f() {\n{ }\n}\nunsafe_fn unsafe";
    assert_eq!(closing_brace(code, 7), 14);
    assert_eq!(line_of(code, 9), 2);
    assert_eq!(words(code, "unsafe").collect::<Vec<_>>(), [25]);
}
