//! Embeddings trained with moments of 8 bits: rows of very different magnitudes, many of them
//! without a gradient in most steps. Training goes as in f32, and explodes where a root may get
//! code 0.

use fusestep_elementwise::coded::{Coding, Dither, GROUP, reference, units_of};
use fusestep_fused_adam::{
    Adam, AdamTensors, CodedAdamTensors, CodedState, ParamSlices, WeightDecay,
};

/// Tokens, and numbers of a row. Four rows share a group, and so a unit.
const TOKENS: usize = 256;
const WIDTH: usize = 8;
const NUMEL: usize = TOKENS * WIDTH;

const STEPS: u64 = 2000;
const SENTENCES: usize = 16;
const WORDS: usize = 4;

/// Numbers without a pattern that a test would see.
struct Draws(u64);

impl Draws {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let mixed = (self.0 ^ self.0 >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 29
    }

    /// From −1 to 1.
    fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    /// A token; the first is in every fifth place, most in none of a hundred.
    fn token(&mut self) -> usize {
        let share = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        ((TOKENS as f64).powf(share) - 1.0) as usize % TOKENS
    }
}

/// What a token counts for in a sentence: neighbours differ by factors of ten, and so do the
/// gradients of rows of one group.
fn magnitude(token: usize) -> f32 {
    [1.0, 1e-3, 1e-1, 1e-2][token % 4]
}

/// A sentence, and how far its label is off.
struct Sentence {
    tokens: [usize; WORDS],
    noise: f32,
}

/// Sentences of one step, the same for every way of training.
fn sentences(seed: u64, step: u64) -> Vec<Sentence> {
    let mut draws = Draws(seed << 32 | step);
    let drawn = (0..SENTENCES).map(|_| Sentence {
        tokens: std::array::from_fn(|_| draws.token()),
        noise: 0.1 * draws.number(),
    });
    drawn.collect()
}

/// A model that reads a sentence as the sum of its tokens' rows: `Σ magnitude·⟨row, reader⟩`.
struct Task {
    wanted: Vec<f32>,
    reader: [f32; WIDTH],
}

impl Task {
    fn new(seed: u64) -> Self {
        let mut draws = Draws(seed);
        let wanted = (0..NUMEL).map(|_| draws.number()).collect();
        Self { wanted, reader: std::array::from_fn(|_| draws.number()) }
    }

    fn read(&self, rows: &[f32], token: usize) -> f32 {
        let row = &rows[token * WIDTH..][..WIDTH];
        row.iter().zip(&self.reader).map(|(value, read)| value * read).sum()
    }

    /// The mean square of a step's errors; adds to gradients.
    fn loss(&self, rows: &[f32], sentences: &[Sentence], grad: &mut [f32]) -> f32 {
        let mut total = 0.0;
        for Sentence { tokens, noise } in sentences {
            let errors = tokens.iter().map(|&token| {
                magnitude(token) * (self.read(rows, token) - self.read(&self.wanted, token))
            });
            let error = errors.sum::<f32>() + noise;
            total += error * error / sentences.len() as f32;
            for &token in tokens {
                let share = 2.0 * error * magnitude(token) / sentences.len() as f32;
                for (grad, read) in grad[token * WIDTH..][..WIDTH].iter_mut().zip(&self.reader) {
                    *grad += share * read;
                }
            }
        }
        total
    }
}

/// A way to keep moments.
trait Moments {
    fn step(&mut self, adam: &Adam, step: u64, param: &mut [f32], grad: &[f32]);
}

struct Plain([Vec<f32>; 2]);

impl Moments for Plain {
    fn step(&mut self, adam: &Adam, step: u64, param: &mut [f32], grad: &[f32]) {
        let [moment1, moment2] = &mut self.0;
        let tensor = AdamTensors { param, grad, moment1, moment2, max_moment2: None };
        adam.step(step, &mut [tensor]).unwrap();
    }
}

struct Coded {
    codes: [Vec<u8>; 2],
    units: [Vec<f32>; 2],
}

impl Moments for Coded {
    fn step(&mut self, adam: &Adam, step: u64, param: &mut [f32], grad: &[f32]) {
        let ([codes1, codes2], [units1, units2]) = (&mut self.codes, &mut self.units);
        let tensor = CodedAdamTensors {
            param: ParamSlices::F32 { param, grad },
            moment1: CodedState { codes: codes1, units: units1 },
            moment2: CodedState { codes: codes2, units: units2 },
            max_moment2: None,
        };
        adam.step_coded(step, &mut [tensor]).unwrap();
    }
}

/// Codes by the definition, a group at a time, but that a small root may get code `least`.
struct Defined {
    state: Vec<([u8; GROUP], f32, [u8; GROUP], f32)>,
    least: f32,
}

