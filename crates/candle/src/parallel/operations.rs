//! Collectives on tensors, with their gradients.

use candle_core::{D, Tensor, shape::Dim};

use super::moves::{Differentiable, Move};
use super::{Group, ParallelError, Split};

impl Group {
    /// Sums `y ← Σᵣ xᵣ` on every rank: a partial tensor becomes a replicated one. The gradient of
    /// `x` is that of `y`. After [`copy_to_ranks`](Self::copy_to_ranks) each rank may use `y` in
    /// its own way.
    ///
    /// # Errors
    /// [`ParallelError`] inside candle's error, on all ranks: shapes or dtypes that differ, and the
    /// communicator's errors.
    pub fn all_reduce(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.alike("all_reduce", x, Move::Sum, Move::Keep)
    }

    /// Returns `y ← x`, which each rank may use in another way. The gradient of the replicated `x`
    /// is the sum of the gradients of all ranks' `y`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn copy_to_ranks(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.alike("copy_to_ranks", x, Move::Keep, Move::Sum)
    }

    /// Gathers the blocks of all ranks along `dim`; each rank may use the result in another way.
    /// The gradient of `x` is this rank's block of the sum of all ranks' gradients. Blocks may be
    /// of any lengths.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use fusestep_candle::parallel::Group;
    /// use fusestep_collective::{Options, run_ranks};
    ///
    /// let ranks = run_ranks(2, &Options::default(), |comm| -> candle_core::Result<_> {
    ///     let group = Group::new(comm);
    ///     let x = Var::new(vec![1f32; 1 + group.rank()], &Device::Cpu)?;
    ///     let whole = group.all_gather(&x, 0)?;
    ///     // Rank 0 counts it once, rank 1 three times.
    ///     let part = whole.affine(1.0 + 2.0 * group.rank() as f64, 0.0)?.sum_all()?;
    ///     let grads = group.all_reduce(&part)?.backward()?;
    ///     assert_eq!(whole.dims(), [3]);
    ///     grads.get(&x).unwrap().to_vec1::<f32>()
    /// })?;
    /// let grads: Vec<Vec<f32>> = ranks.into_iter().map(|rank| rank.unwrap().unwrap()).collect();
    /// assert_eq!(grads, [vec![4.0], vec![4.0, 4.0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); candle's error for a dimension that `x` does not have.
    pub fn all_gather(&self, x: &Tensor, dim: impl Dim) -> candle_core::Result<Tensor> {
        self.gathered("all_gather", x, dim, Move::SumOwn)
    }

    /// Gathers the blocks of all ranks along `dim`; all ranks must use the result in the same way.
    /// The gradient of `x` is this rank's block of the gradient, which all ranks have alike.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gather_replicated(&self, x: &Tensor, dim: impl Dim) -> candle_core::Result<Tensor> {
        self.gathered("all_gather_replicated", x, dim, Move::Own)
    }

    /// Returns this rank's block along `dim` of `Σᵣ xᵣ`. The gradient of `x` is the gradients of
    /// all ranks' blocks in a row.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); [`ParallelError::Length`] and [`ParallelError::World`]
    /// for a split of another length or for other ranks.
    pub fn reduce_scatter(
        &self,
        x: &Tensor,
        dim: impl Dim,
        split: &Split,
    ) -> candle_core::Result<Tensor> {
        let moves = [Move::SumOwn(split.clone()), Move::Gather(split.clone())];
        self.scattered("reduce_scatter", x, dim, split, moves)
    }

    /// Returns this rank's block along `dim` of a replicated tensor, without moving elements
    /// between ranks. The gradient of `x` is the gradients of all ranks' blocks in a row.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn scatter_replicated(
        &self,
        x: &Tensor,
        dim: impl Dim,
        split: &Split,
    ) -> candle_core::Result<Tensor> {
        let moves = [Move::Own(split.clone()), Move::Gather(split.clone())];
        self.scattered("scatter_replicated", x, dim, split, moves)
    }

    /// Returns the root's tensor on every rank. The gradient of the root's `x` is the sum of all
    /// ranks' gradients; that of every other `x` is zero.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ParallelError::Root`] for a root that is no rank.
    pub fn broadcast(&self, x: &Tensor, root: usize) -> candle_core::Result<Tensor> {
        self.check_root("broadcast", root)?;
        self.alike("broadcast", x, Move::FromRoot(root), Move::ToRoot(root))
    }

    /// Returns `Σᵣ xᵣ` on the root and zeros on all other ranks. The gradient of `x` is that of the
    /// root's result. Every rank's loss has to depend on the result, by adding its sum for example,
    /// so that every rank takes part backward.
    ///
    /// # Errors
    /// As [`broadcast`](Self::broadcast).
    pub fn reduce(&self, x: &Tensor, root: usize) -> candle_core::Result<Tensor> {
        self.check_root("reduce", root)?;
        self.alike("reduce", x, Move::ToRoot(root), Move::FromRoot(root))
    }

    /// Returns `y ← x`, whose gradient is multiplied by `factor`, in f64 and rounded once. An
    /// optimizer that averages the ranks' gradients divides the sum of a replicated layer's partial
    /// gradients by the world size. A `factor` of the world size, applied behind the layer, makes
    /// up for it.
    ///
    /// # Errors
    /// [`ParallelError`] for a tensor of another dtype or device.
    pub fn scale_gradient(&self, x: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
        check_tensor("scale_gradient", x)?;
        self.apply("scale_gradient", x, [Move::Keep, Move::Scale(factor)])
    }

    /// Makes an operation on tensors that have the same shape on all ranks.
    fn alike(
        &self,
        name: &'static str,
        x: &Tensor,
        forward: Move,
        backward: Move,
    ) -> candle_core::Result<Tensor> {
        self.compare_checked(name, x, None, check_tensor(name, x))?;
        self.apply(name, x, [forward, backward])
    }

    fn gathered(
        &self,
        name: &'static str,
        x: &Tensor,
        dim: impl Dim,
        backward: impl FnOnce(Split) -> Move,
    ) -> candle_core::Result<Tensor> {
        let dim = dim.to_index(x.shape(), name)?;
        let counts = self.compare_checked(name, x, Some(dim), check_tensor(name, x))?;
        let split = Split::from_counts(counts);
        let moves = [Move::Gather(split.clone()), backward(split)];
        self.along(name, x, dim, moves)
    }

    fn scattered(
        &self,
        name: &'static str,
        x: &Tensor,
        dim: impl Dim,
        split: &Split,
        moves: [Move; 2],
    ) -> candle_core::Result<Tensor> {
        let dim = dim.to_index(x.shape(), name)?;
        let found = x.dim(dim)?;
        let checked = check_tensor(name, x).and_then(|()| split.check(self)).and_then(|()| {
            if found == split.total() {
                return Ok(());
            }
            let (expected, counts) = (split.total(), split.counts().to_vec());
            Err(ParallelError::Length { operation: name, dim, expected, counts, found })
        });
        self.compare_checked(name, x, None, checked)?;
        self.along(name, x, dim, moves)
    }

    /// Makes an operation on blocks of a dimension. Blocks of the first dimension are blocks of
    /// memory, so any other dimension is moved to the front.
    fn along(
        &self,
        name: &'static str,
        x: &Tensor,
        dim: usize,
        moves: [Move; 2],
    ) -> candle_core::Result<Tensor> {
        if dim == 0 {
            return self.apply(name, x, moves);
        }
        let first = self.apply(name, &x.transpose(0, dim)?, moves)?;
        first.transpose(0, dim)?.contiguous()
    }

    fn apply(
        &self,
        name: &'static str,
        x: &Tensor,
        [forward, backward]: [Move; 2],
    ) -> candle_core::Result<Tensor> {
        x.contiguous()?.apply_op1(Differentiable { name, group: self.clone(), forward, backward })
    }

    fn check_root(&self, operation: &'static str, root: usize) -> Result<(), ParallelError> {
        if root < self.world_size() {
            return Ok(());
        }
        Err(ParallelError::Root { operation, expected: self.world_size(), found: root })
    }
}

/// Refuses tensors that ranks cannot move: of other dtypes, or not in host memory.
pub(super) fn check_tensor(operation: &'static str, x: &Tensor) -> Result<(), ParallelError> {
    super::group::dtype_of(operation, x.dtype())?;
    if x.device().is_cpu() {
        return Ok(());
    }
    Err(ParallelError::Device { operation, found: format!("{:?}", x.device().location()) })
}

/// Last dimension, which layers split.
pub(super) const LAST: D = D::Minus1;
