//! One of a state's rules replaced by another that keeps the same tensors.

use crate::stage::role_names;
use crate::{Optimizer, PlanError, Result, State};

/// [`State::set_optimizer_of`].
pub(crate) fn replace(state: &mut State, rule: usize, optimizer: Optimizer) -> Result<()> {
    state.check_between_steps("optimizer")?;
    state.check_rule(rule)?;
    optimizer.validate()?;
    let mut kernels = Vec::with_capacity(state.storages.len());
    for (index, storage) in state.storages.iter().enumerate() {
        if storage.spec.rule != rule {
            continue;
        }
        let Some(&member) = storage.spec.members.first() else {
            continue;
        };
        let kernel = optimizer.kernel(&state.params[member as usize], &state.precisions)?;
        let (expected, found) = (storage.kernel.lists(), kernel.lists());
        if expected != found {
            return Err(PlanError::OtherLists {
                expected: role_names(expected),
                found: role_names(found),
            });
        }
        // Batches and workspaces were made for the kernel's argument layout and for whether it
        // takes sums.
        let fits = storage.kernel.argument_layout() == kernel.argument_layout()
            && storage.kernel.normed().is_some() == kernel.normed().is_some();
        if !fits {
            return Err(PlanError::OtherRule {
                expected: state.rules[rule].name(),
                found: optimizer.name(),
            });
        }
        kernels.push((index, kernel));
    }
    for (index, kernel) in kernels {
        let storage = &mut state.storages[index];
        kernel.write_scalars(&mut storage.scalars);
        storage.kernel = kernel;
    }
    state.schedule.stale = true;
    state.rules[rule] = optimizer;
    state.rules_hash = None;
    Ok(())
}
