//! Quoting of names and values from outside, for messages and pages.

use std::fmt;

/// Most characters of a quoted value.
pub const MAX_QUOTED_CHARS: usize = 200;

/// A text from outside, safe to print. At most [`MAX_QUOTED_CHARS`] characters are shown.
/// Characters that a terminal or page would obey, such as control characters and changes of the
/// writing direction, become `\u{…}`.
///
/// ```
/// use fusestep_tensor::Quoted;
///
/// assert_eq!(Quoted("layer.0.weight").to_string(), "layer.0.weight");
/// assert_eq!(Quoted("a\x1b[2Jb").to_string(), "a\\u{1b}[2Jb");
/// let long = "x".repeat(1_000);
/// assert!(Quoted(&long).to_string().ends_with("… (1000 characters)"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(MAX_QUOTED_CHARS) {
            if is_obeyed(c) {
                write!(f, "\\u{{{:x}}}", u32::from(c))?;
            } else {
                f.write_char(c)?;
            }
        }
        let left = chars.count();
        if left > 0 {
            write!(f, "… ({} characters)", left + MAX_QUOTED_CHARS)?;
        }
        Ok(())
    }
}

/// Whether a terminal or a page acts on a character instead of showing it.
fn is_obeyed(c: char) -> bool {
    let direction = matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    c.is_control() || direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Escapes a whole message of any length: lines and tabs stay, and all other characters that a
/// terminal would obey are escaped.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_obeyed(c) && !matches!(c, '\n' | '\t') {
            safe += &format!("\\u{{{:x}}}", u32::from(c));
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Escapes JSON of any length, which stays the same value. Characters that a terminal would obey
/// are escaped as JSON does, `\u202e`. All of them lie within strings, since `json` is on one line.
pub fn escaped_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        if is_obeyed(c) {
            // None of these characters is beyond the basic plane, where one takes two escapes.
            safe += &format!("\\u{:04x}", u32::from(c));
        } else {
            safe.push(c);
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped_and_long_texts_are_cut() {
        assert_eq!(Quoted("é𝄞").to_string(), "é𝄞");
        assert_eq!(Quoted("a\u{202e}b\n").to_string(), "a\\u{202e}b\\u{a}");
        let exact = "y".repeat(MAX_QUOTED_CHARS);
        assert_eq!(Quoted(&exact).to_string(), exact);
        let long = "é".repeat(MAX_QUOTED_CHARS + 1);
        let shown = Quoted(&long).to_string();
        assert!(shown.ends_with("… (201 characters)"), "{shown}");
        assert_eq!(escaped("a\tb\n\u{1b}[0m\u{2067}"), "a\tb\n\\u{1b}[0m\\u{2067}");
        assert_eq!(escaped_json("\"\u{7f}\u{9b}\u{202e}é𝄞\""), "\"\\u007f\\u009b\\u202eé𝄞\"");
    }
}
