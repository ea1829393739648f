//! The kernel of a rule that updates every element on its own.

use std::marker::PhantomData;

use fusestep_launch::{
    ArgumentLayout, Format, GroupValues, HostRun, MultiTensorKernel, Precision,
    ResidentStepScalars, RuleError, TensorList, UpdateRule, check_width,
};
use fusestep_tensor::{DType, Role};

use crate::coded::run_coded;
use crate::{Compute, Update, padded_bytes, read_values, run_format, write_padded};

/// State that a rule without codes can have.
pub(crate) const NO_CODES: &str =
    "f32 or bf16, since the rule keeps nothing that int8 codes stand for";

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

    /// Hands over the update of one element.
    fn with_update<T: Compute, V: UpdateVisitor<T>>(
        &self,
        scalars: [T; SCALARS],
        visitor: V,
    ) -> V::Output;
}

/// Code that is compiled for every update that a rule may have by its settings.
pub trait UpdateVisitor<T: Compute> {
    /// The result of the code.
    type Output;

    /// Runs for an update with `N` lists of state.
    fn visit<U: Update<T, N>, const N: usize>(self, update: U) -> Self::Output;
}

/// Whether the state of an update can be kept in codes.
struct IsCodable;

impl UpdateVisitor<f32> for IsCodable {
    type Output = bool;

    fn visit<U: Update<f32, N>, const N: usize>(self, _: U) -> bool {
        U::CODINGS.is_some()
    }
}

/// Tensors with state in codes that an update is to run over on the host.
struct CodedRun<'a, 'b> {
    format: Format,
    run: HostRun<'a, 'b>,
}

impl UpdateVisitor<f32> for CodedRun<'_, '_> {
    type Output = ();

    fn visit<U: Update<f32, N>, const N: usize>(self, update: U) {
        run_coded::<U, N>(update, self.format, self.run);
    }
}

/// Tensors that an update is to run over on the host.
struct Run<'a, 'b> {
    format: Format,
    run: HostRun<'a, 'b>,
}

impl<T: Compute> UpdateVisitor<T> for Run<'_, '_> {
    type Output = ();

    fn visit<U: Update<T, N>, const N: usize>(self, update: U) {
        run_format::<T, U, N>(&update, self.format, self.run);
    }
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
    if format.is_coded() {
        let is_codable = rule.with_update::<f32, _>([0.0; SCALARS], IsCodable);
        if !is_codable || rule.state().is_empty() {
            return Err(RuleError::Precision {
                rule: rule.name(),
                what: "state",
                dtype,
                expected: NO_CODES,
                found: precision.state.name(),
            });
        }
    }
    Ok(match (dtype, format.is_coded()) {
        (DType::F64, _) => ElementKernel::<R, f64, SCALARS, STEP_SCALARS>::boxed(
            *rule,
            format,
            run_values::<R, f64, _, _>,
        ),
        (_, false) => ElementKernel::<R, f32, SCALARS, STEP_SCALARS>::boxed(
            *rule,
            format,
            run_values::<R, f32, _, _>,
        ),
        (_, true) => ElementKernel::<R, f32, SCALARS, STEP_SCALARS>::boxed(
            *rule,
            format,
            run_codes::<R, _, _>,
        ),
    })
}

fn run_values<R, T, const SCALARS: usize, const STEP_SCALARS: usize>(
    rule: &R,
    format: Format,
    run: HostRun<'_, '_>,
) where
    R: ElementRule<SCALARS, STEP_SCALARS>,
    T: Compute,
{
    rule.with_update::<T, _>(read_values(run.call.scalars), Run { format, run });
}

fn run_codes<R, const SCALARS: usize, const STEP_SCALARS: usize>(
    rule: &R,
    format: Format,
    run: HostRun<'_, '_>,
) where
    R: ElementRule<SCALARS, STEP_SCALARS>,
{
    rule.with_update::<f32, _>(read_values(run.call.scalars), CodedRun { format, run });
}

/// A rule with all arithmetic in `T`, for tensors kept in any format that is computed in `T`.
struct ElementKernel<R, T, const SCALARS: usize, const STEP_SCALARS: usize> {
    rule: R,
    format: Format,
    lists: Vec<TensorList>,
    run: RunHost<R>,
    compute: PhantomData<T>,
}

/// Updates of tensors on the host by a rule.
type RunHost<R> = fn(&R, Format, HostRun<'_, '_>);

impl<R, T, const SCALARS: usize, const STEP_SCALARS: usize>
    ElementKernel<R, T, SCALARS, STEP_SCALARS>
where
    R: ElementRule<SCALARS, STEP_SCALARS>,
{
    fn boxed(rule: R, format: Format, run: RunHost<R>) -> Box<dyn MultiTensorKernel>
    where
        T: Compute,
    {
        let lists = format.lists(rule.state());
        Box::new(Self { rule, format, lists, run, compute: PhantomData })
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
        (self.run)(&self.rule, self.format, run);
    }
}
