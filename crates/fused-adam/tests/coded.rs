//! Moments of 8 bits: the loop beside its definition, cuts, edges, and errors.

use std::num::NonZeroUsize;

use fusestep_elementwise::coded::{Coding, Dither, GROUP, reference};
use fusestep_fused_adam::{
    Adam, CodedAdamTensors, CodedState, Objective, ParamSlices, SecondMoment, WeightDecay, units_of,
};
use fusestep_simd::{Pool, join_bf16_24, split_bf16_24};
use half::bf16;

/// Ways to keep a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kept {
    F32,
    Bf16,
    Bf16Remainder8,
}

const ALL_KEPT: [Kept; 3] = [Kept::F32, Kept::Bf16, Kept::Bf16Remainder8];

/// A coded list.
#[derive(Clone, Debug)]
struct List {
    codes: Vec<u8>,
    units: Vec<f32>,
}

impl List {
    fn zeros(numel: usize) -> Self {
        Self { codes: vec![0; numel], units: vec![0.0; units_of(numel)] }
    }

    fn state(&mut self) -> CodedState<'_> {
        CodedState { codes: &mut self.codes, units: &mut self.units }
    }
}

/// A parameter with its gradient and state.
#[derive(Clone, Debug)]
struct Tensor {
    kept: Kept,
    wide: Vec<f32>,
    narrow: Vec<bf16>,
    remainder: Vec<i8>,
    wide_grad: Vec<f32>,
    narrow_grad: Vec<bf16>,
    /// m, v and, with AMSGrad, the largest v.
    lists: Vec<List>,
}

impl Tensor {
    fn new(adam: &Adam, kept: Kept, values: &[f32]) -> Self {
        let numel = values.len();
        let lists = if adam.second_moment == SecondMoment::Largest { 3 } else { 2 };
        let narrow = values.iter().map(|value| match kept {
            Kept::Bf16Remainder8 => bf16::from_bits(split_bf16_24(*value).0),
            _ => bf16::from_f32(*value),
        });
        let remainder = values.iter().map(|value| split_bf16_24(*value).1);
        Self {
            kept,
            wide: values.to_vec(),
            narrow: narrow.collect(),
            remainder: remainder.collect(),
            wide_grad: vec![0.0; numel],
            narrow_grad: vec![bf16::ZERO; numel],
            lists: vec![List::zeros(numel); lists],
        }
    }

    fn set_grad(&mut self, grad: &[f32]) {
        self.wide_grad.copy_from_slice(grad);
        self.narrow_grad = grad.iter().map(|value| bf16::from_f32(*value)).collect();
    }

    fn slices(&mut self) -> CodedAdamTensors<'_> {
        let Self { kept, wide, narrow, remainder, wide_grad, narrow_grad, lists } = self;
        let mut lists = lists.iter_mut().map(List::state);
        CodedAdamTensors {
            param: match kept {
                Kept::F32 => ParamSlices::F32 { param: wide, grad: wide_grad },
                Kept::Bf16 => ParamSlices::Bf16 { param: narrow, grad: narrow_grad },
                Kept::Bf16Remainder8 => {
                    ParamSlices::Bf16Remainder8 { param: narrow, remainder, grad: narrow_grad }
                }
            },
            moment1: lists.next().unwrap(),
            moment2: lists.next().unwrap(),
            max_moment2: lists.next(),
        }
    }

    /// Bits of everything that a step writes; those of NaN are the same.
    fn bits(&self) -> Vec<u32> {
        let bits = |value: &f32| if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() };
        let mut all: Vec<u32> = match self.kept {
            Kept::F32 => self.wide.iter().map(bits).collect(),
            Kept::Bf16 => self.narrow.iter().map(|value| bits(&value.to_f32())).collect(),
            Kept::Bf16Remainder8 => {
                let both = self.narrow.iter().zip(&self.remainder);
                both.map(|(p, q)| u32::from(p.to_bits()) << 8 | u32::from(*q as u8)).collect()
            }
        };
        for list in &self.lists {
            all.extend(list.codes.iter().map(|code| u32::from(*code)));
            all.extend(list.units.iter().map(bits));
        }
        all
    }
}

/// Step scalars by the formulas of the rule.
struct Scalars {
    step_size: f32,
    eps: f32,
    decay: f32,
    l2: f32,
}

