//! The loop beside the definition at every level, and conversions.

use fusestep_simd::{Level, join_bf16_24, split_bf16_24};
use half::bf16;

use super::groups::Grads;
use super::run::{Shared, run_tensor};
use super::storage::GroupStorage;
use super::{CodedState, Coding, Dither, GROUP, decode, encode, reference, units_of};
use crate::Update;
use crate::param_storage::{Plain, WithRemainder8};

const CODINGS: [Coding; 3] = [Coding::Signed, Coding::Root, Coding::Positive];

/// An update with a list of each coding.
#[derive(Clone, Copy)]
struct Mix;

impl Update<f32, 3> for Mix {
    type StepScalars = f32;
    const STEP_SCALAR_BYTES: usize = 8;
    const CODINGS: Option<[Coding; 3]> = Some(CODINGS);

    fn step_scalars(&self, _: &[u8]) -> f32 {
        0.01
    }

    #[inline(always)]
    fn element(&self, lr: &f32, p: f32, g: f32, [m, v, u]: [f32; 3]) -> (f32, [f32; 3]) {
        let m = 0.9 * m + 0.1 * g;
        let v = 0.99 * v + 0.01 * (g * g);
        let held = 0.9 * u;
        let u = if held > g.abs() { held } else { g.abs() };
        (p - lr * (m / (v.sqrt() + u)), [m, v, u])
    }
}

/// Lists of a tensor whose parameter is kept as `K`.
struct Lists<K: GroupStorage> {
    param: Vec<K::Param>,
    master: Vec<K::Master>,
    grad: Vec<K::Param>,
    codes: [Vec<u8>; 3],
    units: [Vec<f32>; 3],
}

impl<K: GroupStorage> Lists<K> {
    fn copy(&self) -> Self {
        Self {
            param: self.param.clone(),
            master: self.master.clone(),
            grad: self.grad.clone(),
            codes: self.codes.clone(),
            units: self.units.clone(),
        }
    }

    fn step(&mut self, level: Level, dither: &Dither) {
        let [a, b, c] = &mut self.codes;
        let mut units = self.units.iter_mut();
        let state = [a, b, c].map(|codes| CodedState { codes, units: units.next().unwrap() });
        let shared = Shared { update: Mix, step_scalars: 0.01, grad_factor: 0.5, dither };
        run_tensor::<K, Mix, 3>(
            level,
            shared,
            &mut self.param,
            &mut self.master,
            Grads::Own(&self.grad),
            state,
        );
    }

    /// A step by the definition; `widen` and `narrow` are those of a single parameter.
    fn defined(
        &mut self,
        dither: &Dither,
        widen: fn(K::Param, K::Master) -> f32,
        narrow: fn(f32) -> (K::Param, K::Master),
        widen_grad: fn(K::Param) -> f32,
    ) {
        let numel = self.param.len();
        for group in 0..units_of(numel) {
            let elements = group * GROUP..(group * GROUP + GROUP).min(numel);
            let mut new: [Vec<f32>; 3] = Default::default();
            for at in elements.clone() {
                let p = widen(self.param[at], self.master[at]);
                let g = widen_grad(self.grad[at]) * 0.5;
                let old = std::array::from_fn(|list| {
                    let (code, unit) = (self.codes[list][at], self.units[list][group]);
                    reference::decode(CODINGS[list], code, unit)
                });
                let (p, state) = Mix.element(&0.01, p, g, old);
                (self.param[at], self.master[at]) = narrow(p);
                for (list, value) in new.iter_mut().zip(state) {
                    list.push(value);
                }
            }
            for (list, values) in new.iter().enumerate() {
                let (codes, unit) = reference::encode(CODINGS[list], values, dither);
                self.codes[list][elements.clone()].copy_from_slice(&codes);
                self.units[list][group] = unit;
            }
        }
    }

    /// Bits of everything that a step writes; those of NaN are the same.
    fn bits(&self, widen: fn(K::Param, K::Master) -> f32) -> Vec<u32> {
        let bits = |value: f32| if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() };
        let params = self.param.iter().zip(&self.master).map(|(p, q)| bits(widen(*p, *q)));
        let codes = self.codes.iter().flatten().map(|code| u32::from(*code));
        let units = self.units.iter().flatten().map(|unit| bits(*unit));
        params.chain(codes).chain(units).collect()
    }
}

fn draws() -> impl FnMut() -> u32 {
    let mut seed = 3u64;
    move || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 32) as u32
    }
}

/// Any bits, subnormals, zeros, or the usual.
fn hostile(kind: u32, bits: u32) -> f32 {
    match kind % 5 {
        0 => f32::from_bits(bits),
        1 => f32::from_bits(bits & 0x807f_ffff),
        2 => 0.0,
        3 if bits.is_multiple_of(40) => f32::INFINITY,
        3 if bits % 40 == 1 => f32::NAN,
        _ => (bits >> 8) as f32 / 16_777_216.0 - 0.5,
    }
}

