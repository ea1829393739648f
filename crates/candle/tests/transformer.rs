//! A tiny transformer learns a text: with the same bits on ranks as on one process that adds as
//! many micro-steps, at every ZeRO stage, and when it is gone on from a checkpoint.

use std::path::Path;

use candle_core::{DType, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{AdamW, Communicator, Options, Solo};
use fusestep_collective::run_ranks;
use fusestep_models::{Task, Text, Transformer};

/// Windows of a step, of all ranks together.
const BATCH: usize = 8;

/// How a batch is shared out: in so many parts, whose gradients are added in their order. A rank
/// takes one of them, or one process all.
#[derive(Clone, Copy, Debug)]
struct Shared {
    parts: usize,
    zero: u8,
}

fn task() -> Text {
    let tiny =
        Transformer { layers: 2, width: 16, heads: 2, context: 16, ..Transformer::default() };
    Text::shakespeare(tiny).unwrap()
}

/// What a run ends with: the loss of each step that it took, and all bits of the variables.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f32>,
    bits: Vec<Vec<u32>>,
}

/// Trains until so many steps are done, from the folder's checkpoint if there is one, to which it
/// saves after every step.
fn train(
    comm: &mut dyn Communicator,
    shared: Shared,
    until: usize,
    folder: Option<&Path>,
) -> candle_core::Result<Trained> {
    let task = task();
    let (rank, world) = (comm.rank(), comm.world_size());
    let vars = task.start(1, DType::F32)?;
    let names = task.shapes().into_iter().map(|(name, _)| name);
    let named: Vec<(String, Var)> = names.zip(vars.iter().cloned()).collect();
    let micro = shared.parts / world;
    let options = Options {
        zero: shared.zero,
        accumulate: micro as u32,
        schedule: Some("warmup:3,cosine:40".parse().unwrap()),
        clip_norm: Some(1.0),
        ..Options::default()
    };
    let params = ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::with_options(named, params, &options)?.on(comm)?;
    let done = folder.map_or(Ok(0), |folder| optimizer.resume(folder))?;
    let mut losses = Vec::new();
    for step in done..until {
        let mut sum = 0.0;
        for at in 0..micro {
            let of_part = BATCH / shared.parts;
            let first = step * BATCH + (at * world + rank) * of_part;
            // Windows from all over the text.
            let windows = (first..first + of_part).map(|at| at * 7919 % task.samples());
            let loss = task.loss(&vars, &windows.collect::<Vec<_>>())?;
            optimizer.backward_step(&loss)?;
            sum += loss.to_scalar::<f32>()?;
        }
        losses.push(sum / micro as f32);
        if let Some(folder) = folder {
            optimizer.checkpoint_every(1, folder, step)?;
        }
    }
    optimizer.finish_saves()?;
    let bits = vars.iter().map(|var| {
        let values = var.flatten_all()?.to_vec1::<f32>()?;
        Ok(values.into_iter().map(f32::to_bits).collect())
    });
    Ok(Trained { losses, bits: bits.collect::<candle_core::Result<_>>()? })
}

/// One process.
fn alone(shared: Shared, until: usize, folder: Option<&Path>) -> Trained {
    train(&mut Solo::new(), shared, until, folder).unwrap()
}

/// As many ranks as there are parts; the variables of all of them are equal.
fn ranks(shared: Shared, until: usize, folder: Option<&Path>) -> Vec<Vec<u32>> {
    let options = fusestep_collective::Options::default();
    let outcomes = run_ranks(shared.parts, &options, |mut comm| {
        train(&mut comm, shared, until, folder).unwrap().bits
    });
    let mut bits = outcomes.unwrap().into_iter().map(|bits| bits.unwrap());
    let first = bits.next().unwrap();
    assert!(bits.all(|other| other == first), "{shared:?}");
    first
}

#[test]
fn it_learns() {
    let shared = Shared { parts: 1, zero: 0 };
    let losses = alone(shared, 40, None).losses;
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (first, last) = (mean(&losses[..4]), mean(&losses[36..]));
    // ln 65 is what knowing nothing costs.
    assert!((first - 65f32.ln()).abs() < 0.5, "{losses:?}");
    assert!(last < first - 0.7, "{losses:?}");
}

#[test]
fn ranks_have_the_bits_of_one_process_with_as_many_micro_steps() {
    let mut of_parts = Vec::new();
    for parts in [2, 4] {
        let whole = alone(Shared { parts, zero: 0 }, 4, None).bits;
        for zero in 0..=2 {
            let shared = Shared { parts, zero };
            assert!(ranks(shared, 4, None) == whole, "{shared:?}");
        }
        of_parts.push(whole);
    }
    // Sums of other parts round otherwise: it is the order that is promised, not the batch.
    assert_ne!(of_parts[0], of_parts[1]);
}

#[test]
fn a_run_that_is_resumed_has_the_bits_of_one_that_was_not() {
    let uninterrupted = ranks(Shared { parts: 2, zero: 1 }, 6, None);
    let folder = tempfile::tempdir().unwrap();
    ranks(Shared { parts: 2, zero: 2 }, 3, Some(folder.path()));
    // On in one process, and then on two ranks again.
    let steps = alone(Shared { parts: 2, zero: 0 }, 4, Some(folder.path())).losses;
    assert_eq!(steps.len(), 1);
    let resumed = ranks(Shared { parts: 2, zero: 1 }, 6, Some(folder.path()));
    assert!(resumed == uninterrupted);
}