fn scalars(adam: &Adam, step: u64) -> Scalars {
    let bias2_sqrt = (1.0 - adam.beta2.powi(step as i32)).sqrt();
    let (decay, l2) = match adam.weight_decay {
        WeightDecay::L2(lambda) => (1.0, lambda),
        WeightDecay::Decoupled(lambda) => (1.0 - adam.lr * lambda, 0.0),
    };
    Scalars {
        step_size: (adam.lr * bias2_sqrt / (1.0 - adam.beta1.powi(step as i32))) as f32,
        eps: (adam.eps * bias2_sqrt) as f32,
        decay: decay as f32,
        l2: l2 as f32,
    }
}

/// One step by the definition, an element and a group at a time.
fn defined(adam: &Adam, step: u64, tensor: &mut Tensor) {
    let Scalars { step_size, eps, decay, l2 } = scalars(adam, step);
    let (beta1, beta2) = (adam.beta1 as f32, adam.beta2 as f32);
    let (rest1, rest2) = ((1.0 - adam.beta1) as f32, (1.0 - adam.beta2) as f32);
    let dither = Dither::of_step(step);
    for group in 0..units_of(tensor.wide.len()) {
        let mut new = vec![Vec::new(); tensor.lists.len()];
        let end = (group * GROUP + GROUP).min(tensor.wide.len());
        for at in group * GROUP..end {
            let (mut p, mut g) = match tensor.kept {
                Kept::F32 => (tensor.wide[at], tensor.wide_grad[at]),
                Kept::Bf16 => (tensor.narrow[at].to_f32(), tensor.narrow_grad[at].to_f32()),
                Kept::Bf16Remainder8 => (
                    join_bf16_24(tensor.narrow[at].to_bits(), tensor.remainder[at]),
                    tensor.narrow_grad[at].to_f32(),
                ),
            };
            if adam.objective == Objective::Maximize {
                g = -g;
            }
            if l2 != 0.0 {
                g += l2 * p;
            }
            let read = |list: usize, coding| {
                let List { codes, units } = &tensor.lists[list];
                reference::decode(coding, codes[at], units[group])
            };
            let m = beta1 * read(0, Coding::Signed) + rest1 * g;
            let v = beta2 * read(1, Coding::Root) + rest2 * (g * g);
            let mut w = v;
            if tensor.lists.len() > 2 {
                let before = read(2, Coding::Root);
                w = if before > v { before } else { v };
                new[2].push(w);
            }
            p = p * decay - step_size * (m / (w.sqrt() + eps));
            new[0].push(m);
            new[1].push(v);
            match tensor.kept {
                Kept::F32 => tensor.wide[at] = p,
                Kept::Bf16 => tensor.narrow[at] = bf16::from_f32(p),
                Kept::Bf16Remainder8 => {
                    let (param, remainder) = split_bf16_24(p);
                    tensor.narrow[at] = bf16::from_bits(param);
                    tensor.remainder[at] = remainder;
                }
            }
        }
        for (at, (list, values)) in tensor.lists.iter_mut().zip(&new).enumerate() {
            let coding = if at == 0 { Coding::Signed } else { Coding::Root };
            let (codes, unit) = reference::encode(coding, values, &dither);
            list.codes[group * GROUP..end].copy_from_slice(&codes);
            list.units[group] = unit;
        }
    }
}

/// A source of numbers.
struct Draws(u64);

impl Draws {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / 16_777_216.0 - 0.5
    }

    /// Gradients, units or parameters of one of eight kinds.
    fn hostile(&mut self, kind: u32) -> f32 {
        match kind % 8 {
            0 => self.unit() * 2.0f32.powi((self.bits() % 20) as i32 - 16),
            1 => 0.0,
            2 => f32::from_bits(self.bits()),
            3 => f32::from_bits(self.bits() & 0x807f_ffff),
            4 => match self.bits() % 40 {
                0 => f32::INFINITY,
                1 => f32::NEG_INFINITY,
                2 => f32::NAN,
                _ => self.unit(),
            },
            5 => self.unit() * 2.0f32.powi((self.bits() % 250) as i32 - 126),
            6 if self.bits().is_multiple_of(8) => self.unit() * 1e-25,
            6 => -0.0,
            _ => 0.25,
        }
    }
}

fn configurations() -> Vec<Adam> {
    let mut all = Vec::new();
    for weight_decay in [WeightDecay::Decoupled(0.01), WeightDecay::L2(0.1)] {
        for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
            for objective in [Objective::Minimize, Objective::Maximize] {
                all.push(Adam { weight_decay, second_moment, objective, ..Adam::default() });
            }
        }
    }
    all.push(Adam { eps: 0.0, ..Adam::default() });
    all
}

