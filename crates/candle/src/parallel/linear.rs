//! Linear layers whose weight is cut into one slice for each rank.

use candle_core::Tensor;
use candle_nn::{Init, Linear, Module, VarBuilder};

use super::operations::LAST;
use super::{Group, ParallelError, Split, slices};

const COLUMN: &str = "ColumnParallelLinear";
const ROW: &str = "RowParallelLinear";

/// Numbers of input and output features of a linear layer, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Features that come in.
    pub inputs: usize,
    /// Features that go out.
    pub outputs: usize,
}

/// Whether a layer adds a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bias {
    /// The layer adds a bias; a new layer's is zero.
    #[default]
    Yes,
    /// The layer adds none.
    No,
}

/// Input of a column-parallel layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ColumnInput {
    /// An input that every rank has whole.
    #[default]
    Replicated,
    /// Each rank's rows of an input sharded along the first dimension, in blocks of any lengths.
    /// Rows are samples of a batch that ranks share out, or positions of a sequence
    /// (`sequence_parallel`). Forward rows are gathered; backward their gradients are reduced and
    /// scattered.
    Rows,
}

/// Whether every rank gets all outputs of a column-parallel layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GatherOutput {
    /// The output is replicated.
    Yes,
    /// The output is sharded along the last dimension.
    #[default]
    No,
}

/// Input of a row-parallel layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InputIsParallel {
    /// An input sharded along the last dimension.
    #[default]
    Yes,
    /// A replicated input, of which every rank takes its block.
    No,
}

/// Settings of a [`ColumnParallelLinear`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ColumnParallel {
    /// Input that the layer gets.
    pub input: ColumnInput,
    /// Whether every rank gets all outputs.
    pub gather_output: GatherOutput,
    /// Whether a new layer has a bias.
    pub bias: Bias,
    /// Outputs that each rank has. If `None`, given slices define the split, and a whole or new
    /// layer is cut as equally as can be.
    pub split: Option<Split>,
}

/// Settings of a [`RowParallelLinear`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowParallel {
    /// Input that the layer gets.
    pub input_is_parallel: InputIsParallel,
    /// Whether a new layer has a bias.
    pub bias: Bias,
    /// Inputs that each rank takes. If `None`, given slices define the split, and a whole or new
    /// layer is cut as equally as can be.
    pub split: Option<Split>,
}

/// A linear layer whose outputs are split over ranks: `y ← x Wᵀ + b`, of which rank `r` has the
/// rows `Wᵣ` of `W` and `bᵣ` of `b`.
///
/// # Shapes
/// `Wᵣ` is (own outputs, inputs), `bᵣ` (own outputs); the input is (…, inputs), and the output
/// (…, own outputs), or (…, outputs) with [`GatherOutput::Yes`].
/// # Cost
/// Forward a call only if inputs or outputs are gathered; backward one call that sums the input's
/// gradient.
/// # Source
/// Megatron-LM's `ColumnParallelLinear`; `gather_output` is its option.
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear {
    slice: Linear,
    split: Split,
    input: ColumnInput,
    gather_output: GatherOutput,
    group: Group,
}

impl ColumnParallelLinear {
    /// Makes a new layer whose slices are the variables `weight` and `bias` of `vb`, with the same
    /// names on each rank. Weights are normal with the variance 2 / inputs, as in candle's layers.
    /// Each rank has random numbers of its own.
    ///
    /// # Errors
    /// [`ParallelError`] for a split of another length or for other ranks; candle's.
    pub fn new(
        shape: LinearShape,
        options: &ColumnParallel,
        vb: &VarBuilder<'_>,
        group: &Group,
    ) -> candle_core::Result<Self> {
        let split = split_of(&options.split, shape.outputs, COLUMN, group)?;
        let own = split.counts()[group.rank()];
        let weight = vb.get_with_hints((own, shape.inputs), "weight", init(shape))?;
        let bias = new_bias(options.bias, own, vb)?;
        let options = options.with(split);
        Self::from_slice(weight, bias, &options, group)
    }

