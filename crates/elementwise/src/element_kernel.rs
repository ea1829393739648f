//! The kernel of a rule that updates every element on its own.

use std::marker::PhantomData;

use fusestep_launch::{
    ArgumentLayout, Format, GroupValues, HostRun, MultiTensorKernel, Precision,
    ResidentStepScalars, RuleError, TensorList, UpdateRule, check_width,
};
use fusestep_tensor::{DType, Role};

use crate::{Compute, padded_bytes, read_values, write_padded};

/// Names of a rule's device entries for one format.
#[derive(Clone, Copy, Debug)]
pub struct Entries {
    /// The entry that updates, by [`fusestep_launch::entry`].
    pub update: &'static str,
    /// The entry that derives the step scalars of a resident table, by
    /// [`fusestep_launch::step_scalars_entry`].
    pub step_scalars: &'static str,
}

/// A rule that updates every element on its own. It has `SCALARS` scalars that all tensors share,
/// and `STEP_SCALARS` that tensors of one group share at one step.
///
/// Scalars are formed in f64 here and rounded once, so that every backend computes from the same
/// bytes. They are read by the rule's `.cu` file in this order.
pub trait ElementRule<const SCALARS: usize, const STEP_SCALARS: usize>:
    UpdateRule + Copy + 'static
{
    /// Names the rule's `.cu` file and PTX module: `lion`.
    const STEM: &'static str;

    /// The device entries for a format.
    fn entries(format: Format) -> Entries;

    /// The state in the order of a record's addresses.
    fn state(&self) -> &'static [Role];

    /// Options as the device reads them.
    fn flags(&self) -> u32;

    /// The scalars that all tensors share.
    fn scalars(&self) -> [f64; SCALARS];

    /// The scalars that tensors of one group share at one step.
    fn step_scalars(&self, values: GroupValues) -> [f64; STEP_SCALARS];

    /// The hyper-parameters that a device derives step scalars from; the learning rate comes before
    /// them.
    fn hyper_parameters_of_step_scalars(&self) -> Vec<f64>;

    /// Updates tensors on the host: [`crate::run_format`] with the update of one element.
    fn run<T: Compute>(&self, scalars: [T; SCALARS], format: Format, run: HostRun<'_, '_>);
}

/// The kernel of a rule, with all arithmetic in f64 for parameters of f64 and else in f32.
///
/// # Errors
/// As [`UpdateRule::kernel`].
pub fn element_kernel<R, const SCALARS: usize, const STEP_SCALARS: usize>(
    rule: &R,
    dtype: DType,
    precision: Precision,
) -> Result<Box<dyn MultiTensorKernel>, RuleError>
where
    R: ElementRule<SCALARS, STEP_SCALARS>,
{
    rule.validate()?;
    check_width(rule, dtype)?;
    let format = Format::new(rule.name(), dtype, precision)?;
    Ok(match dtype {
        DType::F64 => Box::new(ElementKernel::<R, f64, SCALARS, STEP_SCALARS>::new(*rule, format)),
        _ => Box::new(ElementKernel::<R, f32, SCALARS, STEP_SCALARS>::new(*rule, format)),
    })
}

/// A rule with all arithmetic in `T`, for tensors kept in any format that is computed in `T`.
struct ElementKernel<R, T, const SCALARS: usize, const STEP_SCALARS: usize> {
    rule: R,
    format: Format,
    lists: Vec<TensorList>,
    compute: PhantomData<T>,
}

impl<R, T, const SCALARS: usize, const STEP_SCALARS: usize>
    ElementKernel<R, T, SCALARS, STEP_SCALARS>
where
    R: ElementRule<SCALARS, STEP_SCALARS>,
{
    fn new(rule: R, format: Format) -> Self {
        Self { rule, format, lists: format.lists(rule.state()), compute: PhantomData }
    }
}

impl<R, T, const SCALARS: usize, const STEP_SCALARS: usize> MultiTensorKernel
    for ElementKernel<R, T, SCALARS, STEP_SCALARS>
where
    R: ElementRule<SCALARS, STEP_SCALARS>,
    T: Compute,
{
    fn stem(&self) -> &'static str {
        R::STEM
    }

    fn entry(&self) -> &'static str {
        R::entries(self.format).update
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: padded_bytes::<T>(SCALARS),
            step_scalar_bytes: padded_bytes::<T>(STEP_SCALARS),
        })
    }

    fn flags(&self) -> u32 {
        self.rule.flags() | self.format.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        write_padded(&self.rule.scalars().map(T::round), out);
    }

    fn write_step_scalars(&self, values: GroupValues, out: &mut [u8]) {
        let step_scalars = self.rule.step_scalars(values).map(T::round);
        write_padded(&step_scalars, self.format.write_key(values.step, out));
    }

    fn resident(&self) -> Option<ResidentStepScalars> {
        let hyper = self.rule.hyper_parameters_of_step_scalars();
        let entry = R::entries(self.format).step_scalars;
        Some(ResidentStepScalars::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        let scalars = read_values(run.call.scalars);
        self.rule.run::<T>(scalars, self.format, run);
    }
}
