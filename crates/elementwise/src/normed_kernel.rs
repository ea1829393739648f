//! The kernel of a rule whose rate follows from norms of whole tensors.

use std::marker::PhantomData;

use fusestep_launch::{
    ArgumentLayout, FINISHED_BYTES, Format, GroupValues, HostCall, HostRun, MAX_LISTS, MAX_SUMS,
    MultiTensorKernel, NormedKernel, Outcome, Precision, ResidentStepScalars, RuleError,
    SumsAndUpdate, TensorList, UpdateRule, WORKSPACE_BYTES, check_width,
};
use fusestep_tensor::{DType, Trust};

use crate::coded::run_coded;
use crate::normed_equation::ByNormedEquation;
use crate::{
    Compute, NormedRule, Norms, Scalars, SummedChunk, read_values, run_format, write_padded,
};

/// Bytes of a value of the rate.
const WIDE: usize = size_of::<f64>();

/// The kernel of a rule with norms. All arithmetic of an element is in f64 for parameters of f64
/// and else in f32; norms and rates are in f64. The norm of a parameter with a master is the
/// master's.
///
/// # Errors
/// As [`UpdateRule::kernel`].
pub fn normed_kernel<R, const STATES: usize>(
    rule: &R,
    dtype: DType,
    precision: Precision,
) -> Result<Box<dyn MultiTensorKernel>, RuleError>
where
    R: NormedRule<STATES> + UpdateRule,
{
    rule.validate()?;
    check_width(rule, dtype)?;
    let format = Format::new(rule.name(), dtype, precision)?;
    Ok(match (dtype, format.is_coded()) {
        (DType::F64, _) => Kernel::<R, f64, STATES>::boxed(*rule, format, OnHost::values::<f64>()),
        (_, false) => Kernel::<R, f32, STATES>::boxed(*rule, format, OnHost::values::<f32>()),
        (_, true) => Kernel::<R, f32, STATES>::boxed(*rule, format, OnHost::codes()),
    })
}
/// The host's loops over lists of a format: over values, or over state in codes.
struct OnHost<R, const STATES: usize> {
    run: fn(Format, HostRun<'_, '_>),
    sums: fn(SummedChunk<'_>) -> [f64; MAX_SUMS],
    rule: PhantomData<R>,
}

impl<R: NormedRule<STATES>, const STATES: usize> OnHost<R, STATES> {
    fn values<T: Compute>() -> Self {
        Self {
            run: |format, run| {
                let update = Kernel::<R, T, STATES>::update(run.call);
                run_format::<T, _, STATES>(&update, format, run);
            },
            sums: R::Norms::chunk_sums::<T>,
            rule: PhantomData,
        }
    }

    fn codes() -> Self {
        Self {
            run: |format, run| {
                let update = Kernel::<R, f32, STATES>::update(run.call);
                run_coded::<_, STATES>(update, format, run);
            },
            sums: R::Norms::coded_chunk_sums,
            rule: PhantomData,
        }
    }
}

/// A rule with all arithmetic of an element in `T`, for tensors kept in any format that is computed
/// in `T`.
///
/// ```text
/// scalars:       workspace | f64 of the rate | T of elements
/// step scalars:  f64 lr | f64 of the rate | f64 trust | T of elements
/// ```
struct Kernel<R, T, const STATES: usize> {
    rule: R,
    format: Format,
    lists: Vec<TensorList>,
    on_host: OnHost<R, STATES>,
    compute: PhantomData<T>,
}

impl<R: NormedRule<STATES>, T: Compute, const STATES: usize> Kernel<R, T, STATES> {
    /// Offset of the scalars of elements.
    const SCALARS_AT: usize = WORKSPACE_BYTES + R::RateScalars::LEN_BYTES;

    /// Offset of trust among a group's step scalars.
    const TRUST_AT: usize = WIDE + R::RateStepScalars::LEN_BYTES;

    /// Offset of a group's step scalars of elements.
    const STEP_SCALARS_AT: usize = Self::TRUST_AT + WIDE;

    /// Bytes of a group's step scalars.
    const STEP_SCALAR_BYTES: usize = Self::STEP_SCALARS_AT + R::StepScalars::<T>::LEN_BYTES;

    fn boxed(rule: R, format: Format, on_host: OnHost<R, STATES>) -> Box<dyn MultiTensorKernel> {
        let lists = format.lists(&R::STATE);
        Box::new(Self { rule, format, lists, on_host, compute: PhantomData })
    }

    /// The update of a call whose scalars this kernel wrote.
    fn update(call: HostCall<'_>) -> ByNormedEquation<R, T, STATES> {
        ByNormedEquation {
            scalars: R::Scalars::read(&call.scalars[Self::SCALARS_AT..]),
            rule: PhantomData,
        }
    }

    /// The bytes of a group's step scalars, as this kernel wrote them, and of the key behind them.
    fn step_scalars_of<'a>(&self, call: HostCall<'a>, group: u32) -> &'a [u8] {
        call.step_scalars_of(group, Self::STEP_SCALAR_BYTES + self.format.key_bytes())
    }
}

