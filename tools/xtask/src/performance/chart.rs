//! Bars of a question: our time and a peer's, pair by pair.

use fusestep_pictures::{Bar, Bars, Group, Place, Side};

use super::Question;
use super::page::{Table, processor, ratio, time, times_as_fast};

/// Pairs that are drawn of each table; its other rows are read there.
const MOST_PAIRS: usize = 4;

/// The picture of a question's tables.
pub(super) fn picture(question: &Question, tables: &[Table]) -> String {
    let mut bars = Bars { title: question.title, groups: tables.iter().map(group).collect() };
    let gap = if bars.is_broken() { " A bar with a gap is longer than drawn." } else { "" };
    if let Some(last) = bars.groups.last_mut() {
        last.notes.push(format!("Blue is ours.{gap}"));
    }
    bars.svg(Place::File)
}

/// The pairs of a table.
fn group(table: &Table) -> Group {
    let pairs = table.cases.iter().filter_map(|case| {
        let times = times_as_fast(case, table.beside)?;
        let (ours, theirs) = (case.ours()?, case.by(table.beside)?);
        let our_bar = Bar {
            name: format!("{}: {}", case.name, ours.by),
            units: 1.0,
            note: time(ours, ours.value()),
            side: Side::Ours,
        };
        let note = format!("{}, {} times", time(theirs, theirs.value()), ratio(times));
        Some([our_bar, Bar { name: theirs.by.clone(), units: times, note, side: Side::Theirs }])
    });
    let results = table.results;
    Group {
        title: format!("{} ({}), {}", results.title, processor(results), results.date),
        bars: pairs.take(MOST_PAIRS).flatten().collect(),
        notes: results.command.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::page::tables;
    use super::super::results::parse;
    use super::super::tests::FILE;
    use super::*;

    fn drawn(file: &str) -> String {
        let all = [parse(file).unwrap()];
        let question = &super::super::QUESTIONS[1];
        picture(question, &tables(question, &all))
    }

    /// Colours of bars, from above; a bar with a gap is two.
    fn bars(svg: &str) -> Vec<&str> {
        let fills =
            svg.split("<polygon ").skip(1).map(|rest| rest.split("fill=\"").nth(1).unwrap());
        fills.map(|rest| rest.split('"').next().unwrap()).collect()
    }

    #[test]
    fn bars_are_pairs_in_two_colours() {
        let svg = drawn(FILE);
        // GPT-2 has no peer, and so no pair.
        let [ours, theirs] = bars(&svg)[..] else { panic!("{svg}") };
        assert_eq!([ours, theirs].map(str::to_lowercase), ["#4878a8", "#c27c3e"]);
        assert!(svg.contains("2.50 times") && !svg.contains("with a gap"), "{svg}");
        let svg = drawn(&FILE.replace("0.05", "50"));
        assert!(bars(&svg).len() == 3 && svg.contains("2,500 times"), "{svg}");
        assert!(svg.contains("A bar with a gap"), "{svg}");
    }

    #[test]
    fn long_tables_are_drawn_in_part() {
        let pair = |at: usize| {
            ["ours\", \"by\": \"fusestep", "peer\", \"by\": \"PyTorch, fused"].map(|side| {
                format!(
                    "{{ \"question\": \"large\", \"name\": \"{at}\", \"side\": \"{side}\", \
                     \"unit\": \"s\", \"median\": 1 }},"
                )
            })
        };
        let rows: String = (0..2 * MOST_PAIRS).flat_map(pair).collect();
        let file = FILE.replace("\"rows\": [", &format!("\"rows\": [{rows}"));
        assert_eq!(bars(&drawn(&file)).len(), 2 * MOST_PAIRS);
    }
}
