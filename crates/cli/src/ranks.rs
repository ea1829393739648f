//! Flags of the step of many ranks, spelled the same in each subcommand.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use anyhow::ensure;
use clap::Args;
use fusestep_collective::Link;
use fusestep_planner::{FuseAllReduce, GradientMerge, LocalSgd, Planner, Reduced, Shard, Zero};

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// What ranks share out and how they talk.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct RankArgs {
    /// What ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too
    #[arg(long, value_name = "0|1|2|3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) zero: u8,
    /// Most MiB of gradients that one call reduces [default: 25]
    #[arg(long, value_name = "MIB")]
    pub(crate) bucket_cap_mib: Option<f64>,
    /// Reduce buckets on this many rings while gradients are still being computed [default: none, after the last gradient]
    #[arg(long, value_name = "N")]
    pub(crate) rings: Option<NonZeroUsize>,
    /// Add the gradients of this many batches before each update
    #[arg(long, value_name = "K")]
    pub(crate) gradient_merge: Option<NonZeroU32>,
    /// Reduce gradients across ranks in every batch of a merge, which takes less memory and more calls
    #[arg(long, requires = "gradient_merge")]
    pub(crate) merge_reduce_each: bool,
    /// Average parameters every this many steps in place of gradients every step
    #[arg(long, value_name = "K")]
    pub(crate) local_sgd: Option<NonZeroU64>,
}

impl RankArgs {
    /// Whether any of the flags asks for the step of many ranks.
    pub(crate) fn any(&self) -> bool {
        self.zero > 0
            || self.bucket_cap_mib.is_some()
            || self.rings.is_some()
            || self.gradient_merge.is_some()
            || self.local_sgd.is_some()
    }

    /// The planner with the passes asked for; a naive one reduces tensor by tensor.
    ///
    /// # Errors
    /// A cap that is no positive number.
    pub(crate) fn passes(&self, mut planner: Planner, fused: Fused) -> anyhow::Result<Planner> {
        let cap_bytes = match self.bucket_cap_mib {
            None => FuseAllReduce::DEFAULT_CAP_BYTES,
            Some(mib) => {
                ensure!(
                    mib > 0.0 && mib.is_finite(),
                    "--bucket-cap-mib: expected a number above 0, found {mib}"
                );
                (mib * MIB) as u64
            }
        };
        if fused == Fused::Yes {
            planner = planner.with(FuseAllReduce::of_bytes(cap_bytes));
        }
        if let Some(every) = self.gradient_merge {
            let reduced = match self.merge_reduce_each {
                true => Reduced::PerMicroStep,
                false => Reduced::PerWindow,
            };
            planner = planner.with(GradientMerge::every(every).reduced(reduced));
        }
        if let Some(every) = self.local_sgd {
            planner = planner.with(LocalSgd::every(every));
        }
        Ok(match Zero::of(self.zero) {
            Some(zero) if zero != Zero::Zero0 => planner.with(Shard::new(zero)),
            _ => planner,
        })
    }
}

/// Whether passes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fused {
    Yes,
    No,
}

impl From<bool> for Fused {
    fn from(naive: bool) -> Self {
        if naive { Fused::No } else { Fused::Yes }
    }
}

/// The world that `plan` plans for.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WorldArgs {
    /// Number of ranks
    #[arg(long, value_name = "N")]
    pub(crate) world: Option<NonZeroUsize>,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
    /// Microseconds of a call between ranks that moves next to nothing, for the predicted time
    #[arg(long, value_name = "US", default_value_t = 20.0)]
    pub(crate) link_latency_us: f64,
    /// Gigabytes of a buffer that an all-reduce gets through in a second
    #[arg(long, value_name = "GB/S", default_value_t = 10.0)]
    pub(crate) link_gb_per_s: f64,
}

impl WorldArgs {
    /// What a call costs.
    ///
    /// # Errors
    /// Values that are no positive numbers.
    pub(crate) fn link(&self) -> anyhow::Result<Link> {
        for (flag, value) in [
            ("--link-latency-us", self.link_latency_us),
            ("--link-gb-per-s", self.link_gb_per_s),
        ] {
            ensure!(
                value > 0.0 && value.is_finite(),
                "{flag}: expected a number above 0, found {value}"
            );
        }
        Ok(Link {
            alpha_seconds: self.link_latency_us * 1e-6,
            beta_bytes_per_second: self.link_gb_per_s * 1e9,
        })
    }
}
