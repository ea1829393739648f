//! One entry out of the text of a module.

/// Beginning of an entry of a module, at the start of a line.
const HEAD: &str = "\n.visible .entry ";

/// End of an entry: the brace that closes its body, alone on its line as no inner one is.
const END: &str = "\n}\n";

/// The module with `entry` alone: all that stands outside of entries but for comments, and that
/// entry. None if the module has no such entry.
///
/// A driver compiles every entry of a text that it loads, used or not.
pub(crate) fn single_entry(module: &str, entry: &str) -> Option<String> {
    let mut text = String::new();
    let mut is_there = false;
    let mut rest = module;
    while let Some(from) = rest.find(HEAD) {
        let (outside, entries) = rest.split_at(from);
        let length = entries.find(END)? + END.len();
        let (this, behind) = entries.split_at(length);
        push_declarations(&mut text, outside);
        let name = this[HEAD.len()..].split('(').next();
        if name == Some(entry) {
            text.push_str(this);
            is_there = true;
        }
        // The line's end also begins what may be the next entry's head.
        rest = &rest[rest.len() - behind.len() - 1..];
    }
    push_declarations(&mut text, rest);
    is_there.then_some(text)
}

/// Adds what is neither a comment, which may name entries that are not there, nor empty.
fn push_declarations(text: &mut String, outside: &str) {
    let lines = outside.lines().map(str::trim_end);
    for line in lines.filter(|line| !line.is_empty() && !line.trim_start().starts_with("//")) {
        text.push_str(line);
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "//\n// Generated\n//\n\n.version 8.1\n.target sm_70\n\n\t// .globl\tone\n\
                          .shared .align 8 .b8 lanes[16];\n\n.visible .entry one(\n\t.param .u64 \
                          one_param_0\n)\n{\n\t{ // an inner block\n\t}\n\tret;\n\n}\n\t// \
                          .globl\tone_more\n.global .b8 table[4];\n.visible .entry \
                          one_more(\n)\n{\n\tret;\n\n}\n.visible .entry last()\n{\n}\n\n";

    #[test]
    fn one_entry_is_left_with_all_that_is_declared() {
        let head = ".version 8.1\n.target sm_70\n.shared .align 8 .b8 lanes[16];\n";
        assert_eq!(
            single_entry(MODULE, "one").unwrap(),
            format!(
                "{head}\n.visible .entry one(\n\t.param .u64 one_param_0\n)\n{{\n\t{{ // an inner \
                 block\n\t}}\n\tret;\n\n}}\n.global .b8 table[4];\n"
            )
        );
        assert_eq!(
            single_entry(MODULE, "one_more").unwrap(),
            format!(
                "{head}.global .b8 table[4];\n\n.visible .entry one_more(\n)\n{{\n\tret;\n\n}}\n"
            )
        );
        assert_eq!(
            single_entry(MODULE, "last").unwrap(),
            format!("{head}.global .b8 table[4];\n\n.visible .entry last()\n{{\n}}\n")
        );
    }

    #[test]
    fn an_entry_that_is_not_there_is_none() {
        for name in ["on", "one_", "", "ones"] {
            assert_eq!(single_entry(MODULE, name), None, "{name}");
        }
        assert_eq!(single_entry(".visible .entry one(", "one"), None);
        assert_eq!(single_entry("\n.visible .entry one(\n{", "one"), None);
    }
}
