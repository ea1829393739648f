//! Parts of the format of 8 bits that were chosen because training without them goes wrong: a root
//! is never coded 0, codes of roots are dithered, and units are f32.

use fusestep_elementwise::coded::{Coding, Dither, GROUP, decode, reference};
use fusestep_fused_adam::{Adam, CodedAdamTensors, CodedState, ParamSlices, WeightDecay};
use half::{bf16, f16};

/// Steps with gradients, and steps behind them.
const WITH: u64 = 200;
const ALL: u64 = 3000;

/// What is left of a root after the steps without gradients: β₂ to half their number.
fn exactly_left() -> f32 {
    0.999f64.powf((ALL - WITH) as f64 / 2.0) as f32
}

/// A group of 32 elements, all lists in one.
#[derive(Default)]
struct Group {
    param: [f32; GROUP],
    codes: [[u8; GROUP]; 2],
    units: [[f32; 1]; 2],
}

impl Group {
    fn step(&mut self, adam: &Adam, step: u64, grad: &[f32; GROUP]) {
        let ([m, v], [m_unit, v_unit]) = (&mut self.codes, &mut self.units);
        adam.step_coded(
            step,
            &mut [CodedAdamTensors {
                param: ParamSlices::F32 { param: &mut self.param, grad },
                moment1: CodedState { codes: m, units: m_unit },
                moment2: CodedState { codes: v, units: v_unit },
                max_moment2: None,
            }],
        )
        .unwrap();
    }

    fn roots(&self) -> [f32; GROUP] {
        let mut squares = [0.0; GROUP];
        decode(Coding::Root, &self.codes[1], &self.units[1], &mut squares).unwrap();
        squares.map(f32::sqrt)
    }
}

fn adam() -> Adam {
    Adam { weight_decay: WeightDecay::Decoupled(0.0), ..Adam::default() }
}

/// A second moment by the definition, with another way to keep units or without dither.
struct Emulated {
    codes: Vec<u8>,
    unit: f32,
    keep: fn(f32) -> f32,
    dithered: bool,
}

impl Emulated {
    fn new(keep: fn(f32) -> f32, dithered: bool) -> Self {
        Self { codes: vec![0; GROUP], unit: 0.0, keep, dithered }
    }

    fn step(&mut self, step: u64, grad: &[f32; GROUP]) {
        let dither = if self.dithered { Dither::of_step(step) } else { Dither::NEAREST };
        let squares = self.codes.iter().zip(grad).map(|(code, g)| {
            let v = reference::decode(Coding::Root, *code, self.unit);
            0.999 * v + (1.0f64 - 0.999) as f32 * (g * g)
        });
        let squares: Vec<f32> = squares.collect();
        (self.codes, self.unit) = reference::encode(Coding::Root, &squares, &dither);
        self.unit = (self.keep)(self.unit);
    }

    fn roots(&self) -> Vec<f32> {
        self.codes.iter().map(|code| f32::from(*code) * self.unit).collect()
    }
}

#[test]
fn a_root_falls_as_it_should_where_its_whole_group_has_no_gradients() {
    let (adam, mut group) = (adam(), Group::default());
    let mut of_units: [Emulated; 3] = [
        Emulated::new(|unit| unit, true),
        Emulated::new(|unit| bf16::from_f32(unit).to_f32(), true),
        Emulated::new(|unit| f16::from_f32(unit * 1024.0).to_f32() / 1024.0, true),
    ];
    let mut before = [0.0; 4];
    for step in 1..=ALL {
        let grad = if step <= WITH { [0.5; GROUP] } else { [0.0; GROUP] };
        group.step(&adam, step, &grad);
        for emulated in &mut of_units {
            emulated.step(step, &grad);
        }
        if step == WITH {
            before[0] = group.roots()[0];
            for (before, emulated) in before[1..].iter_mut().zip(&of_units) {
                *before = emulated.roots()[0];
            }
        }
    }
    let left = group.roots()[0] / before[0];
    assert!((left / exactly_left() - 1.0).abs() < 1e-3, "{left} of {}", exactly_left());
    let [f32_units, bf16_units, f16_units] = &of_units;
    assert_eq!(f32_units.roots()[0], group.roots()[0]);
    // Half a last place of 16 bits is more, or nearly as much, as a step takes of a root.
    assert_eq!(bf16_units.roots()[0] / before[2], 1.0);
    let left = f16_units.roots()[0] / before[3];
    assert!((left / exactly_left() - 1.0).abs() > 0.1, "{left}");
}

