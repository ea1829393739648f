//! Runs simulated training runs: `simulate FIRST COUNT`, on all processors; the first seed that
//! breaks a promise ends it.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use fusestep_testkit::{Story, simulate};

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let (Some(Ok(first)), Some(Ok(count)), None) = (numbers.next(), numbers.next(), numbers.next())
    else {
        eprintln!("expected the first seed and how many");
        return ExitCode::FAILURE;
    };
    let begun = Instant::now();
    let (next, sum) = (AtomicU64::new(first), Mutex::new(Story::default()));
    let failed = Mutex::new(None::<(u64, String)>);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut own = Story::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::SeqCst);
                    if seed >= first + count {
                        break;
                    }
                    match simulate(seed) {
                        Ok(story) => own += story,
                        Err(error) => {
                            next.store(first + count, Ordering::SeqCst);
                            if let Ok(mut failed) = failed.lock() {
                                failed.get_or_insert((seed, error));
                            }
                        }
                    }
                }
                if let Ok(mut sum) = sum.lock() {
                    *sum += own;
                }
            });
        }
    });
    if let Ok(Some((seed, error))) = failed.into_inner() {
        eprintln!("seed {seed}: {error}\nagain: cargo xtask simulate --seed {seed}");
        return ExitCode::FAILURE;
    }
    let story = sum.into_inner().unwrap_or_default();
    println!(
        "{count} seeds in {:.1} s: {} tries, {} faults, {} errors of ranks, {} saves \
         acknowledged, {} resumes, {} events; every promise kept",
        begun.elapsed().as_secs_f64(),
        story.tries,
        story.faults,
        story.errors,
        story.saves,
        story.resumes,
        story.events,
    );
    ExitCode::SUCCESS
}
