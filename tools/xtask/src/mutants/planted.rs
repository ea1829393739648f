//! `planted`: bugs put into a copy of the sources, one after the other; each must be found by the
//! tool that is there for it.

mod bugs;
mod loads;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use self::bugs::BUGS;
use self::loads::LOADS;
use super::{End, Mutant, Target, failure};
use crate::{mutants, target_folder, workspace_root};

/// A bug of a file, which is named from the workspace's root and has the text once.
type Planted = Mutant<&'static str, Tool>;

/// What is run to find a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    /// Tests of a package whose names contain a word: package, target, word.
    Test(&'static str, &'static str, &'static str),
    /// Training runs under seeds.
    Simulate,
    /// Errors and deaths at calls of the system.
    Faults,
    /// A fuzz target.
    Fuzz(&'static str),
}

/// Seeds of simulated runs for each bug.
const SEEDS: u64 = 10_000;

/// Seconds of a fuzz target for each bug.
const FUZZ_SECONDS: u64 = 20;

/// A tool that has not ended by then has found that something never ends.
const LIMIT: Duration = Duration::from_secs(600);

impl Tool {
    /// Words with a space between them.
    fn command(self) -> String {
        match self {
            Self::Test(package, "lib", word) => {
                format!("cargo test --release -p {package} --lib -- {word}")
            }
            Self::Test(package, target, word) => {
                format!("cargo test --release -p {package} --test {target} -- {word}")
            }
            Self::Simulate => {
                format!("cargo run --release -p fusestep-testkit --bin simulate -- 0 {SEEDS}")
            }
            Self::Faults => "cargo xtask faults".to_owned(),
            Self::Fuzz(target) => {
                format!("cargo run --release -p fusestep-fuzz -- {target} {FUZZ_SECONDS}")
            }
        }
    }

    /// The name in the report.
    fn name(self) -> String {
        match self {
            Self::Test(package, target, word) => format!("test {package} {target} {word}"),
            Self::Simulate => "simulate".to_owned(),
            Self::Faults => "faults".to_owned(),
            Self::Fuzz(target) => format!("fuzz {target}"),
        }
    }
}

/// All of them, in the order of the page that lists them.
fn bugs() -> impl Iterator<Item = &'static Planted> {
    BUGS.iter().chain(LOADS)
}

/// Plants every bug, or those whose name contains one of the words.
pub(crate) fn run(words: &[String]) -> Result<()> {
    let copy = target_folder().join("planted");
    copy_sources(&copy)?;
    let bugs: Vec<Planted> = bugs().copied().collect();
    mutants::run(&Sources { copy }, &bugs, words)
}

/// A copy of the sources.
struct Sources {
    copy: PathBuf,
}

impl Target for Sources {
    type Place = &'static str;
    type Finder = Tool;

    // All of them build in the same folder.
    const AT_A_TIME: Option<usize> = Some(1);

    fn untouched(&self, bug: &Planted) -> Result<End> {
        tried(&self.copy, bug.finder)
    }

    fn broken(&self, bug: &Planted) -> Result<End> {
        let (path, text) = (self.copy.join(bug.place), bug.text(&self.copy)?);
        fs::write(&path, text.replacen(bug.from, bug.to, 1))?;
        let end = tried(&self.copy, bug.finder);
        fs::write(&path, text)?;
        end
    }

    fn told(&self, bug: &Planted) -> Result<[String; 2]> {
        bug.text(&self.copy)?;
        Ok([bug.place.to_owned(), bug.finder.name()])
    }
}

impl Planted {
    /// The file's text, in which the place must be.
    fn text(&self, copy: &Path) -> Result<String> {
        let text = fs::read_to_string(copy.join(self.place)).context(self.place)?;
        let found = text.matches(self.from).count();
        ensure!(
            found == 1,
            "{}: {}: expected the place once, found it {found} times; bring \
             tools/xtask/src/mutants/planted up to date",
            self.name,
            self.place
        );
        Ok(text)
    }
}

/// Runs a tool in the copy.
fn tried(copy: &Path, tool: Tool) -> Result<End> {
    let output = copy.with_file_name("planted-output");
    let into = fs::File::create(&output)?;
    let command = tool.command();
    let mut child = Command::new("cargo")
        .args(command.split_whitespace().skip(1))
        .current_dir(copy)
        .env_remove("CARGO_TARGET_DIR")
        .stdin(Stdio::null())
        .stdout(into.try_clone()?)
        .stderr(into)
        .spawn()
        .context("cannot start cargo")?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            return Ok(End::Found("no end".to_owned()));
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
    Ok(match tool {
        Tool::Test(..) => End::of_tests(status.success(), &text, failure),
        _ if text.contains("could not compile") => End::Unbuilt,
        _ if status.success() => End::Content,
        _ => End::Found(failure(&text)),
    })
}

/// Copies what git knows or would know, files that are the same left as they are so that little is
/// compiled again.
fn copy_sources(copy: &Path) -> Result<()> {
    let root = workspace_root();
    let listed = Command::new("git")
        .args(["ls-files", "-co", "--exclude-standard"])
        .current_dir(&root)
        .output()?;
    ensure!(listed.status.success(), "git cannot list the sources");
    for name in String::from_utf8(listed.stdout)?.lines() {
        let (from, to) = (root.join(name), copy.join(name));
        let Ok(bytes) = fs::read(&from) else {
            continue;
        };
        if fs::read(&to).is_ok_and(|old| old == bytes) {
            continue;
        }
        let folder: PathBuf = to.parent().map(Path::to_owned).unwrap_or_default();
        fs::create_dir_all(&folder)?;
        fs::copy(&from, &to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{Planted, Tool, bugs};
    use crate::workspace_root;

    /// A bug's row of the page's table.
    fn row(bug: &Planted) -> String {
        let tool = match bug.finder {
            Tool::Test(package, "lib", word) => {
                format!("`cargo test -p {package} --lib {word}`")
            }
            Tool::Test(package, target, word) => {
                let command = format!("cargo test -p {package} --test {target} {word}");
                format!("`{}`", command.trim_end())
            }
            Tool::Simulate => "`cargo xtask simulate`".to_owned(),
            Tool::Faults => "`cargo xtask faults`".to_owned(),
            Tool::Fuzz(target) => format!("`cargo xtask fuzz` ({target})"),
        };
        let (first, rest) = bug.name.split_at(1);
        format!("| {}{rest} | {tool} |", first.to_uppercase())
    }

    #[test]
    fn every_place_is_in_the_sources_once() {
        let lost = bugs().filter_map(|bug| bug.text(&workspace_root()).err());
        let lost: Vec<String> = lost.map(|error| error.to_string()).collect();
        assert!(lost.is_empty(), "{}", lost.join("\n"));
    }

    #[test]
    fn the_page_lists_every_bug_and_who_finds_it() {
        let page = fs::read_to_string(workspace_root().join("docs/RELIABILITY.md")).unwrap();
        let (before, table) = page.split_once("| Bug | Found by |\n|---|---|\n").unwrap();
        let found: Vec<&str> = table.lines().collect();
        let expected: Vec<String> = bugs().map(row).collect();
        assert_eq!(found, expected);
        assert!(
            before.contains(&format!("| {} bugs: ", expected.len())),
            "expected {} bugs in the table of tools",
            expected.len()
        );
    }
}
