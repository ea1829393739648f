//! Masters that have to follow their parameters.

use fusestep_tensor::Role;

use crate::plan::settings::Tensors;
use crate::plan::value::Plan;

/// Parameters that masters have to follow before the next step.
pub(crate) struct Masters {
    /// Parameters borrowed for writing since the last step.
    pub(crate) borrowed_for_writing: Vec<bool>,
    pub(crate) any_borrowed_for_writing: bool,
    /// Masters of parameters that the caller lends, not written yet.
    pub(crate) awaited: Vec<bool>,
    pub(crate) any_awaited: bool,
}

impl Masters {
    /// The masters of a state that has not been written.
    pub(crate) fn new(plan: &Plan) -> Self {
        let mut awaited = vec![false; plan.params.len()];
        for spec in &plan.storages {
            let master = spec.lists.iter().any(|list| list.role == Role::Master);
            for &member in &spec.members {
                awaited[member as usize] = master && plan.tensors == Tensors::Borrowed;
            }
        }
        Self {
            borrowed_for_writing: vec![false; plan.params.len()],
            any_borrowed_for_writing: false,
            any_awaited: awaited.contains(&true),
            awaited,
        }
    }
}
