//! candle's optimizers on ranks that mpirun has started; `cargo xtask mpi` runs it.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{AdamW, Options};
use fusestep_collective::{Communicator, run_ranks};
use fusestep_collective_mpi::{MpiCommunicator, MpiOptions};

const STEPS: usize = 4;
const SHAPES: [(&str, (usize, usize)); 3] = [("a", (12, 37)), ("b", (37, 65)), ("c", (65, 3))];

fn values(seed: usize, shape: (usize, usize)) -> Result<Tensor> {
    let value = |at: usize| ((at * 7 + seed * 13) % 23) as f32 / 23.0 - 0.5;
    let values: Vec<f32> = (0..shape.0 * shape.1).map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Trains on this rank's part of the data; the bits of all variables.
fn train(comm: &mut dyn Communicator, zero: u8) -> Result<Vec<Vec<u32>>> {
    let rank = comm.rank();
    // Other first values on each rank: those of rank 0 are taken.
    let var = |(name, shape)| -> Result<(String, Var)> {
        Ok((String::from(name), Var::from_tensor(&values(rank, shape)?)?))
    };
    let vars: Vec<_> = SHAPES.into_iter().map(var).collect::<Result<_>>()?;
    let options = Options { zero, accumulate: 2, clip_norm: Some(0.1), ..Options::default() };
    let optimizer = AdamW::with_options(vars.clone(), ParamsAdamW::default(), &options)?;
    let mut optimizer = optimizer.on(comm)?;
    for step in 0..2 * STEPS {
        let mut hidden = values(100 * step + rank, (8, 12))?;
        for (_, var) in &vars {
            hidden = hidden.matmul(var.as_tensor())?.tanh()?;
        }
        optimizer.backward_step(&hidden.sqr()?.mean_all()?)?;
    }
    let bits = |(_, var): &(String, Var)| -> Result<Vec<u32>> {
        let values = var.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        Ok(values.into_iter().map(f32::to_bits).collect())
    };
    vars.iter().map(bits).collect()
}

#[test]
fn ranks_of_mpirun_have_the_bits_of_threads() {
    let mut comm = MpiCommunicator::world(&MpiOptions::default()).unwrap();
    let mut first = None;
    for zero in 0..=2 {
        let found = train(&mut comm, zero).unwrap();
        let of_thread = |mut comm: fusestep_collective::ThreadCommunicator| train(&mut comm, zero);
        let threads = run_ranks(comm.world_size(), &Default::default(), of_thread).unwrap();
        for expected in threads {
            assert!(found == expected.unwrap().unwrap(), "zero {zero}");
        }
        assert!(found == *first.get_or_insert(found.clone()), "zero {zero}");
    }
}
