//! `performance`: pages and pictures of docs/performance, drawn from the measurements of
//! `benches/results`, one page for each question that users ask.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::folders::files_below;
use crate::workspace_root;

mod chart;
mod page;
mod results;

use results::Results;

/// Folders of the pages and of their pictures.
const PAGES: &str = "docs/performance";
const PICTURES: &str = "docs/pictures";

/// A page's question.
struct Question {
    /// Name of its page, and of its rows in the measurements.
    slug: &'static str,
    title: &'static str,
    /// Words before the numbers; they name none, so that they stay true.
    answer: &'static str,
    /// Pages to go on with: text and link.
    further: &'static [(&'static str, &'static str)],
}

const QUESTIONS: [Question; 7] = [
    Question {
        slug: "small",
        title: "My model is small",
        answer: "Small models have tensors that lie in the caches. A step then takes as long as its calls, \
                 and one launch updates all tensors.",
        further: &[
            ("Small models: what to set", "../guides/small-models.md"),
            ("Measurements and what was tried", "../measurements.md"),
        ],
    },
    Question {
        slug: "large",
        title: "My model is large",
        answer: "Large models wait for memory. A step takes about as long as streaming the bytes of its \
                 lists, and each list is read and written once.",
        further: &[
            ("Mixed precision: fewer bytes for each parameter", "../guides/mixed-precision.md"),
            ("Measurements and what was tried", "../measurements.md"),
        ],
    },
    Question {
        slug: "candle",
        title: "In candle",
        answer: "candle's own optimizers make several tensors for each parameter and step. fusestep updates \
                 candle's variables in place.",
        further: &[
            ("In candle: start", "../start/candle.md"),
            ("Measurements and what was tried", "../measurements.md"),
        ],
    },
    Question {
        slug: "pytorch",
        title: "From PyTorch",
        answer: "PyTorch keeps its tensors and lends them for each step. Its fused optimizers are the nearest \
                 peers, and its default ones are what most programs use.",
        further: &[
            ("In PyTorch: start", "../start/pytorch.md"),
            ("Measurements and what was tried", "../measurements.md"),
        ],
    },
    Question {
        slug: "ranks",
        title: "Many processes",
        answer: "Ranks on one machine share memory. Their step reduces gradients, updates parameters and \
                 gathers them; under ZeRO each rank updates its share.",
        further: &[
            ("Many ranks: what to set", "../guides/many-ranks.md"),
            ("Collectives: how ranks wait", "../collectives.md"),
            ("Measurements and what was tried", "../measurements.md"),
        ],
    },
    Question {
        slug: "gpu",
        title: "On a GPU",
        answer: "Steps on a card wait for its memory, too. Times are the device's own, without the host's \
                 part of a launch.",
        further: &[
            ("On a GPU: what to set", "../guides/gpu.md"),
            ("Proof on a GPU: tests, sanitizers and times", "../gpu.md"),
        ],
    },
    Question {
        slug: "saves",
        title: "Saves",
        answer: "Saves behind training copy the state and write it while steps go on. Training loses the \
                 copy's time and what writing takes from its cores.",
        further: &[
            ("Save and resume: what to set", "../guides/save-and-resume.md"),
            ("Measurements and what was tried", "../measurements.md"),
        ],
    },
];

/// Writes the pages and pictures anew; `--check` says which differ from the measurements instead.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = workspace_root();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => write(&root),
        ["--check"] => {
            let found = stale(&root)?;
            ensure!(
                found.is_empty(),
                "`cargo xtask performance` mends pages\n{}",
                found.join("\n")
            );
            println!("performance: pages and pictures are those of {}", results::FOLDER);
            Ok(())
        }
        _ => bail!("expected `performance [--check]`, found {arguments:?}"),
    }
}

/// Each file that is drawn, below the root, and its text.
fn drawn(all: &[Results]) -> Vec<(PathBuf, String)> {
    let files = QUESTIONS.iter().flat_map(|question| {
        let picture = format!("{PICTURES}/performance-{}.svg", question.slug);
        let tables = page::tables(question, all);
        [
            (format!("{PAGES}/{}.md", question.slug).into(), page::page(question, all)),
            (picture.into(), chart::picture(question, &tables)),
        ]
    });
    files.collect()
}

