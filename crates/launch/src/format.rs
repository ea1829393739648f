//! Formats: the dtypes in which a kernel keeps parameters, state and what completes a parameter.

use fusestep_tensor::{DType, Role};

use crate::random_bits::step_key;
use crate::{
    Access, ArgumentLayout, Master, Precision, Rounding, RuleError, StateDType, TensorList,
};

/// The dtypes of a kernel's lists: the combinations there are kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // Each name says parameter, master or remainder, and state.
pub enum Layout {
    F64,
    F32,
    F32State16,
    F16,
    F16Master,
    Bf16,
    Bf16Master,
    Bf16Remainder,
    Bf16State16,
    Bf16MasterState16,
    Bf16RemainderState16,
    F32State8,
    Bf16State8,
    Bf16MasterState8,
    Bf16RemainderState8,
    Bf16Remainder8State8,
}

/// A checked combination of dtype and [`Precision`] in which a kernel keeps the tensors of its
/// parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    layout: Layout,
    param: DType,
    precision: Precision,
}

/// Flag of every kernel: records and step scalars carry the keys of random rounding.
pub const FLAG_STOCHASTIC: u32 = 1 << 31;

/// Flag of every kernel of 16-bit parameters: their gradients are f32.
pub const FLAG_WIDE_GRADS: u32 = 1 << 29;

/// Words that a record has behind its addresses with [`FLAG_STOCHASTIC`]: parameter, first element.
pub const ORIGIN_WORDS: usize = 2;

/// Bytes behind step scalars with [`FLAG_STOCHASTIC`]: the key of the step; with state in codes its
/// number.
pub const KEY_BYTES: usize = 8;

impl Format {
    /// Checks a combination for `rule`.
    ///
    /// # Errors
    /// [`RuleError::DType`] for a parameter that is not floating point; [`RuleError::Precision`]
    /// naming what cannot be had for this dtype and what can.
    pub fn new(rule: &'static str, dtype: DType, precision: Precision) -> Result<Self, RuleError> {
        let refuse =
            |what, expected, found| RuleError::Precision { rule, what, dtype, expected, found };
        let Precision { master, state, .. } = precision;
        let layout = match (dtype, master, state) {
            (DType::F64, Master::None, StateDType::Compute) => Layout::F64,
            (DType::F32, Master::None, StateDType::Compute) => Layout::F32,
            (DType::F32, Master::None, StateDType::Bf16) => Layout::F32State16,
            (DType::F16, Master::None, StateDType::Compute) => Layout::F16,
            (DType::F16, Master::F32, StateDType::Compute) => Layout::F16Master,
            (DType::BF16, Master::None, StateDType::Compute) => Layout::Bf16,
            (DType::BF16, Master::F32, StateDType::Compute) => Layout::Bf16Master,
            (DType::BF16, Master::Remainder, StateDType::Compute) => Layout::Bf16Remainder,
            (DType::BF16, Master::None, StateDType::Bf16) => Layout::Bf16State16,
            (DType::BF16, Master::F32, StateDType::Bf16) => Layout::Bf16MasterState16,
            (DType::BF16, Master::Remainder, StateDType::Bf16) => Layout::Bf16RemainderState16,
            (DType::F32, Master::None, StateDType::Int8) => Layout::F32State8,
            (DType::BF16, Master::None, StateDType::Int8) => Layout::Bf16State8,
            (DType::BF16, Master::F32, StateDType::Int8) => Layout::Bf16MasterState8,
            (DType::BF16, Master::Remainder, StateDType::Int8) => Layout::Bf16RemainderState8,
            (DType::BF16, Master::Remainder8, StateDType::Int8) => Layout::Bf16Remainder8State8,
            (DType::BF16, Master::Remainder8, _) => {
                let expected = "none, f32 or remainder, unless state is in int8";
                return Err(refuse("master weights", expected, master.name()));
            }
            (
                DType::F64 | DType::F32,
                master @ (Master::F32 | Master::Remainder | Master::Remainder8),
                _,
            ) => {
                let expected = "none, because such a parameter loses nothing";
                return Err(refuse("master weights", expected, master.name()));
            }
            (DType::F16, master @ (Master::Remainder | Master::Remainder8), _) => {
                return Err(refuse("master weights", "none or f32", master.name()));
            }
            (DType::F64, _, narrow @ (StateDType::Bf16 | StateDType::Int8)) => {
                return Err(refuse("state", "f64", narrow.name()));
            }
            (DType::F16, _, narrow @ (StateDType::Bf16 | StateDType::Int8)) => {
                return Err(refuse("state", "f32", narrow.name()));
            }
            (found, ..) => {
                return Err(RuleError::DType { rule, expected: "f32, f64, f16 or bf16", found });
            }
        };
        let format = Self { layout, param: dtype, precision };
        if format.is_coded() && format.is_stochastic() {
            return Err(refuse("rounding", "nearest with state in int8", "stochastic"));
        }
        if format.is_stochastic() && !format.narrows_to_bf16() {
            let expected =
                "nearest, unless bf16 state or bf16 without master weights is to be rounded";
            return Err(refuse("rounding", expected, "stochastic"));
        }
        Ok(format)
    }

