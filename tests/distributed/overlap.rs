//! Calls and updates beside a backward pass that computes: matrix products of a network whose
//! matrices are the plan's parameters.

use std::time::Instant;

use fusestep_collective::{Collectives, Communicator};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{
    Comms, FuseAllReduce, FuseReduceIntoUpdate, Plan, Planner, Run, Shard, State, Topology,
    UpdateInBackward, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::run::{noise, whole_params};
use crate::train::{backend, on_ranks};

/// Square matrices one behind the other, with tanh in between.
#[derive(Clone, Copy)]
struct Network {
    layers: usize,
    width: usize,
    /// Samples of each rank.
    samples: usize,
}

/// What a backward pass does with a layer's gradient.
#[derive(Clone, Copy, PartialEq)]
enum Reads {
    /// The matrix is read for the layer below before its gradient is given: the promise of
    /// `update_in_backward`.
    BeforeGiving,
    /// After it.
    AfterGiving,
}

impl Network {
    fn params(self) -> Vec<ParamDesc> {
        let width = self.width as u64;
        let layer = |at| {
            let shape = Shape::new([width, width]).unwrap();
            ParamDesc::new(format!("layer{at}.weight"), shape, DType::F32)
        };
        (0..self.layers).map(layer).collect()
    }

    fn start(self, plan: &Plan, backend: &CpuBackend) -> State {
        let mut state = plan.allocate(backend).unwrap();
        for (at, desc) in plan.params().iter().enumerate() {
            let scale = 1.0 / (self.width as f32).sqrt();
            let value = |element| noise([3, at as u64, element]) * scale;
            let values: Vec<f32> = (0..desc.numel()).map(value).collect();
            let bytes = bytemuck::cast_slice(&values);
            state.write(backend, Role::Param, &desc.name, bytes).unwrap();
        }
        state
    }

    fn input(self, rank: usize, step: u64) -> Vec<f32> {
        let elements = 0..(self.samples * self.width) as u64;
        elements.map(|element| noise([rank as u64 + 11, step, element])).collect()
    }

    /// Activations before and behind every layer.
    fn forward(self, state: &State, plan: &Plan, input: Vec<f32>) -> Vec<Vec<f32>> {
        let mut all = vec![input];
        for desc in plan.params() {
            let weight = state.param::<f32>(&desc.name).unwrap();
            let mut out = self.product(&all[all.len() - 1], weight, Side::Transposed);
            out.iter_mut().for_each(|value| *value = value.tanh());
            all.push(out);
        }
        all
    }

    /// `give` takes each layer's gradient, the last layer's first, and may change the state.
    fn backward(
        self,
        (state, plan): (&mut State, &Plan),
        activations: &[Vec<f32>],
        reads: Reads,
        mut give: impl FnMut(&mut State, &str, &[f32]),
    ) {
        // The loss is half the sum of squares of what the last layer says.
        let mut delta = activations[self.layers].clone();
        for at in (0..self.layers).rev() {
            let name = &plan.params()[at].name;
            for (delta, out) in delta.iter_mut().zip(&activations[at + 1]) {
                *delta *= 1.0 - out * out;
            }
            let grad = self.outer(&delta, &activations[at]);
            if reads == Reads::AfterGiving {
                give(state, name, &grad);
            }
            let weight = state.param::<f32>(name).unwrap();
            let below = self.product(&delta, weight, Side::AsItIs);
            if reads == Reads::BeforeGiving {
                give(state, name, &grad);
            }
            delta = below;
        }
    }

    /// Rows of samples times a matrix.
    fn product(self, rows: &[f32], weight: &[f32], side: Side) -> Vec<f32> {
        let width = self.width;
        let mut out = vec![0.0f32; rows.len()];
        for (row, out) in rows.chunks(width).zip(out.chunks_mut(width)) {
            match side {
                Side::Transposed => {
                    for (out, weight) in out.iter_mut().zip(weight.chunks(width)) {
                        *out = row.iter().zip(weight).map(|(a, b)| a * b).sum();
                    }
                }
                Side::AsItIs => {
                    for (value, weight) in row.iter().zip(weight.chunks(width)) {
                        for (out, weight) in out.iter_mut().zip(weight) {
                            *out += value * weight;
                        }
                    }
                }
            }
        }
        out
    }

    /// The gradient of a layer's matrix.
    fn outer(self, delta: &[f32], input: &[f32]) -> Vec<f32> {
        let width = self.width;
        let mut grad = vec![0.0f32; width * width];
        for (delta, input) in delta.chunks(width).zip(input.chunks(width)) {
            for (delta, grad) in delta.iter().zip(grad.chunks_mut(width)) {
                for (grad, input) in grad.iter_mut().zip(input) {
                    *grad += delta * input;
                }
            }
        }
        grad
    }
}

#[derive(Clone, Copy)]
enum Side {
    Transposed,
    AsItIs,
}

fn planner(cap_bytes: u64, zero: ZeroStage) -> Planner {
    let planner = Planner::new(Adam::default().into()).with(FuseAllReduce::of_bytes(cap_bytes));
    match zero {
        ZeroStage::None => planner,
        zero => planner.with(Shard::new(zero)),
    }
}

/// What a run ends with, and segments that had been started when the backward pass had one layer
/// left, in each step.
type Ended = (Vec<Vec<u8>>, Vec<usize>);

fn train(
    network: Network,
    planner: &Planner,
    (comm, streams): (&mut dyn Communicator, usize),
    reads: Reads,
) -> Ended {
    let plan = planner.plan_for(&network.params(), Topology::of(comm));
    let (plan, backend) = (plan.unwrap(), backend());
    let mut comms = Comms::with_streams(comm, streams).unwrap();
    let mut state = network.start(&plan, &backend);
    let (rank, mut started) = (plan.topology().rank, Vec::new());
    for step in 0..3 {
        let activations = network.forward(&state, &plan, network.input(rank, step));
        network.backward((&mut state, &plan), &activations, reads, |state, name, grad| {
            if name == plan.params()[0].name {
                started.push(state.segments_started());
            }
            let bytes = bytemuck::cast_slice(grad);
            Run::of(&plan, state, &backend, &mut comms).push_grad(name, bytes).unwrap();
        });
        Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
    }
    (whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms)), started)
}

