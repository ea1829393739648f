//! Layers that are split over ranks: collectives that candle differentiates, linear layers with a
//! slice of the weight on each rank, and a softmax cross-entropy over split classes.
//!
//! One convention makes gradients right: **the loss counts once**, though every rank computes it. A
//! tensor is then one of three kinds, and its gradient is of the kind beside it.
//!
//! | a tensor | means | its gradient is |
//! |---|---|---|
//! | replicated | every rank has the whole, with one value | replicated |
//! | sharded | every rank has its block of the whole | sharded |
//! | partial | every rank has a summand of the whole | replicated |
//! | replicated, but each rank does something else with it | | partial |
//!
//! | operation | forward | backward | Megatron-LM's name |
//! |---|---|---|---|
//! | [`Group::copy_to_ranks`] | nothing | all-reduce, sum | copy to region, *f* |
//! | [`Group::all_reduce`] | all-reduce, sum | nothing | reduce from region, *g* |
//! | [`Group::all_gather`] | all-gather | reduce-scatter | gather from sequence |
//! | [`Group::reduce_scatter`] | reduce-scatter | all-gather | reduce-scatter to sequence |
//! | [`Group::all_gather_replicated`] | all-gather | own block | gather from region |
//! | [`Group::scatter_replicated`] | own block | all-gather | scatter to region |
//! | [`Group::broadcast`] | broadcast of the root | reduce to the root | |
//! | [`Group::reduce`] | reduce to the root | broadcast of the root | |
//!
//! Sums are formed in rank order, in f32 for 16-bit elements and rounded once. So results and
//! gradients have the same bits with any engine of the [`Communicator`].
//!
//! An optimizer on the ranks of the group ([`crate::Fused::on`]) updates each rank's slices of
//! these layers on that rank alone. The bias of a row-parallel layer is replicated and trained as
//! such.
//!
//! Collectives happen as the program runs. So every rank has to build the same graph and call
//! `backward` on it. A tensor that needs a gradient on one rank needs one on all. If a rank does
//! otherwise or is gone, all ranks get an error, at the communicator's deadline at the latest.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, VarBuilder, VarMap};
//! use fusestep_candle::parallel::{
//!     ColumnParallel, ColumnParallelLinear, GatherOutput, Group, LinearShape,
//!     sharded_cross_entropy,
//! };
//! use fusestep_collective::{Options, run_ranks};
//!
//! let losses = run_ranks(2, &Options::default(), |comm| -> candle_core::Result<f32> {
//!     let group = Group::new(comm);
//!     let varmap = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
//!     // 1,001 classes: 501 on rank 0, 500 on rank 1. Logits stay where they are.
//!     let options = ColumnParallel { gather_output: GatherOutput::No, ..Default::default() };
//!     let shape = LinearShape { inputs: 16, outputs: 1001 };
//!     let classifier = ColumnParallelLinear::new(shape, &options, &vb, &group)?;
//!
//!     let features = Tensor::ones((4, 16), DType::F32, &Device::Cpu)?;
//!     let labels = Tensor::new(&[0u32, 500, 501, 1000], &Device::Cpu)?;
//!     let logits = classifier.forward(&features)?;
//!     let loss = sharded_cross_entropy(&logits, &labels, classifier.split(), &group)?.mean_all()?;
//!     let grads = loss.backward()?;
//!     assert!(grads.get(classifier.weight()).is_some());
//!     loss.to_scalar()
//! })?;
//! let losses: Vec<f32> = losses.into_iter().map(|rank| rank.unwrap()).collect::<Result<_, _>>()?;
//! assert_eq!(losses[0].to_bits(), losses[1].to_bits());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Source
//! Shoeybi et al. 2019, section 3, arXiv:1909.08053; Megatron-LM's `core/tensor_parallel`.

mod cross_entropy;
mod error;
mod group;
mod linear;
mod moves;
mod operations;
pub(crate) mod slices;
mod split;

pub use cross_entropy::sharded_cross_entropy;
pub use error::ParallelError;
pub use fusestep_collective::Communicator;
pub use group::Group;
pub use linear::{
    Bias, ColumnInput, ColumnParallel, ColumnParallelLinear, GatherOutput, InputIsParallel,
    LinearShape, RowParallel, RowParallelLinear,
};
pub use split::Split;