    /// The dtypes of the lists.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The rounding of values to bf16.
    pub fn rounding(&self) -> Rounding {
        self.precision.rounding
    }

    /// Whether some value is rounded at random.
    pub fn is_stochastic(&self) -> bool {
        matches!(self.rounding(), Rounding::Stochastic { .. })
    }

    /// The storage type of parameters.
    pub fn param(&self) -> DType {
        self.param
    }

    /// The storage type of gradients.
    pub fn grad(&self) -> DType {
        self.precision.grad.of(self.param)
    }

    /// The format of a parameter that is kept as gradients are here.
    pub fn of_gradients(&self) -> Self {
        let layout = match (self.grad(), self.layout) {
            (grad, _) if grad != self.param => Layout::F32,
            (DType::F32, Layout::F32State8) => Layout::F32,
            (DType::BF16, _) if self.is_coded() => Layout::Bf16,
            (_, own) => own,
        };
        Self { layout, param: self.grad(), precision: self.precision }
    }

    /// Whether gradients are of another type than parameters.
    pub fn has_wide_gradients(&self) -> bool {
        self.grad() != self.param
    }

    /// Whether state is kept in codes, with a list of units for each list of state.
    pub fn is_coded(&self) -> bool {
        self.precision.state == StateDType::Int8
    }

    /// The storage type of state.
    pub fn state(&self) -> DType {
        match self.precision.state {
            StateDType::Bf16 => DType::BF16,
            StateDType::Int8 => DType::U8,
            StateDType::Compute if self.param == DType::F64 => DType::F64,
            StateDType::Compute => DType::F32,
        }
    }

    /// The master or remainder of a parameter, if it has one.
    pub fn master(&self) -> Master {
        self.precision.master
    }

    fn narrows_to_bf16(&self) -> bool {
        self.state() == DType::BF16
            || (self.param() == DType::BF16 && self.master() == Master::None)
    }

    /// The lists of a rule with this state: parameter, gradient, state, the units of state in
    /// codes, and last the master or remainder.
    pub fn lists(&self, state: &[Role]) -> Vec<TensorList> {
        let list = |role, dtype, access| TensorList { role, dtype, access };
        // A master is all that the update reads; the parameter is only its rounded copy.
        let param = match self.master() {
            Master::F32 => Access::Write,
            Master::None | Master::Remainder | Master::Remainder8 => Access::ReadWrite,
        };
        let mut lists = vec![
            list(Role::Param, self.param(), param),
            list(Role::Grad, self.grad(), Access::Read),
        ];
        lists.extend(state.iter().map(|&role| list(role, self.state(), Access::ReadWrite)));
        if self.is_coded() {
            let units = state.iter().filter_map(|role| role.units());
            lists.extend(units.map(|role| list(role, DType::F32, Access::ReadWrite)));
        }
        match self.master() {
            Master::None => {}
            Master::F32 => lists.push(list(Role::Master, DType::F32, Access::ReadWrite)),
            Master::Remainder => lists.push(list(Role::Remainder, DType::U16, Access::ReadWrite)),
            Master::Remainder8 => lists.push(list(Role::Remainder, DType::U8, Access::ReadWrite)),
        }
        lists
    }

    /// The sizes `own` of a kernel, with room for the keys of random rounding or the number of the
    /// dither.
    pub fn argument_layout(&self, own: ArgumentLayout) -> ArgumentLayout {
        let origin = if self.is_stochastic() { ORIGIN_WORDS } else { 0 };
        ArgumentLayout {
            lists: own.lists + origin,
            step_scalar_bytes: own.step_scalar_bytes + self.key_bytes(),
            ..own
        }
    }

    /// Start of the random numbers; 0 if nothing is rounded at random.
    pub fn seed(&self) -> u64 {
        match self.rounding() {
            Rounding::Nearest => 0,
            Rounding::Stochastic { seed } => seed,
        }
    }

    /// Bytes behind every group's step scalars: [`KEY_BYTES`] or none.
    pub fn key_bytes(&self) -> usize {
        if self.is_stochastic() || self.is_coded() { KEY_BYTES } else { 0 }
    }

