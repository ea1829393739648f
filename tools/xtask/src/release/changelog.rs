//! The section of a version in CHANGELOG.md: four parts of one-line entries, then how to upgrade.

/// Parts of a section, in order.
const PARTS: [&str; 4] = ["Breaking", "New", "Faster", "Fixed"];

/// The one entry of a part that has none.
const NOTHING: &str = "- Nothing.";

/// Heading at the end of a section that breaks programs, with a table of before and after.
const UPGRADING: &str = "Upgrading";

/// Header of that table.
const BEFORE_AND_AFTER: &str = "| before | after |";

/// Words behind a version that has no day yet.
pub(super) const UNRELEASED: &str = "(not yet released)";

/// Columns of an entry.
const COLUMNS: usize = 100;

/// What the section of a version lacks.
pub(super) fn refusals(text: &str, version: &str) -> Vec<String> {
    let Some((_, section)) = section(text, version) else {
        return vec![format!("CHANGELOG.md: expected a section `## {version}`, found none")];
    };
    let mut found = Vec::new();
    let mut parts =
        section.split("\n### ").skip(1).map(|part| part.split_once('\n').unwrap_or((part, "")));
    let headings: Vec<&str> = parts.clone().map(|(heading, _)| heading).collect();
    let breaking = parts.clone().find(|(heading, _)| *heading == PARTS[0]);
    let breaks = breaking.is_some_and(|(_, part)| part.trim() != NOTHING);
    let upgrading = breaks.then_some(UPGRADING);
    let expected: Vec<&str> = PARTS.iter().copied().chain(upgrading).collect();
    if headings != expected {
        found.push(format!(
            "CHANGELOG.md: {version}: expected the parts {expected:?}, found {headings:?}"
        ));
    }
    for (heading, part) in parts.clone().filter(|(heading, _)| PARTS.contains(heading)) {
        let lines: Vec<&str> = part.lines().filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            found.push(format!(
                "CHANGELOG.md: {version}: {heading}: expected entries or `{NOTHING}`, found none"
            ));
        }
        for line in lines {
            if !line.starts_with("- ") || line.chars().count() > COLUMNS {
                let most = format!("an entry `- …` of one line, at most {COLUMNS} columns");
                found.push(format!(
                    "CHANGELOG.md: {version}: {heading}: expected {most}, found {line:?}"
                ));
            }
        }
    }
    let upgrading = parts.find(|(heading, _)| *heading == UPGRADING);
    if breaks && upgrading.is_none_or(|(_, part)| !part.contains(BEFORE_AND_AFTER)) {
        found.push(format!(
            "CHANGELOG.md: {version}: {UPGRADING}: expected a table `{BEFORE_AND_AFTER}`, found none"
        ));
    }
    found
}

/// Whether the version has no day yet.
pub(super) fn is_unreleased(text: &str, version: &str) -> bool {
    section(text, version).is_some_and(|(heading, _)| heading.ends_with(UNRELEASED))
}

/// Heading and body of a version's section.
fn section<'t>(text: &'t str, version: &str) -> Option<(&'t str, &'t str)> {
    let mut sections =
        text.split("\n## ").skip(1).map(|part| part.split_once('\n').unwrap_or((part, "")));
    sections.find(|(heading, _)| heading.split(' ').next() == Some(version))
}
