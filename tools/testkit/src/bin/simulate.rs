//! Runs simulated training runs: `simulate FIRST COUNT`, on all processors; the first seed that
//! breaks a promise ends it.

use std::process::ExitCode;
use std::time::Instant;

use fusestep_testkit::{Story, simulate};
use rayon::prelude::*;

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let (Some(Ok(first)), Some(Ok(count)), None) = (numbers.next(), numbers.next(), numbers.next())
    else {
        eprintln!("expected the first seed and how many");
        return ExitCode::FAILURE;
    };
    let begun = Instant::now();
    let stories = (first..first + count).into_par_iter();
    let stories = stories.map(|seed| simulate(seed).map_err(|error| (seed, error)));
    let told = stories.try_reduce(Story::default, |mut sum, own| {
        sum += own;
        Ok(sum)
    });
    let story = match told {
        Ok(story) => story,
        Err((seed, error)) => {
            eprintln!("seed {seed}: {error}\nagain: cargo xtask simulate --seed {seed}");
            return ExitCode::FAILURE;
        }
    };
    println!(
        "{count} seeds in {:.1} s: {} tries, {} faults, {} errors of ranks, {} saves \
         acknowledged, {} resumes, {} events; {} writes of several writers acknowledged; every \
         promise kept",
        begun.elapsed().as_secs_f64(),
        story.tries,
        story.faults,
        story.errors,
        story.saves,
        story.resumes,
        story.events,
        story.writes,
    );
    ExitCode::SUCCESS
}
