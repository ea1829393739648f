//! Pages of measurements, one for each question.

use std::fmt::Write;

use super::Question;
use super::results::{Results, Row, Side};

/// Columns of a line of prose.
const COLUMNS: usize = 100;

/// Rows of one run that answer one question, as a table has them.
pub(super) struct Table<'r> {
    pub(super) results: &'r Results,
    /// Peer of the last column.
    pub(super) beside: &'r str,
    /// Work in the order of the file, each with its rows.
    pub(super) cases: Vec<Case<'r>>,
}

/// One thing that was timed, by everyone who did it.
pub(super) struct Case<'r> {
    pub(super) name: &'r str,
    rows: Vec<&'r Row>,
}

impl<'r> Case<'r> {
    pub(super) fn ours(&self) -> Option<&'r Row> {
        self.rows.iter().copied().find(|row| row.side == Side::Ours)
    }

    pub(super) fn by(&self, name: &str) -> Option<&'r Row> {
        self.rows.iter().copied().find(|row| row.by == name)
    }
}

/// Tables of one question, in the order of the runs.
pub(super) fn tables<'r>(question: &Question, all: &'r [Results]) -> Vec<Table<'r>> {
    let tables = all.iter().filter_map(|results| {
        let beside = results.beside.get(question.slug)?;
        let mut cases: Vec<Case> = Vec::new();
        for row in results.rows.iter().filter(|row| row.question == question.slug) {
            match cases.iter_mut().find(|case| case.name == row.name) {
                Some(case) => case.rows.push(row),
                None => cases.push(Case { name: &row.name, rows: vec![row] }),
            }
        }
        Some(Table { results, beside, cases })
    });
    tables.collect()
}

/// One page: question, answer in short, picture, tables.
pub(super) fn page(question: &Question, all: &[Results]) -> String {
    let tables = tables(question, all);
    let mut page = format!("# {}\n\n", question.title);
    wrap(&mut page, "", question.answer);
    let _ = write!(
        page,
        "\n![{}: times of fusestep, each beside a peer's](../pictures/performance-{}.svg)\n\n",
        question.title, question.slug
    );
    let legend = "Blue is fusestep. Each pair of bars is of one run, on one machine. Of long tables the \
                  first rows are drawn.";
    wrap(&mut page, "", legend);
    for table in &tables {
        page.push('\n');
        section(&mut page, table);
    }
    page.push_str("\n## Further\n\n");
    for (text, link) in question.further {
        wrap(&mut page, "- ", &format!("[{text}]({link})"));
    }
    page
}

fn section(page: &mut String, table: &Table) {
    let results = table.results;
    let _ = write!(page, "## {}\n\n", results.title);
    write_table(page, table);
    page.push('\n');
    let machine = format!("Machine: {}; {}.", processor(results), results.machine);
    wrap(page, "- ", &machine);
    let commit = results.commit.as_ref();
    let commit = commit.map_or_else(|| "not noted".to_owned(), |commit| format!("`{commit}`"));
    wrap(page, "- ", &format!("Date: {}.", results.date));
    wrap(page, "- ", &format!("Commit: {commit}."));
    wrap(page, "- ", &format!("Numbers: {}.", results.values));
    let _ = write!(page, "\n```sh\n{}\n```\n", results.command.join("\n"));
}

/// The processor and how many cores of it there are.
pub(super) fn processor(results: &Results) -> String {
    match results.cores {
        Some(cores) => format!("{}, {cores} cores", results.processor),
        None => results.processor.clone(),
    }
}