    /// Copies a step's key, with which `from` begins, to the beginning of `to`. `from` are the
    /// bytes behind a group's step scalars, `to` those behind finished ones.
    ///
    /// # Panics
    /// If one of them is too short for the key.
    pub fn copy_key(&self, from: &[u8], to: &mut [u8]) {
        let key_bytes = self.key_bytes();
        to[..key_bytes].copy_from_slice(&from[..key_bytes]);
    }

    /// Flags of the header: [`FLAG_STOCHASTIC`], [`FLAG_WIDE_GRADS`], both or none.
    pub fn flags(&self) -> u32 {
        let stochastic = if self.is_stochastic() { FLAG_STOCHASTIC } else { 0 };
        let wide = if self.has_wide_gradients() { FLAG_WIDE_GRADS } else { 0 };
        stochastic | wide
    }

    /// Writes the key of the step, or its number where state is dithered, behind a kernel's own
    /// step scalars and returns the own part, which is left to be written.
    ///
    /// # Panics
    /// If `step_scalars` is shorter than [`KEY_BYTES`].
    pub fn write_key<'a>(&self, step: u64, step_scalars: &'a mut [u8]) -> &'a mut [u8] {
        let number = match self.rounding() {
            Rounding::Stochastic { seed } => step_key(seed, step),
            Rounding::Nearest if self.is_coded() => step,
            Rounding::Nearest => return step_scalars,
        };
        let (own, key) = step_scalars.split_at_mut(step_scalars.len() - KEY_BYTES);
        key.copy_from_slice(&number.to_le_bytes());
        own
    }
}

