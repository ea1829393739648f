//! Softmax cross-entropy over classes that are split over ranks.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, WithDType};
use fusestep_collective::{Collectives, ReduceOp};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::operations::check_tensor;
use super::{Group, ParallelError, Split};

/// Classes whose exponentials one rank adds up before ranks add up their sums. Blocks that end at
/// multiples of it give the bits of one rank.
const LEAF_CLASSES: usize = 1024;

const NAME: &str = "sharded_cross_entropy";

/// The cross-entropy of every sample, `−log softmax(x)[label]`, where each rank has the logits of
/// its classes only.
///
/// ```text
/// m ← max over ranks and classes of x        s ← Σ over leaves, ranks and classes of exp(x − m)
/// loss ← (m − x[label]) + log s              ∂loss/∂x ← exp(x − m) / s − [class = label]
/// ```
///
/// Arithmetic is f64, every result rounded once. Exponentials are added within leaves of 1,024
/// classes, and leaves in the order of classes. If blocks end with leaves, loss and gradients have
/// the same bits on any number of ranks. Otherwise the order of the sum differs: s changes by a
/// relative 2⁻⁵³ for each leaf that is cut, before results are rounded to the logits' type.
///
/// # Shapes
/// `logits` are (…, own classes), `labels` (…) integers, replicated, each below `classes.total()`;
/// `classes` may be uneven, and a rank may have none. The losses are (…), replicated, f64 for f64
/// logits and f32 for all others.
/// # Errors
/// [`ParallelError`] inside candle's error, on all ranks: a label that is no class, labels or
/// numbers of samples that differ between ranks, and the communicator's errors.
/// # Cost
/// Forward two calls, of 8 bytes for each sample and of 8 (⌈classes / 1,024⌉ + 2); backward none.
/// Logits are read twice forward and once backward.
/// # Source
/// Megatron-LM's `vocab_parallel_cross_entropy`.
pub fn sharded_cross_entropy(
    logits: &Tensor,
    labels: &Tensor,
    classes: &Split,
    group: &Group,
) -> candle_core::Result<Tensor> {
    let last = logits.rank().saturating_sub(1);
    let found = logits.dim(last)?;
    let samples = Shape::from(&logits.dims()[..last]);
    let checked = check_tensor(NAME, logits).and_then(|()| classes.check(group)).and_then(|()| {
        let expected = classes.range(group.rank()).len();
        if found != expected {
            let (dim, counts) = (last, classes.counts().to_vec());
            return Err(ParallelError::Length { operation: NAME, dim, expected, counts, found });
        }
        if *labels.shape() != samples || !labels.dtype().is_int() {
            let (found, found_dtype) = (labels.shape().clone(), labels.dtype());
            return Err(ParallelError::Labels { expected: samples.clone(), found, found_dtype });
        }
        Ok(())
    });
    group.compare_checked(NAME, logits, Some(last), checked)?;
    let own = classes.range(group.rank());
    let labels = labels.flatten_all()?.to_dtype(DType::I64)?.to_vec1()?;
    let rows = logits.reshape((samples.elem_count(), own.len()))?;
    let losses = rows.contiguous()?.apply_op1(CrossEntropy {
        shared: Arc::new(Shared {
            group: group.clone(),
            own,
            total: classes.total(),
            labels,
            softmax: OnceLock::new(),
        }),
    })?;
    losses.reshape(samples)
}

/// Values that the loss and its gradient share.
struct Shared {
    group: Group,
    own: Range<usize>,
    total: usize,
    labels: Vec<i64>,
    /// Largest logit and sum of exponentials of each sample.
    softmax: OnceLock<Vec<(f64, f64)>>,
}

struct CrossEntropy {
    shared: Arc<Shared>,
}

/// Operation that forms the gradient of the logits from these gradients of the losses.
struct Gradient {
    shared: Arc<Shared>,
    of_losses: Vec<f64>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let losses = match storage {
            CpuStorage::F32(_) => self.shared.losses(elements::<f32>(storage, layout)?),
            CpuStorage::F64(_) => self.shared.losses(elements::<f64>(storage, layout)?),
            CpuStorage::F16(_) => self.shared.losses(elements::<half::f16>(storage, layout)?),
            CpuStorage::BF16(_) => self.shared.losses(elements::<half::bf16>(storage, layout)?),
            _ => candle_core::bail!("{NAME}: expected f32, f64, f16 or bf16 logits"),
        }?;
        let shape = Shape::from(losses.len());
        let losses = match storage {
            CpuStorage::F64(_) => CpuStorage::F64(losses),
            _ => CpuStorage::F32(losses.into_iter().map(|loss| loss as f32).collect()),
        };
        Ok((losses, shape))
    }

    fn bwd(
        &self,
        logits: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        let gradient = Gradient {
            shared: Arc::clone(&self.shared),
            of_losses: grad.to_dtype(DType::F64)?.to_vec1()?,
        };
        Ok(Some(logits.apply_op1_no_bwd(&gradient)?))
    }
}

impl CustomOp1 for Gradient {
    fn name(&self) -> &'static str {
        "sharded_cross_entropy_gradient"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let gradient = match storage {
            CpuStorage::F32(_) => self.of::<f32>(storage, layout),
            CpuStorage::F64(_) => self.of::<f64>(storage, layout),
            CpuStorage::F16(_) => self.of::<half::f16>(storage, layout),
            CpuStorage::BF16(_) => self.of::<half::bf16>(storage, layout),
            _ => candle_core::bail!("{NAME}: expected f32, f64, f16 or bf16 logits"),
        }?;
        Ok((gradient, layout.shape().clone()))
    }
}