/// A case a row; who did it a column, ours first.
fn write_table(page: &mut String, table: &Table) {
    let rows = || table.cases.iter().flat_map(|case| &case.rows);
    let mut names: Vec<(&str, Side)> = Vec::new();
    for side in [Side::Ours, Side::Peer] {
        for row in rows().filter(|row| row.side == side) {
            if !names.contains(&(&row.by, side)) {
                names.push((&row.by, side));
            }
        }
    }
    let has_range =
        rows().any(|row| row.side == Side::Ours && row.median.is_some() && is_range(row));
    let mut header = vec!["Timed".to_owned()];
    for (at, (name, _)) in names.iter().enumerate() {
        header.push((*name).to_owned());
        if at == 0 && has_range {
            header.extend(["least", "most"].map(|end| format!("{name}, {end}")));
        }
    }
    header.push(format!("times as fast as {}", table.beside));
    let _ = writeln!(page, "| {} |", header.join(" | "));
    let _ = writeln!(page, "|---|{}", "---:|".repeat(header.len() - 1));
    for case in &table.cases {
        let mut cells = vec![case.name.to_owned()];
        for (at, (name, _)) in names.iter().enumerate() {
            let row = case.by(name);
            cells.push(row.map_or_else(String::new, |row| time(row, row.value())));
            if at == 0 && has_range {
                let ranged = row.filter(|row| is_range(row));
                for end in [ranged.and_then(|row| row.low), ranged.and_then(|row| row.high)] {
                    let cell = row.zip(end).map(|(row, value)| time(row, value));
                    cells.push(cell.unwrap_or_default());
                }
            }
        }
        cells.push(times_as_fast(case, table.beside).map_or_else(String::new, ratio));
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
}

fn is_range(row: &Row) -> bool {
    row.low.is_some() && row.high.is_some()
}

/// The peer's time over ours.
pub(super) fn times_as_fast(case: &Case, beside: &str) -> Option<f64> {
    Some(case.by(beside)?.seconds() / case.ours()?.seconds())
}

/// A time in its row's unit, as one word.
pub(super) fn time(row: &Row, value: f64) -> String {
    format!("{}\u{a0}{}", grouped(value), row.unit.name())
}

/// A ratio with about three digits.
pub(super) fn ratio(times: f64) -> String {
    match times {
        ..10.0 => format!("{times:.2}"),
        ..100.0 => format!("{times:.1}"),
        _ => grouped(times.round()),
    }
}

/// A number as it was noted, with commas between thousands.
fn grouped(value: f64) -> String {
    let text = value.to_string();
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + rest
}

/// Appends a paragraph in lines that are no wider than a page's; lines behind the first are
/// indented as a list's.
fn wrap(page: &mut String, begin: &str, text: &str) {
    let indent = " ".repeat(begin.len());
    let mut line = begin.to_owned();
    for word in text.split(' ') {
        let is_first = line == begin || line == indent;
        if !is_first && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            let _ = writeln!(page, "{line}");
            line.clone_from(&indent);
        } else if !is_first {
            line.push(' ');
        }
        line.push_str(word);
    }
    let _ = writeln!(page, "{line}");
}

#[cfg(test)]
mod tests {
    use super::super::results::parse;
    use super::super::tests::FILE;
    use super::*;

    #[test]
    fn a_cell_has_one_number_and_the_last_one_compares() {
        let all = [parse(FILE).unwrap()];
        let question = &super::super::QUESTIONS[1];
        let page = page(question, &all);
        let table: Vec<&str> = page.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(
            table,
            [
                "| Timed | fusestep | fusestep, least | fusestep, most | PyTorch, fused | times as fast as PyTorch, fused |",
                "|---|---:|---:|---:|---:|---:|",
                "| ResNet-50 | 20\u{a0}ms | 19.5\u{a0}ms | 21\u{a0}ms | 0.05\u{a0}s | 2.50 |",
                "| GPT-2 | 1,000\u{a0}µs |  |  |  |  |",
            ]
        );
        for line in [
            "- Machine: a processor, 2 cores; a virtual machine.",
            "- Date: 2026-11-25.",
            "- Commit: `abc`.",
            "- Numbers: medians.",
            "bench --peers",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in {page}");
        }
    }

    #[test]
    fn numbers_are_as_noted_and_ratios_have_three_digits() {
        assert_eq!([1234567.5, 999.0, 0.05].map(grouped), ["1,234,567.5", "999", "0.05"]);
        assert_eq!([1.314, 23.46, 2529.7].map(ratio), ["1.31", "23.5", "2,530"]);
    }

    #[test]
    fn long_paragraphs_are_wrapped() {
        let mut page = String::new();
        wrap(&mut page, "- ", "word ".repeat(50).trim_end());
        assert!(page.lines().count() > 1);
        assert!(page.lines().all(|line| line.chars().count() <= COLUMNS), "{page}");
        assert!(page.lines().skip(1).all(|line| line.starts_with("  word")), "{page}");
    }
}
