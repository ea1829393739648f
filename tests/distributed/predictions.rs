//! Predicted beside measured steps, printed and not judged: `cargo test --release -p fusestep-tests
//! --test distributed -- --ignored --nocapture predictions`.

use std::num::NonZeroUsize;
use std::time::Instant;

use fusestep_collective::{Collectives, Communicator, Costs, Options, measure, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Comms, CostModel, EventKind, FuseAllReduce, Optimizer, Planner, Run, Shard, Topology, ZeroStage,
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
    (rule, zero, costs): (Optimizer, ZeroStage, Costs),
) -> String {
    let planner = Planner::new(rule).with(FuseAllReduce::of_bytes(25 << 20));
    let planner = match zero {
        ZeroStage::None => planner,
        zero => planner.with(Shard::new(zero)),
    };
    let plan = planner.plan_for(params, Topology::of(comm)).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    let grad = |param: &ParamDesc| 1.0f32.to_le_bytes().repeat(param.numel() as usize);
    let grads: Vec<Vec<u8>> = params.iter().map(grad).collect();
    let mut comms = Comms::direct(comm);
    let (mut whole, mut waiting) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        comms.communicator().barrier().unwrap();
        let start = Instant::now();
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        for (param, grad) in params.iter().zip(&grads).rev() {
            run.push_grad(&param.name, grad).unwrap();
        }
        let report = run.step().unwrap();
        // The first touches memory for the first time.
        if round > 0 {
            whole.push(start.elapsed().as_secs_f64());
            waiting.push(report.exposed_ns as f64 * 1e-9);
        }
    }
    let predicted = plan.rank_summary(CostModel::from(costs));
    let timeline = plan.timeline(&CostModel::from(costs));
    let of_kind = |kind: EventKind| {
        let events = timeline.iter().filter(|event| event.kind == kind);
        events.map(|event| event.end - event.start).sum::<f64>() * 1e3
    };
    // Parameters of stage 3 are gathered by the caller, who does not in this run.
    let gathers = match zero {
        ZeroStage::Three => of_kind(EventKind::Gather),
        _ => 0.0,
    };
    let waiting_predicted = of_kind(EventKind::Reduce);
    format!(
        "{} ranks {:8} {zero:?}: reductions {:6.1} ms, predicted {waiting_predicted:6.1}; step \
         {:6.1} ms, predicted {:6.1}",
        comms.communicator().world_size(),
        rule.name(),
        median_ms(waiting),
        median_ms(whole),
        predicted.predicted_step_ns / 1e6 - gathers,
    )
}

/// The most bytes of buckets at one time, and the time of a step, of stage 2 with one communication
/// stream behind a simulated backward pass.
fn peak(comm: &mut dyn Communicator, params: &[ParamDesc], cap_bytes: u64) -> String {
    let planner = Planner::new(Adam::default().into())
        .with(FuseAllReduce::of_bytes(cap_bytes))
        .with(Shard::new(ZeroStage::Two));
    let plan = planner.plan_for(params, Topology::of(comm)).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    let grad = |param: &ParamDesc| 1.0f32.to_le_bytes().repeat(param.numel() as usize);
    let grads: Vec<Vec<u8>> = params.iter().map(grad).collect();
    let mut comms = Comms::with_streams(comm, 1).unwrap();
    let (mut peaks, mut busy) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        comms.communicator().barrier().unwrap();
        let mut seconds = 0.0;
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        for (param, grad) in params.iter().zip(&grads).rev() {
            std::thread::sleep(std::time::Duration::from_nanos(12 * param.numel()));
            let start = Instant::now();
            run.push_grad(&param.name, grad).unwrap();
            seconds += start.elapsed().as_secs_f64();
        }
        let start = Instant::now();
        let report = run.step().unwrap();
        busy.push(seconds + start.elapsed().as_secs_f64());
        peaks.push(report.segment_peak_bytes as f64 / 1e9);
    }
    format!(
        "buckets of {} MiB beside a backward pass of 300 ms: at most {:.1} MB of {:.1} MB at one \
         time; {:.1} ms of a rank's own work",
        cap_bytes >> 20,
        median_ms(peaks),
        grads.iter().map(Vec::len).sum::<usize>() as f64 / 1e6,
        median_ms(busy),
    )
}

#[test]
#[ignore = "prints times, which say something on a machine that does nothing else"]
fn predictions_beside_what_is_measured() {
    let params = params();
    let sgd = Sgd { momentum: 0.0, ..Sgd::default() };
    for ranks in [2, 4] {
        let lines = run_ranks(ranks, &Options::default(), |mut comm| {
            let costs = measure(&mut comm).unwrap();
            let mut lines = vec![format!("{costs:?}")];
            for cap_bytes in [4 << 20, 25 << 20] {
                lines.push(peak(&mut comm, &params, cap_bytes));
            }
            for rule in [Optimizer::from(sgd), Adam::default().into()] {
                for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
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
