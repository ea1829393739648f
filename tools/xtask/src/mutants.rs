//! Mutants: one change each that breaks a promise, and the test that must find it. Targets are the
//! sources ([`planted`]) and the PTX as shipped ([`ptx`]).

pub(crate) mod planted;
pub(crate) mod ptx;

use std::time::Instant;

use anyhow::{Result, ensure};

use crate::parallel;

/// The commands that run mutants, and their report.
pub(crate) const HELP: &str = "\
Mutants are changes of one place that break a promise; the test beside each must find it.

  cargo xtask planted [WORD...]                  of sources, one after the other in a copy
  cargo xtask execute-ptx --mutants [WORD...]    of the PTX as shipped, on all cores

Words pick mutants by parts of their names. First every test must pass without a mutant. Then a row
for each mutant says what is broken, where, who must find it, how that ended, and the seconds:
`found` with what the test said, `unseen` with the reason why no result can show it, or SURVIVED,
UNBUILT and NO TEST, which fail the command.";

/// A change of one text that breaks a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mutant<P, F> {
    /// The promise that is broken.
    name: &'static str,
    /// Where the text stands.
    place: P,
    /// The text that is replaced.
    from: &'static str,
    /// The text in its place.
    to: &'static str,
    /// Who must find it.
    finder: F,
}

/// A mutant of a target.
type MutantOf<T> = Mutant<<T as Target>::Place, <T as Target>::Finder>;

/// How a test has ended.
#[derive(Clone, Debug, PartialEq)]
enum End {
    /// It found nothing wrong.
    Content,
    /// It failed, and said this.
    Found(String),
    /// The code under it does not build.
    Unbuilt,
    /// No test has the name.
    NoTest,
}

impl End {
    /// The end of a program of tests that said `text`.
    fn of_tests(succeeded: bool, text: &str, reason: impl FnOnce(&str) -> String) -> Self {
        if text.contains("could not compile") || !text.contains("running ") {
            Self::Unbuilt
        } else if !succeeded {
            Self::Found(reason(text))
        } else if text.contains("running 0 tests") {
            Self::NoTest
        } else {
            Self::Content
        }
    }

    /// The report's word, and whether it is as it should be of a mutant that results show unless
    /// `unseen` says why they do not.
    fn judged(self, unseen: Option<&str>) -> (String, bool) {
        match (self, unseen) {
            (Self::Found(reason), None) => (format!("found: {reason}"), true),
            (Self::Content, Some(why)) => (format!("unseen: {why}"), true),
            (Self::Found(reason), Some(_)) => (format!("FOUND, listed as unseen: {reason}"), false),
            (Self::Content, None) => ("SURVIVED".to_owned(), false),
            (Self::Unbuilt, _) => ("UNBUILT".to_owned(), false),
            (Self::NoTest, _) => ("NO TEST".to_owned(), false),
        }
    }
}

/// Code that mutants change, and how their tests are run on it.
trait Target: Sync {
    /// A place in the code.
    type Place: Sync;
    /// A test.
    type Finder: Sync + PartialEq;

    /// Tests that run at a time; none for one on each core.
    const AT_A_TIME: Option<usize>;

    /// Runs the mutant's test on the code as it is.
    fn untouched(&self, mutant: &MutantOf<Self>) -> Result<End>;

    /// Runs the mutant's test on the code with the mutant.
    fn broken(&self, mutant: &MutantOf<Self>) -> Result<End>;

    /// Whether two mutants have the same test on the same code.
    fn have_one_test(&self, one: &MutantOf<Self>, other: &MutantOf<Self>) -> bool {
        one.finder == other.finder
    }

    /// The place and the finder as the report has them.
    fn told(&self, mutant: &MutantOf<Self>) -> Result<[String; 2]>;

    /// The reason why no result shows the mutant, if none does.
    fn unseen(&self, _mutant: &MutantOf<Self>) -> Option<&'static str> {
        None
    }
}

/// Runs every mutant whose name contains one of the words, and prints a row for each.
///
/// # Errors
/// If a test fails on the code as it is, or a mutant does not end as expected.
fn run<T: Target>(target: &T, mutants: &[MutantOf<T>], words: &[String]) -> Result<()> {
    let is_wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word));
    let mutants: Vec<_> = mutants.iter().filter(|mutant| is_wanted(mutant.name)).collect();
    ensure!(!mutants.is_empty(), "no mutant is called {words:?}");
    let begun = Instant::now();
    let threads = T::AT_A_TIME.unwrap_or_else(rayon::current_num_threads);
    // The row's place is found first, so that a mutant that fits nowhere stops the command early.
    let rows = mutants.iter().map(|mutant| target.told(mutant)).collect::<Result<Vec<_>>>()?;
    let mut tests: Vec<usize> = Vec::new();
    for (index, mutant) in mutants.iter().enumerate() {
        if !tests.iter().any(|&test| target.have_one_test(mutants[test], mutant)) {
            tests.push(index);
        }
    }
    parallel::map_on(threads, &tests, |&index| {
        let [place, finder] = &rows[index];
        let end = target.untouched(mutants[index])?;
        ensure!(end == End::Content, "{finder} on {place} without a mutant: {end:?}");
        Ok(())
    })?;
    println!("{} tests pass without a mutant\n", tests.len());
    println!("| Mutant | Place | Finder | End | Seconds |\n|---|---|---|---|---:|");
    let indices: Vec<usize> = (0..mutants.len()).collect();
    let wrong = parallel::map_on(threads, &indices, |&index| {
        let (mutant, since) = (mutants[index], Instant::now());
        let (end, is_right) = target.broken(mutant)?.judged(target.unseen(mutant));
        let [place, finder] = &rows[index];
        let seconds = since.elapsed().as_secs_f64();
        println!("| {} | {place} | {finder} | {end} | {seconds:.1} |", mutant.name);
        Ok((!is_right).then(|| format!("{} in {place}", mutant.name)))
    })?;
    let wrong: Vec<String> = wrong.into_iter().flatten().collect();
    ensure!(
        wrong.is_empty(),
        "{} of {} not as expected: {}",
        wrong.len(),
        mutants.len(),
        wrong.join(", ")
    );
    println!("{} mutants, all as expected, in {} s", mutants.len(), begun.elapsed().as_secs());
    Ok(())
}

/// The first line of a program of tests that says what is wrong, without marks of a table.
fn failure(text: &str) -> String {
    let failed =
        text.lines().find_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"));
    failed.unwrap_or("an end without success").replace('|', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_tests_are_told_apart() {
        let end = |succeeded, text: &str| End::of_tests(succeeded, text, failure);
        let failed = "running 1 test\ntest a::b ... FAILED\n";
        assert_eq!(end(true, "running 1 test\n1 passed"), End::Content);
        assert_eq!(end(false, failed), End::Found("a::b".to_owned()));
        assert_eq!(end(true, "running 0 tests\n0 passed"), End::NoTest);
        assert_eq!(end(false, "error: could not compile"), End::Unbuilt);
        assert_eq!(end(false, "error: no test target"), End::Unbuilt);
    }

    #[test]
    fn survivors_and_what_is_seen_against_the_list_are_wrong() {
        let found = End::Found("a".to_owned());
        assert!(found.clone().judged(None).1);
        assert!(!found.judged(Some("why")).1);
        assert!(End::Content.judged(Some("why")).1);
        for end in [End::Content, End::Unbuilt, End::NoTest] {
            assert!(!end.judged(None).1);
        }
    }
}