impl Moments for Defined {
    fn step(&mut self, adam: &Adam, step: u64, param: &mut [f32], grad: &[f32]) {
        let dither = Dither::of_step(step);
        let bias = (1.0 - 0.999f64.powi(step as i32)).sqrt();
        let step_size = (adam.lr * bias / (1.0 - 0.9f64.powi(step as i32))) as f32;
        let groups = param.chunks_mut(GROUP).zip(grad.chunks(GROUP)).zip(&mut self.state);
        for ((param, grad), (m, m_unit, v, v_unit)) in groups {
            let mut new = ([0.0; GROUP], [0.0; GROUP]);
            for at in 0..GROUP {
                let (g, root) = (grad[at], f32::from(v[at]) * *v_unit);
                new.0[at] = 0.9 * reference::decode(Coding::Signed, m[at], *m_unit) + 0.1 * g;
                new.1[at] = (0.999 * (root * root) + 0.001 * (g * g)).sqrt();
                param[at] -= step_size * (new.0[at] / (new.1[at] + 1e-8 * bias as f32));
            }
            let (codes, unit) = reference::encode(Coding::Signed, &new.0, &dither);
            *m_unit = unit;
            m.copy_from_slice(&codes);
            let most = new.1.iter().fold(0.0f32, |most, root| most.max(*root));
            *v_unit = most / 255.0;
            for ((v, root), dither) in v.iter_mut().zip(&new.1).zip(dither.lanes()) {
                let code = (root * (255.0 / most) + dither).round_ties_even();
                *v = if most > 0.0 { code.clamp(self.least, 255.0) as u8 } else { 0 };
            }
        }
    }
}

/// How a run ended.
#[derive(Debug)]
struct End {
    /// Loss of the first step.
    first: f32,
    /// Mean loss of the last 200 steps.
    last: f32,
    /// The largest number of all rows.
    largest: f32,
}

fn train(seed: u64, moments: &mut dyn Moments) -> End {
    let task = Task::new(seed);
    let mut adam = Adam { weight_decay: WeightDecay::Decoupled(0.0), ..Adam::default() };
    let mut param = vec![0.0; NUMEL];
    let mut end = End { first: 0.0, last: 0.0, largest: 0.0 };
    for step in 1..=STEPS {
        // Falls to a tenth, so that the end says what was learnt and not how far steps go.
        adam.lr = 0.02 * 0.1f64.powf(step as f64 / STEPS as f64);
        let mut grad = vec![0.0; NUMEL];
        let loss = task.loss(&param, &sentences(seed, step), &mut grad);
        end.first = if step == 1 { loss } else { end.first };
        end.last += if step > STEPS - 200 { loss / 200.0 } else { 0.0 };
        moments.step(&adam, step, &mut param, &grad);
        end.largest = param.iter().fold(end.largest, |most, value| most.max(value.abs()));
    }
    end
}

fn plain(seed: u64) -> End {
    train(seed, &mut Plain([0; 2].map(|_| vec![0.0; NUMEL])))
}

fn coded(seed: u64) -> End {
    let units = [0; 2].map(|_| vec![0.0; units_of(NUMEL)]);
    train(seed, &mut Coded { codes: [0; 2].map(|_| vec![0; NUMEL]), units })
}

fn defined(seed: u64, least: f32) -> End {
    let none = ([0; GROUP], 0.0, [0; GROUP], 0.0);
    train(seed, &mut Defined { state: vec![none; units_of(NUMEL)], least })
}

#[test]
fn embeddings_learn_as_in_f32_and_explode_without_the_least_code() {
    for seed in 1..=3 {
        let (plain, coded) = (plain(seed), coded(seed));
        let (guarded, unguarded) = (defined(seed, 1.0), defined(seed, 0.0));
        // The noise of the labels alone is a third of 0.1², all the rest was learnt.
        assert!(plain.first > 0.1 && plain.last < 0.004, "{plain:?}");
        let near = |a: f32, b: f32, share: f32| (a / b - 1.0).abs() < share;
        assert!(near(coded.last, plain.last, 0.01), "{seed}: {plain:?}, {coded:?}");
        assert!(coded.largest < 1.5 * plain.largest, "{seed}: {plain:?}, {coded:?}");
        // The definition with the least code is what the kernels do; without it rows leap.
        assert!(near(guarded.last, coded.last, 0.01), "{seed}: {coded:?}, {guarded:?}");
        assert!(near(guarded.largest, coded.largest, 0.1), "{seed}: {coded:?}, {guarded:?}");
        let exploded = unguarded.largest > 1e6 && unguarded.last > 1e6;
        assert!(exploded, "{seed}: {unguarded:?}");
    }
}