    /// Makes a layer of copies of this rank's slices of the whole `weight` and `bias`. The copies
    /// are no variables. An optimizer that trains a variable made of one has to be told its name
    /// ([`Options::distributed`](crate::Options::distributed)).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_whole(
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: &ColumnParallel,
        group: &Group,
    ) -> candle_core::Result<Self> {
        let split = split_of(&options.split, weight.dim(0)?, COLUMN, group)?;
        let own = split.range(group.rank());
        let cut = |whole: &Tensor| whole.narrow(0, own.start, own.len())?.force_contiguous();
        let bias = bias.map(cut).transpose()?;
        Self::from_slice(cut(weight)?, bias, &options.with(split), group)
    }

    /// Makes a layer of this rank's slices: rows `split.range(rank)` of the whole. An optimizer
    /// knows slices that are variables. It has to be told the name of a variable from which a slice
    /// is made, by a cast for example ([`Options::distributed`](crate::Options::distributed)).
    ///
    /// # Errors
    /// [`ParallelError::Length`] for slices of another length than the split says.
    pub fn from_slice(
        weight: Tensor,
        bias: Option<Tensor>,
        options: &ColumnParallel,
        group: &Group,
    ) -> candle_core::Result<Self> {
        let split = match &options.split {
            Some(split) => split.clone(),
            None => Split::from_counts(group.compare(COLUMN, &weight, Some(0))?),
        };
        split.check(group)?;
        let own = split.counts()[group.rank()];
        for slice in std::iter::once(&weight).chain(&bias) {
            check_slice(COLUMN, slice, 0, own, &split)?;
        }
        for slice in std::iter::once(&weight).chain(&bias) {
            slices::note(slice, group);
        }
        Ok(Self {
            slice: Linear::new(weight, bias),
            split,
            input: options.input,
            gather_output: options.gather_output,
            group: group.clone(),
        })
    }

    /// This rank's rows of the weight.
    pub fn weight(&self) -> &Tensor {
        self.slice.weight()
    }

    /// This rank's part of the bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.slice.bias()
    }

    /// The split of the outputs over ranks.
    pub fn split(&self) -> &Split {
        &self.split
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = match self.input {
            ColumnInput::Replicated => self.group.copy_to_ranks(x)?,
            ColumnInput::Rows => self.group.all_gather(x, 0)?,
        };
        let own = self.slice.forward(&x)?;
        match self.gather_output {
            GatherOutput::No => Ok(own),
            GatherOutput::Yes => self.group.all_gather_replicated(&own, LAST),
        }
    }
}

/// A linear layer whose inputs are split over ranks: `y ← Σᵣ xᵣ Wᵣᵀ + b`, of which rank `r` has the
/// columns `Wᵣ` of `W`; the bias is replicated and added once.
///
/// # Shapes
/// `Wᵣ` is (outputs, own inputs), `b` (outputs); the input is (…, own inputs), or (…, inputs) with
/// [`InputIsParallel::No`], and the output replicated, (…, outputs).
/// # Cost
/// Forward one call that sums the outputs, backward a call only if the input is not parallel.
/// # Source
/// Megatron-LM's `RowParallelLinear`; `input_is_parallel` is its option.
#[derive(Clone, Debug)]
pub struct RowParallelLinear {
    slice: Linear,
    bias: Option<Tensor>,
    split: Split,
    input_is_parallel: InputIsParallel,
    group: Group,
}

