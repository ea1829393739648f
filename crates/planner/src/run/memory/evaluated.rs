//! Averages of parameters, with which a model is evaluated if its rule averages.

use fusestep_simd::join_bf16;
use fusestep_tensor::{DType, Role};

use crate::error::Result;
use crate::run::memory::absorb::{narrowed, widened};
use crate::run::memory::state::State;

/// Lists that the average of a parameter is computed from besides the parameter.
const BESIDE: [Role; 3] = [Role::Master, Role::Remainder, Role::Base];

/// The bytes of some elements in the lists of [`BESIDE`]; empty for a list that is missing.
pub(crate) struct Beside {
    lists: [Vec<u8>; BESIDE.len()],
    base: DType,
}

impl Beside {
    /// Reads each list with `read`, which gives its dtype too, or nothing if there is no such list.
    pub(crate) fn read(
        mut read: impl FnMut(Role) -> Result<Option<(DType, Vec<u8>)>>,
    ) -> Result<Self> {
        let mut beside = Self { lists: Default::default(), base: DType::F32 };
        for (own, role) in beside.lists.iter_mut().zip(BESIDE) {
            if let Some((dtype, bytes)) = read(role)? {
                *own = bytes;
                if role == Role::Base {
                    beside.base = dtype;
                }
            }
        }
        Ok(beside)
    }

    /// x = p + factor·(z − p) in place of the parameter's values; of the master where there is one.
    pub(crate) fn average(&self, dtype: DType, factor: f64, params: &mut [u8]) {
        let [master, remainder, base] = &self.lists;
        if dtype == DType::F64 {
            for (param, base) in params.chunks_exact_mut(8).zip(base.chunks_exact(8)) {
                let (p, z) = (read::<f64>(param), read::<f64>(base));
                param.copy_from_slice(&(p + factor * (z - p)).to_le_bytes());
            }
            return;
        }
        let factor = factor as f32;
        let width = dtype.len_bytes();
        for (at, param) in params.chunks_exact_mut(width).enumerate() {
            let p: f32 = match dtype {
                _ if !master.is_empty() => read(&master[4 * at..]),
                DType::BF16 if !remainder.is_empty() => {
                    join_bf16(read(param), read(&remainder[2 * at..]))
                }
                DType::F16 | DType::BF16 => widened(dtype, read(param)),
                _ => read(param),
            };
            let z: f32 = match self.base {
                DType::BF16 => widened(DType::BF16, read(&base[2 * at..])),
                _ => read(&base[4 * at..]),
            };
            let x = p + factor * (z - p);
            match dtype {
                DType::F16 | DType::BF16 => {
                    param.copy_from_slice(&narrowed(dtype, x).to_le_bytes())
                }
                _ => param.copy_from_slice(&x.to_le_bytes()),
            }
        }
    }
}

/// The value that these bytes begin with.
fn read<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> T {
    bytemuck::pod_read_unaligned(&bytes[..size_of::<T>()])
}

/// The factor on z − p in a parameter's average, if its rule has one and has made a step.
pub(crate) fn factor_of(state: &State, param: usize) -> Option<f64> {
    let (storage, _) = state.places[param];
    let rule = state.rules[state.storages[storage].spec.rule].rule();
    let steps = state.step - state.steps_behind[param];
    rule.averaging().filter(|_| steps > 0)
}

/// Values that are gathered under a parameter's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    Params,
    Averages,
}
