//! The runs of `verify`, and whether they end in one hash.

use std::collections::BTreeSet;
use std::fmt;

use anyhow::{Context, bail};
use fusestep_tensor::{counted, grouped};
use serde::{Deserialize, Serialize};

use crate::output::duration;

/// A run of all steps, beside the same steps in rank order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ended {
    /// Number of ranks.
    pub(super) world: usize,
    /// ZeRO stage.
    pub(super) zero: u8,
    pub(super) engine: String,
    /// xxh3 of all parameter bytes in name order.
    pub(super) params_hash: String,
    /// Time of the fastest step on its slowest rank, from gradients to updated parameters.
    pub(super) ns_per_step: f64,
    /// Time of the same step without lanes; absent where ranks would have unequal numbers of
    /// micro-batches, or settings do not go without lanes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rank_order_ns_per_step: Option<f64>,
    /// Hash of the run without lanes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rank_order_hash: Option<String>,
    /// Time of the step over that of the same step without lanes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) times_rank_order: Option<f64>,
    /// Most sums of one gradient that a rank keeps at once; the gradient itself is one.
    pub(super) peak_sums: usize,
    /// Most bytes that a rank keeps between steps, sums of gradients included.
    pub(super) memory_bytes: u64,
}

/// The result that `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) parameters: usize,
    pub(super) elements: u64,
    /// Dtypes of the parameters.
    pub(super) dtype: String,
    pub(super) optimizer: &'static str,
    pub(super) lanes: u32,
    /// Micro-batches of a step, of all ranks together.
    pub(super) micro_batches: u64,
    pub(super) steps: usize,
    pub(super) seed: u64,
    /// The hash that all runs end in; absent if they end in several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) params_hash: Option<String>,
    /// Number of hashes that the runs in rank order end in.
    pub(super) rank_order_hashes: usize,
    pub(super) runs: Vec<Ended>,
}

/// The hash that all runs end in, which `expected` may name.
///
/// # Errors
/// The first run that ends in another, with both hashes.
pub(super) fn one_hash<'r>(runs: &'r [Ended], expected: Option<&str>) -> anyhow::Result<&'r str> {
    let first = runs.first().context("expected a run to compare, found none")?;
    let hash = expected.unwrap_or(&first.params_hash);
    let Some(other) = runs.iter().find(|run| run.params_hash != hash) else {
        return Ok(&first.params_hash);
    };
    let found = &other.params_hash;
    if expected.is_some() {
        bail!(
            "{}: expected the parameters xxh3 {hash} of --expect, found xxh3 {found}; compare \
             runs of the same shapes, rule, settings, --lanes, --steps and --seed",
            other.named()
        );
    }
    bail!(
        "{}: expected the parameters xxh3 {hash} of {}, found xxh3 {found}; lanes promise the \
         same bits, so please report this command, its output and the processor",
        other.named(),
        first.named()
    )
}

/// Number of hashes that runs in rank order end in.
pub(super) fn rank_order_hashes(runs: &[Ended]) -> usize {
    let hashes = runs.iter().filter_map(|run| run.rank_order_hash.as_deref());
    hashes.collect::<BTreeSet<&str>>().len()
}

impl Ended {
    fn named(&self) -> String {
        format!("world {}, zero stage {}, engine {}", self.world, self.zero, self.engine)
    }
}

impl Summary {
    /// The line above the table, and the table's head.
    pub(super) fn head(&self) -> String {
        format!(
            "{} on {}, {} of {}: {} of {} in {}, seed {}\n\
             world  zero  engine     parameters (xxh3)        step  rank order  price  sums  \
             bytes of a rank\n",
            self.optimizer,
            counted(self.parameters as u64, "parameter"),
            counted(self.elements, "element"),
            self.dtype,
            counted(self.steps as u64, "step"),
            micro_batches(self.micro_batches),
            counted(self.lanes.into(), "lane"),
            self.seed
        )
    }

    /// The line below the table, of runs that end in one hash.
    pub(super) fn end(&self, hash: &str) -> String {
        let mut text =
            format!("one hash: {} in xxh3 {hash}", ending(self.runs.len(), "run ends", "runs end"));
        let in_rank_order = self.runs.iter().filter(|run| run.rank_order_hash.is_some()).count();
        if in_rank_order > 0 {
            let hashes = self.rank_order_hashes as u64;
            let hashes = if hashes == 1 { "1 hash".to_owned() } else { format!("{hashes} hashes") };
            text += &format!(
                "; in rank order {} in {hashes}",
                ending(in_rank_order, "run ends", "runs end")
            );
        }
        text + "\n"
    }
}

fn micro_batches(count: u64) -> String {
    if count == 1 {
        return "1 micro-batch".to_owned();
    }
    format!("{} micro-batches", grouped(count))
}

/// A number of runs, with the words of one and of several.
fn ending(count: usize, one: &str, several: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{} {several}", grouped(count as u64)) }
}

/// A row of the table.
impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let beside = self.rank_order_ns_per_step.map_or("-".to_owned(), duration);
        let price = self.times_rank_order.map_or("-".to_owned(), |times| format!("{times:.2}"));
        writeln!(
            f,
            "{:>5}  {:>4}  {:<9}  {:<17}  {:>10}  {beside:>10}  {price:>5}  {:>4}  {:>15}",
            self.world,
            self.zero,
            self.engine,
            self.params_hash,
            duration(self.ns_per_step),
            self.peak_sums,
            grouped(self.memory_bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(world: usize, zero: u8, hash: &str) -> Ended {
        Ended {
            world,
            zero,
            engine: "thread".to_owned(),
            params_hash: hash.to_owned(),
            ns_per_step: 2e6,
            rank_order_ns_per_step: Some(1e6),
            rank_order_hash: Some(format!("{world}")),
            times_rank_order: Some(2.0),
            peak_sums: 3,
            memory_bytes: 1_000,
        }
    }

    #[test]
    fn the_first_run_that_ends_otherwise_is_named_with_both_hashes() {
        let runs = [run(1, 0, "aa"), run(2, 0, "aa"), run(2, 3, "bb"), run(3, 0, "cc")];
        let error = one_hash(&runs, None).unwrap_err().to_string();
        let named = "world 2, zero stage 3, engine thread: expected the parameters xxh3 aa of \
                     world 1, zero stage 0, engine thread, found xxh3 bb; ";
        assert!(error.starts_with(named), "{error}");
        assert_eq!(one_hash(&runs[..2], None).unwrap(), "aa");
        assert!(one_hash(&[], None).is_err());
    }

    #[test]
    fn a_hash_of_elsewhere_counts_in_place_of_the_first_runs() {
        let runs = [run(1, 0, "aa"), run(2, 0, "bb")];
        let error = one_hash(&runs, Some("bb")).unwrap_err().to_string();
        let named = "world 1, zero stage 0, engine thread: expected the parameters xxh3 bb of \
                     --expect, found xxh3 aa; ";
        assert!(error.starts_with(named), "{error}");
        assert_eq!(one_hash(&runs[..1], Some("aa")).unwrap(), "aa");
    }

    #[test]
    fn hashes_of_runs_in_rank_order_are_counted_once_each() {
        let mut runs = vec![run(1, 0, "aa"), run(1, 1, "aa"), run(2, 0, "aa"), run(3, 0, "aa")];
        runs[3].rank_order_hash = None;
        assert_eq!(rank_order_hashes(&runs), 2);
    }
}
