//! `fusestep checkpoint convert`: a checkpoint, or a state file, with its state in another type.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use fusestep_checkpoint::{KeptState, Manifest, WholeSpecs, convert, convert_state};
use fusestep_launch::StateDType;
use fusestep_planner::LEAST_INT8_ELEMENTS;
use fusestep_tensor::{Quoted, counted, grouped};
use fusestep_tensor_file::{TensorFile, check_writable};

use super::written::write_to;
use crate::inputs::model_of;
use crate::output::{print, print_json};
use crate::places::require_apart;

/// Flags of `checkpoint convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The checkpoint's folder, or a state file of `step --state-out` with --params
    pub(super) folder: PathBuf,
    /// Type of the state: f32, bf16 or int8
    #[arg(long, value_name = "TYPE", value_parser = state_dtype)]
    state_dtype: StateDType,
    /// Part of the names of parameters whose state stays in f32, not int8; may be given again
    #[arg(long, value_name = "SUBSTRING")]
    keep_f32: Vec<String>,
    /// Parameters of a state file (.safetensors), whose types its state goes by
    #[arg(long, value_name = "FILE")]
    params: Option<PathBuf>,
    /// An empty or new folder; of a state file a file, which is replaced once the new one is
    /// complete
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,
}

fn state_dtype(text: &str) -> Result<StateDType, String> {
    let all = [StateDType::Compute, StateDType::Bf16, StateDType::Int8];
    let named = all.into_iter().find(|dtype| dtype.name() == text);
    named.ok_or_else(|| "expected f32, bf16 or int8".to_owned())
}

pub(super) fn run(args: &ConvertArgs) -> anyhow::Result<()> {
    let state = KeptState { dtype: args.state_dtype, keep_f32: &args.keep_f32 };
    ensure!(
        state.dtype == StateDType::Int8 || state.keep_f32.is_empty(),
        "--keep-f32 without --state-dtype int8: expected state in int8, which the names are taken \
         from, found {}; leave --keep-f32 out",
        state.dtype.name()
    );
    let [before, after] = match &args.params {
        None => of_checkpoint(args, state)?,
        Some(params) => of_state_file(args, params, state)?,
    };
    if args.json {
        return Ok(());
    }
    let changed = after.iter().filter(|(name, spec)| before.get(*name) != Some(*spec));
    print(&format!(
        "wrote {}: {} in other types, for state in {}\n",
        args.out.display(),
        counted(changed.count() as u64, "tensor"),
        state.dtype.name()
    ))
}

/// Converts a checkpoint; types and shapes before and after.
fn of_checkpoint(args: &ConvertArgs, state: KeptState<'_>) -> anyhow::Result<[WholeSpecs; 2]> {
    let from = &args.folder;
    ensure!(
        from.is_dir(),
        "{}: expected a checkpoint's folder, or --params FILE beside a state file, found a file \
         alone; give the parameters that the state belongs to",
        from.display()
    );
    let manifest = Manifest::read(from)?;
    let tensors = manifest.tensors.iter();
    let sizes = tensors.filter_map(|(name, spec)| Some((name.rsplit_once('@')?.0, spec)));
    check_kept(from, state, sizes.map(|(param, spec)| (param, spec.shape.numel())))?;
    let written = write_to(&args.out, from, || convert(from, &args.out, state))?;
    if args.json {
        print_json(&written)?;
    }
    Ok([manifest.tensors, written.tensors])
}

/// Converts a state file; types and shapes before and after.
fn of_state_file(
    args: &ConvertArgs,
    params: &PathBuf,
    state: KeptState<'_>,
) -> anyhow::Result<[WholeSpecs; 2]> {
    let from = &args.folder;
    ensure!(
        !from.is_dir(),
        "--params with {}: expected a state file, found a checkpoint's folder, which has its \
         parameters; leave --params out",
        from.display()
    );
    for (what, input) in [("the state file", from), ("--params", params)] {
        require_apart((what, Some(input)), &[("--out", Some(&args.out))])?;
    }
    check_writable(&args.out).context("--out")?;
    let model = model_of(&TensorFile::read(params)?)?;
    let sizes = model.params.iter().map(|param| (param.name.as_str(), param.numel()));
    check_kept(from, state, sizes)?;
    let [before, after] = convert_state(from, &args.out, &model.params, state)?;
    if args.json {
        print_json(&after)?;
    }
    Ok([before, after])
}

/// Refuses parts of names that no parameter has which is large enough for state in int8.
fn check_kept<'a>(
    from: &Path,
    state: KeptState<'_>,
    sizes: impl Iterator<Item = (&'a str, u64)> + Clone,
) -> anyhow::Result<()> {
    for part in state.keep_f32 {
        let mut large = sizes.clone().filter(|(_, numel)| *numel >= LEAST_INT8_ELEMENTS);
        ensure!(
            large.any(|(param, _)| param.contains(part.as_str())),
            "--keep-f32 {}: expected a part of the name of a parameter of {} elements or more, \
             found none with it in {}; state of smaller ones stays in f32 anyway",
            Quoted(part),
            grouped(LEAST_INT8_ELEMENTS),
            from.display()
        );
    }
    Ok(())
}