fn write(root: &Path) -> Result<()> {
    let all = results::read(&root.join(results::FOLDER))?;
    for folder in [PAGES, PICTURES] {
        fs::create_dir_all(root.join(folder))?;
    }
    for (path, text) in drawn(&all) {
        let path = root.join(path);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Pages, pictures and places of the README that are not what the measurements say.
fn stale(root: &Path) -> Result<Vec<String>> {
    let all = results::read(&root.join(results::FOLDER))?;
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let mut found = differing(root, &all)?;
    for question in &QUESTIONS {
        if page::tables(question, &all).is_empty() {
            let (slug, folder) = (question.slug, results::FOLDER);
            found.push(format!("{folder}: expected rows of the question `{slug}`, found none"));
        }
    }
    let peers = serde_json::from_str(&read("docs/pictures/peers.json"))
        .context("docs/pictures/peers.json")?;
    found.extend(wrong_first_page(&read("README.md"), &peers, &all)?);
    Ok(found)
}

/// Pages and pictures that are not drawn from these measurements.
fn differing(root: &Path, all: &[Results]) -> Result<Vec<String>> {
    let drawn = drawn(all);
    let mut found = Vec::new();
    for (path, text) in &drawn {
        if fs::read_to_string(root.join(path)).ok().as_ref() != Some(text) {
            let (path, folder) = (path.display(), results::FOLDER);
            found.push(format!("{path}: expected the numbers of {folder}, found others"));
        }
    }
    for path in files_below(&root.join(PAGES))? {
        let path = path.strip_prefix(root)?;
        if !drawn.iter().any(|(own, _)| own == path) {
            found.push(format!(
                "{}: expected the page of a question, found another",
                path.display()
            ));
        }
    }
    Ok(found)
}

/// Bars of the first page's picture: a name there, that of the measurements, and words around the
/// number in the picture's description.
const BARS: [(&str, &str, [&str; 2]); 6] = [
    ("ceiling", "as many bytes streamed", ["as many bytes streamed ", ", "]),
    ("ours", "fusestep", ["fusestep ", ", "]),
    ("fusestep through candle", "fusestep through candle", ["through candle ", ", "]),
    ("PyTorch AdamW, fused", "PyTorch, fused", ["PyTorch ", " fused and "]),
    ("PyTorch AdamW, default", "PyTorch, default", ["", " by default, "]),
    ("candle AdamW", "candle", ["candle ", ""]),
];

/// Differences between the first page, the numbers of its picture, and the run that both are of.
fn wrong_first_page(readme: &str, peers: &Value, all: &[Results]) -> Result<Vec<String>> {
    let run = all.iter().find(|run| run.title == FIRST_PAGE);
    let run = run.with_context(|| format!("expected a run with the title {FIRST_PAGE:?}"))?;
    let mut found = Vec::new();
    let mut description = "Milliseconds of a step: ".to_owned();
    for (bar, by, [before, behind]) in BARS {
        let row = run.rows.iter().find(|row| row.by == by);
        let row = row.with_context(|| format!("{FIRST_PAGE}: expected a row by {by}"))?;
        let drawn = match bar {
            "ceiling" => peers["ceiling_ns"].as_f64(),
            "ours" => peers["ns_per_step"].as_f64(),
            _ => {
                let mut peers = peers["peers"].as_array().into_iter().flatten();
                peers.find(|peer| peer["name"] == bar).and_then(|peer| peer["ns_per_step"].as_f64())
            }
        };
        let ms = 1e3 * row.seconds();
        if drawn.is_none_or(|ns| (ns / 1e6 - ms).abs() > 1e-6) {
            found.push(format!(
                "docs/pictures/peers.json: {bar}: expected {ms} ms, found {drawn:?}"
            ));
        }
        let shown = if ms < 100.0 { format!("{ms:.1}") } else { format!("{ms:.0}") };
        description += &format!("{before}{shown}{behind}");
    }
    for (key, expected) in [
        ("processor", &run.processor),
        ("date", &run.date),
        ("command", run.command.first().context("expected a command of the run")?),
    ] {
        if peers[key].as_str() != Some(expected) {
            let other = &peers[key];
            found.push(format!(
                "docs/pictures/peers.json: {key}: expected {expected:?}, found {other}"
            ));
        }
    }
    let readme = readme.split_whitespace().collect::<Vec<_>>().join(" ");
    let picture = format!("![{description}](docs/pictures/peers.svg)");
    let when = format!("on an {} , {}", run.processor, run.date).replace(" ,", ",");
    for text in [picture, when] {
        if !readme.contains(&text) {
            found.push(format!("README.md: expected {text:?}, found no such text"));
        }
    }
    Ok(found)
}

/// Title of the run that the first page's picture shows.
const FIRST_PAGE: &str = "AdamW on ResNet-50, beside PyTorch and candle";

#[cfg(test)]
mod tests {
    use super::*;
    use results::parse;

    /// A run as the tests of this module's parts have it.
    pub(super) const FILE: &str = r#"{
      "title": "a title", "machine": "a virtual machine", "processor": "a processor", "cores": 2,
      "date": "2026-11-25", "commit": "abc", "command": ["bench --peers"], "values": "medians",
      "beside": { "large": "PyTorch, fused" },
      "rows": [
        { "question": "large", "name": "ResNet-50", "side": "ours", "by": "fusestep", "unit": "ms", "median": 20, "low": 19.5, "high": 21, "runs": 3 },
        { "question": "large", "name": "ResNet-50", "side": "peer", "by": "PyTorch, fused", "unit": "s", "low": 0.05 },
        { "question": "large", "name": "GPT-2", "side": "ours", "by": "fusestep", "unit": "µs", "high": 1000 }
      ]
    }"#;

    #[test]
    fn pages_pictures_and_the_first_page_are_those_of_the_measurements() {
        let found = stale(&workspace_root()).unwrap();
        assert!(found.is_empty(), "`cargo xtask performance` mends pages\n{}", found.join("\n"));
    }

    #[test]
    fn pages_that_were_changed_or_belong_to_no_question_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join(results::FOLDER)).unwrap();
        fs::write(root.join(results::FOLDER).join("a.json"), FILE).unwrap();
        write(root).unwrap();
        let all = results::read(&root.join(results::FOLDER)).unwrap();
        assert_eq!(differing(root, &all).unwrap(), Vec::<String>::new());
        fs::write(root.join(PAGES).join("large.md"), "20 ms\n").unwrap();
        fs::write(root.join(PAGES).join("huge.md"), "").unwrap();
        fs::remove_file(root.join(PICTURES).join("performance-gpu.svg")).unwrap();
        assert_eq!(
            differing(root, &all).unwrap(),
            [
                "docs/performance/large.md: expected the numbers of benches/results, found others",
                "docs/pictures/performance-gpu.svg: expected the numbers of benches/results, found others",
                "docs/performance/huge.md: expected the page of a question, found another",
            ]
        );
    }

    #[test]
    fn a_run_that_says_too_little_is_refused_and_the_place_is_named() {
        for (from, to, expected) in [
            (
                "\"large\", \"name\": \"GPT-2\"",
                "\"huge\", \"name\": \"GPT-2\"",
                "rows[2], GPT-2 by fusestep: question: expected one of",
            ),
            (
                ", \"high\": 1000",
                "",
                "rows[2], GPT-2 by fusestep: expected `median`, `low` or `high`",
            ),
            (
                "\"median\": 20",
                "\"median\": 22",
                "expected `low` ≤ `median` ≤ `high`, found [19.5, 22.0, 21.0]",
            ),
            ("\"median\": 20", "\"median\": -20", "expected positive times"),
            ("\"runs\": 3", "\"runs\": 0", "runs: expected at least 1"),
            ("2026-11-25", "25 Nov", "date: expected one like 2026-11-25, found \"25 Nov\""),
            ("\"GPT-2\"", "\"ResNet-50\"", "rows[2]: expected ResNet-50 by fusestep once"),
            ("{ \"large\":", "{ \"small\":", "beside: expected a peer for the question `large`"),
            (
                "{ \"large\": \"PyTorch, fused\"",
                "{ \"large\": \"Apex\"",
                "beside: expected a peer's row by \"Apex\" for `large`",
            ),
            ("\"bench --peers\"", "", "command: expected at least one line"),
            ("\"unit\": \"µs\"", "\"unit\": \"h\"", "unknown variant `h`"),
            ("\"cores\": 2", "\"core\": 2", "unknown field `core`"),
        ] {
            assert!(FILE.contains(from), "{from}");
            let error = parse(&FILE.replace(from, to)).unwrap_err();
            assert!(format!("{error:#}").contains(expected), "{from}: {error:#}");
        }
    }

    #[test]
    fn a_range_alone_speaks_for_the_peer() {
        let file = FILE
            .replace("\"median\": 20, ", "")
            .replace("\"low\": 0.05", "\"low\": 0.05, \"high\": 0.06");
        let run = parse(&file).unwrap();
        assert_eq!([run.rows[0].value(), run.rows[1].value()], [21.0, 0.05]);
    }

    #[test]
    fn a_first_page_with_other_numbers_is_found() {
        let root = workspace_root();
        let all = results::read(&root.join(results::FOLDER)).unwrap();
        let readme = fs::read_to_string(root.join("README.md")).unwrap();
        let text = fs::read_to_string(root.join("docs/pictures/peers.json")).unwrap();
        let peers: Value = serde_json::from_str(&text).unwrap();
        let found = |readme: &str, peers: &Value| wrong_first_page(readme, peers, &all).unwrap();
        assert_eq!(found(&readme, &peers), Vec::<String>::new());
        assert_eq!(
            found(&readme.replace("through candle 20.6", "through candle 20.5"), &peers).len(),
            1
        );
        assert_eq!(found(&readme.replace("2026-11-25", "2026-11-26"), &peers).len(), 1);
        let mut other = peers.clone();
        other["peers"][1]["ns_per_step"] = 1.0.into();
        assert_eq!(found(&readme, &other).len(), 1);
    }
}
