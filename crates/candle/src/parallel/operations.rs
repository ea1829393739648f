//! Collectives on tensors, with their gradients.

use candle_core::{D, Tensor, shape::Dim};

use super::moves::{Differentiable, Move};
use super::{Group, ParallelError, Split};

impl Group {
    /// `y ← Σᵣ xᵣ` on every rank: a partial tensor becomes a replicated one. The gradient of `x` is
    /// that of `y`. With [`copy_to_ranks`](Self::copy_to_ranks) behind it, ranks may do with `y`
    /// what they like.
    ///
    /// # Errors
    /// [`ParallelError`] inside candle's error, on all ranks: shapes or dtypes that differ, and
    /// what the communicator says.
    pub fn all_reduce(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.alike("all_reduce", x, Move::Sum, Move::Keep)
    }

    /// `y ← x`, to be used on each rank in another way: the gradient of the replicated `x` is the
    /// sum of those of all ranks' `y`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn copy_to_ranks(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.alike("copy_to_ranks", x, Move::Keep, Move::Sum)
    }

    /// The blocks of all ranks along `dim`, to be used on each rank in another way: the gradient of
    /// `x` is this rank's block of the sum of all ranks' gradients. Blocks may be of any
    /// lengths.
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
    /// As [`all_reduce`](Self::all_reduce); candle's for a dimension that there is not.
    pub fn all_gather(&self, x: &Tensor, dim: impl Dim) -> candle_core::Result<Tensor> {
        self.gathered("all_gather", x, dim, Move::SumOwn)
    }

    /// The blocks of all ranks along `dim`, to be used on all ranks in one way: the gradient of `x`
    /// is this rank's block of this rank's gradient, which is every rank's.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    pub fn all_gather_replicated(&self, x: &Tensor, dim: impl Dim) -> candle_core::Result<Tensor> {
        self.gathered("all_gather_replicated", x, dim, Move::Own)
    }

    /// This rank's block along `dim` of `Σᵣ xᵣ`; the gradient of `x` is the gradients of all
    /// blocks.
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

    /// This rank's block along `dim` of a replicated tensor, without a call; the gradient of `x` is
    /// the gradients of all blocks.
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

    /// The root's tensor on every rank; the gradient of the root's is the sum of those of all
    /// ranks, that of every other rank's is zero.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`ParallelError::Root`] for a root that there is not.
    pub fn broadcast(&self, x: &Tensor, root: usize) -> candle_core::Result<Tensor> {
        self.check_root("broadcast", root)?;
        self.alike("broadcast", x, Move::FromRoot(root), Move::ToRoot(root))
    }

    /// `Σᵣ xᵣ` on the root and zeros on all others; the gradient of `x` is that of the root's
    /// result. Every rank's loss has to depend on the result, by adding its sum for example, so
    /// that every rank takes part backward.
    ///
    /// # Errors
    /// As [`broadcast`](Self::broadcast).
    pub fn reduce(&self, x: &Tensor, root: usize) -> candle_core::Result<Tensor> {
        self.check_root("reduce", root)?;
        self.alike("reduce", x, Move::ToRoot(root), Move::FromRoot(root))
    }

    /// `y ← x`, whose gradient is multiplied by `factor`, in f64 and rounded once. An optimizer
    /// that forms the mean of the ranks' gradients takes a replicated layer's partial gradients
    /// for as many too small; the world size behind the layer makes up for it.
    ///
    /// # Errors
    /// [`ParallelError`] for a tensor of another dtype or device.
    pub fn scale_gradient(&self, x: &Tensor, factor: f64) -> candle_core::Result<Tensor> {
        check_tensor("scale_gradient", x)?;
        self.apply("scale_gradient", x, [Move::Keep, Move::Scale(factor)])
    }

    /// An operation on tensors of one shape.
    fn alike(
        &self,
        name: &'static str,
        x: &Tensor,
        forward: Move,
        backward: Move,
    ) -> candle_core::Result<Tensor> {
        check_tensor(name, x)?;
        self.compare(name, x, None)?;
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
        check_tensor(name, x)?;
        let split = Split::from_counts(self.compare(name, x, Some(dim))?);
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
        check_tensor(name, x)?;
        split.check(self)?;
        let found = x.dim(dim)?;
        if found != split.total() {
            return Err(ParallelError::Length {
                operation: name,
                dim,
                expected: split.total(),
                counts: split.counts().to_vec(),
                found,
            }
            .into());
        }
        self.compare(name, x, None)?;
        self.along(name, x, dim, moves)
    }

    /// An operation on blocks of a dimension: they are blocks of memory where it is the first one.
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

/// Refuses what ranks cannot move.
pub(super) fn check_tensor(operation: &'static str, x: &Tensor) -> Result<(), ParallelError> {
    super::group::dtype_of(operation, x.dtype())?;
    if x.device().is_cpu() {
        return Ok(());
    }
    Err(ParallelError::Device { operation, found: format!("{:?}", x.device().location()) })
}

/// The last dimension, which layers split.
pub(super) const LAST: D = D::Minus1;