fn check<K: GroupStorage>(
    widen: fn(K::Param, K::Master) -> f32,
    narrow: fn(f32) -> (K::Param, K::Master),
    widen_grad: fn(K::Param) -> f32,
) {
    let mut draw = draws();
    for numel in [0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 127, 200] {
        for round in 0..12 {
            let mut values =
                |kind| -> Vec<f32> { (0..numel).map(|_| hostile(kind, draw())).collect() };
            let (param, master) = values(round).into_iter().map(narrow).unzip();
            let grad = values(round / 2).into_iter().map(|value| narrow(value).0).collect();
            let codes = [0; 3].map(|_| (0..numel).map(|_| draw() as u8).collect());
            let units = [0, 1, 2].map(|list| {
                let units = (0..units_of(numel)).map(|_| hostile(round / 3 + list, draw()).abs());
                units.collect()
            });
            let start = Lists::<K> { param, master, grad, codes, units };
            let dithers = [Dither::NEAREST, Dither::of_step(u64::from(round)), Dither::NEAREST];
            let mut expected = start.copy();
            for dither in &dithers {
                expected.defined(dither, widen, narrow, widen_grad);
            }
            for level in Level::available() {
                let mut found = start.copy();
                for dither in &dithers {
                    found.step(level, dither);
                }
                assert_eq!(found.bits(widen), expected.bits(widen), "{level}, {numel}, {round}");
            }
        }
    }
}

#[test]
fn every_level_gives_the_bits_of_the_definition() {
    check::<Plain<f32>>(|p, ()| p, |value| (value, ()), |g| g);
    check::<Plain<bf16>>(|p, ()| p.to_f32(), |value| (bf16::from_f32(value), ()), bf16::to_f32);
    check::<WithRemainder8>(
        |p, q| join_bf16_24(p.to_bits(), q),
        |value| {
            let (param, remainder) = split_bf16_24(value);
            (bf16::from_bits(param), remainder)
        },
        bf16::to_f32,
    );
}

#[test]
fn lists_are_read_and_written_as_the_definition_says() {
    let mut draw = draws();
    for coding in CODINGS {
        for numel in [0, 1, 31, 32, 33, 64, 100] {
            for kind in 0..5 {
                let draws = (0..numel).map(|_| hostile(kind, draw()));
                let values: Vec<f32> = match coding {
                    Coding::Signed => draws.collect(),
                    Coding::Root | Coding::Positive => draws.map(f32::abs).collect(),
                };
                let (mut codes, mut units) = (vec![7; numel], vec![7.0; units_of(numel)]);
                let list = CodedState { codes: &mut codes, units: &mut units };
                encode(coding, &values, list, &Dither::NEAREST).unwrap();
                let mut found = vec![7.0; numel];
                decode(coding, &codes, &units, &mut found).unwrap();
                for (group, values) in values.chunks(GROUP).enumerate() {
                    let (expected, unit) = reference::encode(coding, values, &Dither::NEAREST);
                    assert_eq!(codes[group * GROUP..][..values.len()], expected);
                    assert!(units[group] == unit || unit.is_nan() && units[group].is_nan());
                    for (at, code) in expected.iter().enumerate() {
                        let value = reference::decode(coding, *code, unit);
                        let found = found[group * GROUP + at];
                        assert!(
                            found.to_bits() == value.to_bits() || value.is_nan() && found.is_nan()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_read_is_near_what_was_written() {
    let values: Vec<f32> = (0..320).map(|at| (at as f32 * 0.7).sin() * 1e-3).collect();
    for (coding, bound) in [(Coding::Signed, 2.0 / 252.0), (Coding::Positive, 1.0 / 255.0)] {
        let values: Vec<f32> = match coding {
            Coding::Signed => values.clone(),
            _ => values.iter().map(|value| value.abs()).collect(),
        };
        let (mut codes, mut units) = (vec![0; 320], vec![0.0; 10]);
        let list = CodedState { codes: &mut codes, units: &mut units };
        encode(coding, &values, list, &Dither::NEAREST).unwrap();
        let mut found = vec![0.0; 320];
        decode(coding, &codes, &units, &mut found).unwrap();
        for (found, value) in found.iter().zip(&values) {
            assert!((found - value).abs() <= 1.001e-3 * bound, "{coding:?}: {value} is {found}");
        }
    }
}

#[test]
fn lists_that_do_not_fit_are_named() {
    let mut values = [0.0; 33];
    let error = decode(Coding::Root, &[0; 32], &[0.0; 2], &mut values).unwrap_err();
    assert_eq!(error.to_string(), "codes: expected 33 elements, found 32");
    let list = CodedState { codes: &mut [0; 33], units: &mut [0.0; 3] };
    let error = encode(Coding::Root, &values, list, &Dither::NEAREST).unwrap_err();
    assert_eq!(error.to_string(), "units: expected 2 elements, found 3");
}

#[test]
fn dithers_go_evenly_through_their_range() {
    assert!(Dither::NEAREST.lanes().iter().all(|dither| *dither == 0.0));
    for place in 0..GROUP {
        let mut tenths = [0; 10];
        for step in 1..=10_000 {
            let dither = Dither::of_step(step).lanes()[place];
            assert!(dither.abs() < 0.5 && dither * 65_536.0 % 2.0 != 0.0, "{dither}");
            tenths[((dither + 0.5) * 10.0) as usize] += 1;
        }
        assert!(tenths.iter().all(|count| (990..=1010).contains(count)), "{place}: {tenths:?}");
    }
}
