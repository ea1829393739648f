//! Commands of pages, run as a reader types them.
//!
//! A block `sh run` of README, docs/start and docs/guides has a command a line. Those of `fusestep`
//! run in an empty folder that the blocks of a page share, in order. Comments right above a block
//! change how:
//!
//! ```text
//! <!-- with: --epochs 1 -->        arguments that make the block's `train` and `bench` short, or
//!                                  its other commands where it has neither
//! <!-- with bench: --rounds 1 -->  arguments for lines that begin so; the longest beginning counts
//! <!-- fails -->                   each command ends with an error
//! <!-- ends alike -->              all commands print the same last line
//! <!-- printed -->                 above a block `text`: lines that the block before it prints
//! ```
//!
//! Pages that name data/shapes find the models of that folder there, with small tensors; those that
//! name params.safetensors and grads.safetensors find a small model's.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, thread};

#[path = "../../../tools/xtask/src/fences.rs"]
mod fences;

use fences::{Fence, fences, not_printed};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

const FOLDERS: [&str; 3] = ["docs/start", "docs/guides", "docs/reference"];

/// What pages write for the program in a clone.
const FROM_SOURCES: &str = "cargo run --release -p fusestep-cli -- ";

/// Lines of an output that a failure shows.
const SHOWN: usize = 6;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn commands_of_pages_run() {
    let root = root();
    let mut pages = vec!["README.md".to_owned()];
    for folder in FOLDERS {
        let Ok(entries) = fs::read_dir(root.join(folder)) else { continue };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names = names.filter(|name| name.ends_with(".md"));
        pages.extend(names.map(|name| format!("{folder}/{name}")));
    }
    pages.sort();
    let failures: Vec<String> = thread::scope(|scope| {
        let page = |page: &str| failures(page, &fs::read_to_string(root.join(page)).unwrap());
        let runs: Vec<_> = pages.iter().map(|path| scope.spawn(move || page(path))).collect();
        runs.into_iter().flat_map(|run| run.join().unwrap()).collect()
    });
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// What of a page does not do as it says, with page and line.
fn failures(page: &str, text: &str) -> Vec<String> {
    let blocks = fences(text);
    let mut found = Vec::new();
    let runs = |block: &Fence| block.info.ends_with(" run");
    // Recipes of trainers are run by `cargo xtask python --trainers`.
    let has_recipes = text.contains("<!-- recipe: ");
    if page.starts_with("docs/guides/") && !has_recipes && !blocks.iter().any(runs) {
        found.push(format!("{page}: expected a block that is run, found none"));
    }
    let folder = tempfile::tempdir().unwrap();
    write_files(text, folder.path());
    let mut said = String::new();
    for block in &blocks {
        let place = format!("{page}:{}", block.line);
        if block.info == "sh run" {
            said = outputs(block, folder.path(), &place, &mut found);
        } else if block.info == "text" && block.is("printed") && !said.is_empty() {
            if let Some(line) = not_printed(&block.lines, &said) {
                found.push(format!("{place}: expected a line {line:?}, found\n{}", end(&said)));
            }
        } else if runs(block) {
            // Of a program, which `cargo xtask pages` runs.
            said.clear();
        }
    }
    found
}

/// Writes what a page's reader has in the folder.
fn write_files(text: &str, folder: &Path) {
    if text.contains("data/shapes/") {
        let shapes = folder.join("data/shapes");
        fs::create_dir_all(&shapes).unwrap();
        for entry in fs::read_dir(root().join("data/shapes")).unwrap() {
            let path = entry.unwrap().path();
            let model: Vec<Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let model: Vec<Value> = model.into_iter().map(small).collect();
            fs::write(shapes.join(path.file_name().unwrap()), json!(model).to_string()).unwrap();
        }
    }
    for (name, value) in [("params.safetensors", 1.0f32), ("grads.safetensors", 0.5)] {
        if text.contains(name) {
            let bytes: Vec<u8> = [value; 12].into_iter().flat_map(f32::to_le_bytes).collect();
            let tensor = TensorView::new(Dtype::F32, vec![4, 3], &bytes).unwrap();
            let file = serialize([("layer0.weight", tensor)], None).unwrap();
            fs::write(folder.join(name), file).unwrap();
        }
    }
}

/// A tensor of a model, with no dimension above 16.
fn small(mut tensor: Value) -> Value {
    for dimension in tensor["shape"].as_array_mut().unwrap() {
        *dimension = dimension.as_u64().unwrap().min(16).into();
    }
    tensor
}

/// Runs a block and returns what its commands print.
fn outputs(block: &Fence, folder: &Path, place: &str, found: &mut Vec<String>) -> String {
    let commands = commands(&block.lines, &block.notes);
    if commands.is_empty() {
        found.push(format!("{place}: expected a command of fusestep, found none that is run"));
    }
    let (mut said, mut ends) = (String::new(), Vec::new());
    for command in commands {
        let output = shell(&command, folder).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ends.push(text.lines().last().unwrap_or_default().to_owned());
        let text = text + &String::from_utf8_lossy(&output.stderr);
        if output.status.success() == block.is("fails") {
            let (expected, status) =
                (if block.is("fails") { "an error" } else { "success" }, output.status);
            found.push(format!(
                "{place}: `{command}`: expected {expected}, found {status}\n{}",
                end(&text)
            ));
        }
        said.push_str(&text);
    }
    if block.is("ends alike") && ends.iter().any(|line| *line != ends[0]) {
        found.push(format!("{place}: expected the same last lines, found {ends:?}"));
    }
    said
}

/// The commands of a block that are run, with the arguments of its comments.
fn commands(lines: &[&str], notes: &[&str]) -> Vec<String> {
    let joined = lines.join("\n").replace("\\\n", " ").replace(FROM_SOURCES, "fusestep ");
    let ours: Vec<&str> = joined.lines().filter(|line| line.starts_with("fusestep ")).collect();
    let mut more = Vec::new();
    for note in notes.iter().filter_map(|note| note.strip_prefix("with")) {
        let (begin, arguments) = note.split_once(':').expect("`with: ARGUMENTS`");
        match begin.trim() {
            "" => {
                let takes = |name: &str| ours.iter().any(|line| works(line).1 == name);
                let long = takes("train") || takes("bench");
                let names: &[&str] =
                    if long { &["train", "bench"] } else { &["plan", "step", "check"] };
                more.extend(names.iter().map(|name| (*name, arguments.trim())));
            }
            begin => more.push((begin, arguments.trim())),
        }
    }
    more.sort_by_key(|(begin, _)| std::cmp::Reverse(begin.len()));
    let with = |line: &&str| {
        let (end, name) = works(line);
        let typed = &line[end - name.len()..];
        match more.iter().find(|(begin, _)| typed.starts_with(begin)) {
            Some((_, arguments)) => format!("{} {arguments}{}", &line[..end], &line[end..]),
            None => (*line).to_owned(),
        }
    };
    ours.iter().map(with).collect()
}

/// The subcommand that works, and where its name ends: that behind `launch -n 2 -- fusestep` if a
/// line has two.
fn works(line: &str) -> (usize, &str) {
    let typed = line.split(" #").next().unwrap_or_default();
    let at = typed.rfind("fusestep ").map_or(0, |at| at + "fusestep ".len());
    let name = typed[at..].trim_start();
    let at = typed.len() - name.len();
    let name = name.split(' ').next().unwrap_or_default();
    (at + name.len(), name)
}

/// A command of a shell that finds the built program.
fn shell(command: &str, folder: &Path) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_fusestep"));
    let mut paths = vec![program.parent().unwrap().to_owned()];
    paths.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(folder).env("PATH", env::join_paths(paths).unwrap());
    // Figures of this machine would change plans.
    shell.env("FUSESTEP_FIGURES", "none");
    shell
}

