//! Parameters with rules of their own, under one norm of all gradients.

use fusestep_fused_adam::Adam;
use fusestep_lars_momentum::Lars;
use fusestep_planner::{
    ClipByGlobalNorm, FuseAllReduce, PlanError, Planner, RunAlone, Shard, Topology, Verdict,
    ZeroStage,
};

use crate::run::Case;
use crate::train::{Trained, backend, start, train};

/// Parameters that LARS updates; AdamW has the others.
const LARS: [usize; 3] = [0, 4, 5];
const CLIP: f64 = 0.25;

fn case(world: usize) -> Case {
    Case {
        numels: vec![70_001, 3, 0, 1, 5_003, 130, 2_257],
        world,
        clip: Some(CLIP),
        without_gradient: (0..world).map(|rank| (rank, 1, 4)).chain([(0, 2, 6)]).collect(),
        ..Case::default()
    }
}

fn lars() -> Lars {
    Lars::default()
}

fn adamw() -> Adam {
    Adam { lr: 0.01, ..Adam::default() }
}

fn names(case: &Case) -> Vec<String> {
    let params = case.params();
    LARS.iter().map(|&at| params[at].name.clone()).collect()
}

fn planner(case: &Case, zero: ZeroStage) -> Planner {
    Planner::new(adamw().into())
        .group(names(case), lars().into())
        .with(FuseAllReduce::of_bytes(100_000))
        .with(Shard::new(zero))
        .with(ClipByGlobalNorm::new(CLIP))
}

/// All parameters by either rule alone: the gradients, so their norm and the factor, are those of
/// the two together.
fn by_hand(case: &Case) -> (Vec<Vec<u8>>, Vec<Option<u64>>) {
    let of = |rule| Case { rule, ..case.clone() }.by_hand();
    let (lars, adamw) = (of(lars().into()), of(adamw().into()));
    let norms = |outcome: &crate::run::Outcome| -> Vec<Option<u64>> {
        let reports = outcome.reports.iter();
        reports.map(|report| report.grad_norm.map(f64::to_bits)).collect()
    };
    assert_eq!(norms(&lars), norms(&adamw));
    assert!(lars.reports.iter().all(|report| report.grad_norm > Some(CLIP)));
    let both = (0..case.numels.len()).map(|param| {
        let from = if LARS.contains(&param) { &lars } else { &adamw };
        from.params[param].clone()
    });
    (both.collect(), norms(&adamw))
}

fn norms(trained: &Trained) -> Vec<Option<u64>> {
    let updates = trained.reports.iter().map(|report| report.update.unwrap());
    updates.map(|update| update.grad_norm.map(f64::to_bits)).collect()
}

#[test]
fn groups_have_the_bits_of_their_own_rules_under_one_norm() {
    for world in [1, 3] {
        let case = case(world);
        let (expected, expected_norms) = by_hand(&case);
        for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            for trained in train(&case, &planner(&case, zero)) {
                assert!(trained.params == expected, "{world} {zero:?}");
                assert_eq!(norms(&trained), expected_norms, "{world} {zero:?}");
            }
        }
        let naive = Planner::new(adamw().into())
            .naive()
            .group(names(&case), lars().into())
            .with(ClipByGlobalNorm::new(CLIP));
        assert!(train(&case, &naive)[world - 1].params == expected, "{world}");
    }
}

