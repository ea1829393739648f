//! `fusestep step`: N optimizer steps on a file of parameters.

mod summary;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{bail, ensure};
use clap::Args;
use fusestep_checkpoint::{StateTensors, load_state};
use fusestep_coalesce::zeroed_bytes;
use fusestep_launch::Backend;
use fusestep_planner::{
    GradReport, MAX_STEPS, Plan, PlanError, RunAlone, State, StepReport, Topology,
};
use fusestep_tensor::{ParamDesc, Quoted, Role, counted};
use fusestep_tensor_file::{
    Claim, Prepared, TensorBytes, TensorFile, Versions, check_writable_together,
};

use self::summary::{Gradient, StepSummary, Update};
use crate::config::ConfigArgs;
use crate::inputs::{Model, model_of};
use crate::options::BackendArgs;
use crate::options::whole;
use crate::output::{did_write, print_json, progress, warn, warn_non_finite};
use crate::places::{Place, require_apart, require_folder};
use crate::planning::planner;
use crate::rules::OptimizerArgs;
use crate::settings::{self, Settings};

/// Most steps of a run.
const MOST_STEPS: u64 = 1_000_000_000;

/// Parts in which the progress of a run is shown.
const BLOCKS: usize = 100;

/// Flags of `step`.
#[derive(Debug, Args)]
pub(crate) struct StepArgs {
    /// Parameters (.safetensors)
    #[arg(long, value_name = "FILE")]
    params: PathBuf,
    /// Gradients (.safetensors): the parameters' names, shapes and dtypes
    #[arg(long, value_name = "FILE")]
    grads: PathBuf,
    /// Steps to apply, each with the same gradients
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 0, MOST_STEPS>)]
    steps: usize,
    #[command(flatten)]
    optimizer: OptimizerArgs,
    #[command(flatten)]
    settings: Settings<settings::Step>,
    #[command(flatten)]
    backend: BackendArgs,
    /// Optimizer state of an earlier run; without it the run starts at step 0
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Take the state although it was saved with other parameters than these
    #[arg(long, requires = "state")]
    any_parameters: bool,
    /// Take the state although it was saved under other settings, as far as it means the same:
    /// another momentum, decay or clipping, other parameters excluded
    #[arg(long, requires = "state")]
    any_settings: bool,
    /// File for the parameters; an existing file, or the file that a link leads to, is replaced
    /// once the new one is complete
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// File for the optimizer state; parameters and state are replaced together or not at all
    #[arg(long, value_name = "FILE")]
    state_out: Option<PathBuf>,
    /// File for the averages that a model is evaluated with, under schedule-free; written along
    /// with the other files
    #[arg(long, value_name = "FILE")]
    average_out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Print what was done as one JSON object
    #[arg(long)]
    json: bool,
}

/// Refuses outputs that would take the place of each other or of an input.
fn check_places(args: &StepArgs) -> anyhow::Result<()> {
    let outputs = outputs(args);
    let inputs = [
        (("--params", Some(&args.params)), "--out"),
        (("--grads", Some(&args.grads)), ""),
        (("--state", args.state.as_ref()), "--state-out"),
    ];
    for (input, may_replace) in inputs {
        let others = outputs.into_iter().filter(|(flag, _)| *flag != may_replace);
        require_apart(input, &others.collect::<Vec<_>>())?;
    }
    require_apart(("", None), &outputs)
}

/// Files that are written, after their flags.
fn outputs(args: &StepArgs) -> [Place<'_>; 3] {
    [
        ("--out", Some(&args.out)),
        ("--state-out", args.state_out.as_ref()),
        ("--average-out", args.average_out.as_ref()),
    ]
}

/// Files that are asked for and written.
fn written(args: &StepArgs) -> impl Iterator<Item = &Path> {
    outputs(args).into_iter().filter_map(|(_, path)| path.map(PathBuf::as_path))
}

/// Files that are read.
fn read(args: &StepArgs) -> impl Iterator<Item = &Path> {
    [&args.params, &args.grads].into_iter().chain(&args.state).map(PathBuf::as_path)
}

/// Keeps other steps from the outputs until they are written. Finishes outputs and inputs that an
/// earlier step had committed before it was killed.
fn claim(args: &StepArgs) -> anyhow::Result<Claim<'static>> {
    for (flag, path) in outputs(args) {
        path.map_or(Ok(()), |path| require_folder(flag, path))?;
    }
    let outputs: Vec<&Path> = written(args).collect();
    // An output that cannot be written is refused before any work.
    check_writable_together(&outputs)?;
    let claim = Claim::with_inputs(&outputs, &read(args).collect::<Vec<_>>())?;
    for finished in claim.finished() {
        warn(&finished.to_string());
    }
    Ok(claim)
}

