//! What is promised about files and runs: under faults that a seed decides, and beside files of
//! others.

#[path = "trust/commits.rs"]
mod commits;
#[path = "trust/counts.rs"]
mod counts;
#[path = "trust/folders.rs"]
mod folders;
#[path = "trust/full.rs"]
mod full;
#[path = "trust/generations.rs"]
mod generations;
#[path = "trust/meanwhile.rs"]
mod meanwhile;
#[path = "trust/non_finite.rs"]
mod non_finite;
#[path = "trust/old_files.rs"]
mod old_files;
#[cfg(unix)]
#[path = "trust/planted.rs"]
mod planted;
#[path = "trust/quotes.rs"]
mod quotes;
#[path = "trust/settings.rs"]
mod settings;
#[path = "trust/shards.rs"]
mod shards;
#[path = "trust/states.rs"]
mod states;
#[path = "trust/writers.rs"]
mod writers;

/// A few of the seeds of `cargo xtask simulate`.
#[test]
fn simulated_runs_end_in_the_bits_of_runs_without_faults() {
    let mut sum = fusestep_testkit::Story::default();
    for seed in 0..200 {
        match fusestep_testkit::simulate(seed) {
            Ok(story) => sum += story,
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    assert!(sum.faults > 100 && sum.resumes > 10 && sum.writes > 1_000, "{sum:?}");
}

/// A seed is one run for ever, or a failing one could not be looked at.
#[test]
fn a_seed_replays() {
    for seed in [3, 77] {
        assert_eq!(fusestep_testkit::simulate(seed), fusestep_testkit::simulate(seed));
    }
}
