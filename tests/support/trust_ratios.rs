//! What holds for rules that take norms of whole tensors, LARS and LAMB, alike.

use fusestep_planner::{Optimizer, Planner, RunAlone};
use fusestep_tensor::{DType, Role, Trust};
use fusestep_testkit::{Case, EDGE_NUMELS, backends, check};

/// Requires that tensors whose norms are not finite stay as they were, and that backends count
/// them.
pub(crate) fn a_backend_counts_what_it_left_as_it_was(optimizer: Optimizer) {
    let case = Case::new([1000, 3, 200_000], DType::F32);
    for (name, backend) in backends() {
        let plan = Planner::new(optimizer).plan(&case.params).unwrap();
        let mut state = plan.allocate(backend.as_ref()).unwrap();
        for (index, param) in case.params.iter().enumerate() {
            let bytes = case.param_bytes(index);
            state.write(backend.as_ref(), Role::Param, &param.name, &bytes).unwrap();
            let mut grad = case.grad_bytes(index, 1);
            if index != 1 {
                grad[..4].copy_from_slice(&f32::NAN.to_le_bytes());
            }
            state.write(backend.as_ref(), Role::Grad, &param.name, &grad).unwrap();
        }
        for _ in 0..3 {
            RunAlone::of(&plan, &mut state, backend.as_ref()).step_all().unwrap();
        }
        assert_eq!(backend.take_skipped(), Ok(6), "{name}");
        assert_eq!(backend.take_skipped(), Ok(0), "{name}");
        let mut bytes = vec![0; 800_000];
        state.read(backend.as_ref(), Role::Param, "tensor.2", &mut bytes).unwrap();
        assert!(bytes == case.param_bytes(2), "{name}");
    }
}

/// Requires the bits of the naive plan whatever the plan, cap, threads and level, of rules that
/// exclude tensors in one way and in the other.
pub(crate) fn any_plan_gives_the_bits_of_the_naive_plan(rules: [Optimizer; 2]) {
    for dtype in [DType::F32, DType::F64] {
        for rule in rules {
            let mut case = Case::new(EDGE_NUMELS, dtype).with_groups();
            case.params[4].trust = Some(Trust::Plain);
            case.params[5].trust = Some(Trust::Ratio);
            check(rule, &case);
        }
    }
    // Many chunks: the pool sums them out of order, and they are still added in order.
    check(rules[0], &Case::new([65_536 * 5 + 3, 7, 1 << 18], DType::F32));
}