/// The last lines of an output, indented.
fn end(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let shown = lines[lines.len().saturating_sub(SHOWN)..].iter();
    shown.fold(String::new(), |mut all, line| {
        let _ = writeln!(all, "    {line}");
        all
    })
}

#[test]
fn arguments_go_to_the_command_that_works() {
    let lines = [
        "cargo run --release -p fusestep-cli -- train --ranks 4  # as fusestep bench",
        "cargo test",
        "fusestep launch -n 2 -- fusestep train \\",
        "  --zero 2 > log",
        "fusestep plan a.json",
    ];
    assert_eq!(
        commands(&lines, &["with: --epochs 1", "fails"]),
        [
            "fusestep train --epochs 1 --ranks 4  # as fusestep bench",
            "fusestep launch -n 2 -- fusestep train --epochs 1    --zero 2 > log",
            "fusestep plan a.json",
        ]
    );
    assert_eq!(commands(&lines[4..], &["with: --json"]), ["fusestep plan --json a.json"]);
    let notes = ["with train: --epochs 1", "with train --ranks: --epochs 2"];
    assert_eq!(
        commands(&lines[..1], &notes),
        ["fusestep train --epochs 2 --ranks 4  # as fusestep bench"]
    );
    assert_eq!(commands(&lines[1..2], &[]), Vec::<String>::new());
}

#[test]
fn pages_that_do_not_do_as_they_say_are_found() {
    let page = "```sh run\nls\n```\n\n```sh run\nfusestep none\n```\n\n<!-- fails -->\n```sh run\nfusestep --version\n```\n\n\
        <!-- ends alike -->\n```sh run\nfusestep --version\nfusestep --help | head -n 1\n```\n\n\
        ```sh run\nfusestep --version\n```\n<!-- printed -->\n```text\nno such line\n```\n";
    let found = failures("a.md", page);
    let lines: Vec<&str> = found.iter().map(|text| text.split(' ').next().unwrap()).collect();
    assert_eq!(lines, ["a.md:1:", "a.md:5:", "a.md:10:", "a.md:15:", "a.md:24:"], "{found:#?}");
    assert_eq!(failures("docs/guides/a.md", "a\n").len(), 1);
}