pub(crate) fn run(args: &StepArgs) -> anyhow::Result<()> {
    check_places(args)?;
    let backend = args.backend.open(&args.settings)?;
    let claim = claim(args)?;
    let versions = Versions::of(&read(args).collect::<Vec<_>>())?;
    let params = TensorFile::read(&args.params)?;
    let grads = TensorFile::read(&args.grads)?;
    let mut model = model_of(&params)?;
    args.optimizer.check(&args.settings, &model.params)?;
    let rule = args.optimizer.rule()?;
    ensure!(
        args.average_out.is_none() || rule.rule().averaging().is_some(),
        "--average-out: expected --optimizer schedule-free, found {}, which keeps no average; leave \
         --average-out out: --out has what a model is evaluated with",
        args.optimizer.optimizer.name()
    );
    let options = args.settings.of_model(rule, &mut model.params)?;
    let planner = planner(&options, &model.params, Topology::SOLO, backend.limits())?;
    let plan = planner.plan(&model.params)?;
    check_gradients(&model, &params, &grads)?;

    let mut state = plan.allocate(backend.as_ref())?;
    for param in &model.params {
        for (role, file) in [(Role::Param, &params), (Role::Grad, &grads)] {
            let bytes = file.bytes(&param.name).unwrap_or_default();
            state.write(backend.as_ref(), role, &param.name, bytes)?;
        }
    }
    drop(grads);
    if let Some(path) = &args.state {
        read_state(args, path, &mut state, backend.as_ref())?;
        // A state file of more steps could not be read again.
        let (taken, more) = (state.step(), args.steps as u64);
        ensure!(
            taken + more <= MAX_STEPS,
            "--steps: expected at most {} after the {taken} of {}, found {more}",
            MAX_STEPS - taken,
            path.display()
        );
    }
    // All inputs must be versions of one time.
    versions.require_same()?;
    let summary = run_steps(args, &plan, &mut state, backend.as_ref())?;
    let prepared = prepare_files(args, &params, &model, &state, backend.as_ref())?;
    let wrote: Vec<String> =
        written(args).map(|path| format!("{} {}", did_write(path), path.display())).collect();
    claim.commit(prepared.files)?;
    warn_non_finite(&args.out, prepared.params_non_finite.iter().map(String::as_str));
    if let Some(path) = &args.state_out {
        warn_non_finite(path, prepared.non_finite.iter().map(String::as_str));
    }
    if args.json { print_json(&summary) } else { summary.print(&wrote) }
}

fn run_steps(
    args: &StepArgs,
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
) -> anyhow::Result<StepSummary> {
    let start = Instant::now();
    let skipped_before = state.skipped();
    let mut last = StepReport {
        loss_scale: state.loss_scale().map(|scale| scale.scale()),
        ..StepReport::default()
    };
    // In blocks, so that the bar takes nothing of a step's time.
    let bar = progress(args.steps as u64, "steps");
    let block = args.steps.div_ceil(BLOCKS).max(1);
    for taken in 0..args.steps {
        last = RunAlone::of(plan, state, backend).step_all()?;
        if (taken + 1).is_multiple_of(block) {
            bar.inc(block as u64);
        }
    }
    bar.finish_and_clear();
    backend.synchronize()?;
    let nanoseconds = start.elapsed().as_nanos() as f64;
    let tensors_skipped = backend.take_skipped()?;
    if tensors_skipped > 0 {
        warn(&format!(
            "warning: tensors were left as they were {}: their norms or rates are not finite",
            counted(tensors_skipped, "time")
        ));
    }
    let (reports, norms) = match args.steps {
        0 => (None, None),
        _ => (state.grad_reports(backend)?, state.update_norms(backend)?),
    };
    let updates = norms.map(|norms| {
        let params = plan.params().iter().zip(norms);
        let updates = params.map(|(param, norm)| Update { name: param.name.clone(), norm });
        updates.collect()
    });
    let named = |reports: Vec<GradReport>| {
        let params = plan.params().iter();
        let gradients = params
            .zip(reports)
            .map(|(param, report)| Gradient { name: param.name.clone(), report });
        gradients.collect()
    };
    Ok(StepSummary {
        gradients: reports.map(named),
        update_norm: last.update_norm,
        updates,
        steps: args.steps as u64,
        step: state.step(),
        launches: last.launches,
        ns_per_step: (args.steps > 0).then(|| nanoseconds / args.steps as f64),
        parameters: plan.params().len(),
        elements: plan.elements(),
        tensors_skipped,
        backend: backend.name(),
        optimizer: plan.optimizer().name(),
        grad_norm: last.grad_norm,
        skipped: state.skipped() - skipped_before,
        loss_scale: last.loss_scale,
    })
}