/// The device entry of a kernel for a [`Format`], without its argument suffix: the stem, the part
/// where a kernel has several, and the dtypes.
///
/// ```
/// # use fusestep_launch::{entry, Format, Precision};
/// # use fusestep_tensor::DType;
/// let format = Format::new("adamw", DType::BF16, Precision::default()).unwrap();
/// assert_eq!(entry!("fused_adam", format), "fused_adam_bf16");
/// assert_eq!(entry!("lamb", format, "_sums"), "lamb_sums_bf16");
/// ```
#[macro_export]
macro_rules! entry {
    ($stem:literal, $format:expr $(, $part:literal)?) => {
        match $format.layout() {
            $crate::Layout::F64 => concat!($stem, $($part,)? "_f64"),
            $crate::Layout::F32 => concat!($stem, $($part,)? "_f32"),
            $crate::Layout::F32State16 => concat!($stem, $($part,)? "_f32_s16"),
            $crate::Layout::F16 => concat!($stem, $($part,)? "_f16"),
            $crate::Layout::F16Master => concat!($stem, $($part,)? "_f16_m32"),
            $crate::Layout::Bf16 => concat!($stem, $($part,)? "_bf16"),
            $crate::Layout::Bf16Master => concat!($stem, $($part,)? "_bf16_m32"),
            $crate::Layout::Bf16Remainder => concat!($stem, $($part,)? "_bf16_r16"),
            $crate::Layout::Bf16State16 => concat!($stem, $($part,)? "_bf16_s16"),
            $crate::Layout::Bf16MasterState16 => concat!($stem, $($part,)? "_bf16_m32_s16"),
            $crate::Layout::Bf16RemainderState16 => concat!($stem, $($part,)? "_bf16_r16_s16"),
            $crate::Layout::F32State8 => concat!($stem, $($part,)? "_f32_s8"),
            $crate::Layout::Bf16State8 => concat!($stem, $($part,)? "_bf16_s8"),
            $crate::Layout::Bf16MasterState8 => concat!($stem, $($part,)? "_bf16_m32_s8"),
            $crate::Layout::Bf16RemainderState8 => concat!($stem, $($part,)? "_bf16_r16_s8"),
            $crate::Layout::Bf16Remainder8State8 => concat!($stem, $($part,)? "_bf16_r8_s8"),
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

    #[test]
    fn what_cannot_be_kept_is_refused_with_what_can() {
        let stochastic = Rounding::Stochastic { seed: 1 };
        for (dtype, master, state, rounding, message) in [
            (
                DType::F32,
                Master::F32,
                StateDType::Compute,
                Rounding::Nearest,
                "lion: master weights of f32 parameters: expected none, because such a parameter \
                 loses nothing, found f32",
            ),
            (
                DType::F16,
                Master::Remainder,
                StateDType::Compute,
                Rounding::Nearest,
                "lion: master weights of f16 parameters: expected none or f32, found remainder",
            ),
            (
                DType::F64,
                Master::None,
                StateDType::Bf16,
                Rounding::Nearest,
                "lion: state of f64 parameters: expected f64, found bf16",
            ),
            (
                DType::F16,
                Master::F32,
                StateDType::Bf16,
                Rounding::Nearest,
                "lion: state of f16 parameters: expected f32, found bf16",
            ),
            (
                DType::BF16,
                Master::F32,
                StateDType::Compute,
                stochastic,
                "lion: rounding of bf16 parameters: expected nearest, unless bf16 state or bf16 \
                 without master weights is to be rounded, found stochastic",
            ),
            (
                DType::BF16,
                Master::Remainder8,
                StateDType::Bf16,
                Rounding::Nearest,
                "lion: master weights of bf16 parameters: expected none, f32 or remainder, unless \
                 state is in int8, found remainder8",
            ),
            (
                DType::F64,
                Master::None,
                StateDType::Int8,
                Rounding::Nearest,
                "lion: state of f64 parameters: expected f64, found int8",
            ),
            (
                DType::BF16,
                Master::None,
                StateDType::Int8,
                stochastic,
                "lion: rounding of bf16 parameters: expected nearest with state in int8, found \
                 stochastic",
            ),
        ] {
            let precision = Precision { master, state, rounding, ..Precision::default() };
            let error = Format::new("lion", dtype, precision).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{message} (setting `")), "{error}");
        }
        assert!(Format::new("lion", DType::I32, Precision::default()).is_err());
    }

    #[test]
    fn lists_have_the_dtypes_that_were_asked_for() {
        let mut entries = std::collections::BTreeSet::new();
        for dtype in ALL {
            for master in [Master::None, Master::F32, Master::Remainder, Master::Remainder8] {
                for state in [StateDType::Compute, StateDType::Bf16, StateDType::Int8] {
                    let precision = Precision { master, state, ..Precision::default() };
                    let Ok(format) = Format::new("adam", dtype, precision) else {
                        continue;
                    };
                    assert!(entries.insert(entry!("adam", format)), "{precision}");
                    let lists = format.lists(&[Role::Moment1]);
                    assert_eq!((lists[0].dtype, lists[1].dtype), (dtype, dtype));
                    assert_eq!(lists[2].dtype == DType::BF16, state == StateDType::Bf16);
                    let coded = state == StateDType::Int8;
                    assert_eq!((lists[2].dtype == DType::U8, format.is_coded()), (coded, coded));
                    if coded {
                        let units = (lists[3].role, lists[3].dtype);
                        assert_eq!(units, (Role::Moment1Units, DType::F32));
                    }
                    let beside =
                        lists.get(if coded { 4 } else { 3 }).map(|list| (list.role, list.dtype));
                    let expected = match master {
                        Master::None => None,
                        Master::F32 => Some((Role::Master, DType::F32)),
                        Master::Remainder => Some((Role::Remainder, DType::U16)),
                        Master::Remainder8 => Some((Role::Remainder, DType::U8)),
                    };
                    assert_eq!(beside, expected);
                }
            }
        }
        assert_eq!(entries.len(), 16);
    }

    #[test]
    fn random_rounding_makes_room_for_its_key() {
        let own = ArgumentLayout { lists: 4, scalar_bytes: 24, step_scalar_bytes: 16 };
        let precision =
            Precision { rounding: Rounding::Stochastic { seed: 3 }, ..Precision::default() };
        let format = Format::new("adam", DType::BF16, precision).unwrap();
        let layout = format.argument_layout(own);
        assert_eq!((layout.lists, layout.step_scalar_bytes), (6, 24));
        let mut step_scalars = [0; 24];
        assert_eq!(format.write_key(5, &mut step_scalars).len(), 16);
        assert_eq!(step_scalars[16..], step_key(3, 5).to_le_bytes());
        let nearest = Format::new("adam", DType::BF16, Precision::default()).unwrap();
        assert_eq!(nearest.argument_layout(own), own);
        assert_eq!(nearest.write_key(5, &mut step_scalars).len(), 24);
    }

    #[test]
    fn state_in_codes_has_the_number_of_the_step_behind_its_scalars() {
        let own = ArgumentLayout { lists: 6, scalar_bytes: 24, step_scalar_bytes: 16 };
        let precision = Precision { state: StateDType::Int8, ..Precision::default() };
        let format = Format::new("adam", DType::F32, precision).unwrap();
        let layout = format.argument_layout(own);
        assert_eq!((layout.lists, layout.step_scalar_bytes, format.flags()), (6, 24, 0));
        let mut step_scalars = [0; 24];
        assert_eq!(format.write_key(5, &mut step_scalars).len(), 16);
        assert_eq!(step_scalars[16..], 5u64.to_le_bytes());
    }
}
