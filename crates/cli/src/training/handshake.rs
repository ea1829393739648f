//! The handshake: settings that ranks compare before they train.

use std::num::NonZeroU64;

use fusestep::StepOptions;
use fusestep_collective::Communicator;
use fusestep_planner::{Comms, Topology};

use crate::options::name_of;
use crate::train::args::TrainArgs;

/// Compares over all ranks the settings that decide which calls they make.
pub(super) fn compare_calls(
    args: &TrainArgs,
    options: &StepOptions,
    comm: &mut dyn Communicator,
) -> anyhow::Result<()> {
    let given = |is_given| if is_given { "given" } else { "not given" }.to_owned();
    let every = |count: Option<NonZeroU64>| count.map_or(given(false), |count| count.to_string());
    let streams = options.streams(Topology::of(comm));
    let fields = [
        ("--checkpoint", given(args.checkpoint.is_some())),
        ("--resume", given(args.resume)),
        ("--save-every", every(args.save_every)),
        ("--compare-parameters", every(args.compare_parameters)),
        ("--report", given(args.report.is_some())),
        ("--comm-streams", streams.to_string()),
        ("--initial", options.initial.to_string()),
    ];
    Ok(Comms::direct(comm).compare(&fields)?)
}

/// Settings of the command that decide the bits of a run; ranks compare them with the step's own.
pub(super) fn own_settings(args: &TrainArgs) -> [(&'static str, String); 5] {
    let sizes = args.task.texts().into_iter().skip(1);
    let sizes: Vec<String> = sizes.map(|(name, size)| format!("{name} {size}")).collect();
    [
        ("--model", name_of(args.task.model)),
        ("--layers, --width, --heads and --context", sizes.join(", ")),
        ("--seed", args.seed.to_string()),
        ("--batch", args.batch.to_string()),
        ("--epochs", args.epochs.to_string()),
    ]
}