#[test]
fn calls_and_updates_beside_a_backward_pass_that_computes_have_begun_and_change_no_bit() {
    let network = Network { layers: 5, width: 40, samples: 3 };
    // A bucket for each layer.
    let cap = 4 * 40 * 40;
    for world in 1..=3 {
        for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two] {
            let run = |planner: Planner, streams, reads| {
                on_ranks(world, |comm| train(network, &planner, (comm, streams), reads))
            };
            let of = |streams| run(planner(cap, zero), streams, Reads::BeforeGiving);
            let expected = of(0);
            assert!(expected.iter().all(|(_, started)| *started == [0; 3]));
            let in_backward = || planner(cap, zero).with(UpdateInBackward::of_bytes(cap));
            let ways = [
                of(1),
                of(2),
                run(in_backward(), 0, Reads::BeforeGiving),
                run(in_backward(), 2, Reads::BeforeGiving),
                run(in_backward().with(FuseReduceIntoUpdate), 0, Reads::BeforeGiving),
            ];
            for (way, found) in ways.iter().enumerate() {
                for ((found, started), (expected, _)) in found.iter().zip(&expected) {
                    assert!(found == expected, "{zero:?}, {world} ranks, way {way}");
                    // All but the first layer's, while that is still being computed.
                    let begun = if world == 1 { 0 } else { 4 };
                    assert_eq!(*started, [begun; 3], "{zero:?}, {world} ranks, way {way}");
                }
            }
            // A backward pass that reads a matrix it has given up goes wrong, or nothing above
            // would have been updated in it.
            let broken = run(in_backward(), 0, Reads::AfterGiving);
            assert!(broken[0].0 != expected[0].0, "{zero:?}, {world} ranks");
        }
    }
}

/// Seconds of a step's parts on the slowest rank, the best of several rounds.
fn time(
    network: Network,
    planner: &Planner,
    (comm, streams): (&mut dyn Communicator, usize),
    (computes, steps): (bool, bool),
) -> f64 {
    let plan = planner.plan_for(&network.params(), Topology::of(comm));
    let (plan, backend) = (plan.unwrap(), backend());
    let mut comms = Comms::with_streams(comm, streams).unwrap();
    let mut state = network.start(&plan, &backend);
    let rank = plan.topology().rank;
    let activations = network.forward(&state, &plan, network.input(rank, 0));
    let grads = vec![1e-3f32; network.width * network.width];
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        comms.communicator().barrier().unwrap();
        let begun = Instant::now();
        let mut give = |state: &mut State, name: &str, grad: &[f32]| {
            if steps {
                let bytes = bytemuck::cast_slice(grad);
                Run::of(&plan, state, &backend, &mut comms).push_grad(name, bytes).unwrap();
            }
        };
        if computes {
            let whole = (&mut state, &plan);
            network.backward(whole, &activations, Reads::BeforeGiving, give);
        } else {
            for desc in plan.params().iter().rev() {
                give(&mut state, &desc.name, &grads);
            }
        }
        if steps {
            Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
        }
        let mut slowest = [begun.elapsed().as_secs_f64()];
        let largest = fusestep_collective::ReduceOp::Max;
        comms.communicator().all_reduce(&mut slowest, largest).unwrap();
        best = best.min(slowest[0]);
    }
    best
}

/// Times that the machine decides, so nothing is required of them. Calls hide behind a backward
/// pass only where that leaves a core for the streams: give the ranks half of the machine's.
///
/// `cargo test --release --test distributed -- --ignored --nocapture overlap`.
#[test]
#[ignore = "prints times, which other work on the machine changes"]
fn times_of_a_step_beside_a_backward_pass_that_computes() {
    let network = Network { layers: 12, width: 768, samples: 24 };
    for world in [1, 2] {
        for zero in [ZeroStage::None, ZeroStage::One] {
            let cap = 4 << 20;
            let plain = || planner(cap, zero);
            let fused = || plain().with(FuseReduceIntoUpdate);
            let early = || UpdateInBackward::of_bytes(cap);
            let (backward, step, both) = ((true, false), (false, true), (true, true));
            let rows = [
                ("backward alone", plain(), 0, backward),
                ("step alone", plain(), 0, step),
                ("step alone, fused", fused(), 0, step),
                ("one after the other", plain(), 0, both),
                ("one after the other, fused", fused(), 0, both),
                ("1 communication stream", plain(), 1, both),
                ("2 communication streams", plain(), 2, both),
                ("updates in backward", plain().with(early()), 0, both),
                ("updates in backward, fused", fused().with(early()), 0, both),
                ("updates in backward, 2 streams", plain().with(early()), 2, both),
            ];
            let mut best = [f64::INFINITY; 10];
            // In turn, so that a machine that grows slower does so for all.
            for _ in 0..3 {
                for (best, (_, planner, streams, parts)) in best.iter_mut().zip(&rows) {
                    let times =
                        on_ranks(world, |comm| time(network, planner, (comm, *streams), *parts));
                    *best = best.min(1e3 * times[0]);
                }
            }
            println!("{world} ranks, zero stage {}, milliseconds:", zero.number());
            for ((what, ..), milliseconds) in rows.iter().zip(best) {
                println!("  {what:<32} {milliseconds:>8.2}");
            }
        }
    }
}