#[test]
fn a_step_is_its_definition_bit_for_bit() {
    let mut draws = Draws(1);
    for adam in configurations() {
        for round in 0..120u32 {
            let numel = [0, 1, 31, 32, 33, 63, 64, 65, 97, 300][round as usize % 10];
            let kept = ALL_KEPT[round as usize / 10 % 3];
            let kind = draws.bits();
            let values: Vec<f32> = (0..numel).map(|_| draws.hostile(kind)).collect();
            let mut tensor = Tensor::new(&adam, kept, &values);
            if round % 2 == 1 {
                // Any codes and any units are read.
                for list in &mut tensor.lists {
                    list.codes.fill_with(|| draws.bits() as u8);
                    let kind = draws.bits();
                    list.units.fill_with(|| draws.hostile(kind).abs());
                }
            }
            let mut expected = tensor.clone();
            let first = u64::from(round) * 1000 + 1;
            for step in first..first + 4 {
                let kind = draws.bits();
                let grad: Vec<f32> =
                    (0..numel).map(|at| draws.hostile(kind + at as u32 % 2)).collect();
                for tensor in [&mut tensor, &mut expected] {
                    tensor.set_grad(&grad);
                }
                adam.step_coded(step, &mut [tensor.slices()]).unwrap();
                defined(&adam, step, &mut expected);
                assert_eq!(tensor.bits(), expected.bits(), "{adam:?}, {kept:?}, step {step}");
            }
        }
    }
}

#[test]
fn any_number_of_threads_and_any_cut_between_groups_gives_the_same_bits() {
    let pool = Pool::new(NonZeroUsize::new(3).unwrap());
    let adam = Adam::default();
    for kept in ALL_KEPT {
        let mut draws = Draws(7);
        let numels = [70_001, 31, 0, 32, 1000];
        let values = numels.map(|numel| (0..numel).map(|_| draws.unit()).collect::<Vec<f32>>());
        let mut alone = values.each_ref().map(|values| Tensor::new(&adam, kept, values));
        let mut together = alone.clone();
        // The tensors in parts, of 1 to 9 groups each.
        let parts: Vec<Vec<f32>> = values
            .iter()
            .flat_map(|values| {
                let mut rest = &values[..];
                let mut parts = Vec::new();
                while !rest.is_empty() {
                    let length = (GROUP * (1 + parts.len() % 9)).min(rest.len());
                    let (part, others) = rest.split_at(length);
                    parts.push(part.to_vec());
                    rest = others;
                }
                parts
            })
            .collect();
        let mut cut: Vec<Tensor> =
            parts.iter().map(|values| Tensor::new(&adam, kept, values)).collect();
        for step in 1..=3 {
            let grads: Vec<f32> = (0..numels.iter().sum()).map(|_| draws.unit() * 1e-2).collect();
            let mut all: [&mut [Tensor]; 3] = [&mut alone, &mut together, &mut cut];
            for tensors in &mut all {
                let mut first = 0;
                for tensor in tensors.iter_mut() {
                    let end = first + tensor.wide.len();
                    tensor.set_grad(&grads[first..end]);
                    first = end;
                }
            }
            for (which, tensors) in all.into_iter().enumerate() {
                let mut slices: Vec<_> = tensors.iter_mut().map(Tensor::slices).collect();
                match which {
                    1 => adam.step_coded_with(&pool, step, &mut slices).unwrap(),
                    _ => adam.step_coded(step, &mut slices).unwrap(),
                }
            }
        }
        let by_list = |tensors: &[Tensor]| {
            let params = tensors.iter().flat_map(|tensor| tensor.wide.clone());
            let narrow = tensors.iter().flat_map(|tensor| tensor.narrow.clone());
            let remainder = tensors.iter().flat_map(|tensor| tensor.remainder.clone());
            let lists = (0..2).map(|list| {
                let codes = tensors.iter().flat_map(|tensor| tensor.lists[list].codes.clone());
                let units = tensors.iter().flat_map(|tensor| tensor.lists[list].units.clone());
                (codes.collect::<Vec<u8>>(), units.collect::<Vec<f32>>())
            });
            let params: Vec<f32> = params.collect();
            let narrow: Vec<bf16> = narrow.collect();
            (params, narrow, remainder.collect::<Vec<i8>>(), lists.collect::<Vec<_>>())
        };
        assert!(by_list(&alone) == by_list(&together), "{kept:?}, 3 threads");
        assert!(by_list(&alone) == by_list(&cut), "{kept:?}, cut");
    }
}

