//! What a rank is set up from: what Python asks for, and the plan that comes of it.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use fusestep::planner::{
    FuseAllReduce, FuseReduceIntoUpdate, GradientAccumulation, Plan, Planner, Shard, Topology,
    ZeroStage,
};
use fusestep::tensor::ParamDesc;
use fusestep::{Error, Shape, Tensors};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::rules::{Settings, number, parse, refused, trusts};
use crate::session::{Described, dtype_of};

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// What a rank is set up from.
pub(crate) struct Setup {
    planner: Planner,
    params: Vec<ParamDesc>,
    pub(crate) zero: u8,
    pub(crate) accumulate: NonZeroU32,
    /// Most bytes of gradients in one call.
    bucket_bytes: Option<u64>,
    /// Threads that reduce while gradients come; with none a step reduces and updates at once.
    pub(crate) streams: usize,
    pub(crate) threads: NonZeroUsize,
    pub(crate) engine: Option<String>,
    pub(crate) timeout: Duration,
}

impl Setup {
    /// What Python asks for, and the number of each group's rule.
    pub(crate) fn of(
        described: &[Described],
        rules: &[Bound<'_, PyDict>],
        options: &Bound<'_, PyDict>,
        threads: usize,
    ) -> PyResult<(Self, Vec<Option<usize>>)> {
        let (rules, trusts) = (parse(rules)?, trusts(rules)?);
        let (distinct, rule_numbers) =
            number(&rules, |group| described.iter().any(|param| param.group == group));
        let Some(&first) = distinct.first() else {
            return Err(PyValueError::new_err("expected a parameter that trains, found none"));
        };
        let asked = Settings(options);
        let mut planner = asked.planner(first, Tensors::Kept)?;
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
        for (names, rule) in names.into_iter().zip(&distinct).skip(1) {
            planner = planner.group(names, *rule);
        }
        let bucket_mib: Option<f64> = asked.get("bucket_mib", "a number")?;
        let timeout = Duration::try_from_secs_f64(asked.get("timeout", "a number")?);
        let setup = Self {
            planner,
            params,
            zero: asked.get("zero", "0, 1 or 2")?,
            accumulate: NonZeroU32::new(asked.get("accumulate", "a whole number")?)
                .unwrap_or(NonZeroU32::MIN),
            bucket_bytes: bucket_mib.map(|mib| (mib * MIB) as u64),
            streams: asked.get("streams", "a whole number")?,
            threads: NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN),
            engine: asked.get("engine", "a name")?,
            timeout: timeout.map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?,
        };
        Ok((setup, rule_numbers))
    }

    /// The plan of this rank.
    pub(crate) fn plan(self, topology: Topology) -> Result<Plan, Error> {
        let mut planner = self.planner;
        if self.accumulate.get() > 1 {
            planner = planner.with(GradientAccumulation::every(self.accumulate));
        }
        let zero = ZeroStage::of(self.zero).filter(|zero| *zero != ZeroStage::Three);
        let zero = zero.ok_or_else(|| format!("zero: expected 0, 1 or 2, found {}", self.zero))?;
        if zero != ZeroStage::None {
            planner = planner.with(Shard::new(zero));
        }
        if topology.world > 1 {
            let cap = self.bucket_bytes;
            let cap = cap.unwrap_or(FuseAllReduce::DEFAULT_CAP_BYTES);
            planner = planner.with(FuseAllReduce::of_bytes(cap));
            if self.streams == 0 {
                planner = planner.with(FuseReduceIntoUpdate);
            }
        }
        Ok(planner.plan_for(&self.params, topology)?)
    }
}
