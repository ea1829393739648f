//! Blocks of code of a page, and what comments above them say.

/// A block between fences.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Fence<'p> {
    /// The number of the line that opens it, from 1.
    pub(crate) line: usize,
    /// The words behind the opening fence: `sh run`.
    pub(crate) info: &'p str,
    pub(crate) lines: Vec<&'p str>,
    /// The comments that stand on the lines right above: `<!-- with: --epochs 1 -->`.
    pub(crate) notes: Vec<&'p str>,
}

impl Fence<'_> {
    /// Whether a comment above consists of this word.
    pub(crate) fn is(&self, word: &str) -> bool {
        self.notes.contains(&word)
    }
}

/// All blocks of a page, in order.
pub(crate) fn fences(page: &str) -> Vec<Fence<'_>> {
    let mut found = Vec::new();
    let mut notes = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let note = line.strip_prefix("<!--").and_then(|rest| rest.strip_suffix("-->"));
        if let Some(info) = line.trim_start().strip_prefix("```") {
            let inside = lines.by_ref().map(|(_, line)| line);
            let inside = inside.take_while(|line| line.trim_start() != "```");
            let (line, lines) = (at + 1, inside.collect());
            found.push(Fence { line, info: info.trim(), lines, notes: std::mem::take(&mut notes) });
        } else if let Some(note) = note {
            notes.push(note.trim());
        } else {
            notes.clear();
        }
    }
    found
}

/// The first line of a block that is not in an output, in the block's order; a line `...` stands
/// for any lines.
pub(crate) fn not_printed<'b>(block: &[&'b str], output: &str) -> Option<&'b str> {
    let mut output = output.lines().map(str::trim);
    let mut expected = block.iter().map(|line| line.trim());
    expected.find(|line| !line.is_empty() && *line != "..." && !output.any(|found| found == *line))
}

#[test]
fn blocks_and_the_comments_above_them_are_found() {
    let page = "a\n<!-- with: --epochs 1 -->\n<!-- fails -->\n```sh run\nb\nc\n```\n<!-- x -->\n\n```text\n```\n";
    let found = fences(page);
    let [first, second] = &found[..] else { panic!("{found:?}") };
    assert_eq!((first.line, first.info, &first.lines[..]), (4, "sh run", &["b", "c"][..]));
    assert_eq!((&first.notes[..], first.is("fails")), (&["with: --epochs 1", "fails"][..], true));
    assert_eq!((second.line, second.is("x"), second.lines.len()), (10, false, 0));
}

#[test]
fn lines_that_are_not_printed_in_order_are_found() {
    assert_eq!(not_printed(&["a", "...", "c"], "a\nb\n  c\n"), None);
    assert_eq!(not_printed(&["c", "a"], "a\nb\nc\n"), Some("a"));
}