/// Reads the state, which must belong to these parameters.
fn read_state(
    args: &StepArgs,
    path: &Path,
    state: &mut State,
    backend: &dyn Backend,
) -> anyhow::Result<()> {
    if args.any_settings {
        state.any_settings();
    }
    let expected = load_state(state, backend, path)?;
    let found = state.parameters_xxh3(backend)?;
    if let (Some(expected), Some(found)) = (expected, found)
        && expected != found
    {
        ensure!(
            args.any_parameters,
            "{}: expected the parameters that it was saved with, xxh3 {}, found xxh3 {found} in \
             {}; give those, or --any-parameters if these are meant",
            path.display(),
            Quoted(&expected),
            args.params.display()
        );
    }
    Ok(())
}

/// Requires a gradient of equal shape and dtype for every parameter, and no other gradient.
fn check_gradients(model: &Model, params: &TensorFile, grads: &TensorFile) -> anyhow::Result<()> {
    let path = grads.path().display();
    for ParamDesc { name, shape, dtype, .. } in &model.params {
        let Some(entry) = grads.entries().get(name) else {
            bail!(
                "{path}: gradient of `{}`: expected {dtype} {}, found no tensor of this name",
                Quoted(name),
                Quoted(&shape.to_string())
            );
        };
        ensure!(
            entry.element_type() == Some(*dtype) && entry.shape == *shape,
            "{path}: gradient of `{}`: expected {dtype} {} like the parameter, found {} {}; cast or \
             reshape the gradient",
            Quoted(name),
            Quoted(&shape.to_string()),
            entry.dtype_name(),
            Quoted(&entry.shape.to_string()),
        );
    }
    for name in grads.entries().keys() {
        let found = params.entries().get(name);
        if let Some(buffer) = found.filter(|_| model.buffers.contains(name)) {
            bail!(
                "{path}: gradient `{}`: expected a parameter of f32, f64, f16 or bf16 in {}, \
                 found a tensor of {}, which takes no step; leave its gradient out",
                Quoted(name),
                params.path().display(),
                buffer.dtype_name()
            );
        }
        ensure!(
            found.is_some(),
            "{path}: gradient `{}`: expected a parameter of this name in {}, found none",
            Quoted(name),
            params.path().display()
        );
    }
    Ok(())
}

/// Tensors of a file of parameters: the values that `read` gives, and the model's buffers.
fn params<'a>(
    input: &'a TensorFile,
    model: &Model,
    read: impl Fn(&str, &mut [u8]) -> Result<(), PlanError>,
) -> Result<Vec<(String, TensorBytes<'a>)>, PlanError> {
    let mut tensors = Vec::with_capacity(input.entries().len());
    for param in &model.params {
        let len_bytes = input.bytes(&param.name).map_or(0, <[u8]>::len);
        let mut bytes = zeroed_bytes(len_bytes)?;
        read(&param.name, &mut bytes)?;
        let tensor = TensorBytes::of(param.dtype, &param.shape, Cow::Owned(bytes));
        tensors.push((param.name.clone(), tensor));
    }
    for name in &model.buffers {
        if let (Some(entry), Some(bytes)) = (input.entries().get(name), input.bytes(name)) {
            tensors.push((name.clone(), entry.with_bytes(bytes)));
        }
    }
    Ok(tensors)
}

/// All outputs, complete and beside their places.
struct PreparedFiles {
    files: Vec<Prepared<'static>>,
    /// Parameters with values that are not finite.
    params_non_finite: Vec<String>,
    /// Tensors of state with such values.
    non_finite: Vec<String>,
}

fn prepare_files(
    args: &StepArgs,
    input: &TensorFile,
    model: &Model,
    state: &State,
    backend: &dyn Backend,
) -> anyhow::Result<PreparedFiles> {
    let metadata: HashMap<String, String> = input.metadata().clone();
    let read = |name: &str, bytes: &mut [u8]| state.read(backend, Role::Param, name, bytes);
    let trained = params(input, model, read)?;
    let of_params = model.params.iter().zip(&trained);
    let of_params = of_params.filter(|(param, (_, own))| param.dtype.non_finite(&own.bytes) > 0);
    let params_non_finite = of_params.map(|(param, _)| param.name.clone()).collect();
    let mut files = vec![Prepared::tensors(&args.out, &trained, metadata.clone())?];
    drop(trained);
    if let Some(path) = &args.average_out {
        let read = |name: &str, bytes: &mut [u8]| state.read_average(backend, name, bytes);
        let averages = params(input, model, read)?;
        files.push(Prepared::tensors(path, &averages, metadata)?);
    }
    let mut non_finite = Vec::new();
    if let Some(path) = &args.state_out {
        let state = StateTensors::of(state, backend)?;
        non_finite.extend(state.non_finite().map(str::to_owned));
        files.push(Prepared::tensors(path, &state.tensors, state.metadata)?);
    }
    Ok(PreparedFiles { files, params_non_finite, non_finite })
}
