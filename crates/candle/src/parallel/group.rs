//! Group of the ranks that a layer is split over.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Shape, Tensor};
use fusestep_collective::{Collectives, Communicator, Solo};

use super::ParallelError;

/// Most dimensions of a tensor that ranks compare.
const TOLD_DIMS: usize = 8;

/// Elements of a rank's message about its tensor: dtype, number of dimensions, dimensions.
const TOLD: usize = TOLD_DIMS + 2;

/// Handle on the [`Communicator`] of the ranks that a layer is split over. All operations on these
/// ranks share it.
///
/// Clones are handles on one communicator, whose calls they make one at a time. The communicator is
/// dropped with its last handle; tensors that await their gradients hold handles, too.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fusestep_candle::parallel::Group;
/// use fusestep_collective::{Options, run_ranks};
///
/// let ranks = run_ranks(3, &Options::default(), |comm| -> candle_core::Result<_> {
///     let group = Group::new(comm);
///     let x = Var::new(&[1f32, group.rank() as f32], &Device::Cpu)?;
///     let sum = group.all_reduce(&x)?;
///     let grads = sum.sum_all()?.backward()?;
///     Ok((sum.to_vec1::<f32>()?, grads.get(&x).unwrap().to_vec1::<f32>()?))
/// })?;
/// for rank in ranks {
///     assert_eq!(rank.unwrap()?, (vec![3.0, 3.0], vec![1.0, 1.0]));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Group {
    comm: Arc<Mutex<Box<dyn Communicator>>>,
    rank: usize,
    world_size: usize,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}

impl Group {
    /// Makes a group of the ranks of `comm`, of any engine. A program that also shares out its
    /// batch makes the group's communicator by [`Communicator::split`], so that layers and steps
    /// have calls of their own.
    pub fn new(comm: impl Communicator + 'static) -> Self {
        Self {
            rank: comm.rank(),
            world_size: comm.world_size(),
            comm: Arc::new(Mutex::new(Box::new(comm))),
        }
    }

