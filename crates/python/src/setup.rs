//! The settings of a rank: those that Python gives, and the plan that they make.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fusestep::tensor::ParamDesc;
use fusestep::{Figures, FiguresError, RankCores, Section, Shape, StepOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::described::{Described, dtype_of};
use crate::device::Device;
use crate::errors::refused;
use crate::rules::{Settings, number, own_rules, parse, trusts};

/// Settings of a rank.
pub(crate) struct Setup {
    pub(crate) step: StepOptions,
    pub(crate) params: Vec<ParamDesc>,
    pub(crate) threads: NonZeroUsize,
    pub(crate) engine: Option<String>,
    /// File of the library by which ranks with a device each reach each other.
    pub(crate) nccl_library: Option<PathBuf>,
    pub(crate) device: Device,
    pub(crate) timeout: Duration,
    /// Whether buckets are updated while gradients come.
    pub(crate) is_in_backward: bool,
}

impl Setup {
    /// The settings that Python asks for, and the number of each group's rule.
    pub(crate) fn of(
        described: &[Described],
        rules: &[Bound<'_, PyDict>],
        options: &Bound<'_, PyDict>,
        threads: usize,
        device: Device,
    ) -> PyResult<(Self, Vec<Option<usize>>)> {
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        let (rules, trusts) = (parse(rules)?, trusts(rules)?);
        let (distinct, rule_numbers) =
            number(&rules, &[], |group| described.iter().any(|param| param.group == group));
        let Some(&first) = distinct.first() else {
            return Err(PyValueError::new_err("expected a parameter that trains, found none"));
        };
        let asked = Settings(options);
        let mut step = asked.options(first)?;
        let mut names = vec![Vec::new(); distinct.len()];
        let mut params = Vec::with_capacity(described.len());
        for param in described {
            let shape = Shape::new(param.shape.clone()).map_err(refused)?;
            let desc = ParamDesc::new(param.name.clone(), shape, dtype_of(&param.dtype)?);
            let trust = trusts[param.group];
            params.push(ParamDesc { trust, ..desc });
            if let Some(rule) = rule_numbers[param.group] {
                names[rule].push(param.name.clone());
            }
        }
        step.groups = own_rules(names, &distinct);
        step.describe(&mut params).map_err(refused)?;
        let is_in_backward = is_in_backward(&step)?;
        // PyTorch's backward pass leaves time for calls beside it, in shared memory too, unless
        // ranks have no core left for them.
        step.rank_cores = Some(RankCores::of_this_process(threads, ranks_here()));
        step.figures = figures(asked.get("figures", FIGURES)?)?;
        step.check(1).map_err(refused)?;
        let timeout = Duration::try_from_secs_f64(asked.get("timeout", "a number")?);
        let setup = Self {
            is_in_backward,
            step,
            params,
            threads,
            engine: asked.get("engine", "a name")?,
            nccl_library: match device {
                Device::Host => None,
                Device::Cuda(_) => asked.get("nccl_library", "a path or None")?,
            },
            device,
            timeout: timeout.map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?,
        };
        Ok((setup, rule_numbers))
    }

    /// Whether gradients stay where views of them are: not where they are added up, shared out, or
    /// updated with while they come.
    pub(crate) fn lends_gradients(&self) -> bool {
        // Nor on a device, where each is handed over anew.
        let moves = matches!(self.device, Device::Cuda(_))
            || self.step.zero > 1
            || self.step.shard_group.is_some();
        !moves && self.step.is_update_each() && !self.is_in_backward
    }
}

/// Ranks on this machine, as launchers of MPI tell them; others start ranks on one machine.
fn ranks_here() -> Option<usize> {
    const NAMES: [&str; 4] = [
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "PMI_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ];
    let mut told = NAMES.iter().filter_map(|name| std::env::var(name).ok()?.parse().ok());
    told.next()
}

/// Values of `figures`.
const FIGURES: &str = "a path of a file of `fusestep check`, \"kept\" or None";

/// The figures of a file, or those that are kept for this machine, if any are.
fn figures(asked: Option<String>) -> PyResult<Option<Figures>> {
    match asked.as_deref() {
        None => Ok(None),
        Some("kept") => match Figures::of_this_machine() {
            Ok(kept) => Ok(Some(kept)),
            Err(FiguresError::Off | FiguresError::Unmeasured | FiguresError::NoPlace) => Ok(None),
            // A file that is there and of no use is told, since the program asked for it.
            Err(error) => Err(refused(format!("figures: {error}"))),
        },
        Some(path) => {
            let told = |error| refused(format!("figures of {path}: {error}"));
            Figures::read(Path::new(path)).map(Some).map_err(told)
        }
    }
}

/// Whether buckets are updated while gradients come.
fn is_in_backward(step: &StepOptions) -> PyResult<bool> {
    let changed = step.changed().map_err(refused)?;
    Ok(changed.iter().any(|changed| changed.section == Section::Backward))
}
