//! Handwritten digits, and the task of learning them.

use std::io::Read;

use anyhow::{Context, bail, ensure};
use candle_core::{DType, Result, Tensor, Var};
use flate2::read::GzDecoder;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::images::{CLASSES, Images, PIXELS};
use crate::{Task, Tested, mlp};

/// Largest pixel value in the file.
const MAX_PIXEL: u8 = 16;
/// Images held back for the test: one in five.
const TEST_IMAGES: usize = 360;

const FILE: &[u8] = include_bytes!("../data/digits.csv.gz");

/// Handwritten digits, for a perceptron with two hidden layers: 17,226 elements in 6 variables.
#[derive(Clone, Debug)]
pub struct Digits {
    /// 1,437 images.
    train: Images,
    /// 360 other images.
    test: Images,
}

impl Digits {
    /// Loads the images; `seed` decides which images are held back for the test.
    ///
    /// # Errors
    /// An error if the data in the binary is damaged.
    pub fn load(seed: u64) -> anyhow::Result<Self> {
        let (train, test) = load(seed)?;
        Ok(Self { train, test })
    }
}

impl Task for Digits {
    fn describe(&self) -> String {
        let (train, test) = (self.train.len(), self.test.len());
        format!("{train} training and {test} test images of handwritten digits")
    }

    fn samples(&self) -> usize {
        self.train.len()
    }

    fn tokens(&self) -> &'static str {
        "images"
    }

    fn answers(&self) -> usize {
        CLASSES
    }

    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        mlp::shapes()
    }

    fn start(&self, seed: u64, dtype: DType) -> Result<Vec<Var>> {
        mlp::start(seed, dtype)
    }

    fn loss(&self, vars: &[Var], samples: &[usize]) -> Result<Tensor> {
        mlp::loss(vars, &self.train.select(samples))
    }

    fn test(&self, vars: &[Var]) -> Result<Tested> {
        mlp::test(vars, &self.test)
    }
}

/// Loads training and test images; `seed` decides which are which.
fn load(seed: u64) -> anyhow::Result<(Images, Images)> {
    let mut text = String::new();
    GzDecoder::new(FILE)
        .read_to_string(&mut text)
        .context("the digits in this binary are damaged; build it anew")?;
    let mut rows = text
        .lines()
        .enumerate()
        .map(|(at, line)| row(line).with_context(|| format!("digits, line {}", at + 1)))
        .collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(
        rows.len() > TEST_IMAGES,
        "digits: expected more than {TEST_IMAGES} images, found {}",
        rows.len()
    );
    rows.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    let (mut train, mut test) = (Images::default(), Images::default());
    let (held_back, rest) = rows.split_at(TEST_IMAGES);
    held_back.iter().for_each(|row| test.push(row));
    rest.iter().for_each(|row| train.push(row));
    Ok((train, test))
}

/// One line: 64 pixels, then the digit.
fn row(line: &str) -> anyhow::Result<([f32; PIXELS], u32)> {
    let mut fields = line.split(',').map(str::parse::<u8>);
    let mut pixels = [0.0; PIXELS];
    for pixel in &mut pixels {
        match fields.next() {
            Some(Ok(value)) if value <= MAX_PIXEL => {
                *pixel = f32::from(value) / f32::from(MAX_PIXEL);
            }
            other => bail!("expected a pixel from 0 to {MAX_PIXEL}, found {other:?}"),
        }
    }
    match (fields.next(), fields.next()) {
        (Some(Ok(label)), None) if usize::from(label) < CLASSES => Ok((pixels, label.into())),
        other => bail!("expected a digit as the last field, found {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_digit_is_in_both_parts_and_the_split_is_the_seeds() {
        let (train, test) = load(1).unwrap();
        assert_eq!((train.len(), test.len()), (1437, 360));
        for digit in 0..CLASSES as u32 {
            assert!(train.labels.contains(&digit) && test.labels.contains(&digit));
        }
        assert_eq!(load(1).unwrap().1.labels, test.labels);
        assert_ne!(load(2).unwrap().1.labels, test.labels);
    }

    #[test]
    fn damaged_rows_are_refused() {
        let good = vec!["3"; PIXELS + 1].join(",");
        assert_eq!(row(&good).unwrap().1, 3);
        for bad in [
            "",
            "1,2",
            &good.replacen('3', "17", 1),
            &format!("{good},1"),
            &good.replacen('3', "x", 1),
        ] {
            assert!(row(bad).is_err(), "{bad}");
        }
    }
}