impl Gradient {
    fn of<T: WithDType>(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<CpuStorage> {
        let (shared, logits) = (&self.shared, elements::<T>(storage, layout)?);
        let Some(softmax) = shared.softmax.get() else {
            candle_core::bail!("{NAME}: expected the loss before its gradient, found none")
        };
        let mut gradient = vec![T::from_f64(0.0); logits.len()];
        // A chunk must have at least one element; a rank without classes has no gradient.
        let rows = gradient.par_chunks_mut(shared.own.len().max(1));
        rows.enumerate().for_each(|(sample, row)| {
            let (max, sum) = softmax[sample];
            let label = shared.own_class(sample);
            let of_loss = self.of_losses[sample];
            for (class, (gradient, logit)) in
                row.iter_mut().zip(shared.row(logits, sample)).enumerate()
            {
                let hit = f64::from(u8::from(label == Some(class)));
                let probability = (logit.to_f64() - max).exp() / sum;
                *gradient = T::from_f64((probability - hit) * of_loss);
            }
        });
        Ok(T::to_cpu_storage_owned(gradient))
    }
}

impl Shared {
    fn samples(&self) -> usize {
        self.labels.len()
    }

    /// This rank's logits of a sample.
    fn row<'a, T>(&self, logits: &'a [T], sample: usize) -> &'a [T] {
        &logits[sample * self.own.len()..(sample + 1) * self.own.len()]
    }

    /// The label of a sample, if it is one of this rank's classes, counted from the rank's first.
    fn own_class(&self, sample: usize) -> Option<usize> {
        let class = usize::try_from(self.labels[sample]).ok()?;
        self.own.contains(&class).then(|| class - self.own.start)
    }

    fn losses<T: WithDType>(&self, logits: &[T]) -> Result<Vec<f64>, ParallelError> {
        let largest = self.largest(logits)?;
        // For each sample the sums of all leaves, the label's logit, and the number of ranks that
        // have the label's class.
        let leaves = self.total.div_ceil(LEAF_CLASSES);
        let width = leaves + 2;
        let mut told = vec![0.0; self.samples() * width];
        told.par_chunks_mut(width).enumerate().for_each(|(sample, told)| {
            let row = self.row(logits, sample);
            self.leaf_sums(row, largest[sample], &mut told[..leaves]);
            if let Some(class) = self.own_class(sample) {
                told[leaves] = row[class].to_f64();
                told[leaves + 1] = 1.0;
            }
        });
        self.group.with(|comm| comm.all_reduce(&mut told, ReduceOp::Sum))?;
        let mut softmax = Vec::with_capacity(self.samples());
        let mut losses = Vec::with_capacity(self.samples());
        for (sample, told) in told.chunks_exact(width).enumerate() {
            let (label, owners) = (told[leaves], told[leaves + 1]);
            if owners != 1.0 {
                return Err(ParallelError::LabelsDiffer { sample, found: owners as usize });
            }
            let sum = told[..leaves].iter().fold(0.0, |sum, leaf| sum + leaf);
            softmax.push((largest[sample], sum));
            losses.push((largest[sample] - label) + sum.ln());
        }
        let _ = self.softmax.set(softmax);
        Ok(losses)
    }

    /// The largest logit of each sample over all ranks; NaN if any logit is NaN.
    fn largest<T: WithDType>(&self, logits: &[T]) -> Result<Vec<f64>, ParallelError> {
        let samples = (0..self.samples()).into_par_iter();
        let largest = samples.map(|sample| {
            let row = self.row(logits, sample).iter();
            row.map(|logit| logit.to_f64()).fold(f64::NEG_INFINITY, larger)
        });
        let mut told: Vec<f64> = largest.collect();
        // The last element is the number of the sample after the last one whose label is no class,
        // so that all ranks refuse that label.
        let is_class = |&label: &i64| (0..self.total as i64).contains(&label);
        let unknown = self.labels.iter().rposition(|label| !is_class(label));
        told.push(unknown.map_or(0.0, |sample| sample as f64 + 1.0));
        self.group.with(|comm| comm.all_reduce(&mut told, ReduceOp::Max))?;
        match told.pop() {
            Some(unknown) if unknown > 0.0 => {
                Err(ParallelError::Label { sample: unknown as usize - 1, expected: self.total })
            }
            _ => Ok(told),
        }
    }

    /// Adds up exponentials leaf by leaf, counted from class 0 of all.
    fn leaf_sums<T: WithDType>(&self, row: &[T], largest: f64, leaves: &mut [f64]) {
        let mut class = self.own.start;
        let mut rest = row;
        while !rest.is_empty() {
            let leaf = class / LEAF_CLASSES;
            let end = ((leaf + 1) * LEAF_CLASSES).min(self.own.end);
            let (own, after) = rest.split_at(end - class);
            let exponentials = own.iter().map(|logit| (logit.to_f64() - largest).exp());
            leaves[leaf] = exponentials.fold(0.0, |sum, value| sum + value);
            (class, rest) = (end, after);
        }
    }
}

/// A contiguous tensor's elements.
fn elements<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> candle_core::Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("{NAME}: expected contiguous logits, found strides")
    };
    // A part without elements may begin behind the end.
    let elements = storage.as_slice::<T>()?;
    Ok(elements.get(start..end).unwrap_or_default())
}

/// The larger of two values; NaN if either is.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
