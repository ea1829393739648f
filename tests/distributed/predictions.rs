//! Predicted beside measured steps, printed and not judged: `cargo test --release -p fusestep-tests --test distributed -- --ignored
//! --nocapture predictions`.

use std::num::NonZeroUsize;
use std::time::Instant;

use fusestep_collective::{Collectives, Communicator, Costs, Options, measure, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Comms, CostModel, FuseAllReduce, Optimizer, Planner, Shard, Topology, Zero,
};
use fusestep_tensor::{DType, ParamDesc, Shape};

const ROUNDS: usize = 9;

/// ResNet-50's parameters, 97.5 MiB of f32.
fn params() -> Vec<ParamDesc> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/shapes/resnet50.json");
    let text = std::fs::read_to_string(path).unwrap();
    let list: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let describe = |entry: &serde_json::Value| {
        let dims = entry["shape"].as_array().unwrap();
        let dims: Vec<u64> = dims.iter().map(|dim| dim.as_u64().unwrap()).collect();
        let name = entry["name"].as_str().unwrap();
        ParamDesc::new(name.to_owned(), Shape::new(dims).unwrap(), DType::F32)
    };
    list.iter().map(describe).collect()
}

fn median_ms(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2] * 1e3
}

/// One line: waiting for calls and whole steps, measured and predicted.
fn line(
    comm: &mut dyn Communicator,
    params: &[ParamDesc],
    (rule, zero, costs): (Optimizer, Zero, Costs),
) -> String {
    let planner = Planner::new(rule).with(FuseAllReduce::of_bytes(25 << 20));
    let planner = match zero {
        Zero::Zero0 => planner,
        zero => planner.with(Shard::new(zero)),
    };
    let plan = planner.plan_for(params, Topology::of(comm)).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    let grad = |param: &ParamDesc| 1.0f32.to_le_bytes().repeat(param.numel() as usize);
    let grads: Vec<Vec<u8>> = params.iter().map(grad).collect();
    let mut comms = Comms::direct(comm);
    let (mut whole, mut waiting) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        comms.communicator().barrier().unwrap();
        let start = Instant::now();
        for (param, grad) in params.iter().zip(&grads).rev() {
            plan.give_gradient(&mut state, &mut comms, &param.name, grad)
                .unwrap();
        }
        let report = plan.run_with(&mut state, &backend, &mut comms).unwrap();
        // The first touches memory for the first time.
        if round > 0 {
            whole.push(start.elapsed().as_secs_f64());
            waiting.push(report.exposed_ns as f64 * 1e-9);
        }
    }
    let predicted = plan.summary(CostModel::from(costs));
    // Parameters of stage 3 are gathered by the caller, who does not in this run.
    let gathers = match zero {
        Zero::Zero3 => {
            let timeline = plan.timeline(&CostModel::from(costs));
            let kind = fusestep_planner::EventKind::Gather;
            let gathers = timeline.iter().filter(|event| event.kind == kind);
            gathers.map(|event| event.end - event.start).sum::<f64>() * 1e3
        }
        _ => 0.0,
    };
    let waiting_predicted: f64 = plan
        .timeline(&CostModel::from(costs))
        .iter()
        .filter(|event| event.kind == fusestep_planner::EventKind::Reduce)
        .map(|event| (event.end - event.start) * 1e3)
        .sum();
    format!(
        "{} ranks {:8} {zero:?}: reductions {:6.1} ms, predicted {waiting_predicted:6.1}; step {:6.1} ms, predicted {:6.1}",
        comms.communicator().world_size(),
        rule.name(),
        median_ms(waiting),
        median_ms(whole),
        predicted.predicted_step_ns / 1e6 - gathers,
    )
}

#[test]
#[ignore = "prints times, which say something on a machine that does nothing else"]
fn predictions_beside_what_is_measured() {
    let params = params();
    let sgd = Sgd {
        momentum: 0.0,
        ..Sgd::default()
    };
    for ranks in [2, 4] {
        let lines = run_ranks(ranks, &Options::default(), |mut comm| {
            let costs = measure(&mut comm).unwrap();
            let mut lines = vec![format!("{costs:?}")];
            for rule in [Optimizer::from(sgd), Adam::default().into()] {
                for zero in [Zero::Zero0, Zero::Zero1, Zero::Zero2, Zero::Zero3] {
                    lines.push(line(&mut comm, &params, (rule, zero, costs)));
                }
            }
            lines
        });
        for line in lines.unwrap().swap_remove(0).unwrap() {
            println!("{line}");
        }
    }
}