impl RowParallelLinear {
    /// Makes a new layer, as [`ColumnParallelLinear::new`]. The bias begins at zero on every rank
    /// and stays replicated, since every rank gets the same gradient of it.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    pub fn new(
        shape: LinearShape,
        options: &RowParallel,
        vb: &VarBuilder<'_>,
        group: &Group,
    ) -> candle_core::Result<Self> {
        let split = split_of(&options.split, shape.inputs, ROW, group)?;
        let own = split.counts()[group.rank()];
        let weight = vb.get_with_hints((shape.outputs, own), "weight", init(shape))?;
        let bias = new_bias(options.bias, shape.outputs, vb)?;
        Self::from_slice(weight, bias, &options.with(split), group)
    }

    /// Makes a layer of a copy of this rank's slice of the whole `weight`. The copy is no variable.
    /// An optimizer that trains a variable made of it has to be told its name
    /// ([`Options::distributed`](crate::Options::distributed)).
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`].
    pub fn from_whole(
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: &RowParallel,
        group: &Group,
    ) -> candle_core::Result<Self> {
        let split = split_of(&options.split, weight.dim(1)?, ROW, group)?;
        let own = split.range(group.rank());
        let weight = weight.narrow(1, own.start, own.len())?.force_contiguous()?;
        Self::from_slice(weight, bias.cloned(), &options.with(split), group)
    }

    /// Makes a layer of this rank's slice: columns `split.range(rank)` of the whole. An optimizer
    /// knows a slice that is a variable. It has to be told the name of a variable from which the
    /// slice is made, by a cast for example
    /// ([`Options::distributed`](crate::Options::distributed)).
    ///
    /// # Errors
    /// [`ParallelError::Length`] for a slice of another length than the split says.
    pub fn from_slice(
        weight: Tensor,
        bias: Option<Tensor>,
        options: &RowParallel,
        group: &Group,
    ) -> candle_core::Result<Self> {
        let split = match &options.split {
            Some(split) => split.clone(),
            None => Split::from_counts(group.compare(ROW, &weight, Some(1))?),
        };
        split.check(group)?;
        let own = split.counts()[group.rank()];
        check_slice(ROW, &weight, 1, own, &split)?;
        // The bias is whole on every rank.
        slices::note(&weight, group);
        Ok(Self {
            slice: Linear::new(weight, None),
            bias,
            split,
            input_is_parallel: options.input_is_parallel,
            group: group.clone(),
        })
    }

    /// This rank's columns of the weight.
    pub fn weight(&self) -> &Tensor {
        self.slice.weight()
    }

    /// The bias, which every rank has whole.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The split of the inputs over ranks.
    pub fn split(&self) -> &Split {
        &self.split
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let own = match self.input_is_parallel {
            InputIsParallel::Yes => x.clone(),
            InputIsParallel::No => self.group.scatter_replicated(x, LAST, &self.split)?,
        };
        let sum = self.group.all_reduce(&self.slice.forward(&own)?)?;
        match &self.bias {
            Some(bias) => sum.broadcast_add(bias),
            None => Ok(sum),
        }
    }
}

impl ColumnParallel {
    fn with(&self, split: Split) -> Self {
        Self { split: Some(split), ..self.clone() }
    }
}

impl RowParallel {
    fn with(&self, split: Split) -> Self {
        Self { split: Some(split), ..self.clone() }
    }
}

/// Initial weights of candle's linear layers, for the number of inputs of the whole layer, not of a
/// slice.
fn init(shape: LinearShape) -> Init {
    Init::Randn { mean: 0.0, stdev: (2.0 / shape.inputs.max(1) as f64).sqrt() }
}

fn new_bias(bias: Bias, numel: usize, vb: &VarBuilder<'_>) -> candle_core::Result<Option<Tensor>> {
    match bias {
        Bias::Yes => Ok(Some(vb.get_with_hints(numel, "bias", Init::Const(0.0))?)),
        Bias::No => Ok(None),
    }
}

/// The split in the options, or an even one; refuses a split of another length.
fn split_of(
    asked: &Option<Split>,
    total: usize,
    operation: &'static str,
    group: &Group,
) -> Result<Split, ParallelError> {
    // Inputs are dimension 1 of a weight, outputs dimension 0.
    let dim = usize::from(operation == ROW);
    let split = asked.clone().unwrap_or_else(|| Split::even(total, group));
    split.check(group)?;
    if split.total() == total {
        return Ok(split);
    }
    Err(ParallelError::Length {
        operation,
        dim,
        expected: split.total(),
        counts: split.counts().to_vec(),
        found: total,
    })
}

fn check_slice(
    operation: &'static str,
    slice: &Tensor,
    dim: usize,
    expected: usize,
    split: &Split,
) -> candle_core::Result<()> {
    let found = slice.dim(dim)?;
    if found == expected {
        return Ok(());
    }
    Err(ParallelError::Length { operation, dim, expected, counts: split.counts().to_vec(), found }
        .into())
}
