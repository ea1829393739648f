//! Variables with their names, in an order that does not change from run to run.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use candle_core::Var;
use candle_nn::VarMap;
use fusestep_tensor::{ParamDesc, Shape};

use crate::AdapterError;
use crate::lend::dtype_of;
use crate::memory::Memory;

/// Variables for [`crate::Fused::new`]: a [`VarMap`] or its data (sorted by name), named variables,
/// or a bare list.
///
/// A bare list, such as `varmap.all_vars()`, trains alike but has no names: its state can be
/// neither saved nor loaded, because its order is a hash map's.
pub trait IntoVariables {
    /// The variables.
    fn into_variables(self) -> Variables;
}

/// Variables in plan order.
#[derive(Debug)]
pub struct Variables {
    pub(crate) vars: Vec<(String, Var)>,
    pub(crate) names: Names,
}

/// Whether the names mean the same variables in another run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Names {
    Given,
    Positions,
}

impl IntoVariables for Vec<(String, Var)> {
    fn into_variables(mut self) -> Variables {
        self.sort_by(|a, b| a.0.cmp(&b.0));
        Variables { vars: self, names: Names::Given }
    }
}

impl IntoVariables for &Mutex<HashMap<String, Var>> {
    fn into_variables(self) -> Variables {
        let map = self.lock().unwrap_or_else(PoisonError::into_inner);
        let named: Vec<_> = map.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
        named.into_variables()
    }
}

impl IntoVariables for &VarMap {
    fn into_variables(self) -> Variables {
        self.data().into_variables()
    }
}

impl IntoVariables for Vec<Var> {
    fn into_variables(self) -> Variables {
        let numbered = self.into_iter().enumerate();
        Variables {
            vars: numbered.map(|(i, var)| (i.to_string(), var)).collect(),
            names: Names::Positions,
        }
    }
}

impl Names {
    /// Refuses names that mean something else in another run.
    pub(crate) fn check(self) -> Result<(), AdapterError> {
        match self {
            Names::Given => Ok(()),
            Names::Positions => Err(AdapterError::Unnamed),
        }
    }
}

impl Variables {
    /// Leaves out what is not floating point, as candle's optimizers do.
    pub(crate) fn floating_point(mut self) -> Self {
        self.vars.retain(|(_, var)| var.dtype().is_float());
        self
    }

    /// The variables as the planner sees them.
    pub(crate) fn descriptors(&self, memory: &Memory) -> Result<Vec<ParamDesc>, AdapterError> {
        // Such as those of a VarMap that no model has been built from yet.
        if self.vars.is_empty() {
            return Err(AdapterError::NoVariables);
        }
        let mut seen = HashMap::new();
        let mut descriptors = Vec::with_capacity(self.vars.len());
        for (name, var) in &self.vars {
            memory.check(name, var.device())?;
            if let Some(first) = seen.insert(var.id(), name) {
                return Err(AdapterError::SameVariable {
                    name: name.clone(),
                    first: first.clone(),
                });
            }
            let dtype = dtype_of(var.dtype())
                .ok_or_else(|| AdapterError::DType { name: name.clone(), found: var.dtype() })?;
            let dims: Vec<u64> = var.dims().iter().map(|&dim| dim as u64).collect();
            let shape = Shape::new(dims).map_err(fusestep_planner::PlanError::from)?;
            descriptors.push(ParamDesc::new(name, shape, dtype));
        }
        Ok(descriptors)
    }
}