impl<R, T, const STATES: usize> MultiTensorKernel for Kernel<R, T, STATES>
where
    R: NormedRule<STATES>,
    T: Compute,
{
    fn stem(&self) -> &'static str {
        R::STEM
    }

    fn entry(&self) -> &'static str {
        R::entries(self.format).both
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: Self::SCALARS_AT + R::Scalars::<T>::LEN_BYTES,
            step_scalar_bytes: Self::STEP_SCALAR_BYTES,
        })
    }

    fn flags(&self) -> u32 {
        self.format.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        out[..WORKSPACE_BYTES].fill(0);
        let of_rate = &mut out[WORKSPACE_BYTES..Self::SCALARS_AT];
        write_padded(self.rule.rate_scalars().values(), of_rate);
        write_rounded::<T>(self.rule.scalars().values(), &mut out[Self::SCALARS_AT..]);
    }

    fn write_step_scalars(&self, values: GroupValues, out: &mut [u8]) {
        let out = self.format.write_key(values.step, out);
        let trust: f64 = match self.rule.excluded().trust(&values) {
            Trust::Ratio => 1.0,
            Trust::Plain => 0.0,
        };
        write_padded(&[values.lr * values.lr_scale], &mut out[..WIDE]);
        let of_rate = self.rule.rate_step_scalars(values);
        write_padded(of_rate.values(), &mut out[WIDE..Self::TRUST_AT]);
        write_padded(&[trust], &mut out[Self::TRUST_AT..Self::STEP_SCALARS_AT]);
        let of_elements = self.rule.step_scalars(values);
        write_rounded::<T>(of_elements.values(), &mut out[Self::STEP_SCALARS_AT..]);
    }

    fn resident(&self) -> Option<ResidentStepScalars> {
        let hyper = self.rule.derived_from();
        let entry = R::entries(self.format).step_scalars;
        Some(ResidentStepScalars::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        (self.on_host.run)(self.format, run);
    }

    fn normed(&self) -> Option<&dyn NormedKernel> {
        Some(self)
    }
}

impl<R, T, const STATES: usize> NormedKernel for Kernel<R, T, STATES>
where
    R: NormedRule<STATES>,
    T: Compute,
{
    fn sums_and_update(&self) -> SumsAndUpdate {
        let entries = R::entries(self.format);
        SumsAndUpdate { sums: entries.sums, update: entries.update }
    }

    fn chunk_sums(
        &self,
        call: HostCall<'_>,
        group: u32,
        lists: [&[u8]; MAX_LISTS],
        wanted: [bool; MAX_SUMS],
    ) -> [f64; MAX_SUMS] {
        (self.on_host.sums)(SummedChunk {
            call,
            format: self.format,
            scalars: &call.scalars[Self::SCALARS_AT..],
            step_scalars: &self.step_scalars_of(call, group)[Self::STEP_SCALARS_AT..],
            lists,
            wanted,
        })
    }

    fn finish(
        &self,
        call: HostCall<'_>,
        group: u32,
        sums: [f64; MAX_SUMS],
        step_scalars: &mut [u8; FINISHED_BYTES],
    ) -> Outcome {
        let bytes = self.step_scalars_of(call, group);
        let scalars = R::RateScalars::read(&call.scalars[WORKSPACE_BYTES..]);
        let of_rate = R::RateStepScalars::read(&bytes[WIDE..]);
        let ([lr], [trust]): ([f64; 1], [f64; 1]) =
            (read_values(bytes), read_values(&bytes[Self::TRUST_AT..]));
        let [param, second] = sums.map(f64::sqrt);
        let norms = [param, R::second_norm(&scalars, call.grad_factor, second)];
        let is_scaled = trust != 0.0 && norms.iter().all(|&norm| norm > 0.0);
        // In f64 and rounded once; the operations are those of the rule's `.cu` file.
        let rate = T::round(if is_scaled { R::rate(&scalars, &of_rate, lr, norms) } else { lr });
        if !(norms.iter().all(|norm| norm.is_finite()) && rate.exact().is_finite()) {
            return Outcome::Skip;
        }
        let of_elements = R::StepScalars::read(&bytes[Self::STEP_SCALARS_AT..]);
        let of_tensor = R::tensor_scalars(rate, &of_rate, &of_elements);
        write_padded(of_tensor.values(), step_scalars);
        let own = R::TensorScalars::<T>::LEN_BYTES;
        self.format.copy_key(&bytes[Self::STEP_SCALAR_BYTES..], &mut step_scalars[own..]);
        Outcome::Update
    }

    fn grad_sum(&self) -> Option<usize> {
        R::Norms::GRAD_SUM
    }

    fn param_sum(&self) -> Option<usize> {
        R::Norms::PARAM_SUM
    }
}

/// Writes values, each rounded once, and zeroes the padding behind them.
fn write_rounded<T: Compute>(values: &[f64], out: &mut [u8]) {
    let mut places = out.chunks_exact_mut(size_of::<T>());
    for (&value, place) in values.iter().zip(places.by_ref()) {
        place.copy_from_slice(bytemuck::bytes_of(&T::round(value)));
    }
    places.for_each(|place| place.fill(0));
}