#[test]
fn groups_split_storages_and_launches_and_the_plan_says_so() {
    for world in [1, 3] {
        let case = case(world);
        let plan = planner(&case, ZeroStage::None);
        let plan = plan.plan_for(&case.params(), Topology::new(0, world).unwrap());
        let plan = plan.unwrap();
        assert_eq!(plan.storages().len(), 2);
        for (param, desc) in plan.params().iter().enumerate() {
            let rule = if LARS.contains(&param) { lars().into() } else { adamw().into() };
            assert_eq!(plan.optimizer_of(param), &rule, "{}", desc.name);
            let own =
                |spec: &&fusestep_planner::StorageSpec| spec.members.contains(&(param as u32));
            let spec = plan.storages().iter().find(own).unwrap();
            assert_eq!(spec.kernel.contains("lars"), LARS.contains(&param));
            assert_eq!(spec.rule, usize::from(LARS.contains(&param)));
        }
        let split = |pass: &str, reason: &str| {
            plan.explain().iter().any(|note| {
                let own = note.pass == pass && note.verdict == Verdict::Split;
                own && note.reason.contains(reason)
            })
        };
        assert!(split("coalesce_gradients", "a launch has one rule"));
        assert!(split("fuse_optimizer", "run apart"));
        let text = plan.to_string();
        assert!(text.contains("adam") && text.contains("  and lars"), "{text}");
    }
}

#[test]
fn groups_of_equal_rules_are_one() {
    let case = case(1);
    let split = |first, second| {
        let planner = Planner::new(adamw().into())
            .group(["layer0.weight0"], first)
            .group(["layer2.weight4"], second);
        planner.plan(&case.params()).unwrap().storages().len()
    };
    let slow = Lars { lr: 1e-5, ..lars() };
    assert_eq!(split(lars().into(), lars().into()), 2);
    assert_eq!(split(lars().into(), slow.into()), 3);
    assert_eq!(split(adamw().into(), adamw().into()), 1);
}

#[test]
fn names_that_are_unknown_or_in_two_groups_are_refused() {
    let case = case(1);
    let unknown = Planner::new(adamw().into()).group(["nobody"], lars().into());
    let error = unknown.plan(&case.params()).unwrap_err();
    assert!(matches!(error, PlanError::UnknownName { ref name, .. } if name == "nobody"));
    let twice = Planner::new(adamw().into())
        .group(["layer0.weight0"], lars().into())
        .group(["layer0.weight0"], Adam::default().into());
    let error = twice.plan(&case.params()).unwrap_err().to_string();
    assert!(error.contains("`layer0.weight0`: the group of lars"), "{error}");
    let wrong = Lars { lr: f64::NAN, ..lars() };
    let wrong = Planner::new(adamw().into()).group(["layer0.weight0"], wrong.into());
    assert!(wrong.plan(&case.params()).is_err());
}

#[test]
fn each_group_has_a_learning_rate_of_its_own() {
    let case = Case { without_gradient: Vec::new(), ..case(1) };
    let plan = planner(&case, ZeroStage::None).plan(&case.params()).unwrap();
    let backend = backend();
    let step = |rates: [Option<f64>; 2]| -> Vec<Vec<u8>> {
        let mut state = start(&case, &plan, &backend);
        for (rule, lr) in rates.into_iter().enumerate() {
            if let Some(lr) = lr {
                state.set_lr_of(rule, lr).unwrap();
                assert_eq!(state.rules()[rule].lr(), lr);
            }
        }
        for (param, desc) in plan.params().iter().enumerate() {
            let grad = case.gradient(0, 0, param);
            let role = fusestep_tensor::Role::Grad;
            state.write(&backend, role, &desc.name, &grad).unwrap();
        }
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
        let read = |name: &str| bytemuck::cast_slice(state.param::<f32>(name).unwrap()).to_vec();
        plan.params().iter().map(|desc| read(&desc.name)).collect()
    };
    let (usual, other) = (step([None, None]), step([None, Some(0.0)]));
    for (param, (usual, other)) in usual.iter().zip(&other).enumerate() {
        let start = case.first_values(param);
        if LARS.contains(&param) {
            assert!(*other == start && *usual != start, "{param}");
        } else {
            assert!(usual == other, "{param}");
        }
    }
    let mut state = start(&case, &plan, &backend);
    let error = state.set_lr_of(2, 0.1).unwrap_err();
    assert!(matches!(error, PlanError::UnknownRule { rule: 2, count: 2 }), "{error}");
}