#[test]
fn a_group_that_is_not_finite_is_nan_at_the_next_step_and_no_other_is() {
    let adam = Adam::default();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut tensor = Tensor::new(&adam, Kept::F32, &[1.0; 96]);
        let mut grad = [0.5; 96];
        grad[40] = bad;
        tensor.set_grad(&grad);
        adam.step_coded(1, &mut [tensor.slices()]).unwrap();
        assert_eq!(tensor.wide.iter().filter(|value| value.is_nan()).count(), 1, "{bad}");
        assert!(!tensor.lists[1].units[1].is_finite() && tensor.lists[1].units[0].is_finite());
        tensor.set_grad(&[0.5; 96]);
        adam.step_coded(2, &mut [tensor.slices()]).unwrap();
        let nan: Vec<bool> = tensor.wide.iter().map(|value| value.is_nan()).collect();
        let expected: Vec<bool> = (0..96).map(|at| (32..64).contains(&at)).collect();
        assert_eq!(nan, expected, "{bad}");
    }
}

#[test]
fn moments_of_zeros_stay_zeros_and_equal_gradients_give_equal_steps() {
    let adam = Adam { weight_decay: WeightDecay::Decoupled(0.0), ..Adam::default() };
    let mut tensor = Tensor::new(&adam, Kept::F32, &[1.0; 65]);
    for step in 1..=50 {
        tensor.set_grad(&[0.0; 65]);
        adam.step_coded(step, &mut [tensor.slices()]).unwrap();
    }
    assert_eq!(tensor.wide, [1.0; 65]);
    assert_eq!(tensor.lists[0].units, [0.0; 3]);
    assert_eq!(tensor.lists[1].units, [0.0; 3]);
    let mut tensor = Tensor::new(&adam, Kept::F32, &[1.0; 65]);
    tensor.set_grad(&[0.25; 65]);
    adam.step_coded(1, &mut [tensor.slices()]).unwrap();
    assert_eq!(tensor.lists[0].codes, [127; 65]);
    assert_eq!(tensor.lists[1].codes, [255; 65]);
    assert!(tensor.wide.iter().all(|value| value == &tensor.wide[0]), "{:?}", tensor.wide);
    assert!((tensor.wide[0] - 0.999).abs() < 1e-6);
}

#[test]
fn lists_that_do_not_fit_are_named_and_nothing_is_written() {
    let adam = Adam::default();
    let amsgrad = Adam { second_moment: SecondMoment::Largest, ..adam };
    let good = || Tensor::new(&adam, Kept::Bf16Remainder8, &[1.0; 40]);
    let refused = |adam: &Adam, change: &dyn Fn(&mut Tensor)| {
        let (mut first, mut second) = (good(), good());
        first.set_grad(&[1.0; 40]);
        change(&mut second);
        let before = first.bits();
        let tensors = &mut [first.slices(), second.slices()];
        let error = adam.step_coded(1, tensors).unwrap_err().to_string();
        assert_eq!(first.bits(), before);
        error
    };
    for (change, message) in [
        (
            (|tensor| tensor.narrow_grad.truncate(39)) as fn(&mut Tensor),
            "grad of tensor 1: expected 40 elements, found 39",
        ),
        (
            |tensor| tensor.remainder.push(0),
            "remainder of tensor 1: expected 40 elements, found 41",
        ),
        (
            |tensor| tensor.lists[0].codes.truncate(39),
            "moment1 of tensor 1: expected 40 elements, found 39",
        ),
        (
            |tensor| tensor.lists[1].units.truncate(1),
            "units of moment2 of tensor 1: expected 2, one per 32 elements, found 1",
        ),
        (
            |tensor| tensor.lists.push(List::zeros(40)),
            "max_moment2 of tensor 1: expected none, because the second moment is `Running`, found \
             a list",
        ),
    ] {
        assert_eq!(refused(&adam, &change), message);
    }
    let message = "max_moment2 of tensor 0: expected a list, because the second moment is \
                   `Largest`, found none";
    assert_eq!(refused(&amsgrad, &|_| ()), message);
    let error = adam.step_coded(0, &mut []).unwrap_err().to_string();
    assert_eq!(error, "step: expected at least 1, found 0; steps count from 1");
    let error = Adam { beta1: 1.0, ..adam }.step_coded(1, &mut []).unwrap_err().to_string();
    assert_eq!(error, "beta1: expected a value in [0, 1), found 1");
}
