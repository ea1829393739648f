//! `fusestep bench --collective`: a collective's time between ranks, beside the memory bandwidth.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use fusestep_collective::{AllReduceRow, measure_all_reduce};
use fusestep_simd::Level;
use fusestep_tensor::{counted, grouped};
use serde::Serialize;

use crate::engine::{Engine, Ranks};
use crate::options::name_of;
use crate::output::{duration, print, print_json};
use crate::settings;

/// Flags of `bench --collective`.
#[derive(Debug, Args)]
pub(crate) struct CollectiveArgs {
    /// Time this collective between ranks instead of a step
    #[arg(
        long,
        value_enum,
        conflicts_with_all = [
            settings::GROUP, "optimizer", "excluded", "RuleFlags", "PeerArgs", "peer", "dtype", "threads",
            "rounds", "FiguresArgs"
        ]
    )]
    pub(crate) collective: Option<Collective>,
    /// Engine that carries the collective, or steps between ranks [default: thread]
    #[arg(long, value_enum)]
    pub(crate) engine: Option<Engine>,
    #[command(flatten)]
    pub(crate) ranks: Ranks,
    /// Bytes of each rank's buffer, with units; rounded down to whole elements of 4 bytes
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4KiB,4MiB,64MiB",
        requires = "collective",
        conflicts_with = "model"
    )]
    sizes: Vec<Size>,
}

/// Bytes of one element of a buffer.
const LEAST_BYTES: u64 = size_of::<f32>() as u64;

/// Most bytes of each rank's buffer.
const MOST_BYTES: u64 = 1 << 34;

/// Collectives that can be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Collective {
    /// Sum of f32, in place
    AllReduce,
}

/// A length in bytes: `4096`, `4KiB`, `4MiB`, `1GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size(u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1), ("", 1)];
        let found = units.into_iter().find_map(|(unit, bytes)| {
            let count: u64 = text.strip_suffix(unit)?.trim().parse().ok()?;
            count.checked_mul(bytes)
        });
        let found = found.filter(|bytes| (LEAST_BYTES..=MOST_BYTES).contains(bytes));
        found.map(Self).ok_or_else(|| {
            format!(
                "expected bytes such as 4096, 4KiB, 64MiB or 1GiB, from {LEAST_BYTES} to \
                 {MOST_BYTES}"
            )
        })
    }
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Summary {
    collective: &'static str,
    engine: String,
    rows: Vec<AllReduceRow>,
}

/// Times the collective and prints one row for each size.
pub(crate) fn run(
    args: &CollectiveArgs,
    Collective::AllReduce: Collective,
    json: bool,
) -> anyhow::Result<()> {
    let sizes: Vec<u64> = args.sizes.iter().map(|size| size.0).collect();
    let measured = args
        .engine
        .unwrap_or_default()
        .run(&args.ranks, |comm| measure_all_reduce(comm, &sizes, Level::detect()))?;
    let Some(rows) = measured else {
        return Ok(());
    };
    let summary = Summary {
        collective: "all-reduce",
        engine: name_of(args.engine.unwrap_or_default()),
        rows,
    };
    if json {
        return print_json(&summary);
    }
    let mut text = format!(
        "{} of f32 between {}, {}\n",
        summary.collective,
        counted(summary.rows.first().map_or(args.ranks.count(), |row| row.ranks) as u64, "rank"),
        summary.engine
    );
    for row in &summary.rows {
        text += &format!(
            "{:>14} B  {:>10}  best {:>10}  {:>7.2} GB/s  memory bandwidth {:>10}  share {:.3}\n",
            grouped(row.len_bytes),
            duration(row.seconds * 1e9),
            duration(row.best_seconds * 1e9),
            row.bytes_per_second / 1e9,
            duration(row.ceiling_seconds * 1e9),
            row.share_of_ceiling,
        );
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("4", 4),
            ("17", 17),
            ("17B", 17),
            ("4KiB", 4096),
            ("64 MiB", 64 << 20),
            ("16GiB", MOST_BYTES),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "0", "3B", "KiB", "4KB", "-1", "1.5MiB", "17GiB", "99999999999GiB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