    /// Makes a group of one rank, which has every layer whole.
    pub fn solo() -> Self {
        Self::new(Solo::new())
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Lends the communicator to `work` for other calls than those of layers, such as an
    /// optimizer's step. All ranks call it at the same place between the calls of layers. `work`
    /// must not use the group, which would wait for the communicator forever.
    ///
    /// ```
    /// use fusestep_candle::parallel::Group;
    /// use fusestep_collective::Collectives;
    ///
    /// let group = Group::solo();
    /// group.with(|comm| comm.barrier())?;
    /// # Ok::<(), fusestep_collective::CollectiveError>(())
    /// ```
    pub fn with<R>(&self, work: impl FnOnce(&mut dyn Communicator) -> R) -> R {
        // A rank that has panicked within a call has closed its group, whose calls return that
        // error.
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        work(comm.as_mut())
    }

    /// Gathers the integers of all ranks along the first dimension, as i64: labels of features that
    /// [`all_gather`](Self::all_gather) gathers. Blocks may be of any lengths.
    ///
    /// # Errors
    /// On all ranks: [`ParallelError::RanksDiffer`] if shapes differ in another dimension than the
    /// first, and the communicator's errors. On one rank: [`ParallelError::Integers`] for other
    /// tensors.
    pub fn all_gather_labels(&self, labels: &Tensor) -> candle_core::Result<Tensor> {
        const NAME: &str = "all_gather_labels";
        if !labels.dtype().is_int() || labels.dims().is_empty() {
            return Err(ParallelError::Integers {
                operation: NAME,
                found: labels.shape().clone(),
                found_dtype: labels.dtype(),
            }
            .into());
        }
        let labels = labels.to_dtype(DType::I64)?;
        let mut dims = labels.dims().to_vec();
        let rows = self.tell(NAME, &labels, 0, Some(0))?;
        let row: usize = dims[1..].iter().product();
        dims[0] = rows.iter().sum();
        let counts: Vec<usize> = rows.iter().map(|rows| rows * row).collect();
        let own: Vec<i64> = labels.flatten_all()?.to_vec1()?;
        let mut all = vec![0i64; counts.iter().sum()];
        self.with(|comm| comm.all_gather_counts(&counts, &own, &mut all))
            .map_err(ParallelError::from)?;
        Tensor::from_vec(all, dims, labels.device())
    }

    /// Compares the tensors of all ranks and returns the length of dimension `varying` on each.
    /// Shapes may differ in that dimension only. After an error no elements have moved, and later
    /// calls work.
    pub(super) fn compare(
        &self,
        operation: &'static str,
        tensor: &Tensor,
        varying: Option<usize>,
    ) -> Result<Vec<usize>, ParallelError> {
        self.compare_checked(operation, tensor, varying, Ok(()))
    }

    /// [`Group::compare`] with what this rank has found of its own tensor: a rank that refuses it
    /// tells the others, who would wait for its next call.
    pub(super) fn compare_checked(
        &self,
        operation: &'static str,
        tensor: &Tensor,
        varying: Option<usize>,
        checked: Result<(), ParallelError>,
    ) -> Result<Vec<usize>, ParallelError> {
        let dtype = checked.and_then(|()| dtype_of(operation, tensor.dtype()));
        let is_bf16 = i64::from(tensor.dtype() == DType::BF16);
        let code = dtype.as_ref().map_or(REFUSED, |dtype| dtype.len_bytes() as i64 * 2 + is_bf16);
        let told = self.tell(operation, tensor, code, varying);
        dtype.and(told)
    }

    fn tell(
        &self,
        operation: &'static str,
        tensor: &Tensor,
        dtype: i64,
        varying: Option<usize>,
    ) -> Result<Vec<usize>, ParallelError> {
        let dims = tensor.dims();
        let mut own = [0i64; TOLD];
        own[0] = dtype;
        own[1] = dims.len() as i64;
        for (told, &dim) in own[2..].iter_mut().zip(dims) {
            *told = dim as i64;
        }
        let mut all = vec![0i64; TOLD * self.world_size];
        self.with(|comm| comm.all_gather(&own, &mut all))?;
        // Behind the call, which the other ranks make in any case.
        if dims.len() > TOLD_DIMS {
            return Err(ParallelError::Dimensions {
                operation,
                limit: TOLD_DIMS,
                found: tensor.shape().clone(),
            });
        }
        let alike = |told: &[i64]| {
            let mut told = told.to_vec();
            if let Some(dim) = varying.filter(|&dim| dim < TOLD_DIMS) {
                told[2 + dim] = 0;
            }
            told
        };
        let ranks: Vec<&[i64]> = all.chunks_exact(TOLD).collect();
        let differs = ranks.iter().position(|told| alike(told) != alike(ranks[0]));
        match differs {
            Some(found_rank) => Err(ParallelError::RanksDiffer {
                operation,
                expected_rank: 0,
                expected: text_of(ranks[0]),
                found_rank,
                found: text_of(ranks[found_rank]),
            }),
            None => Ok(match varying {
                Some(dim) => ranks.iter().map(|told| told[2 + dim] as usize).collect(),
                None => Vec::new(),
            }),
        }
    }
}

/// The code of a tensor that its rank refuses, in place of its dtype's.
const REFUSED: i64 = -1;

/// Text of a rank's message about its tensor, for errors.
fn text_of(told: &[i64]) -> String {
    if told[1] as usize > TOLD_DIMS {
        return format!("a tensor of {} dimensions", told[1]);
    }
    let dtype = match told[0] {
        REFUSED => "a tensor that its rank refuses, of shape",
        0 => "integers",
        4 => "f16",
        5 => "bf16",
        8 => "f32",
        _ => "f64",
    };
    let dims: Vec<usize> =
        told[2..].iter().take(told[1] as usize).map(|&dim| dim as usize).collect();
    format!("{dtype} {:?}", Shape::from(dims))
}

/// The collectives' dtype for a floating-point dtype, or an error for any other.
pub(super) fn dtype_of(
    operation: &'static str,
    dtype: DType,
) -> Result<fusestep_tensor::DType, ParallelError> {
    crate::lend::dtype_of(dtype).ok_or(ParallelError::DType { operation, found: dtype })
}