#[test]
fn a_root_without_gradients_falls_beside_its_group() {
    let (adam, mut group) = (adam(), Group::default());
    let mut nearest = Emulated::new(|unit| unit, false);
    let mut before = [0.0; 2];
    for step in 1..=ALL {
        // The first four have gradients all along.
        let rest = if step <= WITH { 0.5 } else { 0.0 };
        let grad = std::array::from_fn(|at| if at < 4 { 1.0 } else { rest });
        group.step(&adam, step, &grad);
        nearest.step(step, &grad);
        if step == WITH {
            before = [group.roots()[4], nearest.roots()[4]];
        }
    }
    let rest = |roots: &[f32]| roots[4..].iter().sum::<f32>() / (GROUP - 4) as f32;
    let left = rest(&group.roots()) / before[0];
    assert!((left / exactly_left() - 1.0).abs() < 0.1, "{left} of {}", exactly_left());
    // Rounded to nearest, its root stays the same share of the group's, or rises with it.
    assert!(rest(&nearest.roots()) / before[1] > 0.9);
}

/// Gradients of an embedding: of very different magnitudes, each there once in ten steps.
fn rare(step: u64, at: usize) -> f32 {
    let h = (step * 32 + at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let h = (h ^ h >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33;
    let sign = if h.is_multiple_of(2) { 1.0 } else { -1.0 };
    if h % 1000 < 100 && step <= WITH { sign * 10f32.powf(-(at as f32) / 8.0) } else { 0.0 }
}

#[test]
fn no_step_is_much_larger_than_the_rate() {
    let (adam, mut group) = (adam(), Group::default());
    let lr = adam.lr as f32;
    let mut largest = 0.0f32;
    // With code 0 allowed, and everything else the same.
    let (mut m, mut v) = ([(0u8, 0.0f32); GROUP], [(0u8, 0.0f32); GROUP]);
    let mut largest_with_0 = 0.0f32;
    for step in 1..=ALL {
        let grad = std::array::from_fn(|at| rare(step, at));
        let before = group.param;
        group.step(&adam, step, &grad);
        for (new, old) in group.param.iter().zip(before) {
            largest = largest.max((new - old).abs() / lr);
        }
        let dither = Dither::of_step(step);
        let bias = (1.0 - 0.999f64.powi(step as i32)).sqrt();
        let step_size = (bias / (1.0 - 0.9f64.powi(step as i32))) as f32;
        let mut new = ([0.0; GROUP], [0.0; GROUP]);
        for at in 0..GROUP {
            let g = grad[at];
            new.0[at] = 0.9 * reference::decode(Coding::Signed, m[at].0, m[at].1) + 0.1 * g;
            let root = f32::from(v[at].0) * v[at].1;
            new.1[at] = (0.999 * (root * root) + 0.001 * (g * g)).sqrt();
            let moved = step_size * (new.0[at] / (new.1[at] + 1e-8 * bias as f32));
            largest_with_0 = largest_with_0.max(moved.abs());
        }
        let (codes, unit) = reference::encode(Coding::Signed, &new.0, &dither);
        m = std::array::from_fn(|at| (codes[at], unit));
        let most = new.1.iter().fold(0.0f32, |most, root| most.max(*root));
        v = std::array::from_fn(|at| {
            let code = (new.1[at] * (255.0 / most) + dither.lanes()[at]).round_ties_even();
            (code.clamp(0.0, 255.0) as u8, most / 255.0)
        });
    }
    assert!(largest < 12.0, "{largest} times the rate");
    assert!(largest_with_0 > 100.0, "{largest_with_0} times the rate");
}
